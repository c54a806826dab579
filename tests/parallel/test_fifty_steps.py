"""Every strategy gives the losses of a single process in float32 over fifty steps."""

import pytest
from strategy_families import EXACT, FAMILIES
from training_support import run_jobs, train_to_end, write_recipe

from monoblock.training.events import StepEvent

STRATEGIES = {"ddp": 2, "fsdp": 2, "tp": 2, "pp": 2, "fsdp+tp": 4}  # processes


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_of_fifty_steps_are_those_of_one_process(family, tmp_path):
    train = {"steps": 50, "batch": 5, "save_every": 50, "eval_every": 50}
    recipe = write_recipe(tmp_path, {"train": train}, FAMILIES[family], EXACT)
    _, events = train_to_end(recipe, tmp_path / "alone")
    losses = [event.loss for event in events if isinstance(event, StepEvent)]
    assert len(losses) == 50
    for processes in (2, 4):
        names = [name for name, count in STRATEGIES.items() if count == processes]
        jobs = [
            {
                "recipe": str(recipe),
                "folder": str(tmp_path / name),
                "overrides": [f"train.parallel={name}", f"parallel.tensor={2 if 'tp' in name else 0}"],
            }
            for name in names
        ]
        for seen in run_jobs(tmp_path, jobs, processes):
            for name, job in zip(names, seen, strict=True):
                # The matrices of Muon are bf16, so that rounding errors grow faster.
                assert job["losses"] == pytest.approx(losses, rel=1e-5 if family != "divisible" else 1e-4), name
