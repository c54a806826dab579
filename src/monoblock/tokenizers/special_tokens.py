"""Special tokens, such as <pad>, and their roles, such as "pad".

Each training objective needs some roles (ROLES_BY_OBJECTIVE), and each role has usual spellings (ROLE_SPELLINGS).
`resolve_special_tokens` chooses the special tokens of a tokenizer that we train; `assign_roles` in tokenizer_json.py
finds the token of each role in a published tokenizer.

In a tokenizer that we train, special tokens have the highest ids and are not in the vocabulary of its model, so that no
text is ever segmented into a special token. Only the unknown token is in this vocabulary, with the id 0, because the
`tokenizers` library looks it up there.
"""

import re
from collections.abc import Iterable, Sequence

from monoblock.errors import ConfigError, did_you_mean

# The spellings of each role: we use the first, and the others occur in published tokenizers.
ROLE_SPELLINGS = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<s>", "[BOS]", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "[EOS]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "cls": ("<cls>", "[CLS]"),
    "sep": ("<sep>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
}

# The roles that each objective needs.
ROLES_BY_OBJECTIVE = {
    "causal_lm": ("pad", "bos", "eos"),
    "seq2seq": ("pad", "bos", "eos"),
    "masked_lm": ("pad", "cls", "sep", "mask"),
    "span_corruption": ("pad", "eos", "sentinels"),
    "none": (),
}

SENTINEL_FORMAT = "<extra_id_{}>"  # T5's spelling (Raffel et al. 2020)
DEFAULT_SENTINELS = 100  # as in T5
MAX_SENTINELS = 10_000
# What an unknown token is decoded to, as in SentencePiece; no token contains it, so it is encoded as unknown again.
UNKNOWN_CHARACTER = "⁇"

# ASCII only, because byte-level decoding would interpret other characters as bytes.
_TAG_PATTERN = re.compile(r"(?:<[!-~]{1,62}>|\[[!-~]{1,62}\])")
_SENTINEL_PATTERN = re.compile(r"<extra_id_(\d{1,5})>")


def resolve_special_tokens(specials: str | Sequence[str]) -> list[str]:
    """Return the special tokens for `specials`, an objective in ROLES_BY_OBJECTIVE or a list.

    Items of a list are roles such as "pad", a number of sentinels such as "sentinels=20", and tags such as "<2hi>".
    """
    if isinstance(specials, str):
        if specials not in ROLES_BY_OBJECTIVE:
            listed = ", ".join(ROLES_BY_OBJECTIVE)
            raise ConfigError(
                f"specials={specials!r} is none of {listed}{did_you_mean(specials, ROLES_BY_OBJECTIVE)}; "
                f"write one of them, or a list of roles"
            )
        specials = ROLES_BY_OBJECTIVE[specials]
    return list(dict.fromkeys(spelling for word in specials for spelling in _spellings(word)))


def _spellings(word: str) -> list[str]:
    if word in ROLE_SPELLINGS:
        return [ROLE_SPELLINGS[word][0]]
    name, equals, number = word.partition("=")
    if name == "sentinels":
        if equals and not (number.isascii() and number.isdigit() and 0 < int(number[:9]) <= MAX_SENTINELS):
            raise ConfigError(f"{word!r} is not a number of sentinels; write sentinels=1 to sentinels={MAX_SENTINELS}")
        return [SENTINEL_FORMAT.format(index) for index in range(int(number) if equals else DEFAULT_SENTINELS)]
    if not _TAG_PATTERN.fullmatch(word):
        hint = did_you_mean(word, [*ROLE_SPELLINGS, "sentinels"])
        raise ConfigError(
            f"{word!r} is not a special token{hint}; write a role such as pad, or a tag as in <2hi> or [NAME]"
        )
    return [word]


def find_sentinels(tokens: Iterable[str]) -> list[str]:
    """Return the sentinels among the tokens, <extra_id_0>, <extra_id_1> and so on, ordered by number."""
    sentinels = {int(match[1]): token for token in tokens if (match := _SENTINEL_PATTERN.fullmatch(token))}
    return [sentinels[number] for number in sorted(sentinels)]
