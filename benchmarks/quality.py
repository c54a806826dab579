"""Train a recipe with several seeds and write a table of losses and times.

    python benchmarks/quality.py shakespeare-char --seeds 1 2 3 --data DIR --out table.md
    python benchmarks/quality.py shakespeare-cpu train.lr=2e-3

The loss is the exact mean over the validation split: every token is predicted once, with the context of its block.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from monoblock.accounting.report import account
from monoblock.baselines.lstm import Recurrent
from monoblock.data.corpora.table import CORPORA
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import read_recipe
from monoblock.runs.run import Run
from monoblock.runs.train import prepare_run
from monoblock.tasks.task_data import build_test_data, validate
from monoblock.training.collate import TensorBatch
from monoblock.training.events import EvaluationEvent, SkippedUpdateEvent, StepEvent
from monoblock.training.loss import CrossEntropyLoss
from monoblock.training.schedule import learning_rate


def train(
    recipe_name: str, overrides: list[str], seed: int, data: Path | None, seconds: float | None = None
) -> dict[str, object]:
    recipe = read_recipe(recipe_name, [*overrides, f"train.seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = prepare_run(recipe, Path(folder) / "run", data=data)
        prepared = time.perf_counter()
        if seconds is not None:
            limit_by_time(run, start + seconds)
        step_seconds, curve, losses, skipped = 0.0, [], [], 0
        for event in run.events():
            if isinstance(event, StepEvent):
                step_seconds += event.seconds
                losses.append(event.loss)
            if isinstance(event, SkippedUpdateEvent):
                skipped += 1
            if isinstance(event, EvaluationEvent):
                curve.append([event.step, round(event.metrics["val_loss"], 4)])
                training_loss = sum(losses) / max(1, len(losses))
                progress = f"{curve[-1]} (training {training_loss:.4f}, skipped {skipped}) {step_seconds:.0f} s"
                print(f"{recipe.name} {seed}: {progress}", file=sys.stderr, flush=True)
                losses = []
        end = time.perf_counter()
        result: dict[str, object] = {
            "recipe": recipe.name,
            "overrides": overrides,
            "seed": seed,
            "seconds": seconds,
            "parameters": account(run.model.config).parameters,
            "val_loss": run.validate()["val_loss"],
            "best": min([loss for _, loss in curve], default=None),
            "steps": run.trainer.step,
            "curve": curve,
            "skipped": skipped,
            "tokens": run.trainer.tokens,
            "training_seconds": step_seconds,
            "wall_seconds": end - prepared,
            "preparing_seconds": prepared - start,
        }
        if recipe.train.objective == "causal_lm" and "test" in getattr(
            CORPORA.get(recipe.data.corpus), "split_names", {}
        ):
            result["test"] = test_perplexity(run, recipe, data)
    return result


def limit_by_time(run: Run, end: float) -> None:
    """Decay the learning rate with the time that has passed, and stop at `end`."""
    section, trainer = run.recipe.train, run.trainer
    warmup_end: list[float] = []

    def rate(step: int) -> float:
        if step <= section.warmup:
            warmup_end[:] = [time.perf_counter()]
            return section.lr * (step + 1) / (section.warmup + 1)
        passed = (time.perf_counter() - warmup_end[0]) / max(1e-9, end - warmup_end[0])
        scaled_step = round(1000 * min(1.0, passed))
        return learning_rate(section.schedule, scaled_step, peak=section.lr, steps=1000, floor=section.min_lr_ratio)

    def stop() -> bool:
        if time.perf_counter() >= end:  # the current step is the last one
            trainer.args = replace(trainer.args, steps=trainer.step + 1)
        return False

    trainer.learning_rate, trainer.should_stop = rate, stop


def test_perplexity(run: Run, recipe: Recipe, data: Path | None) -> dict[str, float]:
    """Return the test perplexity in blocks, in windows that move by 32, and for an LSTM with carried state."""
    perplexities, runtime, loss = {}, run.trainer.runtime, run.trainer.loss.evaluation_loss()
    assert run.task_data.tokenizer is not None
    for name, stride in (("blocks", None), ("sliding", 32)):
        test_data = build_test_data(recipe, run.model.config, run.task_data.tokenizer, data, stride)
        with runtime.autocast():
            perplexities[name] = math.exp(validate(run.model, test_data, loss, runtime.device)["val_loss"])
    if isinstance(run.model, Recurrent):
        blocks = build_test_data(recipe, run.model.config, run.task_data.tokenizer, data, None).evaluation_batches
        assert blocks is not None
        with runtime.autocast():
            perplexities["carried"] = math.exp(carried_loss(run.model, blocks(), loss, runtime.device))
    return perplexities


@torch.no_grad()
def carried_loss(
    model: Recurrent, blocks: Iterable[TensorBatch], loss: CrossEntropyLoss, device: torch.device
) -> float:
    """Return the loss over the whole split, with the state of the LSTM carried from block to block."""
    state, total, count = None, 0.0, 0
    for block in blocks:
        batch = block.to(device)
        logits, state = model.forward_with_state(batch.inputs["source"].reshape(1, -1), state=state)
        total += float(loss.from_logits(logits, batch.labels.reshape(1, -1)))
        count += block.target_count
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="shakespeare-cpu")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.recipe, args.overrides = (
            "gpt-tiny",
            ["train.steps=2", "model.width=24", "model.heads=3", "model.context=32"],
        )
    rows = [train(args.recipe, args.overrides, seed, args.data) for seed in args.seeds]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    lines = [f"{args.recipe} {' '.join(args.overrides)} on {device}, torch {torch.__version__}", ""]
    lines += [
        "| seed | parameters | validation loss | tokens | training s | wall s | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        test = json.dumps({k: round(v, 2) for k, v in row["test"].items()}) if "test" in row else ""  # type: ignore[attr-defined]
        numbers = (
            f"{row['val_loss']:.4f} | {row['tokens']:,} | {row['training_seconds']:.1f} | {row['wall_seconds']:.1f}"
        )
        lines.append(f"| {row['seed']} | {row['parameters']:,} | {numbers} | {test} |")
    print("\n".join(lines))
    for row in rows:
        print(json.dumps(row))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
