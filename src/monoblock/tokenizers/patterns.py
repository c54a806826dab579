"""DATA: the regular expressions a tokenizer.json may hold: ours, and those of published models, as they spell them."""

from monoblock.tokenizers.pipelines import MARKED_WORDS, WORDS

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS_TOO = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

ENDS = r"\A | \z"  # one space at either end of a text
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

SPLITS = frozenset(
    {
        WORDS,
        MARKED_WORDS,
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        LLAMA3,  # and GPT-4 (cl100k)
        QWEN2,  # and Qwen 3
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST,
        # GPT-4o (o200k), Mistral's tekken
        rf"{_CAPITALS}{_CONTRACTIONS}?|{_CAPITALS_TOO}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_TAIL}",
        rf"{_CAPITALS}|{_CAPITALS_TOO}|\p{{N}}|{_TAIL}",
        # DeepSeek, and digits alone
        r"\p{N}{1,3}",
        r"\p{N}",
        r"[0-9]",
        r"\s?[\p{L}]+",
        r"\s?\p{L}+",
        # CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        CLIP,
        # BLOOM
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
    }
)

REPLACED = frozenset({r" {2,}", r"\s+", r"\s{2,}", ENDS})
