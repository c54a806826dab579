"""The options of text generation, checked when a `Settings` object is built.  They mean the same in every backend.

The names are those of Hugging Face, so that a `generation_config.json` can be read; temperature 0 is greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import gcd
from typing import Any, Literal

from monoblock.errors import InputError, did_you_mean

# The call of Hugging Face's LogitsProcessor: two tensors to one. torch is not imported, so that --help is quick.
LogitsProcessor = Callable[[Any, Any], Any]


class DefaultInt(int):
    """The default of an option, which differs in its type from the same number in a call."""


class DefaultFloat(float):
    """The default of an option, which differs in its type from the same number in a call."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one request: how its tokens are chosen and when it ends.

    Options of sampling need a temperature, and options of beam search need num_beams.  An explicit temperature=0 or
    num_beams=1 switches them off.
    """

    max_new_tokens: int = 50  # generate at most this many tokens
    min_new_tokens: int = 0  # generate at least this many tokens
    temperature: float = DefaultFloat(0)  # 0 always takes the most probable token; higher values are more random
    top_k: int = 0  # sample from this many of the most probable tokens; 0: from all
    top_p: float = 1.0  # sample from the most probable tokens whose probabilities add up to this
    min_p: float = 0.0  # drop tokens with less than this times the probability of the most probable token
    typical_p: float = 1.0  # locally typical sampling with this probability mass
    repetition_penalty: float = 1.0  # values above 1 discourage repeating earlier tokens
    presence_penalty: float = 0.0  # subtracted from the logit of each token that the new text has
    frequency_penalty: float = 0.0  # subtracted from the logit of a token for each time that the new text has it
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added to the logits of these tokens
    no_repeat_ngram_size: int = 0  # never repeat an n-gram of this size; 0: any may be repeated
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None  # the first new token
    forced_eos_token_id: int | None = None  # the last new token, if max_new_tokens is reached
    num_beams: int = DefaultInt(1)  # beam search with this many beams; 1: none
    num_beam_groups: int = 1  # beam search in this many groups, which differ by the diversity penalty
    diversity_penalty: float = 0.0  # subtracted from the score of a token for each earlier group of beams that took it
    length_penalty: float = 1.0  # beam search: exponent of the divisor of a log-probability; more favours longer texts
    length_penalty_form: Literal["length", "gnmt"] = "length"  # beam search divides by the length, or (5 + length) / 6
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1  # number of texts to generate
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    stop: tuple[str, ...] = ()  # strings that end the text, and are not part of it
    seed: int | None = None  # seed of the sampling: the same seed gives the same text; prompt n has seed + n
    priority: int = 0  # requests with a higher one run first
    logprobs: int | None = None  # report the log-probability of each new token, and of this many of the best ones
    score_prompt: bool = False  # report those of the tokens of the prompt as well
    draft: str | None = None  # 8-bit or 4-bit: a quantized copy of the model proposes tokens; same text, faster
    # Functions from the tokens (1, T) and logits (1, V) of a row to its logits, called before the sampling filters.
    logits_processor: tuple[LogitsProcessor, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not (self.bad_words_ids is None or _is_collection(self.bad_words_ids)):
            value = show(self.bad_words_ids)
            raise InputError(f"bad_words_ids={value} is not valid; write a list of words: [[3], [4, 5]]")
        converted: dict[str, object] = {name: _several(getattr(self, name)) for name in ("stop", "logits_processor")}
        for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            converted[name] = _token_tuple(name, getattr(self, name))
        converted["bad_words_ids"] = tuple(_token_tuple("bad_words_ids", word) for word in _several(self.bad_words_ids))
        converted["logit_bias"] = _check_bias(self.logit_bias)
        for name, several in converted.items():
            object.__setattr__(self, name, several)
        self._check_values()
        self._check_combinations()
        switches = {"temperature": self.temperature, "num_beams": self.num_beams}
        given = [name for name, value in switches.items() if not isinstance(value, (DefaultInt, DefaultFloat))]
        check_effects(self, (*given, *SAMPLING_OPTIONS, *BEAM_OPTIONS))

    def _check_values(self) -> None:
        for name, (minimum, maximum) in COUNTS.items():
            value = getattr(self, name)
            if not (value is None and getattr(Settings, name) is None):
                check_count(name, value, minimum, maximum)
        for name, (low, high, advice) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise InputError(f"{name}={show(value)} is not valid; {advice}")
        for name, (choices, advice) in CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, (bool, str, type(None))) or value not in choices:
                raise InputError(f"{name}={show(value)} is not valid; {advice}")
        for name, words, maximum in (("bad_words_ids", "words", MAX_BAD_WORDS), ("stop", "strings", MAX_STOPS)):
            if len(getattr(self, name)) > maximum:
                raise InputError(f"{name} has {len(getattr(self, name))} {words}; give at most {maximum}")
        if () in self.bad_words_ids:
            raise InputError("bad_words_ids contains an empty word, which rules out nothing; leave it out")
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InputError(
                f"stop={show(self.stop)} is not valid; write a string that is not empty, or a list of such strings"
            )
        if not all(map(callable, self.logits_processor)):
            raise InputError("logits_processor must be a function (ids, logits) -> logits, or a list of such functions")

    def _check_combinations(self) -> None:
        """Raise InputError for options that contradict each other."""
        beams, groups, returned = self.num_beams, self.num_beam_groups, self.num_return_sequences
        if beams > 1 and self.temperature > 0:
            raise InputError(
                f"num_beams={beams} searches for the most probable text, but temperature={self.temperature} "
                f"samples a random one; write temperature=0 or num_beams=1"
            )
        if beams > 1 and self.draft is not None:
            raise InputError(NO_DRAFT_WITH_BEAMS)
        if beams % groups:
            raise InputError(
                f"num_beam_groups={groups} does not divide num_beams={beams}; try num_beam_groups={gcd(beams, groups)}"
            )
        if self.diversity_penalty and groups == 1:
            raise InputError(
                f"diversity_penalty={self.diversity_penalty} compares groups of beams, but there is only one group; "
                f"write num_beam_groups=2 or more"
            )
        if beams > 1 and returned > beams:
            raise InputError(
                f"num_return_sequences={returned} is more than the num_beams={beams} sequences of the beam search; "
                f"write num_beams={returned}"
            )
        if beams == 1 and returned > 1 and self.temperature == 0:
            raise InputError(
                f"num_return_sequences={returned} with greedy decoding would return the same text each time; "
                f"write temperature=1 or num_beams={returned}"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; "
                f"lower min_new_tokens"
            )

    def length_divisor(self, length: int) -> float:
        """Return what beam search divides the log-probability of a hypothesis by.

        "length" is length ** length_penalty, as in Hugging Face; "gnmt" is ((5 + length) / 6) ** length_penalty, which
        Wu et al. 2016 introduced and Vaswani et al. 2017, 6.1, use with 0.6.
        """
        offset = LENGTH_OFFSETS[self.length_penalty_form]
        return float(((offset + length) / (offset + 1)) ** self.length_penalty)

    @property
    def rows_per_prompt(self) -> int:
        """The number of sequences decoded at the same time for one prompt."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    def check_vocabulary(self, size: int) -> None:
        """Raise InputError if an option contains a token id outside a vocabulary of this size."""
        if len(set(self.suppress_tokens)) >= size:
            raise InputError("suppress_tokens contains the whole vocabulary, so that no token is left; leave some out")
        for name, token in self._largest_tokens.items():
            if token >= size:
                raise InputError(f"{name} contains token id {token}, but the vocabulary ends at {size - 1}")

    @cached_property
    def _largest_tokens(self) -> dict[str, int]:
        """The largest token id of each option that has one."""
        options: dict[str, Collection[int]] = {name: _several(getattr(self, name)) for name in TOKEN_OPTIONS}
        options |= {"bad_words_ids": [token for word in self.bad_words_ids for token in word]}
        return {name: max(tokens) for name, tokens in (options | {"logit_bias": self.logit_bias}).items() if tokens}


TOKEN_OPTIONS = (
    *("eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "pad_token_id"),
)
DRAFT_BITS: dict[str, Literal[4, 8]] = {"8-bit": 8, "4-bit": 4}
SEED_LIMIT = 2**63
MAX_COUNT = 2**31 - 1
MAX_BAD_WORDS = 10_000
MAX_STOPS = 100
# Options that have an effect only in sampling, those that look at earlier tokens, and those only of beam search.
SAMPLING_OPTIONS = ("top_k", "top_p", "min_p", "typical_p")
HISTORY_OPTIONS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
BEAM_OPTIONS = ("length_penalty", "length_penalty_form", "early_stopping")
LENGTH_OFFSETS = {"length": 0, "gnmt": 5}  # what `length_divisor` adds to a length
NO_DRAFT_WITH_BEAMS = (
    "speculative decoding works on single sequences, not on beams; write num_beams=1 or leave out the draft"
)
# Whole numbers, with the least and the greatest value; those whose default is None may be None.
COUNTS = {
    "max_new_tokens": (1, MAX_COUNT),
    **dict.fromkeys(("min_new_tokens", "top_k", "no_repeat_ngram_size"), (0, MAX_COUNT)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "pad_token_id"), (0, MAX_COUNT)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1, 1024)),
    "priority": (-MAX_COUNT, MAX_COUNT),
    "logprobs": (0, 100),
    "seed": (0, SEED_LIMIT - 1),
}
RANGES = {
    "temperature": (0.0, 1e4, "write 0 for greedy decoding, about 0.8 for varied text"),
    "top_p": (1e-9, 1.0, "write a probability, above 0 and at most 1"),
    "min_p": (0.0, 1.0, "write a fraction of the best token's probability, 0 to 1"),
    "typical_p": (1e-9, 1.0, "write a probability, above 0 and at most 1"),
    "presence_penalty": (-100.0, 100.0, "write 0 for no penalty, up to about 2 to discourage repetition"),
    "frequency_penalty": (-100.0, 100.0, "write 0 for no penalty, up to about 2 to discourage repetition"),
    "repetition_penalty": (1e-3, 1e3, "write 1 for no penalty, about 1.2 to discourage repetition"),
    "diversity_penalty": (0.0, 1e6, "write 0 or more"),
    "length_penalty": (-50, 50, "write 0 for no penalty, above 0 to prefer long texts"),
}
CHOICES = {
    "early_stopping": ((True, False, "never"), "write True, False or 'never'"),
    "length_penalty_form": (tuple(LENGTH_OFFSETS), "write 'length' or 'gnmt'"),
    "score_prompt": ((True, False), "write True or False"),
    "draft": (
        (None, *DRAFT_BITS),
        "write '8-bit' or '4-bit' for a quantized copy of the model, or give another Transformer",
    ),
}


def show(value: object) -> str:
    """Return the beginning of an option's value as code, for an error message."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"


def check_count(name: str, value: object, minimum: int, maximum: int = MAX_COUNT) -> None:
    """Raise InputError unless the value of an option is a whole number from `minimum` to `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{name}={show(value)} is not valid; write a whole number, {minimum} or more")
    if value > maximum:
        limit = f"below 2**{maximum.bit_length()}" if maximum == SEED_LIMIT - 1 else f"at most {maximum}"
        raise InputError(f"{name}={show(value)} is not valid; write {limit}")


def _is_collection(value: object) -> bool:
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


def _several(value: Any) -> tuple[Any, ...]:
    """Return one value, several or None as a tuple."""
    return tuple(value) if _is_collection(value) else () if value is None else (value,)


def _token_tuple(name: str, value: object) -> tuple[int, ...]:
    """Convert one token id, several token ids or None to a tuple; `name` is the option that an error mentions."""
    tokens = _several(value)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_COUNT:
            raise InputError(f"{name}={show(value)} is not valid; token ids are whole numbers, 0 or more: [3, 4]")
    return tokens


def _check_bias(value: object) -> dict[int, float]:
    """Return the biases of tokens as a dictionary of numbers."""
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise InputError(f"logit_bias={show(value)} is not valid; write numbers by token id: {{50: -2.5}}")
    for token, bias in given.items():
        if _token_tuple("logit_bias", token) != (token,):
            raise InputError(f"logit_bias={show(value)} is not valid; write numbers by token id: {{50: -2.5}}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -1000 <= bias <= 1000:
            raise InputError(f"logit_bias={show(value)} is not valid; a bias is a number from -1000 to 1000")
    return dict(given)


ENGINE_OPTIONS = ("stop", "priority", "logprobs", "score_prompt")  # of `Engine.add`; the outputs of a step report them
# Names that other libraries use for the same.
OTHER_NAMES = {
    "stop": "; it needs a tokenizer: mb.load(folder).generate(text, stop=…), or an Engine with a tokenizer",
    "logprobs": "; write return_scores=True, or mb.Settings(logprobs=…) for an Engine",
    "do_sample": "; write temperature=1.0 to sample, or leave it out for the most probable token",
    "max_length": "; write max_new_tokens, the number of tokens without those of the prompt",
    "max_tokens": "; write max_new_tokens",
    "num_beam": "; write num_beams",
}


def parse_settings(options: Mapping[str, Any]) -> Settings:
    """Build `Settings` from keyword arguments; raise InputError for an unknown name, with the nearest known name."""
    known = [field.name for field in fields(Settings) if field.name not in ENGINE_OPTIONS]
    for name in options:
        if name not in known:
            hint = OTHER_NAMES.get(name) or did_you_mean(name, known)
            raise InputError(f"generate has no option {name!r}{hint}")
    return Settings(**options)


def check_effects(settings: Settings, explicit: Collection[str]) -> None:
    """Raise InputError if an option that a call gives, one of `explicit`, has no effect with its other settings.

    A call with temperature=0 may give sampling options, and one with num_beams=1 those of beam search.
    """
    is_greedy = not settings.temperature and "temperature" not in explicit
    has_beams = settings.num_beams > 1 or "num_beams" in explicit
    for name in (*SAMPLING_OPTIONS, *BEAM_OPTIONS):
        value = getattr(settings, name)
        if name not in explicit or value == getattr(Settings, name):
            continue
        if name in SAMPLING_OPTIONS and is_greedy:
            raise InputError(
                f"{name}={show(value)} limits sampling, but without a temperature the most probable token is always "
                f"taken; write temperature=1 too, or leave out {name}"
            )
        if name in BEAM_OPTIONS and not has_beams:
            raise InputError(
                f"{name}={show(value)} ranks the hypotheses of a beam search; "
                f"write num_beams=4 too, or leave out {name}"
            )


def split_seeds(seed: object, count: int) -> list[int | None]:
    """Return the seed of each of `count` prompts: seed + n for prompt n, or the n-th of a list of seeds.

    So prompt n of a batch gets the text that it gets alone with its own seed, and copies of a prompt differ.
    """
    if seed is None:
        return [None] * count
    if isinstance(seed, int):
        check_count("seed", seed, 0, SEED_LIMIT - 1)
        return [seed + number for number in range(count)]
    seeds = list(seed) if isinstance(seed, Sequence) and not isinstance(seed, str) else None
    if seeds is None or len(seeds) != count:
        raise InputError(f"seed={show(seed)} is neither a whole number nor a list with one for each of {count} prompts")
    return seeds
