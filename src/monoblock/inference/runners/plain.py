"""Run rows of tokens through the modules of a model, with keys and values in pages.

A `ModelRunner` is what the engine asks for logits; cuda.py has a faster one.  `UncachedRunner` runs whole sequences at
every step and stores nothing; it is the reference for all others.  `Ensemble` averages several models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.inference.pages import PageCopies, Pages
from monoblock.inference.runners.cpu import MAX_TOKENS
from monoblock.inference.scheduler import PLAIN, Edit, Prompt, Request, Row, RowPass, Variant, pad_right
from monoblock.kernels.cpu import library
from monoblock.nn.attention import Attention
from monoblock.nn.paged_cache import PagedCache, PagedRows
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer


class RunResult(NamedTuple):
    logits: Tensor  # (sum of num_logits, V), in the order of the passes
    captured: dict[Row, dict[str, Tensor]]


class RowTap:
    """A tap for the pass of a single row: it applies the edits of a request and keeps activations by name."""

    def __init__(self, variant: Variant, start: int, *, has_encoder: bool) -> None:
        self.variant, self.start = variant, start
        self.source_parts = ("input", "encoder") if has_encoder else ()  # a pass has all tokens of the source
        self.captured: dict[str, Tensor] = {}
        self.unmatched: list[Edit | str] = [*variant.edits, *variant.capture]

    def wants(self, name: str) -> bool:
        return self.changes(name) or any(fnmatchcase(name, pattern) for pattern in self.variant.capture)

    def changes(self, name: str) -> bool:
        return any(edit.matches(name) for edit in self.variant.edits)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        start = 0 if name.split(".")[0] in self.source_parts else self.start
        edits = [edit for edit in self.variant.edits if edit.matches(name)]
        patterns = [pattern for pattern in self.variant.capture if fnmatchcase(name, pattern)]
        for edit in edits:
            tensor = edit.apply(name, tensor, start)
        if patterns:
            self.captured[name] = tensor[0].clone()
        self.unmatched = [one for one in self.unmatched if one not in (*edits, *patterns)]
        return tensor

    def check_names(self) -> None:
        """Raise InputError if an edit or a pattern names no activation."""
        if self.unmatched:
            what = f"capture={one!r}" if isinstance(one := self.unmatched[0], str) else "an edit"
            raise InputError(f"{what} names no activation of this model; mb.trace(model, ids) lists those it has")


class ModelRunner:
    """Computes logits with pages, which the engine reserves before; it counts the new tokens afterwards.

    Nothing that is stored before the tokens of a pass changes, so a pass may be repeated.

    plain: the model whose modules edited rows run, if `model` is a fast copy of it.
    adapters: by name, models that share the weights of `model` but for an adapter.
    cache: the pools of an engine that has ended, whose memory is used again.
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
        cache: PagedCache | None = None,
        tap: Tap | None = None,
        exact: bool = False,
    ) -> None:
        self.model, self.plain, self.adapters, self.tap = model, plain or model, dict(adapters or {}), tap
        self.pages, self.sources, self.device, self.exact = pages, sources, model.device, exact
        self.cache = make_cache(model) if cache is None else cache
        self.unencoded: set[int] = set()  # numbers of sources that the next pass of the modules encodes
        self.last_sources: tuple[list[int], Any] = [], []  # of the last pass: the requests and what has been read

    has_cache = True

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Compute no gradients inside a `with` block, and run modules in evaluation mode."""
        # Modules of users may do what inference mode forbids, such as FSDP's in-place all-gather.
        is_fast = self.plain is not self.model
        mode: AbstractContextManager[object] = nullcontext() if is_fast else evaluation_mode(self.model)
        with torch.inference_mode(is_fast), torch.no_grad(), library.without_slow_onednn(), mode:
            yield

    def model_of(self, variant: Variant) -> Transformer:
        if variant.adapter is not None:
            return self.adapters[variant.adapter]
        return self.plain if variant.needs_own_pass else self.model

    def encode(self, requests: Sequence[Request]) -> None:
        """Encode sources, or let the next pass do it: modules such as sharded ones work in `forward` only."""
        self.make_room()
        self.last_sources = [], []
        for group in _group(requests, id if self.exact else lambda request: _variant_key(request, request.variant)):
            model = self.model_of(group[0].variant)
            places = [request.source_place for request in group]
            if model is self.plain or group[0].variant.adapter is not None:
                self.unencoded |= set(places)
                continue
            memory = model.encode(*pad_right([request.prompt.source or () for request in group], self.device))
            tables = self._tables(self.sources, places)
            for layer, block in enumerate(model.decoder.blocks):
                if isinstance(block.cross, Attention):
                    self.cache.write_source(layer, block.cross.project_source(memory), tables)

    def make_room(self) -> None:
        """Grow the pools if pages are in use for which they have no room."""
        self.cache.grow(self.pages.used, self.sources.used)

    def copy_pages(self, copies: PageCopies) -> None:
        self.make_room()
        self.cache.copy_pages(*copies)

    def run(self, passes: Sequence[RowPass]) -> RunResult:
        self.make_room()
        if not (self.exact and self.cache.has_kernels):
            return self._run_groups(passes)
        rounds: list[list[RowPass]] = [[]]  # with at most as many tokens as an operator takes
        left = MAX_TOKENS
        for one in passes:
            count = len(one.tokens)
            for first in range(0, count, MAX_TOKENS):
                last = min(first + MAX_TOKENS, count)
                if last - first > left:
                    rounds.append([])
                    left = MAX_TOKENS
                left -= last - first
                num_logits = max(0, last - max(first, count - one.num_logits))
                rounds[-1].append(RowPass(one.row, one.tokens[first:last], one.start + first, num_logits))
        return RunResult(torch.cat([self._run_groups(together).logits for together in rounds]), {})

    def _run_groups(self, passes: Sequence[RowPass]) -> RunResult:
        """Run passes that are alike together; return the logits in the order of the passes."""
        captured: dict[Row, dict[str, Tensor]] = {}
        if not self.unencoded and all(len(one.tokens) == 1 and one.row.request.variant is PLAIN for one in passes):
            return RunResult(self._run_group(passes, captured), captured)
        keys = [(one.row.request.source_number in self.unencoded, _pass_key(one)) for one in passes]
        pieces: dict[int, Tensor] = {}
        for group in _group(range(len(passes)), keys.__getitem__):
            own = [passes[index] for index in group]
            logits = self._run_group(own, captured).split([one.num_logits for one in own])
            pieces |= zip(group, logits, strict=True)
        return RunResult(torch.cat([pieces[index] for index in range(len(passes))]), captured)

    def _run_group(self, passes: Sequence[RowPass], captured: dict[Row, dict[str, Tensor]]) -> Tensor:
        """Run passes of about the same length in one pass of the model; return the logits that are wanted."""
        variant, tap, start = passes[0].row.request.variant, self.tap, passes[0].start
        model = self.model_of(variant)
        if variant.needs_own_pass:
            tap = RowTap(variant, start if self.has_cache else 0, has_encoder=model.encoder is not None)
        with evaluation_mode(model) if model is not self.model else nullcontext():
            logits = self.run_model(model, passes, tap)
        if isinstance(tap, RowTap):
            if start == 0:
                tap.check_names()
            if variant.capture:
                captured[passes[0].row] = tap.captured
        return logits

    def run_model(self, model: Transformer, passes: Sequence[RowPass], tap: Tap | None) -> Tensor:
        starts, counts = [one.start for one in passes], [len(one.tokens) for one in passes]
        tables = self._tables(self.pages, [one.row.place for one in passes])
        at, wanted = _logits_at(passes, self.device)
        options: dict[str, Any] = {"logits_at": at, "tap": tap}
        if model.encoder is None:
            logits = run_texts(model, _texts(passes), cache=PagedRows(self.cache, tables, starts, counts), **options)
            return logits[:, -1] if wanted is None else logits[wanted]
        requests = [one.row.request for one in passes]
        places = [request.source_place for request in requests]
        lengths = [len(request.prompt.source or ()) for request in requests]
        encodes = places[0] in self.unencoded
        sources = self._tables(self.sources, places)
        rows = PagedRows(self.cache, tables, starts, counts, sources, lengths, encodes=encodes)
        if encodes:
            logits = run_texts(model, _texts(passes), cache=rows, **options)
            self.unencoded -= set(places)
        else:
            if self.device.type == "cpu":  # the next pass is often over the same rows
                ids = [request.id for request in requests]
                if ids != self.last_sources[0]:
                    self.last_sources = ids, rows.cross_layers
                rows.cross_layers = self.last_sources[1]
            tokens, mask = pad_right([one.tokens for one in passes], self.device)
            logits = model(None, tokens, target_mask=mask, cache=rows, **options)
        return logits[:, -1] if wanted is None else logits[wanted]

    def _tables(self, pages: Pages, numbers: Sequence[int]) -> Tensor:
        width = int(pages.num_pages[numbers].max())
        return torch.from_numpy(pages.tables[numbers, :width]).to(self.device)


def make_cache(model: Transformer) -> PagedCache:
    has_kernels = getattr(model.decoder, "cpu_stack", None) is not None
    return PagedCache(model.decoder.config, model.device, has_kernels=has_kernels)


class UncachedRunner(ModelRunner):
    """Runs all tokens of every row again at every step."""

    has_cache = False

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

    def __init__(self, members: Sequence[ModelRunner]) -> None:
        self.members = members

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
