"""Run rows of tokens through the modules of a model, with keys and values in pages.

A `Runner` is what the engine asks for logits; cpu.py and cuda.py have faster ones.  `UncachedRunner` runs whole
sequences at every step and stores nothing; it is the reference for all others.  `Ensemble` averages several models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.inference.pages import PageCopies, Pages
from monoblock.inference.runners.cpu import MAX_TOKENS
from monoblock.inference.scheduler import PLAIN, Edit, Prompt, Request, Row, RowPass, Variant, pad_right
from monoblock.kernels.cpu import onednn
from monoblock.nn.attention import Attention
from monoblock.nn.paged_cache import PagedCache, PagedRows
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer


class RunResult(NamedTuple):
    logits: Tensor  # (sum of num_logits, V), in the order of the passes
    captured: dict[Row, dict[str, Tensor]]


class Runner(Protocol):
    """Computes logits; the engine reserves pages before it calls, and counts the new tokens afterwards."""

    def inference(self) -> AbstractContextManager[object]:
        """Return the context manager for everything that a runner does: no gradients, evaluation mode."""
        ...

    def encode(self, requests: Sequence[Request]) -> None:
        """Encode the sources of requests, and write their keys and values to pages."""
        ...

    def copy_pages(self, copies: PageCopies) -> None: ...

    def run(self, passes: Sequence[RowPass]) -> RunResult:
        """Run tokens of rows; nothing that is stored before them changes, so a pass may be repeated."""
        ...


class RowTap:
    """A tap for the pass of a single row: it applies the edits of a request and keeps activations by name."""

    def __init__(self, variant: Variant, start: int, *, has_encoder: bool) -> None:
        self.variant, self.start = variant, start
        self.source_parts = ("input", "encoder") if has_encoder else ()  # a pass has all tokens of the source
        self.captured: dict[str, Tensor] = {}
        self.unmatched: list[Edit | str] = [*variant.edits, *variant.capture]

    def wants(self, name: str) -> bool:
        return self.changes(name) or any(_names(pattern, name) for pattern in self.variant.capture)

    def changes(self, name: str) -> bool:
        return any(edit.matches(name) for edit in self.variant.edits)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        start = 0 if name.split(".")[0] in self.source_parts else self.start
        for edit in self.variant.edits:
            if edit.matches(name):
                tensor = edit.apply(name, tensor, start)
        if any(_names(pattern, name) for pattern in self.variant.capture):
            self.captured[name] = tensor[0].clone()
        self.unmatched = [one for one in self.unmatched if not _names(one, name)]
        return tensor

    def check_names(self) -> None:
        """Raise InputError if an edit or a pattern names no activation."""
        if self.unmatched:
            what = f"capture={one!r}" if isinstance(one := self.unmatched[0], str) else "an edit"
            raise InputError(f"{what} names no activation of this model; mb.trace(model, ids) lists those it has")


def _names(one: Edit | str, name: str) -> bool:
    """Return whether an edit, or a pattern of `capture`, is for the activation of this name."""
    return fnmatchcase(name, one) if isinstance(one, str) else one.matches(name)


class ModelRunner:
    """Runs a model with pages.

    plain: the model whose modules edited rows run, if `model` is a fast copy of it.
    adapters: by name, models that share the weights of `model` but for an adapter.
    tap: a tap for all passes, see nn/tap.py.
    exact: whether `model` is exact (see exact.py), so that sources are encoded alone.
    """

    def __init__(
        self,
        model: Transformer,
        pages: Pages,
        sources: Pages,
        *,
        plain: Transformer | None = None,
        adapters: Mapping[str, Transformer] | None = None,
        tap: Tap | None = None,
        exact: bool = False,
    ) -> None:
        self.model, self.plain, self.adapters, self.tap = model, plain or model, dict(adapters or {}), tap
        self.pages, self.sources, self.device, self.exact = pages, sources, model.device, exact
        has_kernels = getattr(model.decoder, "cpu_stack", None) is not None
        self.cache = PagedCache(model.decoder.config, self.device, has_kernels=has_kernels)
        self.unencoded: set[int] = set()  # numbers of sources that the next pass of the modules encodes
        self.last_sources: tuple[list[int], Any] = [], []  # of the last pass: the requests and what has been read

    @contextmanager
    def inference(self) -> Iterator[None]:
        # Modules of users may do what inference mode forbids, such as FSDP's in-place all-gather.
        is_fast = self.plain is not self.model
        with torch.inference_mode(is_fast), torch.no_grad(), onednn.disabled_where_slow(), ExitStack() as modes:
            if not is_fast:
                modes.enter_context(evaluation_mode(self.model))
            yield

    def model_of(self, variant: Variant) -> Transformer:
        if variant.adapter is not None:
            return self.adapters[variant.adapter]
        return self.plain if variant.needs_own_pass else self.model

    # -- sources --------------------------------------------------------------------------------------------------

    def encode(self, requests: Sequence[Request]) -> None:
        """Encode sources, or let the next pass do it: modules such as sharded ones work in `forward` only."""
        self.make_room()
        self.last_sources = [], []
        key = id if self.exact else lambda request: _variant_key(request, request.variant)
        for group in _group(requests, key):
            model = self.model_of(group[0].variant)
            if model is self.plain or group[0].variant.adapter is not None:
                self.unencoded |= {request.source_place for request in group}
            else:
                self._encode(group, model)

    def _encode(self, requests: Sequence[Request], model: Transformer) -> None:
        sources = [request.prompt.source or () for request in requests]
        memory = model.encode(*pad_right(sources, self.device))
        tables = self._tables(self.sources, [request.source_place for request in requests])
        for layer, block in enumerate(model.decoder.blocks):
            if isinstance(block.cross, Attention):
                self.cache.write_source(layer, block.cross.project_source(memory), tables)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Grow the pools if pages are in use for which they have no room."""
        self.cache.grow(self.pages.used, self.sources.used)

    def copy_pages(self, copies: PageCopies) -> None:
        self.make_room()
        self.cache.copy_pages(*copies)

    def run(self, passes: Sequence[RowPass]) -> RunResult:
        self.make_room()
        if self.exact and self.cache.has_kernels:
            return RunResult(self._run_pieces(passes), {})
        return self._run_groups(passes)

    def _run_pieces(self, passes: Sequence[RowPass]) -> Tensor:
        """Run at most MAX_TOKENS tokens at a time, which an operator takes; return the logits that are wanted."""
        rounds: list[list[tuple[int, RowPass]]] = [[]]
        left = MAX_TOKENS
        for index, one in enumerate(passes):
            for piece in _cut(one, MAX_TOKENS):
                if len(piece.tokens) > left:
                    rounds.append([])
                    left = MAX_TOKENS
                rounds[-1].append((index, piece))
                left -= len(piece.tokens)
        logits: list[list[Tensor]] = [[] for _ in passes]
        for together in rounds:
            result = self._run_groups([piece for _, piece in together]).logits
            sizes = [piece.num_logits for _, piece in together]
            for (index, _), part in zip(together, result.split(sizes), strict=True):
                logits[index].append(part)
        return torch.cat([part for parts in logits for part in parts])

    def _run_groups(self, passes: Sequence[RowPass]) -> RunResult:
        captured: dict[Row, dict[str, Tensor]] = {}
        groups = [list(range(len(passes)))]
        if self.unencoded or any(len(one.tokens) > 1 or one.row.request.variant is not PLAIN for one in passes):
            keys = [(self._is_unencoded(one), _pass_key(one)) for one in passes]
            groups = _group(range(len(passes)), keys.__getitem__)
        parts = [self._run_group([passes[index] for index in group], captured) for group in groups]
        return RunResult(_in_order(passes, groups, parts), captured)

    def _run_group(self, passes: Sequence[RowPass], captured: dict[Row, dict[str, Tensor]]) -> Tensor:
        """Run passes of about the same length in one pass of the model; return the logits that are wanted."""
        variant, tap = passes[0].row.request.variant, self.tap
        model = self.model_of(variant)
        if variant.needs_own_pass:
            tap = RowTap(variant, self.first_token(passes[0]), has_encoder=model.encoder is not None)
        with evaluation_mode(model) if model is not self.model else nullcontext():
            logits = self.run_model(model, passes, tap)
        if isinstance(tap, RowTap):
            if passes[0].start == 0:
                tap.check_names()
            if variant.capture:
                captured[passes[0].row] = tap.captured
        return logits

    def first_token(self, one: RowPass) -> int:
        """Return the number of the first token of a row that a pass sees."""
        return one.start

    def _is_unencoded(self, one: RowPass) -> bool:
        return one.row.request.source_number in self.unencoded

    def run_model(self, model: Transformer, passes: Sequence[RowPass], tap: Tap | None) -> Tensor:
        encodes = bool(self.unencoded) and any(map(self._is_unencoded, passes))
        rows = self.make_rows(passes, encodes=encodes)
        at, wanted = _logits_at(passes, self.device)
        options: dict[str, Any] = {"cache": rows, "logits_at": at, "tap": tap}
        if rows.source_tables is None or encodes:
            logits = run_texts(model, _texts(passes), **options)
        else:
            tokens, mask = pad_right([one.tokens for one in passes], self.device)
            logits = model(None, tokens, target_mask=mask, **options)
        if encodes:
            self.unencoded -= {one.row.request.source_place for one in passes}
        return logits[:, -1] if wanted is None else logits[wanted]

    def make_rows(self, passes: Sequence[RowPass], *, encodes: bool = False) -> PagedRows:
        """Return the cache for a pass over these rows; `encodes` says whether the pass encodes their sources."""
        starts, counts = [one.start for one in passes], [len(one.tokens) for one in passes]
        tables = self._tables(self.pages, [one.row.place for one in passes])
        if self.model.encoder is None:
            return PagedRows(self.cache, tables, starts, counts)
        requests = [one.row.request for one in passes]
        sources = self._tables(self.sources, [request.source_place for request in requests])
        lengths = [len(request.prompt.source or ()) for request in requests]
        rows = PagedRows(self.cache, tables, starts, counts, sources, lengths, encodes=encodes)
        if self.device.type == "cpu" and not encodes:  # the next pass is often over the same rows
            ids = [request.id for request in requests]
            if ids != self.last_sources[0]:
                self.last_sources = ids, rows.cross_layers
            rows.cross_layers = self.last_sources[1]
        return rows

    def _tables(self, pages: Pages, numbers: Sequence[int]) -> Tensor:
        width = int(pages.num_pages[numbers].max())
        return torch.from_numpy(pages.tables[numbers, :width]).to(self.device)


class UncachedRunner(ModelRunner):
    """Runs all tokens of every row again at every step."""

    def first_token(self, one: RowPass) -> int:
        return 0

    def encode(self, requests: Sequence[Request]) -> None:
        """Do nothing: sources are encoded in every pass."""

    def copy_pages(self, copies: PageCopies) -> None:
        """Do nothing: there are no pages."""

    def run_model(self, model: Transformer, passes: Sequence[RowPass], tap: Tap | None) -> Tensor:
        whole = [one._replace(tokens=[*one.row.tokens[: one.start], *one.tokens], start=0) for one in passes]
        at, wanted = _logits_at(whole, self.device)
        logits = run_texts(model, _texts(whole), logits_at=at, tap=tap)
        return logits[:, -1] if wanted is None else logits[wanted]


class Ensemble:
    """Several models with the same rows, whose log-probabilities are averaged."""

    def __init__(self, members: Sequence[Runner]) -> None:
        self.members = tuple(members)

    def inference(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        for member in self.members:
            stack.enter_context(member.inference())
        return stack

    def encode(self, requests: Sequence[Request]) -> None:
        for member in self.members:
            member.encode(requests)

    def copy_pages(self, copies: PageCopies) -> None:
        for member in self.members:
            member.copy_pages(copies)

    def run(self, passes: Sequence[RowPass]) -> RunResult:
        return RunResult(mean_log_probs([member.run(passes).logits for member in self.members]), {})


def mean_log_probs(logits: Sequence[Tensor]) -> Tensor:
    """Return the mean of the log-probabilities of several models, normalized; shape and vocabulary must be the same.

    Normalized, it is the geometric mean of the probabilities.
    """
    return torch.stack([one.float().log_softmax(-1) for one in logits]).mean(0).log_softmax(-1)


def run_texts(model: Any, texts: Sequence[Prompt], **options: Any) -> Tensor:
    """Run a model over whole texts: their tokens and, if it has an encoder, their sources."""
    tokens, mask = pad_right([text.ids for text in texts], model.device)
    if model.encoder is None:
        return model(tokens, mask, **options)
    source, source_mask = pad_right([text.source or () for text in texts], model.device)
    return model(source, tokens, source_mask, mask, **options)


def _texts(passes: Sequence[RowPass]) -> list[Prompt]:
    return [Prompt(tuple(one.tokens), one.row.request.prompt.source) for one in passes]


# -- groups of rows -------------------------------------------------------------------------------------------------


def _cut(one: RowPass, size: int) -> Iterator[RowPass]:
    """Yield the parts of a pass with at most `size` tokens, and the wanted logits of each."""
    count = len(one.tokens)
    for first in range(0, count, size):
        last = min(first + size, count)
        num_logits = max(0, last - max(first, count - one.num_logits))
        yield RowPass(one.row, one.tokens[first:last], one.start + first, num_logits)


def _group(items: Sequence[Any], key: Any) -> list[list[Any]]:
    """Return the items as lists of equal key, in the order of their first ones."""
    groups: dict[object, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _variant_key(owner: Request | Row, variant: Variant) -> object:
    return id(owner) if variant.needs_own_pass else variant.adapter


def _pass_key(one: RowPass) -> object:
    """Rows share a pass of the model if they run about equally many tokens, so that there is little padding."""
    count = len(one.tokens)
    size = 0 if count == 1 else 8 if count <= 8 and one.start else count.bit_length() + 8
    return _variant_key(one.row, one.row.request.variant), one.start == 0, size


def _logits_at(passes: Sequence[RowPass], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return which logits (B, n) to compute, and which of these are wanted; None for the last one of every row."""
    counts, wanted_counts = [len(one.tokens) for one in passes], [one.num_logits for one in passes]
    if max(counts) == 1 and min(wanted_counts) == 1:
        return None, None
    from_end = torch.arange(max(1, *wanted_counts, 1), 0, -1, device=device)
    wanted = None
    if any(count != 1 for count in wanted_counts):
        wanted = from_end <= torch.tensor(wanted_counts, device=device)[:, None]
    if max(counts) == 1:
        return None, wanted
    return (torch.tensor(counts, device=device)[:, None] - from_end).clamp(min=0), wanted


def _in_order(passes: Sequence[RowPass], groups: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the logits of groups of passes, in the order of the passes."""
    if len(groups) == 1:
        return parts[0]
    pieces: dict[int, Tensor] = {}
    for group, part in zip(groups, parts, strict=True):
        sizes = [passes[index].num_logits for index in group]
        pieces |= zip(group, part.split(sizes), strict=True)
    return torch.cat([pieces[index] for index in range(len(passes))])


# -- evaluation mode ---------------------------------------------------------------------------------------------------


_lock = threading.Lock()
# The model of each open block of `evaluation_mode`, and the modules to restore after it.
_blocks: list[tuple[nn.Module, list[nn.Module]]] = []


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every sub-module in evaluation mode inside a `with` block, and restore the mode of each one afterwards.

    If several threads are in such a block with one model, the last one restores the modes.
    """
    switched: list[nn.Module] = []
    block = model, switched
    try:
        with _lock:
            _blocks.append(block)
            for module in model.modules():
                if module.training:
                    switched.append(module)
                    module.training = False
        yield
    finally:
        with _lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            heir = next((modules for other, modules in _blocks if other is model), None)
            if heir is not None:
                heir += switched
            else:
                for module in switched:
                    module.training = True
