"""The model card: README.md of a run folder, with the metrics of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig
from monoblock.errors import FileError
from monoblock.metrics.format import format_metric
from monoblock.model import Transformer
from monoblock.recipes.schema import Recipe, TrainSection
from monoblock.runs.account import account
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData
from monoblock.untrusted_files import write_atomically

CARD_FILE, TABLE_HEADER = "README.md", "| figure | value |\n|---|---|\n"


def render_model_card(
    recipe: Recipe,
    task: Task,
    model: Transformer | Recurrent,
    metrics: dict[str, float],
    data: TaskData,
    custom_optimizer: str | None = None,
) -> str:
    family = model.config.family if isinstance(model.config, ModelConfig) else "recurrent"
    section, tokenizer = recipe.train, data.tokenizer
    rows = _format_rows(metrics)
    figures = f"\n## Measured on the validation split\n\n{TABLE_HEADER}{rows}" if rows else ""
    tokenizer_line = "" if tokenizer is None else f"- tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens\n"
    return (
        f"# {recipe.name}\n\n{recipe.about}\n\n"
        f"- model: {family}, {account(model).parameters:,} parameters\n"
        f"{tokenizer_line}"
        f"- trained on: {recipe.data.corpus} ({data.summary})\n"
        f"- objective: {section.objective}, {section.steps:,} updates of {_format_batch_size(section)}, "
        f"{custom_optimizer or section.optimizer}, lr {section.lr:g}, {section.schedule}, seed {section.seed}\n"
        f"{_format_decoding(recipe, task, model.config.context)}"
        f"{figures}"
    )


def _format_batch_size(section: TrainSection) -> str:
    if section.batch_tokens is None:
        return f"{section.batch * section.accumulate} sequences"
    return f"at most {section.batch_tokens:,} tokens"


def _format_decoding(recipe: Recipe, task: Task, context: int | None) -> str:
    """Return the line about beam search, with its options; "" if the task does not decode by beam search."""
    section = recipe.generate
    if task.decoding != "beam_search":
        return ""
    form = "" if section.length_penalty_form == "length" else f" ({section.length_penalty_form})"
    beam = f"beam {section.num_beams}, length penalty {section.length_penalty:g}{form}"
    search = beam if section.num_beams > 1 else "greedy"
    return f"- targets: {search}, at most {section.new_tokens_within(context)} tokens (generation_config.json)\n"


def _format_rows(metrics: dict[str, Any]) -> str:
    texts = {
        name: format_metric(name, value, ".6g") if isinstance(value, int | float) else value
        for name, value in metrics.items()
    }
    return "".join(f"| {name} | {text} |\n" for name, text in texts.items() if isinstance(text, str))


def add_metrics(folder: Path, corpus: str, metrics: dict[str, Any]) -> None:
    """Add metrics on a corpus to the model card of a run folder, replacing those of the same corpus and split."""
    path = folder / CARD_FILE
    if not path.is_file():
        raise FileError(
            f"{folder} has no model card ({CARD_FILE}) to add metrics to; give --card only for a run folder"
        )
    heading = f"\n## Measured on {corpus}, split {metrics.get('split', 'all')}\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(heading)
    _, next_heading, after = rest.partition("\n## ")
    write_atomically(path, f"{before}{heading}\n{TABLE_HEADER}{_format_rows(metrics)}{next_heading}{after}")
