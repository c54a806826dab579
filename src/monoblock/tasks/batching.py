"""Run many inputs through a model in batches of similar length; results are in the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import PatchConfig
from monoblock.inference.request import pad_right
from monoblock.recipes.model_config import has_segments
from monoblock.tasks.image_inputs import Image, read_image
from monoblock.tasks.input_template import EncodedInput
from monoblock.tasks.loaded_model import LoadedModel

ProgressCallback = Callable[[int], None]  # called with the number of inputs that were just processed


def no_progress(count: int) -> None:
    """Do nothing; this is the default of arguments named `progress`."""


def group_by_length(lengths: Sequence[int], batch: int, *, longest_first: bool = True) -> list[list[int]]:
    """Group the indices of `lengths` into batches of similar length, so that little padding is needed."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index] if longest_first else lengths[index])
    return [order[start : start + batch] for start in range(0, len(order), batch)]


@torch.inference_mode()
def run_batches(
    loaded: LoadedModel,
    rows: Sequence[EncodedInput],
    batch: int,
    forward: Callable[..., Tensor],
    *,
    positions: Sequence[Sequence[int]] | None = None,
    progress: ProgressCallback = no_progress,
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


def run_model(loaded: LoadedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Call the model with a collated batch; `inputs` maps the names of its arguments to tensors."""
    forward: Callable[..., Tensor] = loaded.model
    return forward(**inputs)


@torch.inference_mode()
def run_image_batches(
    loaded: LoadedModel,
    images: Sequence[Image],
    batch: int,
    forward: Callable[[Tensor], Tensor],
    progress: ProgressCallback = no_progress,
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
        progress(len(pixels))
    return outputs
