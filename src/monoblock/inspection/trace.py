"""Run a model once and keep what it computed, by name: `trace(model, ids, names="decoder.*.attention.weights")`."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.errors import InputError


class Recorder:
    """A tap that keeps the activations whose names fit, and asks for costly ones only then."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self.kept: dict[str, Tensor] = {}
        self.seen: list[str] = []

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.seen.append(name)
        if self.wants(name):
            self.kept[name] = tensor.detach()
        return tensor


class Trace(dict[str, Tensor]):
    """Activations by name, and the logits of the pass that made them."""

    logits: Tensor


@torch.no_grad()
def trace(model: nn.Module, *inputs: Tensor, names: str | Iterable[str] = "*", **options: Any) -> Trace:
    """One pass with a recording tap; `names` are patterns such as "decoder.*.attention.weights"."""
    recorder = Recorder((names,) if isinstance(names, str) else tuple(names))
    logits = model(*inputs, tap=recorder, **options)
    if not recorder.kept:
        listed = ", ".join(dict.fromkeys(recorder.seen[:6]))
        raise InputError(f"no activation is named {' or '.join(recorder.patterns)}; there are {listed}, …")
    seen = Trace(recorder.kept)
    seen.logits = logits
    return seen
