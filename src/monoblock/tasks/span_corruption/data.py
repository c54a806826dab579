"""Training data for span corruption: blocks of running text whose spans are replaced by sentinels."""

from __future__ import annotations

from functools import partial

from monoblock.data.corpora.load import Corpus
from monoblock.recipes.schema import Recipe
from monoblock.tasks.language_modeling.data import build_denoising_data
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import TaskData
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import collate_span_corruption


def build_span_corruption_data(
    recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None
) -> TaskData:
    """Build training data with spans to restore (Raffel et al. 2020); as in T5, a target starts with padding."""
    start = special_token_ids(tokenizer).pad_id
    collate = partial(collate_span_corruption, start=start, rate=recipe.train.mask_rate)
    return build_denoising_data(recipe, context, tokenizer, train, valid, collate=collate)
