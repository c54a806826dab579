"""What attention keeps for the backward pass, and how anything kept is added up; activations.py says what and when."""

from __future__ import annotations

from typing import NamedTuple

from monoblock.accounting.parameters import attention_linears
from monoblock.config import Alibi, AttentionConfig, Buckets, NormConfig, Rotary

FLEX_FROM = 128  # queries, as in attention.py


class Held(NamedTuple):
    """Numbers of the computing dtype, attention matrices of that dtype, numbers of fp32, and bytes."""

    numbers: int = 0
    matrices: int = 0
    singles: int = 0
    bytes: int = 0


def join(*held: Held) -> Held:
    return Held(*(sum(column) for column in zip(*held, strict=True))) if held else Held()


def times(number: int, held: Held) -> Held:
    return Held(*(number * one for one in held))


def norm_held(norm: NormConfig | None, rows: int, size: int) -> Held:
    if norm is None:
        return Held()
    offset = size if norm.unit_offset and norm.affine != "none" else 0  # 1 + weight
    return Held(rows * size + offset, singles=rows * (2 if norm.kind == "layer" else 1))


# -- attention ---------------------------------------------------------------------------------------------------------


def runs_plain(attention: AttentionConfig) -> bool:
    """Whether no fused kernel computes it."""
    return attention.softcap is not None or attention.sinks


def _patterned(attention: AttentionConfig, length: int) -> bool:
    """Whether the mask over so many tokens is neither all nor causal."""
    beyond = attention.global_tokens or attention.random_blocks > 0
    near = attention.window is not None and (length > attention.window or beyond)
    return near or attention.mask == "prefix"


def _biased(attention: AttentionConfig) -> bool:
    return isinstance(attention.positions, Alibi | Buckets)


def _blind(attention: AttentionConfig, width: int, queries: int) -> bool:
    """Whether the kernel is given a mask, so that rows that see nothing are zeroed after it."""
    if _biased(attention):
        return attention.mask != "full" or _patterned(attention, queries)
    flexible = attention.dropout == 0.0 and attention.key_size(width) == attention.value_size(width)
    return _patterned(attention, queries) and not (flexible and queries >= FLEX_FROM)


def attention_held(
    attention: AttentionConfig, width: int, batch: int, queries: int, keys: int, *, fused: bool = False
) -> Held:
    """Attention from its normed input to what its output matrix reads."""
    query, key, value, output = attention_linears(attention, width)
    stored = attention.heads // attention.groups if runs_plain(attention) else 1
    found = Held(
        batch * (queries * (width + query.outputs + output.inputs) + stored * keys * (key.outputs + value.outputs))
    )
    if attention.clip is not None:
        found = join(found, Held(batch * (queries * query.outputs + keys * (key.outputs + value.outputs))))
    found = join(found, _qk_norm_held(attention, batch * queries, query.outputs, attention.heads))
    found = join(found, _qk_norm_held(attention, batch * keys, key.outputs, attention.groups))
    if runs_plain(attention):
        return join(found, _plain_held(attention, batch, queries, keys))
    if fused:
        again = isinstance(attention.positions, Rotary) or _blind(attention, width, queries)
        outputs = batch * queries * output.inputs if again else 0
        return join(
            found,
            _fused_held(attention, width, queries, keys),
            Held(outputs, singles=batch * attention.heads * queries),
        )
    matrix = batch * attention.heads * queries * keys
    return join(found, Held(matrices=matrix), _dropped(attention, matrix))


def _dropped(attention: AttentionConfig, matrix: int) -> Held:
    return Held(matrices=matrix, bytes=matrix) if attention.dropout > 0 else Held()


def _qk_norm_held(attention: AttentionConfig, rows: int, size: int, heads: int) -> Held:
    if attention.qk_norm is None:
        return Held()
    if attention.qk_norm_over == "width":
        return norm_held(attention.qk_norm, rows, size)
    scaled = rows * size if attention.qk_norm_over == "each_head" else 0  # normed first, scaled by head then
    return join(norm_held(attention.qk_norm, rows * heads, size // heads), Held(scaled))


def _plain_held(attention: AttentionConfig, batch: int, queries: int, keys: int) -> Held:
    """As `attend` runs: the softmax, what is multiplied with the values where that is another tensor, and masks."""
    matrix = batch * attention.heads * queries * keys
    masked = attention.mask != "full" or _patterned(attention, queries)
    copies = 1 + (attention.softcap is not None) + (masked or attention.dropout > 0)
    return Held(
        matrices=copies * matrix + (batch * attention.heads * queries if attention.sinks else 0),
        bytes=(2 * queries * keys if masked else 0) + (matrix if attention.dropout > 0 else 0),
    )


def _fused_held(attention: AttentionConfig, width: int, queries: int, keys: int) -> Held:
    """The mask or the bias that a block gives to the kernel and shares with no other."""
    if isinstance(attention.positions, Buckets) and not attention.positions.shared:
        return _bias_held(attention, queries, keys, fused=True)
    written = not _biased(attention) and _blind(attention, width, queries)
    return Held(matrices=queries * keys if written else 0)


def _bias_held(attention: AttentionConfig, queries: int, keys: int, *, fused: bool) -> Held:
    """A bias with its mask as the kernel takes it; a learned one keeps which bucket it took, and the mask."""
    matrix = attention.heads * queries * keys if fused else 0
    if isinstance(attention.positions, Alibi):
        return Held(matrices=matrix)
    masked = fused and attention.mask != "full"
    return Held(matrices=matrix, bytes=(8 + masked) * queries * keys)


def view_held(attention: AttentionConfig, width: int, length: int, *, fused: bool) -> Held:
    """What the blocks of one kind share: angles, a bias, which rows see nothing."""
    found, positions = [], attention.positions
    fused = fused and not runs_plain(attention)
    if isinstance(positions, Rotary):
        size = attention.key_size(width)
        whole = positions.dim is None or (positions.scaling is not None and positions.scaling.kind == "proportional")
        found.append(Held(2 * length * ((size if whole else positions.dim or 0) // 2)))
    elif isinstance(positions, Alibi) or (isinstance(positions, Buckets) and positions.shared):
        found.append(_bias_held(attention, length, length, fused=fused))
    if fused and _blind(attention, width, length):
        found.append(Held(bytes=length))
    return join(*found)
