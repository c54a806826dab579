"""Write a model that was made from a stored one, such as a quantized or pruned model, with the files beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from monoblock.errors import FileError
from monoblock.untrusted_files import has_file, safe_join

if TYPE_CHECKING:
    from monoblock.nn.transformer import Transformer
    from monoblock.tokenizers.tokenizer import Tokenizer

COPIED_FILES = ("generation_config.json", "recipe.toml", "labels.json")


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Load the tokenizer of a model folder or GGUF file; return None if there is no tokenizer."""
    from monoblock.tokenizers.tokenizer import Tokenizer

    try:
        return Tokenizer.from_pretrained(model)
    except FileError:
        return None


def save_model_folder(model: Transformer, tokenizer: Tokenizer | None, original: Path, out: Path) -> None:
    """Save a model to a new folder, with the tokenizer, the labels and the recipe of the original folder."""
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    for name in COPIED_FILES:
        if has_file(original, name):
            try:
                shutil.copyfile(safe_join(original, name), out / name)
            except OSError as problem:
                raise FileError(f"{name} cannot be copied to {out}: {problem.strerror}") from None
