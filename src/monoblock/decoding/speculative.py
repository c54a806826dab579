"""Speculative decoding (Leviathan et al. 2023): somebody quick proposes some tokens, the model checks them in one pass.

A proposal is kept as long as it is the very token the model would have chosen there: the best one, or, when drawing,
the one its own random number points at.  So the text is the same as without proposals, token by token, for greedy and
for sampling alike; only the number of passes differs.  A draft model draws with the same random numbers, so that it
agrees as often as its distribution does.

    Draft(small_model)   another model of the same vocabulary, perhaps the model itself in 8 bits (own_draft.py)
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
from monoblock.decoding.prepare import prepared
from monoblock.decoding.rows import Cached, Prompt, Rows
from monoblock.errors import InputError, with_article
from monoblock.model import Transformer


class Proposer(Protocol):
    def reset(self, capacity: int, copies: int) -> None: ...
    def begin(self, prompts: Sequence[Prompt]) -> None: ...
    def propose(self, texts: Sequence[Sequence[int]], lanes: list[Lane], room: int, live: Tensor | None) -> Tensor: ...
    def keep(self, counts: Tensor) -> None: ...
    def select(self, rows: Tensor, sources: Tensor | None = None) -> None: ...


def speculate(rows: Rows | None, proposer: Proposer, lanes: list[Lane], capacity: int) -> list[Event]:
    """Several tokens at once: proposals are kept as long as they are what would have been chosen anyway."""
    assert isinstance(rows, Cached)
    pairs = each(lanes)
    texts = [lane.text(row) for lane, row in pairs]
    going = {number for number, (lane, row) in enumerate(pairs) if not lane.over(row)}
    wanted = max(pairs[number][0].room - len(pairs[number][0].rows[pairs[number][1]].new) for number in going)
    room = min(wanted - 1, *(capacity - len(texts[number]) for number in going))
    alive = live(lanes, rows.device)
    proposed = proposer.propose(texts, lanes, room, alive)  # (rows, k)
    newest = torch.tensor([text[-1:] for text in texts], device=rows.device)
    logits = rows.ahead(torch.cat((newest, proposed.to(rows.device)), 1), alive).float()
    filters = Filters([lane.settings for lane, _ in pairs], rows.device)
    best = logits.argmax(-1).T.tolist() if filters.by_itself and not filters.draws else None
    events: list[Event] = []
    counts, guesses = [0] * len(pairs), proposed.tolist()
    for place in range(logits.shape[1]):
        tokens = best[place] if best is not None else chosen(lanes, logits[:, place], filters)
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

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
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
    """A quick model that runs ahead with the settings and the random numbers of each row, at most `count` tokens.

    After a wrong one it runs less far, until it is right again.  With `most`, what is checked at once in all rows
    together, the newest tokens too, is no more than that, as long as each row gets one proposal.
    """

    def __init__(self, model: Transformer, count: int = 4, most: int | None = None) -> None:
        if model.decoder is None:
            raise InputError(f"{with_article(model.config.family)} model proposes no text; a draft is a decoder")
        self.model, self.count, self.ahead, self.most = model, count, count, most
        self.proposed = self.accepted = 0  # tokens, of all rows
        self.rows: Cached | None = None
        self.known: list[int] = []  # tokens of each text before this proposal
        self.size = 0  # of this proposal

    def reads(self, length: int) -> bool:
        """Whether a prompt of so many tokens leaves the draft room to propose something."""
        limit = self.model.config.context
        return limit is None or length < limit

    def reset(self, capacity: int, copies: int) -> None:
        limit = self.model.config.context
        if limit is not None and limit < capacity and self.model.config.input.kind == "tokens":
            capacity = min(capacity, limit)
        self.rows, self.ahead = Cached(prepared(self.model), capacity, copies, chunk=None), self.count

    def begin(self, prompts: Sequence[Prompt]) -> None:
        assert self.rows is not None
        longest = max(len(prompt.ids) for prompt in prompts)
        if not self.reads(longest):
            limit = self.model.config.context
            raise InputError(f"a prompt of {longest} tokens is too long for a draft of context {limit}; leave it out")
        self.rows.begin(prompts)

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        assert self.rows is not None
        self.rows.select(rows, sources)

    def propose(self, texts: Sequence[Sequence[int]], lanes: list[Lane], room: int, live: Tensor | None) -> Tensor:
        """The draft's own continuation of what it has not read yet: the newest token, and mostly one before it."""
        assert self.rows is not None
        assert self.rows.cache is not None
        going = [True] * len(texts) if live is None else live.tolist()
        self.known = [len(text) for text in texts]
        longest = max(length for length, goes in zip(self.known, going, strict=True) if goes)
        few = self.ahead if self.most is None else self.most // len(texts) - 1
        ahead = min(self.ahead, few) if few >= 1 else self.ahead
        self.size = max(0, min(ahead, room, self.rows.capacity - longest + 1))
        proposed: list[Tensor] = []
        filters = Filters([lane.settings for lane, _ in each(lanes)], self.rows.device)
        for step in range(self.size):
            logits = self._read(texts, going) if step == 0 else self.rows.step(proposed[-1], live)
            proposed.append(self._chosen(logits.float(), filters, lanes, step))
        if not proposed:
            return torch.zeros(len(texts), 0, dtype=torch.long, device=self.rows.device)
        return torch.stack(proposed, 1)

    def _read(self, texts: Sequence[Sequence[int]], going: list[bool]) -> Tensor:
        """Logits (rows, V) after all that was said; rows that lack more tokens than others read those first."""
        assert self.rows is not None
        assert self.rows.cache is not None
        held = self.rows.cache.lengths.tolist()
        lacks = [len(text) - has if goes else 0 for text, has, goes in zip(texts, held, going, strict=True)]
        most = max(lacks)
        if all(lack in (0, most) for lack in lacks):
            tokens = torch.tensor([[*[0] * most, *text][-most:] for text in texts], device=self.rows.device)
            live = None if all(going) else torch.tensor(going, device=self.rows.device)
            logits = self.rows.ahead(tokens, live)[:, -1]
            self.rows.keep(most if live is None else most * live.long())
            return logits
        for back in range(most, 0, -1):
            tokens = torch.tensor([text[-min(back, len(text))] for text in texts], device=self.rows.device)
            logits = self.rows.step(tokens, torch.tensor([lack >= back for lack in lacks], device=self.rows.device))
        return logits

    @staticmethod
    def _chosen(logits: Tensor, filters: Filters, lanes: list[Lane], step: int) -> Tensor:
        chances = [chance(lane, row, step) for lane, row in each(lanes)] if filters.draws else [0.0] * len(logits)
        return filters.choose(logits, torch.tensor(chances, device=logits.device, dtype=torch.double))

    def keep(self, counts: Tensor) -> None:
        """So many tokens were said in each row, all but the last of them as they were proposed."""
        assert self.rows is not None
        assert self.rows.cache is not None
        said = counts.tolist()
        right = [min(count - 1, self.size) for count in said if count]
        self.proposed += self.size * len(right)
        self.accepted += sum(right)
        if self.size:
            read = [known + max(0, min(count, self.size) - 1) for known, count in zip(self.known, said, strict=True)]
            self.rows.cache.truncate(torch.tensor(read, device=self.rows.device))
            self.ahead = min(self.count, max(1, 2 * (sum(right) // len(right)) + 1))
