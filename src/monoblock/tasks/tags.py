"""Tags in texts: <2tamil> asks for a target in Tamil script, and <bt> marks a synthetic source.

A tag is a special token of the tokenizer. No other special token is recognized in a text: <s> or <mask> in a text is
encoded as ordinary characters. White space before a tag is dropped, and so is white space after a tag with which a text
begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from monoblock.data.indic_normalization import normalize_indic, script_of
from monoblock.data.noise import BLANK_TOKEN
from monoblock.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Tokenizer

BACKTRANSLATION_TAG = "<bt>"  # Caswell et al. 2019
SCRIPT_TAG_PREFIX = "<2"
SYNTHETIC_TAGS = (BACKTRANSLATION_TAG, BLANK_TOKEN)
# Maps the values of seq2seq.normalize to the functions that normalize texts.
NORMALIZERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize_indic}


def script_tag(text: str) -> str:
    """Return the tag that asks for a target in the script of `text`, such as <2tamil>."""
    return f"{SCRIPT_TAG_PREFIX}{script_of(text) or 'none'}>"


def script_tags(texts: Iterable[str]) -> list[str]:
    return sorted({script_tag(text) for text in texts})


def tag_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tags of a tokenizer with their ids.

    Tags are the special tokens that are neither sentinels nor have a role, as <pad> has.
    """
    candidates = tokenizer.special_ids - set(tokenizer.sentinel_ids)
    tokens = {tokenizer.token(index): index for index in candidates}
    return {token: index for token, index in tokens.items() if token not in tokenizer.special_tokens_map.values()}


class TagAwareEncoder:
    """Encode texts in which tags become special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tags = tokenizer, tag_ids(tokenizer)
        pattern = "|".join(re.escape(tag) for tag in sorted(self.tags))
        self.leading_tag = re.compile(rf"^\s*({pattern})\s*") if pattern else None
        self.any_tag = re.compile(rf"\s*({pattern})") if pattern else None

    def __call__(self, text: str) -> list[int]:
        return self.encode_with(text, self.tokenizer.encode)

    def encode_with(self, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """Encode a text: tags as special tokens, and the text between them by the function `encode`."""
        if self.leading_tag is None or self.any_tag is None or "<" not in text:
            return list(encode(text))
        ids: list[int] = []
        while match := self.leading_tag.match(text):
            ids.append(self.tags[match[1]])
            text = text[match.end() :]
        for index, part in enumerate(self.any_tag.split(text)):  # texts and tags alternate
            ids += [self.tags[part]] if index % 2 else encode(part) if part else []
        return ids

    def strip_leading_tags(self, text: str) -> tuple[str, int]:
        """Return a text without the tags at its beginning, and the number of tags removed."""
        count = 0
        while self.leading_tag is not None and (match := self.leading_tag.match(text)):
            text, count = text[match.end() :], count + 1
        return text, count

    def find_script_tag(self, to: str | None) -> str:
        """Return the tag for the script `to`.

        to=None returns the model's only script tag, or "" if the model has none; if it has several, raise InputError.
        """
        tags = [tag for tag in self.tags if tag.startswith(SCRIPT_TAG_PREFIX)]
        if to is None:
            if len(tags) > 1:
                raise InputError(
                    f"this model writes several scripts; choose one with `to`: {', '.join(_script_names(tags))}"
                )
            return tags[0] if tags else ""
        tag = f"{SCRIPT_TAG_PREFIX}{to.lower()}>"
        if tag not in tags:
            names = _script_names(tags)
            advice = (
                f"{did_you_mean(to, names)}; it has {', '.join(names)}" if names else " or any other; leave out `to`"
            )
            raise InputError(f"this model has no tag for the script {to!r}{advice}")
        return tag


def _script_names(tags: Iterable[str]) -> list[str]:
    return sorted(tag[len(SCRIPT_TAG_PREFIX) : -1] for tag in tags)
