"""Families of published tokenizers: how each splits text, and which special tokens it adds.

An older vocabulary file only lists tokens. How a text is split before it is segmented, and which special tokens are
added, is code in the Hugging Face tokenizer of each model; here it is one entry of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.components import JsonObject, byte_level, join_sections, replace_regex, split_regex
from monoblock.tokenizers.pipelines import CLIP_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from monoblock.tokenizers.special_tokens import SENTINEL_FORMAT
from monoblock.untrusted_files import short_repr

# The normalizers and pre-tokenizers of byte-level BPE, by the names that tokenizer.ggml.pre has in GGUF files.
PRE_TOKENIZERS: dict[str, tuple[tuple[JsonObject, ...], tuple[JsonObject, ...]]] = {
    "gpt-2": ((), (byte_level(use_regex=True),)),
    "smollm": ((), ({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True))),
    "llama-bpe": ((), (split_regex(LLAMA3_PATTERN), byte_level())),
    "qwen2": (({"type": "NFC"},), (split_regex(QWEN2_PATTERN), byte_level())),
    "clip": (
        ({"type": "NFC"}, replace_regex(r"\s+", " "), {"type": "Lowercase"}),
        (split_regex(CLIP_PATTERN, "Removed", True), byte_level(use_regex=True)),
    ),
}
PRE_TOKENIZER_ALIASES = {
    "gpt2": "gpt-2",
    "default": "gpt-2",
    "roberta-bpe": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerFamily:
    """The rules of one family of tokenizers.

    `single` and `pair` are the templates for one text (A) and for two (A and B). They list roles and texts in order, as
    in "cls A sep B:1 sep:1", where ":1" marks the second segment.
    """

    pre_tokenizer: str = "gpt-2"  # a key of PRE_TOKENIZERS; for byte-level BPE only
    single: str = "A"
    pair: str = "A B:1"
    special_tokens: dict[str, str] = field(default_factory=dict)  # spellings of roles, unless the folder names one
    strip_mask: bool = False  # the mask token absorbs the space before it
    lowercase: bool = False  # unless tokenizer_config.json sets do_lower_case
    end_of_word_suffix: str | None = None  # ends the last piece of a word
    num_sentinels: int = 0  # unless tokenizer_config.json sets extra_ids
    fairseq_ids: bool = False  # ids begin with fairseq's four special tokens and end with the mask


_ENDOFTEXT = "<|endoftext|>"
_ANGLE_TOKENS = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "cls": "<s>",
    "sep": "</s>",
    "mask": "<mask>",
}
_BRACKET_TOKENS = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_LLAMA_TOKENS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_ROBERTA = TokenizerFamily(
    single="cls A sep", pair="cls A sep sep B sep", special_tokens=_ANGLE_TOKENS, strip_mask=True
)

FAMILIES = {
    "gpt2": TokenizerFamily(special_tokens={"bos": _ENDOFTEXT, "eos": _ENDOFTEXT, "unk": _ENDOFTEXT}),
    "qwen2": TokenizerFamily(pre_tokenizer="qwen2", special_tokens={"eos": _ENDOFTEXT, "pad": _ENDOFTEXT}),
    "roberta": _ROBERTA,
    "clip": TokenizerFamily(
        pre_tokenizer="clip",
        single="bos A eos",
        pair="bos A eos eos B eos",
        special_tokens={"bos": "<|startoftext|>", "eos": _ENDOFTEXT, "unk": _ENDOFTEXT, "pad": _ENDOFTEXT},
        end_of_word_suffix="</w>",
    ),
    "opt": TokenizerFamily(
        single="bos A", pair="bos A B", special_tokens={"bos": "</s>", "eos": "</s>", "unk": "</s>", "pad": "<pad>"}
    ),
    "bert": TokenizerFamily(
        single="cls A sep", pair="cls A sep B:1 sep:1", special_tokens=_BRACKET_TOKENS, lowercase=True
    ),
    "llama": TokenizerFamily(single="bos A", pair="bos A bos B:1", special_tokens=_LLAMA_TOKENS),
    "llama3": TokenizerFamily(
        pre_tokenizer="llama-bpe",
        single="bos A",
        pair="bos A bos B:1",
        special_tokens={"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
    ),
    "gemma": TokenizerFamily(
        single="bos A",
        pair="bos A bos B:1",
        special_tokens={"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
    ),
    "t5": TokenizerFamily(
        single="A eos",
        pair="A eos B eos",
        special_tokens={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
        num_sentinels=100,
    ),
    "albert": TokenizerFamily(
        single="cls A sep",
        pair="cls A sep B:1 sep:1",
        special_tokens={**_BRACKET_TOKENS, "unk": "<unk>", "pad": "<pad>", "bos": "[CLS]", "eos": "[SEP]"},
        strip_mask=True,
        lowercase=True,
    ),
    "xlmroberta": replace(_ROBERTA, fairseq_ids=True),
    "plain": TokenizerFamily(),
}

# The family of each tokenizer_class (in lower case and without "Tokenizer") and of each model_type.
FAMILY_ALIASES = {name: name for name in FAMILIES} | {
    "bart": "roberta",
    "blenderbot": "roberta",
    "camembert": "xlmroberta",
    "clip_text_model": "clip",
    "codegen": "gpt2",
    "codellama": "llama",
    "convbert": "bert",
    "deit": "bert",
    "distilbert": "bert",
    "electra": "bert",
    "funnel": "bert",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gpt_bigcode": "gpt2",
    "gpt_neo": "gpt2",
    "gptj": "gpt2",
    "layoutlm": "bert",
    "longformer": "roberta",
    "mistral": "llama",
    "mixtral": "llama",
    "mobilebert": "bert",
    "mt5": "t5",
    "qwen3": "qwen2",
    "qwen3_moe": "qwen2",
    "umt5": "t5",
    "xlm-roberta": "xlmroberta",
}


# -- the tokenizer.json ------------------------------------------------------------------------------------------------

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
