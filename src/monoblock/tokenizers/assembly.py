"""A tokenizer.json from its sections: which tokens are added, and what is put around a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.layouts import Layout, Part
from monoblock.tokenizers.specials import SENTINEL
from monoblock.untrusted import shown

MOST_SENTINELS = 10_000
LONGEST_TOKEN = 512  # of an added token, in characters


def role(named: Mapping[str, Any], layout: Layout, word: str) -> str | None:
    """How the token of a role is spelled: as the folder says, or as such models do."""
    said = named.get(f"{word}_token", layout.tokens.get(word))
    said = said.get("content") if isinstance(said, Mapping) else said
    return said if isinstance(said, str) and 0 < len(said) <= LONGEST_TOKEN else None


def assemble(
    cut: Part, layout: Layout, named: Mapping[str, Any], *, specials: Iterable[str] = (), plain: Iterable[str] = ()
) -> Part:
    """A tokenizer.json from its sections: the added tokens, and what is put around a text."""
    vocab = cut["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {row[0]: place for place, row in enumerate(vocab)}
    given = {spelling: word for word in layout.tokens if (spelling := role(named, layout, word)) is not None}
    wanted: dict[str, Part] = {token: {"special": False} for token in plain}
    wanted |= {token: {"special": True} for token in [*specials, *given]}
    for token in wanted:
        if given.get(token) == "mask" and layout.strip_mask:
            wanted[token]["lstrip"] = True
    count = named.get("extra_ids", layout.sentinels)
    count = count if type(count) is int and 0 <= count <= MOST_SENTINELS else 0
    wanted |= {SENTINEL.format(count - 1 - place): {"special": True} for place in range(count)}
    wanted |= _listed(named)
    added = []
    order = {token: ids[token] if token in ids else int(how.get("id", len(ids))) for token, how in wanted.items()}
    for token, how in sorted(wanted.items(), key=lambda row: order[row[0]]):
        number = ids.setdefault(token, len(ids))
        flags = {flag: how.get(flag) is True for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        added.append({"id": number, "content": token, **flags})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": cut["normalizer"],
        "pre_tokenizer": cut["pre_tokenizer"],
        "post_processor": around(layout, named, ids),
        "decoder": cut["decoder"],
        "model": cut["model"],
    }


def _listed(named: Mapping[str, Any]) -> dict[str, Part]:
    """The tokens that a tokenizer_config.json adds, by their content."""
    rows = named.get("added_tokens_decoder")
    found = {}
    for number, row in rows.items() if isinstance(rows, Mapping) else ():
        content = row.get("content") if isinstance(row, Mapping) else None
        if not isinstance(content, str) or not 0 < len(content) <= LONGEST_TOKEN:
            raise FileError(f"tokenizer_config.json adds {shown(row)}, which is no token")
        if not number.isdigit() or len(number) > 7:
            raise FileError(f"tokenizer_config.json adds {shown(row)}, which is no token")
        found[content] = {**row, "id": int(number)}
    return found


def around(layout: Layout, named: Mapping[str, Any], ids: Mapping[str, int]) -> Part | None:
    """The template of what is put around one text and two; add_bos_token and add_eos_token have their say."""
    single, pair = layout.single.split(), layout.pair.split()
    for word in ("bos", "eos"):
        said = named.get(f"add_{word}_token")
        if said is False:
            single, pair = ([one for one in row if one.split(":")[0] != word] for row in (single, pair))
        elif said is True and word not in single:
            single = [word, *single] if word == "bos" else [*single, word]
            pair = [word, *pair] if word == "bos" else [*pair, word]
    spelled = {word: role(named, layout, word) for row in (single, pair) for one in row if (word := one.split(":")[0])}
    put = {word: token for word, token in spelled.items() if word not in "AB" and token in ids}
    if not put:
        return None

    def rows(words: list[str]) -> list[Part]:
        made: list[Part] = []
        for one in words:
            word, _, segment = one.partition(":")
            if word in "AB":
                made.append({"Sequence": {"id": word, "type_id": int(segment or 0)}})
            elif word in put:
                made.append({"SpecialToken": {"id": put[word], "type_id": int(segment or 0)}})
        return made

    known = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in put.values() if token}
    return {"type": "TemplateProcessing", "single": rows(single), "pair": rows(pair), "special_tokens": known}
