"""The fast copy of a model: modules that compute the same, but faster for the few tokens of a decoding step.

    fast = build_fast_model(model)      # a Transformer in evaluation mode; the model itself is not changed

Weights are shared.  A GPU has those of projections that are computed together once more, and an output table that is
padded, unless they lie in memory as `arrange_weights` places them.

From the last product of a sublayer to the first of the next, two things are passed together: the residual stream, and
for quantized products its 8-bit form (see `Activations`).  The last product also adds the residual, in one kernel.  If
quantized products alone read an RMS norm, the product before the norm begins it, the product after it completes it, and
the norm has no kernel of its own (see kernels/gpu_quantized.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import Sinusoid
from monoblock.inference.fast_linear import (
    KERNEL_ROWS,
    Choices,
    FastLinear,
    FastQuantizedEmbedding,
    FastQuantizedLinear,
    FastQuantizedMatrix,
    FusedLinear,
    FusedQuantizedLinear,
    exact_linear,
    fast_linear,
    fuse_layers,
    multiply,
    needs_padding,
    padded_table,
    reads_rounded,
    take_over,
)
from monoblock.inference.runners.cpu import CpuStack, fuse_encoder, fuse_stack
from monoblock.inference.supported_models import NATIVE_NORMS
from monoblock.kernels import gpu as kernels, gpu_attention
from monoblock.kernels.cpu.autograd import gelu_tanh_inference
from monoblock.kernels.cpu.library import load_kernels
from monoblock.kernels.gpu import ACTIVATION_CODES, Activations, NormInput
from monoblock.kernels.gpu_beams import attend_beams, attend_source, supports_beams
from monoblock.kernels.gpu_quantized import GpuQuantizedMatrix, NextNorm, can_join_norm, has_kernel
from monoblock.nn.attention import Attention, AttentionContext
from monoblock.nn.beam_cache import SAME_HYPOTHESIS
from monoblock.nn.block import Block
from monoblock.nn.cache import Cache, CacheWrite, CrossAttentionCache, KeyValues, LayerCache
from monoblock.nn.embedding import Embedding
from monoblock.nn.experts import Experts
from monoblock.nn.feedforward import FeedForward, apply_activation
from monoblock.nn.heads import Head
from monoblock.nn.linear import Linear
from monoblock.nn.masks import TokenPositions
from monoblock.nn.norm import HALF_DTYPES, Norm
from monoblock.nn.paged_cache import PagedLayer, PagedRows, PagedSource
from monoblock.nn.positions import sinusoid
from monoblock.nn.stack import Stack
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import copy_sharing_weights
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear

MIN_NATIVE_WEIGHTS = 2_000_000  # for smaller models, compiling the CPU kernels takes longer than they save
LONG_PROMPT = 192  # tokens; for more, torch's fp32 products are faster than the operator's
MAX_EXPERT_TOKENS = 64  # for more, it is faster to run each expert on its tokens, whose shapes are not fixed


def build_fast_model(model: Transformer, *, fuse: bool | None = None, exact: bool = False) -> Transformer:
    """Build the fast copy of a model; `fuse` replaces the choice whether to join projections.

    With `exact`, which exact.py allows, the bits of a row depend on no other row.

    On a CPU with a C++ compiler, its decoder runs a few tokens at a time in one C++ operator (runners/cpu.py).
    """
    with torch.inference_mode(False), torch.no_grad():
        on_gpu, is_quantized = model.device.type == "cuda", model.config.quantize is not None
        weights = sum(weight.numel() for weight in model.parameters())
        large = exact or is_quantized or weights >= MIN_NATIVE_WEIGHTS
        is_cpu_fp32 = model.device.type == "cpu" and next(model.parameters()).dtype == torch.float32
        native = large and is_cpu_fp32 and load_kernels().is_ready
        choices = Choices(on_gpu if fuse is None else fuse, is_quantized and on_gpu, native and not is_quantized, exact)
        fast: Transformer = make_fast(copy_sharing_weights(model).eval(), choices)
        if isinstance(fast.head, FastHead):
            fast.head.prepare(fast, choices)
        if native and isinstance(fast.decoder, FastStack):
            fast.decoder.cpu_stack = fuse_stack(fast.decoder)
            if isinstance(fast.encoder, FastStack):
                fast.encoder.cpu_encoder = fuse_encoder(fast.encoder)
            for module in fast.modules():
                if isinstance(module, FeedForward) and module.config.activation == "gelu_tanh":
                    module.activation = gelu_tanh_inference
        return fast


def make_fast(module: Any, choices: Choices) -> Any:
    """Replace the modules in a module, innermost first; return the fast module in its place, or the module itself."""
    for name, child in module.named_children():
        module._modules[name] = make_fast(child, choices)
    kind = FAST_MODULES.get(type(module))
    return module if kind is None else kind(module, choices)


# -- sublayers ------------------------------------------------------------------------------------------------------


class FastNorm(Norm):
    def __init__(self, plain: Norm, choices: Choices) -> None:
        take_over(self, plain)
        self.quantizes, self.is_exact = choices.quantized, choices.exact
        is_vector = self.weight is None or self.weight.dim() == 1
        self.is_plain = self.config.kind in NATIVE_NORMS and not self.config.unit_offset and is_vector

    def run(self, x: Tensor) -> Activations:
        config = self.config
        x = x.contiguous() if self.is_exact else x
        if not (
            self.is_plain and x.is_cuda and x.dtype in HALF_DTYPES and x.is_contiguous() and kernels.is_available()
        ):
            return Activations(super().forward(x))
        centered = config.kind == "layer"
        scales_first = centered or config.cast == "after_scale"
        options = {"centered": centered, "cast_after_scale": scales_first, "quantize": self.quantizes}
        return kernels.norm(x, self.weight, self.bias, config.eps, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x).values


class FastFeedForward(FeedForward):
    fused: FusedLinear | FusedQuantizedLinear | None = None

    def __init__(self, plain: FeedForward, choices: Choices) -> None:
        take_over(self, plain)
        if choices.fuse and self.gate is not None and self.config.clamp is None:
            self.fused = fuse_layers([self.gate, self.up], exact=choices.exact)

    def run(self, x: Activations, residual: Tensor | None = None, next_norm: NextNorm | None = None) -> Activations:
        return multiply(self.down, self._hidden(x), residual, next_norm)

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        assert tap is None, "fast modules have no taps"
        return self.run(Activations(x)).values

    def _hidden(self, x: Activations) -> Activations:
        """Return activation(up(x)), or activation(gate(x)) * up(x)."""
        activation, values, up = self.config.activation, x.values, self.up
        has_code, fused = activation in ACTIVATION_CODES, self.fused
        if (
            self.gate is None
            and has_code
            and isinstance(up, FastLinear | FastQuantizedLinear)
            and up.has_kernel(values)
        ):
            return up.multiply(x, up.bias, activation=activation)
        if fused is None:
            hidden = multiply(up, x).values
            gate = None if self.gate is None else multiply(self.gate, x).values
            return Activations(apply_activation(self.activation, hidden, gate, self.config.clamp))
        has_kernel = values.is_cuda and has_code and kernels.is_available()
        if has_kernel and isinstance(fused, FusedLinear) and fused.supports_gated(values):
            return Activations(kernels.gated_linear(values, fused.weight, activation))
        both = fused(x)
        if has_kernel:
            return kernels.gated_activation(both, activation, quantize=reads_rounded(self.down))
        gate, hidden = both.chunk(2, -1)
        return Activations(self.activation(gate) * hidden)


def needs_fixed_shapes(x: Tensor) -> bool:
    """Return whether tokens x (N, D) may be those of a step that is recorded."""
    return x.is_cuda and x.shape[0] <= MAX_EXPERT_TOKENS


class FastExperts(Experts):
    """Experts that gather the weights of each token or, if there are fewer experts than that, run all of them.

    All shapes are fixed then, so that a step on a GPU can be recorded.
    """

    def __init__(self, plain: Experts, choices: Choices) -> None:
        take_over(self, plain)

    def run(self, x: Activations, residual: Tensor | None = None, next_norm: NextNorm | None = None) -> Activations:
        out = self(x.values)
        return Activations(out if residual is None else residual + out)

    def _run_selected(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if not needs_fixed_shapes(x):
            return super()._run_selected(x, expert_ids, weights)
        if expert_ids.numel() < self.experts_config.count and isinstance(self.up, Tensor):
            return self._run_gathered(x, expert_ids, weights)
        return self._run_all(x, expert_ids, weights, None)

    def _run_gathered(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Multiply each token of x (N, D) with copies of the weights of its experts; return the weighted sum."""
        ids = expert_ids.flatten()

        def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = (weight[ids] @ rows.unsqueeze(-1)).squeeze(-1)
            return out if bias is None else out + bias[ids]

        rows = x.repeat_interleave(expert_ids.shape[1], 0)
        gate = None if self.gate is None else project(rows, self.gate, self.gate_bias)
        hidden = apply_activation(self.activation, project(rows, self.up, self.up_bias), gate, self.config.clamp)
        outputs = project(hidden, self.down, self.down_bias).view(*expert_ids.shape, -1)
        return (outputs * weights.unsqueeze(-1)).sum(1)


class FastAttention(Attention):
    fused: FusedLinear | FusedQuantizedLinear | None = None

    def __init__(self, plain: Attention, choices: Choices) -> None:
        take_over(self, plain)
        self.is_exact = choices.exact
        if choices.fuse:
            self.fused = fuse_layers([self.query, self.key, self.value], exact=choices.exact)

    def run(
        self,
        x: Activations,
        residual: Tensor | None = None,
        next_norm: NextNorm | None = None,
        *,
        context: AttentionContext,
        memory: Tensor | None = None,
        layer_cache: LayerCache | CrossAttentionCache | None = None,
        cache_write: CacheWrite | None = None,
    ) -> Activations:
        """Return the output for x, plus a residual (see `multiply`); the other arguments are those of `forward`."""
        if isinstance(layer_cache, (PagedLayer, PagedSource)) and self._has_pages(x.values, context, layer_cache):
            return multiply(self.output, self._attend_pages(x, context, layer_cache), residual, next_norm)
        stored = layer_cache.stored() if isinstance(layer_cache, CrossAttentionCache) else None
        q, k, v = self._project(x, memory, stored)
        if layer_cache is not None and self._supports_beam_kernel(q, context, layer_cache):
            heads = self._attend_beams(q, k, v, context, layer_cache.keys, layer_cache.values)
        else:
            q = context.rotate(q)
            if stored is None:
                k = context.rotate(k)
            if isinstance(layer_cache, LayerCache):
                assert cache_write is not None
                k, v = layer_cache.update(k, v, cache_write)
            elif layer_cache is not None and stored is None:
                layer_cache.fill(k, v)
            heads = self.attend(q, k, v, context).transpose(1, 2).flatten(2)
        return multiply(self.output, Activations(heads), residual, next_norm)

    def _project(
        self, x: Activations, memory: Tensor | None, stored: KeyValues | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of x, and keys and values of x or of the memory, in heads and not rotated.

        Keys and values of the memory that are stored already are returned as they are.
        """
        H, G = self.config.heads, self.config.num_kv_heads
        if self.fused is not None and memory is None and stored is None:
            q, k, v = self.fused(x).split(self.fused.sizes, -1)
        else:
            q = multiply(self.query, x).values
            if stored is not None:
                return self.split_heads(q, H, self.query_norm), *stored
            source = x if memory is None else Activations(memory)
            k, v = multiply(self.key, source).values, multiply(self.value, source).values
        return self.split_heads(q, H, self.query_norm), self.split_heads(k, G, self.key_norm), self.split_heads(v, G)

    def _has_pages(self, x: Tensor, context: AttentionContext, layer_cache: PagedLayer | PagedSource) -> bool:
        """Return whether there is a kernel for the tokens x (B, T, D) of these rows, and it is the one to use."""
        if self.is_exact:
            return x.is_cuda
        rows, mask, size = layer_cache.rows, context.resolved_mask.mask, self.config.key_size(self.width)
        is_source = isinstance(layer_cache, PagedSource)
        # The kernels of torch are faster for whole prompts.
        if rows.encodes if is_source else rows.is_new and rows.is_full:
            return False
        names = {term.name for term in mask.terms}
        is_simple = not names if is_source else "causal" in names and names <= {"causal", "window"}
        is_simple = is_simple and context.resolved_mask.matrix is None and self._is_plain(context)
        return is_simple and size == self.config.value_size(self.width) and gpu_attention.supports_pages(x, size)

    def _attend_pages(
        self, x: Activations, context: AttentionContext, layer_cache: PagedLayer | PagedSource
    ) -> Activations:
        """Attend to the pages of each row or of its source, (B, T, H K); one kernel rotates, writes and attends."""
        rows, pool = layer_cache.rows, layer_cache.pool
        options: dict[str, Any] = {"scale": self.config.scale, "finished": rows.counters, "exact": self.is_exact}
        options["quantize"] = not self.is_exact and reads_rounded(self.output)
        if isinstance(layer_cache, PagedSource):
            q = self.split_heads(multiply(self.query, x).values, self.config.heads, self.query_norm)
            attend: Callable[..., Activations] = gpu_attention.attend_source_pages
            return attend(q, pool.keys, pool.values, rows.source_tables, rows.source_lengths, rows.counts, **options)
        q, k, v = self._project(x, None, None)
        pages = pool.allocate(rows.cache.count, k, k.shape[1], k.shape[3], v.shape[3])
        if (angles := context.rotary_angles) is not None:
            layout = "interleaved" if angles.interleaved else "halves"
            options |= {"cos": angles.cos.contiguous(), "sin": angles.sin.contiguous(), "layout": layout}
        options["window"] = self.config.window
        return gpu_attention.attend_pages(q, k, v, *pages, rows.tables, rows.lengths, rows.counts, **options)

    def _is_plain(self, context: AttentionContext) -> bool:
        """Return whether scores are plain products of queries and keys."""
        config = self.config
        return config.softcap is None and self.sinks is None and self.position_bias is None and context.bias is None

    def _supports_beam_kernel(
        self, q: Tensor, context: AttentionContext, layer_cache: LayerCache | CrossAttentionCache
    ) -> bool:
        """Return whether there is a kernel for the beams q (S, H, n, K) of S searches: what they see is simple."""
        if layer_cache.keys is None or layer_cache.values is None:
            return False
        resolved, is_cross = context.resolved_mask, isinstance(layer_cache, CrossAttentionCache)
        if resolved.matrix is not None or (context.beams is None) != is_cross or q.shape[2] == 1:
            return False
        names = {term.name for term in resolved.mask.terms}
        is_simple = not names if is_cross else names <= {"causal", SAME_HYPOTHESIS} and resolved.k.valid is None
        (rows, groups, _, size), value_size = layer_cache.keys.shape, layer_cache.values.shape[-1]
        is_simple = is_simple and rows == q.shape[0] and size == value_size and self._is_plain(context)
        return is_simple and supports_beams(q, size, q.shape[2] * self.config.heads // groups)

    def _attend_beams(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, keys: Any, values: Any
    ) -> Tensor:
        """Attend from the beams q (S, H, n, K) to their cached hypotheses, or to the cached source: (S, n, H K)."""
        q, scale = context.rotate(q), self.config.scale
        if context.beams is None:
            return attend_source(q, keys, values, context.resolved_mask.k.valid, scale=scale)
        return attend_beams(q, context.rotate(k), v, keys, values, *context.beams, scale=scale)


# -- block, stack and head ------------------------------------------------------------------------------------------

NextNorms = dict[str, NextNorm]  # by sublayer of a block: the norm that its last product begins


class FastBlock(Block):
    """A block that is given, and returns, the residual stream and its 8-bit form together."""

    def __init__(self, plain: Block, choices: Choices) -> None:
        take_over(self, plain)
        config = self.config
        is_added = config.residual != "none" and config.residual_scale == 1.0 and config.layer_scale is None
        self.adds_residual = config.norm_place == "pre" and is_added  # in the last product of a sublayer

    def run(
        self,
        x: Activations,
        context: AttentionContext,
        next_norms: NextNorms,
        *,
        memory: Tensor | None = None,
        memory_context: AttentionContext | None = None,
        layer_cache: LayerCache | None = None,
        cache_write: CacheWrite | None = None,
        cross_cache: CrossAttentionCache | None = None,
    ) -> Activations:
        """Apply the block to x (B, T, D); with a `NormInput`, x comes with the begun norm of the first sublayer."""
        attend = partial(cast(FastAttention, self.attention).run, layer_cache=layer_cache, cache_write=cache_write)
        sublayers: dict[str, Callable[..., Activations]] = {"attention": partial(attend, context=context)}
        if self.cross is not None:
            attend = partial(cast(FastAttention, self.cross).run, memory=memory, layer_cache=cross_cache)
            sublayers["cross"] = partial(attend, context=memory_context)
        if self.feedforward is not None:
            sublayers["feedforward"] = cast(FastFeedForward, self.feedforward).run
        if self.config.is_parallel:
            return self._run_parallel(x, sublayers)
        for name, sublayer in sublayers.items():
            x = self._run_sublayer(x, name, sublayer, next_norms.get(name))
        return x

    def _run_sublayer(
        self, x: Activations, name: str, sublayer: Callable[..., Activations], next_norm: NextNorm | None
    ) -> Activations:
        """Apply one sublayer with its norm and residual connection (see `Block`)."""
        place, norm, residual = self.config.norm_place, getattr(self, f"{name}_norm"), x.values
        if place in ("pre", "sandwich") and norm is not None and not isinstance(x.rounded, NormInput):
            x = norm.run(residual)
        if self.adds_residual:
            return sublayer(x, residual, next_norm)
        update = sublayer(x).values
        if place == "output":
            update = norm(update)
        elif place == "sandwich":
            update = getattr(self, f"{name}_output_norm")(update)
        update = self._scale_residual(name, update, None)
        out = update if self.config.residual == "none" else residual + update
        return norm.run(out) if place == "post" else Activations(out)

    def _run_parallel(self, x: Activations, sublayers: dict[str, Callable[..., Activations]]) -> Activations:
        """Apply attention and feed-forward to the same x, and add both outputs to x."""
        normed, updates = x, []
        for name, sublayer in sublayers.items():
            norm = getattr(self, f"{name}_norm")
            normed = normed if norm is None else norm.run(x.values)
            updates.append(self._scale_residual(name, sublayer(normed).values, None))
        return Activations(x.values + (updates[0] + updates[1]))


class FastStack(Stack):
    """A stack that runs the tokens of a decoding step, or encodes sources, in one C++ operator where there is one."""

    cpu_stack: CpuStack | None = None
    cpu_encoder: CpuStack | None = None

    def __init__(self, plain: Stack, choices: Choices) -> None:
        take_over(self, plain)
        self.is_exact = choices.exact
        self.multiplies_long_prompts = choices.native and not choices.exact  # with torch's products
        self.next_norms = choose_next_norms(self) if choices.quantized else [{} for _ in self.layers]

    def forward(
        self,
        x: Tensor,
        token_positions: TokenPositions,
        *,
        memory: Tensor | None = None,
        memory_positions: TokenPositions | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        assert tap is None, "fast modules have no taps"
        operator = self.cpu_stack
        if operator is not None and isinstance(cache, PagedRows):
            is_long = cache.is_new and cache.num_new > LONG_PROMPT and self.multiplies_long_prompts
            if not is_long and operator.supports(x, cache.num_new):
                return self._run_pages(operator, x, cache)
        assert self.cpu_stack is None or not self.is_exact, "the runner gives the operator more tokens than it takes"
        if self.cpu_encoder is not None and self.cpu_encoder.supports(x, 0):
            lengths = text_lengths(x, token_positions)
            if lengths is not None:
                return self.cpu_encoder.encode(x, lengths)
        inputs = self.block_inputs(x, token_positions, memory, memory_positions, cache)
        hidden = Activations(x)
        for (block, context, options), next_norms in zip(inputs, self.next_norms, strict=True):
            hidden = cast(FastBlock, block).run(hidden, context, next_norms, **options)
        return hidden.values if self.norm is None else self.norm(hidden.values)

    def _run_pages(self, operator: CpuStack, x: Tensor, rows: PagedRows) -> Tensor:
        """Run new tokens x (B, T, D), of which some are padding, with keys and values in pages."""
        pools = [pool.tensors for pool in rows.cache.pools]
        if "values" not in pools[-1]:
            for layer, block in zip(rows.cache.pools, self.config.layers(), strict=True):
                attention, width = block.attention, block.width
                sizes = (attention.num_kv_heads, attention.key_size(width), attention.value_size(width))
                layer.allocate(rows.cache.count, x, *sizes)
        sources = [pool.tensors for pool in rows.cache.source_pools if pool is not None]
        keys, values = [pool["keys"] for pool in pools], [pool["values"] for pool in pools]
        source = [pool["keys"] for pool in sources], [pool["values"] for pool in sources]
        own = x, rows.lengths, rows.counts, rows.tables, keys, values
        return operator.step(*own, *source, rows.source_tables, rows.source_lengths, exact=self.is_exact)


def text_lengths(x: Tensor, positions: TokenPositions) -> Tensor | None:
    """Return the lengths of texts x (B, S, D), or None if they are anything but the beginnings of their rows."""
    if positions.document is not None or positions.prefix_or_global is not None:
        return None
    if positions.valid is None:
        return torch.full((len(x),), x.shape[1])
    valid = positions.valid.expand(x.shape[:2])
    lengths = valid.sum(-1)
    return lengths if torch.equal(valid, torch.arange(x.shape[1]) < lengths[:, None]) else None


def choose_next_norms(stack: Stack) -> list[NextNorms]:
    """Choose for each layer the norms that its last products begin: RMS norms that joined products alone read."""
    chosen: list[NextNorms] = [{} for _ in stack.layers]
    before: tuple[NextNorms, str] | None = None  # the place of the last product, if it can begin a norm
    for next_norms, block in zip(chosen, stack.blocks, strict=True):
        for name in block.config.sublayers:
            is_plain = block.config.norm_place == "pre" and block.config.residual == "sequential" and name != "cross"
            norm, sublayer = getattr(block, f"{name}_norm"), getattr(block, name)
            first, last = getattr(sublayer, "fused", None), getattr(sublayer, "output", getattr(sublayer, "down", None))
            config = None if norm is None or norm.weight is None else norm.config
            is_rms = config is not None and config.kind == "rms" and not config.unit_offset
            reads_norm = isinstance(first, FusedQuantizedLinear) and has_kernel(first.matrix, stack.config.width)
            if isinstance(sublayer, FeedForward) and sublayer.config.activation not in ACTIVATION_CODES:
                reads_norm = False  # a product of its own reads the norm as well
            if before is not None and is_plain and is_rms and reads_norm:
                before[0][before[1]] = NextNorm(norm.weight, norm.config.eps)
            can_begin = isinstance(last, FastQuantizedLinear) and can_join_norm(cast(GpuQuantizedMatrix, last.matrix))
            before = (next_norms, name) if is_plain and can_begin else None
    return chosen


class FastEmbedding(Embedding):
    """An embedding that looks sinusoidal positions up in a table, on a CPU."""

    waves: Tensor | None = None  # (positions, D)

    def __init__(self, plain: Embedding, choices: Choices) -> None:
        take_over(self, plain)

    def _add_positions(self, x: Tensor, token_positions: TokenPositions) -> Tensor:
        config, positions = self.config.positions, token_positions.positions
        if not isinstance(config, Sinusoid) or x.is_cuda:
            return super()._add_positions(x, token_positions)
        count = int(positions.max()) + 1
        if self.waves is None or len(self.waves) < count:
            self.waves = sinusoid(torch.arange(2 * count), x.shape[-1], config).to(x.dtype)
        return x + F.embedding(positions, self.waves)


class FastHead(Head):
    padded: Tensor | None = None  # the output table with rows of zeros added (see `needs_padding`)

    def __init__(self, plain: Head, choices: Choices) -> None:
        take_over(self, plain)
        self.kernel_rows = KERNEL_ROWS["dense"] if choices.native else range(0)
        self.is_exact = choices.exact
        self.norm_before: FastNorm | None = None  # the last norm of the decoder, if a quantized output reads 8 bits

    def prepare(self, model: Transformer, choices: Choices) -> None:
        """Choose how to compute the logits, with the output table of a model and the last norm of its decoder."""
        matrix = model.output_embedding if self.output is None else self.output
        table = matrix.weight if isinstance(matrix, nn.Linear) else matrix
        if choices.fuse and isinstance(table, Tensor) and needs_padding(table):
            self.padded = padded_table(table)
        has_layers = self.transform is not None or self.projection is not None or self.norm is not None
        is_product = (
            choices.quantized and isinstance(matrix, FastQuantizedMatrix) and not has_layers and self.teacher is None
        )
        if is_product and self.scale == 1.0 and isinstance(model.decoder.norm, FastNorm):
            self.norm_before, model.decoder.norm = model.decoder.norm, None

    def forward(self, hidden: Tensor, *, table: Tensor | nn.Module | None = None, **options: Any) -> Tensor:
        if self.norm_before is None:
            return super().forward(hidden, table=table, **options)
        matrix = cast(FastQuantizedMatrix, table if self.output is None else self.output)
        bias, cap = self.bias if self.bias is not None else self.fixed_bias, self.config.softcap
        logits = matrix.multiply(self.norm_before.run(hidden), bias).values
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _own_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.output, nn.Linear):
            return self.linear(x, self.output.weight, bias)
        multiply = getattr(self.output, "linear", None)  # of a quantized matrix, which adds the bias itself
        return super()._own_product(x, bias) if multiply is None else multiply(x, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_exact:
            return exact_linear(x, weight, bias)
        if self.padded is not None and bias is None and not kernels.supports_linear(x, weight):
            return F.linear(x, self.padded)[..., : weight.shape[0]]
        return fast_linear(x, weight, bias, self.kernel_rows)


FAST_MODULES: dict[type[nn.Module], Callable[..., nn.Module]] = {
    Linear: FastLinear,
    nn.Linear: FastLinear,
    QuantizedLinear: FastQuantizedLinear,
    QuantizedEmbedding: FastQuantizedEmbedding,
    Norm: FastNorm,
    Attention: FastAttention,
    FeedForward: FastFeedForward,
    Experts: FastExperts,
    Block: FastBlock,
    Stack: FastStack,
    Embedding: FastEmbedding,
    Head: FastHead,
}
