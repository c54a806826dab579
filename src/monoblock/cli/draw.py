"""`monoblock draw`: a picture of the architecture of a model, from its configuration alone."""

from pathlib import Path

import click

from monoblock.cli._shared.output import echo, suggest_next
from monoblock.cli.account import apply_overrides
from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError
from monoblock.interop.config_file import read_any_config
from monoblock.plots.architecture import draw


@click.command(
    name="draw",
    help="Draw the architecture of WHAT as SVG: a preset from `monoblock ls presets`, a model folder, a config.json or "
    "a GGUF file.\n\nArguments of the form key=value change the configuration first, as in norm=rms gated=true.",
)
@click.argument("what")
@click.argument("overrides", nargs=-1, metavar="[key=value …]")
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: the name of WHAT, as .svg]")
def command(what: str, overrides: tuple[str, ...], out: Path | None) -> None:
    config = apply_overrides(read_any_config(what), overrides)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{what} is an LSTM; only Transformers are drawn")
    name = Path(what).name
    path = draw(config, name=" ".join([name, *overrides])).save(out or Path(f"{name.removesuffix('.json')}.svg"))
    echo(path)
    suggest_next(f"account {' '.join([what, *overrides])}")
