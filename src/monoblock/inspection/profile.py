"""Where time and memory go, measured: attention against feed-forward and the rest, on the user's own machine.

The closed forms of `accounting` say what a pass must cost; this says what it did cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.model import Transformer


@dataclass
class Part:
    """One component: seconds of forward, and bytes kept for backward."""

    seconds: float = 0.0
    kept_bytes: int = 0


@dataclass
class Clock:
    """Charges time and saved tensors to the outermost component that is running."""

    parts: dict[str, Part] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    begun: float = 0.0
    known: set[int] = field(default_factory=set)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            if not self.running:
                self.begun = self.now()
            self.running.append(name)

        return hook

    def leave(self, module: nn.Module, *_: Any) -> None:
        name = self.running.pop()
        if not self.running:
            self.parts.setdefault(name, Part()).seconds += self.now() - self.begun

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor saved for backward; storage counts once, weights not at all."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known.add(storage.data_ptr())
            name = self.running[0] if self.running else "rest"
            self.parts.setdefault(name, Part()).kept_bytes += storage.nbytes()
        return tensor


def _components(model: Transformer) -> dict[str, nn.Module]:
    """The modules to time, by the name they are charged to."""
    found = {name: module for name, module in model.named_children() if name in ("input", "target", "head")}
    for stack in model.config.stacks:
        for name, module in model.get_submodule(stack).named_modules():
            if name.split(".")[-1] in ("attention", "cross", "feedforward") or name.endswith("norm"):
                found[f"{stack}.{name}"] = module
    return found


def _charged_to(name: str) -> str:
    """decoder.3.attention -> decoder.attention; every norm inside blocks -> decoder.block_norms."""
    words = name.split(".")
    if len(words) < 3:
        return name
    return f"{words[0]}.block_norms" if words[-1].endswith("norm") else f"{words[0]}.{words[-1]}"


def profile(model: Transformer, *inputs: Tensor, rounds: int = 3) -> dict[str, Part]:
    """Component -> measured Part, with "rest" for what lies between components and "total" for the whole forward.

    The fastest of `rounds` passes counts, after one to warm up.
    """
    best: dict[str, Part] | None = None
    for turn in range(rounds + 1):
        parts = _one_pass(model, inputs)
        if turn and (best is None or parts["total"].seconds < best["total"].seconds):
            best = parts
    assert best is not None
    return best


def _one_pass(model: Transformer, inputs: tuple[Tensor, ...]) -> dict[str, Part]:
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    clock = Clock(known=weights, device=next(model.parameters()).device)
    handles = []
    for name, module in _components(model).items():
        handles.append(module.register_forward_pre_hook(clock.enter(_charged_to(name))))
        handles.append(module.register_forward_hook(clock.leave))
    try:
        with torch.autograd.graph.saved_tensors_hooks(clock.keep, lambda tensor: tensor):
            begun = clock.now()
            out = model(*inputs)
            seconds = clock.now() - begun
        del out
    finally:
        for handle in handles:
            handle.remove()
    rest = clock.parts.setdefault("rest", Part())
    rest.seconds = seconds - sum(part.seconds for name, part in clock.parts.items() if name != "rest")
    clock.parts["total"] = Part(seconds, sum(part.kept_bytes for part in clock.parts.values()))
    return clock.parts
