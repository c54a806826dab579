"""Many texts through a model: sorted by length, a batch at a time, and back in the order they came in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monoblock.decoding.rows import padded
from monoblock.errors import InputError, did_you_mean
from monoblock.tasks.framing import Frame, Framed
from monoblock.tasks.lines import cut

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

LONG = ("refuse", "cut", "split")  # what is done with a text beyond the context
Tell = Callable[[int], None]  # is told how many texts are done


def nobody(count: int) -> None:
    """Whom to tell where nobody listens."""


def numbered(rows: Sequence[Any], lines: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
    """Rows with the numbers that a message calls them by, counted from 0; their places where none are given."""
    return zip(range(len(rows)) if lines is None else lines, rows, strict=True)


def frame_of(pipe: Pipeline, longest: int | None = None) -> Frame:
    """How texts are framed for this model: blocks of running text, on which masked tokens are learnt here, are not."""
    blocks = pipe.defaults.here and pipe.objective == "masked"
    return Frame(pipe.tokenizer, longest, bare=blocks and not by_documents(pipe))


def by_documents(pipe: Pipeline) -> bool:
    """Whether masked tokens were learnt a text at a time, each in its frame."""
    return pipe.objective == "masked" and pipe.part is not None and pipe.part.packing == "documents"


def check_long(long: str) -> None:
    if long not in LONG:
        raise InputError(f"long={long!r} is none of {', '.join(LONG)}{did_you_mean(long, LONG)}")


def too_long(line: int, length: int, limit: int | None, ways: Sequence[str] = LONG[1:]) -> InputError:
    how = " or ".join(f"long={way!r}" for way in ways)
    return InputError(f"line {line + 1} has {length} tokens, and the model reads {limit}; shorten it, or give {how}")


def fitted(pipe: Pipeline, line: int, text: str, encode: Callable[[str], list[int]], long: str) -> list[Framed]:
    """A text in the parts that fit into the context: itself, what is left of it, or several."""
    limit = pipe.model.config.context
    frame, whole = frame_of(pipe, limit), frame_of(pipe)
    made = frame(encode(text))
    if not made.cut or long == "cut":
        return [made]
    if long == "refuse":
        raise too_long(line, len(whole(encode(text)).ids), limit)
    try:
        return [frame(encode(part)) for part in cut(text, lambda part: not frame(encode(part)).cut)]
    except InputError as problem:
        raise InputError(f"line {line + 1}: {problem}") from None


@torch.inference_mode()
def passed(
    pipe: Pipeline,
    rows: Sequence[Framed],
    batch: int,
    ask: Callable[..., Tensor],
    *,
    places: Sequence[Sequence[int]] | None = None,
    tell: Tell = nobody,
) -> list[Tensor]:
    """What a model answers to each row, on the CPU in fp32; an answer for each token has the tokens of its row.

    `places` asks for some tokens of each row only.
    """
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        answers = ask(**_inputs(pipe, [rows[number] for number in some], [places[n] for n in some] if places else None))
        for answer, number in zip(answers.float().cpu(), some, strict=True):
            count = len(places[number]) if places else len(rows[number].ids)
            found[number] = answer[:count] if answer.dim() > 1 else answer
        tell(len(some))
    return found


def _inputs(pipe: Pipeline, rows: Sequence[Framed], places: Sequence[Sequence[int]] | None) -> dict[str, Any]:
    device = pipe.model.device
    source, real = padded([row.ids for row in rows], device)
    inputs: dict[str, Any] = {"source": source}
    if real is not None:
        inputs["attention_mask"] = real
    segments = getattr(getattr(pipe.model.config, "input", None), "segments", 0)
    if segments > 1 and any(any(row.segments) for row in rows):
        inputs["segments"] = padded([row.segments for row in rows], device)[0]
    if places is not None:
        inputs["logits_at"] = padded(places, device)[0]
    return inputs
