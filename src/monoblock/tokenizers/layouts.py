"""DATA: what published tokenizers do beyond their vocabulary, by the name that a folder goes by.

A vocabulary file says which pieces there are. How text is cut before, and what is put around it, was code of each
model; here it is a row.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from monoblock.tokenizers.patterns import CLIP, LLAMA3, QWEN2

Part = dict[str, Any]


def _bytes(add_space: bool = False, words: bool = False) -> Part:
    """Bytes as letters; `words` cuts by GPT-2's own pattern first."""
    return {"type": "ByteLevel", "add_prefix_space": add_space, "trim_offsets": True, "use_regex": words}


def _split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> Part:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def sequence(key: str, *parts: Part) -> Part | None:
    return {"type": "Sequence", key: list(parts)} if len(parts) > 1 else (parts[0] if parts else None)


# How byte-level BPE cuts text: normalizers, then pre-tokenizers. The names are those of GGUF's tokenizer.ggml.pre.
CUTS: dict[str, tuple[tuple[Part, ...], tuple[Part, ...]]] = {
    "gpt-2": ((), (_bytes(words=True),)),
    "smollm": ((), ({"type": "Digits", "individual_digits": True}, _bytes(words=True))),
    "llama-bpe": ((), (_split(LLAMA3), _bytes())),
    "qwen2": (({"type": "NFC"},), (_split(QWEN2), _bytes())),
    "clip": (
        ({"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, {"type": "Lowercase"}),
        (_split(CLIP, "Removed", True), _bytes(words=True)),
    ),
}
CUT_NAMES = {
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
class Layout:
    """`single` and `pair` are what stands around one text and two; ":1" marks the second segment."""

    cut: str = "gpt-2"  # of byte-level BPE
    single: str = "A"
    pair: str = "A B:1"
    tokens: dict[str, str] = field(default_factory=dict)  # role -> spelling, where the folder names none
    strip_mask: bool = False  # the mask takes the space before it
    lowercase: bool = False  # unless do_lower_case says otherwise
    end: str | None = None  # of a word's last piece
    sentinels: int = 0  # unless extra_ids says otherwise
    shifted: bool = False  # fairseq's ids: its own four tokens first, the mask last


_END = "<|endoftext|>"
_ANGLES = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "cls": "<s>",
    "sep": "</s>",
    "mask": "<mask>",
}
_BRACKETS = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_LLAMA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_ROBERTA = Layout(single="cls A sep", pair="cls A sep sep B sep", tokens=_ANGLES, strip_mask=True)

LAYOUTS = {
    "gpt2": Layout(tokens={"bos": _END, "eos": _END, "unk": _END}),
    "qwen2": Layout(cut="qwen2", tokens={"eos": _END, "pad": _END}),
    "roberta": _ROBERTA,
    "clip": Layout(
        cut="clip",
        single="bos A eos",
        pair="bos A eos eos B eos",
        tokens={"bos": "<|startoftext|>", "eos": _END, "unk": _END, "pad": _END},
        end="</w>",
    ),
    "opt": Layout(single="bos A", pair="bos A B", tokens={"bos": "</s>", "eos": "</s>", "unk": "</s>", "pad": "<pad>"}),
    "bert": Layout(single="cls A sep", pair="cls A sep B:1 sep:1", tokens=_BRACKETS, lowercase=True),
    "llama": Layout(single="bos A", pair="bos A bos B:1", tokens=_LLAMA),
    "llama3": Layout(
        cut="llama-bpe",
        single="bos A",
        pair="bos A bos B:1",
        tokens={"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
    ),
    "gemma": Layout(
        single="bos A",
        pair="bos A bos B:1",
        tokens={"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
    ),
    "t5": Layout(
        single="A eos",
        pair="A eos B eos",
        tokens={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
        sentinels=100,
    ),
    "albert": Layout(
        single="cls A sep",
        pair="cls A sep B:1 sep:1",
        tokens={**_BRACKETS, "unk": "<unk>", "pad": "<pad>", "bos": "[CLS]", "eos": "[SEP]"},
        strip_mask=True,
        lowercase=True,
    ),
    "xlmroberta": replace(_ROBERTA, shifted=True),
    "plain": Layout(),
}

# Another name of a tokenizer_class or a model_type -> its row.
NAMES = {name: name for name in LAYOUTS} | {
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
