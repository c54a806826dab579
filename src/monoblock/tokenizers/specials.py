"""Special tokens: which a model needs, how each is spelled, and which role a foreign file gives to which.

They take the last ids, outside the vocabulary of pieces, so that no text is ever cut into one of them. Only the
unknown token lies inside it, at 0: the library looks it up there.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monoblock.errors import ConfigError, did_you_mean

# Role -> the spellings it goes by. The first is ours, the others are met in published files.
ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<s>", "[BOS]", "<bos>", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "[EOS]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "cls": ("<cls>", "[CLS]"),
    "sep": ("<sep>", "[SEP]"),
    "mask": ("<mask>", "[MASK]"),
}

# Objective -> the roles it needs.
NEEDS = {
    "causal": ("pad", "bos", "eos"),
    "seq2seq": ("pad", "bos", "eos"),
    "masked": ("pad", "cls", "sep", "mask"),
    "spans": ("pad", "eos", "sentinels"),
    "none": (),
}

SENTINEL = "<extra_id_{}>"  # T5's spelling (Raffel et al. 2020)
SENTINELS = 100  # as many as T5 has, where no number is given
MOST_SENTINELS = 10_000
UNKNOWN = "⁇"  # what an unknown token is decoded to; never a piece itself, so that it is unknown again (SentencePiece)

_FORM = re.compile(r"(?:<[!-~]{1,62}>|\[[!-~]{1,62}\])")  # ASCII: byte-level decoding would read other letters as bytes
_SENTINEL = re.compile(r"<extra_id_(\d{1,5})>")


def resolve(specials: str | Sequence[str]) -> list[str]:
    """The spellings for a row of NEEDS, or for a list of roles, "sentinels", "sentinels=20" and tags such as <2hi>."""
    if isinstance(specials, str):
        if specials not in NEEDS:
            listed = ", ".join(NEEDS)
            raise ConfigError(
                f"specials={specials!r} is none of {listed}{did_you_mean(specials, NEEDS)}; or give a list"
            )
        specials = NEEDS[specials]
    found = [spelling for word in specials for spelling in _spellings(word)]
    return list(dict.fromkeys(found))


def _spellings(word: str) -> list[str]:
    if word in ROLES:
        return [ROLES[word][0]]
    name, equals, number = word.partition("=")
    if name == "sentinels":
        if equals and not (number.isascii() and number.isdigit() and 0 < int(number[:9]) <= MOST_SENTINELS):
            raise ConfigError(f"{word!r} is no number of sentinels; write sentinels=1 to sentinels={MOST_SENTINELS}")
        return [SENTINEL.format(place) for place in range(int(number) if equals else SENTINELS)]
    if not _FORM.fullmatch(word):
        guess = did_you_mean(word, [*ROLES, "sentinels"])
        raise ConfigError(f"{word!r} is no special token{guess}; name a role, or write a tag as in <2hi> or [NAME]")
    return [word]


def roles_of(tokens: Mapping[str, int], named: Mapping[str, Any]) -> dict[str, str]:
    """Role -> token, from what a `tokenizer_config.json` names, or else from how the special tokens are spelled."""
    roles = {}
    for role, spellings in ROLES.items():
        value = named.get(f"{role}_token")
        value = value.get("content") if isinstance(value, Mapping) else value
        candidates = (value, *spellings) if isinstance(value, str) else spellings
        for spelling in candidates:
            if spelling in tokens:
                roles[role] = spelling
                break
    return roles


def sentinels_of(tokens: Iterable[str]) -> list[str]:
    """The sentinels among tokens, in their own order."""
    found = {int(match[1]): token for token in tokens if (match := _SENTINEL.fullmatch(token))}
    return [found[number] for number in sorted(found)]


def template(tokens: Mapping[str, int]) -> dict[str, Any] | None:
    """What `add_specials` puts around a text: <cls> … <sep> for an encoder, <s> … </s> otherwise, where they exist."""
    front, back = ("cls", "sep") if ROLES["cls"][0] in tokens else ("bos", "eos")
    first, last = ([ROLES[role][0]] if ROLES[role][0] in tokens else [] for role in (front, back))
    if not first and not last:
        return None

    def put(names: list[str], segment: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": segment}} for name in names]

    a, b = ({"Sequence": {"id": letter, "type_id": segment}} for segment, letter in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*put(first, 0), a, *put(last, 0)],
        "pair": [*put(first, 0), a, *put(last, 0), b, *put(last, 1)],
        "special_tokens": {
            name: {"id": name, "ids": [tokens[name]], "tokens": [name]} for name in sorted({*first, *last})
        },
    }
