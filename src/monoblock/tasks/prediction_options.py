"""The inputs and keyword arguments of the methods of a pipeline that predict."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypedDict

from monoblock.errors import InputError
from monoblock.nn.generation_options import PipelineOptions
from monoblock.tasks.batching import LongTextMode, ProgressCallback
from monoblock.tasks.translate import LongSourceMode


class BatchOptions(TypedDict, total=False):
    batch: int  # the number of inputs processed at once
    lines: Sequence[int] | None  # line numbers for error messages, counted from 0
    progress: ProgressCallback | None


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


def list_inputs(
    inputs: object,
    method: str,
    kinds: tuple[type, ...] = (str,),
    also: tuple[type, ...] = (),
    *,
    images: bool = False,
) -> list[object]:
    """Return the inputs of a call as a list: a single input, or all elements of an iterable.

    method: the method of the pipeline, for the error text.
    kinds: the types of a single input.
    also: further types that elements may have.
    images: the model reads images: paths, pictures of Pillow, and arrays of two or three axes.
    """
    single = is_single(inputs, kinds, images=images)
    if not single and (not isinstance(inputs, Iterable) or (hasattr(inputs, "ndim") and not images)):
        raise InputError(f"{method} takes one input or a list of inputs, but got {_type_name(inputs)}")
    rows = [inputs] if single else list(inputs)  # type: ignore[call-overload]
    for index, row in enumerate(rows):
        if not is_single(row, kinds + also, images=images):
            what = "images" if images else "texts"
            raise InputError(f"{method} takes {what}, but element {index} of the list is {_type_name(row)}")
    return rows


def is_single(value: object, kinds: tuple[type, ...] = (str,), *, images: bool = False) -> bool:
    """Return whether a value is one input, and not several."""
    if not images:
        return isinstance(value, kinds)
    return isinstance(value, str | os.PathLike) or getattr(value, "ndim", 0) in (2, 3) or hasattr(value, "getbands")


def _type_name(value: object) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"an object of type {type(value).__name__}{shape}"
