"""Decide which tokens run next: admission by free pages, prompts in chunks, priorities, and preemption.

Requests wait in the order of priority and arrival.  The first is admitted as soon as its rows and the pages of its
prompt fit; nobody overtakes it.  Every running row gets its next token in every step, and what is left of the step's
tokens goes to prompts, in chunks.  If pages run out, the request that was admitted last, among those of the lowest
priority, gives its pages back and waits; later its tokens are run again as if they were its prompt.

Beam searches with a `search_shape` need no pages: those of one shape begin together, and later ones of this shape wait
until all of them have ended, while others go on.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from monoblock.inference.pages import OutOfPages, PageCopies, Pages
from monoblock.inference.request import Request, Row
from monoblock.inference.runners.plain import RowPass
from monoblock.kernels.gpu_attention import PAGE_SIZE

MAX_STEP_TOKENS = 8192  # tokens of prompts in one step


@dataclass
class Plan:
    """What one step runs."""

    passes: list[RowPass] = field(default_factory=list)
    copies: PageCopies = field(default_factory=lambda: PageCopies([], [], []))
    admitted: list[Request] = field(default_factory=list)  # their sources are not encoded yet

    @property
    def is_decoding(self) -> bool:
        """Whether every pass is over the newest token of a row that has begun."""
        return all(one.is_newest and one.row.request.is_started for one in self.passes)


class Scheduler:
    """The queue of requests, and the rows and pages of those that run.

    chunk: the maximum number of tokens of one prompt in a step; None for no limit.
    reuses_prefixes: whether a prompt may begin with published pages.
    """

    def __init__(
        self, pages: Pages, sources: Pages, *, max_rows: int, chunk: int | None = None, reuses_prefixes: bool = True
    ) -> None:
        self.pages, self.sources, self.max_rows, self.chunk = pages, sources, max_rows, chunk
        self.reuses_prefixes = reuses_prefixes
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in pages, in the order of their admission
        self.searching: list[Request] = []  # in recorded steps; they have one shape

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_order)

    def drop(self, request: Request) -> None:
        """Remove a request, whether it waits or runs."""
        for requests in (self.waiting, self.running, self.searching):
            if request in requests:
                requests.remove(request)
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        for row in request.rows:
            self.give_back_row(row)
        if request.source_number is not None:
            self.sources.drop(request.source_number)
            request.source_number = None

    def give_back_row(self, row: Row) -> None:
        if row.number is not None:
            self.pages.drop(row.number)
            row.number = None

    def num_needed(self, request: Request) -> int:
        """Return the most pages that a request may ever need."""
        return len(request.rows) * (pages_of(request.max_length) + 1)

    # -- one step -------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Choose the tokens of the next step, and reserve their pages."""
        plan = Plan()
        self._admit(plan)
        while self.running:
            passes = self._select_passes()
            numbers, counts = [one.row.place for one in passes], [len(one.tokens) for one in passes]
            try:
                plan.copies = self.pages.reserve(numbers, counts)
            except OutOfPages:
                self._preempt(plan, self.running)
                continue
            plan.passes = passes
            break
        return plan

    def _select_passes(self) -> list[RowPass]:
        passes, left = [], MAX_STEP_TOKENS
        requests = sorted(self.running, key=lambda request: not request.is_started)
        groups = [request.running_rows if request.is_started else request.rows[:1] for request in requests]
        everyone = [row for rows in groups for row in rows]
        lengths = self.pages.lengths[[row.place for row in everyone]].tolist()
        if all(request.is_started for request in requests):
            newest = [RowPass(row, row.tokens[start:], start, 1) for row, start in zip(everyone, lengths, strict=True)]
            if all(len(one.tokens) == 1 for one in newest):
                return newest
        lengths = iter(lengths)
        for request, rows in zip(requests, groups, strict=True):
            starts = [next(lengths) for _ in rows]
            pending = [len(row.tokens) - start for row, start in zip(rows, starts, strict=True)]
            # The beams of a search advance together, so none runs its newest token before the others have caught up.
            holds = request.is_beam_search and request.is_started and max(pending) > 1
            for row, start, count in zip(rows, starts, pending, strict=True):
                wanted = count - 1 if holds else count
                if wanted > 1:
                    wanted = min(wanted, left, self.chunk or wanted)
                    left -= wanted
                if wanted <= 0:
                    continue
                is_last = wanted == count
                scores = request.settings.score_prompt and not request.is_started
                num_logits = wanted if scores else int(is_last)
                passes.append(RowPass(row, row.tokens[start : start + wanted], start, num_logits))
        return passes

    # -- admission and preemption ---------------------------------------------------------------------------------

    def _admit(self, plan: Plan) -> None:
        index, awaited = 0, self.searching[0].search_shape if self.searching else None
        shape = awaited
        rows = sum(len(one.rows) for one in (*self.running, *self.searching))
        while index < len(self.waiting):
            request = self.waiting[index]
            is_recorded = request.search_shape is not None
            if is_recorded and request.search_shape == awaited:
                index += 1
                continue
            fits = rows + len(request.rows) <= self.max_rows
            holders = self.running if fits else [*self.running, *self.searching]
            if fits and is_recorded and shape in (None, request.search_shape):
                self.searching.append(self.waiting.pop(index))
                shape, rows = request.search_shape, rows + len(request.rows)
            elif fits and self._place(request):
                self.running.append(self.waiting.pop(index))
                plan.admitted.append(request)
                rows += len(request.rows)
            elif any(one.settings.priority < request.settings.priority for one in holders):
                rows -= len(self._preempt(plan, holders).rows)
            else:
                return

    def _place(self, request: Request) -> bool:
        """Give rows to a request, with the prefixes that are there already; return whether its pages fit."""
        rows = request.running_rows if request.is_started else request.rows[:1]
        found = [self._find_prefix(row) for row in rows]
        idle = sum(page in self.pages.idle for page in {page for prefix in found for page in prefix})
        needed = sum(pages_of(len(row.tokens) + 1) - len(prefix) for row, prefix in zip(rows, found, strict=True))
        spare = sum(len(one.running_rows) for one in self.running)  # each may soon need a page
        source = pages_of(len(request.prompt.source or ()))
        if needed + spare > self.pages.num_free - idle or source > self.sources.num_free:
            return False
        for row, prefix in zip(rows, found, strict=True):
            row.number = self.pages.add_row(prefix)
        if request.prompt.source is not None:
            request.source_number = self.sources.add_row()
            self.sources.reserve([request.source_number], [len(request.prompt.source)])
        return True

    def _find_prefix(self, row: Row) -> list[int]:
        """Return published pages with the first tokens of a row; its last token is never among them."""
        request = row.request
        is_read = request.settings.score_prompt or request.variant.capture  # every token has to be run
        if not self.reuses_prefixes or is_read or not self.pages.page_of:
            return []
        return self.pages.find(row.page_digests((len(row.tokens) - 1) // PAGE_SIZE))

    def _preempt(self, plan: Plan, requests: Sequence[Request]) -> Request:
        """Let the last of these running requests that have the lowest priority wait again, and return it."""
        last = min(reversed(requests), key=lambda request: request.settings.priority)
        if last in plan.admitted:
            plan.admitted.remove(last)
        self.drop(last)
        self.add(last)
        if not last.is_started:  # its prompt will be run, and scored, from the beginning
            last.prompt_scores = []
        return last

    # -- after a step ---------------------------------------------------------------------------------------------

    def commit(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Count new tokens that have been run, and publish the pages that are full now."""
        numbers = [row.place for row in rows]
        self.pages.advance(numbers, counts)
        if not self.reuses_prefixes:
            return
        ends = self.pages.lengths[numbers].tolist()
        for row, number, count, end in zip(rows, numbers, counts, ends, strict=True):
            first, last = (end - count) // PAGE_SIZE, end // PAGE_SIZE
            if row.request.is_beam_search and row.request.is_started:
                continue
            for index in range(first, last):
                self.pages.publish(number, index, row.page_digests(last)[index])


def pages_of(length: int) -> int:
    return -(-length // PAGE_SIZE)


def _order(request: Request) -> tuple[int, int]:
    return -request.settings.priority, request.id
