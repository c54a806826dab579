"""What each of two processes does for test_training_parallel; started by torchrun, it writes what it saw to a file."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from monoblock.errors import MonoblockError
from monoblock.tasks.recipe import read
from monoblock.tasks.run import prepare
from monoblock.training.events import Skipped, Stepped, Warned
from monoblock.training.parallel import ALONE, join


def nothing(run):
    """A run as it is."""


def poisoned_at(*steps):
    """NaN in the losses of the second process alone."""

    def change(run):
        loss, trainer = run.trainer.loss, run.trainer
        spoilt = lambda *given: loss(*given) * (float("nan") if trainer.world.rank and trainer.step in steps else 1.0)
        trainer.compute = lambda inputs, labels: spoilt(run.model, inputs, labels)

    return change


def full(run):
    """Memory runs out in the second process alone, once."""
    compute, left = run.trainer.compute, [1] * run.trainer.world.rank

    def once(inputs, labels):
        if left and run.trainer.step == 2:
            left.pop()
            raise torch.OutOfMemoryError("all gone")
        return compute(inputs, labels)

    run.trainer.compute = once


def stopped_by_one(run):
    """The second process is asked to stop, the first is not."""
    run.trainer.stop = lambda: run.trainer.world.rank == 1 and run.trainer.step >= 4


CHANGES = {
    "plain": nothing,
    "alone": nothing,
    "dropout": nothing,
    "poisoned": poisoned_at(3, 5),
    "lost": poisoned_at(*range(6, 99)),
    "full": full,
    "stopped": stopped_by_one,
}


def trained(recipe, folder, world, change, *, resume=False, until=None):
    """Train, or drop the run after a step; what was told, and the weights as a hash."""
    run = prepare(read(str(recipe)), folder, world=world, resume=resume)
    change(run)
    seen = {"losses": [], "norms": [], "skipped": [], "warned": [], "error": None}
    events = run.events(resume=resume)
    try:
        for event in events:
            match event:
                case Stepped():
                    seen["losses"].append(event.loss)
                    seen["norms"].append(event.grad_norm)
                case Skipped():
                    seen["skipped"].append(event.line())
                case Warned():
                    seen["warned"].append(event.text)
            if until is not None and run.trainer.step >= until:
                events.close()
                break
    except MonoblockError as problem:
        seen["error"] = str(problem)
    state = run.model.state_dict()
    seen["weights"] = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    seen["step"], seen["parts"], seen["guard"] = run.trainer.step, run.trainer.parts, run.trainer.guard.facts()
    return seen


def words(world):
    """What the processes say to one another."""
    both, second, none = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    both.grad = torch.full((3,), 2.0 + world.rank)
    second.grad = torch.full((3,), 5.0) if world.rank else None
    world.add_gradients([both, second, none])
    return {
        "rank": world.rank,
        "total": world.total(world.rank + 1, 0.5),
        "told": world.told(7 + world.rank),
        "gathered": [part["x"].tolist() for part in world.gathered({"x": torch.tensor([world.rank, 4])})],
        "gradients": [None if w.grad is None else w.grad.tolist() for w in (both, second, none)],
    }


def moved(place, world):
    """From two processes to one and to two again, each going on for some steps."""
    recipe, folder = place / "recipe.toml", place / "run"
    trained(recipe, folder, world, nothing, until=6)
    world.wait()
    if world.leads:
        trained(recipe, folder, ALONE, nothing, resume=True, until=10)
    world.wait()
    return trained(recipe, folder, world, nothing, resume=True)


def main(place):
    world = join(os.environ, "cpu")
    seen = {"words": words(world)}
    for name, change in CHANGES.items():
        recipe = place / name / "recipe.toml"
        seen[name] = trained(recipe, place / name / "run", world, change)
    broken = place / "dropout/broken"
    trained(place / "dropout/recipe.toml", broken, world, nothing, until=7)
    world.wait()
    seen["resumed"] = trained(place / "dropout/recipe.toml", broken, world, nothing, resume=True)
    seen["moved"] = moved(place / "moved", world)
    seen["drawn"] = torch.rand(1).item()
    (place / f"rank-{world.rank}.json").write_text(json.dumps(seen))
    world.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
