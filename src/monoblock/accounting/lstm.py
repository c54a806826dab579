"""Parameters and FLOPs of the recurrent baselines.

An LSTM layer of width D on an input of size I has four gates, each with a matrix on the input, one on the state and, as
in torch, two biases: 4·(I·D + D·D + 2·D). The encoder-decoder (Bahdanau et al. 2015) reads the source in both
directions, attends to it by v·tanh(W s + U h), and predicts the next token from the state, the attention context and
the last token with a maxout layer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Literal

from monoblock.accounting.parameters import count_parameters
from monoblock.config.model import EmbeddingConfig, Family, ModelConfig, RecurrentConfig
from monoblock.config.parts import MAX_WIDTH
from monoblock.errors import ConfigError


def lstm_matrix_weights(inputs: int, width: int) -> int:
    return 4 * (inputs * width + width * width)


def lstm_parameters(inputs: int, width: int) -> int:
    return lstm_matrix_weights(inputs, width) + 8 * width


def _encoder_inputs(config: RecurrentConfig) -> list[int]:
    """Return the input sizes of the encoder layers in both directions: D for the first layer, 2·D for those above."""
    return 2 * ([config.width] + (config.depth - 1) * [2 * config.width])


def _decoder_inputs(config: RecurrentConfig) -> list[int]:
    """Return the input sizes of the decoder layers.

    With an encoder, the first layer also reads the attention context, of size 2·D.
    """
    first = config.width if config.kind == "language_model" else 3 * config.width
    return [first] + (config.depth - 1) * [config.width]


def recurrent_parameters(config: RecurrentConfig) -> dict[str, int]:
    """Count the parameters of an LSTM model by component."""
    width, target = config.width, config.target_vocab or config.vocab
    counts = {"input.token": config.vocab * width}
    if config.kind == "encoder_decoder":
        if config.target_vocab is not None:
            counts["target.token"] = target * width
        counts["encoder.lstm"] = sum(lstm_parameters(inputs, width) for inputs in _encoder_inputs(config))
        if config.attention:
            counts["decoder.attention"] = 3 * width**2 + width  # W, U and v
        counts["decoder.start"] = config.depth * width * (width + 1)
        counts["decoder.readout"] = 2 * width * (4 * width + 1)
    counts["decoder.lstm"] = sum(lstm_parameters(inputs, width) for inputs in _decoder_inputs(config))
    counts["head.output"] = target + (0 if config.tie else target * width)
    return counts


def recurrent_flops(config: RecurrentConfig, batch: int, source: int, target: int) -> dict[str, int]:
    """Count the forward FLOPs by component, for `batch` sequences of `source` and `target` tokens.

    Every weight costs 2 FLOPs for each token, and attention costs 6·D for each pair of positions.
    """
    width, rows, source_rows = config.width, batch * target, batch * source
    flops = {}
    if config.kind == "encoder_decoder":
        encoder_weights = sum(lstm_matrix_weights(inputs, width) for inputs in _encoder_inputs(config))
        flops["encoder.lstm"] = 2 * source_rows * encoder_weights
        if config.attention:
            flops["decoder.attention.projections"] = 2 * width**2 * (2 * source_rows + rows)
            flops["decoder.attention.scores"] = rows * source * 6 * width  # v · tanh(…), and a sum of vectors of 2·D
        flops["decoder.start"] = 2 * batch * config.depth * width**2
        flops["decoder.readout"] = 2 * rows * 8 * width**2
    flops["decoder.lstm"] = 2 * rows * sum(lstm_matrix_weights(inputs, width) for inputs in _decoder_inputs(config))
    flops["head.output"] = 2 * rows * width * (config.target_vocab or config.vocab)
    return flops


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
