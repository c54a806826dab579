"""A packaged corpus that stands in for the corpus of a recipe where that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from monoblock.data.corpora.load import load_corpus
from monoblock.errors import FileError
from monoblock.experiments.frame.experiment import Experiment, Trial
from monoblock.experiments.frame.results import CORPUS, recipe_changes
from monoblock.runs.recipe import read_recipe


def needs_stand_in(experiment: Experiment, trial: Trial) -> bool:
    """Return whether the corpus of the recipe is not there, so that another one stands in for it."""
    if not experiment.recipe or not experiment.stand_in or trial.smoke:
        return False
    if any(word.startswith(CORPUS) for word in trial.overrides):  # the corpus that the call names, and no other
        return False
    try:
        load_corpus(_recipe_corpus(experiment, trial), "valid", folder=trial.data)
    except FileError:
        return True
    return False


def find_stand_in(experiment: Experiment, changes: Sequence[str]) -> str | None:
    """Return the name of the corpus that stood in for that of the recipe in a trial with these changes, or None."""
    if not set(experiment.stand_in) <= set(changes):
        return None
    return next((change.removeprefix(CORPUS) for change in experiment.stand_in if change.startswith(CORPUS)), None)


def describe_stand_in(experiment: Experiment, trials: Sequence[Trial]) -> str | None:
    """Return a sentence about the corpus that stands in for that of the recipe, or None if none does."""
    trial = next((trial for trial in trials if trial.stands_in), None)
    if trial is None:
        return None
    missing = _recipe_corpus(experiment, replace(trial, stands_in=False))
    found = find_stand_in(experiment, experiment.stand_in)
    return (
        f"The corpus {missing} is not there (--data or $MONOBLOCK_DATA names the folder of corpora): "
        f"the packaged corpus {found} stands in for it"
    )


def _recipe_corpus(experiment: Experiment, trial: Trial) -> str:
    return read_recipe(experiment.recipe, recipe_changes(experiment, trial)).data.corpus
