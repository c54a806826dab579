"""`monoblock demo`: train a small GPT on the King James Bible, sample from it, count its parameters, examine it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from monoblock.cli.account import print_shares
from monoblock.cli.output import echo, format_count, print_json, print_table, report
from monoblock.cli.verb import json_option, option
from monoblock.errors import ConfigError, FileError

if TYPE_CHECKING:
    from monoblock.nn.masks import Mask

T = TypeVar("T")

ATTENTION_TEXT = "And God said, Let there be light: and there was light."


# One preset per family; toy models of the same structures are built here.
SHOWCASE_PRESETS = (
    "vaswani-base",
    "gpt2",
    "bert-base",
    "t5-small",
    "bart-base",
    "llama3-8b",
    "mixtral-8x7b",
    "gemma2-2b",
    "vit-b16",
)
SHADES = " ░▒▓█"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small GPT on the King James Bible, print a text that it generates, count its parameters, examine it with
    the doctor, and draw its attention. With --families, build a toy model of every architecture instead; with
    --picture, only draw their attention masks.
    """

    out: Path = option("Folder in which the new folder demo-1 (demo-2, …) is created.", Path("runs"), path="folder")
    families: bool = option("Build and check a toy model of every architecture, and draw masks and positions.", False)
    picture: Path | None = option(
        "Draw which tokens attend to which in each kind of model, to a .png, .svg or .pdf file, and exit.", path="file"
    )
    seed: int = option("Seed of the training run.", 1)
    resume: Path | None = option("Continue the demo that was interrupted in this folder.", path="folder", exists=True)
    as_json: bool = json_option()

    def run(self) -> None:
        if self.picture is not None:
            from monoblock.plots.figure import check_plot_path
            from monoblock.plots.masks import save_overview

            check_plot_path(self.picture)
            save_overview(self.picture)
            if self.as_json:
                print_json({"picture": str(self.picture)})
            else:
                echo(f"Saved {self.picture}")
            return
        if self.families and self.resume is not None:
            raise ConfigError("--families trains nothing that --resume could continue; leave one of them out")
        if self.resume is None:
            folder = next(path for number in count(1) if not (path := self.out / f"demo-{number}").exists())
            folder.mkdir(parents=True)
        else:
            folder = self.resume
        if self.families:
            rows = []
            for name in SHOWCASE_PRESETS:
                echo(f"building {name} …", err=True)
                rows.append(check_family(name))
            result = {"families": rows, "pictures": _draw_or_note(save_pictures, folder) or []}
            report(self.as_json, result, _print_families, "account gpt2 --batch 8 --length 1024")
        else:
            result = _train_demo(folder, self.seed, resume=self.resume is not None)
            report(self.as_json, result, _print_report, f"account {folder}")


def _train_demo(folder: Path, seed: int, *, resume: bool) -> dict[str, Any]:
    from monoblock.cli.training import print_continuation, run_training
    from monoblock.parallel.world import SINGLE_PROCESS
    from monoblock.runs.account import account
    from monoblock.runs.diagnose import diagnose
    from monoblock.runs.recipe import read_recipe, recipe_path

    recipe = read_recipe(recipe_path(folder)) if resume else read_recipe("demo", [f"train.seed={seed}"])
    run, last, code = run_training(recipe, folder, None, SINGLE_PROCESS, resume=resume)
    if code is not None:
        print_continuation(folder, last.step, ["demo", "--resume", str(folder)])
        raise click.exceptions.Exit(code)
    costs, findings = account(run.model), diagnose(folder)
    return {
        "folder": str(folder),
        "loss": run.metrics["val_loss"],
        "baselines": run.task_data.baseline_losses,
        "sample": run.sample_text(run.model),
        "parameters": costs.parameters,
        "components": dict(costs.components),
        "doctor": {**findings.to_dict(), "checks": [result.name for result in findings.checks]},
        "picture": _draw_or_note(save_attention_map, folder),
    }


def save_attention_map(folder: Path) -> str:
    """Draw which tokens every head of the model in a folder attends to."""
    from monoblock.runs.inspect import save_attention

    return str(save_attention(folder, ATTENTION_TEXT, folder / "attention.png"))


def _draw_or_note(draw: Callable[[Path], T], folder: Path) -> T | None:
    """Draw pictures into a folder; without matplotlib, print a note and return None."""
    try:
        return draw(folder)
    except FileError as problem:
        echo(f"no picture: {problem}", err=True)
        return None


def _print_report(result: dict[str, Any]) -> None:
    echo("\nLoss on books that were held out, in nats per token:")
    baselines = result["baselines"]
    losses = {"uniform guess": baselines["uniform"], "token frequencies (unigram)": baselines["unigram"]}
    for name, loss in {**losses, "this model": result["loss"]}.items():
        echo(f"  {name:<38}{loss:.3f}")
    echo(f"\nA sample:\n\n{result['sample'].strip()}\n")
    echo(f"{result['parameters']:,} parameters:")
    print_shares("parameters", result["components"])
    doctor = result["doctor"]
    echo(f"\nThe doctor made {len(doctor['checks'])} checks and has {len(doctor['findings']) or 'no'} findings.")
    for finding in doctor["findings"]:
        echo(f"  {finding['check']}: {finding['reason']}")
    if result["picture"] is not None:
        echo(f'\nWhich tokens each head attends to in "{ATTENTION_TEXT}": {result["picture"]}')
    echo(f"\nSaved {result['folder']}")


# -- a toy model of every architecture ---------------------------------------------------------------------------------


def check_family(name: str) -> dict[str, Any]:
    """Count the parameters of a preset, and run a toy model of the same structure with and without a cache."""
    import torch

    from monoblock.accounting.report import account
    from monoblock.config.presets import PRESETS, tiny
    from monoblock.model import Transformer

    with torch.device("meta"):
        built = sum(p.numel() for p in Transformer(PRESETS[name].config).parameters())
    parameters = account(PRESETS[name].config).parameters
    torch.manual_seed(0)
    config: Any = tiny(name)
    model: Any = Transformer(config).eval()
    difference = None
    with torch.no_grad():
        if config.family == "vision":
            output = model(torch.zeros(2, config.input.channels, config.input.image, config.input.image))
        else:
            ids = torch.randint(1, config.input.vocab, (2, 13), generator=torch.Generator().manual_seed(1))
            source = [ids] if config.family == "encoder-decoder" else []
            output = model(*source, ids[:, :11] if source else ids)
        if config.decoder is not None:
            full, cache, logits = model(*source, ids), model.make_cache(2, 13), []
            for step in range(13):
                logits.append(model(*source, ids[:, step : step + 1], cache=cache))
                cache.advance(1)
            difference = float((torch.cat(logits, 1) - full).abs().max())
    return {
        "preset": name,
        "family": config.family,
        "parameters": parameters,
        "equals_built": built == parameters,
        "toy_output": list(output.shape),
        "cached_difference": difference,
    }


def save_pictures(folder: Path) -> list[str]:
    import torch

    from monoblock.config.model import Sinusoid
    from monoblock.nn.masks import causal, everything, global_tokens, random_blocks, window
    from monoblock.nn.positions import sinusoid
    from monoblock.plots.figure import save_figure
    from monoblock.plots.masks import draw_masks, save_overview
    from monoblock.plots.positions import draw_vectors

    masks = [
        ("everything", everything),
        ("causal", causal),
        ("causal & window(8)", causal & window(8)),
        ("window(5) | global", window(5) | global_tokens),
        ("… | random_blocks", window(5) | global_tokens | random_blocks(1, 4)),
    ]
    positions = draw_vectors(sinusoid(torch.arange(128), 64, Sinusoid()), "sinusoidal positions")
    paths = (
        save_overview(folder / "overview.png"),
        save_figure(draw_masks(masks, 32), folder / "masks.png"),
        save_figure(positions, folder / "positions.png"),
    )
    return [str(path) for path in paths]


def _print_families(result: dict[str, Any]) -> None:
    echo("Every family is built from one block. Parameters are counted from the configuration; a toy model is run.\n")
    columns = ("preset", "family", "parameters", "", "as built", "toy output", "cached vs. full")
    rows = []
    for row in result["families"]:
        counts = (row["parameters"], format_count(row["parameters"]), row["equals_built"])
        difference = "" if row["cached_difference"] is None else f"{row['cached_difference']:.1e}"
        rows.append((row["preset"], row["family"], *counts, "×".join(map(str, row["toy_output"])), difference))
    print_table(columns, rows)
    import torch

    from monoblock.config.model import Sinusoid
    from monoblock.nn.masks import causal, window
    from monoblock.nn.positions import sinusoid

    echo("\nAttention masks (one line per query):")
    echo(f"  {'causal':<26}causal & window(4)")
    for left, right in zip(mask_text(causal, 12), mask_text(causal & window(4), 12), strict=True):
        echo(f"  {left}  {right}")
    echo("\nSinusoidal positions (one line per position: sines on the left, fastest first, cosines on the right):")
    matrix = sinusoid(torch.arange(12), 64, Sinusoid(form="halves"))
    levels = ((matrix - matrix.min()) / (matrix.max() - matrix.min()) * (len(SHADES) - 1)).round().long()
    for row in levels.tolist():  # a blank for the lowest value, and a full square for the highest
        echo(f"  {''.join(SHADES[level] for level in row)}")
    for picture in result["pictures"]:
        echo(f"Saved {picture}")


def mask_text(mask: Mask, length: int) -> list[str]:
    """Draw one line for each query, with a full square for every key it may attend to."""
    from monoblock.nn.masks import arange_positions

    allowed = mask.dense(arange_positions(length), arange_positions(length))[0, 0]
    return ["".join("██" if visible else "··" for visible in row) for row in allowed.tolist()]
