"""Causal language modeling: predict the next token of running text."""

from __future__ import annotations

from monoblock.data.corpora.load import Corpus
from monoblock.recipes.schema import Recipe
from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults


def _special_tokens(recipe: Recipe, train: Corpus) -> list[str]:
    return ["eos"] if len(train) > 1 else []  # a single text needs no end token


CAUSAL_LM = Task(
    name="causal_lm",
    about="predict the next token of running text",
    build_data=ImportedFunction("language_modeling.data", "build_causal_lm_data"),
    corpus_kinds=("text", "tokens"),
    special_tokens=_special_tokens,
    evaluate=ImportedFunction("language_modeling.evaluate", "evaluate_language_model"),
    metrics=("loss", "perplexity", "bits_per_byte"),
    decoding="sampling",
    verb="generate",
    supports_subword_sampling=True,
    defaults=TrainingDefaults(1, 8, 512),
)
