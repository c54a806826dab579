"""The keyword arguments and the result of `generate` and its relatives, for type checkers and editors.

The arguments are the fields of `Settings` in inference/settings.py, which checks their values and gives the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

from torch import Tensor, nn

from monoblock.nn.tap import Tap

TokenRows = Tensor | Sequence[Sequence[int]]  # prompts: (B, T), or lists of different lengths


class GeneratedTokens(NamedTuple):
    """The result of `generate` with return_scores=True."""

    ids: Tensor  # (rows, T + N): the prompts with their new tokens
    scores: Tensor  # (rows, N): the log-probability of each new token, 0 for padding; see `score_texts`


class TextOptions(TypedDict, total=False):
    """How the tokens of one text are chosen."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float  # 0: greedy
    top_k: int  # 0: every token
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float  # subtracted from the logits of tokens that the new text has
    frequency_penalty: float  # the same, for each time that it has them
    logit_bias: Mapping[int, float]  # added to the logits of these tokens
    no_repeat_ngram_size: int
    bad_words_ids: Sequence[Sequence[int]] | None
    suppress_tokens: int | Sequence[int] | None
    begin_suppress_tokens: int | Sequence[int] | None
    forced_bos_token_id: int | None  # the first new token
    forced_eos_token_id: int | None  # the last one, if max_new_tokens is reached
    num_beams: int
    num_beam_groups: int
    diversity_penalty: float
    length_penalty: float
    length_penalty_form: Literal["length", "gnmt"]  # length ** penalty, or ((5 + length) / 6) ** penalty
    early_stopping: bool | Literal["never"]
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    logits_processor: Callable[[Tensor, Tensor], Tensor] | Sequence[Callable[[Tensor, Tensor], Tensor]] | None
    truncation: Literal["left"] | None  # "left" drops the first tokens of a prompt that is too long
    seed: int | Sequence[int] | None  # prompt n of a batch gets seed + n; a list has one for each prompt


class PipelineOptions(TextOptions, total=False):
    """The options of the methods of a pipeline that return one text."""

    draft: str | None  # "8-bit" or "4-bit": a quantized copy of the model proposes tokens


class GenerationOptions(PipelineOptions, total=False):
    """Every field of `Settings`."""

    num_return_sequences: int


class ModelOptions(TextOptions, total=False):
    """The options of `generate` and `stream` of a model."""

    num_return_sequences: int
    draft: nn.Module | str | None  # a smaller model that proposes tokens, or "8-bit": a copy of this one, on a CPU
    prompt_lookup: int  # the number of tokens to propose from the text itself
    attention_mask: Tensor | None
    decoder_start_token_id: int | None
    decoder_input_ids: Tensor | None  # the beginning of the target of an encoder-decoder
    use_cache: bool
    tap: Tap | None
