"""How a training run is spread over GPUs, and the part of every block that one rank of a tensor-parallel group holds.

    ddp        every rank has all weights and a part of the batch
    fsdp       every rank has a shard of the weights, gradients and optimizer states, and a part of the batch
    tp         groups of `tensor` ranks split every block and compute the same part of the batch together
    fsdp+tp    as tp, and the weights of a group are sharded over all groups
    pp         groups of `pipeline` ranks each hold some of the layers and pass activations on

The ranks that `tensor` and `pipeline` leave are the data dimension. Ranks are numbered with the tensor dimension
innermost, then the data dimension, then the pipeline, so that a tensor-parallel group lies within a node.

In a tensor-parallel group, heads and hidden features are divided: query, key, value, up and gate by their outputs, the
output matrix and down by their inputs, the token embedding and the output of the head by the vocabulary. Norms and all
biases that are added to the hidden states are on every rank, as are keys and values whose heads cannot be divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from monoblock.accounting.parameters import attention_linears, block_matrix_weights, block_parameters
from monoblock.config.model import AttentionConfig, BlockConfig, ModelConfig
from monoblock.errors import ConfigError, did_you_mean

GPUS_PER_NODE = 8


class Strategy(NamedTuple):
    """The dimensions of a strategy besides the data dimension, and whether the data dimension shards the weights."""

    splits: tuple[str, ...] = ()
    shards: bool = False


STRATEGIES = {
    "ddp": Strategy(),
    "fsdp": Strategy(shards=True),
    "tp": Strategy(("tensor",)),
    "fsdp+tp": Strategy(("tensor",), shards=True),
    "pp": Strategy(("pipeline",)),
}


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The number of ranks in each dimension; their product is the number of GPUs.

    Ranks of the `data` dimension have equal weights, those of the `shard` dimension have a shard each; both compute
    different parts of the batch.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "shard", "tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small; write 1 or more")

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def batch_parts(self) -> int:
        """The number of ranks, or groups of ranks, that compute different parts of the batch."""
        return self.data * self.shard

    def crosses_nodes(self, dimension: str, gpus_per_node: int = GPUS_PER_NODE) -> bool:
        """Return whether the ranks of a group along a dimension are on more than one node."""
        stride = 1
        for name in ("tensor", "shard", "data", "pipeline"):
            span = stride * getattr(self, name)
            if name == dimension:
                return span > gpus_per_node
            stride = span
        raise ConfigError(f"{dimension!r} is not one of tensor, shard, data, pipeline")


# -- choosing the sizes ------------------------------------------------------------------------------------------------


def plan_ranks(
    config: ModelConfig,
    strategy: str,
    gpus: int,
    *,
    tensor: int | None = None,
    pipeline: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
) -> ParallelPlan:
    """Divide `gpus` GPUs into the dimensions of a strategy.

    By default `tensor` is the number of GPUs in a node, or the largest number below that divides `gpus`, all heads,
    all key/value heads and all hidden sizes; `pipeline` is likewise the largest number that divides `gpus` and is not
    larger than the number of layers.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy={strategy!r} is not one of {', '.join(STRATEGIES)}{did_you_mean(strategy, STRATEGIES)}"
        )
    if gpus < 1:
        raise ConfigError(f"gpus={gpus} is too small; write 1 or more")
    splits, shards = STRATEGIES[strategy]
    for name, value in (("tensor", tensor), ("pipeline", pipeline)):
        if value is not None and name not in splits:
            owners = " or ".join(key for key, row in STRATEGIES.items() if name in row.splits)
            raise ConfigError(
                f"{name}={value} has no effect with strategy={strategy!r}; leave it out, or write {owners}"
            )
    limit = min(gpus, gpus_per_node)
    sizes = {"tensor": 1, "pipeline": 1}
    if "tensor" in splits:
        sizes["tensor"] = tensor if tensor is not None else _largest(limit, gpus, _tensor_divisors(config))
        _check_tensor(config, sizes["tensor"])
    if "pipeline" in splits:
        depth = _pipeline_depth(config)
        sizes["pipeline"] = pipeline if pipeline is not None else _largest(min(limit, depth), gpus, [])
        if sizes["pipeline"] > depth:
            raise ConfigError(f"pipeline={sizes['pipeline']} is more than the {depth} layers of this model")
    used = sizes["tensor"] * sizes["pipeline"]
    if splits and used == 1 and gpus > 1 and tensor is None and pipeline is None:
        divided = "heads and hidden sizes" if "tensor" in splits else "layers"
        raise ConfigError(
            f"strategy={strategy!r} cannot divide the {divided} of this model among GPUs of a node: no divisor of "
            f"gpus={gpus} fits; write another number of GPUs, or strategy={'fsdp' if shards else 'ddp'}"
        )
    if used < 1 or gpus % used:
        name = splits[0]
        raise ConfigError(f"{name}={sizes[name]} does not divide gpus={gpus}; write a divisor, or leave {name} out")
    return ParallelPlan(**sizes, **{"shard" if shards else "data": gpus // used})


def _largest(limit: int, gpus: int, multiples: list[int]) -> int:
    """Return the largest number up to `limit` that divides `gpus` and all `multiples`."""
    return next(n for n in range(limit, 0, -1) if gpus % n == 0 and all(m % n == 0 for m in multiples))


def _blocks(config: ModelConfig) -> Iterator[BlockConfig]:
    return (block for stack in config.stacks.values() for block in stack.layers())


def _attentions(config: ModelConfig) -> Iterator[AttentionConfig]:
    for block in _blocks(config):
        yield block.attention
        if block.cross is not None:
            yield block.cross


def _tensor_divisors(config: ModelConfig) -> list[int]:
    heads = {count for attention in _attentions(config) for count in (attention.heads, attention.num_kv_heads)}
    return [*heads, *{block.feedforward.hidden for block in _blocks(config)}]


def _check_tensor(config: ModelConfig, tensor: int) -> None:
    for name, count in (
        *(("heads", attention.heads) for attention in _attentions(config)),
        *(("hidden", block.feedforward.hidden) for block in _blocks(config)),
    ):
        if tensor < 1 or count % tensor:
            raise ConfigError(f"tensor={tensor} does not divide {name}={count} of this model; write a divisor")


def _pipeline_depth(config: ModelConfig) -> int:
    stacks = list(config.stacks.values())
    if len(stacks) > 1 or any(run.tied for stack in stacks for run in stack.pattern):
        raise ConfigError(
            "a pipeline divides one stack of layers with their own weights, but this model has two stacks or tied "
            "layers; use another strategy"
        )
    return stacks[0].depth


# -- the part of one rank ----------------------------------------------------------------------------------------------


def divides_kv_heads(attention: AttentionConfig, tensor: int) -> bool:
    """Return whether key/value heads are divided in a tensor-parallel group; otherwise every rank has all of them."""
    return attention.num_kv_heads % tensor == 0


def _narrow_attention(attention: AttentionConfig, width: int, tensor: int) -> AttentionConfig:
    heads, kv_heads = attention.heads // tensor, attention.num_kv_heads
    return replace(
        attention,
        heads=heads,
        kv_heads=kv_heads // tensor if divides_kv_heads(attention, tensor) else math.gcd(heads, kv_heads),
        head_dim=attention.key_size(width),
        value_dim=attention.value_size(width),
        kept_heads=(),
        unpruned_heads=None,
    )


def narrow_block(block: BlockConfig, tensor: int) -> BlockConfig:
    """Return the block that one rank of a tensor-parallel group computes, with a part of the heads and hidden size.

    If the key/value heads cannot be divided, the block has as many of them as divide its heads; count the others with
    `replicated_kv_heads`.
    """
    if tensor == 1:
        return block
    return replace(
        block,
        attention=_narrow_attention(block.attention, block.width, tensor),
        cross=None if block.cross is None else _narrow_attention(block.cross, block.width, tensor),
        feedforward=replace(block.feedforward, hidden=block.feedforward.hidden // tensor),
    )


def replicated_kv_heads(attention: AttentionConfig, tensor: int) -> int:
    """Count the key/value heads that a rank has in addition to those of `narrow_block`."""
    if divides_kv_heads(attention, tensor):
        return 0
    return attention.num_kv_heads - math.gcd(attention.heads // tensor, attention.num_kv_heads)


class RankParameters(NamedTuple):
    """The parameters of a part of the model on one rank, and how many of them are in matrices of blocks."""

    total: int
    matrices: int


def rank_block_parameters(block: BlockConfig, tensor: int) -> RankParameters:
    """Count the parameters of a block on one rank of a tensor-parallel group."""
    narrow = narrow_block(block, tensor)
    total, matrices = sum(block_parameters(narrow).values()), block_matrix_weights(narrow)
    for attention in filter(None, (block.attention, block.cross)):
        _, key, value, _ = attention_linears(replace(attention, kv_heads=1), block.width)
        extra = replicated_kv_heads(attention, tensor)
        total += extra * (key.num_parameters + value.num_parameters)
        matrices += extra * (key.num_weights + value.num_weights)
    return RankParameters(total, matrices)
