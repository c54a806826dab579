"""Experiments with made-up numbers, for the tests of the machinery; `measure` notes every trial that it runs."""

from dataclasses import dataclass, replace

from monoblock.experiments.experiment import Arm, Experiment
from monoblock.experiments.jobs import Job
from monoblock.experiments.results import Result
from monoblock.experiments.rules import Rule
from monoblock.experiments.runner import read_needed_results

LOSSES = {"old": [3.0, 3.1, 2.9], "new": [2.0, 2.1, 1.9], "same": [3.02, 3.05, 2.91]}


@dataclass(frozen=True, kw_only=True)
class Options:
    offset: float = 0.0


def measure(trial):
    trial.run_folder.mkdir(parents=True, exist_ok=True)
    with (trial.folder / "ran.txt").open("a") as file:
        file.write(f"{trial.name}\n")
    yield "measuring"
    if (trial.folder / "fail").exists() and trial.arm.name == "same":
        raise KeyboardInterrupt
    loss = LOSSES[trial.arm.name][trial.seed - 1] + trial.options.offset
    yield {"loss": loss, "by_length": {"1": loss, "2": loss + 1}, "parameters": 1000}


def share(trial):
    (trial.folder / "shared.txt").write_text("ready")
    yield "ready"


def before(trial):
    return (Job("shared", share, (trial,)),)


def less(arm, statement="it is lower by 0.5"):
    return Rule(statement, f"loss of {arm} - loss of old <= -0.5")


EXPERIMENT = Experiment(
    name="experiment_support:EXPERIMENT",
    claim="new is better than old",
    source="A",
    arms=tuple(Arm(name=name, about=f"the {name} one") for name in LOSSES),
    measure=measure,
    before=before,
    options=Options,
    budget="nothing",
    data="made-up numbers",
    columns=("loss", "parameters"),
    curves={"by_length": "length"},
    rules=(less("new"), less("same", "same is lower by 0.5")),
)


# The corpus of its recipe is only in the user's folder of corpora.
STANDING_IN = replace(
    EXPERIMENT,
    name="experiment_support:STANDING_IN",
    recipe="wikitext2",
    stand_in=("data.corpus=kjv", "tokenizer.kind=bpe"),
    smoke=("model.width=16", "train.steps=3"),
)

# Beside arms whose corpus is not there, the arm "old" trains nothing.
MIXED = replace(
    STANDING_IN,
    name="experiment_support:MIXED",
    arms=tuple(replace(arm, uses_recipe=arm.name != "old") for arm in EXPERIMENT.arms),
)


def make_result(arm, seed, metrics, changes=()):
    """Return the result of a trial of EXPERIMENT with these metrics."""
    settings = {"changes": list(changes)}
    values = {"settings": settings, "machine": "here", "seconds": 1.0, "metrics": metrics}
    return Result(experiment=EXPERIMENT.name, arm=arm, seed=seed, **values)


def measure_after_old(trial):
    """Report the loss of the arm "old", which must have been measured before."""
    if trial.arm.name == "old":
        yield from measure(trial)
        return
    (first,) = read_needed_results(trial)
    yield from (event for event in measure(trial) if isinstance(event, str))
    yield {"loss": first.metrics["loss"], "parameters": 1000}


def need_old(trial):
    return () if trial.arm.name == "old" else (("old", 2),)


DEPENDENT = replace(
    EXPERIMENT, name="experiment_support:DEPENDENT", measure=measure_after_old, needs=need_old, before=None
)
