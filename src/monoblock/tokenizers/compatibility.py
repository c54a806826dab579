"""Check that a tokenizer is the one that a model was trained with."""

from monoblock.errors import InputError
from monoblock.tokenizers.fingerprint import FINGERPRINT_DIGITS
from monoblock.tokenizers.tokenizer import Tokenizer


def check_tokenizer_fits(tokenizer: Tokenizer, vocab: int, fingerprint: str | None = None) -> None:
    """Raise InputError unless a tokenizer fits a model that has a vocabulary of `vocab` tokens.

    The tokenizer must have at most `vocab` tokens and, if `fingerprint` is given, the same fingerprint.
    """
    given = f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:FINGERPRINT_DIGITS]}"
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        expected = f"{vocab:,} tokens, {fingerprint[:FINGERPRINT_DIGITS]}"
        problem = f"this tokenizer ({given}) is not the one the model was trained with ({expected})"
    elif tokenizer.vocab_size > vocab:
        problem = f"this tokenizer ({given}) has more tokens than the model, which has {vocab:,}"
    else:
        return
    raise InputError(f"{problem}; give the tokenizer from the model's own folder")
