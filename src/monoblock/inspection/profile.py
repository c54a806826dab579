"""Measure the time and memory of a forward pass by component: attention, feed-forward, norms, embedding, head.

The formulas of `accounting` predict the cost of a pass; this module measures it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.nn.transformer import Transformer


@dataclass
class ComponentCost:
    """The seconds of a component's forward pass, and the bytes it saves for the backward pass."""

    seconds: float = 0.0
    kept_bytes: int = 0


@dataclass
class ComponentTimer:
    """Forward hooks that add time and saved tensors to the cost of the outermost component that is running."""

    costs: dict[str, ComponentCost] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    start_time: float = 0.0
    seen_storages: set[int] = field(default_factory=set)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def make_enter_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            if not self.active:
                self.start_time = self.now()
            self.active.append(name)

        return hook

    def exit_hook(self, module: nn.Module, *_: Any) -> None:
        name = self.active.pop()
        if not self.active:
            self.costs.setdefault(name, ComponentCost()).seconds += self.now() - self.start_time

    def saved_tensor_hook(self, tensor: Tensor) -> Tensor:
        """Count the bytes of a tensor saved for the backward pass; each storage counts once, and weights do not."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen_storages:
            self.seen_storages.add(storage.data_ptr())
            name = self.active[0] if self.active else "rest"
            self.costs.setdefault(name, ComponentCost()).kept_bytes += storage.nbytes()
        return tensor


def _timed_modules(model: Transformer) -> dict[str, nn.Module]:
    """Return the modules to measure, by their full names."""
    modules = {name: module for name, module in model.named_children() if name in ("input", "target", "head")}
    for stack in model.config.stacks:
        for name, module in model.get_submodule(stack).named_modules():
            if name.split(".")[-1] in ("attention", "cross", "feedforward") or name.endswith("norm"):
                modules[f"{stack}.{name}"] = module
    return modules


def _component_name(name: str) -> str:
    """Return the component that a module belongs to.

    It is "decoder.attention" for "decoder.3.attention", and "decoder.block_norms" for every norm inside a block.
    """
    parts = name.split(".")
    if len(parts) < 3:
        return name
    return f"{parts[0]}.block_norms" if parts[-1].endswith("norm") else f"{parts[0]}.{parts[-1]}"


def profile(model: Transformer, *inputs: Tensor, rounds: int = 3) -> dict[str, ComponentCost]:
    """Measure a forward pass; return the cost of every component, of the "rest" outside components, and the "total".

    After one pass to warm up, `rounds` passes are measured, and the costs of the fastest pass are returned.
    """
    best: dict[str, ComponentCost] | None = None
    for pass_index in range(rounds + 1):
        costs = _profile_pass(model, inputs)
        if pass_index and (best is None or costs["total"].seconds < best["total"].seconds):
            best = costs
    assert best is not None
    return best


def _profile_pass(model: Transformer, inputs: tuple[Tensor, ...]) -> dict[str, ComponentCost]:
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    timer = ComponentTimer(seen_storages=weights, device=next(model.parameters()).device)
    handles = []
    for name, module in _timed_modules(model).items():
        handles.append(module.register_forward_pre_hook(timer.make_enter_hook(_component_name(name))))
        handles.append(module.register_forward_hook(timer.exit_hook))
    try:
        with torch.autograd.graph.saved_tensors_hooks(timer.saved_tensor_hook, lambda tensor: tensor):
            start = timer.now()
            output = model(*inputs)
            seconds = timer.now() - start
        del output
    finally:
        for handle in handles:
            handle.remove()
    rest = timer.costs.setdefault("rest", ComponentCost())
    rest.seconds = seconds - sum(cost.seconds for name, cost in timer.costs.items() if name != "rest")
    timer.costs["total"] = ComponentCost(seconds, sum(cost.kept_bytes for cost in timer.costs.values()))
    return timer.costs
