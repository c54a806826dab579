"""The special tokens that a tokenizer must have for each objective."""

from __future__ import annotations

from pathlib import Path

from monoblock.data.corpora.load import Corpus
from monoblock.errors import FileError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.tags import script_tags
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds

# Objective -> special tokens of which a tokenizer must have at least one.
REQUIRED_TOKENS = {
    "masked": ("mask",),
    "spans": ("sentinels",),
    "pairs": ("bos", "pad"),  # the start of a target; T5 starts with padding
    "classify": ("cls",),
    "answers": ("cls",),
}


def check_required_tokens(tokenizer: Tokenizer, objective: str, folder: Path) -> Tokenizer:
    """Return the tokenizer if it has the special tokens that an objective requires, else raise."""
    roles = REQUIRED_TOKENS.get(objective, ())
    present = {*tokenizer.special_tokens_map, *(["sentinels"] if tokenizer.sentinel_ids else [])}
    if roles and present.isdisjoint(roles):
        raise FileError(
            f"the tokenizer in {folder} has no {' or '.join(roles)} token, which train.objective={objective!r} "
            f"needs; name a folder with another tokenizer, or none to train one"
        )
    return tokenizer


def default_special_tokens(recipe: Recipe, train: Corpus) -> list[str]:
    """Return the special tokens of a tokenizer that is newly trained for a recipe."""
    objective = recipe.train.objective
    if objective == "causal":
        return ["eos"] if len(train) > 1 else []  # a single text never ends
    tokens = {
        "masked": ["pad", "cls", "sep", "mask"],
        "spans": ["pad", "eos", "sentinels=100"],
        "pairs": ["pad", "bos", "eos", *_tag_tokens(recipe, train)],
        "classify": ["pad", "cls", "sep"],
        "label": ["pad", "cls", "sep", "mask"],
        "answers": ["pad", "cls", "sep", "mask"],
        "chat": ["pad", "eos"],
    }
    return tokens[objective]


def _tag_tokens(recipe: Recipe, train: Corpus) -> list[str]:
    """Return the tags in tokenizer.tags and, with data.tag="script", a tag for each script of the targets."""
    if recipe.data.tag == "none":
        return [*recipe.tokenizer.tags]
    return [*recipe.tokenizer.tags, *script_tags(row.target for row in train.rows)]


def special_token_ids(tokenizer: Tokenizer) -> SpecialTokenIds:
    """Return the ids of the special tokens that collate functions need."""
    return SpecialTokenIds(
        pad_id=tokenizer.pad_id or 0,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        mask_id=tokenizer.mask_id,
        sentinel_ids=tuple(tokenizer.sentinel_ids),
        unmaskable_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
    )
