"""Training data for extractive question answering: windows of contexts, with the start and end of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from monoblock.data.batching.encode import EncodedDataset, RaggedArray
from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import Question
from monoblock.errors import ConfigError
from monoblock.tasks.question_answering.section import QuestionAnsweringSection
from monoblock.tasks.question_answering.windows import NO_ANSWER, QuestionEncoder, trim_spaces
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import TaskData, TaskInputs, batch_builder, build_bucket_plan, iterate_evaluation_batches
from monoblock.training.collate import collate_question_answering


def build_question_answering_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe; the labels of a window are the first and last token index of the answer."""
    recipe, tokenizer, train, valid = inputs.recipe, inputs.text_tokenizer, inputs.train, inputs.valid
    section = inputs.section(QuestionAnsweringSection)
    if recipe.train.label_smoothing:
        raise ConfigError(
            "train.label_smoothing has no meaning for question answering, whose classes are token positions; leave it "
            "out"
        )
    for corpus in (train, valid):
        _check_answers(corpus, section.unanswerable)
    encoder, special = QuestionEncoder(tokenizer, inputs.max_length, section.stride), special_token_ids(tokenizer)
    with_segments = inputs.has_segments
    samples = _encode_samples(train.rows, encoder, with_segments)
    note = f" ({encoder.num_truncated:,} of them cut to half a window)" if encoder.num_truncated else ""
    validation = None if valid is None else _encode_samples(valid.rows, encoder, with_segments)
    collate = partial(collate_question_answering, special=special)
    windows = f" in {len(samples):,} windows" if len(samples) > len(train) else ""
    return TaskData(
        tokenizer,
        special,
        build_bucket_plan(recipe, samples.lengths),
        batch_builder(samples, collate),
        None if validation is None else partial(iterate_evaluation_batches, validation, recipe.train.batch, collate),
        summary=f"{len(train):,} questions{windows} to train on{note}",
        validation_rows=[] if valid is None else valid.rows,
        unit="ends",
    )


def _check_answers(corpus: Corpus | None, unanswerable: bool) -> None:
    """Raise ConfigError if questions have no answer and question_answering.unanswerable is false."""
    if corpus is None or unanswerable:
        return
    count = sum(not row.answers for row in corpus.rows)
    if count:
        raise ConfigError(
            f"{count:,} of {len(corpus):,} questions of {corpus.name} have no answer; "
            "write question_answering.unanswerable=true to train on them"
        )


def _encode_samples(rows: Sequence[Question], encoder: QuestionEncoder, with_segments: bool) -> EncodedDataset:
    """Encode every window as a sample with the fields "ids", "answer" and, if `with_segments`, "segments".

    "answer" is the first and last token position of the first gold answer; both are NO_ANSWER if it is not in the
    window.
    """
    columns: dict[str, list[Sequence[int]]] = {
        name: [] for name in ("ids", "answer", *(["segments"] if with_segments else []))
    }
    row_numbers: list[int] = []
    for number, row in enumerate(rows):
        gold = (
            trim_spaces(row.context, row.answer_starts[0], row.answer_starts[0] + len(row.answers[0]))
            if row.answers
            else None
        )
        for window in encoder(row.question, row.context):
            answer = (NO_ANSWER, NO_ANSWER) if gold is None else window.token_span(*gold)
            sample: dict[str, Any] = {"ids": window.ids, "answer": answer, "segments": window.segments}
            for name, values in columns.items():
                values.append(sample[name])
            row_numbers.append(number)
    ragged = {name: RaggedArray(values) for name, values in columns.items()}
    return EncodedDataset(ragged, np.array(row_numbers, np.int64))
