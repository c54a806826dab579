"""Answer each question with a span of its context, the text that contains the answer, or with "no answer" if allowed.

The score of a span is the start logit of its first token plus the end logit of its last token (Devlin et al. 2019).
The candidates are all spans of at most `longest` tokens in all windows and, if allowed, "no answer". Their
probabilities are the softmax of their scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.tasks.batching import ProgressCallback, no_progress, run_batches
from monoblock.tasks.input_template import EncodedInput
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.question_answering.section import QuestionAnsweringSection
from monoblock.tasks.question_answering.windows import NO_ANSWER, ContextWindow, QuestionEncoder

MAX_ANSWER_TOKENS = 30


class AnswerSpan(NamedTuple):
    """The answer context[start:end], in characters; no answer is the text "" with start and end 0."""

    text: str
    start: int
    end: int
    score: float
    probability: float


def answer_questions(
    loaded: LoadedModel,
    questions: Sequence[tuple[str, str]],
    *,
    n_best: int = 1,
    longest: int = MAX_ANSWER_TOKENS,
    impossible: bool | None = None,
    batch: int = 32,
    lines: Sequence[int] | None = None,
    progress: ProgressCallback = no_progress,
) -> list[list[AnswerSpan]]:
    """Return the best answers to each (question, context), best first.

    n_best: the number of answers to return for each question.
    longest: the maximum number of tokens in an answer.
    impossible: whether "" (no answer) is allowed; None means as in training.
    lines: the line numbers of the questions for error messages, counted from 0.
    """
    loaded.check_head("spans")
    if longest < 1 or n_best < 1:
        raise InputError(f"longest={longest} and n_best={n_best} must both be positive; write 1 or more")
    section = loaded.section(QuestionAnsweringSection)
    if impossible is None:
        impossible = section.unanswerable
    encoder = QuestionEncoder(loaded.tokenizer, _max_length(loaded), section.stride)
    windows = []
    for index, (question, context) in enumerate(questions):
        if not context.strip():
            line = f"line {(index if lines is None else lines[index]) + 1}: " if len(questions) > 1 else ""
            raise InputError(f"{line}the context of the question is empty; give the text that contains the answer")
        windows.append(encoder(question, context))
    inputs = [EncodedInput(window.ids, window.segments) for row in windows for window in row]
    logits = iter(run_batches(loaded, inputs, batch, loaded.model, progress=progress))
    return [
        best_spans(row, [next(logits) for _ in row], context, n_best=n_best, longest=longest, impossible=impossible)
        for row, (_, context) in zip(windows, questions, strict=True)
    ]


def best_answers(loaded: LoadedModel, questions: Sequence[tuple[str, str]]) -> list[str]:
    """Return the best answer to each (question, context); "" means no answer."""
    return [spans[0].text for spans in answer_questions(loaded, questions)] if questions else []


def _max_length(loaded: LoadedModel) -> int | None:
    """Return the maximum length of a window: as in training, but at most the context; None means no limit."""
    training_length = None if loaded.data_section is None else loaded.data_section.max_length
    limits = (loaded.model.config.context, training_length)
    return min((limit for limit in limits if limit is not None), default=None)


def best_spans(
    windows: Sequence[ContextWindow],
    logits: Sequence[Tensor],
    context: str,
    *,
    n_best: int = 1,
    longest: int = MAX_ANSWER_TOKENS,
    impossible: bool = False,
) -> list[AnswerSpan]:
    """Return the `n_best` spans of a context with the highest scores, best first.

    A span that is in several windows gets the highest of its scores; "no answer" gets the lowest score of all windows.

    windows: the windows of the context.
    logits: the start and end logits of the T tokens of each window, of shape (T, 2).
    impossible: whether "no answer" is allowed.
    """
    tables = [_span_scores(window, values, longest) for window, values in zip(windows, logits, strict=True)]
    no_answer = min(float(values[NO_ANSWER].sum()) for values in logits)
    all_scores = torch.cat([table.flatten() for table in tables] + ([torch.tensor([no_answer])] if impossible else []))
    total = float(all_scores.logsumexp(0))
    scores: dict[tuple[int, int], float] = {}
    for window, table in zip(windows, tables, strict=True):
        for start, end, score in _top_spans(window, table, n_best):
            scores[start, end] = max(score, scores.get((start, end), score))
    if impossible:
        scores[0, 0] = no_answer
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    probabilities = torch.tensor([score - total for _, score in ranked]).exp().tolist()
    return [
        AnswerSpan(context[start:end], start, end, score, probability)
        for ((start, end), score), probability in zip(ranked, probabilities, strict=True)
    ]


def _span_scores(window: ContextWindow, logits: Tensor, longest: int) -> Tensor:
    """Return the scores of the spans from token i to token j of the S context tokens in a window, of shape (S, S).

    The score of an invalid span is -inf.

    logits: the start and end logits of the T tokens of the window, of shape (T, 2).
    """
    context_logits = logits[window.context_start : window.context_start + len(window.offsets)]
    is_space = torch.tensor([start == end for start, end in window.offsets])
    table = context_logits[:, 0, None] + context_logits[None, :, 1]
    ones = torch.ones_like(table, dtype=torch.bool)
    allowed = ones.triu() & ones.tril(longest - 1) & ~is_space[:, None] & ~is_space[None, :]
    return table.masked_fill(~allowed, -torch.inf)


def _top_spans(window: ContextWindow, table: Tensor, count: int) -> Iterator[tuple[int, int, float]]:
    """Yield (start, end, score) of the `count` best spans of a window; start and end are in characters."""
    values, indices = table.flatten().topk(min(table.numel(), count))
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        if value > -torch.inf:
            first, last = divmod(index, table.shape[1])
            yield window.offsets[first][0], window.offsets[last][1], value
