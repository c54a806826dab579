"""The special tokens that a task needs from a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from monoblock.errors import FileError
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds


def check_required_tokens(tokenizer: Tokenizer, roles: Sequence[str], objective: str, folder: Path) -> Tokenizer:
    """Return the tokenizer if it has a special token for at least one of these roles, else raise FileError."""
    present = {*tokenizer.special_tokens_map, *(["sentinels"] if tokenizer.sentinel_ids else [])}
    if roles and present.isdisjoint(roles):
        raise FileError(
            f"the tokenizer in {folder} has no {' or '.join(roles)} token, which train.objective={objective!r} needs; "
            "give the folder of another tokenizer, or leave tokenizer.folder unset to train a new one"
        )
    return tokenizer


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
