"""Keys and values kept between forward passes: one `LayerCache` for each block, with a separate length for each row.

A forward pass writes new tokens after the first `lengths` tokens of each row, but does not change `lengths`; the
decoding loop does so with `advance`.  So a pass can be repeated, draft tokens can be dropped (`truncate`), and rows can
be reordered (`select`) or copied (`fork`).  Padding is not stored: the length of a row counts its valid tokens.

What is stored depends on the attention of a block:

    full      a column for every token up to the capacity; also of a window with global tokens or random blocks
    windowed  a ring of window + chunk - 1 columns: what a window still sees while `chunk` tokens are written
    linear    sums over the tokens, and a ring of the last `chunk` tokens (linear_state.py)
    cross     keys and values of the source, computed once
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monoblock.config.model import AttentionConfig, StackConfig
from monoblock.errors import InputError
from monoblock.nn.kv_cache.cache_index import CacheIndex, CacheWrite
from monoblock.nn.kv_cache.layer_cache import CrossAttentionCache, LayerCache
from monoblock.nn.kv_cache.linear_state import LinearLayerCache
from monoblock.nn.kv_cache.linear_write import LinearWrite
from monoblock.nn.token_positions import TokenPositions

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
            size, window = self._layer_capacity(block.attention, chunk)
            self.layers.append((LinearLayerCache if block.attention.kind == "linear" else LayerCache)(size))
            self.cross_layers.append(CrossAttentionCache() if block.cross is not None else None)
            self.index_by_capacity.setdefault(size, CacheIndex(batch, size, window, device))

    def _layer_capacity(self, config: AttentionConfig, chunk: int) -> tuple[int, int | None]:
        """Return the number of columns a block needs, and its window if the columns form a ring, else None."""
        # Earlier tokens are in the sums of linear attention.
        window = 1 if config.kind == "linear" else config.cached_window
        if window is None or window + chunk - 1 >= self.capacity:
            return self.capacity, None
        return window + chunk - 1, window

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def max_droppable(self) -> int:
        """The largest number of tokens of one pass that can be dropped again: those of a ring, or the capacity."""
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
        self.lengths, self.max_written = self.lengths[rows], self.max_written[rows]
        for index in self.index_by_capacity.values():
            index.select(rows)
        for layer in (*self.layers, *self.cross_layers):
            if layer is not None:
                layer.map_tensors(lambda t: t[rows])
        if self.memory_positions is not None:
            self.memory_positions = self.memory_positions.map_tensors(lambda t: t[rows] if t.shape[0] > 1 else t)

    def fork(self, row: int) -> None:
        """Append a copy of one row."""
        if not -self.batch <= row < self.batch:
            raise InputError(f"there is no row {row} in a cache of {self.batch} rows; give 0 to {self.batch - 1}")
        rows = torch.arange(self.batch, device=self.lengths.device)
        self.select(torch.cat((rows, rows[row].view(1))))

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the cache by fn(tensor), for example to copy it to another device or dtype."""
        self.lengths, self.max_written = fn(self.lengths), fn(self.max_written)
        for index in self.index_by_capacity.values():
            index.map_tensors(fn)
        for layer in (*self.layers, *self.cross_layers):
            if layer is not None:
                layer.map_tensors(fn)
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
