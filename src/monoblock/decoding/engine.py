"""The engine: requests come and go, and every step moves all of them one token on.

    engine = Engine(model)
    request = engine.add((5, 7, 11), Settings(max_new_tokens=20))
    while engine.busy:
        for event in engine.step():
            ...

`generate`, `stream`, beam search and speculative decoding are callers of it.  Rows of a batch have settings and lengths
of their own and do not change each other.  Requests that want another number of rows wait for the present ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from monoblock.decoding import beam
from monoblock.decoding.filters import Filters
from monoblock.decoding.lanes import Event, Lane
from monoblock.decoding.logits import Past
from monoblock.decoding.rows import Cached, Prompt, Recomputed, Rows
from monoblock.decoding.sample import choose
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Proposer
from monoblock.errors import InputError
from monoblock.model import Transformer


GREEDY = Settings()


class Engine:
    """At most `rows` sequences at once, of at most `capacity` tokens each (the model's context when not given)."""

    def __init__(
        self,
        model: Transformer,
        *,
        rows: int = 64,
        capacity: int | None = None,
        use_cache: bool = True,
        chunk: int | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        if model.decoder is None or model.head is None or model.head.config.kind != "language_model":
            raise InputError(f"a {model.config.family} model without a language-model head continues no text")
        self.model, self.limit = model, rows
        limit = capacity if capacity is not None else model.config.context
        if limit is None:
            raise InputError("this model sets no length; say how many tokens a text may have: capacity=…")
        self.capacity = limit
        self.use_cache, self.chunk, self.proposer = use_cache, chunk, proposer
        self.vocabulary = model.config.output_input.vocab  # type: ignore[union-attr]
        self.waiting: deque[Lane] = deque()
        self.lanes: list[Lane] = []  # their rows lie one below the other
        self.rows: Rows | None = None
        self.filters: Filters | None = None
        self.count = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], settings: Settings = GREEDY, source: Sequence[int] | None = None) -> int:
        """A prompt (with an encoder: what the target begins with, and the source) to continue; its number."""
        prompt = Prompt(tuple(ids), None if source is None else tuple(source))
        self._check(prompt, settings)
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
            raise InputError("speculative decoding works on single sequences; write num_beams=1 or leave out the draft")

    def cancel(self, request: int) -> None:
        """Forget a request, waiting or running."""
        self.waiting = deque(lane for lane in self.waiting if lane.id != request)
        self._drop([lane for lane in self.lanes if lane.id == request])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.lanes)

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Every running request one token on (or some, when proposals are accepted); newcomers their first."""
        old, new = list(self.lanes), self._admit()
        if not old and not new:
            return []
        events: list[Event] = []
        if old and self.proposer is not None:
            events += self._speculate(old)
            logits = None
        else:
            logits = self._advance(old) if old else None
        if new:
            begun = self._begin(new)
            logits = begun if logits is None else torch.cat((logits, begun))
        chosen = old + new if self.proposer is None else new
        if chosen:
            assert logits is not None
            events += self._choose(chosen, logits.float())
        self._retire()
        return events

    def _admit(self) -> list[Lane]:
        """Take in what fits: the same number of rows each as those that run."""
        taken: list[Lane] = []
        used = sum(len(lane.rows) if lane.beams is None else lane.settings.num_beams for lane in self.lanes)
        while self.waiting:
            lane = self.waiting[0]
            size = lane.settings.rows
            alike = not (self.lanes + taken) or (self.lanes + taken)[0].settings.rows == size
            if not alike or used + size > self.limit:
                break
            taken.append(self.waiting.popleft())
            used += size
        if taken and self.lanes:
            self._drop([lane for lane in self.lanes if lane.done])
        return taken

    def _begin(self, new: list[Lane]) -> Tensor:
        copies = new[0].settings.rows
        if self.rows is None or not self.lanes:
            self.rows = (
                Cached(self.model, self.capacity, copies, self.chunk)
                if self.use_cache
                else Recomputed(self.model, self.capacity, copies)
            )
            if self.proposer is not None:
                self.proposer.reset(self.capacity, copies)
        prompts = [lane.prompt for lane in new]
        logits = self.rows.begin(prompts)
        if self.proposer is not None:
            self.proposer.begin(prompts)
        self.lanes += new
        self.filters = None
        return logits

    def _advance(self, lanes: list[Lane]) -> Tensor:
        assert self.rows is not None
        tokens = [lane.newest(row) for lane, row in _each(lanes)]
        return self.rows.step(torch.tensor(tokens, device=self.rows.device), self._live(lanes))

    def _live(self, lanes: list[Lane]) -> Tensor | None:
        """Which rows go on, or None when all do."""
        assert self.rows is not None
        going = [not lane.over(row) for lane, row in _each(lanes)]
        return None if all(going) else torch.tensor(going, device=self.rows.device)

    def _choose(self, lanes: list[Lane], logits: Tensor) -> list[Event]:
        if self.filters is None or len(self.filters.rows) != len(logits):
            self.filters = Filters([lane.settings for lane in lanes for _ in range(lane.settings.rows)], logits.device)
        if lanes[0].beams is not None:
            return self._search(lanes, logits)
        tokens = self._tokens(lanes, logits, self.filters)
        said = (lane.say(row, tokens[place]) for place, (lane, row) in enumerate(_each(lanes)))
        return [event for event in said if event is not None]

    def _tokens(self, lanes: list[Lane], logits: Tensor, filters: Filters) -> list[int]:
        """One token a row."""
        logits = filters.rules(logits, self._past(lanes, filters), [len(l.rows[r].new) for l, r in _each(lanes)])
        if not filters.draws:
            return logits.argmax(-1).tolist()
        chances = [_chance(lane, row) for lane, row in _each(lanes)]
        drawn = choose(filters.chances(logits), torch.tensor(chances, device=logits.device, dtype=torch.double))
        return torch.where(filters.drawn, drawn, logits.argmax(-1)).tolist()

    def _past(self, lanes: list[Lane], filters: Filters) -> Past | None:
        if not filters.looks_back:
            return None
        texts = [lane.text(row) for lane, row in _each(lanes)]
        longest = max(len(text) for text in texts)
        tokens = torch.tensor([text + [-1] * (longest - len(text)) for text in texts], device=filters.device)
        return Past(tokens, torch.tensor([len(text) for text in texts], device=filters.device))

    def _search(self, lanes: list[Lane], logits: Tensor) -> list[Event]:
        assert self.filters is not None
        assert self.rows is not None
        new = [lane.count for lane, _ in _each(lanes)]
        shares = self.filters.rules(logits.log_softmax(-1), self._past(lanes, self.filters), new)
        searches = [lane.beams for lane in lanes if lane.beams is not None]
        origins = beam.advance(searches, shares)
        if origins != list(range(len(origins))):
            self.rows.select(torch.tensor(origins, device=logits.device))
        return [event for lane in lanes if lane.done for event in lane.verdicts()]

    # -- speculation ----------------------------------------------------------------------------------------------

    def _speculate(self, lanes: list[Lane]) -> list[Event]:
        """Several tokens at once: proposals are kept as long as they are what would have been chosen anyway."""
        rows, proposer = self.rows, self.proposer
        assert isinstance(rows, Cached)
        assert proposer is not None
        lanes_rows = _each(lanes)
        texts = [lane.text(row) for lane, row in lanes_rows]
        open_rows = {number for number, (lane, row) in enumerate(lanes_rows) if not lane.over(row)}
        room = min(self.capacity - len(texts[number]) for number in open_rows)
        live = self._live(lanes)
        proposed = proposer.propose(texts, lanes, room, live)  # (rows, k)
        newest = torch.tensor([text[-1:] for text in texts], device=rows.device)
        logits = rows.ahead(torch.cat((newest, proposed.to(rows.device)), 1), live).float()
        filters = Filters([lane.settings for lane, _ in lanes_rows], rows.device)
        events: list[Event] = []
        counts, guesses = [0] * len(lanes_rows), proposed.tolist()
        for place in range(logits.shape[1]):
            tokens = self._tokens(lanes, logits[:, place], filters)
            for number in sorted(open_rows):
                lane, row = lanes_rows[number]
                event = lane.say(row, tokens[number])
                counts[number] += 1
                if event is not None:
                    events.append(event)
                guessed = place < len(guesses[number]) and guesses[number][place] == tokens[number]
                if event is None or event.finished or not guessed:
                    open_rows.discard(number)
            if not open_rows:
                break
        kept = torch.tensor(counts, device=rows.device)
        rows.keep(kept)
        proposer.keep(kept)
        return events

    # -- leaving --------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Let finished requests go, when enough of them have gathered to be worth the copying."""
        done = [lane for lane in self.lanes if lane.done]
        if done and (4 * len(done) >= len(self.lanes)):
            self._drop(done)

    def _drop(self, gone: list[Lane]) -> None:
        if not gone:
            return
        kept = [number for number, lane in enumerate(self.lanes) if lane not in gone]
        size = self.lanes[0].settings.rows
        if not kept:
            self.lanes, self.rows, self.filters = [], None, None
            return
        assert self.rows is not None
        rows = torch.tensor([number * size + row for number in kept for row in range(size)], device=self.rows.device)
        sources = torch.tensor(kept, device=self.rows.device)
        self.rows.select(rows, sources)
        if self.proposer is not None:
            self.proposer.select(rows)
        self.lanes = [self.lanes[number] for number in kept]
        self.filters = None


def _each(lanes: list[Lane]) -> list[tuple[Lane, int]]:
    return [(lane, row) for lane in lanes for row in range(lane.settings.rows)]


def _chance(lane: Lane, row: int) -> float:
    noise = lane.rows[row].noise
    return 0.0 if noise is None else noise[len(lane.rows[row].new)]
