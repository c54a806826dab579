"""Count the activations that norms and attention save; activations.py explains what is saved."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import Literal

from monoblock.accounting.flops import count_attention_pairs
from monoblock.accounting.parameters import attention_linears
from monoblock.config.model import Alibi, AttentionConfig, Buckets, NormConfig, Rotary

AttentionKernel = Literal["plain", "banded", "flex", "fused"]
FLEX_FROM = 128  # FlexAttention is used from this many queries on, as in nn/flex.py
BANDED_FROM, TILE = 512, 64  # banded attention is used from this many queries on, in such tiles, as in nn/banded


@dataclass(frozen=True)
class SavedActivations:
    """The size of saved activations.

    `elements` and `attention_elements` (attention weights) are in the computing dtype; `raw_bytes` counts tensors of
    other dtypes, such as masks and indices.
    """

    elements: int = 0
    attention_elements: int = 0
    fp32_elements: int = 0
    raw_bytes: int = 0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, factor: int) -> SavedActivations:
        return SavedActivations(*(factor * count for count in astuple(self)))


NOTHING = SavedActivations()


def norm_activations(norm: NormConfig | None, rows: int, size: int) -> SavedActivations:
    if norm is None or norm.kind == "none":
        return NOTHING
    offset = size if norm.unit_offset and norm.affine != "none" else 0  # 1 + weight
    statistics = {"layer": 2 * rows, "rms": rows, "batch": 2 * size}[norm.kind]
    return SavedActivations(rows * size + offset, fp32_elements=statistics)


# -- attention ---------------------------------------------------------------------------------------------------------


def needs_plain_attention(attention: AttentionConfig) -> bool:
    """Return whether no fused kernel supports this attention; without banded attention, weights are then computed."""
    return attention.softcap is not None or attention.sinks


def _has_mask_pattern(attention: AttentionConfig, length: int) -> bool:
    """Return whether the mask over `length` tokens is neither full nor causal."""
    is_windowed = attention.window is not None and (length > attention.window or attention.sees_beyond_window)
    return is_windowed or attention.mask == "prefix"


def _has_score_bias(attention: AttentionConfig) -> bool:
    return isinstance(attention.positions, Alibi | Buckets)


def _supports_flex(attention: AttentionConfig, width: int, queries: int) -> bool:
    has_kernel = attention.dropout == 0.0 and attention.key_size(width) == attention.value_size(width)
    return has_kernel and not needs_plain_attention(attention) and queries >= FLEX_FROM


def is_sparse(attention: AttentionConfig, length: int) -> bool:
    """Return whether the tiles of a window, global tokens and random blocks cover at most half of the matrix."""
    if attention.window is None or length < BANDED_FROM:
        return False
    sides = 2 if attention.mask == "full" else 1
    tiles = TILE * (1 + sides * attention.global_tokens)
    blocks = attention.random_blocks * max(TILE, attention.block_size) * sides // 2
    return 2 * (count_attention_pairs(attention, length) + (tiles + blocks) * length) <= length**2


def _is_banded(attention: AttentionConfig, width: int, queries: int) -> bool:
    """Return whether banded attention computes this sparse mask, because FlexAttention does not support it."""
    if _has_score_bias(attention) or _supports_flex(attention, width, queries):
        return False
    return is_sparse(attention, queries)


def _has_kernel_mask(attention: AttentionConfig, width: int, queries: int) -> bool:
    """Return whether the fused kernel is passed a mask; the output of queries that see no key is then set to zero."""
    if _has_score_bias(attention):
        return attention.mask != "full" or _has_mask_pattern(attention, queries)
    has_sparse_kernel = _supports_flex(attention, width, queries) or _is_banded(attention, width, queries)
    return _has_mask_pattern(attention, queries) and not has_sparse_kernel


def choose_kernel(attention: AttentionConfig, width: int, queries: int, keys: int, *, fused: bool) -> AttentionKernel:
    """Return what computes attention; "plain" computes all attention weights."""
    is_self_attention = queries == keys
    if fused and is_self_attention and _is_banded(attention, width, queries):
        return "banded"
    if not fused or needs_plain_attention(attention):
        return "plain"
    has_pattern = is_self_attention and _has_mask_pattern(attention, queries) and not _has_score_bias(attention)
    return "flex" if has_pattern and _supports_flex(attention, width, queries) else "fused"


def count_scores(attention: AttentionConfig, queries: int, keys: int) -> int:
    """Count the attention scores of one sequence."""
    return attention.heads * queries * keys


def attention_activations(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool = False
) -> SavedActivations:
    """Count the activations that attention saves, from its normalized input to the input of its output matrix."""
    query, key, value, output = attention_linears(attention, width)
    is_banded = choose_kernel(attention, width, queries, keys, fused=fused) == "banded"
    is_plain = needs_plain_attention(attention) and not is_banded
    copies = attention.heads // attention.num_kv_heads if is_plain else 1
    keys_and_values = keys * (key.outputs + value.outputs)
    saved = SavedActivations(batch * (queries * (width + query.outputs + output.inputs) + copies * keys_and_values))
    saved += _qk_norm_activations(attention, batch * queries, query.outputs, attention.heads)
    saved += _qk_norm_activations(attention, batch * keys, key.outputs, attention.num_kv_heads)
    if attention.clip is not None:
        saved += SavedActivations(batch * (queries * query.outputs + keys_and_values))
    if is_plain:
        return saved + _plain_attention_activations(attention, batch, queries, keys)
    if is_banded:
        return saved + SavedActivations(fp32_elements=batch * attention.heads * queries)
    if fused:
        copies_output = isinstance(attention.positions, Rotary) or _has_kernel_mask(attention, width, queries)
        outputs = batch * queries * output.inputs if copies_output else 0
        saved += SavedActivations(outputs, fp32_elements=batch * attention.heads * queries)
        return saved + _fused_attention_activations(attention, width, queries, keys)
    matrix = batch * count_scores(attention, queries, keys)
    return saved + SavedActivations(attention_elements=matrix) + _dropout_activations(attention, matrix)


def _dropout_activations(attention: AttentionConfig, elements: int) -> SavedActivations:
    if attention.dropout == 0:
        return NOTHING
    return SavedActivations(attention_elements=elements, raw_bytes=elements)


def _qk_norm_activations(attention: AttentionConfig, rows: int, size: int, heads: int) -> SavedActivations:
    if attention.qk_norm is None:
        return NOTHING
    if attention.qk_norm_over == "width":
        return norm_activations(attention.qk_norm, rows, size)
    scaled = rows * size if attention.qk_norm_over == "each_head" else 0  # normalized first, then scaled by head
    return norm_activations(attention.qk_norm, rows * heads, size // heads) + SavedActivations(scaled)


def _plain_attention_activations(attention: AttentionConfig, batch: int, queries: int, keys: int) -> SavedActivations:
    """Count what attention without a fused kernel saves.

    These are the softmax, the weights after mask or dropout, the capped scores, and masks.
    """
    matrix = batch * count_scores(attention, queries, keys)
    masked = attention.mask != "full" or _has_mask_pattern(attention, queries)
    copies = 1 + (attention.softcap is not None) + (masked or attention.dropout > 0)
    return SavedActivations(
        attention_elements=copies * matrix + (batch * attention.heads * queries if attention.sinks else 0),
        raw_bytes=(2 * queries * keys if masked else 0) + (matrix if attention.dropout > 0 else 0),
    )


def _fused_attention_activations(attention: AttentionConfig, width: int, queries: int, keys: int) -> SavedActivations:
    """Count the mask or bias that a block saves for the fused kernel and does not share with other blocks."""
    if isinstance(attention.positions, Buckets) and not attention.positions.shared:
        return _bias_activations(attention, queries, keys, fused=True)
    has_own_mask = not _has_score_bias(attention) and _has_kernel_mask(attention, width, queries)
    return SavedActivations(attention_elements=queries * keys if has_own_mask else 0)


def _bias_activations(attention: AttentionConfig, queries: int, keys: int, *, fused: bool) -> SavedActivations:
    """Count the elements of a bias, which a fused kernel takes together with the mask.

    A learned bias also saves bucket indices and the mask.
    """
    matrix = count_scores(attention, queries, keys) if fused else 0
    if isinstance(attention.positions, Alibi):
        return SavedActivations(attention_elements=matrix)
    masked = fused and attention.mask != "full"
    return SavedActivations(attention_elements=matrix, raw_bytes=(8 + masked) * queries * keys)


def shared_attention_activations(
    attention: AttentionConfig, width: int, length: int, *, fused: bool, recomputed: bool = False
) -> SavedActivations:
    """Count what blocks with the same attention share: rotary angles, a bias, and a mask of queries that see no key.

    Blocks that are recomputed also need the bias before it is converted for a kernel, in fp32.
    """
    saved, positions = [], attention.positions
    fused = fused and not needs_plain_attention(attention)
    if isinstance(positions, Rotary):
        size = attention.key_size(width)
        is_proportional = positions.scaling is not None and positions.scaling.kind == "proportional"
        rotated = size if positions.dim is None or is_proportional else positions.dim
        saved.append(SavedActivations(2 * length * (rotated // 2)))
    elif isinstance(positions, Alibi) or (isinstance(positions, Buckets) and positions.shared):
        saved.append(_bias_activations(attention, length, length, fused=fused))
        saved.append(SavedActivations(fp32_elements=count_scores(attention, length, length) if recomputed else 0))
    if fused and _has_kernel_mask(attention, width, length):
        saved.append(SavedActivations(raw_bytes=length))
    return sum(saved, NOTHING)
