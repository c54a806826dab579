"""What the result of a trial depends on: its settings, and the corpora that stand in for that of the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

from monoblock.data.corpora.load import load_corpus
from monoblock.errors import FileError
from monoblock.experiments.frame.experiment import Arm, Experiment, ToyKind, Trial
from monoblock.runs.recipe import read_recipe
from monoblock.untrusted_files import write_atomically

CORPUS = "data.corpus="
# Keys of a recipe that change how long a trial takes: trials that differ in them are compared, and the page names the
# keys. They change what is learned only by rounding, except that translation with train.compile=graphs has batches of
# one shape, and otherwise batches of similar lengths.
SPEED_KEYS = ("train.compile", "train.workers", "train.device")


# -- settings ---------------------------------------------------------------------------------------------------------


def trial_settings(experiment: Experiment, trial: Trial) -> dict[str, Any]:
    """Return all that the result of a trial depends on, besides arm, seed and machine."""
    settings: dict[str, Any] = {
        "recipe": trial.arm.recipe or experiment.recipe,
        "changes": list(recipe_changes(experiment, trial)),
        "options": plain_options(trial.options),
        "smoke": trial.smoke,
    }
    if trial.arm.is_timed:
        settings["speed"] = [change for change in settings["changes"] if change.partition("=")[0] in SPEED_KEYS]
    return settings


def plain_options(options: Any) -> dict[str, Any]:
    """Return the options on which a result depends, as they are after a round trip through JSON."""
    chosen = {one.name: getattr(options, one.name) for one in fields(options) if not one.metadata.get("selects")}
    plain: dict[str, Any] = json.loads(json.dumps(chosen, default=str))
    return plain


def recipe_changes(experiment: Experiment, trial: Trial) -> tuple[str, ...]:
    """Return the overrides of the recipe of a trial, without the seed; later ones win."""
    toy = [f"{CORPUS}{toy_path(experiment.toy, trial.folder)}"] if trial.smoke and experiment.toy else []
    options = plain_options(trial.options)
    own = own_changes(experiment, trial.arm, options, smoke=trial.smoke, stands_in=trial.stands_in)
    return (*toy, *own, *trial.overrides)


def own_changes(
    experiment: Experiment, arm: Arm | None, options: Mapping[str, Any], *, smoke: bool, stands_in: bool
) -> tuple[str, ...]:
    """Return the overrides that an experiment and an arm make in every call with these options; later ones win."""
    changes = experiment.changes if experiment.other_recipe(options) is None else ()
    further = experiment.smoke if smoke else experiment.stand_in if stands_in else ()
    return (*changes, *further, *(arm.changes if arm is not None else ()))


# -- corpora ----------------------------------------------------------------------------------------------------------

FILES = {"text": "toy.txt", "pairs": "toy.tsv"}
LINES, WORDS = 240, ("a", "red", "dog", "runs", "to", "the", "blue", "house", "and", "sees", "an", "old", "tree")


def toy_path(kind: ToyKind, folder: Path) -> Path:
    return folder / FILES[kind]


def write_toy_corpus(kind: ToyKind, folder: Path) -> None:
    """Write a corpus of random words, if it is not there: running text, or sentences and their reversal."""
    if not kind or toy_path(kind, folder).is_file():
        return
    random = Random(0)
    sentences = [random.choices(WORDS, k=random.randint(3, 9)) for _ in range(LINES)]
    if kind == "text":
        lines = [" ".join(words) for words in sentences]
    else:
        lines = [f"{' '.join(words)}\t{' '.join(reversed(words))}" for words in sentences]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(toy_path(kind, folder), "\n".join(lines) + "\n")


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
