"""Answers to questions: the best span of the context, over all its windows; or, where a model may, none.

The score of a span is the sum of its start's and its end's logit (Devlin et al. 2019); every span of at most `longest`
tokens is looked at.  Its probability is the share of its exponential among the spans of all windows and, where that may
be, "no answer".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from monoblock.data.squad import Question
from monoblock.errors import InputError
from monoblock.tasks.asking import NOWHERE, Asker, Window
from monoblock.tasks.framing import Framed
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.passing import Tell, nobody, passed
from monoblock.tasks.predicting import check_head
from monoblock.tasks.spanscores import scored

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

LONGEST = 30  # tokens of an answer


class Found(NamedTuple):
    """context[start:end], or "" at 0 for no answer."""

    text: str
    start: int
    end: int
    score: float
    probability: float


def answered(
    pipe: Pipeline,
    questions: Sequence[tuple[str, str]],
    *,
    n_best: int = 1,
    longest: int = LONGEST,
    impossible: bool | None = None,
    batch: int = 32,
    lines: Sequence[int] | None = None,
    tell: Tell = nobody,
) -> list[list[Found]]:
    """For each (question, context) its best answers, best first; `impossible`: whether "" may be one."""
    check_head(pipe, "spans")
    if longest < 1 or n_best < 1:
        raise InputError(f"longest={longest} and n_best={n_best} cannot be; write 1 or more")
    part = pipe.part
    refuses = impossible if impossible is not None else part is not None and part.impossible
    asker = Asker(pipe.tokenizer, _room(pipe), None if part is None else part.stride)
    windows = []
    for number, (question, context) in enumerate(questions):
        if not context.strip():
            place = f"line {(number if lines is None else lines[number]) + 1}: "
            raise InputError(f"{place if len(questions) > 1 else ''}the text is empty, and an answer is a part of it")
        windows.append(asker(question, context))
    flat = [window for some in windows for window in some]
    scores = iter(passed(pipe, [Framed(one.ids, one.segments) for one in flat], batch, pipe.model, tell=tell))
    return [
        best(some, [next(scores) for _ in some], context, n_best=n_best, longest=longest, impossible=refuses)
        for some, (_, context) in zip(windows, questions, strict=True)
    ]


def _room(pipe: Pipeline) -> int | None:
    """How many tokens the model reads, or was trained to."""
    trained = None if pipe.part is None else pipe.part.longest
    return min((n for n in (pipe.model.config.context, trained) if n is not None), default=None)


def best(
    windows: Sequence[Window],
    scores: Sequence[Tensor],
    context: str,
    *,
    n_best: int = 1,
    longest: int = LONGEST,
    impossible: bool = False,
) -> list[Found]:
    """The spans with the highest scores; one that stands in several windows counts where it scores highest.

    "No answer" scores what the window says that is least sure of it.
    """
    tables = [_spans(window, table, longest) for window, table in zip(windows, scores, strict=True)]
    nothing = min(float(table[NOWHERE].sum()) for table in scores)
    every = torch.cat([table.flatten() for table in tables] + ([torch.tensor([nothing])] if impossible else []))
    total = float(every.logsumexp(0))
    found: dict[tuple[int, int], float] = {}
    for window, table in zip(windows, tables, strict=True):
        for start, end, score in _top(window, table, n_best):
            found[start, end] = max(score, found.get((start, end), score))
    if impossible:
        found[0, 0] = nothing
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    share = torch.tensor([score - total for _, score in ranked]).exp().tolist()
    return [
        Found(context[start:end], start, end, score, each)
        for ((start, end), score), each in zip(ranked, share, strict=True)
    ]


def _spans(window: Window, scores: Tensor, longest: int) -> Tensor:
    """(S, S): the score of the span from token i to token j of the context, -inf where there is none."""
    part = scores[window.begins : window.begins + len(window.spans)]
    blank = torch.tensor([start == end for start, end in window.spans])
    table = part[:, 0, None] + part[None, :, 1]
    ones = torch.ones_like(table, dtype=torch.bool)
    allowed = ones.triu() & ones.tril(longest - 1) & ~blank[:, None] & ~blank[None, :]
    return table.masked_fill(~allowed, -torch.inf)


def _top(window: Window, table: Tensor, count: int) -> Iterator[tuple[int, int, float]]:
    """The best spans of a window as characters of the context."""
    values, places = table.flatten().topk(min(table.numel(), count))
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        if value > -torch.inf:
            first, last = divmod(place, table.shape[1])
            yield window.spans[first][0], window.spans[last][1], value


# -- how good they are ------------------------------------------------------------------------------------------------


def measure(pipe: Pipeline, asked: Asked) -> Measured:
    """Exact match and F1 over the questions of a corpus."""
    corpus = read(asked, "questions")
    asks = any(not row.answers for row in corpus.rows)
    found = answered(pipe, [row[:2] for row in corpus.rows], impossible=asks or None, batch=asked.batch)
    texts = [each[0].text for each in found]
    figures = scored(texts, [row.answers for row in corpus.rows])
    samples = [
        {"source": row.question, "reference": " | ".join(row.answers) or "no answer", "hypothesis": text or "no answer"}
        for row, text in zip(corpus.rows[: asked.samples], texts, strict=False)
    ]
    return Measured({**figures, "split": corpus.split}, samples)


def held_out(pipe: Pipeline, rows: Sequence[Question], count: int) -> dict[str, float]:
    """For a model card: exact match and F1 of the first validation questions."""
    some = rows[:count]
    texts = [each[0].text for each in answered(pipe, [row[:2] for row in some])]
    figures = scored(texts, [row.answers for row in some])
    return {f"val_{name}": figures[name] for name in ("exact_match", "f1")}
