"""Find the configuration of an LSTM that has as many parameters as a Transformer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Literal

from monoblock.accounting.lstm import recurrent_parameters
from monoblock.accounting.parameters import count_parameters
from monoblock.config.limits import MAX_WIDTH
from monoblock.config.model import EmbeddingConfig, Family, ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError

LSTMKind = Literal["language_model", "encoder_decoder"]
KIND_BY_FAMILY: dict[Family, LSTMKind] = {"decoder-only": "language_model", "encoder-decoder": "encoder_decoder"}


def parameter_count(config: RecurrentConfig) -> int:
    """Return the number of parameters of an LSTM model, by the formula in nn/recurrent/lstm.py, without building it."""
    return sum(recurrent_parameters(config).values())


def matching_config(config: ModelConfig, kind: LSTMKind | None = None, *, depth: int = 2) -> RecurrentConfig:
    """Return the configuration of the LSTM whose number of parameters is nearest to that of a Transformer.

    It has the vocabulary, the weight tying and the dropout of the Transformer.  `kind` follows from the Transformer's
    family unless it is given.
    """
    kind, target_input = kind or KIND_BY_FAMILY.get(config.family), config.target_input
    if not isinstance(config.input, EmbeddingConfig) or not isinstance(target_input, EmbeddingConfig):
        raise ConfigError("a model of images or audio has no LSTM counterpart; give a model that reads tokens")
    if kind is None:
        raise ConfigError(
            "an encoder-only model has no LSTM counterpart; to compare it with a language model of its size, "
            "write kind='language_model'"
        )
    is_shared = kind == "language_model" or config.target is None or config.tie in ("source_target", "three_way")
    vocab, target_vocab = (target_input.vocab, None) if is_shared else (config.input.vocab, target_input.vocab)
    base = RecurrentConfig(
        kind=kind,
        vocab=vocab,
        target_vocab=target_vocab,
        width=1,
        depth=depth,
        dropout=target_input.dropout,
        tie=config.tie in ("output", "three_way"),
    )

    def count(width: int) -> int:
        return parameter_count(replace(base, width=width))

    target = sum(count_parameters(config).values())
    widths = range(1, min(target, MAX_WIDTH))
    width = 1 + bisect_left(widths, target, key=count)  # the first width with as many parameters or more
    return replace(base, width=min(max(1, width - 1), width, key=lambda width: abs(count(width) - target)))
