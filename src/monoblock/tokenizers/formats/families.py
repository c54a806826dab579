"""Families of published tokenizers: how each splits text, and which special tokens it adds.

An older vocabulary file only lists tokens. How a text is split before it is segmented, and which special tokens are
added, is code in the Hugging Face tokenizer of each model; here it is one entry of FAMILIES.
"""

from dataclasses import dataclass, field, replace

from monoblock.tokenizers.components import JsonObject, byte_level, replace_regex, split_regex
from monoblock.tokenizers.patterns import CLIP_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN

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
