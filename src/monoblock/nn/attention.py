"""Scaled dot-product attention, and multi-head self- and cross-attention built on it (MHA, GQA and MQA).

`attend` computes equation 1 of Vaswani et al. (2017) step by step.  `KERNELS` is the table of the faster ways to
compute it, each with its condition; `attend_fast` takes the first that can be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from monoblock.config.model import AttentionConfig
from monoblock.kernels.cpu.autograd import attend_causal, supports_causal_attention
from monoblock.nn.cache import BeamSlots, CacheWrite, CrossAttentionCache, KeyValues, LayerCache
from monoblock.nn.linear import Linear, autocast_dtype
from monoblock.nn.masks import ResolvedMask
from monoblock.nn.norm import HALF_DTYPES, Norm
from monoblock.nn.packed_documents import DocumentRows, PackedDocuments, attend_varlen, supports_varlen
from monoblock.nn.positions import RotaryAngles, apply_rotary, score_bias
from monoblock.nn.sparse_attention import (
    BANDED_MIN_QUERIES,
    FLEX_MIN_QUERIES,
    attend_banded,
    attend_flex,
    build_block_mask,
    plan_tiles,
)
from monoblock.nn.tap import Tap, apply_tap, tap_changes, tap_wants


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S Kv"],
    mask: Bool[Tensor, "#B #H #T #S"] | None = None,
    bias: Float[Tensor, "#B #H #T #S"] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    tap: Tap | None = None,
) -> Float[Tensor, "B H T Kv"]:
    """Compute softmax(q k^T / sqrt(K) + bias) v over the keys that the mask allows (Vaswani et al. 2017, eq. 1).

    The number of key heads G divides H.  `mask` is True where a query may see a key; a query that may see no key gives
    zeros.  `sinks` are extra scores that only add to the denominator of the softmax.  Scores of 16-bit inputs are
    computed in fp32.
    """
    H, K = q.shape[1], q.shape[3]
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) if t.shape[1] != H else t for t in (k, v))
    wide_q, wide_k = (t.float() if t.dtype in HALF_DTYPES else t for t in (q, k))
    scores = wide_q @ wide_k.mT * (K**-0.5 if scale is None else scale)  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    scores = apply_tap(tap, "scores", scores)
    weights = _softmax(scores, sinks)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)  # 0 for a query without visible keys; other NaNs stay
    weights = F.dropout(apply_tap(tap, "weights", weights), dropout)
    return weights.to(v.dtype) @ v


def _softmax(scores: Float[Tensor, "B H T S"], sinks: Float[Tensor, " H"] | None) -> Float[Tensor, "B H T S"]:
    """Compute the softmax of scores over the keys; sinks are added to the denominator only."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, 3.2.2).

    With fewer key/value heads than query heads it is grouped-query attention (Ainslie et al. 2023).
    """

    def __init__(self, width: int, config: AttentionConfig) -> None:
        super().__init__()
        self.width, self.config = width, config
        H, G, K, value_size = config.heads, config.num_kv_heads, config.key_size(width), config.value_size(width)
        self.query = Linear(width, H * K, bias="q" in config.bias)
        self.key = Linear(width, G * K, bias="k" in config.bias)
        self.value = Linear(width, G * value_size, bias="v" in config.bias)
        self.output = Linear(H * value_size, width, bias="o" in config.bias)
        self.query_norm, self.key_norm = self._qk_norm(H, K), self._qk_norm(G, K)
        self.sinks = nn.Parameter(torch.zeros(H)) if config.sinks else None
        self.position_bias: nn.Embedding | None = None
        if rows := config.table_rows(shared=False):
            self.position_bias = nn.Embedding(rows, config.num_unpruned_heads)

    def _qk_norm(self, heads: int, size: int) -> Norm | None:
        if self.config.qk_norm is None:
            return None
        shapes: dict[str, int | tuple[int, ...]] = {"head": size, "each_head": (heads, size), "width": heads * size}
        return Norm(shapes[self.config.qk_norm_over], self.config.qk_norm)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext,
        *,
        memory: Float[Tensor, "B S D"] | None = None,
        layer_cache: LayerCache | CrossAttentionCache | None = None,
        cache_write: CacheWrite | None = None,
        tap: Tap | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Self-attend over x and the cache, or attend to memory if it is given."""
        H, G = self.config.heads, self.config.num_kv_heads
        x = x.to(autocast_dtype(x))  # once, else each product would keep a copy
        q = context.rotate(self.split_heads(self.query(x), H, self.query_norm))  # (B, H, T, K)
        stored = layer_cache.stored() if isinstance(layer_cache, CrossAttentionCache) else None
        if stored is not None:
            k, v = stored
        else:
            source = x if memory is None else memory
            k = context.rotate(self.split_heads(self.key(source), G, self.key_norm))  # (B, G, S, K)
            v = self.split_heads(self.value(source), G)
            if isinstance(layer_cache, CrossAttentionCache):
                layer_cache.fill(k, v)
            elif layer_cache is not None:
                assert cache_write is not None
                k, v = layer_cache.update(k, v, cache_write)
        q, k, v = apply_tap(tap, "query", q), apply_tap(tap, "key", k), apply_tap(tap, "value", v)
        heads = apply_tap(tap, "heads", self.attend(q, k, v, context, tap))  # (B, H, T, value size)
        return self.output(heads.transpose(1, 2).flatten(2))

    def split_heads(
        self, x: Float[Tensor, "B T width"], heads: int, norm: Norm | None = None
    ) -> Float[Tensor, "B {heads} T size"]:
        """Split each vector into heads, clamped and normalized if so configured."""
        if self.config.clip is not None:
            x = x.clamp(-self.config.clip, self.config.clip)
        if norm is not None and self.config.qk_norm_over == "width":
            x = norm(x)
        x = x.unflatten(-1, (heads, x.shape[-1] // heads))
        if norm is not None and self.config.qk_norm_over != "width":
            x = norm(x)
        return x.transpose(1, 2)

    def project_source(self, memory: Float[Tensor, "B S D"]) -> KeyValues:
        """Return the keys and values of a source in cross-attention."""
        groups = self.config.num_kv_heads
        keys = self.split_heads(self.key(memory), groups, self.key_norm)
        return KeyValues(keys, self.split_heads(self.value(memory), groups))

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S Kv"],
        context: AttentionContext,
        tap: Tap | None = None,
    ) -> Float[Tensor, "B H T Kv"]:
        """Attend with the scale, soft cap, sinks, dropout and position bias of this block."""
        config, bias, positions = self.config, context.bias, context.resolved_mask
        if self.position_bias is not None:
            size = config.key_size(self.width)
            bias = score_bias(config, size, positions.q.positions, positions.k.positions, self.position_bias)
        dropout = config.dropout if self.training else 0.0
        options = ScoreOptions(bias, config.scale, config.softcap, self.sinks, dropout)
        return attend_fast(q, k, v, context, options, tap)


# -- what all blocks of a pass share --------------------------------------------------------------------------------


@dataclass(eq=False)
class AttentionContext:
    resolved_mask: ResolvedMask
    bias: Tensor | None = None  # (B, H, T, S)
    rotary_angles: RotaryAngles | None = None
    beams: BeamSlots | None = None  # if the queries of a row are beams of one search
    # of queries and keys, if tokens are packed; mask and bias are then those of the documents as rows
    packed: tuple[PackedDocuments, PackedDocuments] | None = None
    computed: dict[Callable[..., Any], Any] = field(default_factory=dict, repr=False)  # by `once`

    def once(self, build: Callable[..., Any], *inputs: Any) -> Any:
        """Return build(*inputs), which is the same in all blocks and computed by the first that needs it."""
        if build not in self.computed:
            self.computed[build] = build(*inputs)
        return self.computed[build]

    def rotate(self, heads: Float[Tensor, "B heads T K"]) -> Float[Tensor, "B heads T K"]:
        """Rotate queries or keys by their positions if these are rotary."""
        return heads if self.rotary_angles is None else apply_rotary(heads, self.rotary_angles)

    def dense_mask(self) -> Bool[Tensor, "#B #H #T #S"] | None:
        """Return the mask as booleans, or None if every key is visible."""
        return None if self.resolved_mask.kind == "all" else self.once(ResolvedMask.dense, self.resolved_mask)

    def fused_mask(self, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask argument for a fused kernel, and a mask (B, 1, T, 1) of the queries without a visible key.

        The mask argument is boolean or, if there is a bias, the bias with -inf where the mask is False.  The result of
        a fused kernel is undefined for a query that sees no key, so such a query is shown every key, and its output
        must be set to zero.  Either result is None if it is not needed.
        """
        if bias is None:
            return self.once(_show_blind, self.dense_mask()) if self.resolved_mask.kind == "dense" else (None, None)
        if bias is self.bias:
            return self.once(_mask_bias, self, bias, dtype)
        return _mask_bias(self, bias, dtype)


def _show_blind(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask with every key visible to queries that see none, and which queries these are."""
    blind = ~mask.any(-1, keepdim=True)
    return mask | blind, blind


def _mask_bias(context: AttentionContext, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    bias, mask = bias.to(dtype).contiguous(), context.dense_mask()  # the fused kernels refuse other strides
    if mask is None:
        return bias, None
    allowed, blind = context.once(_show_blind, mask)
    return bias.masked_fill(~allowed, -math.inf), blind


# -- kernels --------------------------------------------------------------------------------------------------------


class ScoreOptions(NamedTuple):
    """How scores become weights, besides the mask; the arguments of `attend`."""

    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of the scaled scores."""
        return self.bias is None and self.softcap is None and self.sinks is None and self.dropout == 0.0


PLAIN = ScoreOptions()


class Kernel(NamedTuple):
    """A faster way to compute `attend`: both functions are called with (q, k, v, context, options)."""

    supports: Callable[[Tensor, Tensor, Tensor, AttentionContext, ScoreOptions], bool]
    attend: Callable[[Tensor, Tensor, Tensor, AttentionContext, ScoreOptions], Tensor]


def attend_fast(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S Kv"],
    context: AttentionContext,
    options: ScoreOptions = PLAIN,
    tap: Tap | None = None,
) -> Float[Tensor, "B H T Kv"]:
    """Compute `attend` with the first kernel that can, else step by step."""
    wanted = [name for name in ("scores", "weights") if tap_wants(tap, name)]
    if context.packed is not None and (wanted or not VARLEN.supports(q, k, v, context, options)):
        return _attend_documents(q, k, v, context, options, tap)
    kernel = choose_kernel(q, k, v, context, options)
    if wanted or kernel is None:
        out = attend(q, k, v, context.dense_mask(), **options._asdict(), tap=tap)
        if kernel is None or options.dropout > 0 or any(tap_changes(tap, name) for name in wanted):
            return out  # else the tap only reads: the output is that of the kernel, as without a tap
    return kernel.attend(q, k, v, context, options)


def choose_kernel(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S Kv"],
    context: AttentionContext,
    options: ScoreOptions,
) -> Kernel | None:
    """Return the first kernel of the table that can compute `attend` for these arguments."""
    return next((kernel for kernel in KERNELS if kernel.supports(q, k, v, context, options)), None)


def prepare(context: AttentionContext, x: Float[Tensor, "B T D"]) -> AttentionContext:
    """Compute what the kernel will read of mask and bias, and return the context.

    This is done before the blocks run on x, so that activation checkpointing does not compute it again.
    """
    if context.bias is not None or context.resolved_mask.kind == "dense":
        heads = x[:, None, :, :16]  # of a size that all kernels support
        kernel = choose_kernel(heads, heads, heads, context, ScoreOptions(context.bias))
        if kernel is FLEX:
            context.once(build_block_mask, context.resolved_mask)
        elif kernel is FUSED:
            context.fused_mask(context.bias, autocast_dtype(x))
    return context


def _attend_documents(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions, tap: Tap | None
) -> Tensor:
    """Attend within packed documents, q (1, H, T, K), as rows padded to equal length, one for each document."""
    q_rows, k_rows = context.once(_document_rows, context.packed)
    q, k, v = (
        rows.to_rows(t.squeeze(0).transpose(0, 1)).transpose(1, 2)
        for rows, t in ((q_rows, q), (k_rows, k), (k_rows, v))
    )
    out = attend_fast(q, k, v, replace(context, packed=None), options, tap)  # (documents, H, length, value size)
    return q_rows.from_rows(out.transpose(1, 2)).transpose(0, 1)[None]


def _document_rows(packed: tuple[PackedDocuments, PackedDocuments]) -> tuple[DocumentRows, DocumentRows]:
    q_rows = DocumentRows(packed[0])
    return q_rows, q_rows if packed[1] is packed[0] else DocumentRows(packed[1])


# -- the table ------------------------------------------------------------------------------------------------------


def _supports_varlen(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> bool:
    """Packed documents whose tokens see all tokens of their document, or those before, on a GPU in 16 bits."""
    mask = context.resolved_mask
    if context.packed is None or mask.matrix is not None or any(term.name != "causal" for term in mask.mask.terms):
        return False
    return options.is_plain and supports_varlen(q, v, autocast_dtype(q))


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> Tensor:
    assert context.packed is not None
    causal, dtype = len(context.resolved_mask.mask.terms) > 0, autocast_dtype(q)
    return attend_varlen(q, k, v, *context.packed, causal=causal, scale=options.scale, dtype=dtype)


def _supports_flex(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> bool:
    """Many queries on a GPU, with a mask that is computed from positions."""
    mask = context.resolved_mask
    if not q.is_cuda or mask.kind != "dense" or mask.matrix is not None or not options.is_plain:
        return False
    return mask.q.length >= FLEX_MIN_QUERIES and 16 <= q.shape[-1] == v.shape[-1]


def _supports_banded(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> bool:
    """Many queries on a CPU, most of whose tiles are empty in a mask that is computed from positions.

    The plan depends on the values of tensors, which cannot be traced.
    """
    mask = context.resolved_mask
    if (
        mask.kind != "dense"
        or mask.matrix is not None
        or mask.q.length < BANDED_MIN_QUERIES
        or options.bias is not None
    ):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(q) is not Tensor or q.device.type != "cpu":
        return False
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return not is_transformed and context.once(plan_tiles, mask) is not None


def _attend_banded(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> Tensor:
    plan, (_, scale, softcap, sinks, dropout) = context.once(plan_tiles, context.resolved_mask), options
    return attend_banded(q, k, v, plan, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)


def _supports_causal(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> bool:
    """A causal mask in training on a CPU, in fp32."""
    return context.resolved_mask.kind == "causal" and options.is_plain and supports_causal_attention(q, k, v)


def _supports_fused(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, options: ScoreOptions) -> bool:
    """No soft cap and no sinks."""
    return options.softcap is None and options.sinks is None


def attend_fused(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S Kv"],
    context: AttentionContext,
    options: ScoreOptions = PLAIN,
) -> Float[Tensor, "B H T Kv"]:
    """Compute `attend` with torch's scaled_dot_product_attention."""
    mask, blind = context.fused_mask(options.bias, q.dtype)
    causal, gqa = mask is None and context.resolved_mask.kind == "causal", q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=options.dropout, is_causal=causal, scale=options.scale, enable_gqa=gqa
    )
    return out if blind is None else out.masked_fill(blind, 0)


VARLEN = Kernel(_supports_varlen, _attend_varlen)
FLEX = Kernel(
    _supports_flex,
    lambda q, k, v, context, options: attend_flex(
        q, k, v, context.once(build_block_mask, context.resolved_mask), options.scale
    ),
)
BANDED = Kernel(_supports_banded, _attend_banded)
CAUSAL = Kernel(_supports_causal, lambda q, k, v, context, options: attend_causal(q, k, v, options.scale))
FUSED = Kernel(_supports_fused, attend_fused)
KERNELS = (VARLEN, FLEX, BANDED, CAUSAL, FUSED)  # the first that supports the arguments is used
