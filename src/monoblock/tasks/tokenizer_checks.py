"""What a task needs from a tokenizer: special tokens, knowledge of the training text, and random segmentations.

Segmenting texts at random, differently in every epoch, is subword regularization (Kudo 2018; Provilkov et al. 2020). A
segmentation depends only on the seed, the epoch, the index of the row and the text, so that a resumed run sees the same
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from monoblock.data.corpora.load import Corpus
from monoblock.errors import ConfigError, FileError
from monoblock.recipes.schema import Recipe, TokenizerSection
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.events import DecisionEvent

KEY_BY_KIND = {"bpe": "dropout", "unigram": "alpha"}  # the key of [tokenizer] that each kind of tokenizer samples with
MAX_UNKNOWN = 0.02  # share of the tokens of the training text that may be unknown
MAX_UNKNOWN_WORDS = 0.2  # the same for a vocabulary of whole words, which leaves out rare words by design
MAX_CHARACTERS, MAX_PARTS, PART_LENGTH = 400_000, 10_000, 4_000  # of the text that is encoded, in parts of a length


def unknown_share(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Return the share of tokens that are unknown, in parts of the texts.

    An unknown token that is written out in a text, as in WikiText, does not count.
    """
    unknown = tokenizer.special_tokens_map.get("unk")
    if tokenizer.unk_id is None or unknown is None:
        return 0.0
    parts, encode = _parts(texts), TagAwareEncoder(tokenizer)
    rows = [encode(part) for part in parts] if encode.tags else tokenizer.encode_batch(parts)
    written = sum(part.count(unknown) for part in parts) if tokenizer.kind == "word" else 0
    count = sum(row.count(tokenizer.unk_id) for row in rows) - written
    return max(0, count) / max(1, sum(map(len, rows)))


def _parts(texts: Sequence[str]) -> list[str]:
    """Return parts of the texts at equal distances, of at most about MAX_CHARACTERS; texts that are short are whole."""
    places = [(text, start) for text in texts for start in range(0, len(text), PART_LENGTH)]
    step = max(1, sum(map(len, texts)) // MAX_CHARACTERS, len(places) // MAX_PARTS)
    return [
        text if len(text) <= PART_LENGTH else _trim_to_spaces(text[start : start + PART_LENGTH])
        for text, start in places[::step]
    ]


def _trim_to_spaces(part: str) -> str:
    """Remove the first and the last word of a part, which may be cut."""
    words = part.split(" ")
    return " ".join(words[1:-1]) if len(words) > 2 else part


def check_unknown_tokens(
    tokenizer: Tokenizer, train: Corpus, recipe: Recipe, *, is_loaded: bool
) -> Iterator[DecisionEvent]:
    """Raise ConfigError if too much of the training text is unknown; say so if many words of a word vocabulary are.

    is_loaded: whether the tokenizer was loaded from a folder, and not trained on these texts.
    """
    share = _share_in_tokens(train) if train.kind == "tokens" else unknown_share(tokenizer, list(train.texts()))
    if share <= MAX_UNKNOWN:
        return
    of_words = tokenizer.kind == "word"
    problem = f"{share:.0%} of the tokens of {train.name} are unknown to the tokenizer"
    if share > (MAX_UNKNOWN_WORDS if of_words else MAX_UNKNOWN):
        raise ConfigError(f"{problem} (at most {MAX_UNKNOWN:.0%} can be learned from); {_remedy(recipe, is_loaded)}")
    yield DecisionEvent(problem, f"its vocabulary has whole words only; {_remedy(recipe, is_loaded)}")


def _share_in_tokens(train: Corpus) -> float:
    """Return the share of unknown tokens in prepared tokens, which were counted when they were made."""
    tokens = train.rows[0]
    return float(tokens.files.unknown / len(tokens))


def _remedy(recipe: Recipe, is_loaded: bool) -> str:
    if "folder" in recipe.model:
        return "give a model that was trained on such text, in model.folder"
    if is_loaded:
        return "leave out tokenizer.folder to train a tokenizer on these texts, or give another one"
    return f'raise tokenizer.vocab={recipe.tokenizer.vocab}, or write tokenizer.kind="bpe", which knows every character'


def check_required_tokens(tokenizer: Tokenizer, roles: Sequence[str], objective: str, folder: Path) -> Tokenizer:
    """Return the tokenizer if it has a special token for at least one of these roles, else raise FileError."""
    present = {*tokenizer.special_tokens_map, *(["sentinels"] if tokenizer.sentinel_ids else [])}
    if roles and present.isdisjoint(roles):
        raise FileError(
            f"the tokenizer in {folder} has no {' or '.join(roles)} token, which train.objective={objective!r} needs; "
            "give the folder of another tokenizer, or leave tokenizer.folder unset to train a new one"
        )
    return tokenizer


# -- random segmentations ---------------------------------------------------------------------------------------------


class SubwordSampler:
    """Called with a text, an epoch and the index of the row, return the ids of a random segmentation of the text."""

    def __init__(self, tokenizer: Tokenizer, section: TokenizerSection, seed: int) -> None:
        _check_kind(tokenizer.kind, section)
        self.tokenizer, self.seed = tokenizer, seed
        self.dropout, self.alpha = section.dropout or None, section.alpha
        self("", epoch=0, index=0)  # a tokenizer that cannot be sampled raises here, and not in the first batch

    def __call__(self, text: str, *, epoch: int, index: int) -> list[int]:
        return self.tokenizer.sample(
            text, seed=self.seed, epoch=epoch, index=index, dropout=self.dropout, alpha=self.alpha
        )


def requested_key(section: TokenizerSection) -> str | None:
    """Return the key that asks for random segmentations, "tokenizer.dropout" or "tokenizer.alpha"; None if neither."""
    if section.dropout:
        return "tokenizer.dropout"
    return None if section.alpha is None else "tokenizer.alpha"


def _check_kind(kind: str, section: TokenizerSection) -> None:
    """Raise ConfigError unless the tokenizer can be sampled with the key that is set."""
    key = KEY_BY_KIND.get(kind)
    for name, is_set in (("dropout", bool(section.dropout)), ("alpha", section.alpha is not None)):
        if is_set and name != key:
            advice = "leave it out" if key is None else f"write tokenizer.{key}=0.1 instead"
            reason = "has only one segmentation of a text" if key is None else f"is sampled with tokenizer.{key}"
            raise ConfigError(f"tokenizer.{name} does not apply: a {kind} tokenizer {reason}; {advice}")
