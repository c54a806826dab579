"""Extractive question answering: mark the start and end of the answer in a context (Rajpurkar et al. 2016).

A question and its context are encoded as a pair, in several windows if the context is too long for one. A window knows
which characters of the context each of its tokens covers, so that a predicted answer is always an exact slice of the
context.

The score of a span is the start logit of its first token plus the end logit of its last token (Devlin et al. 2019).
The candidates are all spans of at most `longest` tokens in all windows and, if allowed, "no answer". Their
probabilities are the softmax of their scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from monoblock.config.schema import check_at_least, check_types
from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import Question
from monoblock.errors import ConfigError, InputError
from monoblock.metrics.squad import score_answers
from monoblock.recipes.schema import Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.input_template import EncodedInput, InputTemplate
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from torch import Tensor

    from monoblock.data.encode import EncodedDataset
    from monoblock.tasks.batching import ProgressCallback
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs
    from monoblock.tokenizers.tokenizer import Tokenizer

NO_ANSWER = 0  # the token position that means "no answer": the first, where encoders have [CLS]
MAX_ANSWER_TOKENS = 30
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringSection:
    """The windows of a long context, and questions without an answer."""

    stride: int | None = None  # tokens from the start of a window to that of the next; by default half a window
    unanswerable: bool = False  # whether questions may have no answer, as in SQuAD 2.0

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "stride")


class QuestionAnswering(Task):
    name = "question_answering"
    about = "mark the start and end of the answer in a context"
    head = "spans"
    families = ("encoder-only",)
    corpus_kinds = ("questions",)
    section = QuestionAnsweringSection
    required_tokens = ("cls",)
    classes_are_positions = True
    metrics = ("f1", "exact_match")
    supports_adversarial = True
    defaults = TrainingDefaults(2, 16, 384)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["pad", "cls", "sep", "mask"]

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build windows, whose labels are the first and last token index of the answer."""
        from monoblock.training.collate import collate_question_answering

        train, valid, section = inputs.train, inputs.valid, inputs.section(QuestionAnsweringSection)
        if inputs.recipe.train.label_smoothing:
            raise ConfigError(
                "train.label_smoothing has no meaning for question answering, whose classes are token positions; leave "
                "it out"
            )
        for corpus in (train, valid):
            count = 0 if corpus is None or section.unanswerable else sum(not row.answers for row in corpus.rows)
            if corpus is not None and count:
                raise ConfigError(
                    f"{count:,} of {len(corpus):,} questions of {corpus.name} have no answer; "
                    "write question_answering.unanswerable=true to train on them"
                )
        encoder = QuestionEncoder(inputs.text_tokenizer, inputs.max_length, section.stride)
        samples = _encode_samples(train.rows, encoder, inputs.has_segments)
        note = f" ({encoder.num_truncated:,} of them cut to half a window)" if encoder.num_truncated else ""
        windows = f" in {len(samples):,} windows" if len(samples) > len(train) else ""
        return inputs.encoded_data(
            samples,
            partial(collate_question_answering, special=inputs.special_tokens),
            None if valid is None else _encode_samples(valid.rows, encoder, inputs.has_segments),
            summary=f"{len(train):,} questions{windows} to train on{note}",
            validation_rows=[] if valid is None else valid.rows,
            unit="ends",
        )

    def predict(self, loaded: LoadedModel, questions: Sequence[tuple[str, str]], /) -> list[str]:
        """Return the best answer to each (question, context); "" means no answer."""
        return [spans[0].text for spans in answer_questions(loaded, questions)] if questions else []

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute exact match and F1 on the questions of a corpus."""
        corpus = read_corpus(request, "questions")
        unanswerable = any(not row.answers for row in corpus.rows)
        spans = answer_questions(
            loaded, [row[:2] for row in corpus.rows], impossible=unanswerable or None, batch=request.batch_size
        )
        texts = [answers[0].text for answers in spans]
        metrics = score_answers(texts, [row.answers for row in corpus.rows])
        samples = [
            {
                "source": row.question,
                "reference": " | ".join(row.answers) or "no answer",
                "hypothesis": text or "no answer",
            }
            for row, text in zip(corpus.rows[: request.samples], texts, strict=False)
        ]
        return Evaluation({**metrics, "split": corpus.split}, samples)

    def score_validation(self, loaded: LoadedModel, rows: Sequence[Question], count: int, /) -> dict[str, float]:
        """Return exact match and F1 on the first `count` validation questions."""
        rows = rows[:count]
        metrics = score_answers(self.predict(loaded, [row[:2] for row in rows]), [row.answers for row in rows])
        return {f"val_{name}": metrics[name] for name in ("exact_match", "f1")}


# -- windows ----------------------------------------------------------------------------------------------------------


class ContextWindow(NamedTuple):
    """An encoded question with a part of its context; the tokens of the context begin at index `context_start`."""

    ids: list[int]
    segments: list[int]
    context_start: int
    offsets: list[Span]  # characters of the context that each token covers; (n, n) for white space

    def token_span(self, start: int, end: int) -> Span:
        """Return the indices of the first and last token of context[start:end].

        Both are NO_ANSWER if that span is not completely inside the window.
        """
        tokens = [(index, first, stop) for index, (first, stop) in enumerate(self.offsets) if first < stop]
        inside = [index for index, first, stop in tokens if first < end and stop > start]
        if not inside or tokens[0][1] > start or tokens[-1][2] < end:
            return NO_ANSWER, NO_ANSWER
        return self.context_start + inside[0], self.context_start + inside[-1]


class QuestionEncoder:
    """Encode a question and its context in windows of at most `max_length` tokens.

    A question longer than half a window is truncated. Each window starts `stride` context tokens after the last one;
    None means half the number of context tokens in a window.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None, stride: int | None = None) -> None:
        self.tokenizer, self.max_length, self.stride = tokenizer, max_length, stride
        self.num_truncated = 0  # questions truncated so far
        self.template = InputTemplate(tokenizer)
        self.num_special_tokens = sum(token is not None for token, _ in self.template.pair)
        self.question_index, context_index = (n for n, (token, _) in enumerate(self.template.pair) if token is None)
        self.num_separators = context_index - self.question_index - 1
        minimum = self.num_special_tokens + 4
        if max_length is not None and max_length < minimum:
            raise ConfigError(
                f"{max_length} tokens are too few for a question and its context; allow {minimum} tokens or more"
            )

    def __call__(self, question: str, context: str) -> list[ContextWindow]:
        question_ids, pieces = self.tokenizer.encode(question), self.tokenizer.pieces(context)
        ids = [piece.id for piece in pieces]
        offsets = [trim_spaces(context, piece.start, piece.end) for piece in pieces]
        size = len(ids)
        if self.max_length is not None:
            max_question = (self.max_length - self.num_special_tokens) // 2
            self.num_truncated += len(question_ids) > max_question
            question_ids = question_ids[:max_question]
            size = self.max_length - self.num_special_tokens - len(question_ids)
        first = self.question_index + len(question_ids) + self.num_separators
        windows = []
        for start, end in _window_bounds(len(ids), size, self.stride):
            encoded = self.template(question_ids, ids[start:end])
            windows.append(ContextWindow(encoded.ids, encoded.segments, first, offsets[start:end]))
        return windows


def _window_bounds(length: int, size: int, stride: int | None) -> Iterator[Span]:
    """Yield the (start, end) of windows of at most `size` tokens that cover `length` tokens.

    Each window starts `stride` tokens after the last one; None means half of `size`.
    """
    step = min(size, stride) if stride is not None else max(1, size // 2)
    start = 0
    while start + size < length:
        yield start, start + size
        start += step
    yield start, length


def trim_spaces(text: str, start: int, end: int) -> Span:
    """Return the span text[start:end] without the white space at its ends, which some tokens include."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, max(start, start + len(part.strip()))


def _encode_samples(rows: Sequence[Question], encoder: QuestionEncoder, with_segments: bool) -> EncodedDataset:
    """Encode every window as a sample with the fields "ids", "answer" and, if `with_segments`, "segments".

    "answer" is the first and last token position of the first gold answer; both are NO_ANSWER if it is not in the
    window.
    """
    from monoblock.data.encode import EncodedDataset

    samples = []
    for number, row in enumerate(rows):
        start = row.answer_starts[0] if row.answers else 0
        gold = trim_spaces(row.context, start, start + len(row.answers[0])) if row.answers else None
        for window in encoder(row.question, row.context):
            answer = (NO_ANSWER, NO_ANSWER) if gold is None else window.token_span(*gold)
            sample = {"ids": window.ids, "answer": answer}
            samples.append((number, {**sample, "segments": window.segments} if with_segments else sample))
    return EncodedDataset.from_samples(samples)


# -- answers ----------------------------------------------------------------------------------------------------------


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
    progress: ProgressCallback | None = None,
) -> list[list[AnswerSpan]]:
    """Return the best answers to each (question, context), best first.

    n_best: the number of answers to return for each question.
    longest: the maximum number of tokens in an answer.
    impossible: whether "" (no answer) is allowed; None means as in training.
    lines: the line numbers of the questions for error messages, counted from 0.
    """
    from monoblock.tasks.batching import run_batches

    loaded.check_head("spans")
    if longest < 1 or n_best < 1:
        raise InputError(f"longest={longest} and n_best={n_best} must both be positive; write 1 or more")
    section = loaded.section(QuestionAnsweringSection)
    if impossible is None:
        impossible = section.unanswerable
    encoder = QuestionEncoder(loaded.tokenizer, loaded.training_length(), section.stride)
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
    import torch

    tables = [_span_scores(window, values, longest) for window, values in zip(windows, logits, strict=True)]
    no_answer = min(float(values[NO_ANSWER].sum()) for values in logits)
    all_scores = torch.cat([table.flatten() for table in tables] + ([torch.tensor([no_answer])] if impossible else []))
    total = float(all_scores.logsumexp(0))
    scores: dict[tuple[int, int], float] = {}
    for window, table in zip(windows, tables, strict=True):
        values, indices = table.flatten().topk(min(table.numel(), n_best))
        for score, index in zip(values.tolist(), indices.tolist(), strict=True):
            if score > -math.inf:
                first, last = divmod(index, table.shape[1])
                span = window.offsets[first][0], window.offsets[last][1]  # in characters
                scores[span] = max(score, scores.get(span, score))
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
    import torch

    context_logits = logits[window.context_start : window.context_start + len(window.offsets)]
    is_space = torch.tensor([start == end for start, end in window.offsets])
    table = context_logits[:, 0, None] + context_logits[None, :, 1]
    ones = torch.ones_like(table, dtype=torch.bool)
    allowed = ones.triu() & ones.tril(longest - 1) & ~is_space[:, None] & ~is_space[None, :]
    return table.masked_fill(~allowed, -torch.inf)
