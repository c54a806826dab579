"""The option --interpolate of `predict`, `evaluate` and `inspect`: run a vision model on images of another size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

interpolate_option = click.option(
    "--interpolate",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="Vision models: read images of this width and height, by interpolating the position embeddings.",
)


def set_image_size(pipe: Pipeline, pixels: int | None) -> Pipeline:
    """Return the pipeline with position embeddings interpolated for images of `pixels` × `pixels`; None: unchanged."""
    if pixels is None:
        return pipe
    from monoblock.nn.inputs.interpolate import interpolate

    model: Any = interpolate(pipe.model, pixels)  # type: ignore[type-var]  # which refuses an LSTM
    return replace(pipe, loaded=replace(pipe.loaded, model=model))
