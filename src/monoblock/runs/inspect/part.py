"""What is inspected, and what a part of an inspection consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monoblock.model import Transformer
from monoblock.plots.page import AttentionMap, Section
from monoblock.runs.inspect.inputs import InspectedInput, transformer_of
from monoblock.runs.pipeline import Pipeline


@dataclass(frozen=True)
class Request:
    """What is inspected."""

    pipe: Pipeline
    input: InspectedInput
    layer: str | None = None  # a number, or a name such as "decoder.3.cross"
    head: int | None = None
    has_text: bool = True  # else the input is an example, and only parts that need no text are asked for
    lengths: tuple[int, ...] = ()  # of the profile; () chooses them
    batches: tuple[int, ...] = (1,)
    labelled_data: str | None = None  # the corpus of the probes
    data_folder: Path | None = None
    limit: int = 300  # texts that probes use

    @property
    def model(self) -> Transformer:
        return transformer_of(self.pipe)


@dataclass
class Part:
    section: Section
    data: Any = None  # for JSON
    maps: list[AttentionMap] = field(default_factory=list)  # for the viewer of an HTML page
