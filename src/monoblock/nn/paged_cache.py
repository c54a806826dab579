"""Keys and values in pages: rows of any lengths share one pool, and a page may belong to several rows.

Token number i of a row is at `pool[table[i // 16], :, i % 16]`, where `table` are the page numbers of the row
(inference/pages.py decides them).  Page 0 is scratch: tokens that are not kept are written there.

    PagedCache    the pools of all blocks, as long as an engine lives
    PagedRows     some rows of it during one pass; the cache that a model is called with
    StaticRows    rows in buffers, for a pass that is recorded once and run for many rows
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.config.model import StackConfig
from monoblock.kernels.gpu_attention import PAGE_SIZE, make_counters
from monoblock.nn.cache import (
    Cache,
    CacheWrite,
    CrossAttentionCache,
    KeyValues,
    LayerCache,
    LinearLayerCache,
    LinearState,
)
from monoblock.nn.masks import TokenPositions


class PagePool:
    """Tensors (pages, …) of one block by name; they are made when first written, and grow with the pages in use."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def get(self, name: str, count: int, like: Tensor, *sizes: int) -> Tensor:
        """Return the tensor (count, *sizes); it is made with the dtype of `like` if it is missing."""
        if name not in self.tensors:
            self.tensors[name] = like.new_zeros(count, *sizes)
        return self.tensors[name]

    def grow(self, count: int) -> None:
        """Give every tensor `count` pages; if that is interrupted, it can be repeated."""
        for name, tensor in self.tensors.items():
            if len(tensor) < count:
                grown = tensor.new_zeros(count, *tensor.shape[1:])
                grown[: len(tensor)] = tensor
                self.tensors[name] = grown

    @property
    def keys(self) -> Tensor | None:
        return self.tensors.get("keys")

    @property
    def values(self) -> Tensor | None:
        return self.tensors.get("values")

    def allocate(self, count: int, like: Tensor, groups: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
        """Return the pools of keys and values; they are made for `count` pages if they are missing."""
        keys = self.get("keys", count, like, groups, PAGE_SIZE, key_size)
        return keys, self.get("values", count, like, groups, PAGE_SIZE, value_size)


def token_bytes(config: StackConfig, element_size: int) -> int:
    """Return the size of the keys and values of one token in all blocks."""
    sizes = ((block.attention, block.width) for block in config.layers())
    return element_size * sum(one.num_kv_heads * (one.key_size(width) + one.value_size(width)) for one, width in sizes)


class PagedCache:
    """The pools of one decoder: one for the tokens of each block, and one for the sources of its cross-attention.

    has_kernels: whether the C++ operators are loaded, and all pools are in fp32 on the CPU.
    """

    def __init__(self, stack_config: StackConfig, device: torch.device, *, has_kernels: bool = False) -> None:
        self.stack_config, self.device, self.has_kernels = stack_config, device, has_kernels
        blocks = list(stack_config.layers())
        self.is_linear = [block.attention.kind == "linear" for block in blocks]
        self.pools = [PagePool() for _ in blocks]
        self.source_pools = [PagePool() if block.cross is not None else None for block in blocks]
        self.count = self.source_count = 0  # pages of the pools

    def grow(self, count: int, source_count: int = 0) -> None:
        """Make room for page numbers below these; a pool at least doubles when it grows."""
        if count > self.count:
            count = max(count, 2 * self.count)
            for pool in self.pools:
                pool.grow(count)
            self.count = count
        if source_count > self.source_count:
            source_count = max(source_count, 2 * self.source_count)
            for source_pool in self.source_pools:
                if source_pool is not None:
                    source_pool.grow(source_count)
            self.source_count = source_count

    @property
    def num_bytes(self) -> int:
        pools = [pool for pool in (*self.pools, *self.source_pools) if pool is not None]
        return sum(tensor.nbytes for pool in pools for tensor in pool.tensors.values())

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int], used: Sequence[int]) -> None:
        """Copy pages, of which the first `used` tokens are in use, in all blocks."""
        if not sources:
            return
        tensors = [tensor for pool in self.pools for tensor in pool.tensors.values()]
        if self.has_kernels:
            torch.ops.monoblock.copy_pages(tensors, *map(torch.tensor, (sources, targets, used)))
            return
        numbers = torch.tensor([sources, targets], device=self.device)
        for tensor in tensors:
            tensor[numbers[1]] = tensor[numbers[0]]

    def write_source(self, layer: int, keys_values: KeyValues, tables: Tensor) -> None:
        """Write the keys and values (B, G, S, size) of sources to their pages; the others in `tables` are 0."""
        pool = self.source_pools[layer]
        assert pool is not None
        for name, new in zip(("keys", "values"), keys_values, strict=True):
            pages = F.pad(new, (0, 0, 0, -new.shape[2] % PAGE_SIZE)).unflatten(2, (-1, PAGE_SIZE)).transpose(1, 2)
            own = pool.get(name, self.source_count, new, *pages.shape[2:])
            own[tables[:, : pages.shape[1]].long()] = pages.to(own.dtype)


class PagedLayer(LayerCache):
    """The pool of one block, as attention sees it during a pass."""

    def __init__(self, rows: PagedRows, pool: PagePool) -> None:
        self.rows, self.pool = rows, pool

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self.pool.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.pool.values

    def update(self, keys: Tensor, values: Tensor, write: CacheWrite) -> KeyValues:
        """Write new keys and values (B, G, T, size) to their pages; return all that queries may see."""
        rows = self.rows
        pools = rows.write(self.pool, "keys", keys), rows.write(self.pool, "values", values)
        if rows.is_new:
            return KeyValues(keys, values)
        return KeyValues(*(rows.read(pool, rows.tables, write.num_visible) for pool in pools))


class PagedLinearLayer(LinearLayerCache):
    """A block with linear attention: every page also has the sums over all tokens before it.

    So a row can be cut, forked and continued at any token, as with keys and values.
    """

    def __init__(self, rows: PagedRows, pool: PagePool) -> None:
        self.rows, self.pool = rows, pool

    def update_state(self, keys: Tensor, plain_keys: Tensor, values: Tensor, write: CacheWrite) -> LinearState:
        """Write new tokens (B, G, T, size), of which padding has the features 0; return the sums of those before."""
        rows, count, pool = self.rows, self.rows.cache.count, self.pool
        B, G, T, K = keys.shape
        stored = {"keys": keys, "values": values}
        if plain_keys is not keys:
            stored["plain_keys"] = plain_keys
        products = pool.get("products", count, keys, G, K, values.shape[3])
        sums = pool.get("sums", count, keys, G, K)
        before = self._sums_before(stored, products, sums)
        for name, new in stored.items():
            rows.write(pool, name, new)
        # Pages that begin in this pass get the sums over all tokens before them.
        first, inside = rows.lengths // PAGE_SIZE, rows.lengths % PAGE_SIZE
        pages = (T - 1) // PAGE_SIZE + 2
        slots = (inside[:, None] + torch.arange(T, device=keys.device))[:, None, :, None]
        aligned = [
            new.new_zeros(B, G, pages * PAGE_SIZE, new.shape[3]).scatter(2, slots.expand(new.shape), new)
            for new in (keys, plain_keys, values)
        ]
        key_pages, plain_pages, value_pages = (t.unflatten(2, (pages, PAGE_SIZE)) for t in aligned)
        page_products, page_sums = (
            key_pages.mT @ value_pages,
            plain_pages.sum(3),
        )  # (B, G, pages, K, V), (B, G, pages, K)
        index = torch.arange(pages, device=keys.device)
        start = (first[:, None] + index) * PAGE_SIZE  # (B, pages) the number of tokens before each page
        begins = (start >= rows.lengths[:, None]) & (start < (rows.lengths + rows.counts)[:, None])
        column = (first[:, None] + index).clamp(max=rows.tables.shape[1] - 1)
        targets = torch.where(begins, rows.tables.long().gather(1, column), 0)
        products[targets] = (before.products[:, :, None] + page_products.cumsum(2) - page_products).transpose(1, 2)
        sums[targets] = (before.keys[:, :, None] + page_sums.cumsum(2) - page_sums).transpose(1, 2)
        return before

    def _sums_before(self, new: dict[str, Tensor], products: Tensor, sums: Tensor) -> LinearState:
        """Return the sums over the tokens of each row before the new ones."""
        rows, count = self.rows, self.rows.cache.count
        last = (rows.lengths - 1).clamp(min=0)
        page = rows.tables.long().gather(1, (last // PAGE_SIZE)[:, None])[:, 0]
        offset = torch.arange(PAGE_SIZE, device=page.device)
        is_seen = (offset <= (last % PAGE_SIZE)[:, None]) & (rows.lengths > 0)[:, None]  # (B, 16)
        pools = {name: self.pool.get(name, count, t, t.shape[1], PAGE_SIZE, t.shape[3]) for name, t in new.items()}
        seen = is_seen[:, None, :, None]
        keys, values = pools["keys"][page] * seen, pools["values"][page]
        plain = pools["plain_keys"][page] * seen if "plain_keys" in pools else keys
        started = (rows.lengths > 0)[:, None, None]
        return LinearState(
            torch.where(started[..., None], products[page], 0) + keys.mT @ values,
            torch.where(started, sums[page], 0) + plain.sum(2),
        )


class PagedSource(CrossAttentionCache):
    """The cached keys and values of the sources, one for each row of a pass."""

    def __init__(self, rows: PagedRows, layer: int) -> None:
        self.rows, self.layer = rows, layer

    @cached_property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self._read("keys")

    @cached_property
    def values(self) -> Tensor:  # type: ignore[override]
        return self._read("values")

    def stored(self) -> KeyValues | None:
        return None if self.rows.encodes else super().stored()

    def fill(self, keys: Tensor, values: Tensor) -> None:
        assert self.rows.source_tables is not None
        self.rows.cache.write_source(self.layer, KeyValues(keys, values), self.rows.source_tables)

    @property
    def pool(self) -> PagePool:
        pool = self.rows.cache.source_pools[self.layer]
        assert pool is not None
        return pool

    def _read(self, name: str) -> Tensor:
        pool = self.pool.tensors.get(name)
        assert pool is not None
        assert self.rows.source_tables is not None
        assert self.rows.memory_positions is not None
        return self.rows.read(pool, self.rows.source_tables, self.rows.memory_positions.length)


class PagedRows(Cache):
    """The rows of one pass over `num_tokens` columns of new tokens; a row has `counts` of them, the rest is padding.

    tables, source_tables: page numbers (B, P) of the rows and of their sources; pages behind the last are 0.
    lengths, counts: (B,), the number of tokens stored before the pass, and of new tokens.
    encodes: whether the pass is given the sources, and stores their keys and values.
    """

    has_documents = encodes = False
    counters: Tensor | None = None  # zeros for a kernel, see `make_counters` in kernels/gpu_attention.py

    def __init__(
        self,
        cache: PagedCache,
        tables: Tensor,
        lengths: Sequence[int],
        counts: Sequence[int],
        source_tables: Tensor | None = None,
        source_lengths: Sequence[int] = (),
        *,
        encodes: bool = False,
    ) -> None:
        self.cache, self.stack_config, self.encodes = cache, cache.stack_config, encodes
        device = cache.device
        self.tables, self.source_tables = tables, source_tables
        self.lengths, self.counts = torch.tensor([lengths, counts], device=device)
        self.num_new = sum(counts)
        self.num_tokens, longest = max(counts), max(map(int.__add__, lengths, counts))
        self.is_full = min(counts) == self.num_tokens  # no padding
        self.is_new = not any(lengths)
        self.common_length = lengths[0] if self.is_full and len(set(lengths)) == 1 else None
        self.num_visible = self.num_tokens if self.is_new else longest
        self.max_length, self.capacity = longest - self.num_tokens, longest
        self.memory_positions = self.source_lengths = None
        if source_tables is not None:
            column = torch.arange(max(source_lengths), device=device)[None]
            self.source_lengths = torch.tensor(source_lengths, device=device)
            valid = None if min(source_lengths) == column.shape[1] else column < self.source_lengths[:, None]
            self.memory_positions = None if encodes else TokenPositions(column, valid=valid)

    @cached_property
    def layers(self) -> list[LayerCache]:  # type: ignore[override]
        kinds = zip(self.cache.pools, self.cache.is_linear, strict=True)
        return [(PagedLinearLayer if linear else PagedLayer)(self, pool) for pool, linear in kinds]

    @cached_property
    def cross_layers(self) -> list[CrossAttentionCache | None]:  # type: ignore[override]
        pools = enumerate(self.cache.source_pools)
        return [None if pool is None else PagedSource(self, layer) for layer, pool in pools]

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """The page and the offset (B, T) of each new token; page 0 for padding."""
        column = torch.arange(self.num_tokens, device=self.cache.device)
        index = self.lengths[:, None] + column
        page = index // PAGE_SIZE
        if self.is_full:
            return self.tables.gather(1, page).long(), index % PAGE_SIZE
        page = self.tables.gather(1, page.clamp(max=self.tables.shape[1] - 1)).long()
        return torch.where(column < self.counts[:, None], page, 0), index % PAGE_SIZE

    @cached_property
    def indices(self) -> dict[object, Tensor]:
        """Where `write` and `read` find tokens in a pool, which all blocks of a shape have at the same places."""
        return {}

    def write(self, pool: PagePool, name: str, new: Tensor) -> Tensor:
        """Write new keys or values (B, G, T, size) to their pages; return the tensor of the pool."""
        G, size = new.shape[1], new.shape[3]
        if G not in self.indices:
            pages, offsets = self.slots
            groups = torch.arange(G, device=pages.device)
            self.indices[G] = ((pages[..., None] * G + groups) * PAGE_SIZE + offsets[..., None]).flatten()  # (B T G,)
        own = pool.get(name, self.cache.count, new, G, PAGE_SIZE, size)
        own.view(-1, size).index_copy_(0, self.indices[G], new.transpose(1, 2).reshape(-1, size).to(own.dtype))
        return own

    def read(self, pool: Tensor, tables: Tensor, length: int) -> Tensor:
        """Return the first `length` tokens of rows with these tables (B, P), as (B, G, length, size)."""
        _, G, _, size = pool.shape
        key = tables is self.tables, G, length
        if key not in self.indices:
            pages = tables[:, None, : -(-length // PAGE_SIZE)].long()
            self.indices[key] = (pages * G + torch.arange(G, device=pages.device)[:, None]).flatten()  # (B G P,)
        found = pool.view(-1, PAGE_SIZE * size).index_select(0, self.indices[key])
        return found.view(len(tables), G, -1, size)[:, :, :length]

    def prepare_write(self, new_positions: TokenPositions) -> list[CacheWrite]:
        """Prepare a pass over new tokens; return one `CacheWrite` for each block."""
        if self.is_new:
            key_positions = new_positions
        elif self.common_length is not None:
            column = torch.arange(self.num_visible, device=self.cache.device)[None]
            key_positions = TokenPositions(column, start=0)
        else:
            column = torch.arange(self.num_visible, device=self.cache.device)[None]
            key_positions = TokenPositions(column, valid=column < (self.lengths + self.counts)[:, None])
        write = CacheWrite(self.tables, key_positions, self.num_visible, False)
        return [write] * len(self.layers)


class StaticRows(PagedRows):
    """Rows of a pass that has the same shapes every time; what differs is read from buffers, which others fill.

    tables, source_tables: page numbers (B, P), 0 for rows and pages that are not used.
    lengths, counts, source_lengths: (B,), tokens before the pass and new ones, at most `num_tokens`, and of the source.
    is_new: whether the rows are always new and full, as prompts of one length.
    """

    def __init__(
        self,
        cache: PagedCache,
        tables: Tensor,
        lengths: Tensor,
        counts: Tensor,
        num_tokens: int,
        source_tables: Tensor | None = None,
        source_lengths: Tensor | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self.cache, self.stack_config = cache, cache.stack_config
        self.tables, self.lengths, self.counts, self.num_tokens = tables, lengths, counts, num_tokens
        self.source_tables, self.source_lengths = source_tables, source_lengths
        self.is_full = self.is_new = is_new
        self.common_length = 0 if is_new else None
        self.capacity = tables.shape[1] * PAGE_SIZE
        self.num_visible = num_tokens if is_new else self.capacity
        self.max_length = self.capacity - num_tokens
        self.column = torch.arange(self.capacity, device=cache.device)[None]
        most = max(block.attention.num_kv_heads for block in cache.stack_config.layers())
        self.counters = make_counters(len(tables) * num_tokens * most, cache.device)
        if source_tables is not None:
            self.source_column = torch.arange(source_tables.shape[1] * PAGE_SIZE, device=cache.device)[None]
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forget what has been computed from the buffers."""
        for name in ("slots", "indices", "layers", "cross_layers"):
            self.__dict__.pop(name, None)
        self.memory_positions = None
        if self.source_lengths is not None:
            valid = self.source_column < self.source_lengths[:, None]
            self.memory_positions = TokenPositions(self.source_column, valid=valid)

    def prepare_write(self, new_positions: TokenPositions) -> list[CacheWrite]:
        key_positions = new_positions
        if not self.is_new:
            valid = self.column < (self.lengths + self.counts)[:, None]
            key_positions = TokenPositions(self.column, valid=valid)
        write = CacheWrite(self.tables, key_positions, self.num_visible, False)
        return [write] * len(self.layers)
