"""The tokenizer in a GGUF file, both ways: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama")."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers import sentencepiece
from monoblock.tokenizers.assembly import assemble
from monoblock.tokenizers.gguf_header import read_head
from monoblock.tokenizers.layouts import CUT_NAMES, CUTS, Layout, Part, sequence
from monoblock.tokenizers.published import byte_level
from monoblock.untrusted import shown

K = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the same as SentencePiece's
IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
PLAIN = Layout()


def read(path: str | Path) -> tuple[Part, dict[str, Any]]:
    """The content of a tokenizer.json, and of a tokenizer_config.json, for the tokenizer in a GGUF file."""
    return from_fields(read_head(path).fields, str(path))


def from_fields(fields: Mapping[str, Any], where: str) -> tuple[Part, dict[str, Any]]:
    tokens = _texts(fields, f"{K}.tokens", where)
    if len(set(tokens)) != len(tokens):
        raise FileError(f"{where} cannot be used: a token stands twice in its vocabulary")
    types = fields.get(f"{K}.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not set(types) <= set(range(7)):
        raise FileError(f"{where} cannot be used: its {K}.token_type does not go with its tokens")
    kind = fields.get(f"{K}.model")
    if kind not in ("gpt2", "llama"):
        raise FileError(f"{where}: its tokenizer is of the kind {shown(kind)}; gpt2 and llama are read")
    named = _named(fields, tokens, spm=kind == "llama")
    specials = [t for t, of in zip(tokens, types, strict=True) if of in (CONTROL, UNUSED) or (of == UNKNOWN)]
    plain = [t for t, of in zip(tokens, types, strict=True) if of == USER]
    cut = _llama(fields, tokens, types, where) if kind == "llama" else _gpt2(fields, tokens, where)
    return assemble(cut, PLAIN, named, specials=specials, plain=plain), named


def _texts(fields: Mapping[str, Any], name: str, where: str) -> list[str]:
    found = fields.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise FileError(f"{where} cannot be used: its {name} is no list of texts")
    return found


def _named(fields: Mapping[str, Any], tokens: list[str], spm: bool) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for role, field in IDS.items():
        number = fields.get(f"{K}.{field}")
        if type(number) is int and 0 <= number < len(tokens):
            named[f"{role}_token"] = tokens[number]
    named["add_bos_token"] = fields.get(f"{K}.add_bos_token", spm) is True
    named["add_eos_token"] = fields.get(f"{K}.add_eos_token", False) is True
    template = fields.get("tokenizer.chat_template")
    return named | ({"chat_template": template} if isinstance(template, str) else {})


def _gpt2(fields: Mapping[str, Any], tokens: list[str], where: str) -> Part:
    cut = fields.get(f"{K}.pre", "default")
    if not isinstance(cut, str) or CUT_NAMES.get(cut, cut) not in CUTS:
        known = ", ".join(sorted({*CUTS, *CUT_NAMES}))
        raise FileError(f"{where} cuts text as {shown(cut)}, which is not known; {known} are")
    merges = [merge.split(" ") for merge in _texts(fields, f"{K}.merges", where)]
    vocab = {token: place for place, token in enumerate(tokens)}
    spaced = {"add_prefix_space": fields.get(f"{K}.add_space_prefix") is True}
    ranks = CUT_NAMES.get(cut, cut) == "llama-bpe"
    return byte_level(vocab, merges, cut, PLAIN, spaced, ranks=ranks)


def _llama(fields: Mapping[str, Any], tokens: list[str], types: list[int], where: str) -> Part:
    scores = fields.get(f"{K}.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise FileError(f"{where} cannot be used: its {K}.scores do not go with its tokens")
    unknown = fields.get(f"{K}.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise FileError(f"{where} cannot be used: its unknown token is none of its tokens")
    kinds = [CONTROL if kind in (UNUSED, UNKNOWN) and place != unknown else kind for place, kind in enumerate(types)]
    kinds[unknown] = UNKNOWN
    model = sentencepiece.Pieces(
        pieces=tokens,
        scores=scores,
        types=kinds,
        model_type=sentencepiece.BPE,
        byte_fallback=BYTE in types,
        dummy_prefix=fields.get(f"{K}.add_space_prefix", True) is True,
        collapse=fields.get(f"{K}.remove_extra_whitespaces", False) is True,
    )
    return sentencepiece.sections(sentencepiece.checked(model, where))


# -- the other way -----------------------------------------------------------------------------------------------------


def to_fields(data: Part, named: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The fields of a GGUF file for the content of a tokenizer.json; `size` is how many tokens the model knows."""
    model = data["model"]
    if model["type"] != "BPE":
        raise FileError(
            f"GGUF has no place for a {model['type']} tokenizer; byte-level BPE and SentencePiece's BPE fit"
        )
    ids = dict(model["vocab"]) | {row["content"]: row["id"] for row in data["added_tokens"]}
    tokens = [f"[PAD{place}]" for place in range(size)]
    types = [UNUSED] * size
    for token, place in ids.items():
        tokens[place], types[place] = token, NORMAL
    for row in data["added_tokens"]:
        types[row["id"]] = CONTROL if row["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found: dict[str, Any] = {f"{K}.tokens": tokens, f"{K}.token_type": types}
    if model.get("byte_fallback"):
        found |= {f"{K}.model": "llama", f"{K}.pre": "default", f"{K}.scores": _scores(model, tokens, types)}
        found[f"{K}.add_space_prefix"] = "'Prepend'" in str(data["normalizer"]) or bool(data["pre_tokenizer"])
    else:
        found |= {f"{K}.model": "gpt2", f"{K}.pre": _cut_of(data), f"{K}.merges": merges}
    for role, field in IDS.items():
        if named.get(f"{role}_token") in ids:
            found[f"{K}.{field}"] = ids[named[f"{role}_token"]]
    put = {
        row["SpecialToken"]["id"] for row in (data["post_processor"] or {}).get("single", []) if "SpecialToken" in row
    }
    for role in ("bos", "eos"):
        found[f"{K}.add_{role}_token"] = named.get(f"{role}_token") in put
    template = named.get("chat_template")
    return found | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _scores(model: Part, tokens: list[str], types: list[int]) -> list[float]:
    """Minus the rank of the first merge that makes a piece; and which pieces are bytes and the unknown."""
    made: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        made.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    for place, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[place] = BYTE
        elif token == model.get("unk_token"):
            types[place] = UNKNOWN
    return [made.get(token, -1e6) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)]


def _cut_of(data: Part) -> str:
    """GGUF's name for how a tokenizer.json cuts text."""
    for name, (normalizers, cutters) in CUTS.items():
        if (sequence("normalizers", *normalizers), sequence("pretokenizers", *cutters)) == (
            data["normalizer"],
            data["pre_tokenizer"],
        ):
            return name
    raise FileError(f"GGUF has no name for how this tokenizer cuts text; {', '.join(CUTS)} it has, or leave it out")
