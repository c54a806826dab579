"""How many parameters a configuration has, component by component, in closed form.

D width, H heads, G key/value heads, K key size, F hidden, V vocabulary, E experts:

    attention     D·H·K + D·G·K + D·G·Kv + H·Kv·D    query, key, value, output, and the biases that `bias` names
    feedforward   2·D·F, gated 3·D·F                 with experts E times that, and D·E for the router
    norm          2·n with scale and shift, n with scale alone, 0 without
    embedding     V·D                                shared tables are counted where they are first used, and once

A tied output matrix, a target table tied to the source's and the later repetitions of a tied run count nothing again.
A fixed output bias is stored with the model but never trained: it is no parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from monoblock.config import (
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    FeedForwardConfig,
    FramesConfig,
    HeadConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    StackConfig,
)

Counts = dict[str, int]
Rows = Literal["tokens", "sequences"]  # what passes through a matrix: every token, or one vector a sequence


class Linear(NamedTuple):
    """A matrix in the model: what is counted here as weights is counted in flops.py as work."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    tied: bool = False  # another component owns the matrix; a bias is still its own
    rows: Rows = "tokens"

    @property
    def matrix(self) -> int:
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return (0 if self.tied else self.matrix) + (self.outputs if self.bias else 0)


def total(linears: Iterable[Linear]) -> int:
    return sum(linear.parameters for linear in linears)


def norm_parameters(norm: NormConfig | None, size: int) -> int:
    return 0 if norm is None else {"scale_shift": 2, "scale": 1, "none": 0}[norm.affine] * size


# -- the matrices of each part --------------------------------------------------------------------------------------


def attention_linears(attention: AttentionConfig, width: int) -> tuple[Linear, Linear, Linear, Linear]:
    """Query, key, value and output."""
    heads, groups = attention.heads, attention.groups
    size, value_size = attention.key_size(width), attention.value_size(width)
    return (
        Linear("query", width, heads * size, "q" in attention.bias),
        Linear("key", width, groups * size, "k" in attention.bias),
        Linear("value", width, groups * value_size, "v" in attention.bias),
        Linear("output", heads * value_size, width, "o" in attention.bias),
    )


def feedforward_linears(feedforward: FeedForwardConfig, width: int) -> tuple[Linear, ...]:
    """The matrices of one feed-forward, or of one expert."""
    up = Linear("up", width, feedforward.hidden, feedforward.bias)
    down = Linear("down", feedforward.hidden, width, feedforward.bias)
    return (up, up._replace(name="gate"), down) if feedforward.gated else (up, down)


def router_linear(feedforward: FeedForwardConfig, width: int) -> Linear | None:
    experts = feedforward.experts
    return None if experts is None else Linear("router", width, experts.count, experts.router_bias)


def projection_linear(given: EmbeddingConfig | PatchConfig | FramesConfig, width: int) -> Linear | None:
    """From the size of a factorised embedding to the width."""
    if not isinstance(given, EmbeddingConfig) or given.dim in (None, width):
        return None
    assert given.dim is not None
    return Linear("projection", given.dim, width, given.projection_bias)


def head_linears(config: ModelConfig) -> tuple[Linear, ...]:
    """The matrices after the last stack, in the order they run."""
    head = config.head
    if head is None:
        return ()
    rows: Rows = "sequences" if head.kind in ("classifier", "pooled") else "tokens"
    size = _output_size(config, head)
    found = []
    if head.pooler != "none":
        found.append(Linear("pooler", config.width, config.width, bias=True, rows="sequences"))
    if head.transform:
        found.append(Linear("transform", config.width, size, head.transform_bias, rows=rows))
    elif size != config.width:
        found.append(Linear("projection", config.width, size))
    outputs = _outputs(config, head)
    if outputs:
        tied = config.tie in ("output", "three_way")
        found.append(Linear("output", size, outputs, head.bias == "learned", tied, rows))
    if head.teacher:
        found.append(Linear("teacher", size, outputs, head.bias == "learned", rows=rows))
    return tuple(found)


def _output_size(config: ModelConfig, head: HeadConfig) -> int:
    """What the output matrix reads: the size of a factorised embedding where it is tied to it or transformed for it."""
    words = config.output_input
    speaks = head.kind == "masked_lm" or config.tie in ("output", "three_way")
    if isinstance(words, EmbeddingConfig) and words.dim is not None and speaks:
        return words.dim
    return config.width


def _outputs(config: ModelConfig, head: HeadConfig) -> int:
    if head.kind in ("language_model", "masked_lm"):
        assert isinstance(config.output_input, EmbeddingConfig)
        return config.output_input.vocab
    return {"spans": 2, "pooled": head.project or 0}.get(head.kind, head.classes or 0)


# -- counting --------------------------------------------------------------------------------------------------------


def _token_input(given: EmbeddingConfig, width: int, owns_tokens: bool) -> Iterator[tuple[str, int]]:
    size = given.dim or width
    placed = width if given.projection == "first" else size  # the size that positions are added to
    yield "token", given.vocab * size if owns_tokens else 0
    if isinstance(given.positions, Learned):
        yield "position", ((given.context or 0) + given.positions.offset) * placed
    yield "segment", given.segments * placed
    yield "norm", norm_parameters(given.norm, placed)
    projection = projection_linear(given, width)
    yield "projection", projection.parameters if projection else 0


def _patch_input(given: PatchConfig, width: int) -> Iterator[tuple[str, int]]:
    yield "patch", patch_linear(given, width).parameters
    yield "class_token", width if given.class_token else 0
    yield "distillation_token", width if given.distillation_token else 0
    yield "mask_token", width if given.mask_token else 0
    yield "registers", given.registers * width
    yield "position", given.places * width if isinstance(given.positions, Learned) else 0
    yield "norm", norm_parameters(given.norm, width)


def patch_linear(given: PatchConfig, width: int) -> Linear:
    """The convolution over patches: each patch is read once, so it is a matrix on flattened patches."""
    return Linear("patch", given.channels * given.patch**2, width, given.bias)


def frame_linears(given: FramesConfig, width: int) -> tuple[Linear, Linear]:
    """The two convolutions, each a matrix on three columns beside each other; the first is read at every frame."""
    return Linear("first", 3 * given.channels, width, bias=True), Linear("second", 3 * width, width, bias=True)


def _frame_input(given: FramesConfig, width: int) -> Iterator[tuple[str, int]]:
    yield from ((linear.name, linear.parameters) for linear in frame_linears(given, width))
    yield "position", given.context * width if isinstance(given.positions, Learned) else 0
    yield "norm", norm_parameters(given.norm, width)


def _attention(name: str, attention: AttentionConfig, width: int) -> Iterator[tuple[str, int]]:
    query, key, value, output = attention_linears(attention, width)
    yield name, total((query, key, value, output))
    size = attention.key_size(width)
    normed = 2 * size if attention.qk_norm_over == "head" else query.outputs + key.outputs
    yield f"{name}.qk_norm", norm_parameters(attention.qk_norm, normed)
    yield f"{name}.sinks", attention.heads if attention.sinks else 0
    if isinstance(attention.positions, Buckets) and not attention.positions.shared:
        yield f"{name}.positions", attention.positions.count * attention.all_heads


def _feedforward(feedforward: FeedForwardConfig, width: int, active: bool) -> Iterator[tuple[str, int]]:
    one = total(feedforward_linears(feedforward, width))
    router = router_linear(feedforward, width)
    if feedforward.experts is None or router is None:
        yield "feedforward", one
    else:
        yield "feedforward.router", router.parameters
        count = feedforward.experts.top_k if active else feedforward.experts.count
        yield "feedforward.experts", count * one


def block_counts(stack: StackConfig, *, owned: bool = False) -> Counter[BlockConfig]:
    """How often each kind of block is run; `owned`: how often it has weights of its own."""
    counts: Counter[BlockConfig] = Counter()
    for run in stack.pattern:
        for block in run.blocks:
            counts[block] += 1 if owned and run.tied else run.times
    return counts


def norm_count(block: BlockConfig) -> int:
    """The norms of a block."""
    sublayers = 3 if block.cross else 2
    if block.residual == "parallel_shared":
        return 1
    if block.norm_place == "sandwich":
        return 2 * sublayers
    return sublayers - (not block.attention_norm)


def block_parameters(block: BlockConfig, *, active: bool = False) -> Counts:
    """One block by component; `active`: only the experts that one token passes through."""
    width = block.width
    counts: Counter[str] = Counter(dict(_attention("attention", block.attention, width)))
    if block.cross:
        counts.update(dict(_attention("cross", block.cross, width)))
    counts.update(dict(_feedforward(block.feedforward, width, active)))
    counts["norm"] = norm_count(block) * norm_parameters(block.norm, width)
    counts["layer_scale"] = (3 if block.cross else 2) * width if block.layer_scale is not None else 0
    return dict(counts)


def _stack(stack: StackConfig, active: bool) -> Counts:
    counts: Counter[str] = Counter()
    for block, times in block_counts(stack, owned=True).items():
        one = block_parameters(block, active=active)
        one["block_norms"] = one.pop("norm")  # `norm` is the stack's own, as in the names of weights
        counts.update({name: times * count for name, count in one.items()})
    shared = (b.attention for b in block_counts(stack) if isinstance(b.attention.positions, Buckets))
    for attention in shared:
        assert isinstance(attention.positions, Buckets)
        if attention.positions.shared:
            counts["attention.positions"] += attention.positions.count * attention.all_heads
            break
    counts["norm"] = norm_parameters(stack.norm, stack.width)
    return dict(counts)


def matrix_weights(block: BlockConfig, experts: int | None = None) -> int:
    """Weights in the matrices of a block, with so many of its experts (None: all)."""
    routed = block.feedforward.experts
    copies = 1 if routed is None else routed.count if experts is None else experts
    router = router_linear(block.feedforward, block.width)
    found = [*attention_linears(block.attention, block.width), *([router] if router else [])]
    found += attention_linears(block.cross, block.width) if block.cross else ()
    one = sum(linear.matrix for linear in feedforward_linears(block.feedforward, block.width))
    return sum(linear.matrix for linear in found) + copies * one


def block_matrices(config: ModelConfig) -> int:
    """Weights in the matrices of all blocks: what Muon takes, not embeddings, norms, biases or head."""
    counts = [block_counts(stack, owned=True) for stack in config.stacks.values()]
    return sum(times * matrix_weights(block) for each in counts for block, times in each.items())


def _head(config: ModelConfig) -> Iterator[tuple[str, int]]:
    for linear in head_linears(config):
        if linear.name == "output":
            yield "output", linear._replace(bias=False).parameters
            yield "bias", linear.outputs if linear.bias else 0
        else:
            yield linear.name, linear.parameters
    if config.head is not None:
        yield "norm", norm_parameters(config.head.norm, _output_size(config, config.head))


def parameters(config: ModelConfig, *, active: bool = False) -> Counts:
    """Parameters by component, those that are there; their sum is the model's. `active`: see `block_parameters`."""
    counts: Counts = {}
    for place, given in config.inputs.items():
        if isinstance(given, PatchConfig):
            rows = _patch_input(given, config.width)
        elif isinstance(given, FramesConfig):
            rows = _frame_input(given, config.width)
        else:
            owns = place == "input" or config.tie not in ("source_target", "three_way")
            rows = _token_input(given, config.width, owns)
        counts.update({f"{place}.{name}": count for name, count in rows})
    for place, stack in config.stacks.items():
        counts.update({f"{place}.{name}": count for name, count in _stack(stack, active).items()})
    counts.update({f"head.{name}": count for name, count in _head(config)})
    return {name: count for name, count in counts.items() if count}
