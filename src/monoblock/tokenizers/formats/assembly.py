"""Build a tokenizer.json from the sections of a converted tokenizer, its added tokens and a post_processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.components import JsonObject, join_sections
from monoblock.tokenizers.formats.families import TokenizerFamily
from monoblock.tokenizers.special_tokens import SENTINEL_FORMAT
from monoblock.untrusted_files import short_repr

MAX_SENTINELS = 10_000
MAX_TOKEN_LENGTH = 512  # characters in an added token


def special_token(config: Mapping[str, Any], family: TokenizerFamily, role: str) -> str | None:
    """Return the token of a role such as "bos", as tokenizer_config.json (`config`) or else the family names it.

    Return None if neither names a valid token.
    """
    token = config.get(f"{role}_token", family.special_tokens.get(role))
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and 0 < len(token) <= MAX_TOKEN_LENGTH else None


def assemble_tokenizer_json(
    sections: JsonObject,
    family: TokenizerFamily,
    config: Mapping[str, Any],
    *,
    special_tokens: Iterable[str] = (),
    plain_tokens: Iterable[str] = (),
) -> JsonObject:
    """Return the content of a tokenizer.json.

    Its added tokens come from the family, from tokenizer_config.json (`config`) and from the vocabulary file, which may
    mark some of its tokens as special (`special_tokens`) or as defined by the user (`plain_tokens`).
    """
    vocab = sections["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {row[0]: number for number, row in enumerate(vocab)}
    role_by_token = {
        token: role for role in family.special_tokens if (token := special_token(config, family, role)) is not None
    }
    options: dict[str, JsonObject] = {token: {"special": False} for token in plain_tokens}
    options |= {token: {"special": True} for token in [*special_tokens, *role_by_token]}
    for token in options:
        if role_by_token.get(token) == "mask" and family.strip_mask:
            options[token]["lstrip"] = True
    count = config.get("extra_ids", family.num_sentinels)
    count = count if type(count) is int and 0 <= count <= MAX_SENTINELS else 0
    options |= {SENTINEL_FORMAT.format(count - 1 - index): {"special": True} for index in range(count)}
    options |= _configured_added_tokens(config)
    added = []
    order = {token: ids[token] if token in ids else int(row.get("id", len(ids))) for token, row in options.items()}
    for token, row in sorted(options.items(), key=lambda item: order[item[0]]):
        number = ids.setdefault(token, len(ids))
        flags = {flag: row.get(flag) is True for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        added.append({"id": number, "content": token, **flags})
    return join_sections(sections, added, build_post_processor(family, config, ids))


def _configured_added_tokens(config: Mapping[str, Any]) -> dict[str, JsonObject]:
    """Return a dict from the tokens in `added_tokens_decoder` of a tokenizer_config.json to their entries, with ids."""
    rows = config.get("added_tokens_decoder")
    tokens = {}
    for number, row in rows.items() if isinstance(rows, Mapping) else ():
        content = row.get("content") if isinstance(row, Mapping) else None
        if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_LENGTH:
            limit = f"1 to {MAX_TOKEN_LENGTH} characters"
            raise FileError(f"tokenizer_config.json adds {short_repr(row)}, which is not a token of {limit}")
        if not number.isdigit() or len(number) > 7:
            raise FileError(f"tokenizer_config.json adds a token with the id {short_repr(number)}; write an integer")
        tokens[content] = {**row, "id": int(number)}
    return tokens


def build_post_processor(
    family: TokenizerFamily, config: Mapping[str, Any], ids: Mapping[str, int]
) -> JsonObject | None:
    """Return the template that puts special tokens around one text or two, or None if there are none to add.

    The family decides which ones, unless add_bos_token or add_eos_token of tokenizer_config.json overrides it.
    """
    single, pair = family.single.split(), family.pair.split()
    for role in ("bos", "eos"):
        add = config.get(f"add_{role}_token")
        if add is False:
            single, pair = ([item for item in row if item.split(":")[0] != role] for row in (single, pair))
        elif add is True and role not in single:
            single = [role, *single] if role == "bos" else [*single, role]
            pair = [role, *pair] if role == "bos" else [*pair, role]
    roles = dict.fromkeys(item.split(":")[0] for item in (*single, *pair))
    tokens = {role: special_token(config, family, role) for role in roles if role not in "AB"}
    tokens = {role: token for role, token in tokens.items() if token in ids}
    if not tokens:
        return None

    def build_rows(items: list[str]) -> list[JsonObject]:
        rows: list[JsonObject] = []
        for item in items:
            name, _, segment = item.partition(":")
            if name in "AB":
                rows.append({"Sequence": {"id": name, "type_id": int(segment or 0)}})
            elif name in tokens:
                rows.append({"SpecialToken": {"id": tokens[name], "type_id": int(segment or 0)}})
        return rows

    described = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens.values() if token}
    return {
        "type": "TemplateProcessing",
        "single": build_rows(single),
        "pair": build_rows(pair),
        "special_tokens": described,
    }
