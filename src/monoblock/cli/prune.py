"""`monoblock prune MODEL DATA --remove N|--keep F --out DIR`: remove the attention heads that matter least."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from monoblock.cli.model_options import device_option, resolve_device
from monoblock.cli.output import ProgressBar, echo, print_table, report
from monoblock.cli.verb import (
    REQUIRED,
    argument,
    check_empty,
    data_folder_option,
    json_option,
    option,
    resolve_data_folder,
)
from monoblock.errors import ConfigError

SHOWN_LAYERS = 24


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Rank the attention heads of MODEL by their importance for its loss on DATA, remove the least important ones
    together with their weights, and write the smaller model. DATA is a corpus from `monoblock ls corpora`, a file or a
    folder. Every layer keeps at least one head. Heads that share keys and values are removed together. Heads are
    removed in several rounds, and their importance is measured anew in each, since a head may be needed only once
    another one is gone.
    """

    model: str = argument()
    data: str = argument()
    remove: int | None = option("Remove N heads.", least=1)
    keep: float | None = option("Keep this fraction of the heads, such as 0.5.", least=0, most=1, metavar="F")
    layers: str = option("Prune the layers that match this pattern, such as 'encoder.*' or '*.cross'.", "*")
    method: Literal["gradient", "ablation"] = option(
        "Importance of a head: by the gradient, or by the loss without it (one pass for each head).", "gradient"
    )
    rounds: int | None = option(
        "Remove the heads in N rounds; 1 ranks all heads once.  [default: a head in each round, in at most 16 rounds]",
        least=1,
    )
    batches: int = option("Rank on N training batches.", 16, least=1)
    out: Path = option("Model folder to write.", REQUIRED, path="folder")
    folder: Path | None = data_folder_option()
    device: str | None = device_option()
    as_json: bool = json_option()

    def run(self) -> None:
        if (self.remove is None) == (self.keep is None):
            raise ConfigError("give either --remove N or --keep F, as in --keep 0.5")
        check_empty(self.out)
        from monoblock.interop.model_folder import resolve_model_path
        from monoblock.runs.inspect.prune import prune_model

        with ProgressBar("passes") as progress:
            result = prune_model(
                resolve_model_path(self.model),
                self.data,
                remove=self.remove,
                keep=self.keep,
                layers=self.layers,
                method=self.method,
                rounds=self.rounds,
                num_batches=self.batches,
                device=resolve_device(self.device, "fp32")[0],
                data_folder=resolve_data_folder(self.folder),
                progress=progress,
            )
        result.model.cpu().save_pretrained(self.out)
        summary = {
            "folder": str(self.out),
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
        next_command = f"finetune {shlex.quote(str(self.out))} {shlex.quote(self.data)} --out DIR"
        report(self.as_json, summary, print_report, next_command)


def print_report(result: dict[str, Any]) -> None:
    rows = [(layer, ", ".join(map(str, heads))) for layer, heads in sorted(result["removed"].items())]
    print_table(("layer", "heads removed"), rows[:SHOWN_LAYERS])
    if len(rows) > SHOWN_LAYERS:
        echo(f"… and of {len(rows) - SHOWN_LAYERS} more layers")
    echo()
    sizes = {name: result[name] for name in ("heads", "parameters")}
    before, after = result["metrics"]["before"], result["metrics"]["after"]
    losses = {f"validation {name}": {"before": before[name], "after": after[name]} for name in before}
    print_table(("", "before", "after"), [(name, *pair.values()) for name, pair in (sizes | losses).items()])
    echo(
        "The pruned model and the original with these heads set to zero differ by at most "
        f"{result['max_logit_difference']:.1e} in a logit."
    )
    echo(f"Saved {result['folder']}")
