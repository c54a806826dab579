"""Check that a tokenizer is the one that a model was trained with.

A monoblock folder stores the fingerprint of its tokenizer. A published folder stores none, so its tokenizer is compared
with what the configuration says: the size of the vocabulary, the ids of special tokens and the family of the model.
"""

from collections.abc import Mapping
from typing import Any

from monoblock.errors import InputError
from monoblock.tokenizers.tokenizer import FINGERPRINT_DIGITS, Tokenizer


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


# Published models pad their vocabulary by up to about a thousand rows, small ones by up to a third of it.
MAX_UNUSED_ROWS = 2048
SPECIAL_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Tokenizer kinds of published families, where one kind is usual.
USUAL_FAMILIES = {
    "bpe": "bart bloom falcon gpt2 gpt_neo gpt_neox gptj llama mistral opt phi qwen2 qwen3 roberta",
    "unigram": "albert mt5 t5 xlm-roberta",
    "wordpiece": "bert distilbert electra",
}
USUAL_KINDS = {family: kind for kind, families in USUAL_FAMILIES.items() for family in families.split()}
# Classes in a tokenizer_config.json that do not say for which family the tokenizer was made.
GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
PLAIN_TEXT = "the 3 quick brown foxes jump over the lazy dog"


def check_published_tokenizer(
    tokenizer: Tokenizer, vocab: int, fields: Mapping[str, Any], tokenizer_class: object = None
) -> list[str]:
    """Check the tokenizer of a published model; raise InputError if it cannot be right, return what looks wrong.

    vocab: the size of the model's vocabulary.
    fields: the content of config.json.
    tokenizer_class: that of tokenizer_config.json, such as "BertTokenizer".
    """
    unused, size = vocab - tokenizer.vocab_size, tokenizer.vocab_size
    if unused > MAX_UNUSED_ROWS and unused > vocab // 3:
        raise InputError(
            f"this tokenizer ({tokenizer.kind}) has {size:,} tokens, but the vocabulary of the model has {vocab:,}, "
            f"so it belongs to another model; put the model's own tokenizer into its folder"
        )
    warnings = []
    for name in SPECIAL_ID_FIELDS:
        for token in _token_ids(fields.get(name)):
            if size <= token < vocab:
                warnings.append(f"config.json has {name} {token}, but the tokenizer ends at {size - 1}")
            elif token < size and token not in tokenizer.special_ids:
                text = tokenizer.token(token)
                warnings.append(f"config.json has {name} {token}, which the tokenizer uses for the text {text!r}")
    if unused == 0 and tokenizer_class in GENERIC_CLASSES:  # as in a model exported with its tokenizer
        return warnings
    family = str(fields.get("model_type"))
    usual = USUAL_KINDS.get(family, tokenizer.kind)
    if tokenizer.kind != usual:
        warnings.append(f"a {family} model usually has a {usual} tokenizer, but this one is {tokenizer.kind}")
    if unused == 0:
        return warnings
    pieces = tokenizer.encode(PLAIN_TEXT)
    if tokenizer.unk_id is not None and 2 * pieces.count(tokenizer.unk_id) > len(pieces):
        warnings.append("the tokenizer turns plain English into unknown tokens")
    return warnings


def _token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
