"""Cached keys and values of one block: those of the tokens so far, or those of an encoded source."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.config.model import AttentionConfig
from monoblock.errors import InputError
from monoblock.nn.kv_cache.cache_index import CacheWrite


class KeyValues(NamedTuple):
    keys: Tensor  # (B, G, S, K)
    values: Tensor  # (B, G, S, value size)


class KeyValueStore:
    """Keys and values, None before the first pass."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace keys and values by fn(keys) and fn(values)."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = fn(self.keys), fn(self.values)


class LayerCache(KeyValueStore):
    """Keys and values of self-attention: (B, G, capacity + 1, size); the last column is scratch and never read."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def update(self, keys: Tensor, values: Tensor, write: CacheWrite) -> KeyValues:
        """Write new keys and values (B, G, T, size); return all keys and values that queries may see."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._zeros_like(keys), self._zeros_like(values)
        if keys.dtype != self.keys.dtype:
            raise InputError(
                f"the cache holds keys of {self.keys.dtype}, but the model now computes {keys.dtype}; "
                "make a new cache with model.make_cache"
            )
        visible = KeyValues(self.keys[:, :, : write.num_visible], self.values[:, :, : write.num_visible])
        if write.is_concatenated:
            visible = KeyValues(torch.cat((visible.keys, keys), 2), torch.cat((visible.values, values), 2))
        first = write.num_visible - keys.shape[2]  # the first new column, if all rows are equally long
        for stored, new in ((self.keys, keys), (self.values, values)):
            if write.key_positions.start is not None and not write.is_concatenated:
                stored[:, :, first : write.num_visible] = new
                continue
            stored.scatter_(2, write.columns[:, None, :, None].expand(new.shape), new)
        return visible

    def allocate(self, x: Tensor, config: AttentionConfig, width: int) -> None:
        """Make room for the keys and values of rows like those of x (B, T, D), if there is none yet."""
        if self.keys is None:
            sizes = (config.key_size(width), config.value_size(width))
            self.keys, self.values = (self._zeros(x, config.num_kv_heads, size) for size in sizes)

    def _zeros_like(self, new: Tensor) -> Tensor:
        return self._zeros(new, new.shape[1], new.shape[3])

    def _zeros(self, like: Tensor, groups: int, size: int) -> Tensor:
        return like.new_zeros(like.shape[0], groups, self.capacity + 1, size)


class CrossAttentionCache(KeyValueStore):
    """Keys and values of the source in cross-attention, computed on the first pass."""

    def fill(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def stored(self) -> KeyValues | None:
        return None if self.keys is None or self.values is None else KeyValues(self.keys, self.values)
