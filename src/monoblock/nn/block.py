"""The Transformer block: attention, optional cross-attention and feed-forward, each with norm and residual.

With f one of these three sublayers, `norm_place` decides how f is applied to x:

pre        x + f(norm(x))             post     norm(x + f(x))
output     x + norm(f(x))             sandwich x + norm'(f(norm(x)))

With `residual` "parallel" or "parallel_shared", attention and feed-forward read the same x:

parallel   x + attention(norm(x)) + feedforward(norm'(x)), where norm' is norm if it is shared

With `residual` "none" the sublayers run one after the other and x is not added: pre is f(norm(x)), post norm(f(x)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from monoblock.config.model import BlockConfig
from monoblock.errors import ConfigError
from monoblock.nn.attention import Attention, AttentionContext
from monoblock.nn.cache import CacheWrite, CrossAttentionCache, LayerCache
from monoblock.nn.experts import Experts
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.linear_attention import LinearAttention
from monoblock.nn.norm import Norm
from monoblock.nn.tap import Tap, apply_tap, tap_argument


class Block(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        if not isinstance(config, BlockConfig):
            raise ConfigError(f"a Block is built from a BlockConfig, not from {config!r:.60}; write BlockConfig(…)")
        self.config = config
        attention_class = LinearAttention if config.attention.kind == "linear" else Attention
        self.attention = attention_class(config.width, config.attention)
        self.cross = Attention(config.width, config.cross) if config.cross is not None else None
        kind = FeedForward if config.feedforward.experts is None else Experts
        self.feedforward = kind(config.width, config.feedforward) if config.feedforward.hidden else None
        without_norm = {"attention": not config.attention_norm, "feedforward": config.residual == "parallel_shared"}
        for name in config.sublayers:
            has_norm = not without_norm.get(name, False)
            has_output_norm = has_norm and config.norm_place == "sandwich"
            self.register_module(f"{name}_norm", Norm(config.width, config.norm) if has_norm else None)
            self.register_module(f"{name}_output_norm", Norm(config.width, config.norm) if has_output_norm else None)
            gain = None if config.layer_scale is None else nn.Parameter(torch.full((config.width,), config.layer_scale))
            self.register_parameter(f"{name}_gain", gain)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext,
        *,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_context: AttentionContext | None = None,
        layer_cache: LayerCache | None = None,
        cache_write: CacheWrite | None = None,
        cross_cache: CrossAttentionCache | None = None,
        tap: Tap | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Apply the block to x."""
        x = apply_tap(tap, "input", x)

        def attention(h: Tensor) -> Tensor:
            options = tap_argument(self.attention, tap, "attention")
            return self.attention(h, context, layer_cache=layer_cache, cache_write=cache_write, **options)

        def cross(h: Tensor) -> Tensor:
            assert self.cross is not None
            assert memory_context is not None
            options = tap_argument(self.cross, tap, "cross")
            return self.cross(h, memory_context, memory=memory, layer_cache=cross_cache, **options)

        def feedforward(h: Tensor) -> Tensor:
            assert self.feedforward is not None
            return self.feedforward(h, **tap_argument(self.feedforward, tap, "feedforward"))

        if self.config.is_parallel:
            return apply_tap(tap, "output", self._apply_parallel(x, attention, feedforward, tap))
        x = self._apply_sublayer(x, "attention", attention, tap)
        if self.cross is not None:
            x = self._apply_sublayer(x, "cross", cross, tap)
        if self.feedforward is not None:
            x = self._apply_sublayer(x, "feedforward", feedforward, tap)
        return apply_tap(tap, "output", x)

    def _apply_sublayer(self, x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor], tap: Tap | None) -> Tensor:
        """Apply one sublayer with its norm and residual connection."""
        norm_place, norm = self.config.norm_place, getattr(self, f"{name}_norm")
        update = sublayer(norm(x) if norm_place in ("pre", "sandwich") and norm is not None else x)
        if norm_place == "output":
            update = norm(update)
        elif norm_place == "sandwich":
            update = getattr(self, f"{name}_output_norm")(update)
        update = self._scale_residual(name, update, tap)
        x = update if self.config.residual == "none" else x + update
        return norm(x) if norm_place == "post" else x

    def _apply_parallel(
        self, x: Tensor, attention: Callable[[Tensor], Tensor], feedforward: Callable[[Tensor], Tensor], tap: Tap | None
    ) -> Tensor:
        """Apply attention and feed-forward to the same x, and add both outputs to x."""
        attention_norm, feedforward_norm = (getattr(self, f"{name}_norm") for name in ("attention", "feedforward"))
        attention_input = x if attention_norm is None else attention_norm(x)
        feedforward_input = attention_input if feedforward_norm is None else feedforward_norm(x)
        update = self._scale_residual("attention", attention(attention_input), tap)
        update = update + self._scale_residual("feedforward", feedforward(feedforward_input), tap)
        return x + update

    def _scale_residual(self, name: str, update: Tensor, tap: Tap | None) -> Tensor:
        """Apply dropout, gain and scale to the output of a sublayer before it is added to the residual stream."""
        update = F.dropout(apply_tap(tap, f"{name}.output", update), self.config.dropout, self.training)
        gain = getattr(self, f"{name}_gain")
        if gain is not None:
            update = update * gain
        return update if self.config.residual_scale == 1.0 else update * self.config.residual_scale
