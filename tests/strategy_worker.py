"""The worker of parallel/test_strategies: several processes train one job after another.

A job is a dict in jobs.json: the recipe, the folder of the run, overrides, and optionally `resume`, `until` (the step
at which the run is abandoned), `nan` (the steps at which losses are not numbers) and `dtype` (the dtype of all jobs).
Each process writes what it saw to seen-RANK.json.
"""

import json
from pathlib import Path

import torch

from monoblock.accounting.parallel import pipeline_size, tensor_size
from monoblock.cli.training import join_processes
from monoblock.parallel.world import arrange_processes
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import EvaluationEvent, SkippedUpdateEvent, StepEvent, WarningEvent


class BadLoss:
    """A loss that is not a number at some steps."""

    def __init__(self, trainer, steps):
        self.loss, self.trainer, self.steps = trainer.loss, trainer, steps

    def __getattr__(self, name):
        return getattr(self.loss, name)

    def __call__(self, *args):
        return self.loss(*args) * (float("nan") if self.trainer.step in self.steps else 1.0)


def run_job(job, everyone):
    recipe = read_recipe(job["recipe"], job["overrides"])
    name, options, size = recipe.train.parallel, recipe.parallel, everyone.size
    tensor, stages = tensor_size(name, options.tensor, size, size), pipeline_size(name, options.pipeline, size)
    world = arrange_processes("cpu", everyone.rank, size, tensor, stages, options.timeout)
    resume = job.get("resume", False)
    run = prepare_run(recipe, Path(job["folder"]), world=world, resume=resume)
    seen = {"losses": [], "norms": [], "evaluations": [], "warnings": [], "skipped": [], "samples": {}}
    seen["stored"] = sum(
        weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()
        for weight in run.model.parameters()
    )
    if job.get("nan"):
        run.trainer.loss = BadLoss(run.trainer, job["nan"])
    read = run.trainer.batches

    def batches(step):
        for number, batch in enumerate(read(step), step + 1):
            seen["samples"][number] = batch.samples
            yield batch

    run.trainer.batches = batches
    events = run.events(resume=resume)
    for event in events:
        match event:
            case StepEvent():
                seen["losses"].append(event.loss)
                seen["norms"].append(event.grad_norm)
            case EvaluationEvent():
                seen["evaluations"].append(event.metrics["val_loss"])
            case SkippedUpdateEvent():
                seen["skipped"].append(event.step)
            case WarningEvent():
                seen["warnings"].append(event.text)
        if run.trainer.step >= job.get("until", 10**9):
            events.close()
            break
    seen["metrics"] = run.metrics
    seen["replicated"] = {
        name: float(weight.detach().sum())
        for name, weight in run.model.named_parameters()
        if not hasattr(weight, "to_local")
    }
    backends = [group._get_backend(torch.device("cpu")) for group in world.mesh.get_all_groups()]
    seen["timeouts"] = [backend.options._timeout.total_seconds() for backend in backends]
    world.barrier()
    return seen


def main(folder):
    jobs = json.loads((folder / "jobs.json").read_text())
    recipe = read_recipe(jobs[0]["recipe"], jobs[0]["overrides"])
    world = join_processes(recipe)
    torch.set_default_dtype(getattr(torch, jobs[0].get("dtype", "float32")))
    seen = [run_job(job, world) for job in jobs]
    (folder / f"seen-{world.rank}.json").write_text(json.dumps(seen))
    world.shut_down()
