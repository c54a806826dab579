"""Refuse, truncate or split texts that are longer than the context of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from monoblock.errors import InputError, did_you_mean
from monoblock.tasks.input_template import EncodedInput
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.text_splitting import split_text

LongTextMode = Literal["refuse", "cut", "split"]
LONG_TEXT_MODES = ("refuse", "cut", "split")


def check_long_mode(long: str, modes: Sequence[str] = LONG_TEXT_MODES) -> None:
    if long not in modes:
        raise InputError(f"long={long!r} is not one of {', '.join(modes)}{did_you_mean(long, modes)}")


def too_long_error(line: int, length: int, limit: int | None, modes: Sequence[str] = LONG_TEXT_MODES[1:]) -> InputError:
    advice = " or ".join(f"long={mode!r}" for mode in modes)
    return InputError(
        f"line {line + 1} has {length} tokens, but the model reads at most {limit}; shorten it, or give {advice}"
    )


def enumerate_lines(rows: Sequence[Any], lines: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
    """Yield each row with its line number, for error messages: (line number, row).

    lines: the line numbers of the rows, counted from 0; None numbers the rows themselves.
    """
    return zip(range(len(rows)) if lines is None else lines, rows, strict=True)


def fit_to_context(
    loaded: LoadedModel, line: int, text: str, encode: Callable[[str], list[int]], long: str
) -> list[EncodedInput]:
    """Encode a text as one input, or as several if it is longer than the context and long="split".

    line: the line number for error messages, counted from 0.
    long: what to do with a text that is longer than the context: "refuse", "cut" or "split" it.
    """
    limit = loaded.model.config.context
    template = loaded.input_template(limit)
    encoded = template(encode(text))
    if not encoded.num_truncated or long == "cut":
        return [encoded]
    if long == "refuse":
        raise too_long_error(line, len(loaded.input_template()(encode(text)).ids), limit)
    try:
        parts = split_text(text, lambda part: not template(encode(part)).num_truncated)
    except InputError as problem:
        raise InputError(f"line {line + 1}: {problem}") from None
    return [template(encode(part)) for part in parts]


def average_parts(parts: Sequence[EncodedInput], outputs: Sequence[Tensor]) -> Tensor:
    """Return the mean of the outputs for the parts of one text, weighted by the number of tokens in each part."""
    total = sum(len(part.ids) for part in parts)
    return torch.stack([output * (len(part.ids) / total) for part, output in zip(parts, outputs, strict=True)]).sum(0)
