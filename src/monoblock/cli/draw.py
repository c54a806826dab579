"""`monoblock draw`: a picture of the architecture of a model, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from monoblock.cli.account import apply_overrides
from monoblock.cli.output import echo, suggest_next
from monoblock.cli.verb import argument, option
from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError
from monoblock.interop.model_folder import read_any_config
from monoblock.plots.architecture import draw


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw the architecture of WHAT as SVG: a preset from `monoblock ls presets`, a model folder, a config.json or a
    GGUF file.

    Arguments of the form key=value change the configuration first, as in norm=rms gated=true.
    """

    what: str = argument()
    overrides: tuple[str, ...] = argument((), metavar="[key=value …]")
    out: Path | None = option("File to write.  [default: the name of WHAT, as .svg]")

    def run(self) -> None:
        config = apply_overrides(read_any_config(self.what), self.overrides)
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"{self.what} is an LSTM; only Transformers are drawn")
        name = Path(self.what).name
        picture = draw(config, name=" ".join([name, *self.overrides]))
        echo(picture.save(self.out or Path(f"{name.removesuffix('.json')}.svg")))
        suggest_next(f"account {' '.join([self.what, *self.overrides])}")
