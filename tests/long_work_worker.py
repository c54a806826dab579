"""The worker of parallel/test_long_work: two processes, of which the main one works longer than the time-out."""

import json
import os
import time

from monoblock.parallel.world import init_distributed
from monoblock.runs import run as run_module
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import SampleEvent

TIMEOUT, WORK = 4.0, 6.0  # seconds


def slowly(function):
    """Let a function take longer than the time-out."""

    def call(*args, **options):
        time.sleep(WORK)
        return function(*args, **options)

    return call


def main(folder):
    world = init_distributed(os.environ, "cpu", timeout=TIMEOUT)
    seen = {"order": []}
    with world.main_process_first():
        seen["order"].append(time.time())
        time.sleep(WORK)
        seen["order"].append(time.time())
    run = prepare_run(read_recipe(str(folder / "recipe.toml")), folder / "run", world=world)
    run_module.save_model = slowly(run_module.save_model)
    run.trainer.sample = slowly(run.trainer.sample)
    build = run.task_data.evaluation_batches
    read = []

    class Counted:
        """A loss that counts the batches it evaluates."""

        def __getattr__(self, name):
            return getattr(loss, name)

        def __call__(self, *args, **options):
            return loss(*args, **options)

        def evaluation_loss(self):
            return self

        def evaluate_batch(self, *args):
            read.append(1)
            return loss.evaluate_batch(*args)

    loss = run.trainer.loss
    run.trainer.loss = Counted()
    seen["samples"] = [event.text for event in run.events() if isinstance(event, SampleEvent)]
    seen |= {"evaluated": len(read), "batches": sum(1 for _ in build()), "metrics": run.metrics}
    (folder / f"seen-{world.rank}.json").write_text(json.dumps(seen))
    world.shut_down()
