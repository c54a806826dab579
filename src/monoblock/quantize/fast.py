"""A model made ready for decoding on the CPU: its matrices multiply a few rows where they lie, without being widened.

`prepared(model)` is the one place that chooses.  It returns a copy of the modules around the same tensors, so nothing
is stored twice; where no kernel serves (another device, another dtype, many rows, gradients), the plain way is run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.model import Transformer
from monoblock.native.library import load
from monoblock.quantize.convert import TABLES, put, sharing
from monoblock.quantize.modules import Quantized, QuantizedEmbedding, QuantizedLinear
from monoblock.quantize.packing import Packed, unpack

CHUNK = 32  # a dense row must be so many numbers, or a multiple
# Rows of x that the kernel is given, by how the weight is stored (benchmarks/matvec.py --rows N).  Many rows are worth
# widening what is stored small.  One row gets the very sums that it gets among several.
FEW = {"dense": range(1, 9), "half": range(1, 9), "int8": range(1, 33), "int4": range(1, 33)}


class Fast(nn.Module):
    """x (…, inputs) times a stored matrix, by the kernel for its format."""

    bias: Tensor | None

    def __init__(self, stored: Packed | Tensor, inputs: int, bias: Tensor | None = None) -> None:
        super().__init__()
        parts = (stored,) if isinstance(stored, Tensor) else tuple(part for part in stored if part is not None)
        self.inputs, self.count = inputs, len(parts)
        self.kind = {1: "dense", 2: "int8", 3: "int4"}[len(parts)]
        for number, part in enumerate(parts):
            self.register_buffer(str(number), part, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.few = FEW["half" if parts[0].dtype == torch.bfloat16 else self.kind]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers[str(number)] for number in range(self.count))  # type: ignore[misc]

    @property
    def weight(self) -> Tensor:
        return self.wide(torch.float32)

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self.parts[0].to(dtype) if self.kind == "dense" else unpack(Packed(*self.parts), self.inputs, dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._serves(x):
            return getattr(torch.ops.monoblock, self.kind)(x, *self.parts, bias)
        return F.linear(x, self.wide(x.dtype), bias)

    def _serves(self, x: Tensor) -> bool:
        if x.dtype != torch.float32 or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            return False
        return x.numel() // self.inputs in self.few

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class FastTable(Fast):
    """A table of tokens: looked up by ids, multiplied for logits."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "dense":
            return F.embedding(ids, self.parts[0])
        return unpack(Packed(*(part[ids] for part in self.parts)), self.inputs)


def joined(modules: Iterable[nn.Module]) -> Fast | None:
    """Matrices that read the same x as one (query, key and value; gate and up), their outputs side by side.

    None where they are stored in different ways, or only some have a bias.  The rows are copied together.
    """
    every = [module if isinstance(module, Fast) else _fast(module) for module in modules]
    found = [one for one in every if one is not None]
    alike = {(one.kind, one.inputs, one.bias is None, one.parts[-1].shape[-1]) for one in found}
    if len(found) < len(every) or len(alike) != 1:
        return None
    parts = [torch.cat(same) for same in zip(*(one.parts for one in found), strict=True)]
    biases = [one.bias for one in found if one.bias is not None]
    stored = parts[0] if found[0].kind == "dense" else Packed(*parts)
    return Fast(stored, found[0].inputs, torch.cat(biases) if biases else None)


def prepared(model: Transformer) -> Transformer:
    """A copy for decoding around the same tensors, or the model itself where there is nothing to gain."""
    if next(iter(model.state_dict().values())).device.type != "cpu" or not load().ready:
        return model
    made = sharing(model).eval()
    for path, module in list(made.named_modules()):
        fast = _fast(module) if path in TABLES or not isinstance(module, nn.Embedding) else None
        if fast is not None:
            parent, _, name = path.rpartition(".")
            put(made.get_submodule(parent), name, fast)
    return made


def _fast(module: nn.Module) -> Fast | None:
    """The fast module for a matrix, None where no kernel serves it."""
    if isinstance(module, QuantizedEmbedding):
        return FastTable(module.stored, module.inputs) if module.dtype == torch.float32 else None
    if isinstance(module, QuantizedLinear):
        return Fast(module.stored, module.inputs, module.bias)
    if isinstance(module, Quantized) or not isinstance(module, (nn.Linear, nn.Embedding)):
        return None
    weight = module.weight.detach()
    fits = weight.shape[-1] % CHUNK == 0 and weight.is_contiguous() and weight.dtype == torch.float32
    if not fits:
        return None
    return (
        Fast(weight, weight.shape[-1], module.bias)
        if isinstance(module, nn.Linear)
        else FastTable(weight, weight.shape[-1])
    )
