"""`monoblock finetune MODEL DATA [section.key=value …]`: fine-tune a model with a recipe built for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from monoblock.cli.output import echo
from monoblock.cli.training_run import print_result, print_resume_command, run_training
from monoblock.cli.verb import argument, data_folder_option, json_option, option, resolve_data_folder

# Option -> key of the recipe.
RECIPE_KEYS = {
    "epochs": "train.epochs",
    "lr": "train.lr",
    "rank": "lora.rank",
    "alpha": "lora.alpha",
    "targets": "lora.targets",
    "bits": "lora.bits",
    "freeze": "train.freeze_layers",
    "layer_decay": "train.layer_decay",
}
WITH_LORA = {"needs": ("lora",)}
DEFAULT_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune MODEL (a run folder, a Hugging Face folder or a GGUF file) on DATA (a corpus from `monoblock ls
    corpora`, a file or a folder).

    The kind of data decides the task. Labelled texts train a classifier, tagged words train a tagger, and pairs train a
    translator. Conversations train a chat model, with the loss computed on its replies only. Plain text trains a causal
    or a masked language model, whichever MODEL is.

    A recipe is built for MODEL and DATA. Arguments such as train.batch=8 change it; --dry-run prints all its keys.
    """

    model: str = argument()
    data: str = argument()
    overrides: tuple[str, ...] = argument((), metavar="[section.key=value …]")
    objective: str | None = option(
        "The task, a name from `monoblock ls tasks`.  [default: chosen by the data and the model]"
    )
    epochs: float | None = option("Passes over the data.")
    lr: float | None = option("Peak learning rate.")
    lora: bool = option("Train low-rank adapters (LoRA) and freeze all other weights.", False)
    rank: int | None = option(f"rank of the adapters.  [default: {DEFAULT_RANK}]", least=1, **WITH_LORA)
    alpha: float | None = option("adapters are scaled by alpha / rank.  [default: 16]", **WITH_LORA)
    targets: str | None = option(
        "projections that get an adapter, separated by commas, or all.  [default: query,value]", **WITH_LORA
    )
    bits: Literal["8", "4"] | None = option("quantize the frozen weights to N bits.", **WITH_LORA)
    freeze: int | None = option("Freeze the embedding and the first N layers.", least=0)
    layer_decay: float | None = option(
        "Learning rate of each layer as a fraction of that of the layer above it, such as 0.9."
    )
    out: Path | None = option("Folder to write.  [default: runs/<data>-<model>]")
    folder: Path | None = data_folder_option()
    resume: bool = option("Resume the run in --out from its newest checkpoint.", False)
    dry_run: bool = option("Print the recipe as TOML, which `monoblock train` can read, and exit.", False)
    as_json: bool = json_option()

    def run(self) -> int | None:
        from monoblock.runs.finetune import build_finetuning_recipe

        overrides = [*self._recipe_overrides(), *self.overrides]
        data = resolve_data_folder(self.folder)
        recipe = build_finetuning_recipe(
            self.model, self.data, objective=self.objective, folder=data, overrides=overrides
        )
        if self.dry_run:
            echo(recipe.to_toml(), nl=False)
            return None
        from monoblock.parallel.world import SINGLE_PROCESS

        folder = self.out if self.out is not None else Path("runs") / recipe.name
        options = {"resume": self.resume, "tensorboard": False}
        run, last, interrupted_code = run_training(recipe, folder, data, SINGLE_PROCESS, options)
        if last.interrupted:
            objective = ["--objective", self.objective] if self.objective else []
            words = ["finetune", self.model, self.data, *overrides, *objective]
            print_resume_command(folder, last.step, words, self.folder)
            return interrupted_code
        print_result(run, self.as_json)
        return None

    def _recipe_overrides(self) -> list[str]:
        """Translate the options into overrides of the recipe: `section.key=value`."""
        given = {name: value for name in RECIPE_KEYS if (value := getattr(self, name)) is not None}
        if self.lora:
            given = {"rank": DEFAULT_RANK} | given
        return [f"{key}={given[name]}" for name, key in RECIPE_KEYS.items() if name in given]
