"""What a run reads: every sample of an epoch once, in an order that workers and interruptions cannot move."""

import numpy as np
import pytest
import torch
from training_support import PAIRS, start, train, train_until, write_recipe

from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training.events import Stepped

GROUNDS = {
    "a stream": {},
    "packed documents": {"data": {"corpus": "documents.jsonl", "packing": "documents"}},
    "pairs by length": PAIRS,
}


def consumed(run, resume, until, saving):
    """Train up to a step; what was read for each step, as (epoch, samples)."""
    log, asked = {}, False
    original = run.trainer.batches

    def batches(first):
        for step, batch in enumerate(original(first), first):
            log[step] = (batch.epoch, batch.samples)
            yield batch

    run.trainer.batches, run.trainer.stop = batches, lambda: asked
    events = run.events(resume=resume)
    for event in events:
        if isinstance(event, Stepped) and event.step >= until:
            asked = True
            if not saving:
                events.close()
                break
    torch.use_deterministic_algorithms(False)
    return log


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ground", GROUNDS)
def test_over_five_resumes_in_one_epoch_no_sample_repeats_and_none_is_skipped(ground, workers, tmp_path):
    quick = {"train": {"workers": workers, "eval_every": 0, "save_every": 2, "batch": 17, "steps": 10**6}}
    recipe = write_recipe(tmp_path, GROUNDS[ground], quick)
    plan = start(recipe, tmp_path / "plan").ground.plan
    wanted = {step: plan.at(step) for step in range(plan.batches + 1)}
    cuts = np.linspace(3, plan.batches + 1, 6).astype(int).tolist()
    whole = {}
    for number, until in enumerate(cuts):
        run = prepare(read(str(recipe)), tmp_path / "run", resume=number > 0)
        log = consumed(run, number > 0, until, saving=number % 2 == 0)
        first = min(log)
        assert number == 0 or cuts[number - 1] - 2 <= first <= cuts[number - 1], "it goes on where it was saved"
        whole = {step: read for step, read in whole.items() if step < first} | log
    assert list(whole) == list(range(plan.batches + 1))
    for step, (epoch, samples) in whole.items():
        assert (epoch, samples) == (wanted[step].epoch, wanted[step].samples.tolist())
    epoch = [sample for step in range(plan.batches) for sample in whole[step][1]]
    count = getattr(plan, "count", None) or len(plan.lengths)
    assert len(epoch) == len(set(epoch)), "none repeats"
    assert count - len(epoch) < 17, "none is skipped but those that fill no batch"
    assert whole[plan.batches][0] == 1


def test_workers_change_nothing(tmp_path):
    told = []
    for workers in (0, 1, 3):
        recipe = write_recipe(tmp_path, {"train": {"workers": workers, "steps": 12, "eval_every": 0}})
        _, events = train(recipe, tmp_path / f"run-{workers}")
        told.append([(event.step, event.loss) for event in events if isinstance(event, Stepped)])
    assert told[0] == told[1] == told[2]


def test_the_number_of_workers_may_change_on_resume(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"workers": 2}})
    _, events = train(recipe, tmp_path / "whole")
    train_until(recipe, tmp_path / "run", 8)
    recipe = write_recipe(tmp_path, {"train": {"workers": 0}})
    _, more = train(recipe, tmp_path / "run", resume=True)
    wanted = [(event.step, event.loss) for event in events if isinstance(event, Stepped) and event.step > 5]
    assert [(event.step, event.loss) for event in more if isinstance(event, Stepped)] == wanted
