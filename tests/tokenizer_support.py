"""Tokenizers of every kind trained on a few sentences, and strings that tokenizers get wrong."""

import random

from hypothesis import strategies as st

import monoblock as mb
from monoblock.tokenizers.formats import sentencepiece
from monoblock.tokenizers.formats.vocabulary_files import FAMILIES, from_sentencepiece

TEXTS = [
    "In the beginning God created the heaven and the earth.\n",
    "And the earth was without form, and void; and darkness was upon the face of the deep.\n",
    "यह एक छोटा सा वाक्य है। नमस्ते दुनिया, नमस्ते भारत।\n",
    "Grüße aus Köln: 1234 Äpfel, 56 Öfen.\n",
    "我们 今天 去 学校。\n",
    "don't do not, i'll — «quoted» (really?) x = y**2\n",
] * 3
KINDS = [  # (kind, marker)
    ("char", None),
    ("byte", None),
    ("word", None),
    ("bpe", None),
    ("bpe", "@@"),
    ("bpe", "▁"),
    ("wordpiece", None),
    ("unigram", None),
]
LOSSLESS = [("byte", None), ("bpe", None)]
OBJECTIVES = ["causal_lm", "masked_lm", "span_corruption"]
SCALARS = st.text(st.characters(exclude_categories=["Cs"]))
FEW_LETTERS = st.text(st.sampled_from("aehtnd नम्ते.,!⁇▁@#<>/w </s>\n\t x12३你Äß́'"))

_cache = {}


def get_tokenizer(kind, marker, **options):
    """Train a tokenizer, or return it from the cache."""
    key = (kind, marker, *sorted(options.items()))
    if key not in _cache:
        _cache[key] = mb.Tokenizer.train(kind, TEXTS, 419, marker=marker, **options)
    return _cache[key]


def random_strings(count):
    """Return edge cases and strings of random code points."""
    rng = random.Random(7)
    strings = [
        "",
        " ",
        "  a  ",
        "\n\n",
        "\x00\x01\x7f",
        "́a",
        "👩‍👩‍👧‍👦",
        "a\r\nb",
        "\u200d",
        "\ufeff",
        "\U0010ffff",
        "</w>",
        "@@ @@",
    ]
    ranges = [
        (0x20, 0x7F),
        (0, 0x20),
        (0x300, 0x370),
        (0x900, 0x980),
        (0x1F300, 0x1FAFF),
        (0xE000, 0x110000),
        (1, 0xD800),
    ]
    for _ in range(count - len(strings)):
        chosen = [rng.choice(ranges) for _ in range(rng.randrange(1, 4))]
        strings.append("".join(chr(rng.randrange(*rng.choice(chosen))) for _ in range(rng.randrange(23))))
    return strings


def spm_tokenizer():
    """Build a small SentencePiece BPE model with byte fallback: letters, and words by merges."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [2, 3, 3, *([6] * 256)]
    letters = ["▁", *"etaoinsh"]
    pairs = ["th", "he", "an", "in", "▁t", "the", "▁th", "▁the"]
    pieces += letters + pairs
    types += [1] * (len(letters) + len(pairs))
    scores = [0.0] * 259 + [-100.0] * len(letters) + [-float(n) for n in range(len(pairs))]
    model = sentencepiece.SentencePieceModel(
        pieces=pieces, scores=scores, types=types, model_type=2, byte_fallback=True, collapse=False
    )
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return (
        from_sentencepiece(sentencepiece.validate(model, "hand"), FAMILIES["llama"], special_tokens),
        special_tokens,
        "hand",
    )
