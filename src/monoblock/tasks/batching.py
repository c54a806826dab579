"""Run many inputs through a model in batches of similar length; refuse, truncate or split texts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from monoblock.config.model import PatchConfig
from monoblock.data.encode import IGNORE_INDEX
from monoblock.errors import InputError, did_you_mean
from monoblock.inference.scheduler import pad_right
from monoblock.metrics.text import perplexity
from monoblock.tasks.images import Image, read_image
from monoblock.tasks.input_template import EncodedInput, split_text
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task_data import group_by_length, has_segments
from monoblock.training.collate import TensorBatch
from monoblock.training.loss import CrossEntropyLoss

ProgressCallback = Callable[[int], None]  # called with the number of inputs that were just processed
LongTextMode = Literal["refuse", "cut", "split"]
LONG_TEXT_MODES = ("refuse", "cut", "split")


@torch.inference_mode()
def run_batches(
    loaded: LoadedModel,
    rows: Sequence[EncodedInput],
    batch: int,
    forward: Callable[..., Tensor],
    *,
    positions: Sequence[Sequence[int]] | None = None,
    progress: ProgressCallback | None = None,
) -> list[Tensor]:
    """Return the output of `forward` for each row, on the CPU in fp32, without the outputs at padding.

    forward: called with a padded batch as keyword arguments: `source` and, if needed, `attention_mask`, `segments` and
        `logits_at`.
    positions: the token positions of each row at which logits are computed; None means all positions.
    """
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    for indices in group_by_length([len(row.ids) for row in rows], batch):
        at = [positions[index] for index in indices] if positions else None
        results = forward(**_collate(loaded, [rows[index] for index in indices], at))
        for result, index in zip(results.float().cpu(), indices, strict=True):
            count = len(positions[index]) if positions else len(rows[index].ids)
            outputs[index] = result[:count] if result.dim() > 1 else result
        if progress is not None:
            progress(len(indices))
    return outputs


def _collate(
    loaded: LoadedModel, rows: Sequence[EncodedInput], positions: Sequence[Sequence[int]] | None
) -> dict[str, Any]:
    device = loaded.model.device
    source, valid = pad_right([row.ids for row in rows], device)
    inputs: dict[str, Any] = {"source": source}
    if valid is not None:
        inputs["attention_mask"] = valid
    if has_segments(loaded.model.config) and any(any(row.segments) for row in rows):
        inputs["segments"] = pad_right([row.segments for row in rows], device)[0]
    if positions is not None:
        inputs["logits_at"] = pad_right(positions, device)[0]
    return inputs


@torch.inference_mode()
def score_tokens(loaded: LoadedModel, batches: Iterable[TensorBatch]) -> dict[str, float]:
    """Return the loss, perplexity and accuracy over the labels of batches, and the number of these tokens."""
    loss, forward = CrossEntropyLoss(), cast(Callable[..., Tensor], loaded.model)
    total, correct, count = 0.0, 0, 0
    for batch in batches:
        batch = batch.to(loaded.model.device)
        logits = forward(**batch.inputs)
        total += float(loss.from_logits(logits, batch.labels))
        correct += int(((logits.argmax(-1) == batch.labels) & (batch.labels != IGNORE_INDEX)).sum())
        count += batch.target_count
    mean = total / max(1, count)
    return {"loss": mean, "perplexity": perplexity(mean), "accuracy": correct / max(1, count), "tokens": count}


@torch.inference_mode()
def run_image_batches(
    loaded: LoadedModel,
    images: Sequence[Image],
    batch: int,
    forward: Callable[[Tensor], Tensor],
    progress: ProgressCallback | None = None,
) -> list[Tensor]:
    """Prepare images as the model expects, and return the output of `forward` for each batch, on the CPU in fp32.

    images: what `read_image` reads; files are read batch by batch.
    """
    outputs, config, preprocessing = [], getattr(loaded.model.config, "input", None), loaded.image_preprocessing
    assert isinstance(config, PatchConfig)
    for start in range(0, len(images), batch):
        pixels = torch.stack([read_image(image, config, preprocessing) for image in images[start : start + batch]])
        weight = next(iter(loaded.model.parameters()))
        outputs.append(forward(preprocessing(pixels).to(weight.device, weight.dtype)).float().cpu())
        if progress is not None:
            progress(len(pixels))
    return outputs


# -- texts longer than the context ------------------------------------------------------------------------------------


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
    loaded: LoadedModel, line: int, text: Any, encode: Callable[[Any], list[int]], long: str
) -> list[EncodedInput]:
    """Encode a text as one input, or as several if it is longer than the context and long="split".

    text: what `encode` makes token ids of; only a string can be split.
    line: the line number for error messages, counted from 0.
    long: what to do with a text that is longer than the context: "refuse", "cut" or "split" it.
    """
    limit = loaded.model.config.context
    template = loaded.input_template(limit)
    encoded = template(encode(text))
    if not encoded.num_truncated or long == "cut":
        return [encoded]
    if long == "refuse" or not isinstance(text, str):
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
