"""Questions as a model reads them: a pair of question and context, the context in windows where it is too long.

A window knows which characters of the context each of its tokens covers, so that an answer goes from characters to
places and back without a change: what a model says is always a slice of the text it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from monoblock.data.batches import BucketPlan
from monoblock.data.corpora import Corpus
from monoblock.data.pairs import Ragged, Samples
from monoblock.data.squad import Question
from monoblock.errors import ConfigError
from monoblock.tasks.framing import Frame
from monoblock.tasks.ground import Ground, per_update, special_of
from monoblock.tasks.recipe import Recipe, model_config
from monoblock.tasks.samples import in_order
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.objectives import Prepared

NOWHERE = 0  # the place that stands for "no answer": the first of a row, where encoders have <cls>
Span = tuple[int, int]


class Window(NamedTuple):
    """Question and a part of the context: its ids, where the context stands in them, and what its tokens cover."""

    ids: list[int]
    segments: list[int]
    begins: int
    spans: list[Span]  # characters of the context, a pair a token; empty (n, n) where there is nothing but space

    def places(self, start: int, end: int) -> Span:
        """The places of the first and last token of context[start:end], or NOWHERE twice where it is not all here."""
        real = [(place, a, b) for place, (a, b) in enumerate(self.spans) if a < b]
        inside = [place for place, a, b in real if a < end and b > start]
        if not inside or real[0][1] > start or real[-1][2] < end:
            return NOWHERE, NOWHERE
        return self.begins + inside[0], self.begins + inside[-1]


class Asker:
    """Question and context to windows of at most `longest` tokens, which move on by `stride` tokens of the context.

    A question may fill half a window; more of it is cut off.  Without a stride, windows overlap by half.
    """

    def __init__(self, tokenizer: Tokenizer, longest: int | None = None, stride: int | None = None) -> None:
        self.tokenizer, self.longest, self.stride = tokenizer, longest, stride
        self.cut = 0  # questions so far that lost their end
        self.frame = Frame(tokenizer)
        self.specials = sum(token is not None for token, _ in self.frame.double)
        self.first = next(place for place, (token, _) in enumerate(self.frame.double) if token is None)
        if longest is not None and longest < self.specials + 4:
            raise ConfigError(
                f"{longest} tokens are too few for a question and a text; write {self.specials + 4} or more"
            )

    def __call__(self, question: str, context: str) -> list[Window]:
        asked, pieces = self.tokenizer.encode(question), self.tokenizer.pieces(context)
        ids = [piece.id for piece in pieces]
        spans = [_trimmed(context, piece.start, piece.end) for piece in pieces]
        room = len(ids)
        if self.longest is not None:
            most = (self.longest - self.specials) // 2
            self.cut += len(asked) > most
            asked = asked[:most]
            room = self.longest - self.specials - len(asked)
        return [self._window(asked, ids[a:b], spans[a:b]) for a, b in _parts(len(ids), room, self.stride)]

    def _window(self, asked: list[int], ids: list[int], spans: list[Span]) -> Window:
        framed = self.frame(asked, ids)
        gap = next(n for n, (token, _) in enumerate(self.frame.double[self.first + 1 :]) if token is None)
        return Window(framed.ids, framed.segments, self.first + len(asked) + gap, spans)


def _parts(length: int, room: int, stride: int | None) -> Iterator[Span]:
    """Where windows of `room` tokens begin and end, until all are covered."""
    step = min(room, stride) if stride is not None else max(1, room // 2)
    first = 0
    while first + room < length:
        yield first, first + room
        first += step
    yield first, length


def _trimmed(text: str, start: int, end: int) -> Span:
    """A token's characters without the spaces some tokenizers count to it."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, max(start, start + len(part.strip()))


# -- as ground --------------------------------------------------------------------------------------------------------


def answers(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    """Questions to be answered by a start and an end; a window without the answer is asked for NOWHERE."""
    if recipe.train.label_smoothing:
        raise ConfigError("train.label_smoothing says nothing to answers: a start is one place; leave it out")
    for corpus in (train, valid):
        _check_answered(corpus, recipe.data.impossible)
    asker, special = Asker(tokenizer, context, recipe.data.stride), special_of(tokenizer)
    samples = _samples(train.rows, asker, segmented := _knows_segments(recipe, tokenizer))
    cut = f" ({asker.cut:,} of them cut to half a window)" if asker.cut else ""
    held = None if valid is None else _samples(valid.rows, asker, segmented)
    prepare = partial(objectives.answers, special=special)
    more = f" in {len(samples):,} windows" if len(samples) > len(train) else ""
    return Ground(
        tokenizer,
        special,
        BucketPlan(samples.lengths, seed=recipe.train.seed, batch=per_update(recipe)),
        lambda batch: Prepared(*prepare([samples[int(n)] for n in batch.samples]), batch.epoch, batch.samples.tolist()),
        None if held is None else partial(in_order, held, recipe.train.batch, prepare),
        said=f"{len(train):,} questions{more} to train on{cut}",
        held=[] if valid is None else valid.rows,
        unit="ends",
        places=True,
    )


def _check_answered(corpus: Corpus | None, impossible: bool) -> None:
    without = 0 if corpus is None else sum(not row.answers for row in corpus.rows)
    if without and not impossible:
        assert corpus is not None
        raise ConfigError(
            f"{without:,} of {len(corpus):,} questions of {corpus.name} have no answer; write data.impossible=true"
        )


def _knows_segments(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    config = model_config(recipe, tokenizer.vocab_size)
    return getattr(getattr(config, "input", None), "segments", 0) > 1


def _samples(rows: Sequence[Question], asker: Asker, segmented: bool) -> Samples:
    """{"ids", "answer"} and, where the model knows them, "segments", a window each; the first gold answer is asked."""
    made: dict[str, list[Sequence[int]]] = {
        name: [] for name in ("ids", "answer", *(["segments"] if segmented else []))
    }
    numbers: list[int] = []
    for number, row in enumerate(rows):
        gold = _trimmed(row.context, row.starts[0], row.starts[0] + len(row.answers[0])) if row.answers else None
        for window in asker(row.question, row.context):
            places = (NOWHERE, NOWHERE) if gold is None else window.places(*gold)
            found: dict[str, Any] = {"ids": window.ids, "answer": places, "segments": window.segments}
            for name, into in made.items():
                into.append(found[name])
            numbers.append(number)
    return Samples({name: Ragged(values) for name, values in made.items()}, np.array(numbers, np.int64))
