"""The experiments that come with the package, one in each file of this folder; without torch, for the command line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from monoblock.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from monoblock.experiments.experiment import Experiment


# Name -> what is compared: the first line of the file.
EXPERIMENTS: dict[str, str] = {
    path.stem.replace("_", "-"): path.read_text(encoding="utf-8").partition("\n")[0].strip('".')
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem != "__init__"
}


def load_experiment(name: str) -> Experiment:
    """Return the experiment of this name from its file."""
    if name not in EXPERIMENTS:
        advice = did_you_mean(name, EXPERIMENTS)
        raise ConfigError(f"there is no experiment {name!r}; monoblock compare --help lists them{advice}")
    found: Experiment = import_module(f"{__name__}.{name.replace('-', '_')}").EXPERIMENT
    return found
