"""One of the many ways to cut a word, drawn by a seed: BPE-dropout (Provilkov et al. 2020), Unigram (Kudo 2018).

The library's own dropout takes no seed. These segmenters work on its vocabulary, merges and scores; without dropout
they cut exactly as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import chain, count, repeat
from math import exp, inf, log
from random import Random
from typing import Any

MOST_REMEMBERED = 65_536  # words of which it is kept how they can be cut
LONGEST_REMEMBERED = 64  # characters

Draw = Callable[[], float]


def generator(seed: int, epoch: int, index: int, text: str) -> Random:
    """Random numbers that depend on these four and on nothing else."""
    key = f"{seed},{epoch},{index},".encode() + text.encode()
    return Random(int.from_bytes(blake2b(key, digest_size=16).digest()))


class BpeSegmenter:
    """The merges of a BPE model, each possible one left out with some probability at every step."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.vocab: dict[str, int] = model["vocab"]
        self.prefix = model.get("continuing_subword_prefix") or ""
        self.suffix = model.get("end_of_word_suffix") or ""
        self.unknown = self.vocab.get(model.get("unk_token") or "")
        self.fused = bool(model.get("fuse_unk"))
        self.bytes = bool(model.get("byte_fallback"))
        self.whole = bool(model.get("ignore_merges"))
        self.merges = self._numbered(model["merges"])
        self.remembered: dict[str, tuple[list[int], int]] = {}

    def _numbered(self, merges: list[Any]) -> dict[tuple[int, int], tuple[int, int]]:
        """(left, right) -> (rank, merged)."""
        found = {}
        for rank, pair in enumerate(merges):
            left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
            merged = self.vocab[left + right[len(self.prefix) :]]
            found[self.vocab[left], self.vocab[right]] = (rank, merged)
        return found

    def segment(self, word: str, dropout: float, draw: Draw) -> list[int]:
        if self.whole and not dropout and word in self.vocab:
            return [self.vocab[word]]
        if not dropout:
            return self._merged(self._symbols(word), dropout, draw)
        plain, draws = self._undisturbed(word)
        for kept in range(draws):
            if draw() < dropout:  # what was drawn is drawn again: so many merges are kept, then one is left out
                again = chain(repeat(inf, kept), (-inf,), iter(draw, None))
                return self._merged(self._symbols(word), dropout, again.__next__)
        return list(plain)

    def _undisturbed(self, word: str) -> tuple[list[int], int]:
        """A word with every merge kept, and how many numbers that draws: half of all words come out like this."""
        found = self.remembered.get(word)
        if found is None:
            draws = count()
            found = self._merged(self._symbols(word), 1.0, lambda: next(draws) + 1.0), next(draws)
            if len(word) <= LONGEST_REMEMBERED:
                if len(self.remembered) >= MOST_REMEMBERED:
                    self.remembered.clear()
                self.remembered[word] = found
        return found

    def _symbols(self, word: str) -> list[int]:
        ids: list[int] = []
        unknown_before = False
        for place, character in enumerate(word):
            symbol = (self.prefix if place else "") + character + (self.suffix if place == len(word) - 1 else "")
            found = self.vocab.get(symbol)
            if found is not None:
                ids.append(found)
                unknown_before = False
                continue
            pieces = _byte_pieces(symbol, self.vocab) if self.bytes else None
            if pieces is not None:
                ids += pieces
                unknown_before = False
            elif self.unknown is not None:
                if not (self.fused and unknown_before):
                    ids.append(self.unknown)
                unknown_before = True
        return ids

    def _merged(self, ids: list[int], dropout: float, draw: Draw) -> list[int]:
        """Best merge first; one that is left out waits until another was made (the library's order)."""
        size = len(ids)
        after, before = list(range(1, size + 1)), list(range(-1, size - 1))
        rank_of = self.merges.get
        queue = [
            (found[0], place, found[1])
            for place in range(size - 1)
            if (found := rank_of((ids[place], ids[place + 1]))) is not None
        ]
        heapify(queue)
        waiting: list[tuple[int, int, int]] = []
        while queue:
            top = heappop(queue)
            if dropout and draw() < dropout:
                waiting.append(top)
                continue
            while waiting:
                heappush(queue, waiting.pop())
            rank, left, merged = top
            right = after[left]
            if ids[left] < 0 or right == size or rank_of((ids[left], ids[right])) != (rank, merged):
                continue  # one of the two has been merged with another since
            ids[left], ids[right] = merged, -1
            after[left] = following = after[right]
            if following < size:
                before[following] = left
            for pair in ((before[left], left), (left, following)):
                if pair[0] >= 0 and pair[1] < size and (found := rank_of((ids[pair[0]], ids[pair[1]]))) is not None:
                    heappush(queue, (found[0], pair[0], found[1]))
        return [number for number in ids if number >= 0]


def _byte_pieces(symbol: str, vocab: dict[str, int]) -> list[int] | None:
    """The ids of <0x..> for every byte of an unknown symbol, or None where one is missing."""
    found = [vocab.get(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return None if None in found else [number for number in found if number is not None]


Step = tuple[list[float], list[int], list[int]]  # at an end position: weights that add up, starts, ids


class UnigramSegmenter:
    """Forward filtering, backward sampling: a segmentation with probability p(segmentation)^alpha, normalized."""

    def __init__(self, model: dict[str, Any]) -> None:
        pieces = [(piece, float(score)) for piece, score in model["vocab"]]
        self.pieces = {piece: (number, score) for number, (piece, score) in enumerate(pieces)}
        self.vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
        self.longest = max((len(piece) for piece, _ in pieces), default=1)
        self.unknown = model.get("unk_id")
        self.penalty = min((score for _, score in pieces), default=0.0) - 10  # the library's
        self.bytes = bool(model.get("byte_fallback"))
        self.remembered: dict[tuple[str, float], list[Step]] = {}

    def segment(self, word: str, alpha: float, draw: Draw) -> list[int]:
        steps = self.remembered.get((word, alpha))
        if steps is None:
            steps = self._steps(word, alpha)
            if len(word) <= LONGEST_REMEMBERED:
                if len(self.remembered) >= MOST_REMEMBERED:
                    self.remembered.clear()
                self.remembered[word, alpha] = steps
        chosen: list[tuple[int, int, int]] = []
        end = len(word)
        while end:
            weights, starts, ids = steps[end]
            place = 0
            if len(weights) > 1:
                point = draw() * weights[-1]
                while place < len(weights) - 1 and weights[place] <= point:
                    place += 1
            chosen.append((starts[place], end, ids[place]))
            end = starts[place]
        return self._joined(word, chosen[::-1])

    def _steps(self, word: str, alpha: float) -> list[Step]:
        """For each end position the pieces that end there, weighted by all ways to reach their start."""
        reached = [0.0] + [-inf] * len(word)  # log of the sum over all ways
        arriving: list[list[tuple[float, int, int]]] = [[] for _ in range(len(word) + 1)]
        steps: list[Step] = [([], [], [])]
        for start in range(len(word)):
            if start:
                steps.append(_weighed(arriving[start]))
                best = max(score for score, _, _ in arriving[start])
                reached[start] = best + log(steps[start][0][-1])
            for end in range(start + 1, min(len(word), start + self.longest) + 1):
                found = self.pieces.get(word[start:end])
                if found is not None and found[0] != self.unknown:
                    arriving[end].append((reached[start] + alpha * found[1], start, found[0]))
            unknown = self.unknown if self.unknown is not None else -1
            if self.pieces.get(word[start], (unknown,))[0] == unknown:
                arriving[start + 1].append((reached[start] + alpha * self.penalty, start, unknown))
        steps.append(_weighed(arriving[len(word)]))
        return steps

    def _joined(self, word: str, chosen: list[tuple[int, int, int]]) -> list[int]:
        """Neighbouring unknown characters are one unknown, or their bytes, as in the library."""
        ids: list[int] = []
        place = 0
        while place < len(chosen):
            start, end, number = chosen[place]
            place += 1
            if number not in (self.unknown, -1):
                ids.append(number)
                continue
            while place < len(chosen) and chosen[place][2] == number:
                end = chosen[place][1]
                place += 1
            pieces = _byte_pieces(word[start:end], self.vocab) if self.bytes else None
            ids += pieces if pieces is not None else [number] if number >= 0 else []
        return ids


def _weighed(arriving: list[tuple[float, int, int]]) -> Step:
    best = max(score for score, _, _ in arriving)
    weights, total = [], 0.0
    for score, _, _ in arriving:
        total += exp(score - best)
        weights.append(total)
    return weights, [start for _, start, _ in arriving], [number for _, _, number in arriving]
