"""Load an experiment by its name."""

from __future__ import annotations

from importlib import import_module

from monoblock.errors import ConfigError, did_you_mean
from monoblock.experiments.frame.experiment import Experiment
from monoblock.experiments.names import EXPERIMENTS


def load_experiment(name: str) -> Experiment:
    """Return the constant EXPERIMENT of the module that the table names."""
    if name not in EXPERIMENTS:
        advice = did_you_mean(name, EXPERIMENTS)
        raise ConfigError(f"there is no experiment {name!r}; monoblock compare --help lists them{advice}")
    experiment: Experiment = import_module(f"monoblock.experiments.{EXPERIMENTS[name][0]}").EXPERIMENT
    return experiment
