"""Words that say something about a text and are no part of it: <2tamil> asks for a script, <bt> marks a made source.

A tag is a special token of the tokenizer.  Only tags are read in a text, never <s> or <mask>: text that spells those is
text.  The space beside a tag belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from monoblock.data.indic import script_of
from monoblock.data.noise import BLANK
from monoblock.errors import InputError, did_you_mean
from monoblock.tokenizers.tokenizer import Tokenizer

BACKTRANSLATED = "<bt>"  # Caswell et al. 2019
SCRIPT = "<2"  # a tag that asks for a script begins so
SYNTHETIC = (BACKTRANSLATED, BLANK)


def script_tag(text: str) -> str:
    """What asks for a text in the script of this one."""
    return f"{SCRIPT}{script_of(text) or 'none'}>"


def script_tags(texts: Iterable[str]) -> list[str]:
    return sorted({script_tag(text) for text in texts})


def tags_of(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens that play no role of their own."""
    others = tokenizer.special_ids - set(tokenizer.sentinel_ids)
    named = {tokenizer.token(number): number for number in others}
    return {token: number for token, number in named.items() if token not in tokenizer.roles.values()}


class Reader:
    """Text to ids with tags read as such."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tags = tokenizer, tags_of(tokenizer)
        spelled = "|".join(re.escape(tag) for tag in sorted(self.tags))
        self.first = re.compile(rf"^\s*({spelled})\s*") if spelled else None
        self.inside = re.compile(rf"\s*({spelled})") if spelled else None

    def __call__(self, text: str) -> list[int]:
        return self.cut(text, self.tokenizer.encode)

    def cut(self, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """The ids of a text, what stands between tags cut by `encode`."""
        if self.first is None or self.inside is None or "<" not in text:
            return list(encode(text))
        ids: list[int] = []
        while match := self.first.match(text):
            ids.append(self.tags[match[1]])
            text = text[match.end() :]
        for number, part in enumerate(self.inside.split(text)):
            ids += [self.tags[part]] if number % 2 else encode(part) if part else []
        return ids

    def without_tags(self, text: str) -> tuple[str, int]:
        """A text from behind the tags at its head, and how many those are."""
        count = 0
        while self.first is not None and (match := self.first.match(text)):
            text, count = text[match.end() :], count + 1
        return text, count

    def script(self, to: str | None) -> str:
        """The tag that asks for a script; without a word, the only one there is, or "" where there is none."""
        known = [tag for tag in self.tags if tag.startswith(SCRIPT)]
        if to is None:
            if len(known) > 1:
                raise InputError(f"this model writes several scripts; say which: {', '.join(_words(known))}")
            return known[0] if known else ""
        tag = f"{SCRIPT}{to.lower()}>"
        if tag not in known:
            listed = _words(known)
            told = f"{did_you_mean(to, listed)}; it has {', '.join(listed)}" if listed else "; leave it out"
            raise InputError(f"this model has no script {to!r} to ask for{told}")
        return tag


def _words(tags: Iterable[str]) -> list[str]:
    return sorted(tag[len(SCRIPT) : -1] for tag in tags)
