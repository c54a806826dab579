"""The engine: requests come and go, and every step moves all of them one token on.

    engine = Engine(model)
    request = engine.add((5, 7, 11), Settings(max_new_tokens=20))
    while engine.busy:
        for event in engine.step():
            ...

`generate`, `stream`, beam search and speculative decoding are callers of it.  Rows of a batch have settings and lengths
of their own and do not change each other.  Requests that want other rows or beams wait for the present ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from monoblock.decoding import beam
from monoblock.decoding.captured import Captured, capturable
from monoblock.decoding.choice import chance, chosen, each, live, past
from monoblock.decoding.filters import Filters
from monoblock.decoding.lanes import Event, Lane
from monoblock.decoding.own_draft import own_draft
from monoblock.decoding.prepare import prepared
from monoblock.decoding.remembered import Remembered, vocabulary
from monoblock.decoding.rows import Cached, Prompt, Recomputed, Rows
from monoblock.decoding.search_cpu import Searched, operators
from monoblock.decoding.settings import SINGLE, Settings
from monoblock.decoding.speculative import Proposer, speculate
from monoblock.errors import InputError, with_article
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent

GREEDY = Settings()
TAKES_BACK = "speculative decoding takes tokens back from the cache; write use_cache=True"


class Engine:
    """At most `rows` sequences at once, of at most `capacity` tokens each (the model's context when not given)."""

    def __init__(
        self,
        model: Transformer | Recurrent,
        *,
        rows: int = 64,
        capacity: int | None = None,
        use_cache: bool = True,
        chunk: int | None = None,
        proposer: Proposer | None = None,
        burst: int = 16,
        fast: bool = True,
    ) -> None:
        if isinstance(model, Transformer):
            if model.decoder is None or model.head is None or model.head.config.kind != "language_model":
                kind = with_article(model.config.family)
                raise InputError(f"{kind} model without a language-model head continues no text")
        elif proposer is not None or not use_cache:
            raise InputError("an LSTM has one way to go on, from its state; leave out the draft and use_cache")
        if proposer is not None and not use_cache:
            raise InputError(TAKES_BACK)
        self.given = model
        self.model = prepared(model) if fast and isinstance(model, Transformer) else model
        self.limit, self.burst = rows, burst
        self.captures = fast and proposer is None and isinstance(model, Transformer) and capturable(model)
        limit = capacity if capacity is not None else model.config.context
        if limit is None:
            raise InputError("this model sets no length; say how many tokens a text may have: capacity=…")
        self.capacity = limit
        self.use_cache, self.chunk, self.proposer = use_cache, chunk, proposer
        self.named = False  # by a request: such a proposer goes with the requests beside it
        self.vocabulary = vocabulary(model)
        self.waiting: deque[Lane] = deque()
        self.lanes: list[Lane] = []  # their rows lie one below the other
        self.rows: Rows | Remembered | None = None
        self.filters: Filters | None = None
        self.count = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], settings: Settings = GREEDY, source: Sequence[int] | None = None) -> int:
        """A prompt (with an encoder: what the target begins with, and the source) to continue; its number."""
        prompt = Prompt(tuple(ids), None if source is None else tuple(source))
        if self.named and not self.busy:
            self.proposer, self.named = None, False
        self._check(prompt, settings)
        if settings.draft is not None and self.proposer is None and not self.busy:
            self.proposer, self.named = own_draft(self.given, settings.draft), True
        room = min(settings.max_new_tokens, self.capacity - len(prompt.ids))
        if settings.num_beams > 1:  # a search that meets the end of the context ends there
            settings = replace(settings, max_new_tokens=room, min_new_tokens=min(room, settings.min_new_tokens))
        self.count += 1
        self.waiting.append(Lane(self.count, prompt, settings, room))
        return self.count

    def _check(self, prompt: Prompt, settings: Settings) -> None:
        if not prompt.ids:
            raise InputError(
                "an empty prompt gives nothing to go on from; give at least one token, such as the start token"
            )
        if len(prompt.ids) >= self.capacity:
            raise InputError(
                f"a prompt of {len(prompt.ids)} tokens leaves no room in a context of {self.capacity}; shorten it"
            )
        if (prompt.source is None) != (self.model.encoder is None):
            what = "needs a source to answer to" if prompt.source is None else "has no encoder to read a source"
            raise InputError(f"this {self.model.config.family} model {what}")
        if prompt.source is not None and not prompt.source:
            raise InputError("an empty source cannot be read; give at least one token")
        wrong = [token for token in prompt.ids if not 0 <= token < self.vocabulary]
        if wrong:
            raise InputError(
                f"id {wrong[0]} is outside the vocabulary of {self.vocabulary}; is this the model's own tokenizer?"
            )
        settings.check_vocabulary(self.vocabulary)
        if settings.rows > self.limit:
            raise InputError(f"{settings.rows} sequences for one prompt are more than the engine's {self.limit} rows")
        if settings.num_beams > 1 and self.proposer is not None:
            raise InputError(SINGLE)
        if settings.draft is not None and not self.use_cache:
            raise InputError(TAKES_BACK)

    @torch.inference_mode()
    def cancel(self, request: int) -> None:
        """Forget a request, waiting or running."""
        self.waiting = deque(lane for lane in self.waiting if lane.id != request)
        self._drop([lane for lane in self.lanes if lane.id == request or lane.done])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.lanes)

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Every running request one token on (or some, when proposals are accepted); newcomers their first."""
        new = self._admit()  # which lets go of what is over, so that only then it is known what runs
        old = list(self.lanes)
        if not old and not new:
            return []
        count = 0 if new else self._burst(old)
        if count > 1:
            return self._advance_many(old, count)
        found = self._searched(old, new)
        if found is not None:
            return found
        if isinstance(self.rows, Searched):
            self.rows.settle()
        events: list[Event] = []
        if old and self.proposer is not None:
            assert not isinstance(self.rows, Remembered)
            events += speculate(self.rows, self.proposer, old, self.capacity)
            logits = None
        else:
            logits = self._advance(old) if old else None
        if new:
            begun = self._begin(new)
            logits = begun if logits is None else torch.cat((logits, begun))
        asking = old + new if self.proposer is None else new
        if asking:
            assert logits is not None
            events += self._choose(asking, logits.float())
        self._retire()
        return events

    def _admit(self) -> list[Lane]:
        """Take in what fits: rows and beams as those that run."""
        taken: list[Lane] = []
        used = sum(lane.settings.rows for lane in self.lanes if not lane.done)
        while self.waiting:
            lane = self.waiting[0]
            alike = not (self.lanes + taken) or (self.lanes + taken)[0].settings.shape == lane.settings.shape
            if not alike or used + lane.settings.rows > self.limit:
                break
            taken.append(self.waiting.popleft())
            used += lane.settings.rows
        if taken and self.lanes:
            self._drop([lane for lane in self.lanes if lane.done])
        return taken

    def _begin(self, new: list[Lane]) -> Tensor:
        copies = new[0].settings.rows
        if self.rows is None or not self.lanes:
            self.rows = self._fresh_rows(copies)
            if self.proposer is not None:
                self.proposer.reset(self.capacity, copies)
        prompts = [lane.prompt for lane in new]
        logits = self.rows.begin(prompts)
        if self.proposer is not None:
            self.proposer.begin(prompts)
        self.lanes += new
        self.filters = None
        return logits

    def _fresh_rows(self, copies: int) -> Rows | Remembered:
        if isinstance(self.model, Recurrent):
            return Remembered(self.model, copies)
        if not self.use_cache:
            return Recomputed(self.model, self.capacity, copies)
        if isinstance(self.rows, Captured) and self.rows.copies == copies:
            return self.rows
        by = operators(self.model) if copies > 1 and self.proposer is None else None
        if by is not None:
            return Searched(self.model, self.capacity, copies, self.chunk, by=by)
        kind = Captured if self.captures else Cached
        return kind(self.model, self.capacity, copies, self.chunk)

    def _advance(self, lanes: list[Lane]) -> Tensor:
        assert self.rows is not None
        tokens = [token for lane in lanes for token in lane.newest_tokens]
        return self.rows.step(torch.tensor(tokens, device=self.rows.device), live(lanes, self.rows.device))

    def _burst(self, lanes: list[Lane]) -> int:
        """How many steps may be taken before anybody looks; 0 where tokens must be chosen one by one."""
        filters = self.filters
        if not isinstance(self.rows, Captured) or self.proposer is not None or filters is None:
            return 0
        if lanes[0].beams is not None or not filters.by_itself:
            return 0
        return min(
            self.burst, *(lane.room - len(lane.rows[row].new) for lane, row in each(lanes) if not lane.over(row))
        )

    def _advance_many(self, lanes: list[Lane], count: int) -> list[Event]:
        """Several steps at once on the device; what a row says after its end is not heard."""
        assert isinstance(self.rows, Captured)
        assert self.filters is not None
        pairs, device = each(lanes), self.rows.device
        tokens = torch.tensor([lane.newest(row) for lane, row in pairs], device=device)
        drawn = (
            [[chance(lane, row, ahead) for ahead in range(count)] for lane, row in pairs] if self.filters.draws else []
        )
        chances = torch.tensor(drawn, dtype=torch.double, device=device) if drawn else None
        said = self.rows.burst(tokens, count, chances, self.filters.choose, self.filters.key, live(lanes, device))
        heard = [lane.say(row, tokens) for (lane, row), tokens in zip(pairs, said.tolist(), strict=True)]
        self._retire()
        return [event for event in heard if event is not None]

    def _choose(self, lanes: list[Lane], logits: Tensor) -> list[Event]:
        filters = self._filtering(lanes)
        if lanes[0].beams is not None:
            return self._search(lanes, logits)
        tokens = chosen(lanes, logits, filters)
        said = (lane.say(row, tokens[place : place + 1]) for place, (lane, row) in enumerate(each(lanes)))
        return [event for event in said if event is not None]

    def _filtering(self, lanes: list[Lane]) -> Filters:
        """The filters of these rows, made when rows have come or gone."""
        if self.filters is None or len(self.filters.rows) != sum(lane.settings.rows for lane in lanes):
            settings = [lane.settings for lane in lanes for _ in range(lane.settings.rows)]
            self.filters = Filters(settings, self.model.device)
        return self.filters

    def _search(self, lanes: list[Lane], logits: Tensor) -> list[Event]:
        assert self.filters is not None
        assert self.rows is not None
        searches = [lane.beams for lane in lanes if lane.beams is not None]
        running = [lane for lane in lanes if not lane.done]
        without = self.filters.ruled_out([search.length for search in searches])
        if without is not None and len(searches[0].groups) == 1:
            origins = beam.advance_plainly(searches, logits, without)
        else:
            new = [lane.count for lane, _ in each(lanes)]
            shares = self.filters.rules(logits.log_softmax(-1), past(lanes, self.filters), new)
            origins = beam.advance(searches, shares)
        if origins != list(range(len(origins))):
            self.rows.select(torch.tensor(origins, device=self.rows.device))
        return [event for lane in running if lane.done for event in lane.verdicts()]

    def _searched(self, old: list[Lane], new: list[Lane]) -> list[Event] | None:
        """A step of a plain search by one operator; None where there is none for these rows."""
        lanes = old + new
        searches = [lane.beams for lane in lanes if lane.beams is not None]
        lengths = [search.length for search in searches if not search.done]
        if not lengths or len(searches[0].groups) > 1 or (old and (new or not isinstance(self.rows, Searched))):
            return None
        without = self._filtering(lanes).ruled_out(lengths)
        rows = self._fresh_rows(new[0].settings.rows) if new and without is not None else self.rows
        if without is None or not isinstance(rows, Searched) or (new and not rows.enter([one.prompt for one in new])):
            return None
        self.rows, self.lanes = rows, lanes
        over = rows.advance(searches, without)
        if over is None:
            return None
        events = [event for number in over for event in lanes[number].verdicts()]
        self._retire(patient=not self.waiting)  # rows that are over cost the operator nothing
        return events

    # -- leaving --------------------------------------------------------------------------------------------------

    def _retire(self, patient: bool = False) -> None:
        """Let finished requests go, when enough of them have gathered to be worth the copying."""
        done = [lane for lane in self.lanes if lane.done]
        if done and (4 * len(done) >= len(self.lanes)) and (not patient or len(done) == len(self.lanes)):
            self._drop(done)

    def _drop(self, gone: list[Lane]) -> None:
        if not gone:
            return
        kept = [number for number, lane in enumerate(self.lanes) if lane not in gone]
        size = self.lanes[0].settings.rows
        if not kept:
            self.lanes, self.filters = [], None
            if isinstance(self.rows, Captured):
                self.rows.rest()
            elif isinstance(self.rows, Searched):
                self.rows = None  # others may have its room
            return
        assert self.rows is not None
        rows = torch.tensor([number * size + row for number in kept for row in range(size)], device=self.rows.device)
        sources = torch.tensor(kept, device=self.rows.device)
        self.rows.select(rows, sources)
        if self.proposer is not None:
            self.proposer.select(rows, sources)
        self.lanes = [self.lanes[number] for number in kept]
        self.filters = None
