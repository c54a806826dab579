"""Speculative decoding (Leviathan et al. 2023): somebody quick proposes some tokens, the model checks them in one pass.

A proposal is kept as long as it is the very token the model would have chosen there: the best one, or, when drawing,
the one its own random number points at.  So the text is the same as without proposals, token by token, for greedy and
for sampling alike; only the number of passes differs.  A draft model draws with the same random numbers, so that it
agrees as often as its distribution does.

    Draft(small_model)   another model of the same vocabulary
    LookUp()             what followed the last time the same few tokens occurred in the text (Saxena 2023)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from monoblock.decoding.choice import chance, chosen, each, live
from monoblock.decoding.filters import Filters
from monoblock.decoding.lanes import Event, Lane
from monoblock.decoding.rows import Cached, Prompt, Rows
from monoblock.errors import InputError, with_article
from monoblock.model import Transformer


class Proposer(Protocol):
    def reset(self, capacity: int, copies: int) -> None: ...
    def begin(self, prompts: Sequence[Prompt]) -> None: ...
    def propose(self, texts: Sequence[Sequence[int]], lanes: list[Lane], room: int, live: Tensor | None) -> Tensor: ...
    def keep(self, counts: Tensor) -> None: ...
    def select(self, rows: Tensor) -> None: ...


def speculate(rows: Rows | None, proposer: Proposer, lanes: list[Lane], capacity: int) -> list[Event]:
    """Several tokens at once: proposals are kept as long as they are what would have been chosen anyway."""
    assert isinstance(rows, Cached)
    pairs = each(lanes)
    texts = [lane.text(row) for lane, row in pairs]
    going = {number for number, (lane, row) in enumerate(pairs) if not lane.over(row)}
    room = min(capacity - len(texts[number]) for number in going)
    alive = live(lanes, rows.device)
    proposed = proposer.propose(texts, lanes, room, alive)  # (rows, k)
    newest = torch.tensor([text[-1:] for text in texts], device=rows.device)
    logits = rows.ahead(torch.cat((newest, proposed.to(rows.device)), 1), alive).float()
    filters = Filters([lane.settings for lane, _ in pairs], rows.device)
    events: list[Event] = []
    counts, guesses = [0] * len(pairs), proposed.tolist()
    for place in range(logits.shape[1]):
        tokens = chosen(lanes, logits[:, place], filters)
        for number in sorted(going):
            lane, row = pairs[number]
            event = lane.say(row, tokens[number : number + 1])
            assert event is not None
            counts[number] += 1
            events.append(event)
            guessed = place < len(guesses[number]) and guesses[number][place] == tokens[number]
            if event.finished or not guessed:
                going.discard(number)
        if not going:
            break
    kept = torch.tensor(counts, device=rows.device)
    rows.keep(kept)
    proposer.keep(kept)
    return events


class LookUp:
    """Proposes what followed the longest recent repetition: good for texts that quote their prompt."""

    def __init__(self, count: int = 8, longest: int = 3) -> None:
        self.count, self.longest = count, longest

    def reset(self, capacity: int, copies: int) -> None:
        """Nothing is remembered but the text itself."""

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Nothing to read in advance."""

    def keep(self, counts: Tensor) -> None:
        """Nothing to take back."""

    def select(self, rows: Tensor) -> None:
        """Nothing to reorder."""

    def propose(self, texts: Sequence[Sequence[int]], lanes: list[Lane], room: int, live: Tensor | None) -> Tensor:
        count = min(self.count, room)
        found = [self._followed(list(text), count) for text in texts]
        return torch.tensor(found, dtype=torch.long).view(len(texts), count)

    def _followed(self, text: list[int], count: int) -> list[int]:
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            ending = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == ending:
                    after = text[start + size : start + size + count]
                    return (after + [text[-1]] * count)[:count]
        return [text[-1]] * count


class Draft:
    """A small model that runs ahead with the settings and the random numbers of each row."""

    def __init__(self, model: Transformer, count: int = 4) -> None:
        if model.decoder is None:
            raise InputError(f"{with_article(model.config.family)} model proposes no text; a draft is a decoder")
        self.model, self.count = model, count
        self.rows: Cached | None = None
        self.before = torch.zeros(1)

    def reads(self, length: int) -> bool:
        """Whether a prompt of so many tokens leaves the draft room to propose something."""
        limit = self.model.config.context
        return limit is None or length < limit

    def reset(self, capacity: int, copies: int) -> None:
        limit = self.model.config.context
        if limit is not None and limit < capacity and self.model.config.input.kind == "tokens":
            capacity = min(capacity, limit)
        self.rows = Cached(self.model, capacity, copies, chunk=None)

    def begin(self, prompts: Sequence[Prompt]) -> None:
        assert self.rows is not None
        longest = max(len(prompt.ids) for prompt in prompts)
        if not self.reads(longest):
            limit = self.model.config.context
            raise InputError(f"a prompt of {longest} tokens is too long for a draft of context {limit}; leave it out")
        self.rows.begin(prompts)

    def select(self, rows: Tensor) -> None:
        assert self.rows is not None
        self.rows.select(rows)

    def propose(self, texts: Sequence[Sequence[int]], lanes: list[Lane], room: int, live: Tensor | None) -> Tensor:
        """The draft's own continuation; the last token is read too, so that it may stay when all are kept."""
        assert self.rows is not None
        assert self.rows.cache is not None
        left = self.rows.capacity - self.rows.cache.longest - 1
        self.before = self.rows.cache.lengths
        ran = max(0, min(self.count, room, left))
        tokens = torch.tensor([text[-1] for text in texts], device=self.rows.device)
        filters = Filters([lane.settings for lane, _ in each(lanes)], self.rows.device)
        proposed = []
        for step in range(ran + (left >= 0)):
            logits = self.rows.step(tokens, live).float()
            if step == ran:
                break
            tokens = self._chosen(logits, filters, lanes, step)
            proposed.append(tokens)
        return torch.stack(proposed, 1) if proposed else tokens.new_zeros(len(texts), 0)

    @staticmethod
    def _chosen(logits: Tensor, filters: Filters, lanes: list[Lane], step: int) -> Tensor:
        chances = [chance(lane, row, step) for lane, row in each(lanes)]
        return filters.choose(logits, torch.tensor(chances, device=logits.device, dtype=torch.double))

    def keep(self, counts: Tensor) -> None:
        """Of what was run ahead, so many tokens were right."""
        assert self.rows is not None
        assert self.rows.cache is not None
        cache = self.rows.cache
        cache.truncate(self.before + counts.to(cache.lengths.device))
