"""Low-rank adaptation (Hu et al. 2021): a frozen projection W with a trained update, W x + (alpha / r) B A x.

    names = add_lora(model, rank=8, alpha=16, targets=("query", "value"))     # freezes all other weights
    …                                                                         # train
    merge_lora(model); unmerge_lora(model)                                    # in place; unmerging is exact
    merged = fold_lora(model)                                                 # a copy without adapters

A (r, inputs) is initialized randomly and B (outputs, r) with zeros, so that the model is unchanged before training.  W
may be quantized; it then stays quantized until `fold_lora` merges the adapter.
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
from monoblock.nn.arguments import check_model
from monoblock.nn.linear import Linear

M = TypeVar("M", bound=nn.Module)

TARGET_ALIASES = {"q": "query", "k": "key", "v": "value", "o": "output"}
STACK_PREFIXES = ("encoder.", "decoder.")  # projections are adapted inside blocks
ALL_TARGETS = "all"


class LoraLinear(nn.Module):
    """A projection with a low-rank adapter: base(x) + (alpha / r) B A x."""

    def __init__(self, base: nn.Module, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        outputs, inputs = linear_shape(base)
        weight = base.weight
        assert isinstance(weight, Tensor)
        self.base, self.rank, self.alpha, self.dropout = base, rank, alpha, dropout
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=weight.dtype, device=weight.device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, dtype=weight.dtype, device=weight.device))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.original: Tensor | None
        self.register_buffer("original", None, persistent=False)  # copy of the base weight while merged
        self.train(base.training)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def delta(self) -> Tensor:
        """The matrix (alpha / r) B A, which merging adds to the weight."""
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
        """Add the adapter to the weight in place; keep a copy of the original weight."""
        if self.original is None:
            weight = self._base_weight()
            self.original = weight.detach().clone()
            weight.add_(self.delta)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the original weight, bit for bit."""
        if self.original is not None:
            self._base_weight().copy_(self.original)
            self.original = None

    def _base_weight(self) -> nn.Parameter:
        weight = self.base._parameters.get("weight")
        if weight is None:
            raise InputError(
                "an adapter cannot be merged into a quantized weight; use fold_lora(model), which returns "
                "a copy with dequantized weights"
            )
        return weight

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return a new nn.Linear with the adapter merged into its weight."""
        outputs, inputs = linear_shape(self.base)
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        weight = weight.detach().clone() if self.original is not None else weight.detach() + self.delta
        linear = Linear(inputs, outputs, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear


def linear_shape(projection: nn.Module) -> tuple[int, int]:
    """Return the shape (outputs, inputs) of a linear layer, which may be quantized or have an adapter."""
    if isinstance(projection, LoraLinear):
        return projection.b.shape[0], projection.a.shape[1]
    if isinstance(projection, nn.Linear):
        return projection.out_features, projection.in_features
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0], weight.shape[1]


# -- models ---------------------------------------------------------------------------------------------------------


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("query", "value"),
    dropout: float = 0.0,
) -> list[str]:
    """Freeze a model and add adapters to projections of its blocks; return the names of those projections.

    A target is the end of a projection's name, such as "query", "cross.value" or "decoder.3.feedforward.up".  "q", "k",
    "v" and "o" stand for "query", "key", "value" and "output", and "all" for every projection.
    """
    check_model(model, nn.Module, "add_lora")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"rank={rank!r} is not a whole number above 0; write 1 or more")
    if any(True for _ in lora_layers(model)):
        raise InputError(
            "this model has adapters already; use fold_lora(model), which returns a copy with the adapters merged"
        )
    names = match_targets(projection_names(model), targets)
    for weight in model.parameters():
        weight.requires_grad_(False)
    for name in names:
        replace_module(model, name, LoraLinear(model.get_submodule(name), rank, float(alpha), dropout))
    return names


def projection_names(model: nn.Module) -> list[str]:
    """Return the names of the linear layers inside blocks, except routers."""
    linear = [name for name, module in model.named_modules() if hasattr(module, "bias") and _is_linear(module)]
    return [name for name in linear if name.startswith(STACK_PREFIXES) and not name.endswith("router")]


def _is_linear(module: nn.Module) -> bool:
    is_quantized = "packed" in module._buffers and hasattr(module, "linear")
    return isinstance(module, nn.Linear) or is_quantized


def match_targets(names: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the names that end in one of the targets; raise ConfigError if a target matches none."""
    matches: set[str] = set()
    for target in targets:
        ending = TARGET_ALIASES.get(target, target)
        matching = [name for name in names if ending == ALL_TARGETS or f".{name}".endswith(f".{ending}")]
        if not matching:
            known = sorted({name.rsplit(".", 1)[-1] for name in names})
            choices = ", ".join([*known, ALL_TARGETS])
            raise ConfigError(
                f"LoRA target {target!r} matches no projection of this model; choose from {choices}"
                f"{did_you_mean(target, known)}"
            )
        matches.update(matching)
    return [name for name in names if name in matches]


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule `name` of a model by `module`, which gets the training mode of the module that has it."""
    path, _, last = name.rpartition(".")
    parent = model.get_submodule(path)
    setattr(parent, last, module.train(parent.training))


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Iterate over the projections that have an adapter, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def merge_lora(model: nn.Module) -> None:
    """Merge every adapter into its weight, in place; the outputs stay the same, and the model is as fast as before."""
    for _, module in _require_lora_layers(model):
        module.merge()


def unmerge_lora(model: nn.Module) -> None:
    """Restore every weight that `merge_lora` changed, bit for bit."""
    for _, module in _require_lora_layers(model):
        module.unmerge()


def _require_lora_layers(model: nn.Module) -> list[tuple[str, LoraLinear]]:
    check_model(model, nn.Module, "merge_lora")
    layers = list(lora_layers(model))
    if not layers:
        raise InputError("this model has no adapters; add them with add_lora(model)")
    return layers


def fold_lora(model: M) -> M:
    """Return a copy with every adapter merged into its weight and removed; all weights of the copy are trainable."""
    check_model(model, nn.Module, "fold_lora")
    folded = copy.deepcopy(model)
    for name, module in list(lora_layers(folded)):
        replace_module(folded, name, module.to_linear())
    for weight in folded.parameters():
        weight.requires_grad_(True)
    return folded
