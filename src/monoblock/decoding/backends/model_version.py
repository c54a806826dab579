"""Find out whether a model was changed between two steps of `stream`, in a few microseconds per block.

    version = ModelVersion(model)
    version.has_changed()       # True after a hook, a module or a weight was added, replaced or written in place

Writes through `.data`, patched classes and replaced attributes such as masks are not noticed here; they take effect in
the next call of `generate` or `stream`.
"""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from monoblock.nn.modules.tree import list_modules


class ModelVersion:
    """A record of the modules, tensors and hooks that a model has at one moment."""

    def __init__(self, model: nn.Module) -> None:
        modules = list_modules(model)
        tensors = [*model.parameters(), *model.buffers()]
        self._containers = [d for m in modules for d in (m._modules, m._parameters, m._buffers) if d]
        self._attributes = [m.__dict__ for m in modules]  # `module.forward = …` adds one
        self._tensors = tensors
        self._counted = [t for t in tensors if not t.is_inference()]  # tensors that count the writes to them
        self._state = self._read()

    def has_changed(self) -> bool:
        return self._read() != self._state

    def _read(self) -> tuple[object, ...]:
        return (
            RemovableHandle.next_id,  # counts the hooks that were ever registered, on any module
            [id(value) for container in self._containers for value in container.values()],
            [len(attributes) for attributes in self._attributes],
            [tensor.data_ptr() for tensor in self._tensors],
            [tensor._version for tensor in self._counted],
        )
