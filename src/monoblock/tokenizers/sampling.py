"""Sample segmentations of words with a seed: BPE-dropout (Provilkov et al. 2020), Unigram (Kudo 2018).

The `tokenizers` library also has dropout, but without a seed. The segmenters here use the vocabulary, merges and scores
of the library's models; without dropout, BPE gives exactly the segmentation of the library.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import chain, count, repeat
from math import exp, inf, log
from random import Random
from typing import Any

from monoblock.errors import InputError

MAX_CACHED_WORDS = 65_536
MAX_CACHED_LENGTH = 64  # characters

RandomFunction = Callable[[], float]
DEFAULT_STRENGTH = 0.1  # the default of both `dropout` and `alpha`


def sampling_strength(kind: str, dropout: float | None, alpha: float | None) -> float:
    """Return the strength of sampling: `dropout` for bpe, `alpha` for unigram; None means 0.1 for either."""
    if kind not in ("bpe", "unigram"):
        raise InputError(f"a {kind} tokenizer has only one segmentation of each text; sampling needs bpe or unigram")
    name, unused_name = ("dropout", "alpha") if kind == "bpe" else ("alpha", "dropout")
    value, unused = (dropout, alpha) if kind == "bpe" else (alpha, dropout)
    if unused is not None:
        raise InputError(f"{unused_name}={unused} does not apply to {kind}; set {name} instead")
    value = DEFAULT_STRENGTH if value is None else value
    if not 0 <= value <= (1 if name == "dropout" else 1e6):
        limits = "from 0 to 1" if name == "dropout" else "from 0 to 1,000,000"
        raise InputError(f"{name}={value} is out of range; write a number {limits}")
    return float(value)


def seeded_random(seed: int, epoch: int, index: int, text: str) -> Random:
    """Return a random generator that depends only on the four arguments."""
    key = f"{seed},{epoch},{index},".encode() + text.encode()
    return Random(int.from_bytes(blake2b(key, digest_size=16).digest()))


class BpeSegmenter:
    """BPE in which every possible merge is skipped with probability `dropout` at each step."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.vocab: dict[str, int] = model["vocab"]
        self.prefix = model.get("continuing_subword_prefix") or ""
        self.suffix = model.get("end_of_word_suffix") or ""
        self.unk_id = self.vocab.get(model.get("unk_token") or "")
        self.fuse_unk = bool(model.get("fuse_unk"))
        self.byte_fallback = bool(model.get("byte_fallback"))
        self.ignore_merges = bool(model.get("ignore_merges"))
        # From (left id, right id) to (rank of the merge, id of the merged token).
        self.merges: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, pair in enumerate(model["merges"]):
            left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
            merged = self.vocab[left + right[len(self.prefix) :]]
            self.merges[self.vocab[left], self.vocab[right]] = (rank, merged)
        self.cache: dict[str, tuple[list[int], int]] = {}

    def segment(self, word: str, dropout: float, draw: RandomFunction) -> list[int]:
        if self.ignore_merges and not dropout and word in self.vocab:
            return [self.vocab[word]]
        if not dropout:
            return self._apply_merges(self._initial_symbols(word), dropout, draw)
        plain, draws = self._segment_without_dropout(word)
        for kept in range(draws):
            if draw() < dropout:  # repeat the draws so far: `kept` merges are made, the next is skipped
                replay = chain(repeat(inf, kept), (-inf,), iter(draw, None))
                return self._apply_merges(self._initial_symbols(word), dropout, replay.__next__)
        return list(plain)

    def _segment_without_dropout(self, word: str) -> tuple[list[int], int]:
        """Return the ids of a word if no merge is skipped, and how many random numbers are drawn in this case.

        The result is cached, because with a small dropout this is the usual case.
        """
        result = self.cache.get(word)
        if result is None:
            draws = count()
            result = self._apply_merges(self._initial_symbols(word), 1.0, lambda: next(draws) + 1.0), next(draws)
            if len(word) <= MAX_CACHED_LENGTH:
                if len(self.cache) >= MAX_CACHED_WORDS:
                    self.cache.clear()
                self.cache[word] = result
        return result

    def _initial_symbols(self, word: str) -> list[int]:
        ids: list[int] = []
        after_unknown = False
        for index, character in enumerate(word):
            symbol = (self.prefix if index else "") + character + (self.suffix if index == len(word) - 1 else "")
            symbol_id = self.vocab.get(symbol)
            if symbol_id is not None:
                ids.append(symbol_id)
                after_unknown = False
                continue
            byte_ids = _byte_fallback_ids(symbol, self.vocab) if self.byte_fallback else None
            if byte_ids is not None:
                ids += byte_ids
                after_unknown = False
            elif self.unk_id is not None:
                if not (self.fuse_unk and after_unknown):
                    ids.append(self.unk_id)
                after_unknown = True
        return ids

    def _apply_merges(self, ids: list[int], dropout: float, draw: RandomFunction) -> list[int]:
        """Merge neighbouring ids, the lowest rank first.

        As in the `tokenizers` library, a skipped merge is tried again after the next merge that is made.
        """
        size = len(ids)
        next_index, previous_index = list(range(1, size + 1)), list(range(-1, size - 1))
        find_merge = self.merges.get
        queue = [
            (merge[0], index, merge[1])
            for index in range(size - 1)
            if (merge := find_merge((ids[index], ids[index + 1]))) is not None
        ]
        heapify(queue)
        skipped: list[tuple[int, int, int]] = []
        while queue:
            top = heappop(queue)
            if dropout and draw() < dropout:
                skipped.append(top)
                continue
            while skipped:
                heappush(queue, skipped.pop())
            rank, left, merged = top
            right = next_index[left]
            if ids[left] < 0 or right == size or find_merge((ids[left], ids[right])) != (rank, merged):
                continue  # one of the two ids has been merged with another neighbour in the meantime
            ids[left], ids[right] = merged, -1
            next_index[left] = following = next_index[right]
            if following < size:
                previous_index[following] = left
            for first, second in ((previous_index[left], left), (left, following)):
                if first >= 0 and second < size and (merge := find_merge((ids[first], ids[second]))) is not None:
                    heappush(queue, (merge[0], first, merge[1]))
        return [number for number in ids if number >= 0]


def _byte_fallback_ids(symbol: str, vocab: dict[str, int]) -> list[int] | None:
    """Return the ids of the byte tokens, such as <0x0A>, that spell a symbol; None if `vocab` lacks one."""
    ids = [vocab.get(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return None if None in ids else [number for number in ids if number is not None]


# The pieces that end at a position: their cumulative weights, starts and ids.
LatticeColumn = tuple[list[float], list[int], list[int]]


class UnigramSegmenter:
    """Sample segmentations with probability ∝ p(segmentation)^alpha, by forward filtering and backward sampling."""

    def __init__(self, model: dict[str, Any]) -> None:
        pieces = [(piece, float(score)) for piece, score in model["vocab"]]
        self.pieces = {piece: (number, score) for number, (piece, score) in enumerate(pieces)}
        self.vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
        self.max_piece_length = max((len(piece) for piece, _ in pieces), default=1)
        self.unk_id = model.get("unk_id")
        self.unknown_score = min((score for _, score in pieces), default=0.0) - 10  # as in the `tokenizers` library
        self.byte_fallback = bool(model.get("byte_fallback"))
        self.cache: dict[tuple[str, float], list[LatticeColumn]] = {}

    def segment(self, word: str, alpha: float, draw: RandomFunction) -> list[int]:
        columns = self.cache.get((word, alpha))
        if columns is None:
            columns = self._forward_filter(word, alpha)
            if len(word) <= MAX_CACHED_LENGTH:
                if len(self.cache) >= MAX_CACHED_WORDS:
                    self.cache.clear()
                self.cache[word, alpha] = columns
        spans: list[tuple[int, int, int]] = []
        end = len(word)
        while end:
            weights, starts, ids = columns[end]
            index = bisect_right(weights, draw() * weights[-1], hi=len(weights) - 1) if len(weights) > 1 else 0
            spans.append((starts[index], end, ids[index]))
            end = starts[index]
        return self._to_ids(word, spans[::-1])

    def _forward_filter(self, word: str, alpha: float) -> list[LatticeColumn]:
        """Return the pieces that end at each position of a word, with their cumulative weights.

        The weight of a piece is the sum of p(segmentation)^alpha over all segmentations that end with it.
        """
        log_total = [0.0] + [-inf] * len(word)  # log of the sum over all segmentations of a prefix
        arriving: list[list[tuple[float, int, int]]] = [[] for _ in range(len(word) + 1)]
        columns: list[LatticeColumn] = [([], [], [])]
        for start in range(len(word)):
            if start:
                columns.append(_cumulative_weights(arriving[start]))
                best = max(score for score, _, _ in arriving[start])
                log_total[start] = best + log(columns[start][0][-1])
            for end in range(start + 1, min(len(word), start + self.max_piece_length) + 1):
                piece = self.pieces.get(word[start:end])
                if piece is not None and piece[0] != self.unk_id:
                    arriving[end].append((log_total[start] + alpha * piece[1], start, piece[0]))
            unknown = self.unk_id if self.unk_id is not None else -1
            if self.pieces.get(word[start], (unknown,))[0] == unknown:
                arriving[start + 1].append((log_total[start] + alpha * self.unknown_score, start, unknown))
        columns.append(_cumulative_weights(arriving[len(word)]))
        return columns

    def _to_ids(self, word: str, spans: list[tuple[int, int, int]]) -> list[int]:
        """Return the ids of spans; neighbouring unknown characters become one unknown token, or byte tokens."""
        ids: list[int] = []
        index = 0
        while index < len(spans):
            start, end, number = spans[index]
            index += 1
            if number not in (self.unk_id, -1):
                ids.append(number)
                continue
            while index < len(spans) and spans[index][2] == number:
                end = spans[index][1]
                index += 1
            byte_ids = _byte_fallback_ids(word[start:end], self.vocab) if self.byte_fallback else None
            ids += byte_ids if byte_ids is not None else [number] if number >= 0 else []
        return ids


def _cumulative_weights(arriving: list[tuple[float, int, int]]) -> LatticeColumn:
    best = max(score for score, _, _ in arriving)
    weights, total = [], 0.0
    for score, _, _ in arriving:
        total += exp(score - best)
        weights.append(total)
    return weights, [start for _, start, _ in arriving], [number for _, _, number in arriving]
