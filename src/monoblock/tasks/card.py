"""The model card: README.md of a run folder, written from what was measured, nothing else."""

from __future__ import annotations

from typing import Any

from monoblock.accounting.report import account
from monoblock.config import ModelConfig, RecurrentConfig


def card(recipe: Any, config: ModelConfig | RecurrentConfig, measured: dict[str, float], ground: Any) -> str:
    family = config.family if isinstance(config, ModelConfig) else "recurrent"
    part = recipe.train
    rows = "".join(f"| {name} | {value:.6g} |\n" for name, value in measured.items())
    figures = f"\n## Measured on the validation split\n\n| figure | value |\n|---|---|\n{rows}" if rows else ""
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
        f"- objective: {part.objective}, {part.steps:,} updates of {part.batch * part.accumulate} sequences, "
        f"{part.optimizer}, lr {part.lr:g}, {part.schedule}, seed {part.seed}\n"
        f"{figures}"
    )
