"""`mb.draw`: a picture of the architecture of a preset, a configuration, a recipe, a model or a stored model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monoblock.config.model import ModelConfig
from monoblock.interop.model_folder import read_any_config
from monoblock.plots.architecture import Drawing, draw as draw_config
from monoblock.runs.account import config_of_recipe, is_recipe

if TYPE_CHECKING:
    from monoblock.model import Transformer


def draw(what: ModelConfig | Transformer | str | Path, *, name: str | None = None) -> Drawing:
    """Draw the architecture of a model, as SVG: `mb.draw("gpt2").save("gpt2.svg")`; notebooks show it.

    what: a configuration, a model, the name of a preset or of a recipe, or the path of a recipe, a model folder, a
        config.json or a GGUF file.
    name: the title; by default the name of the preset, the recipe or the folder, or the family, as in "decoder-only
        Transformer".
    """
    if not isinstance(what, str | Path):
        return draw_config(what, name=name)
    config = config_of_recipe(str(what)) if is_recipe(str(what)) else read_any_config(str(what))
    return draw_config(config, name=name or Path(what).name.removesuffix(".json"))
