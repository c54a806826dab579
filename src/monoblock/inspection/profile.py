"""Measure the time and memory of a forward and a backward pass: by component, by layer, or by kind.

The formulas of `accounting` predict the cost of a pass; this module measures it.  Hooks read a clock before and after
each component; on a GPU they record events, so that the passes are not slowed down by waiting.  There, the kernels are
queued behind a pause, so that they follow one another at once and the time of launching them does not count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from monoblock.config.model import EmbeddingConfig
from monoblock.errors import InputError
from monoblock.nn.transformer import Transformer

GroupBy = Literal["component", "layer", "kind"]
GPU_CYCLES_PER_SECOND = 2e9  # about; only the length of a pause depends on it
INPUTS = ("input", "target")  # their inputs are ids, so that the end of their backward pass cannot be seen


@dataclass
class ComponentCost:
    """The seconds of a component's passes, and the bytes that its forward pass saves for the backward pass."""

    seconds: float = 0.0
    kept_bytes: int = 0
    backward_seconds: float = 0.0

    def __iadd__(self, other: ComponentCost) -> ComponentCost:
        self.seconds += other.seconds
        self.kept_bytes += other.kept_bytes
        self.backward_seconds += other.backward_seconds
        return self


class Clock:
    """Read the time on the CPU, or record an event on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.pause = 0.0  # seconds; the time that the host takes to launch the kernels of a pass

    def start(self) -> Any:
        """Wait for the device and read the time; on a GPU, first queue a pause, behind which the kernels gather."""
        self.wait()
        if self.is_gpu and self.pause:
            torch.cuda._sleep(round(self.pause * GPU_CYCLES_PER_SECOND))
        return self.read()

    def read(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    @staticmethod
    def seconds(start: Any, end: Any) -> float:
        return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


class ComponentTimer:
    """Hooks that note when the outermost component that is running begins and ends, and which tensors it saves."""

    def __init__(self, clock: Clock, ignored_storages: Iterable[int] = ()) -> None:
        self.clock, self.seen_storages = clock, set(ignored_storages)
        self.active: list[str] = []
        self.spans: list[tuple[str, Any, Any]] = []  # a component, and the readings when it began and ended
        self.kept_bytes: Counter[str] = Counter()
        self.start: Any = None

    def enter(self, name: str, *_: Any) -> None:
        if self.active and self.active[-1] in INPUTS and name not in INPUTS:
            self.leave()
        if not self.active:
            self.start = self.clock.read()
        self.active.append(name)

    def leave(self, *_: Any) -> None:
        name = self.active.pop()
        if not self.active:
            self.spans.append((name, self.start, self.clock.read()))

    def enter_with_gradient(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Enter a component when the gradient of its output is known."""
        if output.requires_grad:
            output.register_hook(lambda gradient: self.enter(name))

    def count_saved(self, tensor: Tensor) -> Tensor:
        """Count the bytes of a tensor saved for the backward pass; each storage counts once, and weights do not."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen_storages:
            self.seen_storages.add(storage.data_ptr())
            self.kept_bytes[self.active[0] if self.active else "rest"] += storage.nbytes()
        return tensor

    def seconds_by_name(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for name, start, end in self.spans:
            totals[name] = totals.get(name, 0.0) + Clock.seconds(start, end)
        return totals


def _timed_modules(model: Transformer) -> dict[str, nn.Module]:
    """Return the modules to measure, by their full names."""
    modules = {name: module for name, module in model.named_children() if name in (*INPUTS, "head")}
    for stack in model.config.stacks:
        for name, module in model.get_submodule(stack).named_modules():
            if name.split(".")[-1] in ("attention", "cross", "feedforward") or name.endswith("norm"):
                modules[f"{stack}.{name}"] = module
    return modules


def _component_name(name: str) -> str:
    """Return "decoder.attention" for "decoder.3.attention", and "decoder.block_norms" for every norm inside a block."""
    parts = name.split(".")
    if len(parts) < 3:
        return name
    return f"{parts[0]}.block_norms" if parts[-1].endswith("norm") else f"{parts[0]}.{parts[-1]}"


def _kind_name(name: str) -> str:
    last = name.split(".")[-1]
    return "norm" if last.endswith("norm") else {"cross": "attention", "target": "input"}.get(last, last)


GROUPS: dict[str, Callable[[str], str]] = {
    "component": _component_name,
    "layer": lambda name: ".".join(name.split(".")[:2]),
    "kind": _kind_name,
}


def profile(
    model: Transformer, *inputs: Tensor, rounds: int = 3, backward: bool = False, by: GroupBy = "component"
) -> dict[str, ComponentCost]:
    """Measure a forward pass and, with `backward`, a backward pass from the mean of the outputs.

    Return the cost of every part, of the "rest" outside of the parts, and the "total".  After one pass to warm up,
    `rounds` passes are measured, and the costs of the fastest are returned.

    by: parts are components ("decoder.attention"), layers ("decoder.3"), or kinds ("attention", "feedforward", "norm").
    """
    if by not in GROUPS:
        raise InputError(f"there is no grouping {by!r}; write one of {', '.join(GROUPS)}")
    clock = Clock(next(iter(model.parameters())).device)
    passes = [_profile_pass(model, inputs, backward, clock) for _ in range(rounds + 1)][1:]
    fastest = min(passes, key=lambda costs: costs["total"].seconds + costs["total"].backward_seconds)
    grouped: dict[str, ComponentCost] = {}
    for name, cost in fastest.items():
        grouped.setdefault(GROUPS[by](name), ComponentCost()).__iadd__(cost)
    return grouped


def _profile_pass(
    model: Transformer, inputs: tuple[Tensor, ...], backward: bool, clock: Clock
) -> dict[str, ComponentCost]:
    """Measure one pass; return the cost of every timed module by its full name, of the rest, and in total."""
    forward = ComponentTimer(clock, (p.untyped_storage().data_ptr() for p in model.parameters()))
    reverse = ComponentTimer(clock)
    handles: list[Any] = []
    for name, module in _timed_modules(model).items():
        handles.append(module.register_forward_pre_hook(partial(forward.enter, name)))
        handles.append(module.register_forward_hook(forward.leave))
        if backward and name in INPUTS:
            handles.append(module.register_forward_hook(partial(reverse.enter_with_gradient, name)))
        elif backward:
            handles.append(module.register_full_backward_pre_hook(partial(reverse.enter, name)))
            handles.append(module.register_full_backward_hook(reverse.leave))
    middle_of_both = end = None
    try:
        with torch.autograd.graph.saved_tensors_hooks(forward.count_saved, lambda tensor: tensor):
            start = clock.start()
            launch = time.perf_counter()
            output = model(*inputs)
            middle = clock.read()
            clock.pause = time.perf_counter() - launch
        if backward:
            value = output.float().mean()
            middle_of_both = clock.start()
            value.backward()
            while reverse.active:
                reverse.leave()
            end = clock.read()
        clock.wait()
    finally:
        for handle in handles:
            handle.remove()
        if backward:
            model.zero_grad(set_to_none=True)
    seconds, backward_seconds, kept = forward.seconds_by_name(), reverse.seconds_by_name(), forward.kept_bytes
    total = ComponentCost(Clock.seconds(start, middle), sum(kept.values()))
    if backward:
        total.backward_seconds = Clock.seconds(middle_of_both, end)
    rest = ComponentCost(total.seconds, kept.pop("rest", 0), total.backward_seconds)
    costs = {
        name: ComponentCost(seconds.get(name, 0.0), kept[name], backward_seconds.get(name, 0.0))
        for name in dict.fromkeys([*seconds, *backward_seconds, *kept])
    }
    for cost in costs.values():
        rest.seconds -= cost.seconds
        rest.backward_seconds -= cost.backward_seconds
    return costs | {"rest": rest, "total": total}


class ProfileRow(NamedTuple):
    """The cost of a pass over `batch` texts of `length` tokens."""

    length: int
    batch: int
    costs: dict[str, ComponentCost]


def profile_sweep(
    model: Transformer,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    backward: bool = True,
    by: GroupBy = "kind",
    rounds: int = 3,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterable[ProfileRow]:
    """Measure passes over random tokens of every length in batches of every size; yield one row for each."""
    config = model.config
    if not isinstance(config.input, EmbeddingConfig):
        raise InputError("a sweep over lengths is for models of text; profile this one on an input of its own")
    for length in lengths:
        if config.context is not None and length > config.context:
            raise InputError(f"length {length} is beyond the context of this model; give at most {config.context}")
    for batch in batches:
        for length in lengths:
            ids = torch.randint(config.input.vocab, (batch, length), device=model.device)
            inputs = (ids, ids) if config.family == "encoder-decoder" else (ids,)
            yield ProfileRow(length, batch, profile(model, *inputs, rounds=rounds, backward=backward, by=by))
            progress(1)
