"""What a recipe stands on: its tokenizer, its training batches and its evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.data.batches import Batch, FixedPlan, Plan
from monoblock.data.corpora import Corpus
from monoblock.errors import FileError
from monoblock.tasks.folder import tokenizer_in
from monoblock.tasks.recipe import Recipe
from monoblock.tasks.tags import script_tags
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.corruption import IGNORE
from monoblock.training.objectives import Prepared, Special

EVALUATION_SEED = 0  # what is hidden in an evaluation, and its order, are the same in every run


@dataclass(frozen=True)
class Ground:
    tokenizer: Tokenizer | None
    special: Special
    plan: Plan
    make: Callable[[Batch], Prepared]
    evaluation: Callable[[], Iterable[Prepared]] | None
    sizes: dict[str, Any] = field(default_factory=dict)  # what the data say about the model: classes, image …
    labels: list[str] = field(default_factory=list)
    said: str = ""  # how much there is, for the user
    bytes_per_token: float | None = None  # of the validation text
    baselines: dict[str, float] = field(default_factory=dict)  # what a model that knows little would lose
    held: list[Any] = field(default_factory=list)  # validation rows that a model card can tell figures of
    unit: str = "tokens"  # what is counted when speed is told
    places: bool = False  # answers: what is chosen from are the places of a row
    content: dict[str, str] = field(default_factory=dict)  # split: SHA-256 of what was read


# -- tokenizer ----------------------------------------------------------------------------------------------------


def find_tokenizer(recipe: Recipe, train: Corpus, folder: Path | None, begun: Tokenizer | None = None) -> Tokenizer:
    """The run folder's own, the one the model was `begun` with or the recipe names, or one trained on the data."""
    if folder is not None and (folder / "tokenizer.json").is_file():
        return _suited(tokenizer_in(folder), recipe.train.objective, folder)
    if begun is not None:
        return _suited(begun, recipe.train.objective, Path(recipe.model["folder"]))
    if recipe.tokenizer.folder:
        place = Path(recipe.tokenizer.folder)
        if not (place / "tokenizer.json").is_file():
            raise FileError(f"tokenizer.folder={place} has no tokenizer.json")
        return _suited(Tokenizer.from_pretrained(place), recipe.train.objective, place)
    part = recipe.tokenizer
    return Tokenizer.train(
        part.kind,
        train.texts(),
        part.vocab,
        marker=part.marker,
        specials=_specials(recipe, train),
        lowercase=part.lowercase,
    )


# Objective -> the special tokens of which it needs one.
CANNOT_LACK = {
    "masked": ("mask",),
    "spans": ("sentinels",),
    "pairs": ("bos", "pad"),  # to start a target with; T5 starts with padding
    "classify": ("cls",),
    "answers": ("cls",),
}


def _suited(tokenizer: Tokenizer, objective: str, place: Path) -> Tokenizer:
    """The tokenizer, if it has the special tokens that the objective needs."""
    roles = CANNOT_LACK.get(objective, ())
    has = {*tokenizer.roles, *(["sentinels"] if tokenizer.sentinel_ids else [])}
    if roles and has.isdisjoint(roles):
        raise FileError(
            f"the tokenizer in {place} has no {' or '.join(roles)}, which train.objective={objective!r} needs; "
            f"take another folder, or none, to train one"
        )
    return tokenizer


def _specials(recipe: Recipe, train: Corpus) -> list[str]:
    """The special tokens an objective needs; one endless text needs none."""
    objective = recipe.train.objective
    if objective == "causal":
        return ["eos"] if len(train) > 1 else []
    needs = {
        "masked": ["pad", "cls", "sep", "mask"],
        "spans": ["pad", "eos", "sentinels=100"],
        "pairs": ["pad", "bos", "eos", *_tags(recipe, train)],
        "classify": ["pad", "cls", "sep"],
        "label": ["pad", "cls", "sep", "mask"],
        "answers": ["pad", "cls", "sep", "mask"],
        "chat": ["pad", "eos"],
    }
    return needs[objective]


def _tags(recipe: Recipe, train: Corpus) -> list[str]:
    """The tags a recipe names, and the scripts it asks for."""
    if recipe.data.tag == "none":
        return [*recipe.tokenizer.tags]
    return [*recipe.tokenizer.tags, *script_tags(row.target for row in train.rows)]


def special_of(tokenizer: Tokenizer) -> Special:
    return Special(
        pad=tokenizer.pad_id or 0,
        bos=tokenizer.bos_id,
        eos=tokenizer.eos_id,
        mask=tokenizer.mask_id,
        sentinels=tuple(tokenizer.sentinel_ids),
        never_masked=tokenizer.special_ids,
        vocab=tokenizer.vocab_size,
    )


def per_update(recipe: Recipe) -> int:
    return recipe.train.batch * recipe.train.accumulate


def fixed_plan(recipe: Recipe, count: int) -> FixedPlan:
    size = per_update(recipe)
    return FixedPlan(count, min(size, count), recipe.train.seed, last="drop")


# -- evaluation ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: nn.Module, ground: Ground, loss: Any, device: torch.device, *, batches: int = 0
) -> dict[str, float]:
    """Loss over the validation split, every asked place counted once; accuracy too."""
    total, asked, right = 0.0, 0, 0
    assert ground.evaluation is not None
    loss = replace(loss, places=ground.places)
    for number, batch in enumerate(ground.evaluation()):
        if batches and number >= batches:
            break
        part = batch.to(device)
        logits = loss.logits(model, part.inputs)
        total += float(loss.of(logits, part.labels))
        asked += batch.asked
        right += int(((logits.argmax(-1) == part.labels) & (part.labels != IGNORE)).sum())
    mean = total / max(asked, 1)
    found = {"val_loss": mean, "val_accuracy": right / max(asked, 1), "val_tokens": asked}
    if ground.bytes_per_token is not None:
        found["val_bits_per_byte"] = mean / math.log(2) / ground.bytes_per_token
    return found
