"""Count the parameters of a configuration by component, without building the model.

The formulas, for width D, H heads, G key/value heads, key size K, value size Kv, hidden size F, vocabulary size V,
E experts and norms over N features:

    attention     D·H·K + D·G·K + D·G·Kv + H·Kv·D    query, key, value, output, and the biases that `bias` names
    feedforward   2·D·F, gated 3·D·F                 with experts E times as many, and D·E for the router; F = 0: none
    norm          2·N with scale and shift, N with scale alone, 0 without
    embedding     V·D                                a shared table is counted once, where it is first used

Tied matrices and later repetitions of tied blocks are counted once. A fixed output bias and the running statistics of a
batch norm are stored with the model but not trained and not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    FramesConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    StackConfig,
)
from monoblock.config.parts import SEQUENCE_HEADS

ParameterCounts = dict[str, int]
RowKind = Literal["tokens", "sequences"]  # whether a matrix is applied to every token, or to one vector per sequence


class LinearShape(NamedTuple):
    """The shape of a linear layer, from which parameters and FLOPs are counted."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    tied: bool = False  # the matrix is counted with another component; the bias is not
    applied_to: RowKind = "tokens"
    is_vocab_matrix: bool = False  # quantized to bits of its own

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def num_parameters(self) -> int:
        return (0 if self.tied else self.num_weights) + (self.outputs if self.bias else 0)


def norm_parameters(norm: NormConfig | None, size: int) -> int:
    return 0 if norm is None else {"scale_shift": 2, "scale": 1, "none": 0}[norm.affine] * size


# -- linear layers --------------------------------------------------------------------------------------


def attention_linears(
    attention: AttentionConfig, width: int
) -> tuple[LinearShape, LinearShape, LinearShape, LinearShape]:
    """Return the linear layers of attention: query, key, value and output."""
    heads, kv_heads = attention.heads, attention.num_kv_heads
    size, value_size = attention.key_size(width), attention.value_size(width)
    return (
        LinearShape("query", width, heads * size, "q" in attention.bias),
        LinearShape("key", width, kv_heads * size, "k" in attention.bias),
        LinearShape("value", width, kv_heads * value_size, "v" in attention.bias),
        LinearShape("output", heads * value_size, width, "o" in attention.bias),
    )


def feedforward_linears(feedforward: FeedForwardConfig, width: int) -> tuple[LinearShape, ...]:
    """Return the linear layers of one feed-forward network, or of one expert; without a hidden size there are none."""
    if not feedforward.hidden:
        return ()
    up = LinearShape("up", width, feedforward.hidden, feedforward.bias)
    down = LinearShape("down", feedforward.hidden, width, feedforward.bias)
    return (up, up._replace(name="gate"), down) if feedforward.gated else (up, down)


def router_linear(feedforward: FeedForwardConfig, width: int) -> LinearShape | None:
    experts = feedforward.experts
    return None if experts is None else LinearShape("router", width, experts.count, experts.router_bias)


def projection_linear(input_config: EmbeddingConfig | PatchConfig | FramesConfig, width: int) -> LinearShape | None:
    """Return the projection of a factorized embedding to the width, or None for other inputs."""
    if not isinstance(input_config, EmbeddingConfig) or input_config.dim in (None, width):
        return None
    assert input_config.dim is not None
    return LinearShape("projection", input_config.dim, width, input_config.projection_bias)


def head_linears(config: ModelConfig) -> tuple[LinearShape, ...]:
    """Return the linear layers of the head, in the order they run."""
    head = config.head
    if head is None:
        return ()
    rows: RowKind = "sequences" if head.kind in SEQUENCE_HEADS else "tokens"
    size, outputs = config.output_shape
    linears = []
    if head.pooler != "none":
        linears.append(LinearShape("pooler", config.width, config.width, bias=True, applied_to="sequences"))
    if head.transform:
        linears.append(LinearShape("transform", config.width, size, head.transform_bias, applied_to=rows))
    elif size != config.width:
        linears.append(LinearShape("projection", config.width, size))
    if outputs:
        tied = config.tie in ("output", "three_way")
        linears.append(LinearShape("output", size, outputs, head.bias == "learned", tied, rows, is_vocab_matrix=True))
    if head.teacher:
        linears.append(LinearShape("teacher", size, outputs, head.bias == "learned", applied_to=rows))
    return tuple(linears)


# -- counting --------------------------------------------------------------------------------------------------------


def _embedding_parameters(embedding: EmbeddingConfig, width: int, owns_tokens: bool) -> Iterator[tuple[str, int]]:
    size = embedding.dim or width
    summed = width if embedding.projection == "first" else size  # the size of the sum with positions and segments
    yield "token", embedding.vocab * size if owns_tokens else 0
    if isinstance(embedding.positions, Learned):
        yield "position", ((embedding.context or 0) + embedding.positions.offset) * summed
    yield "segment", embedding.segments * summed
    yield "norm", norm_parameters(embedding.norm, summed)
    projection = projection_linear(embedding, width)
    yield "projection", projection.num_parameters if projection else 0


def _patch_parameters(patches: PatchConfig, width: int) -> Iterator[tuple[str, int]]:
    yield "patch", patch_linear(patches, width).num_parameters
    yield "class_token", width if patches.class_token else 0
    yield "distillation_token", width if patches.distillation_token else 0
    yield "mask_token", width if patches.mask_token else 0
    yield "registers", patches.registers * width
    yield "position", patches.num_positions * width if isinstance(patches.positions, Learned) else 0
    yield "norm", norm_parameters(patches.norm, width)


def patch_linear(patches: PatchConfig, width: int) -> LinearShape:
    """Return the convolution on patches as a linear layer on flattened patches, which do not overlap."""
    return LinearShape("patch", patches.channels * patches.patch**2, width, patches.bias)


def frame_linears(frames: FramesConfig, width: int) -> tuple[LinearShape, LinearShape]:
    """Return the two convolutions on frames as linear layers, each of which reads three frames.

    The first runs at every frame, the second at every other frame.
    """
    first = LinearShape("first", 3 * frames.channels, width, bias=True)
    return first, LinearShape("second", 3 * width, width, bias=True)


def _frame_parameters(frames: FramesConfig, width: int) -> Iterator[tuple[str, int]]:
    yield from ((linear.name, linear.num_parameters) for linear in frame_linears(frames, width))
    yield "position", frames.context * width if isinstance(frames.positions, Learned) else 0
    yield "norm", norm_parameters(frames.norm, width)


def _attention_parameters(name: str, attention: AttentionConfig, width: int) -> Iterator[tuple[str, int]]:
    query, key, value, output = attention_linears(attention, width)
    yield name, sum(linear.num_parameters for linear in (query, key, value, output))
    sizes = [attention.key_size(width)] * 2 if attention.qk_norm_over == "head" else [query.outputs, key.outputs]
    yield f"{name}.qk_norm", sum(norm_parameters(attention.qk_norm, size) for size in sizes)
    yield f"{name}.sinks", attention.heads if attention.sinks else 0
    yield f"{name}.positions", attention.table_rows(shared=False) * attention.num_unpruned_heads


def _feedforward_parameters(feedforward: FeedForwardConfig, width: int, active: bool) -> Iterator[tuple[str, int]]:
    parameters = sum(linear.num_parameters for linear in feedforward_linears(feedforward, width))
    router = router_linear(feedforward, width)
    if feedforward.experts is None or router is None:
        yield "feedforward", parameters
    else:
        yield "feedforward.router", router.num_parameters
        count = feedforward.experts.top_k if active else feedforward.experts.count
        yield "feedforward.experts", count * parameters


def count_blocks(stack: StackConfig, *, owned_only: bool = False) -> Counter[BlockConfig]:
    """Count how often each distinct block runs; with `owned_only`, repetitions with tied weights count once."""
    counts: Counter[BlockConfig] = Counter()
    for run in stack.pattern:
        for block in run.blocks:
            counts[block] += 1 if owned_only and run.tied else run.times
    return counts


def count_norms(block: BlockConfig) -> int:
    """Count the norms of a block."""
    sublayers = len(block.sublayers)
    if block.residual == "parallel_shared":
        return 1
    if block.norm_place == "sandwich":
        return 2 * sublayers
    return sublayers - (not block.attention_norm)


def block_parameters(block: BlockConfig, *, active: bool = False) -> ParameterCounts:
    """Count the parameters of one block by component; `active` counts only the experts that one token uses."""
    width = block.width
    counts: Counter[str] = Counter(dict(_attention_parameters("attention", block.attention, width)))
    if block.cross:
        counts.update(dict(_attention_parameters("cross", block.cross, width)))
    counts.update(dict(_feedforward_parameters(block.feedforward, width, active)))
    counts["norm"] = count_norms(block) * norm_parameters(block.norm, width)
    counts["layer_scale"] = len(block.sublayers) * width if block.layer_scale is not None else 0
    return dict(counts)


def _stack_parameters(stack: StackConfig, active: bool) -> ParameterCounts:
    counts: Counter[str] = Counter()
    for block, times in count_blocks(stack, owned_only=True).items():
        components = block_parameters(block, active=active)
        components["block_norms"] = components.pop("norm")  # `norm` is that of the stack, as in the names of weights
        counts.update({name: times * count for name, count in components.items()})
    attentions = [block.attention for block in count_blocks(stack)]
    counts["attention.positions"] += max(a.table_rows(shared=True) * a.num_unpruned_heads for a in attentions)
    counts["norm"] = norm_parameters(stack.norm, stack.width)
    return dict(counts)


def block_matrix_weights(block: BlockConfig, experts: int | None = None) -> int:
    """Count the weights in the matrices of a block, of which only `experts` experts are counted (None: all)."""
    router = router_linear(block.feedforward, block.width)
    return sum(linear.num_weights for linear in block_linears(block, experts)) + (router.num_weights if router else 0)


def block_linears(block: BlockConfig, experts: int | None = None) -> Iterator[LinearShape]:
    """Yield the linear layers of a block except the router, including those of `experts` experts (None: all)."""
    yield from attention_linears(block.attention, block.width)
    yield from attention_linears(block.cross, block.width) if block.cross else ()
    mixture = block.feedforward.experts
    copies = 1 if mixture is None else mixture.count if experts is None else experts
    for linear in feedforward_linears(block.feedforward, block.width):
        yield from [linear] * copies


def model_matrix_weights(config: ModelConfig) -> int:
    """Count the weights in the matrices of all blocks, which are the weights that Muon updates."""
    stacks = [count_blocks(stack, owned_only=True) for stack in config.stacks.values()]
    return sum(times * block_matrix_weights(block) for counts in stacks for block, times in counts.items())


def _head_parameters(config: ModelConfig) -> Iterator[tuple[str, int]]:
    for linear in head_linears(config):
        if linear.name == "output":
            yield "output", linear._replace(bias=False).num_parameters
            yield "bias", linear.outputs if linear.bias else 0
        else:
            yield linear.name, linear.num_parameters
    if config.head is not None:
        yield "norm", norm_parameters(config.head.norm, config.output_shape[0])


def count_parameters(config: ModelConfig, *, active: bool = False) -> ParameterCounts:
    """Count the parameters of every component that has some; `active` counts only the experts that one token uses."""
    counts: ParameterCounts = {}
    for prefix, input_config in config.inputs.items():
        if isinstance(input_config, PatchConfig):
            components = _patch_parameters(input_config, config.width)
        elif isinstance(input_config, FramesConfig):
            components = _frame_parameters(input_config, config.width)
        else:
            owns_tokens = prefix == "input" or config.tie not in ("source_target", "three_way")
            components = _embedding_parameters(input_config, config.width, owns_tokens)
        counts.update({f"{prefix}.{name}": count for name, count in components})
    for prefix, stack in config.stacks.items():
        counts.update({f"{prefix}.{name}": count for name, count in _stack_parameters(stack, active).items()})
    counts.update({f"head.{name}": count for name, count in _head_parameters(config)})
    return {name: count for name, count in counts.items() if count}
