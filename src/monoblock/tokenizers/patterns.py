"""The regular expressions that a tokenizer.json may contain: those of our own tokenizers and of published ones."""

from monoblock.tokenizers.pipelines import MARKED_WORD_PATTERN, WORD_PATTERN

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MIXED_CASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_CASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PUNCTUATION_SLASH_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EDGE_SPACE_PATTERN = r"\A | \z"  # one space at either end of a text
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
QWEN2_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
# GPT-4o and Mistral's tekken
O200K_PATTERN = (
    rf"{_MIXED_CASE_WORD}{_CONTRACTIONS}?|{_UPPER_CASE_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
    + _PUNCTUATION_SLASH_AND_SPACE
)
TEKKEN_PATTERN = rf"{_MIXED_CASE_WORD}|{_UPPER_CASE_WORD}|\p{{N}}|{_PUNCTUATION_SLASH_AND_SPACE}"
CLIP_PATTERN = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

ALLOWED_SPLIT_PATTERNS = frozenset(
    {
        WORD_PATTERN,
        MARKED_WORD_PATTERN,
        GPT2_PATTERN,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        LLAMA3_PATTERN,  # and GPT-4 (cl100k)
        QWEN2_PATTERN,  # and Qwen 3
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        + _PUNCTUATION_AND_SPACE,
        O200K_PATTERN,
        TEKKEN_PATTERN,
        # DeepSeek, and digits alone
        r"\p{N}{1,3}",
        r"\p{N}",
        r"[0-9]",
        r"\s?[\p{L}]+",
        r"\s?\p{L}+",
        # CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        CLIP_PATTERN,
        # BLOOM
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
    }
)

ALLOWED_REPLACE_PATTERNS = frozenset({r" {2,}", r"\s+", r"\s{2,}", EDGE_SPACE_PATTERN})
