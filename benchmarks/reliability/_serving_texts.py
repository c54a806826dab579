"""Texts that are hard to tokenize: long runs, marks that combine, pieces of special tokens, all kinds of characters."""

from __future__ import annotations

import random

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
UNITS = {
    **{f"run of {unit!r}": unit for unit in ("a", "A", "0", " ", "\n", "\t", "^", ".", "-", "'", "_", "\\", "=")},
    "words": "a ",
    "spaces and letters": "   a",
    "lines": "\r\n",
    "contractions": "'s't'll",
    "mixed case": "aA",
    "letters and digits": "a1",
    "brackets": "[[{",
    "entities": "&amp;",
    "special tokens": "<|endoftext|>",
    "beginnings of special tokens": "<|end",
    "marks of tokenizers": "▁Ġ##",
    "accents": "é",
    "letters with marks": "e\u0301",
    "marks alone": "\u0301",
    "a letter with many marks": "a" + "\u0300\u0316" * 40,
    "Arabic with marks": "مُحَمَّد",
    "letters that expand": "ﷺ",
    "Hangul in parts": "\u1112\u1161\u11ab",
    "Chinese": "中文字",
    "Thai": "ภาษาไทย",
    "emoji": "😀",
    "families": FAMILY,
    "flags": "🇩🇪",
    "no width": "\u200b\u200d",
    "right to left": "\u202e\u202dאב",
}


def hard_texts(size: int) -> dict[str, str]:
    """Return texts of about so many bytes of UTF-8, by name."""
    texts = {name: unit * (size // len(unit.encode())) for name, unit in UNITS.items()}
    chance = random.Random(0)
    texts["any ASCII"] = "".join(chr(chance.randrange(128)) for _ in range(size))
    texts["any characters"] = "".join(chr(chance.choice((chance.randrange(0xD800), 0x1F600))) for _ in range(size // 3))
    return texts
