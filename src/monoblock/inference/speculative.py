"""Speculative decoding (Leviathan et al. 2023): a fast proposer proposes tokens, the model checks them in one pass.

A proposal is accepted if it is exactly the token that the model would have chosen there: the best one or, in sampling,
the one that the uniform random number of this step selects (`accept` in sampler.py).  So the text is the one that the
model alone would generate; only the number of passes differs.  A draft model samples with the same uniform numbers, so
that it often proposes the model's token if the two distributions are similar.

    DraftModel(small_model)   proposes with a second model of the same vocabulary, such as a quantized copy of the first
    PromptLookup()            proposes the tokens that followed when the last few tokens occurred before (Saxena 2023)
    draft="8-bit"             in Settings: proposes with a quantized copy of the model, which mb.optimize makes
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from monoblock.errors import InputError, with_article
from monoblock.inference.pages import OutOfPages, Pages
from monoblock.inference.prepared_model import GenerativeModel, PreparedModel
from monoblock.inference.runners.plain import ModelRunner
from monoblock.inference.sampler import Sampler
from monoblock.inference.scheduler import ModelLimits, Request, Row, RowPass, limits_of
from monoblock.inference.settings import check_count
from monoblock.kernels.cpu.library import load_kernels
from monoblock.nn.arguments import check_model
from monoblock.nn.transformer import Transformer

MAX_CHECKED = 8  # tokens of a self-draft that the CPU operator checks in one pass; one is the newest token
MAX_DRAFT_ROWS = 512
MAX_DRAFT_PAGES = 1 << 16


class Proposer:
    """An object that proposes the next tokens of rows."""

    def check_model(self, limits: ModelLimits) -> None:
        """Raise InputError if the proposer does not fit a model with these limits."""

    def check_prompt(self, length: int) -> None:
        """Raise InputError if the proposer cannot propose tokens for a prompt of this length."""

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        """Propose next tokens of each row, at most as many as its limit."""
        raise NotImplementedError

    def propose_for(self, rows: Sequence[Row]) -> dict[Row, list[int]]:
        """Propose tokens of each row, at most as many as it may have before its last one."""
        return dict(zip(rows, self.propose(rows, [row.num_left - 1 for row in rows]), strict=True))

    def learn(self, rows: Sequence[Row], proposed: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """Note how many proposals have been accepted; `row.tokens` has them, and the token after them, by now."""

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""


class PromptLookup(Proposer):
    """Propose the tokens that followed when the last few tokens of a row occurred before, in the prompt or later.

    This is useful for texts that quote their prompt.  At most `max_ngram` of the last tokens are compared.
    """

    def __init__(self, num_proposals: int = 8, max_ngram: int = 3) -> None:
        check_count("num_proposals", num_proposals, 1)
        check_count("max_ngram", max_ngram, 1)
        self.num_proposals, self.max_ngram = num_proposals, max_ngram

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        limits = [min(self.num_proposals, limit) for limit in limits]
        return [self._find_continuation(row.tokens, limit) for row, limit in zip(rows, limits, strict=True)]

    def _find_continuation(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that followed when the last n tokens occurred before, most recently.

        A larger n is preferred; there are fewer tokens if the text ends before.
        """
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            ngram = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == ngram:
                    return tokens[start + size : start + size + count]
        return []


class DraftModel(Proposer):
    """Propose up to `max_proposals` tokens with a faster model than the main model.

    The tokens are chosen by the settings and uniform numbers of each row, as the main model chooses them.  After
    rejected proposals the next call proposes fewer tokens, and after accepted ones more again.  `max_checked` limits
    the number of tokens, of all rows together, that the main model checks in one pass; the newest token of each row
    counts too.  The limit is ignored if it allows less than one proposal per row.  The draft model runs in evaluation
    mode, like the main model.
    """

    def __init__(self, model: GenerativeModel, max_proposals: int = 4, max_checked: int | None = None) -> None:
        if not isinstance(model, PreparedModel):
            check_model(model, Transformer, "DraftModel")
        check_count("max_proposals", max_proposals, 1)
        if max_checked is not None:
            check_count("max_checked", max_checked, 1)
        if model.config.decoder is None:
            raise InputError(f"{with_article(model.config.family)} model cannot generate text; give a decoder as draft")
        self.model, self.max_proposals, self.max_checked = model, max_proposals, max_checked
        self.context = sys.maxsize if model.config.context is None else model.config.context
        self.num_proposals = max_proposals  # how many tokens the next call proposes
        self.proposed = self.accepted = 0  # numbers of tokens, of all rows together
        self.pages, self.sources = Pages(MAX_DRAFT_PAGES, MAX_DRAFT_ROWS), Pages(MAX_DRAFT_PAGES, MAX_DRAFT_ROWS)
        if isinstance(model, PreparedModel):
            self.plain, self.runner = model.plain, model.make_runner(self.pages, self.sources)
        else:
            self.plain, self.runner = model, ModelRunner(model, self.pages, self.sources)
        self.own_rows: dict[int, dict[int, Row]] = {}  # by request and index: rows with the same tokens, in own pages
        self.sampler = Sampler(model.device)

    def check_model(self, limits: ModelLimits) -> None:
        own = limits_of(self.plain)
        if own.vocab_size != limits.vocab_size:
            raise InputError(
                f"the draft model has a vocabulary of {own.vocab_size} tokens, but the model has {limits.vocab_size}; "
                f"use a draft model with the same vocabulary"
            )
        if own.has_encoder and not limits.has_encoder:
            raise InputError("the draft model needs a source, which the model has not; use a decoder-only draft")

    def fits_prompt(self, length: int) -> bool:
        """Return whether a prompt of this length leaves room for a proposal in the draft model's context."""
        return length < self.context

    def check_prompt(self, length: int) -> None:
        if not self.fits_prompt(length):
            raise InputError(
                f"a prompt of {length} tokens is too long for the draft model's context of {self.context} tokens; "
                f"leave out the draft"
            )

    def forget(self, request: Request) -> None:
        for row in self.own_rows.pop(request.id, {}).values():
            self.pages.drop(row.place)
            if row.request.source_number is not None:  # the rows of a request share its source
                self.sources.drop(row.request.source_number)
                row.request.source_number = None

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        count = self.num_proposals
        if self.max_checked is not None and self.max_checked // len(rows) >= 2:
            count = min(count, self.max_checked // len(rows) - 1)
        rooms = [self.context - len(row.tokens) for row in rows]
        wanted = [max(0, min(count, limit, room)) for limit, room in zip(limits, rooms, strict=True)]
        proposed: list[list[int]] = [[] for _ in rows]
        with self.runner.inference(), suppress(OutOfPages):  # a draft changes only the speed
            own = {n: self._own_row(row) for n, row in enumerate(rows) if wanted[n]}
            for _ in range(max(wanted, default=0)):
                going = [n for n in own if len(proposed[n]) < wanted[n]]
                self._propose_next([own[n] for n in going], [proposed[n] for n in going])
        return proposed

    def _propose_next(self, rows: Sequence[Row], proposed: Sequence[list[int]]) -> None:
        """Append one more proposal to those of each row."""
        numbers = [row.place for row in rows]
        starts = self.pages.lengths[numbers].tolist()
        tokens = [[*row.tokens, *more][start:] for row, more, start in zip(rows, proposed, starts, strict=True)]
        counts = [len(new) for new in tokens]
        self.runner.copy_pages(self.pages.reserve(numbers, counts))
        passes = [RowPass(row, new, start, 1) for row, new, start in zip(rows, tokens, starts, strict=True)]
        chosen, _ = self.sampler.choose(rows, self.runner.run(passes).logits.float(), proposed)
        self.pages.advance(numbers, counts)
        for more, token in zip(proposed, chosen, strict=True):
            more.append(token)

    def _own_row(self, row: Row) -> Row:
        """Return the draft model's row with the tokens of a row, made when it is first asked for."""
        rows = self.own_rows.setdefault(row.request.id, {})
        if row.index not in rows:
            siblings = list(rows.values())
            request = siblings[0].request if siblings else copy.copy(row.request)
            request.proposer = None
            if not siblings and request.prompt.source is not None:
                request.source_number = self.sources.add_row()
                self.sources.reserve([request.source_number], [len(request.prompt.source)])
                self.runner.encode([request])
            number = self.pages.fork(siblings[0].place) if siblings else self.pages.add_row()
            self.pages.truncate(number, len(row.request.prompt.ids))
            rows[row.index] = replace(row, request=request, number=number)
        own = rows[row.index]
        own.tokens = row.tokens
        self.pages.truncate(own.place, len(row.tokens) - 1)
        return own

    def learn(self, rows: Sequence[Row], proposed: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        for row in rows:
            own = self.own_rows.get(row.request.id, {}).get(row.index)
            if own is not None:
                self.pages.truncate(own.place, len(row.tokens) - 1)
        tried = [(len(tokens), count) for tokens, count in zip(proposed, accepted, strict=True) if tokens]
        if tried:
            self.proposed += sum(count for count, _ in tried)
            self.accepted += sum(count for _, count in tried)
            mean = sum(count for _, count in tried) // len(tried)
            self.num_proposals = min(self.max_proposals, max(1, 2 * mean + 1))


def make_self_draft(model: GenerativeModel, kind: str) -> DraftModel | None:
    """Return the quantized copy of a model as a draft model; `kind` is "8-bit" or "4-bit".

    On a CPU the copy is several times faster than the model, and almost all tokens that it proposes are accepted.  It
    takes a quarter of the memory of the weights (an eighth with 4 bits) and is freed with the optimized model.

    Return None if it would be no faster, because there is no C++ compiler.
    """
    if isinstance(model, Transformer):
        raise InputError(f"draft={kind!r} is a copy that mb.optimize makes; write mb.optimize(model).generate(…)")
    if model.bits is not None:
        raise InputError(
            f"this model is quantized to {model.bits} bits already, so a quantized copy would be no faster; "
            f"leave out draft={kind!r}"
        )
    if model.device.type != "cpu":
        raise InputError(
            f"draft={kind!r} makes decoding faster only on a CPU, but the model is on {model.device}; leave it out"
        )
    if not load_kernels().is_ready:
        return None
    return DraftModel(model.draft(kind), MAX_CHECKED - 1, max_checked=MAX_CHECKED)
