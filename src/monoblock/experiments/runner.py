"""Plan the trials of an experiment, and run those that have no result yet, in this process or in several."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from monoblock.config.schema import from_dict
from monoblock.data.corpora.load import load_corpus
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.experiments.experiment import CORPUS, Arm, Experiment, Trial
from monoblock.experiments.jobs import Job, run_jobs
from monoblock.experiments.results import (
    RESULTS_FILE,
    Result,
    append_result,
    check_writable,
    read_results,
    trial_key,
)
from monoblock.experiments.synthetic_data import write_toy_corpus
from monoblock.kernels.cpu.library import processor_name
from monoblock.metrics.table import format_measure
from monoblock.runs.recipe import build_model_config, read_recipe
from monoblock.training.runtime import check_device

MAX_SEED = 2**63 - 1  # the largest that torch takes

# -- planning ---------------------------------------------------------------------------------------------------------


def plan_trials(
    experiment: Experiment,
    values: Mapping[str, Any],
    *,
    folder: Path,
    overrides: tuple[str, ...] = (),
    data: Path | None = None,
    smoke: bool = False,
    keep: bool = False,
    more_results: tuple[Path, ...] = (),
) -> list[Trial]:
    """Return a trial for every chosen arm and seed; raise ConfigError for unknown options, arms and overrides.

    values: the options key=value, among them seeds and arms.
    The other arguments are those of `Trial`.
    """
    values = {**(experiment.smoke_options if smoke else {}), **values}
    seeds = parse_seeds(values.pop("seeds", "1" if smoke else ",".join(map(str, experiment.seeds))))
    default = (experiment.smoke_arms if smoke else ()) or experiment.default_arms
    arms = parse_arms(str(values.pop("arms", ",".join(default) or "*")), [arm.name for arm in experiment.arms])
    options = parse_options(experiment.options, values)
    if experiment.expand is not None:
        arms = experiment.expand(options, arms)
    if experiment.check is not None:
        experiment.check(options, overrides)
    base = Trial(
        experiment=experiment,
        arm=Arm("", ""),  # so that its settings are those that all trials of the call share
        seed=seeds[0],
        options=options,
        overrides=overrides,
        folder=folder,
        work_folder=folder,
        data=data,
        smoke=smoke,
        keep=keep,
        more_results=more_results,
    )
    base = replace(base, stands_in=_needs_stand_in(base))
    digest = blake2b(json.dumps(base.settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    base = replace(base, work_folder=folder / f"work-{digest}")  # other settings use other folders
    trials = [replace(base, arm=experiment.arm(name), seed=seed) for seed in seeds for name in arms]
    for trial in trials if overrides else ():
        _check_overrides(trial)
    return trials


def parse_options(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the options of an experiment from key=value arguments; `cls` is its dataclass of options."""
    known = [*cls.__dataclass_fields__, "seeds", "arms"]  # type: ignore[attr-defined]
    if unknown := next((key for key in values if key not in known), None):
        names = ", ".join(f"{one}=" for one in known)
        hint = did_you_mean(unknown, known)
        raise ConfigError(f"this experiment has no option {unknown}=; its options are {names}{hint}")
    try:
        return from_dict(cls, dict(values))
    except ConfigError as problem:
        raise ConfigError(str(problem).removeprefix(f"{cls.__name__}.")) from None


def parse_arms(words: str, known: Sequence[str]) -> list[str]:
    """Parse a comma-separated list of arms, in which * stands for any text; keep the order of `known`."""
    patterns = [word.strip() for word in words.split(",") if word.strip()]
    if not patterns:
        raise ConfigError(f"arms= names no arm; the arms are {', '.join(known)}, and arms=* is all of them")
    for pattern in patterns:
        if not any(fnmatchcase(arm, pattern) for arm in known):
            raise ConfigError(
                f"this experiment has no arm {pattern!r}; its arms are {', '.join(known)}{did_you_mean(pattern, known)}"
            )
    return [arm for arm in known if any(fnmatchcase(arm, pattern) for pattern in patterns)]


def parse_seeds(words: str | int) -> list[int]:
    """Parse a comma-separated list of seeds."""
    try:
        seeds = list(dict.fromkeys(int(word) for word in str(words).split(",")))
    except ValueError:
        raise ConfigError(f"seeds={words!r} is not a list of whole numbers; write seeds=1,2,3") from None
    if not all(0 <= seed <= MAX_SEED for seed in seeds):
        raise ConfigError(f"seeds={words!r} has a seed that is not between 0 and {MAX_SEED}")
    return seeds


def _check_overrides(trial: Trial) -> None:
    """Raise ConfigError for an override that the recipe does not have, or of what makes an arm different."""
    experiment, arm = trial.experiment, trial.arm
    name = trial.recipe or str(getattr(trial.options, "recipe", ""))
    keys = [word.partition("=")[0] for word in trial.overrides]
    without_arm = "leave it out, or leave out the arm with arms="
    if not name:
        raise ConfigError(f"{experiment.name} trains nothing, so it has no {keys[0]}; leave it out")
    if not arm.uses_recipe:
        raise ConfigError(f"the arm {arm.name} trains nothing, so it has no {keys[0]}; {without_arm}")
    if "train.seed" in keys:
        raise ConfigError("train.seed is the seed of a trial; write seeds=, as in seeds=4")
    fixed = {change.partition("=")[0] for change in arm.changes}
    for key in keys:
        if key in fixed:
            raise ConfigError(f"{key} is what the arm {arm.name} sets; {without_arm}")
        if key in experiment.set_by_measure:
            raise ConfigError(f"{key} is what {experiment.name} chooses by itself; leave it out")
    recipe = read_recipe(name, trial.changes)
    build_model_config(recipe, int(recipe.model.get("vocab", 8000)))


def _needs_stand_in(trial: Trial) -> bool:
    """Return whether the corpus of the recipe is missing, so that a substitute is used."""
    experiment = trial.experiment
    if not experiment.recipe or not experiment.stand_in or trial.smoke:
        return False
    if any(word.startswith(CORPUS) for word in trial.overrides):  # the corpus that the call names, and no other
        return False
    try:
        load_corpus(read_recipe(experiment.recipe, trial.changes).data.corpus, "valid", folder=trial.data)
    except FileError:
        return True
    return False


def describe_stand_in(trials: Sequence[Trial]) -> str | None:
    """Return a sentence about the corpus that stands in for that of the recipe, or None if none does."""
    trial = next((trial for trial in trials if trial.stands_in and trial.arm.uses_recipe), None)
    if trial is None:
        return None
    experiment = trial.experiment
    missing = read_recipe(experiment.recipe, replace(trial, stands_in=False).changes).data.corpus
    return (
        f"The corpus {missing} was not found (--data or $MONOBLOCK_DATA names the folder of corpora): "
        f"the packaged corpus {experiment.find_stand_in([*experiment.stand_in])} is used instead"
    )


# -- running ----------------------------------------------------------------------------------------------------------


def run_trials(trials: Sequence[Trial], processes: int = 1) -> Iterator[str]:
    """Run the trials of a call that have no result yet; yield progress messages."""
    first = trials[0]
    for key, _, value in (word.partition("=") for word in first.overrides):
        if key == "train.device":
            check_device(value)
    check_writable(first.folder)
    if first.smoke:
        write_toy_corpus(first.experiment.toy, first.folder)
    done = {result.key for result in stored_results(first)}
    waiting = [trial for trial in trials if _key(trial) not in done]
    if len(waiting) < len(trials):
        yield f"{len(trials) - len(waiting)} of {len(trials)} trials have results already"
    if notice := describe_stand_in(waiting):
        yield notice
    jobs: dict[str, Job] = {}
    for trial in waiting:
        needed = [one for one in needed_trials(trial) if _key(one) not in done]
        for one in (*needed, trial):
            shared = one.experiment.before(one) if one.experiment.before is not None else ()
            assert not {job.name for job in shared} & {trial.name for trial in trials}, "names of jobs are unique"
            jobs |= {job.name: job for job in shared if job.name not in jobs}
            depends_on = [job.name for job in shared] + [other.name for other in needed if one is trial]
            jobs.setdefault(one.name, Job(one.name, run_trial, (one,), tuple(depends_on)))
    try:
        yield from run_jobs([*jobs.values()], processes)
    finally:  # remove the folders of seeds and settings in which nothing was kept
        for folder in (*first.work_folder.glob("seed-*"), first.work_folder):
            with suppress(OSError):  # it is not there, or not empty
                folder.rmdir()


def run_trial(trial: Trial) -> Iterator[str]:
    """Run one trial and append its result to the file; its run folder is deleted unless it is to be kept."""
    experiment, start, metrics = trial.experiment, time.perf_counter(), None
    for event in experiment.measure(trial):
        if isinstance(event, str):
            yield f"{trial.name}: {event}"
        else:
            metrics = event
    assert metrics is not None, "an experiment yields metrics last"
    result = Result(
        experiment=experiment.name,
        arm=trial.arm.name,
        seed=trial.seed,
        settings=trial.settings,
        machine=machine_name(),
        seconds=time.perf_counter() - start,
        metrics=metrics,
    )
    append_result(trial.folder / RESULTS_FILE, result)
    if not trial.keep and trial.run_folder.is_dir():
        shutil.rmtree(trial.run_folder)
    shown = [
        f"{name} {format_measure(name, metrics[name])}"
        for name in experiment.columns[:3]
        if isinstance(metrics.get(name), int | float)
    ]
    yield f"{trial.name}: {', '.join(shown) or 'done'} ({result.seconds:.0f} s)"


def machine_name() -> str:
    """Return the device and the version of torch that measure here."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()
    return f"{name}, torch {torch.__version__}"


# -- results ----------------------------------------------------------------------------------------------------------


def needed_trials(trial: Trial) -> list[Trial]:
    """Return the trials whose results `measure` reads, such as a search for the learning rate."""
    pairs = trial.experiment.needs(trial) if trial.experiment.needs is not None else ()
    return [replace(trial, arm=trial.experiment.arm(arm), seed=seed) for arm, seed in pairs]


def read_needed_results(trial: Trial) -> list[Result]:
    """Return the results of the trials that a trial needs."""
    needed = {_key(one) for one in needed_trials(trial)}
    return [result for result in stored_results(trial) if result.key in needed]


def _key(trial: Trial) -> tuple[str, int, str]:
    return trial_key(trial.arm.name, trial.seed, trial.settings)


def stored_results(trial: Trial) -> list[Result]:
    """Return the results in the folder of the experiment and in the files that the call names."""
    name = trial.experiment.name
    for path in trial.more_results:
        if not read_results([path], name):
            raise ConfigError(f"{path} has no results of {name}; name a results.jsonl of this experiment")
    own = sorted(trial.folder.glob("*.jsonl")) if trial.folder.is_dir() else []
    return read_results([*trial.more_results, *own], name)


def select_results(trials: Sequence[Trial]) -> tuple[list[Result], int]:
    """Return the stored results with the settings of these trials, of any seed, and how many of them are left out.

    Results with the real corpus are preferred to those with a stand-in: another machine may have the corpus.
    """
    stored = stored_results(trials[0])

    def select(stands_in: bool) -> list[Result]:
        settings = {_key(replace(trial, stands_in=stands_in))[::2] for trial in trials}
        return [result for result in stored if result.key[::2] in settings]

    real, stand_in = select(False), select(True)
    reads_corpus = any(trials[0].experiment.arm(result.arm).uses_recipe for result in real)
    if reads_corpus or all(result in real for result in stand_in):
        return real, sum(result not in real for result in stand_in)
    return stand_in, 0
