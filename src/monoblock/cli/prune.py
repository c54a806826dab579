"""`monoblock prune MODEL DATA --remove N|--keep F --out DIR`: remove the attention heads that matter least."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.model_options import device_option, resolve_device
from monoblock.cli._shared.number_types import NumberRange
from monoblock.cli._shared.output import echo, json_option, print_json, print_table, suggest_next
from monoblock.cli._shared.progress import ProgressBar
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.runs.inspect.prune import PruningResult

SHOWN_LAYERS = 24


@click.command(
    name="prune",
    help="Rank the attention heads of MODEL by their importance for its loss on DATA, remove the least important ones "
    "together with their weights, and write the smaller model. DATA is a corpus from `monoblock ls corpora`, a file or "
    "a folder. Every layer keeps at least one head. Heads that share keys and values are removed together. Heads are "
    "removed in several rounds, and their importance is measured anew in each, since a head may be needed only once "
    "another one is gone.",
)
@click.argument("model")
@click.argument("data", metavar="DATA")
@click.option("--remove", type=click.IntRange(min=1), help="Remove N heads.")
@click.option("--keep", type=NumberRange(0, 1), metavar="F", help="Keep this fraction of the heads, such as 0.5.")
@click.option(
    "--layers",
    default="*",
    show_default=True,
    help="Prune the layers that match this pattern, such as 'encoder.*' or '*.cross'.",
)
@click.option(
    "--method",
    type=click.Choice(["gradient", "ablation"]),
    default="gradient",
    show_default=True,
    help="Importance of a head: by the gradient, or by the loss without it (one pass for each head).",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Remove the heads in N rounds; 1 ranks all heads once.  [default: a head in each round, in at most 16 rounds]",
)
@click.option(
    "--batches", type=click.IntRange(min=1), default=16, show_default=True, help="Rank on N training batches."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Model folder to write.")
@click.option("--data", "folder", type=folder_type, help=FOLDER_HELP)
@device_option
@json_option
def command(
    model: str,
    data: str,
    remove: int | None,
    keep: float | None,
    layers: str,
    method: Any,
    rounds: int | None,
    batches: int,
    out: Path,
    folder: Path | None,
    device: str | None,
    as_json: bool,
) -> None:
    if (remove is None) == (keep is None):
        raise ConfigError("give either --remove N or --keep F, as in --keep 0.5")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"the folder {out} is not empty; give another folder with --out")
    from monoblock.interop.hub import resolve_model_path
    from monoblock.runs.inspect.prune import prune_model

    path = resolve_model_path(model)
    with ProgressBar("passes") as progress:
        result = prune_model(
            path,
            data,
            remove=remove,
            keep=keep,
            layers=layers,
            method=method,
            rounds=rounds,
            num_batches=batches,
            device=resolve_device(device, "fp32")[0],
            data_folder=resolve_data_folder(folder),
            progress=progress,
        )
    result.model.cpu().save_pretrained(out)
    if as_json:
        print_json(to_json(result, out))
    else:
        print_report(result, out)
    suggest_next(f"finetune {shlex.quote(str(out))} {shlex.quote(data)} --out DIR")


def to_json(result: PruningResult, out: Path) -> dict[str, Any]:
    return {
        "folder": str(out),
        "removed": result.removed,
        "rounds": result.num_rounds,
        "heads": result.num_heads,
        "parameters": result.parameters,
        "accounted_parameters": result.accounted_parameters,
        "metrics": result.metrics,
        "max_logit_difference": result.max_logit_difference,
        "ranking": [
            {"layer": group.layer, "heads": list(group.heads), "importance": round(group.importance, 6)}
            for group in result.ranking
        ],
    }


def print_report(result: PruningResult, out: Path) -> None:
    rows = [(layer, ", ".join(map(str, heads))) for layer, heads in sorted(result.removed.items())]
    print_table(("layer", "heads removed"), rows[:SHOWN_LAYERS])
    if len(rows) > SHOWN_LAYERS:
        echo(f"… and of {len(rows) - SHOWN_LAYERS} more layers")
    echo()
    table: list[tuple[object, ...]] = [
        ("heads", result.num_heads["before"], result.num_heads["after"]),
        ("parameters", result.parameters["before"], result.parameters["after"]),
    ]
    before, after = result.metrics["before"], result.metrics["after"]
    table += [(f"validation {name}", before[name], after[name]) for name in before]
    print_table(("", "before", "after"), table)
    echo(
        f"The pruned model and the original with these heads set to zero differ by at most "
        f"{result.max_logit_difference:.1e} in a logit."
    )
    echo(f"Saved {out}")
