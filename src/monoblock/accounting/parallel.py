"""How a training run is spread over GPUs, and the part of every block that one rank of a tensor-parallel group holds.

    ddp        every rank has all weights and a part of the batch
    fsdp       every rank has a shard of the weights, gradients and optimizer states, and a part of the batch
    tp         all ranks, a group of `tensor`, split every block and compute the same batch together
    fsdp+tp    several such groups, each with a part of the batch; the weights of a group are sharded over all groups
    pp         groups of `pipeline` ranks each hold some of the layers and pass activations on

The ranks that `tensor` and `pipeline` leave are the data dimension. Ranks are numbered with the tensor dimension
innermost, then the data dimension, then the pipeline, so that a tensor-parallel group lies within a node.

In a tensor-parallel group, heads and hidden features are divided: query, key, value, up and gate by their outputs, the
output matrix and down by their inputs, the token embedding and the output of the head by the vocabulary. Norms and all
biases that are added to the hidden states are on every rank, as are keys and values whose heads cannot be divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from monoblock.accounting.parameters import (
    attention_linears,
    block_matrix_weights,
    block_parameters,
    count_blocks,
    count_parameters,
)
from monoblock.config.knobs import FieldValues, rebuild
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    ModelConfig,
)
from monoblock.errors import ConfigError, did_you_mean

GPUS_PER_NODE = 8
VOCABULARY_TABLES = ("input.token", "target.token", "head.output")  # which a tensor-parallel group divides by rows


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

    @property
    def stream_bytes(self) -> int:
        """The bytes of an element of the residual stream: fp32 under autocast, 16 bits with FSDP."""
        return 2 if self.shard > 1 else 4

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

    The sizes are those of training: by default `tensor` is the number of all GPUs, with fsdp+tp that of the GPUs of a
    node, and `pipeline` the number of all GPUs.
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
    sizes = {
        "tensor": tensor_size(strategy, tensor or 0, gpus, min(gpus, gpus_per_node)),
        "pipeline": pipeline_size(strategy, pipeline or 0, gpus),
    }
    _check_tensor(config, sizes["tensor"])
    if "pipeline" in splits:
        _check_pipeline(config, sizes["pipeline"])
    used = sizes["tensor"] * sizes["pipeline"]
    return ParallelPlan(**sizes, **{"shard" if shards else "data": gpus // used})


def tensor_size(name: str, tensor: int, processes: int, local_processes: int) -> int:
    """Return how many processes share every matrix; by default all of them, or those of one machine with fsdp+tp."""
    if "tp" not in name.split("+"):
        return 1
    size = tensor or (processes if name == "tp" else local_processes)
    if processes % size or (name == "tp" and size != processes):
        fix = "write train.parallel=fsdp+tp, or leave parallel.tensor out" if name == "tp" else "write a divisor"
        raise ConfigError(f"parallel.tensor={size} does not fit {processes} processes and train.parallel={name}; {fix}")
    return size


def pipeline_size(name: str, stages: int, processes: int) -> int:
    """Return the number of pipeline stages, by default that of the processes."""
    if name != "pp":
        return 1
    size = stages or processes
    if processes % size:
        raise ConfigError(f"parallel.pipeline={size} does not divide {processes} processes; write a divisor")
    return size


def splits_heads(attention: AttentionConfig, tensor: int) -> bool:
    """Return whether training divides the heads of attention in a tensor-parallel group; else every rank has all."""
    kv_heads = attention.num_kv_heads
    is_even = attention.heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)
    return is_even and (attention.qk_norm is None or attention.qk_norm_over != "width")


def _check_tensor(config: ModelConfig, tensor: int) -> None:
    """Raise ConfigError if training would leave a part of the model whole on every rank, which is not planned."""
    whole = []
    for block in (block for stack in config.stacks.values() for block in stack.layers()):
        for attention in filter(None, (block.attention, block.cross)):
            whole += [] if splits_heads(attention, tensor) else [f"attention with heads={attention.heads}"]
        whole += [f"hidden={block.feedforward.hidden}"] if block.feedforward.hidden % tensor else []
    if tensor > 1 and whole:
        raise ConfigError(
            f"tensor={tensor} does not divide {whole[0]} of this model, which training would leave whole on every GPU; "
            "write strategy fsdp+tp with a divisor as tensor"
        )


def _check_pipeline(config: ModelConfig, stages: int) -> None:
    stacks = list(config.stacks.values())
    if len(stacks) > 1 or any(run.tied for run in stacks[0].pattern):
        raise ConfigError(
            "a pipeline divides one stack of layers with their own weights, but this model has two stacks or tied "
            "layers; use another strategy"
        )
    if stages > (depth := stacks[0].depth):
        raise ConfigError(f"pipeline={stages} is more than the {depth} layers of this model; write at most {depth}")


# -- the part of one rank ----------------------------------------------------------------------------------------------


def divides_kv_heads(attention: AttentionConfig, tensor: int) -> bool:
    """Return whether key/value heads are divided in a tensor-parallel group; otherwise every rank has all of them."""
    return attention.num_kv_heads % tensor == 0


def _narrow_attention(attention: AttentionConfig, width: int, tensor: int) -> AttentionConfig:
    return replace(
        attention,
        heads=attention.heads // tensor,
        kv_heads=max(1, attention.num_kv_heads // tensor),
        head_dim=attention.key_size(width),
        value_dim=attention.value_size(width),
        kept_heads=(),
        unpruned_heads=None,
    )


def narrow_block(block: BlockConfig, tensor: int) -> BlockConfig:
    """Return the block that one rank of a tensor-parallel group computes, with a part of the heads and hidden size.

    If there are fewer key/value heads than ranks, a rank computes the one that its queries use, but stores all of
    them; count the others with `replicated_kv_heads`.
    """
    if tensor == 1:
        return block
    return replace(
        block,
        attention=_narrow_attention(block.attention, block.width, tensor),
        cross=None if block.cross is None else _narrow_attention(block.cross, block.width, tensor),
        feedforward=replace(block.feedforward, hidden=block.feedforward.hidden // tensor),
    )


def narrow_model(config: ModelConfig, tensor: int) -> ModelConfig:
    """Return the model that one rank of a tensor-parallel group computes, with a part of each block and vocabulary."""

    def narrow(part: Any, values: FieldValues) -> None:
        if isinstance(part, BlockConfig):
            values.update(vars(narrow_block(part, tensor)))
        elif isinstance(part, EmbeddingConfig):  # the first ranks have whole rows of a table that is not divided evenly
            values["vocab"] = -(-part.vocab // tensor)

    return rebuild(config, narrow)


def replicated_kv_heads(attention: AttentionConfig, tensor: int) -> int:
    """Count the key/value heads that a rank stores in addition to those of `narrow_block`."""
    return 0 if divides_kv_heads(attention, tensor) else attention.num_kv_heads - 1


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
        missing_heads = attention.num_unpruned_heads - attention.heads // tensor
        total += attention.table_rows(shared=False) * missing_heads  # a rank has a table of all heads
    return RankParameters(total, matrices)


class Stage(NamedTuple):
    """A pipeline stage, or the whole model, as one rank of a tensor-parallel group has it."""

    blocks: list[tuple[str, BlockConfig]]  # each with the name of its stack
    parameters: RankParameters
    largest_block: int  # its parameters
    outside: int  # parameters outside the blocks
    head: int  # those of the head, and of the embedding that is also its matrix
    tied: int  # those of this embedding, if this stage has both of its uses


def split_stages(config: ModelConfig, plan: ParallelPlan) -> list[Stage]:
    """Divide a model: blocks evenly, the input to the first stage, the norm and the head to the last stage."""
    blocks = [(name, *row) for name, stack in config.stacks.items() for row in stack.layers_with_ownership()]
    sizes = {block: rank_block_parameters(block, plan.tensor) for block in {block for _, block, _ in blocks}}
    inputs, norms, head, table = _outside_parameters(config, plan.tensor)
    size, rest = divmod(len(blocks), plan.pipeline)
    stages = []
    for number in range(plan.pipeline):
        start = number * size + min(number, rest)
        own = blocks[start : start + size + (number < rest)]
        is_last = number == plan.pipeline - 1
        outside = (inputs if number == 0 else 0) + (norms + head if is_last else 0)
        outside += table if is_last and number else 0  # the first stage and the last have a copy each
        counts = [sizes[block] for _, block, owns in own if owns]
        stages.append(
            Stage(
                [(name, block) for name, block, _ in own],
                RankParameters(outside + sum(n.total for n in counts), sum(n.matrices for n in counts)),
                max((n.total for n in counts), default=0),
                outside,
                head + table if is_last else 0,
                table if plan.pipeline == 1 else 0,
            )
        )
    return stages


def _outside_parameters(config: ModelConfig, tensor: int) -> tuple[int, int, int, int]:
    """Count the parameters of the inputs, of norms and shared biases of stacks, of the head, and of a tied table."""
    whole, narrow = count_parameters(config), count_parameters(narrow_model(config, tensor))
    counts = whole | {name: narrow[name] for name in VOCABULARY_TABLES if name in narrow}
    blocks = sum(
        times * sum(block_parameters(block).values())
        for stack in config.stacks.values()
        for block, times in count_blocks(stack, owned_only=True).items()
    )
    inputs, stacks, head = (
        sum(count for name, count in counts.items() if name.startswith(prefixes))
        for prefixes in (("input.", "target."), ("encoder.", "decoder."), "head.")
    )
    is_tied = config.tie in ("output", "three_way")
    return inputs, stacks - blocks, head, counts.get("target.token", counts["input.token"]) if is_tied else 0
