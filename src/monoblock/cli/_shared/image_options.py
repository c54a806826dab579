"""The option --interpolate of `predict` and `evaluate`: run a vision model on images of another size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

interpolate_option = click.option(
    "--interpolate",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="Read images of this size: the position embeddings are interpolated.",
)


def set_image_size(pipe: Pipeline, pixels: int | None) -> Pipeline:
    """Return a pipeline that reads images of `pixels` × `pixels` by interpolated positions; None changes nothing."""
    if pixels is None:
        return pipe
    from monoblock.nn.interpolate import interpolate

    return replace(pipe, loaded=replace(pipe.loaded, model=interpolate(pipe.model, pixels)))  # type: ignore[arg-type]
