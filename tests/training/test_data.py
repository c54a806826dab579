"""The batches of a run: every sample once an epoch, in an order independent of workers and interruptions."""

import numpy as np
import pytest
import torch
from training_support import SEQ2SEQ_RECIPE, start_run, train_to_end, train_until, write_recipe

from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import StepEvent

DATASETS = {
    "a stream": {},
    "packed documents": {"data": {"corpus": "documents.jsonl", "packing": "documents"}},
    "pairs by length": SEQ2SEQ_RECIPE,
}


def train_and_log(run, resume, until, saving):
    """Train up to a step; return (epoch, samples) of each step."""
    log, should_stop = {}, False
    original = run.trainer.batches

    def batches(first):
        for step, batch in enumerate(original(first), first):
            log[step] = (batch.epoch, batch.samples)
            yield batch

    run.trainer.batches, run.trainer.should_stop = batches, lambda: should_stop
    events = run.events(resume=resume)
    for event in events:
        if isinstance(event, StepEvent) and event.step >= until:
            should_stop = True
            if not saving:
                events.close()
                break
    torch.use_deterministic_algorithms(False)
    return log


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", DATASETS)
def test_over_five_resumes_in_one_epoch_no_sample_is_repeated_or_skipped(dataset, workers, tmp_path):
    quick = {"train": {"workers": workers, "eval_every": 0, "save_every": 2, "batch": 17, "steps": 10**6}}
    recipe = write_recipe(tmp_path, DATASETS[dataset], quick)
    plan = start_run(recipe, tmp_path / "plan").task_data.batch_plan
    expected = {step: plan.batch_at(step) for step in range(plan.batches + 1)}
    cuts = np.linspace(3, plan.batches + 1, 6).astype(int).tolist()
    batches = {}
    for number, until in enumerate(cuts):
        run = prepare_run(read_recipe(str(recipe)), tmp_path / "run", resume=number > 0)
        log = train_and_log(run, number > 0, until, saving=number % 2 == 0)
        first = min(log)
        assert number == 0 or cuts[number - 1] - 2 <= first <= cuts[number - 1], "resumes at the last checkpoint"
        batches = {step: batch for step, batch in batches.items() if step < first} | log
    assert list(batches) == list(range(plan.batches + 1))
    for step, (epoch, samples) in batches.items():
        assert (epoch, samples) == (expected[step].epoch, expected[step].indices.tolist())
    epoch = [sample for step in range(plan.batches) for sample in batches[step][1]]
    count = getattr(plan, "count", None) or len(plan.lengths)
    assert len(epoch) == len(set(epoch)), "none repeats"
    assert count - len(epoch) < 17, "only samples that do not fill a batch are left out"
    assert batches[plan.batches][0] == 1


def test_the_number_of_workers_does_not_change_the_losses(tmp_path):
    losses = []
    for workers in (0, 1, 3):
        recipe = write_recipe(tmp_path, {"train": {"workers": workers, "steps": 12, "eval_every": 0}})
        _, events = train_to_end(recipe, tmp_path / f"run-{workers}")
        losses.append([(event.step, event.loss) for event in events if isinstance(event, StepEvent)])
    assert losses[0] == losses[1] == losses[2]


def test_the_number_of_workers_may_change_on_resume(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"workers": 2}})
    _, events = train_to_end(recipe, tmp_path / "uninterrupted")
    train_until(recipe, tmp_path / "run", 8)
    recipe = write_recipe(tmp_path, {"train": {"workers": 0}})
    _, resumed = train_to_end(recipe, tmp_path / "run", resume=True)
    expected = [(event.step, event.loss) for event in events if isinstance(event, StepEvent) and event.step > 5]
    assert [(event.step, event.loss) for event in resumed if isinstance(event, StepEvent)] == expected
