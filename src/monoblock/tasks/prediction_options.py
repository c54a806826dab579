"""The keyword arguments that predictors share, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from monoblock.nn.inputs.generation_options import PipelineOptions
from monoblock.tasks.batching import ProgressCallback
from monoblock.tasks.long_inputs import LongTextMode
from monoblock.tasks.seq2seq.predict import LongSourceMode


class BatchOptions(TypedDict, total=False):
    batch: int  # the number of inputs processed at once
    lines: Sequence[int] | None  # line numbers for error messages, counted from 0
    progress: ProgressCallback


class PredictionOptions(BatchOptions, total=False):
    long: LongTextMode  # what to do with a text longer than the context: "refuse", "cut" or "split" it


class AnswerOptions(BatchOptions, total=False):
    longest: int  # the maximum number of tokens in an answer
    impossible: bool | None  # whether "" (no answer) is allowed; None means as in training


class TranslationOptions(PipelineOptions, total=False):
    batch: int | None  # the number of sources translated at once; None: 64, or as many as suit a GPU
    to: str | None  # the script of the target, for a model that writes several scripts
    long: LongSourceMode  # what to do with a source longer than the context: "refuse" or "split" it
    first_index: int  # the index of the first source; with a seed, source n is sampled with seed + first_index + n
