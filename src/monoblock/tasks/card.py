"""The model card: README.md of a run folder, written from what was measured, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monoblock.accounting.report import account
from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.errors import FileError
from monoblock.tasks.folder import write

CARD, HEAD = "README.md", "| figure | value |\n|---|---|\n"


def card(recipe: Any, config: ModelConfig | RecurrentConfig, measured: dict[str, float], ground: Any) -> str:
    family = config.family if isinstance(config, ModelConfig) else "recurrent"
    part = recipe.train
    rows = _rows(measured)
    figures = f"\n## Measured on the validation split\n\n{HEAD}{rows}" if rows else ""
    tokenizer = (
        ""
        if ground.tokenizer is None
        else f"- tokenizer: {ground.tokenizer.kind}, {ground.tokenizer.vocab_size:,} tokens\n"
    )
    return (
        f"# {recipe.name}\n\n{recipe.about}\n\n"
        f"- model: {family}, {account(config).parameters:,} parameters\n"
        f"{tokenizer}"
        f"- trained on: {recipe.data.corpus} ({ground.said})\n"
        f"- objective: {part.objective}, {part.steps:,} updates of {_batch(part)}, "
        f"{part.optimizer}, lr {part.lr:g}, {part.schedule}, seed {part.seed}\n"
        f"{_search(recipe)}"
        f"{figures}"
    )


def _batch(part: Any) -> str:
    if part.tokens is None:
        return f"{part.batch * part.accumulate} sequences"
    return f"at most {part.tokens * part.accumulate:,} tokens"


def _search(recipe: Any) -> str:
    """How targets are looked for unless somebody says otherwise."""
    part = recipe.generate
    if recipe.train.objective != "pairs":
        return ""
    found = f"beam {part.num_beams}, length penalty {part.length_penalty:g}" if part.num_beams > 1 else "greedy"
    return f"- targets: {found}, at most {part.max_new_tokens} tokens (generation_config.json)\n"


def _rows(figures: dict[str, Any]) -> str:
    shown = {name: f"{value:.6g}" if isinstance(value, int | float) else value for name, value in figures.items()}
    return "".join(f"| {name} | {value} |\n" for name, value in shown.items() if isinstance(value, str))


def add_figures(folder: Path, corpus: str, figures: dict[str, Any]) -> None:
    """Add what was measured on a corpus to a model card, in place of what was measured on it before."""
    path = folder / CARD
    if not path.is_file():
        raise FileError(f"{folder} has no model card; --card is for the folder of a run")
    head = f"\n## Measured on {corpus}, split {figures.get('split', 'all')}\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(head)
    _, other, after = rest.partition("\n## ")
    write(path, f"{before}{head}\n{HEAD}{_rows(figures)}{other}{after}")
