"""The run folder: what lies in it from the first step on, and whether its tokenizer is its model's.

config.json says which tokenizer the model was trained with, by its fingerprint beside the configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.config import EmbeddingConfig, ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.folder import CONFIG, FORMAT, read_config
from monoblock.interop.labels import LABELS
from monoblock.schema import to_dict
from monoblock.tasks import defaults as generation
from monoblock.tasks.recipe import Recipe
from monoblock.tokenizers.identity import check_belongs
from monoblock.tokenizers.tokenizer import Tokenizer

RECIPE, CHECKPOINTS, GENERATION = "recipe.toml", "checkpoints", "generation_config.json"
FINGERPRINT = "tokenizer"  # its key in config.json


def check_folder(folder: Path, resume: bool) -> None:
    """Raise unless a run can begin, or go on, in this folder."""
    if resume and not (folder / RECIPE).is_file():
        raise FileError(f"there is nothing to resume in {folder}; leave out --resume to start a run there")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already; go on with --resume, or name another with --out")


def begin(
    folder: Path,
    recipe: Recipe,
    config: ModelConfig | RecurrentConfig,
    tokenizer: Tokenizer | None,
    labels: list[str],
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """The files a run starts with, so that even an interrupted one can be understood.

    `tokens` are special ones that the model began with, where they are others than the tokenizer says.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError(f"{folder} cannot be made: {problem.strerror}") from None
    write(folder / RECIPE, recipe.to_toml())
    write(folder / CONFIG, described(config, tokenizer))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    defaults = generation.described(recipe.generate, recipe.train.objective, tokenizer)
    write(folder / GENERATION, json.dumps({**defaults, **(tokens or {})}, indent=2) + "\n")
    if labels:
        write(folder / LABELS, json.dumps(labels, indent=2, ensure_ascii=False) + "\n")


def write(path: Path, text: str) -> None:
    """Beside first, then in place."""
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror}") from None


# -- model and tokenizer ------------------------------------------------------------------------------------------


def described(config: ModelConfig | RecurrentConfig, tokenizer: Tokenizer | None) -> str:
    """The text of config.json."""
    kind = "recurrent" if isinstance(config, RecurrentConfig) else "model"
    data: dict[str, Any] = {"format": FORMAT, kind: to_dict(config)}
    if tokenizer is not None:
        data[FINGERPRINT] = tokenizer.fingerprint
    return json.dumps(data, indent=2) + "\n"


def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer of a run folder; one that is not its model's is refused."""
    tokenizer = Tokenizer.from_pretrained(folder)
    config = read_config(folder)  # checks the size and form of the file
    stored = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get(FINGERPRINT)
    try:
        check_belongs(tokenizer, vocab_of(config), stored if isinstance(stored, str) else None)
    except InputError as problem:
        raise FileError(f"{folder}: {problem}") from None
    return tokenizer


def vocab_of(config: ModelConfig | RecurrentConfig) -> int:
    """How many tokens the model knows, on the side that knows fewer."""
    if isinstance(config, RecurrentConfig):
        return min(config.vocab, config.target_vocab or config.vocab)
    return min((part.vocab for part in config.inputs.values() if isinstance(part, EmbeddingConfig)), default=0)
