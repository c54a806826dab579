"""Initialize the weights of a model.

Each scheme is a table of name patterns and initializers; the first pattern that matches the name of a weight decides.
In every scheme norms, gains and sinks keep the values they were built with, and biases are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from monoblock.config.model import ModelConfig
from monoblock.nn.block import Block

Initializer = Callable[[Tensor, ModelConfig, str], None]


def keep_as_built(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Leave the weight unchanged, as its module initialized it."""


def zeros(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.zeros_(weight)


def normal(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.normal_(weight, std=config.init.std)


def residual_normal(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Draw from a normal distribution with standard deviation config.init.std / sqrt(N) (Radford et al. 2019).

    N is the number of residual additions in the stack of this weight, counted as two per block.
    """
    nn.init.normal_(weight, std=config.init.std / math.sqrt(2 * config.stacks[name.split(".")[0]].depth))


def xavier(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Draw from Xavier's uniform distribution (Glorot and Bengio 2010); stacked experts are initialized one by one."""
    for matrix in weight.unbind() if weight.dim() == 3 else [weight]:
        nn.init.xavier_uniform_(matrix)


def normal_by_width(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Draw from a normal distribution with variance 1/D, where D is the width of the model.

    Embeddings that are scaled by sqrt(D), and the logits of a tied output, then have unit variance.
    """
    nn.init.normal_(weight, std=config.width**-0.5)


def normal_by_fan_in(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def unit_normal(weight: Tensor, config: ModelConfig, name: str) -> None:
    nn.init.normal_(weight, std=1.0)


def t5_query(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Draw from a normal distribution with standard deviation 1/sqrt(D·K), where K is the head size.

    It includes the factor 1/sqrt(K) that T5 leaves out of attention (Raffel et al. 2020).
    """
    stack, layer, kind = name.split(".")[:3]
    attention = getattr(list(config.stacks[stack].layers())[int(layer)], kind)
    size = attention.key_size(config.width)
    nn.init.normal_(weight, std=(config.width * size) ** -0.5)


def small_normal(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Draw from a normal distribution with standard deviation sqrt(2 / (5 D)), where D is the width of the model.

    This is the "small" initialization of Nguyen and Salazar (2019).
    """
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * config.width)))


def wang_normal(weight: Tensor, config: ModelConfig, name: str) -> None:
    """Draw from a normal distribution with standard deviation 2 / (L sqrt(D)), where L is the depth and D the width.

    It is used for projections into the residual stream (Black et al. 2022).
    """
    nn.init.normal_(weight, std=2 / (config.depth * math.sqrt(config.width)))


COMMON_RULES: tuple[tuple[str, Initializer], ...] = (
    ("*norm.*", keep_as_built),
    ("*_gain", keep_as_built),
    ("*.sinks", keep_as_built),
    ("*bias", zeros),
)
RESIDUAL_OUTPUTS = (
    "*.attention.output.weight",
    "*.cross.output.weight",
    "*.feedforward.down.weight",
    "*.feedforward.down",
)

SCHEMES: dict[str, tuple[tuple[str, Initializer], ...]] = {
    "normal": (*((name, residual_normal) for name in RESIDUAL_OUTPUTS), ("*", normal)),
    "xavier": (
        ("*.token.weight", normal_by_width),
        ("*.position.weight", normal_by_width),
        ("*position_bias.weight", normal),
        ("input.*_token", normal),
        ("input.registers", normal),
        ("input.patch.weight", normal),
        ("input.first.weight", normal),
        ("input.second.weight", normal),
        ("*", xavier),
    ),
    "t5": (
        ("*.token.weight", unit_normal),
        ("*position_bias.weight", normal_by_width),
        ("input.*_token", normal),
        ("*.query.weight", t5_query),
        ("*", normal_by_fan_in),
    ),
    "small": (*((name, wang_normal) for name in RESIDUAL_OUTPUTS), ("*", small_normal)),
}


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Initialize every weight of a model by the scheme `config.init.kind`, with torch's global random generator.

    Weights that a user's subclass of `Block` adds keep the values that the subclass gave them.
    """
    table = COMMON_RULES + SCHEMES[config.init.kind]
    added = {id(weight) for block in model.modules() if isinstance(block, Block) for weight in _added_weights(block)}
    for name, weight in model.named_parameters():
        if weight.is_meta or id(weight) in added:
            continue  # a meta tensor has no values, but initializing it would still take time
        initializer = next(initializer for pattern, initializer in table if fnmatchcase(name, pattern))
        initializer(weight, config, name)


def _added_weights(block: Block) -> Iterator[Tensor]:
    """Yield the weights of a block that a plain `Block` does not have, and those in modules that replace its own."""
    if type(block) is Block:
        return
    with torch.device("meta"):
        plain = Block(block.config)
    own_modules, own_weights = dict(plain.named_modules()), dict(plain.named_parameters())
    replaced = {
        name for name, module in block.named_modules() if not isinstance(module, type(own_modules.get(name, module)))
    }
    for name, weight in block.named_parameters():
        parents = name.split(".")[:-1]
        if name not in own_weights or any(".".join(parents[:end]) in replaced for end in range(len(parents) + 1)):
            yield weight
