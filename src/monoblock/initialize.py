"""Which weight starts from which distribution: a table a scheme, read from the top, the first name that fits decides.

Norms, gains and sinks start as they are built (scale one, shift zero); biases start at zero in every scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from monoblock.config import ModelConfig

Draw = Callable[[Tensor, ModelConfig, str], None]


def keep(weight: Tensor, config: ModelConfig, name: str) -> None:
    """As it was built."""


def zeros(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.zeros_(weight)


def normal(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.normal_(weight, std=config.init.std)


def residual(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Smaller by sqrt of the number of residual additions, so that the stream keeps its size (Radford et al. 2019)."""
    nn.init.normal_(weight, std=config.init.std / math.sqrt(2 * config.stacks[name.split(".")[0]].depth))


def xavier(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Uniform, by fan in and fan out (Glorot and Bengio 2010); of stacked experts each by itself."""
    for matrix in weight.unbind() if weight.dim() == 3 else [weight]:
        nn.init.xavier_uniform_(matrix)


def by_width(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Variance 1/D: unit variance once scaled by sqrt(D), and for logits when tied."""
    nn.init.normal_(weight, std=config.width**-0.5)


def by_fan_in(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def unit(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.normal_(weight, std=1.0)


def t5_query(weight: Tensor, config: ModelConfig, name: str) -> None:
    """The 1/sqrt(K) that T5's unscaled scores lack is put into the queries."""
    stack, layer, kind = name.split(".")[:3]
    attention = getattr(list(config.stacks[stack].layers())[int(layer)], kind)
    size = attention.key_size(config.width)
    nn.init.normal_(weight, std=(config.width * size) ** -0.5)


def small(weight: Tensor, config: ModelConfig, name: str) -> None:
    """sqrt(2 / 5D) (Nguyen and Salazar 2019)."""
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * config.width)))


def wang(weight: Tensor, config: ModelConfig, name: str) -> None:
    """2 / (L sqrt(D)) for what is added to the stream (Black et al. 2022)."""
    nn.init.normal_(weight, std=2 / (config.depth * math.sqrt(config.width)))


ALWAYS: tuple[tuple[str, Draw], ...] = (
    ("*norm.weight", keep),
    ("*norm.bias", keep),
    ("*_gain", keep),
    ("*.sinks", keep),
    ("*bias", zeros),
)
ADDED = ("*.attention.output.weight", "*.cross.output.weight", "*.feedforward.down.weight", "*.feedforward.down")

SCHEMES: dict[str, tuple[tuple[str, Draw], ...]] = {
    "normal": (*((name, residual) for name in ADDED), ("*", normal)),
    "xavier": (
        ("*.token.weight", by_width),
        ("*.position.weight", by_width),
        ("*position_bias.weight", normal),
        ("input.*_token", normal),
        ("input.registers", normal),
        ("input.patch.weight", normal),
        ("input.first.weight", normal),
        ("input.second.weight", normal),
        ("*", xavier),
    ),
    "t5": (
        ("*.token.weight", unit),
        ("*position_bias.weight", by_width),
        ("input.*_token", normal),
        ("*.query.weight", t5_query),
        ("*", by_fan_in),
    ),
    "small": (*((name, wang) for name in ADDED), ("*", small)),
}


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Draw every weight anew from torch's global generator."""
    table = ALWAYS + SCHEMES[config.init.kind]
    for name, weight in model.named_parameters():
        if weight.is_meta:
            continue  # nothing to draw, and on the meta device even that takes its time
        draw = next(draw for pattern, draw in table if fnmatchcase(name, pattern))
        draw(weight, config, name)
