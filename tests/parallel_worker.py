"""The worker of test_distributed: each of two processes writes its observations to a file."""

import hashlib
import json
import os

import torch

from monoblock.errors import MonoblockError
from monoblock.parallel.world import SINGLE_PROCESS, init_distributed
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import SkippedUpdateEvent, StepEvent, WarningEvent


def leave_unchanged(run):
    """Change nothing."""


def nan_losses_at(*steps):
    """Make the losses of the second process NaN at these steps."""

    def change(run):
        loss, trainer = run.trainer.compute_loss, run.trainer
        factor = lambda: float("nan") if trainer.world.rank and trainer.step in steps else 1.0
        trainer.compute_loss = lambda inputs, labels: loss(inputs, labels) * factor()

    return change


def stop_second_process(run):
    """Request the second process to stop, but not the first."""
    run.trainer.should_stop = lambda: run.trainer.world.rank == 1 and run.trainer.step >= 4


CHANGES = {
    "plain": leave_unchanged,
    "alone": leave_unchanged,
    "dropout": leave_unchanged,
    "bad losses": nan_losses_at(3, 5),
    "only bad losses": nan_losses_at(*range(6, 99)),
    "stopped": stop_second_process,
}


def train_run(recipe, folder, world, change, *, resume=False, until=None):
    """Train to the end or to step `until`; return the events and a hash of the weights."""
    run = prepare_run(read_recipe(str(recipe)), folder, world=world, resume=resume)
    change(run)
    seen = {"losses": [], "norms": [], "skipped": [], "warnings": [], "error": None}
    events = run.events(resume=resume)
    try:
        for event in events:
            match event:
                case StepEvent():
                    seen["losses"].append(event.loss)
                    seen["norms"].append(event.grad_norm)
                case SkippedUpdateEvent():
                    seen["skipped"].append(event.to_dict())
                case WarningEvent():
                    seen["warnings"].append(event.text)
            if until is not None and run.trainer.step >= until:
                events.close()
                break
    except MonoblockError as problem:
        seen["error"] = str(problem)
    state = run.model.state_dict()
    seen["weights"] = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    seen["step"], seen["parts"], seen["guard"] = (
        run.trainer.step,
        run.trainer.num_micro_batches,
        run.trainer.guard.state_dict(),
    )
    return seen


def exchange_values(world):
    """Use every collective."""
    return {
        "rank": world.rank,
        "total": world.all_reduce_sum(world.rank + 1, 0.5),
        "broadcast": world.broadcast(7 + world.rank),
        "gathered": [part["x"].tolist() for part in world.all_gather({"x": torch.tensor([world.rank, 4])})],
        "parts": [world.data_rank, world.data_size],
    }


def resume_with_other_sizes(parent, world):
    """Train in two processes, resume in one, and resume in two again."""
    recipe, folder = parent / "recipe.toml", parent / "run"
    train_run(recipe, folder, world, leave_unchanged, until=6)
    world.barrier()
    if world.is_main:
        train_run(recipe, folder, SINGLE_PROCESS, leave_unchanged, resume=True, until=10)
    world.barrier()
    return train_run(recipe, folder, world, leave_unchanged, resume=True)


def main(folder):
    world = init_distributed(os.environ, "cpu")
    seen = {"collectives": exchange_values(world)}
    for name, change in CHANGES.items():
        recipe = folder / name / "recipe.toml"
        seen[name] = train_run(recipe, folder / name / "run", world, change)
    broken = folder / "dropout/broken"
    train_run(folder / "dropout/recipe.toml", broken, world, leave_unchanged, until=7)
    world.barrier()
    seen["resumed"] = train_run(folder / "dropout/recipe.toml", broken, world, leave_unchanged, resume=True)
    seen["resized"] = resume_with_other_sizes(folder / "resized", world)
    seen["random"] = torch.rand(1).item()
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(seen))
    world.shut_down()
