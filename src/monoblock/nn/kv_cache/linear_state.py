"""The cache of linear attention: the sums over all tokens but the last few, which are kept to be able to drop them.

The keys and values of the last `capacity` tokens are in a ring of columns, so that `Cache.truncate` can drop as many
tokens as in a block with a window.  A token that leaves the ring is added to the sums.  The size of the cache does not
depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from monoblock.nn.kv_cache.cache_index import CacheWrite
from monoblock.nn.kv_cache.layer_cache import LayerCache


class LinearState(NamedTuple):
    """Sums over tokens: of the products of key features and values, and of key features."""

    products: Tensor  # (B, G, K, V)
    keys: Tensor  # (B, G, K)


class LinearLayerCache(LayerCache):
    """The sums of one block and a ring of `capacity` tokens: features of keys (B, G, R + 1, K), and values."""

    plain_keys: Tensor | None = None  # features of the denominator, if they differ from `keys`
    state: LinearState | None = None

    def update_state(self, keys: Tensor, plain_keys: Tensor, values: Tensor, write: CacheWrite) -> LinearState:
        """Write new tokens (B, G, T, size), of which padding has the features 0; return the sums of those before."""
        assert write.linear is not None
        if self.keys is None or self.values is None or self.state is None:
            self.keys, self.values = self._zeros_like(keys), self._zeros_like(values)
            self.plain_keys = None if plain_keys is keys else self._zeros_like(plain_keys)
            rows, size = keys.shape[:2], keys.shape[-1]
            self.state = LinearState(keys.new_zeros(*rows, size, values.shape[-1]), keys.new_zeros(*rows, size))
        elif self.keys.dtype != keys.dtype:
            self.map_tensors(lambda t: t.to(keys.dtype))
        started = write.linear.is_started[:, None, None]
        products, sums = self.state
        state = LinearState(products.where(started[..., None], 0), sums.where(started, 0))
        state = self._add_columns(state, write.linear.leaving)
        before = self._add_columns(state, write.linear.in_ring & ~write.linear.leaving)
        if write.linear.skips_ring is not None:
            skips = write.linear.skips_ring[:, None, :, None].to(keys.dtype)
            state = _add_tokens(state, keys * skips, plain_keys * skips, values)
        self.state = state
        for stored, new in ((self.keys, keys), (self.values, values), (self.plain_keys, plain_keys)):
            if stored is not None:
                stored.scatter_(2, write.columns[:, None, :, None].expand(new.shape), new)
        return before

    def _add_columns(self, state: LinearState, chosen: Tensor) -> LinearState:
        """Add the tokens in the chosen columns (B, R) of the ring to the sums."""
        assert self.keys is not None
        assert self.values is not None
        factor = chosen[:, None, :, None].to(self.keys.dtype)
        plain_keys = self.keys if self.plain_keys is None else self.plain_keys
        return _add_tokens(state, self.keys[:, :, :-1] * factor, plain_keys[:, :, :-1] * factor, self.values[:, :, :-1])

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by fn(tensor)."""
        super().map_tensors(fn)
        if self.plain_keys is not None:
            self.plain_keys = fn(self.plain_keys)
        if self.state is not None:
            self.state = LinearState(*(fn(tensor) for tensor in self.state))

    def list_sums(self) -> list[Tensor]:
        """Return what is stored beside keys and values: the sums, and the keys of the denominator if they differ."""
        plain = [] if self.plain_keys is None else [self.plain_keys[:, :, :-1]]
        return [*plain, *(self.state or ())]


def _add_tokens(state: LinearState, keys: Tensor, plain_keys: Tensor, values: Tensor) -> LinearState:
    return LinearState(state.products + keys.mT @ values, state.keys + plain_keys.sum(2))
