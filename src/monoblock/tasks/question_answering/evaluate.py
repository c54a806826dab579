"""Evaluate question answering by exact match and F1 (Rajpurkar et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from monoblock.data.readers.records import Question
from monoblock.metrics.squad import score_answers
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.question_answering.predict import answer_questions


def evaluate_question_answering(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute exact match and F1 on the questions of a corpus."""
    corpus = read_corpus(request, "questions")
    unanswerable = any(not row.answers for row in corpus.rows)
    spans = answer_questions(
        loaded, [row[:2] for row in corpus.rows], impossible=unanswerable or None, batch=request.batch_size
    )
    texts = [answers[0].text for answers in spans]
    metrics = score_answers(texts, [row.answers for row in corpus.rows])
    samples = [
        {"source": row.question, "reference": " | ".join(row.answers) or "no answer", "hypothesis": text or "no answer"}
        for row, text in zip(corpus.rows[: request.samples], texts, strict=False)
    ]
    return Evaluation({**metrics, "split": corpus.split}, samples)


def score_validation_answers(loaded: LoadedModel, rows: Sequence[Question], count: int) -> dict[str, float]:
    """Return exact match and F1 on the first `count` validation questions, for the model card."""
    rows = rows[:count]
    texts = [answers[0].text for answers in answer_questions(loaded, [row[:2] for row in rows])]
    metrics = score_answers(texts, [row.answers for row in rows])
    return {f"val_{name}": metrics[name] for name in ("exact_match", "f1")}
