"""Linear attention (Katharopoulos et al. 2020): weights are products of positive features, in place of a softmax.

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j),      φ(x) = elu(x) + 1

The sums over j do not depend on i except through the last key that a query sees.  So keys and values are summed once,
into a `LinearState` of constant size, and each query reads the sums: time and memory are linear in the length.  The
causal pass runs in chunks of CHUNK tokens: a query sees its own chunk through a small matrix of weights, and all
earlier chunks through their sum.  Rotary positions rotate the features in the numerator only (Su et al. 2021, eq. 19).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from monoblock.nn.attention import Attention, AttentionContext
from monoblock.nn.cache import CacheWrite, CrossAttentionCache, LayerCache, LinearLayerCache, LinearState
from monoblock.nn.linear import autocast_dtype
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.tap import Tap, apply_tap, tap_changes, tap_wants

CHUNK = 64  # number of tokens in a chunk of the causal pass
SCAN = 64  # longest sum that `cumulative_sum` computes one after the other


class Features(NamedTuple):
    """The features of queries or keys: those of the numerator, which may be rotated, and those of the denominator."""

    rotated: Tensor  # (B, heads, T, K)
    plain: Tensor  # (B, heads, T, K)

    def slice(self, start: int, stop: int) -> Features:
        return Features(self.rotated[:, :, start:stop], self.plain[:, :, start:stop])

    def flip(self) -> Features:
        return Features(self.rotated.flip(2), self.plain.flip(2))


def feature_map(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return elu(x) + 1, which is positive; 16-bit input gives fp32, since many features are summed."""
    return F.elu(x.float() if x.dtype in HALF_DTYPES else x) + 1


def _divide(
    numerator: Float[Tensor, "*queries V"], denominator: Float[Tensor, "*queries"]
) -> Float[Tensor, "*queries V"]:
    """Divide vectors by numbers; the result is 0 where the denominator is 0, for a query that sees no key."""
    return numerator / torch.where(denominator > 0, denominator, 1).unsqueeze(-1)


def cumulative_sum(x: Float[Tensor, "B G T *rest"]) -> Float[Tensor, "B G T *rest"]:
    """Return x.cumsum(2), computed in blocks.

    A GPU sums over a dimension that is not the last one after another, in as many threads as there are other elements:
    one long text leaves most of them idle.  Blocks of SCAN elements are summed side by side, and then their totals.
    """
    length = x.shape[2]
    if length <= SCAN:
        return x.cumsum(2)
    missing = -length % SCAN
    padded = torch.cat((x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])), 2) if missing else x
    sums = padded.unflatten(2, (-1, SCAN)).cumsum(3)
    earlier = cumulative_sum(sums[:, :, :-1, -1])  # of the blocks before each block but the first
    earlier = torch.cat((torch.zeros_like(sums[:, :, :1, -1]), earlier), 2)
    return (sums + earlier.unsqueeze(3)).flatten(2, 3)[:, :, :length]


def attend_full(q: Features, k: Features, v: Float[Tensor, "B G S V"]) -> Float[Tensor, "B H T V"]:
    """Compute linear attention in which every query sees every key."""
    (B, H, T, _), G = q.rotated.shape, k.rotated.shape[1]
    rotated, plain = (t.unflatten(1, (G, -1)).flatten(2, 3) for t in q)  # (B, G, H/G · T, K)
    denominator = (plain * k.plain.sum(2).unsqueeze(2)).sum(-1)
    return _divide(rotated @ (k.rotated.mT @ v), denominator).view(B, H, T, -1)


def attend_causal_chunks(
    q: Features, k: Features, v: Float[Tensor, "B G T V"], state: LinearState | None = None
) -> Float[Tensor, "B H T V"]:
    """Compute causal linear attention in chunks; `state` sums tokens before the first, which every query sees."""
    (B, H, T, K), G, V = q.rotated.shape, v.shape[1], v.shape[-1]
    size = min(CHUNK, T)
    missing, ratio = -T % size, H // G
    q_rotated, k_rotated, v = (F.pad(t, (0, 0, 0, missing)) if missing else t for t in (q.rotated, k.rotated, v))
    count = (T + missing) // size
    keys, values = k_rotated.view(B, G, count, size, K), v.view(B, G, count, size, V)
    queries = q_rotated.view(B, G, ratio, count, size, K).transpose(2, 3).flatten(3, 4)  # (B, G, n, H/G · C, K)
    is_visible = torch.ones(size, size, dtype=torch.bool, device=v.device).tril().repeat(ratio, 1)
    scores = (queries @ keys.mT).masked_fill(~is_visible, 0)  # (B, G, n, H/G · C, C)
    numerator = scores @ values
    sums = cumulative_sum(k.plain)  # (B, G, T, K)
    if state is not None:
        sums = sums + state.keys.unsqueeze(2)
    if count > 1 or state is not None:
        numerator = numerator + queries @ _earlier_chunks(keys, values, state)
    numerator = numerator.unflatten(3, (ratio, size)).transpose(2, 3).reshape(B, H, -1, V)[:, :, :T]
    denominator = (q.plain.unflatten(1, (G, ratio)) * sums.unsqueeze(2)).sum(-1).flatten(1, 2)
    return _divide(numerator, denominator)


def _earlier_chunks(keys: Tensor, values: Tensor, state: LinearState | None) -> Tensor:
    """Return for each chunk the sum of products before it: (B, G, n, K, V) for keys (B, G, n, C, K)."""
    products = keys[:, :, :-1].mT @ values[:, :, :-1]  # those of the last chunk are not read
    start = products.new_zeros(*products.shape[:2], 1, *products.shape[3:])
    if state is not None:
        start = state.products.unsqueeze(2)
    return cumulative_sum(torch.cat((start, products), 2))


def attend_documents(
    q: Features, k: Features, v: Float[Tensor, "B G T V"], document: Int[Tensor, "B T"], *, causal: bool
) -> Float[Tensor, "B H T V"]:
    """Compute linear attention among tokens of the same document; the tokens of a document follow one another.

    Chunks are computed one after the other, and the sums start again where a document starts.  A query that sees all
    tokens of its document sees those up to itself, and, in a second pass from the end, those after itself.
    """
    numerator, denominator = _scan_documents(q, k, v, document, 0)
    if not causal:
        later = _scan_documents(q.flip(), k.flip(), v.flip(2), document.flip(1), -1)
        numerator, denominator = numerator + later[0].flip(2), denominator + later[1].flip(2)
    return _divide(numerator, denominator)


def _scan_documents(q: Features, k: Features, v: Tensor, document: Tensor, diagonal: int) -> tuple[Tensor, Tensor]:
    """Return numerator (B, H, T, V) and denominator (B, H, T); with diagonal -1 a query does not see itself."""
    H, G, T = q.rotated.shape[1], v.shape[1], v.shape[2]
    products = v.new_zeros(v.shape[0], G, k.rotated.shape[-1], v.shape[-1])
    sums, last = products[..., 0], document[:, :1]  # of the document that the last token belongs to
    numerators, denominators = [], []
    for start in range(0, T, CHUNK):
        queries, keys, values = (
            Features(*(part.unflatten(1, (G, H // G)) for part in q.slice(start, start + CHUNK))),
            Features(*(part.unsqueeze(2) for part in k.slice(start, start + CHUNK))),
            v[:, :, None, start : start + CHUNK],
        )
        here = document[:, start : start + CHUNK]  # (B, C)
        continues = (here == last)[:, None, None, :, None].to(v.dtype)
        is_visible = ((here[:, :, None] == here[:, None, :]).tril(diagonal))[:, None, None].to(v.dtype)
        scores = queries.rotated @ keys.rotated.mT * is_visible
        numerators.append(scores @ values + continues * (queries.rotated @ products.unsqueeze(2)))
        seen = is_visible @ keys.plain + continues * sums[:, :, None, None]
        denominators.append((queries.plain * seen).sum(-1))
        newest, goes_on = here[:, -1:], (here[:, -1:] == last).to(v.dtype)[:, :, None, None]
        kept = (here == newest)[:, None, :, None].to(v.dtype)
        products = products * goes_on + (keys.rotated.squeeze(2) * kept).mT @ values.squeeze(2)
        sums = sums * goes_on[..., 0] + (keys.plain.squeeze(2) * kept).sum(2)
        last = newest
    return torch.cat(numerators, 3).flatten(1, 2), torch.cat(denominators, 3).flatten(1, 2)


class LinearAttention(Attention):
    """Multi-head linear attention, causal or full; it has the weights of `Attention`."""

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        *,
        memory: Tensor | None = None,
        layer_cache: LayerCache | CrossAttentionCache | None = None,
        cache_write: CacheWrite | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Attend from x (B, T, D) to x and to the tokens that the cache has summed; the output has the shape of x."""
        assert memory is None
        H, G = self.config.heads, self.config.num_kv_heads
        x = x.to(autocast_dtype(x))
        q = apply_tap(tap, "query", self.split_heads(self.query(x), H, self.query_norm))
        k = apply_tap(tap, "key", self.split_heads(self.key(x), G, self.key_norm))
        v = apply_tap(tap, "value", self.split_heads(self.value(x), G))
        with _full_precision(x):
            out = self._attend_features(q, k, v, context, layer_cache, cache_write, tap)
        out = apply_tap(tap, "heads", out.to(v.dtype)).transpose(1, 2).flatten(2)
        return self.output(out)

    def _attend_features(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttentionContext,
        layer_cache: LayerCache | CrossAttentionCache | None,
        cache_write: CacheWrite | None,
        tap: Tap | None,
    ) -> Tensor:
        """Compute the output (B, H, T, V) of all heads; that of 16-bit input is fp32."""
        tokens, causal = context.resolved_mask.q, self.config.mask == "causal"
        q, k = self._features(query, context), self._features(key, context, tokens.valid)
        v = value.to(q.plain.dtype)
        if isinstance(layer_cache, LinearLayerCache):
            assert cache_write is not None
            return attend_causal_chunks(q, k, v, layer_cache.update_state(*k, v, cache_write))
        if tap_wants(tap, "weights"):
            weights = apply_tap(tap, "weights", compute_weights(q, k, context.dense_mask()))
            if tap_changes(tap, "weights"):
                return weights @ v.repeat_interleave(q.plain.shape[1] // v.shape[1], 1)
        if tokens.document is not None:
            document = tokens.document.expand(v.shape[0], -1)
            return attend_documents(q, k, v, document, causal=causal)
        return attend_causal_chunks(q, k, v) if causal else attend_full(q, k, v)

    @staticmethod
    def _features(x: Tensor, context: AttentionContext, valid: Tensor | None = None) -> Features:
        """Return the features of queries or keys x (B, heads, T, K); padding has the features 0."""
        features = feature_map(x)
        if valid is not None:
            features = features * valid[:, None, :, None].to(features.dtype)
        return Features(context.rotate(features), features)


def compute_weights(q: Features, k: Features, mask: Bool[Tensor, "#B #H T S"] | None) -> Float[Tensor, "B H T S"]:
    """Compute the attention weights that linear attention applies without computing them."""
    copies = q.plain.shape[1] // k.plain.shape[1]
    rotated, plain = (
        queries @ keys.repeat_interleave(copies, 1).mT for queries, keys in zip(q, k, strict=True)
    )  # (B, H, T, S)
    if mask is not None:
        rotated, plain = rotated.masked_fill(~mask, 0), plain.masked_fill(~mask, 0)
    return _divide(rotated, plain.sum(-1))


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast does not lower the precision of sums over many tokens."""
    kind = x.device.type
    is_lowered = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_lowered else nullcontext()
