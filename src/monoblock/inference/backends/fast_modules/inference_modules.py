"""The modules of an inference copy: each computes the same as its base class, but faster for the few tokens of a step.

Where a module has no faster way (with a tap, a longer input, another dtype), it runs the `forward` of its base class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.inference.backends.cpu_attention import attend_one_query, supports_row_kernel
from monoblock.inference.backends.fast_modules.fused_linear import FusedLinear, fast_linear
from monoblock.inference.backends.fast_modules.gpu_quantized_linear import (
    FusedQuantizedLinear,
    InferenceQuantizedLinear,
    can_join_quantized,
)
from monoblock.inference.backends.fast_modules.padded_vocabulary import PaddedVocabulary
from monoblock.inference.backends.fast_modules.pending_residual import pending_residual, take_residual
from monoblock.inference.backends.supported_fields import NATIVE_NORMS
from monoblock.kernels import gpu as kernels
from monoblock.kernels.gpu_attention import attend_step
from monoblock.kernels.gpu_beams import attend_beams, attend_source, supports_beams
from monoblock.kernels.gpu_quantized import get_started_norm
from monoblock.nn.attention import Attention
from monoblock.nn.attention_context import AttentionContext
from monoblock.nn.block import Block
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.heads import Head
from monoblock.nn.kv_cache.beam_cache import SAME_HYPOTHESIS
from monoblock.nn.kv_cache.cache_index import CacheWrite
from monoblock.nn.kv_cache.layer_cache import CrossAttentionCache, LayerCache
from monoblock.nn.linear import can_join
from monoblock.nn.norm import HALF_DTYPES, Norm
from monoblock.nn.positions import apply_rotary
from monoblock.nn.tap import Tap


class InferenceLinear(nn.Linear):
    kernel_rows = range(0)  # numbers of input rows for which the CPU kernel is used

    def supports_kernel(self, x: Tensor) -> bool:
        """Return whether the GPU kernel is faster for x."""
        return kernels.supports_linear(x, self.weight)

    def run_kernel(self, x: Tensor, residual: Tensor | None = None, activation: str | None = None) -> Tensor:
        return kernels.linear(x.contiguous(), self.weight, self.bias, residual, activation)

    def can_add_residual(self, x: Tensor) -> bool:
        """Return whether `forward` can add a residual x to its output."""
        return self.supports_kernel(x)

    def forward(self, x: Tensor) -> Tensor:
        residual = take_residual(self)
        if residual is not None:
            return self.run_kernel(x, residual)
        return fast_linear(x, self.weight, self.bias, self.kernel_rows)


WITH_GPU_KERNEL = (InferenceLinear, InferenceQuantizedLinear)


def fuse_layers(layers: list[nn.Module]) -> FusedLinear | FusedQuantizedLinear | None:
    """Join layers with the same input, so that they are computed as one; return None if they cannot be joined."""
    if can_join(layers):
        return FusedLinear([layer for layer in layers if isinstance(layer, nn.Linear)])
    quantized = [layer for layer in layers if isinstance(layer, InferenceQuantizedLinear)]
    is_quantized = len(quantized) == len(layers) and can_join_quantized(layers)
    return FusedQuantizedLinear(quantized) if is_quantized else None


class InferenceBlock(Block):
    """A block in which the last projection of each sublayer also adds the residual, in one kernel.

    This is done for a pre-norm block and a few vectors on a GPU.
    """

    def _apply_sublayer(self, x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor], tap: Tap | None) -> Tensor:
        layers = {"attention": self.attention.output, "feedforward": getattr(self.feedforward, "down", None)}
        last, norm, config = layers.get(name), getattr(self, f"{name}_norm"), self.config
        plain = config.norm_place == "pre" and config.residual_scale == 1.0 and config.layer_scale is None
        plain = plain and config.residual != "none"
        if tap is not None or not plain or norm is None or not isinstance(last, WITH_GPU_KERNEL):
            return super()._apply_sublayer(x, name, sublayer, tap)
        if not last.can_add_residual(x):
            return super()._apply_sublayer(x, name, sublayer, tap)
        with pending_residual(last, x):
            return sublayer(norm(x))


class InferenceHead(Head):
    plain_outputs = (nn.Linear, InferenceLinear)
    kernel_rows = range(0)
    padded: PaddedVocabulary | None = None

    def pad(self, table: object) -> None:
        """Pad the matrix that computes the logits, if that makes the product faster.

        This is the head's own matrix, or the embedding `table` if the head is tied to it.
        """
        weight = table if self.output is None else getattr(self.output, "weight", None)
        self.padded = PaddedVocabulary.build(weight) if isinstance(weight, Tensor) else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padded is not None and bias is None and not kernels.supports_linear(x, weight):
            return F.linear(x, self.padded.table)[..., : weight.shape[0]]
        return fast_linear(x, weight, bias, self.kernel_rows)


class InferenceNorm(Norm):
    quantizes = False  # whether quantized layers read the output
    unread: Tensor | None = None  # a NaN, if quantized layers alone read the output: they can complete the norm

    def forward(self, x: Tensor) -> Tensor:
        config, weight = self.config, self.weight
        if self.unread is not None and (started := get_started_norm(x, weight, self.unread)) is not None:
            return started
        plain = config.kind in NATIVE_NORMS and not config.unit_offset and (weight is None or weight.dim() == 1)
        if plain and x.is_cuda and x.dtype in HALF_DTYPES and x.is_contiguous() and kernels.is_available():
            centered = config.kind == "layer"
            after = centered or config.cast == "after_scale"
            options = {"centered": centered, "cast_after_scale": after, "quantize": self.quantizes}
            return kernels.norm(x, weight, self.bias, config.eps, **options)
        return super().forward(x)


class InferenceFeedForward(FeedForward):
    fused: FusedLinear | FusedQuantizedLinear | None = None

    def fuse(self) -> None:
        if self.gate is not None and self.config.clamp is None:
            self.fused = fuse_layers([self.gate, self.up])

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        if tap is None and self.gate is None and self.config.activation in kernels.ACTIVATION_CODES:
            layer = self.up
            if isinstance(layer, WITH_GPU_KERNEL) and layer.supports_kernel(x):
                return self.down(layer.run_kernel(x, activation=self.config.activation))
        if self.fused is None or tap is not None:
            return super().forward(x, tap)
        has_kernel = x.is_cuda and self.config.activation in kernels.ACTIVATION_CODES and kernels.is_available()
        if has_kernel and isinstance(self.fused, FusedLinear) and self.fused.supports_gated(x):
            return self.down(self.fused.run_gated(x, self.config.activation))
        both = self.fused(x)
        if has_kernel:
            quantize = isinstance(self.down, InferenceQuantizedLinear) and self.down.reads_rounded_input
            return self.down(kernels.gated_activation(both, self.config.activation, quantize=quantize))
        gate, up = both.chunk(2, -1)
        return self.down(self.activation(gate) * up)


class InferenceAttention(Attention):
    fused: FusedLinear | FusedQuantizedLinear | None = None
    uses_row_kernel = False  # whether to use the CPU kernel for one query per row

    def fuse(self) -> None:
        self.fused = fuse_layers([self.query, self.key, self.value])

    def project_qkv(self, x: Tensor, source: Tensor, is_cached: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.fused is None or source is not x or is_cached:
            return super().project_qkv(x, source, is_cached)
        q, k, v = self.fused(x).split(self.fused.sizes, -1)
        return q, k, v

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
        if self.uses_row_kernel and tap is None and supports_row_kernel(self, x, context, layer_cache, cache_write):
            q, k, v = self.project_qkv(x, x, isinstance(layer_cache, CrossAttentionCache))
            keys_values = self._update_keys_values(k, v, context, layer_cache, cache_write)
            return self.output(attend_one_query(self, q, keys_values, context))
        if tap is None and isinstance(layer_cache, LayerCache) and self._supports_step_kernel(x, context, layer_cache):
            return self._step_on_gpu(x, context, layer_cache)
        if tap is None and self._supports_beam_kernel(x, context, layer_cache):
            return self.output(self._attend_beams(x, context, layer_cache))
        return super().forward(x, context, memory=memory, layer_cache=layer_cache, cache_write=cache_write, tap=tap)

    def _step_on_gpu(self, x: Tensor, context: AttentionContext, layer_cache: LayerCache) -> Tensor:
        """Attend with one token per row, x (B, 1, D); one kernel rotates, writes the cache and attends."""
        q, k, v = self.project_qkv(x, x, False)
        assert k is not None
        assert v is not None
        assert layer_cache.keys is not None
        assert layer_cache.values is not None
        assert context.cached_lengths is not None
        angles = context.rotary_angles
        out = attend_step(
            self._split_heads(q, self.config.heads, self.query_norm),
            self._split_heads(k, self.config.num_kv_heads, self.key_norm),
            self._split_heads(v, self.config.num_kv_heads),
            layer_cache.keys,
            layer_cache.values,
            context.cached_lengths,
            scale=self.config.scale,
            cos=None if angles is None else angles.cos.contiguous(),
            sin=None if angles is None else angles.sin.contiguous(),
            layout=None if angles is None else "interleaved" if angles.interleaved else "halves",
            quantize=isinstance(self.output, InferenceQuantizedLinear) and self.output.reads_rounded_input,
        )
        return self.output(out)

    def _supports_step_kernel(self, x: Tensor, context: AttentionContext, layer_cache: LayerCache) -> bool:
        keys, values = layer_cache.keys, layer_cache.values
        if context.cached_lengths is None or keys is None or values is None:
            return False
        if not (x.is_cuda and x.dtype in HALF_DTYPES and kernels.is_available()):
            return False
        size = keys.shape[-1]
        return self._is_plain(context) and size == values.shape[-1] and 16 <= size <= 256 and size & (size - 1) == 0

    def _is_plain(self, context: AttentionContext) -> bool:
        """Return whether scores are plain products of queries and keys."""
        config = self.config
        return config.softcap is None and self.sinks is None and self.position_bias is None and context.bias is None

    def _supports_beam_kernel(
        self, x: Tensor, context: AttentionContext, layer_cache: LayerCache | CrossAttentionCache | None
    ) -> bool:
        """Return whether there is a kernel for the beams x (S, n, D) of S searches: what they see is simple."""
        if layer_cache is None or layer_cache.keys is None or layer_cache.values is None:
            return False
        resolved, is_cross = context.resolved_mask, isinstance(layer_cache, CrossAttentionCache)
        if resolved.matrix is not None or (context.beams is None) != is_cross or x.shape[1] == 1:
            return False
        names = {term.name for term in resolved.mask.terms}
        is_simple = not names if is_cross else names <= {"causal", SAME_HYPOTHESIS} and resolved.k.valid is None
        (rows, groups, _, size), value_size = layer_cache.keys.shape, layer_cache.values.shape[-1]
        is_simple = is_simple and rows == x.shape[0] and size == value_size and self._is_plain(context)
        return is_simple and supports_beams(x, size, x.shape[1] * self.config.heads // groups)

    def _attend_beams(
        self, x: Tensor, context: AttentionContext, layer_cache: LayerCache | CrossAttentionCache | None
    ) -> Tensor:
        """Attend from the beams x (S, n, D) to their hypotheses, or to the cached source; the result is (S, n, H K)."""
        assert layer_cache is not None
        keys, values, scale = layer_cache.keys, layer_cache.values, self.config.scale
        assert keys is not None
        assert values is not None
        q, k, v = self.project_qkv(x, x, isinstance(layer_cache, CrossAttentionCache))
        q = self._split_heads(q, self.config.heads, self.query_norm)
        angles = context.rotary_angles
        q = q if angles is None else apply_rotary(q, angles)
        if context.beams is None or k is None or v is None:
            return attend_source(q, keys, values, context.resolved_mask.k.valid, scale=scale)
        k = self._split_heads(k, self.config.num_kv_heads, self.key_norm)
        k = k if angles is None else apply_rotary(k, angles)
        v = self._split_heads(v, self.config.num_kv_heads)
        return attend_beams(q, k, v, keys, values, *context.beams, scale=scale)
