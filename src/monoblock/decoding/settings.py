"""How tokens are chosen: one frozen record of numbers and words, checked once, the same for every way to decode.

The words are Hugging Face's, so that a `generation_config.json` can be read; temperature 0 is greedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from monoblock.errors import InputError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Settings:
    max_new_tokens: int = 50
    min_new_tokens: int = 0
    temperature: float = 0.0  # 0: the most probable token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None  # the first new token
    forced_eos_token_id: int | None = None  # the last, when the count is reached
    num_beams: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    seed: int | None = None
    draft: str | None = None  # "8-bit", "4-bit": the model's own copy in so many bits proposes what comes next

    def __post_init__(self) -> None:
        for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        words = self.bad_words_ids or ()
        object.__setattr__(self, "bad_words_ids", tuple(_whole("bad_words_ids", word) for word in words))
        self._check_numbers()
        self._check_together()

    def _check_numbers(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name}={value!r} cannot be: write a whole number, {least} or more")
        for name, (low, high, advice) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise InputError(f"{name}={value!r} cannot be: {advice}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InputError(f"early_stopping={self.early_stopping!r} is none of True, False, 'never'")
        if self.draft not in (None, *DRAFTS):
            listed = " or ".join(map(repr, DRAFTS))
            raise InputError(
                f"draft={self.draft!r} cannot be: write {listed} for the model's own copy, or give a model"
            )
        if any(not word for word in self.bad_words_ids):
            raise InputError("an empty bad word rules out nothing; leave it out of bad_words_ids")
        for name in ("forced_bos_token_id", "forced_eos_token_id", "pad_token_id", "seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InputError(f"{name}={value!r} cannot be: write a whole number, 0 or more")

    def _check_together(self) -> None:
        """What makes no sense in one request."""
        beams, groups, asked = self.num_beams, self.num_beam_groups, self.num_return_sequences
        if beams > 1 and self.temperature > 0:
            raise InputError(
                f"num_beams={beams} searches for the most probable text and temperature={self.temperature} draws one "
                f"by chance; write temperature=0 or num_beams=1"
            )
        if beams > 1 and self.draft is not None:
            raise InputError(SINGLE)
        if beams % groups:
            raise InputError(f"num_beam_groups={groups} does not divide num_beams={beams}")
        if self.diversity_penalty and groups == 1:
            raise InputError(f"diversity_penalty={self.diversity_penalty} acts between groups; write num_beam_groups=2")
        if beams > 1 and asked > beams:
            raise InputError(f"num_return_sequences={asked} is more than num_beams={beams} can return")
        if beams == 1 and asked > 1 and self.temperature == 0:
            raise InputError(
                f"num_return_sequences={asked} greedy texts would all be the same; "
                f"write temperature=1 or num_beams={asked}"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )

    @property
    def rows(self) -> int:
        """Sequences worked on at once for one prompt."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    @property
    def shape(self) -> tuple[int, int, int]:
        """What requests that are worked on together have in common."""
        return self.rows, self.num_beams, self.num_beam_groups

    def check_vocabulary(self, size: int) -> None:
        """Every token named is one the model has."""
        named = {
            "eos_token_id": self.eos_token_id,
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "bad_words_ids": tuple(token for word in self.bad_words_ids for token in word),
            "forced_bos_token_id": (self.forced_bos_token_id,),
            "forced_eos_token_id": (self.forced_eos_token_id,),
            "pad_token_id": (self.pad_token_id,),
        }
        for name, tokens in named.items():
            for token in tokens:
                if token is not None and token >= size:
                    raise InputError(f"{name} names token {token}, but the vocabulary ends at {size - 1}")


DRAFTS = ("8-bit", "4-bit")
SINGLE = "speculative decoding works on single sequences; write num_beams=1 or leave out the draft"
LEAST = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "top_k": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
}
RANGES = {
    "temperature": (0.0, 1e4, "write 0 for greedy, about 0.8 for lively text"),
    "top_p": (1e-9, 1.0, "write a share of the probability, above 0 and at most 1"),
    "min_p": (0.0, 1.0, "write a share of the best token's probability, 0 to 1"),
    "typical_p": (1e-9, 1.0, "write a share of the probability, above 0 and at most 1"),
    "repetition_penalty": (1e-3, 1e3, "write 1 for none, about 1.2 to discourage repetition"),
    "diversity_penalty": (0.0, 1e6, "write 0 or more"),
    "length_penalty": (-50, 50, "write 0 for none, above 0 to prefer long texts"),
}


def _whole(name: str, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """One token or several as a tuple."""
    tokens = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InputError(f"{name}={given!r} cannot be: tokens are whole numbers, 0 or more")
    return tokens


def settings(given: Mapping[str, Any]) -> Settings:
    """Settings from keyword arguments; a name that means nothing is refused with the nearest one that does."""
    known = [field.name for field in fields(Settings)]
    for name in given:
        if name not in known:
            raise InputError(f"generate knows no {name!r}{did_you_mean(name, known)}")
    return Settings(**given)
