"""Low-rank adaptation (Hu et al. 2021): a frozen projection W learns beside itself, W x + (alpha / r) B A x.

    added = add_lora(model, rank=8, alpha=16, targets=("query", "value"))     # all else is frozen
    …                                                                         # train
    merge_lora(model); unmerge_lora(model)                                    # in place; the second is exact
    plain = folded(model)                                                     # the same Transformer without adapters

A (r, inputs) starts at random and B (outputs, r) at zero, so that the model is unchanged before the first step.  W may
be stored small (quantize/): it is only ever multiplied with, and widened where it is merged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.errors import ConfigError, InputError, did_you_mean

M = TypeVar("M", bound=nn.Module)

SHORT = {"q": "query", "k": "key", "v": "value", "o": "output"}
STACKS = ("encoder.", "decoder.")  # projections are adapted inside blocks
ALL = "all"


class Adapted(nn.Module):
    """A projection with a second, narrow way beside it."""

    def __init__(self, base: nn.Module, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        outputs, inputs = size_of(base)
        weight = base.weight
        assert isinstance(weight, Tensor)
        self.base, self.rank, self.alpha, self.dropout = base, rank, alpha, dropout
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=weight.dtype, device=weight.device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, dtype=weight.dtype, device=weight.device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.original: Tensor | None
        self.register_buffer("original", None, persistent=False)  # the base's weight, kept while it is merged
        self.train(base.training)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def delta(self) -> Tensor:
        """What the adapter adds to the weight: (alpha / r) B A."""
        return (self.b @ self.a) * self.scale

    @property
    def bias(self) -> Tensor | None:
        bias = self.base.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.original is not None:
            return out
        narrow = F.linear(F.dropout(x, self.dropout, self.training), self.a)
        return out + F.linear(narrow, self.b) * self.scale

    @torch.no_grad()
    def merge(self) -> None:
        """Put the adapter into the weight; the weight as it was is kept."""
        if self.original is None:
            weight = self._weight()
            self.original = weight.detach().clone()
            weight.add_(self.delta)

    @torch.no_grad()
    def unmerge(self) -> None:
        """The weight as it was, bit for bit."""
        if self.original is not None:
            self._weight().copy_(self.original)
            self.original = None

    def _weight(self) -> nn.Parameter:
        weight = self.base._parameters.get("weight")
        if weight is None:
            raise InputError("weights stored in 8 or 4 bits have no room for an adapter; fold it into a copy instead")
        return weight

    @torch.no_grad()
    def folded(self) -> nn.Linear:
        """An ordinary linear layer that does the same."""
        outputs, inputs = size_of(self.base)
        full = self.base.weight
        assert isinstance(full, Tensor)
        full = full.detach().clone() if self.original is not None else full.detach() + self.delta
        made = nn.Linear(inputs, outputs, bias=self.bias is not None, device="meta")
        made.weight = nn.Parameter(full)
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach().clone())
        return made


def size_of(projection: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, however it is stored."""
    if isinstance(projection, Adapted):
        return projection.b.shape[0], projection.a.shape[1]
    if isinstance(projection, nn.Linear):
        return projection.out_features, projection.in_features
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0], weight.shape[1]


# -- a whole model ----------------------------------------------------------------------------------------------------


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("query", "value"),
    dropout: float = 0.0,
) -> list[str]:
    """Freeze a model and put adapters beside the named projections of its blocks; the names of those.

    A target is the end of a projection's name, as in "query", "cross.value" or "decoder.3.feedforward.up"; q, k, v
    and o are short for the four of attention, and "all" is every one.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"rank={rank!r} cannot be: an adapter has a rank of 1 or more")
    if any(True for _ in adapted(model)):
        raise InputError("this model has adapters already; merge or fold them first")
    chosen = chosen_by(projections(model), targets)
    for weight in model.parameters():
        weight.requires_grad_(False)
    for name in chosen:
        replace(model, name, Adapted(model.get_submodule(name), rank, float(alpha), dropout))
    return chosen


def projections(model: nn.Module) -> list[str]:
    """The names of the linear layers inside blocks."""
    linear = [name for name, module in model.named_modules() if hasattr(module, "bias") and _is_matrix(module)]
    return [name for name in linear if name.startswith(STACKS) and not name.endswith("router")]


def _is_matrix(module: nn.Module) -> bool:
    quantised = "packed" in module._buffers and hasattr(module, "product")
    return isinstance(module, nn.Linear) or quantised


def chosen_by(names: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The names that end in one of the targets; a target that fits none is refused."""
    found: set[str] = set()
    for target in targets:
        word = SHORT.get(target, target)
        fitting = [name for name in names if word == ALL or name == word or name.endswith(f".{word}")]
        if not fitting:
            known = sorted({name.rsplit(".", 1)[-1] for name in names})
            said = did_you_mean(target, known)
            raise ConfigError(f"LoRA target {target!r} is no projection of this model{said}: {', '.join(known)}, {ALL}")
        found.update(fitting)
    return [name for name in names if name in found]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, module)


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The adapters of a model by the names of their projections."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapted))


def merge_lora(model: nn.Module) -> None:
    """Put every adapter into its weight: the same outputs, and as fast as without."""
    for _, module in _some(model):
        module.merge()


def unmerge_lora(model: nn.Module) -> None:
    """Every weight as it was before the merging, bit for bit."""
    for _, module in _some(model):
        module.unmerge()


def _some(model: nn.Module) -> list[tuple[str, Adapted]]:
    found = list(adapted(model))
    if not found:
        raise InputError("this model has no adapters; add_lora puts some beside its projections")
    return found


def folded(model: M) -> M:
    """A copy in which adapters are part of the weights: a plain model again, all of it trainable."""
    made = copy.deepcopy(model)
    for name, module in list(adapted(made)):
        replace(made, name, module.folded())
    for weight in made.parameters():
        weight.requires_grad_(True)
    return made
