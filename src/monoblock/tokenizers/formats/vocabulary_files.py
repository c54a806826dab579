"""Convert older vocabulary files, from before tokenizer.json existed, to the content of a tokenizer.json.

vocab.json + merges.txt      byte-level BPE (GPT-2, RoBERTa, Qwen)
vocab.txt                    WordPiece (BERT)
tokenizer.model              SentencePiece, BPE or Unigram (Llama, T5, ALBERT, XLM-R); or tiktoken (Llama 3)
*.tiktoken                   byte-level BPE, given by the ranks of tokens

Such a file only lists tokens.  How a text is split before it is segmented, and which special tokens are added, is code
in the Hugging Face tokenizer of each model; here it is one entry of FAMILIES.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from monoblock.errors import FileError, did_you_mean
from monoblock.tokenizers.components import (
    CLIP_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    JsonObject,
    bpe_model,
    byte_level,
    byte_symbols,
    component_sequence,
    join_sections,
    replace_regex,
    replace_string,
    split_regex,
    template_processing,
)
from monoblock.tokenizers.formats import sentencepiece
from monoblock.tokenizers.special_tokens import MAX_SENTINELS, SENTINEL_FORMAT
from monoblock.untrusted_files import MB, Folder, has_file, short_repr

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

    other_names: str = ""  # of tokenizer classes and model types, in lower case, besides that in FAMILIES
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
    other_names="bart blenderbot longformer",
    single="cls A sep",
    pair="cls A sep sep B sep",
    special_tokens=_ANGLE_TOKENS,
    strip_mask=True,
)

FAMILIES = {
    "gpt2": TokenizerFamily(
        other_names="codegen gpt_bigcode gpt_neo gptj",
        special_tokens={"bos": _ENDOFTEXT, "eos": _ENDOFTEXT, "unk": _ENDOFTEXT},
    ),
    "qwen2": TokenizerFamily(
        other_names="qwen3 qwen3_moe", pre_tokenizer="qwen2", special_tokens={"eos": _ENDOFTEXT, "pad": _ENDOFTEXT}
    ),
    "roberta": _ROBERTA,
    "clip": TokenizerFamily(
        other_names="clip_text_model",
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
        other_names="convbert deit distilbert electra funnel layoutlm mobilebert",
        single="cls A sep",
        pair="cls A sep B:1 sep:1",
        special_tokens=_BRACKET_TOKENS,
        lowercase=True,
    ),
    "llama": TokenizerFamily(
        other_names="codellama mistral mixtral", single="bos A", pair="bos A bos B:1", special_tokens=_LLAMA_TOKENS
    ),
    "llama3": TokenizerFamily(
        pre_tokenizer="llama-bpe",
        single="bos A",
        pair="bos A bos B:1",
        special_tokens={"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
    ),
    "gemma": TokenizerFamily(
        other_names="gemma2 gemma3_text",
        single="bos A",
        pair="bos A bos B:1",
        special_tokens={"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
    ),
    "t5": TokenizerFamily(
        other_names="mt5 umt5",
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
    "xlmroberta": replace(_ROBERTA, other_names="camembert xlm-roberta", fairseq_ids=True),
    "plain": TokenizerFamily(),
}

# The family of each tokenizer_class (in lower case and without "Tokenizer") and of each model_type.
FAMILY_NAMES = {name: key for key, family in FAMILIES.items() for name in (key, *family.other_names.split())}


# -- the tokenizer.json ------------------------------------------------------------------------------------------------

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
    return template_processing(single, pair, tokens, ids)


# -- reading a folder --------------------------------------------------------------------------------------------------

MAX_FILE_BYTES = 64 * MB
MAX_TOKENS = 2_000_000
MAX_JSON_VALUES = 5_000_000
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")


def find_vocabulary(folder: Path) -> str | None:
    """Return the name of the vocabulary file in a folder, such as "vocab.txt", or None if there is none."""
    tiktoken_files = sorted(name for name in _list_files(folder) if name.endswith(".tiktoken"))
    candidates = [*SENTENCEPIECE_FILES, "vocab.json", "vocab.txt", *tiktoken_files]
    return next((name for name in candidates if has_file(folder, name)), None)


def _list_files(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_vocabulary(folder: Folder, name: str, config: Mapping[str, Any]) -> tuple[JsonObject, dict[str, Any]]:
    """Convert the vocabulary file `name` of a folder; `config` is the content of tokenizer_config.json.

    Return the content of a tokenizer.json, and the special tokens of the family as in a tokenizer_config.json.
    """
    path = folder.path / name
    if name == "vocab.json":
        vocab = folder.read_json(name, max_bytes=MAX_FILE_BYTES, max_values=MAX_JSON_VALUES)
        family = _find_family(folder, config, "gpt2")
        merges = _read_merges(folder.read_bytes("merges.txt", MAX_FILE_BYTES), folder.path / "merges.txt")
        sections = byte_level_sections(vocab, merges, family.pre_tokenizer, family, config)
        return assemble_tokenizer_json(sections, family, config), _special_tokens(family)
    if name == "vocab.txt":
        family = _find_family(folder, config, "bert")
        sections = _wordpiece_sections(folder.read_bytes(name, MAX_FILE_BYTES), path, family, config)
        return assemble_tokenizer_json(sections, family, config), _special_tokens(family)
    raw = folder.read_bytes(name, MAX_FILE_BYTES)
    if name.endswith(".tiktoken") or is_tiktoken(raw):
        family = _find_family(folder, config, "gpt2")
        vocab, merges = parse_ranks(raw, str(path))
        sections = byte_level_sections(vocab, merges, family.pre_tokenizer, family, config, ignore_merges=True)
        return assemble_tokenizer_json(sections, family, config), _special_tokens(family)
    family = _find_family(folder, config, "plain")
    return from_sentencepiece(sentencepiece.parse_model(raw, str(path)), family, config), _special_tokens(family)


def _special_tokens(family: TokenizerFamily) -> dict[str, Any]:
    return {f"{role}_token": token for role, token in family.special_tokens.items()}


def _find_family(folder: Folder, config: Mapping[str, Any], default: str) -> TokenizerFamily:
    """Return the family that tokenizer_class in tokenizer_config.json names, or else model_type in config.json.

    If there is neither, return the family `default`.
    """
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        name = name.removesuffix("Fast").removesuffix("Tokenizer").lower()
    else:
        name = folder.read_json("config.json").get("model_type")
    name = name or default
    if not isinstance(name, str) or name not in FAMILY_NAMES:
        hint = did_you_mean(str(name)[:40], FAMILY_NAMES)
        raise FileError(
            f"{folder.path}: vocabulary files of {short_repr(name)} are not supported; add a tokenizer.json{hint}"
        )
    return FAMILIES[FAMILY_NAMES[name]]


# -- the files ---------------------------------------------------------------------------------------------------------


def _read_lines(raw: bytes, path: Path) -> list[str]:
    try:
        lines = raw.decode().split("\n")
    except UnicodeDecodeError as problem:
        raise FileError(f"{path} is not UTF-8 text (byte {problem.start})") from None
    if len(lines) > MAX_TOKENS + 1:
        raise FileError(f"{path} has more than {MAX_TOKENS:,} lines; is it the right file?")
    return [line.removesuffix("\r") for line in lines]


def _read_merges(raw: bytes, path: Path) -> list[list[str]]:
    lines = _read_lines(raw, path)
    pairs = [line.split(" ") for line in lines[lines[0].startswith("#version") :] if line]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise FileError(f"{path}: {short_repr(' '.join(wrong))} is not two tokens with a space between")
    return pairs


def byte_level_sections(
    vocab: Mapping[str, int],
    merges: list[list[str]],
    pre_tokenizer: str,
    family: TokenizerFamily,
    config: Mapping[str, Any],
    *,
    ignore_merges: bool = False,
) -> JsonObject:
    """Return the sections of byte-level BPE.

    With `ignore_merges`, a word that is in the vocabulary becomes one token, whether or not merges lead to it.
    """
    normalizers, pre_tokenizers = PRE_TOKENIZERS[PRE_TOKENIZER_ALIASES.get(pre_tokenizer, pre_tokenizer)]
    if config.get("add_prefix_space") is True:
        pre_tokenizers = tuple(
            component | {"add_prefix_space": True} if component["type"] == "ByteLevel" else component
            for component in pre_tokenizers
        )
    return {
        "normalizer": component_sequence("normalizers", *normalizers),
        "pre_tokenizer": component_sequence("pretokenizers", *pre_tokenizers),
        "decoder": byte_level(add_prefix_space=True, use_regex=True),
        "model": bpe_model(
            dict(vocab), merges, end_of_word_suffix=family.end_of_word_suffix, ignore_merges=ignore_merges
        ),
    }


def _wordpiece_sections(raw: bytes, path: Path, family: TokenizerFamily, config: Mapping[str, Any]) -> JsonObject:
    lines = _read_lines(raw, path)
    pieces = lines[:-1] if lines[-1] == "" else lines
    vocab = {piece: number for number, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise FileError(f"{path} lists a piece twice")
    lowercase = config.get("do_lower_case", family.lowercase)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.get("tokenize_chinese_chars", True) is not False,
            "strip_accents": None if config.get("strip_accents") is None else bool(config["strip_accents"]),
            "lowercase": lowercase is True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special_token(config, family, "unk"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


# -- SentencePiece -----------------------------------------------------------------------------------------------------


def from_sentencepiece(
    model: sentencepiece.SentencePieceModel, family: TokenizerFamily, config: Mapping[str, Any]
) -> JsonObject:
    """Return the content of a tokenizer.json for a SentencePiece model."""
    if family.fairseq_ids:
        model = _to_fairseq_ids(model)
    normalizers: list[JsonObject] = []
    if family is FAMILIES["albert"]:
        normalizers = [replace_string(quotes, '"') for quotes in ("``", "''")]
        if config.get("keep_accents") is not True:
            normalizers += [{"type": "NFKD"}, {"type": "StripAccents"}]
        if config.get("do_lower_case", family.lowercase) is True:
            normalizers += [{"type": "Lowercase"}]
    prefix_first_only = config.get("legacy") is False
    return assemble_tokenizer_json(
        sentencepiece.to_sections(model, extra_normalizers=normalizers, prefix_first_only=prefix_first_only),
        family,
        config,
        special_tokens=model.pieces_of_type(sentencepiece.CONTROL, sentencepiece.UNKNOWN),
        plain_tokens=model.pieces_of_type(sentencepiece.USER_DEFINED),
    )


def _to_fairseq_ids(model: sentencepiece.SentencePieceModel) -> sentencepiece.SentencePieceModel:
    """Reorder the pieces to fairseq's ids: <s>, <pad>, </s>, <unk>, the model's pieces from the fourth on, <mask>."""
    normal, unknown, control = sentencepiece.NORMAL, sentencepiece.UNKNOWN, sentencepiece.CONTROL
    if model.model_type != sentencepiece.UNIGRAM or any(kind != normal for kind in model.types[3:]):
        raise FileError("a SentencePiece model with fairseq's ids must be Unigram and begin with three special pieces")
    return replace(
        model,
        pieces=["<s>", "<pad>", "</s>", "<unk>", *model.pieces[3:], "<mask>"],
        scores=[0.0] * 4 + [*model.scores[3:], 0.0],
        types=[control, control, control, unknown, *model.types[3:], control],
        unknown=3,
    )


# -- ranks of tiktoken, from which the merges are reconstructed --------------------------------------------------------

MAX_TOKEN_BYTES = 512
MAX_SQUARED_BYTES = 2**26  # the sum over all tokens; reconstructing the merge of a token takes quadratic time


def is_tiktoken(raw: bytes) -> bool:
    """Return whether the first line of a file is a base-64 token and its rank."""
    first = raw[:200].split(b"\n")[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit()


def parse_ranks(raw: bytes, where: str) -> tuple[dict[str, int], list[list[str]]]:
    """Return the vocabulary and the merges of a file with a base-64 token and its rank on each line.

    The merge that creates a token joins the two parts into which the merges of lower rank segment it. Errors call the
    file `where`.
    """
    ranks: dict[bytes, int] = {}
    work = 0
    for number, line in enumerate(raw.splitlines()):
        if not line:
            continue
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
            value = int(rank) if len(rank) < 9 else -1
        except (ValueError, binascii.Error):
            token, value = b"", -1
        if not 0 < len(token) <= MAX_TOKEN_BYTES or not 0 <= value < MAX_TOKENS or token in ranks:
            raise FileError(f"{where}: line {number + 1} is not a base-64 token and its rank, or repeats a token")
        work += len(token) ** 2
        if work > MAX_SQUARED_BYTES:
            raise FileError(f"{where} has too many long tokens; is it the right file?")
        ranks[token] = value
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise FileError(f"{where} has no token for the byte {missing}, but byte-level BPE needs one for every byte")
    symbols = byte_symbols()
    spellings = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            parts = _split_by_rank(token, ranks, ranks[token])
            if len(parts) == 2:  # otherwise no merge creates the token, and it can only be a whole word
                merges.append([spellings[parts[0]], spellings[parts[1]]])
    return {spellings[token]: rank for token, rank in ranks.items()}, merges


def _split_by_rank(token: bytes, ranks: Mapping[bytes, int], max_rank: int) -> list[bytes]:
    """Merge the bytes of a token by the merges below `max_rank` until two parts are left or no merge applies."""
    parts = [token[index : index + 1] for index in range(len(token))]
    pair_ranks = [ranks.get(left + right, max_rank) for left, right in pairwise(parts)]
    while len(parts) > 2:
        best = min(pair_ranks)
        if best >= max_rank:
            break
        index = pair_ranks.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        del pair_ranks[index]
        for left in (index - 1, index):  # the pairs that contain the new part
            if 0 <= left < len(pair_ranks):
                pair_ranks[left] = ranks.get(parts[left] + parts[left + 1], max_rank)
    return parts
