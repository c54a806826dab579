"""Record passes of a model as CUDA graphs and replay them: launching their many small kernels one by one is slow.

A recording has one shape: so many rows with so many new tokens each, and tables of so many pages.  Sizes are rounded
up, so that a few recordings serve all batches; rows that are left over have no tokens.  Buffers hold what a pass reads.

    run       one step, or the pass that checks proposals of speculative decoding
    burst     several steps of all rows, with the choice of each token, before Python looks at the result
    prompts   a pass over prompts of a shape that comes a second time in a row
    searches  several steps of a whole batch of beam searches, which need no pages (cuda_search.py)

A recording reads and writes the pages where they were when it was made, so `DevicePages` keeps both together; they
serve one engine after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from monoblock.inference.fast_modules import MAX_EXPERT_TOKENS
from monoblock.inference.pages import Pages
from monoblock.inference.runners.cuda_search import RecordedSearches
from monoblock.inference.runners.plain import ModelRunner
from monoblock.inference.runners.record import record
from monoblock.inference.sampler import Filters
from monoblock.inference.scheduler import PLAIN, RowPass
from monoblock.inference.supported_models import SUPPORTED, unsupported_field
from monoblock.kernels.gpu import next_power_of_two
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.experts import Experts
from monoblock.nn.paged_cache import PagedCache, StaticRows, token_bytes
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

MAX_STEPS = 128  # of a burst
MAX_TOKENS = 16  # of a row in a recorded pass, but for prompts
MAX_PROMPT_TOKENS = 1 << 14  # of all rows in a recorded pass over prompts
MAX_RECORDINGS = 64
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # and multiples of 64
MIN_PAGES = 8  # of a table
FIRST_BYTES = 1 << 30  # of pages that are allocated up front, if the engine has that many


def supports_cuda_graph(model: Transformer) -> bool:
    """Return whether the steps of a model can be recorded: it is on a GPU, and SUPPORTED allows all its blocks."""
    blocks = () if model.decoder is None else dict.fromkeys(model.decoder.config.layers())
    return model.device.type == "cuda" and all(unsupported_field(block, SUPPORTED) is None for block in blocks)


class PassShape(NamedTuple):
    """The sizes of a recorded pass."""

    rows: int
    tokens: int  # new ones of each row
    pages: int  # of a table
    source_pages: int = 0
    is_prompt: bool = False  # the rows are new, and all tokens real


class RecordedPass:
    """A pass of one shape over rows in buffers; with `filters`, it also chooses their next tokens and advances."""

    def __init__(
        self, model: Transformer, cache: PagedCache, shape: PassShape, filters: Filters | None, pool: Any
    ) -> None:
        self.model, self.shape, self.filters = model, shape, filters
        rows, device = shape.rows, cache.device
        sizes = [rows * shape.tokens, rows, rows, rows, -(-rows * shape.pages // 2), -(-rows * shape.source_pages // 2)]
        # Every part begins at a multiple of 16 bytes, which some kernels expect of a tensor.
        starts = np.cumsum([0, *(size + size % 2 for size in sizes)]).tolist()
        self.host = np.zeros(starts[-1], np.int64)
        self.inputs = torch.zeros(starts[-1], dtype=torch.long, device=device)
        self.host_parts = [self.host[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        parts = [self.inputs[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self.tokens, self.lengths, self.counts = parts[0].view(rows, shape.tokens), parts[1], parts[2]
        tables, source_tables = (
            part.view(torch.int32)[: rows * width].view(rows, width)
            for part, width in zip(parts[4:], (shape.pages, shape.source_pages), strict=True)
        )
        sources = (source_tables, parts[3]) if shape.source_pages else (None, None)
        self.rows = StaticRows(cache, tables, parts[1], parts[2], shape.tokens, *sources, is_new=shape.is_prompt)
        self.uniforms = torch.zeros(MAX_STEPS, rows, dtype=torch.double, device=device)
        self.chosen = torch.zeros(MAX_STEPS, rows, dtype=torch.long, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.last = torch.full((rows, 1), shape.tokens - 1, device=device)
        self.logits: Tensor
        self.replay = record(self._run_once, device, pool)  # no row has a token yet

    def _run_once(self) -> None:
        self.rows.begin_pass()
        options: dict[str, Any] = {"cache": self.rows}
        if self.shape.is_prompt:
            options["logits_at"] = self.last
        else:
            options["positions"] = self._positions()
        inputs = (self.tokens,) if self.model.encoder is None else (None, self.tokens)
        self.logits = self.model(*inputs, **options)
        if self.filters is not None:
            uniforms = self.uniforms.index_select(0, self.step)[0] if self.filters.has_sampling else self.uniforms[0]
            tokens = self.filters.choose(self.logits[:, -1], uniforms)
            self.chosen.index_copy_(0, self.step, tokens[None])
            self.tokens.copy_(tokens[:, None])
            self.lengths.add_(self.counts)
            self.step.add_(1)

    def _positions(self) -> Tensor:
        if self.shape.tokens == 1:
            return self.lengths[:, None]
        positions = self.lengths[:, None] + torch.arange(self.shape.tokens, device=self.lengths.device)
        context = self.model.config.context
        return positions if context is None else positions.clamp(max=context - 1)  # of tokens that are padding

    def load(
        self, passes: Sequence[RowPass], tables: np.ndarray, sources: np.ndarray, source_lengths: Sequence[int]
    ) -> None:
        """Fill the buffers for passes with these tables (passes, P), and the tables and lengths of their sources."""
        shape, used = self.shape, len(passes)
        tokens, starts, counts, lengths, *places = self.host_parts
        self.host.fill(0)
        new = tokens.reshape(shape.rows, shape.tokens)
        for index, one in enumerate(passes):
            new[index, : len(one.tokens)] = one.tokens
        starts[:used], counts[:used] = [one.start for one in passes], [len(one.tokens) for one in passes]
        lengths[:used] = source_lengths
        for place, width, given in zip(places, (shape.pages, shape.source_pages), (tables, sources), strict=True):
            rows = place.view(np.int32)[: shape.rows * width].reshape(shape.rows, width)
            rows[:used, : given.shape[1]] = given[:, :width]
        self.inputs.copy_(torch.from_numpy(self.host))

    def burst(self, count: int, uniforms: Sequence[Sequence[float]] | None) -> Tensor:
        """Run `count` steps and return the chosen tokens (count, rows); `uniforms` are numbers for some first rows."""
        if uniforms is not None:
            self.uniforms[:count, : len(uniforms)] = torch.tensor(uniforms, dtype=torch.double).T.to(self.step.device)
        self.step.zero_()
        for _ in range(count):
            self.replay()
        return self.chosen[:count]


class DevicePages:
    """The pages of a model on a GPU, and the passes that have been recorded over them."""

    def __init__(self, model: Transformer) -> None:
        assert model.decoder is not None
        self.model, self.cache = model, PagedCache(model.decoder.config, model.device)
        self.recordings: dict[object, RecordedPass] = {}  # those used last at the end
        self.sizes = 0, 0  # of the pages for which they were made
        self.last_prompts: PassShape | None = None  # if a pass over prompts was the last one over any
        self.searches = RecordedSearches(model)
        self.pool: Any = None  # memory that the recordings share

    def recorded(self, shape: PassShape, filters: Filters | None = None) -> RecordedPass:
        """Return the recorded pass of a shape, with the choice of tokens by these filters."""
        sizes = self.cache.count, self.cache.source_count
        if sizes != self.sizes:  # the pages have been moved
            self.recordings, self.sizes = {}, sizes
        key = shape, filters and filters.cache_key
        recording = self.recordings.pop(key, None)
        if recording is None:
            while len(self.recordings) >= MAX_RECORDINGS:
                del self.recordings[next(iter(self.recordings))]
            if not self.recordings and self.cache.device.type == "cuda":
                self.pool = torch.cuda.graph_pool_handle()  # torch has freed the one of recordings that are gone
            recording = RecordedPass(self.model, self.cache, shape, filters, self.pool)
        self.recordings[key] = recording
        return recording


class CudaRunner(ModelRunner):
    """Runs the fast copy of a model, and records what is repeated."""

    def __init__(
        self, model: Transformer, pages: Pages, sources: Pages, *, memory: DevicePages, **options: Any
    ) -> None:
        super().__init__(model, pages, sources, cache=memory.cache, **options)
        self.memory = memory
        self.has_experts = any(isinstance(module, Experts) for module in model.modules())
        self.padded: tuple[Filters, Filters] | None = None  # those of the last burst, and with more rows

    def make_room(self) -> None:
        """Take the memory of many pages at once: recordings are lost when it moves."""
        if self.pages.used > self.cache.count or self.sources.used > self.cache.source_count:
            size = next(self.model.parameters()).element_size()
            least = FIRST_BYTES // (PAGE_SIZE * token_bytes(self.cache.stack_config, size))
            self.cache.grow(*(min(one.count, max(one.used, least)) for one in (self.pages, self.sources)))

    # -- one pass -------------------------------------------------------------------------------------------------

    def run_model(self, model: Transformer, passes: Sequence[RowPass], tap: Tap | None) -> Tensor:
        shape = self._shape(passes) if model is self.model and tap is None else None
        if shape is None:
            return super().run_model(model, passes, tap)
        recorded = self._load(shape, passes)
        recorded.replay()
        logits = recorded.logits
        if logits.shape[1] == 1 and all(one.num_logits == 1 for one in passes):
            return logits[: len(passes), 0].clone()  # the next pass overwrites them
        ends = [(index, len(one.tokens), one.num_logits) for index, one in enumerate(passes)]
        wanted = [(index, place) for index, end, count in ends for place in range(end - count, end)]
        rows, places = torch.tensor(wanted, dtype=torch.long, device=self.device).reshape(-1, 2).T
        return logits[rows, places]

    def _shape(self, passes: Sequence[RowPass]) -> PassShape | None:
        """Return the shape of a recorded pass for these, or None if they are not recorded."""
        rows, tokens = len(passes), max(len(one.tokens) for one in passes)
        if tokens <= MAX_TOKENS and all(one.start > 0 for one in passes):
            return self._step_shape(passes, next_power_of_two(tokens), tokens)
        before, self.memory.last_prompts = self.memory.last_prompts, None
        is_new = all(one.start == 0 and len(one.tokens) == tokens and one.num_logits == 1 for one in passes)
        if is_new and self.model.encoder is None and not self.has_experts and rows * tokens <= MAX_PROMPT_TOKENS:
            self.memory.last_prompts = PassShape(rows, tokens, -(-tokens // PAGE_SIZE), is_prompt=True)
        return before if before == self.memory.last_prompts else None

    def _step_shape(self, passes: Sequence[RowPass], tokens: int, ahead: int) -> PassShape | None:
        """Return the shape for `tokens` a step and `ahead` in total, or None if it is not fixed."""
        rows, longest = round_up_rows(len(passes)), max(one.start for one in passes) + ahead
        if self.has_experts and rows * tokens > MAX_EXPERT_TOKENS:
            return None
        pages, source_pages = max(MIN_PAGES, next_power_of_two(-(-longest // PAGE_SIZE))), 0
        if self.model.encoder is not None:
            numbers = [one.row.request.source_place for one in passes]
            source_pages = next_power_of_two(int(self.sources.num_pages[numbers].max()))
        return PassShape(rows, tokens, pages, source_pages)

    def _load(self, shape: PassShape, passes: Sequence[RowPass], filters: Filters | None = None) -> RecordedPass:
        recorded = self.memory.recorded(shape, filters)
        requests = [one.row.request for one in passes]
        sources = self.sources.tables[[request.source_number or 0 for request in requests]]
        lengths = [len(request.prompt.source or ()) for request in requests]
        recorded.load(passes, self.pages.tables[[one.row.place for one in passes]], sources, lengths)
        return recorded

    # -- several steps --------------------------------------------------------------------------------------------

    def burst(self, passes: Sequence[RowPass], count: int, filters: Filters) -> list[list[int]] | None:
        """Run `count` steps from the newest token of each row, and return the next tokens of the rows.

        The pages of all tokens that a row may take are reserved, and `filters` are stateless.  Return None if these
        rows cannot be recorded.
        """
        shape = self._step_shape(passes, 1, count)
        if shape is None or any(one.row.request.variant != PLAIN for one in passes):
            return None
        self.make_room()
        uniforms = None
        if filters.has_sampling:
            uniforms = [[one.row.uniform(ahead) for ahead in range(count)] for one in passes]
        recorded = self._load(shape, passes, self._pad(filters, shape.rows))
        tokens = recorded.burst(count, uniforms)
        chosen: list[list[int]] = tokens[:, : len(passes)].T.tolist()
        return chosen

    def _pad(self, filters: Filters, rows: int) -> Filters:
        """Return filters for more rows; what they choose there does not matter."""
        missing = rows - len(filters.settings)
        if not missing:
            return filters
        if self.padded is None or self.padded[0] is not filters or len(self.padded[1].settings) != rows:
            self.padded = filters, Filters([*filters.settings, *[filters.settings[-1]] * missing], self.device)
        return self.padded[1]


def round_up_rows(count: int) -> int:
    """Return the number of rows of the recording for so many rows."""
    return next((size for size in ROWS if size >= count), -(-count // 64) * 64)
