"""Training data for masked language modelling: blocks of running text, or one document per row (documents.py)."""

from __future__ import annotations

from functools import partial

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import CorpusKind
from monoblock.recipes.schema import Recipe
from monoblock.tasks.language_modeling.data import build_denoising_data
from monoblock.tasks.masked_lm.documents import build_masked_document_data
from monoblock.tasks.task_data import TaskData
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import collate_masked_lm

MASKED_LM_CORPUS_KINDS: tuple[CorpusKind, ...] = ("text", "labelled", "tagged")  # labels are ignored


def build_masked_lm_data(
    recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None
) -> TaskData:
    """Build training data with masked tokens to predict (Devlin et al. 2019); `data.packing`: blocks or documents."""
    if recipe.data.packing == "documents":
        return build_masked_document_data(recipe, context, tokenizer, train, valid)
    collate = partial(collate_masked_lm, rate=recipe.train.mask_rate)
    return build_denoising_data(recipe, context, tokenizer, train, valid, collate=collate)
