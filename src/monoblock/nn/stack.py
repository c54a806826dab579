"""A stack of blocks, run in order.

In a forward pass, blocks with the same attention configuration share an `AttentionContext` (mask, rotary angles, bias).
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from monoblock.config.model import AttentionConfig, Rotary, StackConfig
from monoblock.config.parts import CheckpointMode
from monoblock.kernels.fp8_linear import is_fp8_training, sizes_fit
from monoblock.nn.activation_checkpointing import run_checkpointed
from monoblock.nn.attention import Attention, AttentionContext, prepare
from monoblock.nn.block import Block
from monoblock.nn.cache import Cache, CacheWrite
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.linear import Linear
from monoblock.nn.masks import Mask, TokenPositions, everything, mask_from_config, same_document
from monoblock.nn.norm import Norm
from monoblock.nn.positions import rotary_angles, score_bias
from monoblock.nn.tap import Tap, apply_tap, tap_argument


class Stack(nn.Module):
    """Blocks named by the index of their layer; layers with tied weights run one block, named after the first layer."""

    def __init__(self, config: StackConfig, block_class: type[Block] = Block) -> None:
        super().__init__()
        self.config = config
        self.block_order = _block_order(config)
        self.layers = range(len(self.block_order))  # the layers that this stack runs (see `keep_layers`)
        self.recompute: CheckpointMode = False  # activation checkpointing in training
        self.uses_fp8 = False  # hidden states in bfloat16 where products are in 8 bits (see `use_fp8_products`)
        for number in sorted(set(self.block_order)):
            self.add_module(str(number), block_class(list(config.layers())[number]))
        self.norm = Norm(config.width, config.norm) if config.norm is not None else None
        self.attention_configs = list(dict.fromkeys(block.attention for block in config.layers()))
        self.attention_config_index = [self.attention_configs.index(block.attention) for block in config.layers()]
        self._build_masks()
        self.position_bias: nn.Embedding | None = None
        if tables := [config for config in self.attention_configs if config.table_rows(shared=True)]:
            self.position_bias = nn.Embedding(tables[0].table_rows(shared=True), tables[0].num_unpruned_heads)

    @property
    def blocks(self) -> list[Block]:
        """The blocks in the order they run."""
        return [cast(Block, self._modules[str(self.block_order[layer])]) for layer in self.layers]

    def keep_layers(self, layers: range) -> None:
        """Delete all blocks but those of some layers in succession; the norm stays with the last layer.

        The names of the remaining weights do not change. `forward` then runs these layers only.
        """
        self.layers = layers
        kept = {str(self.block_order[layer]) for layer in layers}
        for name in [name for name in self._modules if name.isdigit() and name not in kept]:
            del self._modules[name]
        if layers.stop != len(self.block_order) or not layers:
            self.norm = None
        if not layers:
            self.position_bias = None

    def use_fp8_products(self) -> bool:
        """Multiply in 8 bits in training under autocast to bfloat16; return whether the sizes of any layer allow it.

        It is a setting of the linear layers of attention and feed-forward; hidden states are stored in bfloat16.
        """
        parts = [module for module in self.modules() if isinstance(module, (Attention, FeedForward))]
        layers = [child for part in parts for child in part.children() if isinstance(child, Linear)]
        self.uses_fp8 = any(sizes_fit(layer.weight) for layer in layers)
        for layer in layers:
            layer.uses_fp8 = True
        return self.uses_fp8

    @property
    def uses_flags(self) -> bool:
        """Whether any block reads `flags`, which mark a prefix or global tokens."""
        return any(attention.mask == "prefix" or attention.global_tokens for attention in self.attention_configs)

    def _build_masks(self) -> None:
        self._config_masks = tuple(mask_from_config(attention) for attention in self.attention_configs)
        self.masks: list[Mask] = list(self._config_masks)

    @property
    def has_config_masks(self) -> bool:
        """Whether `masks` are those of the configuration; users may replace them."""
        return len(self.masks) == len(self._config_masks) and all(map(operator.is_, self.masks, self._config_masks))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the masks of the configuration, whose functions cannot be pickled; __setstate__ builds them."""
        left_out = {"_config_masks", "masks"} if self.has_config_masks else {"_config_masks"}
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build_masks()
        self.masks = state.get("masks", self.masks)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        token_positions: TokenPositions,
        *,
        memory: Float[Tensor, "B S D"] | None = None,
        memory_positions: TokenPositions | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Run the blocks on x, with cross-attention to memory if it is given."""
        inputs = self.block_inputs(x, token_positions, memory, memory_positions, cache)
        recomputes = self.recompute and self.training and torch.is_grad_enabled()
        for layer, (block, context, options) in zip(self.layers, inputs, strict=True):
            options |= tap_argument(block, tap, str(layer))
            x = self._round_hidden(x)
            if recomputes:
                x = run_checkpointed(block, x, context, mode=self.recompute, **options)
            else:
                x = block(x, context, **options)
        return x if self.norm is None else apply_tap(tap, "norm", self.norm(x))

    def block_inputs(
        self,
        x: Tensor,
        token_positions: TokenPositions,
        memory: Tensor | None = None,
        memory_positions: TokenPositions | None = None,
        cache: Cache | None = None,
    ) -> list[tuple[Block, AttentionContext, dict[str, Any]]]:
        """Return for each layer its block, and what it is called with besides the hidden states."""
        writes: list[CacheWrite | None] = (
            [None] * len(self.block_order) if cache is None else list(cache.prepare_write(token_positions))
        )
        contexts: dict[int, AttentionContext] = {}
        memory_context = self._memory_context(token_positions, memory_positions, cache, x)
        x, inputs = self._round_hidden(x), []
        for layer, block in zip(self.layers, self.blocks, strict=True):
            kind, write = self.attention_config_index[layer], writes[layer]
            if kind not in contexts:
                contexts[kind] = self._attention_context(kind, token_positions, write, x)
            options = {
                "memory": memory,
                "memory_context": memory_context,
                "layer_cache": None if cache is None else cache.layers[layer],
                "cache_write": write,
                "cross_cache": None if cache is None else cache.cross_layers[layer],
            }
            inputs.append((block, contexts[kind], options))
        return inputs

    def _round_hidden(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16) if self.uses_fp8 and is_fp8_training(x.device.type) else x

    @staticmethod
    def _memory_context(
        q: TokenPositions, memory_positions: TokenPositions | None, cache: Cache | None, x: Tensor
    ) -> AttentionContext | None:
        """Return the context of cross-attention, which has a mask only: a document of the target sees its source."""
        if memory_positions is None:
            return None
        if q.packed is None or memory_positions.packed is None:
            context = AttentionContext(same_document.resolve(q, memory_positions))
            return prepare(context, x) if cache is None else context
        mask = everything.resolve(q.as_rows(padding=False), memory_positions.as_rows())
        return prepare(AttentionContext(mask, packed=(q.packed, memory_positions.packed)), x)

    def _attention_context(
        self, config_index: int, q: TokenPositions, cache_write: CacheWrite | None, x: Tensor
    ) -> AttentionContext:
        """Return the mask, rotary angles and bias of self-attention for all blocks with the same configuration."""
        config: AttentionConfig = self.attention_configs[config_index]
        k = q if cache_write is None else cache_write.key_positions
        size, positions = config.key_size(x.shape[-1]), config.positions
        angles = rotary_angles(positions, size, q.positions, x.dtype) if isinstance(positions, Rotary) else None
        packed, mask = q.packed if config.kind == "softmax" else None, self.masks[config_index]
        if packed is not None:  # mask and bias are those of a row for each document
            # A causal mask hides padding on the right; what padding itself sees does not matter.
            hides_padding = mask is self._config_masks[config_index] and config.mask != "full"
            q = k = q.as_rows(padding=not hides_padding)
        if cache_write is not None and cache_write.mask is not None:
            mask = mask & cache_write.mask
        context = AttentionContext(mask.resolve(q, k), rotary_angles=angles)
        context.packed = None if packed is None else (packed, packed)
        if cache_write is not None:
            context.beams = cache_write.beams
        if config.has_score_bias and not config.table_rows(shared=False):
            context.bias = score_bias(config, size, q.positions, k.positions, self.position_bias)
        # `attend` and the kernels over a cache may not need what `prepare` computes.
        is_lazy = config.softcap is not None or config.sinks or config.kind == "linear" or cache_write is not None
        return context if is_lazy else prepare(context, x)


def _block_order(config: StackConfig) -> list[int]:
    """Return for each layer the index of the block whose weights it uses."""
    order: list[int] = []
    for repeat in config.pattern:
        first, size = len(order), len(repeat.blocks)
        for time in range(repeat.times):
            order += [first + index + (0 if repeat.tied else time * size) for index in range(size)]
    return order
