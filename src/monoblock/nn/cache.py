"""Keys and values kept between forward passes: one `LayerCache` for each block, with a separate length for each row.

A forward pass writes new tokens after the first `lengths` tokens of each row, but does not change `lengths`; the
decoding loop does so with `advance`.  So a pass can be repeated, draft tokens can be dropped (`truncate`), and rows can
be reordered (`select`) or copied (`fork`).  Padding is not stored: the length of a row counts its valid tokens.

What is stored depends on the attention of a block:

    full      a column for every token up to the capacity; also of a window with global tokens or random blocks
    windowed  a ring of window + chunk - 1 columns: what a window still sees while `chunk` tokens are written
    linear    sums over the tokens, and a ring of the last `chunk` tokens (`LinearState`)
    cross     keys and values of the source, computed once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from monoblock.config.model import AttentionConfig, StackConfig
from monoblock.errors import InputError
from monoblock.nn.masks import Mask, TokenPositions

DEFAULT_CHUNK = 16


class Cache:
    """The cache of one decoder for `batch` rows of at most `capacity` tokens.

    `chunk` is the number of tokens a pass usually writes; longer passes are correct, but slower in windowed blocks, and
    all their tokens must be kept.
    """

    def __init__(
        self,
        stack_config: StackConfig,
        *,
        batch: int,
        capacity: int,
        chunk: int = DEFAULT_CHUNK,
        device: torch.device | None = None,
    ) -> None:
        if batch < 1 or capacity < 1 or chunk < 1:
            raise InputError(
                f"a cache cannot have batch={batch}, capacity={capacity} and chunk={chunk}; write 1 or more for each"
            )
        self.stack_config, self.capacity = stack_config, capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.max_written = torch.zeros_like(self.lengths)  # the most tokens ever written to each row
        self.common_length: int | None = 0  # the length of all rows, if the host knows that they are equally long
        self.max_length = 0
        self.overwrites_window = False  # the last pass wrote more than a chunk, so that all its tokens must be kept
        self.layers: list[LayerCache] = []
        self.cross_layers: list[CrossAttentionCache | None] = []
        self.index_by_capacity: dict[int, CacheIndex] = {}
        self.memory_positions: TokenPositions | None = None  # positions of the source
        for block in stack_config.layers():
            is_linear = block.attention.kind == "linear"  # earlier tokens are in its sums
            size, window = capacity, 1 if is_linear else block.attention.cached_window
            if window is not None and window + chunk - 1 < capacity:
                size = window + chunk - 1  # of a ring
            else:
                window = None
            self.layers.append((LinearLayerCache if is_linear else LayerCache)(size))
            self.cross_layers.append(CrossAttentionCache() if block.cross is not None else None)
            self.index_by_capacity.setdefault(size, CacheIndex(batch, size, window, device))

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def max_droppable(self) -> int:
        """How many tokens of a pass can still be dropped: those of a ring, or the capacity."""
        rings = [index for index in self.index_by_capacity.values() if index.window is not None]
        return min((index.max_droppable for index in rings), default=self.capacity)

    # -- writing and truncating ------------------------------------------------------------------------------------

    def prepare_write(self, new_positions: TokenPositions) -> list[CacheWrite]:
        """Prepare a pass over new tokens; return one `CacheWrite` for each block."""
        counts = new_positions.length if new_positions.valid is None else new_positions.valid.sum(-1)
        required = self.max_length + new_positions.length
        if required > self.capacity:  # an upper bound: padding is not stored, and long rows may be gone
            self.max_length = int(self.lengths.max())
            required = int((self.lengths + counts).max())
        if required > self.capacity:
            raise InputError(
                f"the cache holds at most {self.capacity} tokens per row, but {self.max_length} are in it and "
                f"{new_positions.length} more were given; make it with capacity={required} or more"
            )
        if self.overwrites_window:  # the last pass is repeated
            self._check_overwritten(self.lengths)
        self.overwrites_window = new_positions.length > self.max_droppable
        linear_writes = {
            size: LinearWrite.prepare(new_positions, self.lengths, self.max_written, size)
            for size in {layer.capacity for layer in self.layers if isinstance(layer, LinearLayerCache)}
        }
        self.max_written = torch.maximum(self.max_written, self.lengths + counts)
        writes = {
            size: index.prepare_write(new_positions, self.lengths, self.max_length)
            for size, index in self.index_by_capacity.items()
        }
        writes = {size: write._replace(linear=linear_writes.get(size)) for size, write in writes.items()}
        return [writes[layer.capacity] for layer in self.layers]

    def advance(self, counts: int | Tensor) -> None:
        """Keep the first `counts` of the tokens just written; `counts` is a number for all rows, or a tensor (B,)."""
        least, most = (counts, counts) if isinstance(counts, int) else (int(counts.min()), int(counts.max()))
        if least < 0 or (isinstance(counts, int) and self.max_length + most > self.capacity):
            raise InputError(
                f"a cache of capacity {self.capacity} that holds {self.max_length} tokens cannot keep {counts} more; "
                f"give a number from 0 to {self.capacity - self.max_length}"
            )
        if self.overwrites_window:
            self._check_overwritten(self.lengths + counts)
            self.overwrites_window = False
        self.lengths = self.lengths + counts
        if isinstance(counts, int):
            self.common_length = None if self.common_length is None else self.common_length + counts
            self.max_length += counts
        else:
            self.common_length, self.max_length = None, int(self.lengths.max())

    def truncate(self, lengths: int | Tensor) -> None:
        """Cut each row to at most `lengths` tokens.

        Raise InputError if a windowed block has overwritten tokens that it would then need again.
        """
        if int(torch.as_tensor(lengths).min()) < 0:
            raise InputError(f"a cache cannot be cut to {lengths} tokens; write 0 or more")
        new_lengths = torch.minimum(self.lengths, torch.as_tensor(lengths, device=self.lengths.device))
        self._check_overwritten(new_lengths)
        self.overwrites_window = False
        self.max_written = torch.where(new_lengths == 0, 0, self.max_written)
        self.lengths = new_lengths
        self.max_length = int(self.lengths.max())
        self.common_length = self.max_length if self.common_length is not None and isinstance(lengths, int) else None

    def _check_overwritten(self, new_lengths: Tensor) -> None:
        """Raise InputError if rows of `new_lengths` (B,) tokens need tokens that a windowed block has overwritten."""
        indices = self.index_by_capacity.values()
        if not all(bool(index.can_truncate(new_lengths, self.max_written).all()) for index in indices):
            count = int((self.max_written - new_lengths).max())
            raise InputError(
                f"{count} tokens cannot be dropped: they have overwritten earlier tokens in a windowed block, which "
                f"would be needed again; make the cache with chunk={count} or more"
            )

    # -- rows ------------------------------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Keep the rows with the given indices, in that order; an index may occur several times."""
        batch = self.batch  # positions of the source that all rows share have one row
        self.map_tensors(lambda t: t[rows] if t.shape[0] == batch else t)

    def fork(self, row: int) -> None:
        """Append a copy of one row."""
        if not -self.batch <= row < self.batch:
            raise InputError(f"there is no row {row} in a cache of {self.batch} rows; give 0 to {self.batch - 1}")
        rows = torch.arange(self.batch, device=self.lengths.device)
        self.select(torch.cat((rows, rows[row].view(1))))

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the cache by fn(tensor), for example to copy it to another device or dtype."""
        self.lengths, self.max_written = fn(self.lengths), fn(self.max_written)
        for part in (*self.index_by_capacity.values(), *self.layers, *self.cross_layers):
            if part is not None:
                part.map_tensors(fn)
        if self.memory_positions is not None:
            self.memory_positions = self.memory_positions.map_tensors(fn)

    # -- properties ------------------------------------------------------------------------------------------------

    @property
    def has_documents(self) -> bool:
        """Whether the cached tokens belong to packed documents."""
        return next(iter(self.index_by_capacity.values())).document is not None

    def last_positions(self) -> tuple[Tensor, Tensor | None]:
        """Return the position and the document of each row's last token, both (B, 1).

        The document is None if the cache has no documents.
        """
        return next(iter(self.index_by_capacity.values())).last_positions(self.lengths)

    @property
    def nbytes(self) -> int:
        """The size of the cached keys, values and sums in bytes."""
        layers = [t[:, :, :-1] for layer in self.layers for t in (layer.keys, layer.values) if t is not None]
        sources = [t for layer in self.cross_layers if layer for t in (layer.keys, layer.values) if t is not None]
        sums = [t for layer in self.layers if isinstance(layer, LinearLayerCache) for t in layer.list_sums()]
        return sum(t.numel() * t.element_size() for t in layers + sources + sums)


# -- which column holds which token -----------------------------------------------------------------------------------


class TensorFields:
    """An object whose attributes are tensors, which can be replaced together."""

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by fn(tensor)."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, fn(value))


class BeamSlots(NamedTuple):
    """Where the tokens of the hypotheses are in the cache of a beam search (see beam_cache.py)."""

    writers: Tensor  # (searches, beams, positions) the beam that wrote each token; `beams` where there is none
    lengths: Tensor  # (searches,) the number of tokens before the new ones


class CacheWrite(NamedTuple):
    """The columns that one forward pass writes to, and the positions of the keys that its queries see.

    It is the same in all layers of one capacity.
    """

    columns: Tensor  # (B, T) the column of each new token; tokens that are not kept go to the scratch column at the end
    key_positions: TokenPositions
    num_visible: int  # the number of columns that the queries see
    is_concatenated: bool  # if the new tokens do not fit in the ring, queries see the old columns, then all new tokens
    linear: LinearWrite | None = None  # in a block with linear attention: which tokens its sums hold
    mask: Mask | None = None  # what the queries see, besides the mask of the block; None: no further restriction
    beams: BeamSlots | None = None  # in a beam search whose beams are tokens of one row: the same as `mask`


class CacheIndex(TensorFields):
    """The position, document and flag of the token in each column, the same in all layers of one capacity.

    Each field has shape (B, capacity + 1).
    """

    def __init__(self, batch: int, capacity: int, window: int | None, device: torch.device | None) -> None:
        self.capacity, self.window = capacity, window
        self.positions = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
        self.token_index = torch.full_like(self.positions, -1)  # index of a column's token in its row; -1: empty
        self.document: Tensor | None = None
        self.prefix_or_global: Tensor | None = None

    def prepare_write(self, new_positions: TokenPositions, lengths: Tensor, max_length: int) -> CacheWrite:
        """Record the positions of new tokens; return the columns to write to and the positions of the keys they see."""
        B, T = lengths.shape[0], new_positions.length
        valid = new_positions.valid
        if valid is None:
            valid = torch.ones(1, 1, dtype=torch.bool, device=lengths.device)
        token_index = lengths[:, None] + valid.expand(B, T).long().cumsum(-1) - 1  # (B, T) among valid tokens
        limit = token_index[:, -1:] + 1
        is_concatenated = self.window is not None and self.max_droppable < T
        before = self._visible_positions(lengths[:, None], self.capacity) if is_concatenated else None
        kept = valid & (token_index >= limit - self.capacity)
        columns = torch.where(kept, token_index % self.capacity, self.capacity)
        self._record(new_positions, token_index, columns)
        if before is not None:
            return CacheWrite(columns, _concatenate_positions(before, new_positions, B), self.capacity, True)
        num_visible = self.capacity if self.window is not None else min(self.capacity, max_length + T)
        if new_positions.start is not None and self.is_sequential:
            key_positions = TokenPositions(self.positions[:1, :num_visible], start=0)
        else:
            key_positions = self._visible_positions(limit, num_visible)
        return CacheWrite(columns, key_positions, num_visible, False)

    @property
    def max_droppable(self) -> int:
        """The largest number of tokens that a pass may write and drop again: the ring without the window, and one."""
        return self.capacity if self.window is None else self.capacity - self.window + 1

    @property
    def is_sequential(self) -> bool:
        """Whether columns hold tokens in order and every token sees all tokens before it."""
        return self.window is None and self.document is None and self.prefix_or_global is None

    def _record(self, new_positions: TokenPositions, token_index: Tensor, columns: Tensor) -> None:
        B, T = columns.shape
        self.positions.scatter_(1, columns, new_positions.positions.expand(B, T))
        self.token_index.scatter_(1, columns, token_index)
        self.token_index[:, self.capacity] = -1
        for name in ("document", "prefix_or_global"):
            new, stored = getattr(new_positions, name), getattr(self, name)
            if new is None and stored is None:
                continue
            if stored is None:
                stored = torch.zeros_like(self.positions, dtype=new.dtype)
                setattr(self, name, stored)
            new = torch.zeros_like(columns, dtype=stored.dtype) if new is None else new.expand(B, T)
            stored.scatter_(1, columns, new)

    def _visible_positions(self, limit: Tensor, num_visible: int) -> TokenPositions:
        """Return the positions in the first `num_visible` columns; only the first `limit` (B, 1) tokens are valid."""
        token_index = self.token_index[:, :num_visible]
        document, prefix_or_global = (
            None if field is None else field[:, :num_visible].clone()
            for field in (self.document, self.prefix_or_global)
        )
        valid = (token_index >= 0) & (token_index < limit)
        return TokenPositions(self.positions[:, :num_visible].clone(), document, valid, prefix_or_global)

    def last_positions(self, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the position and the document of each row's last token, both (B, 1).

        An empty row has position -1, and the document is None if there are no documents.
        """
        column = ((lengths - 1).clamp(min=0) % self.capacity)[:, None]
        positions = self.positions.gather(1, column).masked_fill(lengths[:, None] == 0, -1)
        return positions, None if self.document is None else self.document.gather(1, column)

    def can_truncate(self, lengths: Tensor, max_written: Tensor) -> Tensor:
        """Return a boolean for each row (B,): whether the row can be cut to its first `lengths` tokens.

        The cache of a windowed layer is a ring that overwrites old tokens; `max_written` tokens were written to it.
        A row can be cut only if no token in the window of its next token has been overwritten.
        """
        if self.window is None:
            return torch.ones_like(lengths, dtype=torch.bool)
        return (max_written - self.capacity).clamp(min=0) <= (lengths + 1 - self.window).clamp(min=0)


def _concatenate_positions(old: TokenPositions, new: TokenPositions, batch: int) -> TokenPositions:
    """Concatenate the positions in a ring and those of a chunk too long for the ring."""
    fields: dict[str, Any] = {}
    for name, default in (("positions", 0), ("document", 0), ("valid", True), ("prefix_or_global", False)):
        first, second = getattr(old, name), getattr(new, name)
        if first is not None or second is not None:
            first = torch.full_like(old.positions, default, dtype=second.dtype) if first is None else first
            second = torch.full_like(new.positions, default, dtype=first.dtype) if second is None else second
            fields[name] = torch.cat((first, second.expand(batch, -1)), 1)
    return TokenPositions(**fields)


# -- keys and values of one block -------------------------------------------------------------------------------------


class KeyValues(NamedTuple):
    keys: Float[Tensor, "B G S K"]
    values: Float[Tensor, "B G S Kv"]


class KeyValueStore(TensorFields):
    """Keys and values, None before the first pass."""

    keys: Tensor | None = None
    values: Tensor | None = None


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
            shape = (x.shape[0], config.num_kv_heads, self.capacity + 1)
            self.keys = x.new_zeros(*shape, config.key_size(width))
            self.values = x.new_zeros(*shape, config.value_size(width))

    def _zeros_like(self, new: Tensor) -> Tensor:
        return new.new_zeros(*new.shape[:2], self.capacity + 1, new.shape[3])


class CrossAttentionCache(KeyValueStore):
    """Keys and values of the source in cross-attention, computed on the first pass."""

    def fill(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def stored(self) -> KeyValues | None:
        return None if self.keys is None or self.values is None else KeyValues(self.keys, self.values)


# -- sums of linear attention -----------------------------------------------------------------------------------------


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
        if self.state is not None:
            self.state = LinearState(*(fn(tensor) for tensor in self.state))

    def list_sums(self) -> list[Tensor]:
        """Return what is stored beside keys and values: the sums, and the keys of the denominator if they differ."""
        plain = [] if self.plain_keys is None else [self.plain_keys[:, :, :-1]]
        return [*plain, *(self.state or ())]


def _add_tokens(state: LinearState, keys: Tensor, plain_keys: Tensor, values: Tensor) -> LinearState:
    return LinearState(state.products + keys.mT @ values, state.keys + plain_keys.sum(2))


class LinearWrite(NamedTuple):
    """Which tokens of a row are in the ring, and which leave it in this pass; the same in all linear blocks."""

    in_ring: Tensor  # (B, R) the column holds a token that the new tokens see
    leaving: Tensor  # (B, R) this token is added to the sums now
    skips_ring: Tensor | None  # (B, T) this new token is added to the sums at once; None if all new tokens fit
    is_started: Tensor  # (B,) the sums are not empty

    @classmethod
    def prepare(cls, new_positions: TokenPositions, lengths: Tensor, max_written: Tensor, capacity: int) -> Self:
        """Prepare a pass over new tokens after `lengths` tokens (B,).

        `max_written` (B,) is the largest number of tokens in a row before this pass: all but the last `capacity` of
        them are in the sums.
        """
        if new_positions.document is not None:
            raise InputError(
                "linear attention cannot cache packed documents; give each document a row of its own, or cache=None"
            )
        T, valid = new_positions.length, new_positions.valid
        counts = lengths.new_full((1, 1), T) if valid is None else valid.sum(-1, keepdim=True)
        before, summed = lengths[:, None], (max_written[:, None] - capacity).clamp(min=0)
        summed_after = torch.maximum(summed, before + counts - capacity)
        column = torch.arange(capacity, device=lengths.device)
        token_index = summed + (column - summed) % capacity  # (B, R) of the token in each column
        in_ring = token_index < before
        skips_ring = None
        if capacity < T:
            ones = torch.ones(1, T, dtype=torch.long, device=lengths.device) if valid is None else valid.long()
            skips_ring = (before + ones.cumsum(-1) - 1 < summed_after) & ones.bool()
        return cls(in_ring, in_ring & (token_index < summed_after), skips_ring, summed[:, 0] > 0)
