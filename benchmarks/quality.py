"""Train recipes with several seeds and write the table of what they reached: loss, time, device.

    python benchmarks/quality.py shakespeare-char --seeds 1 2 3 --data DIR --out table.md
    python benchmarks/quality.py shakespeare-cpu train.lr=2e-3

The loss is the exact mean over the whole validation split, every token asked once with the context of its block.
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
from monoblock.data import corpora
from monoblock.recurrent import Recurrent
from monoblock.tasks.ground import evaluate
from monoblock.tasks.recipe import Recipe, read
from monoblock.tasks.run import Run, prepare
from monoblock.tasks.texts import held_out
from monoblock.training.events import Evaluated, Skipped, Stepped
from monoblock.training.objectives import Loss, Prepared
from monoblock.training.schedule import learning_rate


def train(
    recipe_name: str, overrides: list[str], seed: int, data: Path | None, seconds: float | None = None
) -> dict[str, object]:
    recipe = read(recipe_name, [*overrides, f"train.seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        run = prepare(recipe, Path(folder) / "run", data=data)
        laid = time.perf_counter()
        if seconds is not None:
            by_the_clock(run, begun + seconds)
        stepping, curve, losses, skipped = 0.0, [], [], 0
        for event in run.events():
            if isinstance(event, Stepped):
                stepping += event.seconds
                losses.append(event.loss)
            if isinstance(event, Skipped):
                skipped += 1
            if isinstance(event, Evaluated):
                curve.append([event.step, round(event.metrics["val_loss"], 4)])
                told = f"{curve[-1]} (training {sum(losses) / max(1, len(losses)):.4f}, skipped {skipped})"
                print(f"{recipe.name} {seed}: {told} {stepping:.0f} s", file=sys.stderr, flush=True)
                losses = []
        ended = time.perf_counter()
        figures = run.measure()
        found: dict[str, object] = {
            "recipe": recipe.name,
            "overrides": overrides,
            "seed": seed,
            "seconds": seconds,
            "parameters": account(run.model.config).parameters,
            "val_loss": figures["val_loss"],
            "best": min([loss for _, loss in curve], default=None),
            "steps": run.trainer.step,
            "curve": curve,
            "skipped": skipped,
            "tokens": run.trainer.tokens,
            "training_seconds": stepping,
            "wall_seconds": ended - laid,
            "preparing_seconds": laid - begun,
        }
        if recipe.train.objective == "causal" and "test" in getattr(
            corpora.CORPORA.get(recipe.data.corpus), "splits", {}
        ):
            found["test"] = test(run, recipe, data)
    return found


def by_the_clock(run: Run, end: float) -> None:
    """Let the rate fall with the time that passes and end with it: what a machine reaches in so many seconds."""
    part, trainer = run.recipe.train, run.trainer
    first: list[float] = []  # when the warm-up ended

    def rate(step: int) -> float:
        if step <= part.warmup:
            first[:] = [time.perf_counter()]
            return part.lr * (step + 1) / (part.warmup + 1)
        passed = (time.perf_counter() - first[0]) / max(1e-9, end - first[0])
        return learning_rate(part.schedule, round(1000 * min(1.0, passed)), peak=part.lr, steps=1000, floor=part.floor)

    def stop() -> bool:
        if time.perf_counter() >= end:  # this is the last step, and the run is whole
            trainer.plan = replace(trainer.plan, steps=trainer.step + 1)
        return False

    trainer.rate, trainer.stop = rate, stop


def test(run: Run, recipe: Recipe, data: Path | None) -> dict[str, float]:
    """Perplexity on the test split: in blocks, in windows that move on by 32, and of an LSTM reading it in one go."""
    out, choice, loss = {}, run.trainer.choice, run.trainer.loss.plain()
    assert run.ground.tokenizer is not None
    for name, stride in (("blocks", None), ("sliding", 32)):
        ground = held_out(recipe, run.model.config, run.ground.tokenizer, data, stride)
        with choice.computing():
            out[name] = math.exp(evaluate(run.model, ground, loss, choice.device)["val_loss"])
    if isinstance(run.model, Recurrent):
        blocks = held_out(recipe, run.model.config, run.ground.tokenizer, data, None).evaluation
        assert blocks is not None
        with choice.computing():
            out["carried"] = math.exp(carried(run.model, blocks(), loss, choice.device))
    return out


@torch.no_grad()
def carried(model: Recurrent, blocks: Iterable[Prepared], loss: Loss, device: torch.device) -> float:
    """The loss of one reader of the whole split, whose state goes on from block to block."""
    state, total, asked = None, 0.0, 0
    for block in blocks:
        part = block.to(device)
        logits, state = model.read(part.inputs["source"].reshape(1, -1), state=state)
        total += float(loss.of(logits, part.labels.reshape(1, -1)))
        asked += block.asked
    return total / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="shakespeare-cpu")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.smoke:
        given.recipe, given.overrides = (
            "gpt-tiny",
            ["train.steps=2", "model.width=24", "model.heads=3", "model.context=32"],
        )
    rows = [train(given.recipe, given.overrides, seed, given.data) for seed in given.seeds]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    lines = [f"{given.recipe} {' '.join(given.overrides)} on {device}, torch {torch.__version__}", ""]
    lines += [
        "| seed | parameters | validation loss | tokens | training s | wall s | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tested = json.dumps({k: round(v, 2) for k, v in row["test"].items()}) if "test" in row else ""  # type: ignore[attr-defined]
        numbers = (
            f"{row['val_loss']:.4f} | {row['tokens']:,} | {row['training_seconds']:.1f} | {row['wall_seconds']:.1f}"
        )
        lines.append(f"| {row['seed']} | {row['parameters']:,} | {numbers} | {tested} |")
    print("\n".join(lines))
    for row in rows:
        print(json.dumps(row))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
