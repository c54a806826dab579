"""Record activations of a forward pass by name, as in `trace(model, ids, names="decoder.*.attention.weights")`."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.nn.kv_cache.cache import Cache


class RecordingTap:
    """A tap that keeps the activations whose names match one of the patterns.

    Activations that cost extra to compute are computed only if they match.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self.activations: dict[str, Tensor] = {}
        self.names: list[str] = []

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.names.append(name)
        if self.wants(name):
            self.activations[name] = tensor.detach()
        return tensor


class Trace(dict[str, Tensor]):
    """Activations by name, and the logits of the same pass."""

    logits: Tensor


@torch.no_grad()
def trace(
    model: nn.Module, *inputs: Tensor, names: str | Iterable[str] = "*", **options: Tensor | Cache | None
) -> Trace:
    """Run a model once and record its activations; `names` are patterns such as "decoder.*.attention.weights"."""
    recorder = RecordingTap((names,) if isinstance(names, str) else tuple(names))
    logits = model(*inputs, tap=recorder, **options)
    if not recorder.activations:
        names = ", ".join(dict.fromkeys(recorder.names[:6]))
        raise InputError(
            f"no activation matches {' or '.join(recorder.patterns)}; write patterns for names such as {names}"
        )
    result = Trace(recorder.activations)
    result.logits = logits
    return result
