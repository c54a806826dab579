"""Plan the trials of an experiment, and run those that have no result yet, in this process or in several."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from monoblock.config.schema import from_dict
from monoblock.errors import ConfigError, did_you_mean
from monoblock.experiments.frame.experiment import Arm, Experiment, Trial
from monoblock.experiments.frame.jobs import Job, run_jobs
from monoblock.experiments.frame.results import RESULTS_FILE, Result, append_result, check_writable, read_results
from monoblock.experiments.frame.settings import (
    describe_stand_in,
    needs_stand_in,
    recipe_changes,
    trial_settings,
    write_toy_corpus,
)
from monoblock.experiments.names import load_experiment
from monoblock.kernels.cpu.library import processor_name
from monoblock.metrics.table import format_measure
from monoblock.runs.recipe import build_model_config, read_recipe
from monoblock.training.runtime import check_device


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks of an experiment."""

    folder: Path  # where results.jsonl is written, and run folders are
    values: Mapping[str, Any]  # options key=value, among them seeds and arms
    overrides: tuple[str, ...] = ()  # section.key=value
    data: Path | None = None
    jobs: int = 1
    smoke: bool = False
    keep: bool = False
    more_results: tuple[Path, ...] = ()  # files of results of other machines


def plan_trials(experiment: Experiment, request: Request) -> list[Trial]:
    """Return a trial for every chosen arm and seed; raise ConfigError for unknown options, arms and overrides."""
    values = {**(experiment.smoke_options if request.smoke else {}), **request.values}
    seeds = parse_seeds(values.pop("seeds", "1" if request.smoke else ",".join(map(str, experiment.seeds))))
    default = (experiment.smoke_arms if request.smoke else ()) or experiment.default_arms
    arms = parse_arms(str(values.pop("arms", ",".join(default) or "*")), [arm.name for arm in experiment.arms])
    options = parse_options(experiment.options, values)
    if experiment.expand is not None:
        arms = experiment.expand(options, arms)
    if experiment.check is not None:
        experiment.check(options, request.overrides)
    base = Trial(
        experiment=experiment.name,
        arm=experiment.arms[0],
        seed=seeds[0],
        options=options,
        overrides=request.overrides,
        folder=request.folder,
        work_folder=request.folder,
        data=request.data,
        smoke=request.smoke,
        keep=request.keep,
        more_results=request.more_results,
    )
    base = replace(base, stands_in=needs_stand_in(experiment, base))
    base = replace(base, work_folder=request.folder / f"work-{_settings_digest(experiment, base)}")
    chosen = [replace(base, arm=experiment.arm(name), seed=seed) for seed in seeds for name in arms]
    trials = [_with_stand_in(trial, base.stands_in) for trial in chosen]
    for trial in trials:
        _check_overrides(experiment, trial)
    return trials


def _settings_digest(experiment: Experiment, trial: Trial) -> str:
    """Return a short name of the settings that all trials of a call share, so that other settings use other folders."""
    neutral = replace(trial, arm=Arm(name="", about=""))
    text = json.dumps(trial_settings(experiment, neutral), sort_keys=True)
    return blake2b(text.encode(), digest_size=4).hexdigest()


def _check_overrides(experiment: Experiment, trial: Trial) -> None:
    """Raise ConfigError for an override that the recipe does not have, or of what makes an arm different."""
    name = trial.arm.recipe or experiment.recipe or str(getattr(trial.options, "recipe", ""))
    keys = [word.partition("=")[0] for word in trial.overrides]
    if keys and not name:
        raise ConfigError(f"{experiment.name} trains nothing, so it has no {keys[0]}; leave it out")
    if keys and not trial.arm.uses_recipe:
        raise ConfigError(
            f"the arm {trial.arm.name} trains nothing, so it has no {keys[0]}; leave it out, or leave out the arm "
            "with arms="
        )
    if "train.seed" in keys:
        raise ConfigError("train.seed is the seed of a trial; write seeds=, as in seeds=4")
    fixed = {change.partition("=")[0] for change in trial.arm.changes}
    for key in keys:
        if key in fixed:
            raise ConfigError(
                f"{key} is what the arm {trial.arm.name} sets; leave it out, or leave out the arm with arms="
            )
        if key in experiment.set_by_measure:
            raise ConfigError(f"{key} is what {experiment.name} chooses by itself; leave it out")
    if trial.overrides:
        recipe = read_recipe(name, recipe_changes(experiment, trial))
        build_model_config(recipe, int(recipe.model.get("vocab", 8000)))


def run_trials(experiment: Experiment, trials: Sequence[Trial], request: Request) -> Iterator[str]:
    """Run the trials that have no result yet; yield progress messages."""
    for key, _, value in (word.partition("=") for word in request.overrides):
        if key == "train.device":
            check_device(value)
    check_writable(request.folder)
    if request.smoke:
        write_toy_corpus(experiment.toy, request.folder)
    done = {result.key for result in stored_results(experiment, request)}
    waiting = [trial for trial in trials if _key(experiment, trial) not in done]
    if len(waiting) < len(trials):
        yield f"{len(trials) - len(waiting)} of {len(trials)} trials have results already"
    if notice := describe_stand_in(experiment, waiting):
        yield notice
    jobs: dict[str, Job] = {}
    for trial in waiting:
        needed = _needed_trials(experiment, trial)
        for one in [one for one in needed if _key(experiment, one) not in done] + [trial]:
            first = experiment.before(one) if experiment.before is not None else ()
            assert not any(job.name in {trial.name for trial in trials} for job in first), "names of jobs are unique"
            jobs |= {job.name: job for job in first if job.name not in jobs}
            depends_on = (*(job.name for job in first), *(job.name for job in map(_job, needed) if one is trial))
            jobs.setdefault(one.name, _job(one, depends_on))
    known = set(jobs)
    filtered = [
        job._replace(depends_on=tuple(name for name in job.depends_on if name in known)) for job in jobs.values()
    ]
    try:
        yield from run_jobs(filtered, request.jobs)
    finally:
        _remove_empty_folders(trials)


def _remove_empty_folders(trials: Sequence[Trial]) -> None:
    """Remove the folders of seeds and settings in which nothing was kept."""
    for work_folder in {trial.work_folder for trial in trials}:
        for folder in (*work_folder.glob("seed-*"), work_folder):
            with suppress(OSError):  # it is not there, or not empty
                folder.rmdir()


def _job(trial: Trial, depends_on: tuple[str, ...] = ()) -> Job:
    return Job(trial.name, run_trial, (trial,), depends_on)


def _needed_trials(experiment: Experiment, trial: Trial) -> list[Trial]:
    """Return the trials whose results `measure` reads, such as a search for the learning rate."""
    pairs = experiment.needs(trial) if experiment.needs is not None else ()
    return [replace(trial, arm=experiment.arm(arm), seed=seed) for arm, seed in pairs]


def _with_stand_in(trial: Trial, stands_in: bool) -> Trial:
    """Return a trial with or without the corpus that stands in for that of the recipe, if its arm uses the recipe."""
    return replace(trial, stands_in=stands_in and trial.arm.uses_recipe)


def read_trial_results(trial: Trial) -> list[Result]:
    """Return the results that a trial can read: those of the trials that it needs."""
    experiment = find_experiment(trial.experiment)
    needed = {_key(experiment, one) for one in _needed_trials(experiment, trial)}
    request = Request(folder=trial.folder, values={}, more_results=trial.more_results)
    return [result for result in stored_results(experiment, request) if result.key in needed]


def _key(experiment: Experiment, trial: Trial) -> tuple[str, int, str]:
    return _result(experiment, trial, {}, 0.0).key


def stored_results(experiment: Experiment, request: Request) -> list[Result]:
    """Return the results in the folder of the experiment and in the files that the request names."""
    for path in request.more_results:
        if not read_results([path], experiment.name):
            raise ConfigError(f"{path} has no results of {experiment.name}; name a results.jsonl of this experiment")
    own = sorted(request.folder.glob("*.jsonl")) if request.folder.is_dir() else []
    return read_results([*request.more_results, *own], experiment.name)


def select_results(experiment: Experiment, trials: Sequence[Trial], request: Request) -> list[Result]:
    """Return the stored results with the settings of these trials, of any seed.

    Results with the real corpus are preferred to those with a stand-in: another machine may have the corpus.
    """
    real, stand_in = _results_by_corpus(experiment, trials, request)
    only_stand_in = [result for result in stand_in if result not in real]
    reads_corpus = any(experiment.arm(result.arm).uses_recipe for result in real)
    return stand_in if only_stand_in and not reads_corpus else real


def count_hidden(experiment: Experiment, trials: Sequence[Trial], request: Request) -> int:
    """Return how many results with a stand-in `select_results` leaves out because there are some with the corpus."""
    selected = select_results(experiment, trials, request)
    _, stand_in = _results_by_corpus(experiment, trials, request)
    return sum(result not in selected for result in stand_in)


def _results_by_corpus(
    experiment: Experiment, trials: Sequence[Trial], request: Request
) -> tuple[list[Result], list[Result]]:
    """Return the stored results with the settings of these trials: with the real corpus, and with the stand-in."""
    found = stored_results(experiment, request)

    def select(stands_in: bool) -> list[Result]:
        settings = {_key(experiment, _with_stand_in(trial, stands_in))[::2] for trial in trials}
        return [result for result in found if result.key[::2] in settings]

    return select(False), select(True)


def run_trial(trial: Trial) -> Iterator[str]:
    """Run one trial and append its result to the file; its run folder is deleted unless it is to be kept."""
    experiment = find_experiment(trial.experiment)
    start, metrics = time.perf_counter(), None
    for event in experiment.measure(trial):
        if isinstance(event, str):
            yield f"{trial.name}: {event}"
        else:
            metrics = event
    assert metrics is not None, "an experiment yields metrics last"
    result = _result(experiment, trial, metrics, time.perf_counter() - start)
    append_result(trial.folder / RESULTS_FILE, result)
    if not trial.keep and trial.run_folder.is_dir():
        shutil.rmtree(trial.run_folder)
    shown = [
        f"{name} {format_measure(name, metrics[name])}"
        for name in experiment.columns[:3]
        if isinstance(metrics.get(name), int | float)
    ]
    yield f"{trial.name}: {', '.join(shown) or 'done'} ({result.seconds:.0f} s)"


def find_experiment(name: str) -> Experiment:
    """Return an experiment by its name; `name` may also be "module:CONSTANT", for an experiment outside the package."""
    if ":" in name:
        module, _, constant = name.partition(":")
        found: Experiment = getattr(import_module(module), constant)
        return found
    return load_experiment(name)


def _result(experiment: Experiment, trial: Trial, metrics: dict[str, Any], seconds: float) -> Result:
    return Result(
        experiment=experiment.name,
        arm=trial.arm.name,
        seed=trial.seed,
        settings=trial_settings(experiment, trial),
        machine=machine_name(),
        seconds=seconds,
        metrics=metrics,
    )


def machine_name() -> str:
    """Return the device and the version of torch that measure here."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{processor_name()}, torch {torch.__version__}"


MAX_SEED = 2**63 - 1  # the largest that torch takes


def parse_options(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the options of an experiment from key=value arguments; `cls` is its dataclass of options."""
    known = [*cls.__dataclass_fields__, "seeds", "arms"]  # type: ignore[attr-defined]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"this experiment has no option {key}=; its options are {', '.join(f'{one}=' for one in known)}"
                f"{did_you_mean(key, known)}"
            )
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
