"""Rewrite a model in a form that a Hugging Face family can express: other weights or fields, the same logits.

Our runs often differ from every published class only in how they say the same thing: the order of the sines and cosines
in a position encoding, the row at which a position table starts, a bias that is always zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.config.model import EmbeddingConfig, Learned, ModelConfig, Sinusoid
from monoblock.nn.positions import sinusoid

Weights = dict[str, Tensor]
# The axis of a weight that is the residual stream, by the end of its name; the first pattern that matches decides.
RESIDUAL_AXES = (
    ("*norm.weight", 0),
    ("*norm.bias", 0),
    ("*.token.weight", 1),
    ("head.output.weight", 1),
    ("*coder.*.output.*", 0),
    ("*.down.*", 0),
    ("*coder.*.weight", 1),  # query, key, value, up and gate read it
)


class Form(NamedTuple):
    """A configuration, and the function that converts the weights of the model to it."""

    config: ModelConfig
    convert: Callable[[Weights], Weights]


def equivalent_forms(config: ModelConfig, special_token_ids: Mapping[str, int]) -> Iterator[Form]:
    """Yield other forms of a model, each of which some family may be able to express.

    special_token_ids: fields of config.json such as pad_token_id, with their values.
    """
    source, positions = config.input, getattr(config.input, "positions", None)
    if not isinstance(source, EmbeddingConfig) or config.head is None:
        return
    pad = special_token_ids.get("pad_token_id")
    if config.family == "encoder-only" and positions == Learned() and pad is not None:
        yield _offset_positions(config, source, pad + 1)
    if config.family == "encoder-decoder" and isinstance(positions, Sinusoid) and source.context is not None:
        config, convert = _separate_target(config, source)
        if positions == Sinusoid() and config.width % 2 == 0:
            yield _reorder_sinusoids(config, convert)
        yield _store_positions(config, convert)


def _offset_positions(config: ModelConfig, source: EmbeddingConfig, offset: int) -> Form:
    """Number positions from `offset` on, as RoBERTa does; the rows of the table before it are not used."""

    def convert(weights: Weights) -> Weights:
        table = weights["input.position.weight"]
        return weights | {"input.position.weight": torch.cat([table.new_zeros(offset, table.shape[1]), table])}

    return Form(replace(config, input=replace(source, positions=Learned(offset=offset))), convert)


def _separate_target(config: ModelConfig, source: EmbeddingConfig) -> Form:
    """Give source and target one configuration each, and the output a bias of zeros."""
    assert config.head is not None
    target = config.target or source
    head = replace(config.head, bias="fixed") if config.head.bias == "none" else config.head

    def convert(weights: Weights) -> Weights:
        if head == config.head:
            return weights
        token = weights.get("target.token.weight", weights["input.token.weight"])
        return weights | {"head.fixed_bias": token.new_zeros(target.vocab)}

    return Form(replace(config, target=target, head=head), convert)


def _reorder_sinusoids(config: ModelConfig, convert: Callable[[Weights], Weights]) -> Form:
    """Put all sines before all cosines, as Marian does, by reordering the features of the whole residual stream."""
    halves = Sinusoid(form="halves")
    order = torch.arange(config.width).view(-1, 2).T.flatten()  # 0, 2, 4, …, 1, 3, 5, …

    def reorder(weights: Weights) -> Weights:
        reordered = {}
        for name, tensor in convert(weights).items():
            axis = next((axis for pattern, axis in RESIDUAL_AXES if fnmatchcase(name, pattern)), None)
            reordered[name] = tensor if axis is None else tensor.index_select(axis, order.to(tensor.device))
        return reordered

    return Form(_with_positions(config, halves), reorder)


def _store_positions(config: ModelConfig, convert: Callable[[Weights], Weights]) -> Form:
    """Store the sinusoids as a table, as Pegasus does."""

    def store(weights: Weights) -> Weights:
        weights = convert(weights)
        token = weights["input.token.weight"]
        for name, part in (("input", config.input), ("target", config.target)):
            assert isinstance(part, EmbeddingConfig)
            assert isinstance(part.positions, Sinusoid)
            assert part.context is not None
            positions = torch.arange(part.context, device=token.device)
            weights[f"{name}.position.weight"] = sinusoid(positions, config.width, part.positions).to(token.dtype)
        return weights

    return Form(_with_positions(config, Learned()), store)


def _with_positions(config: ModelConfig, positions: Learned | Sinusoid) -> ModelConfig:
    parts = {"input": config.input, "target": config.target}
    return replace(config, **{name: replace(part, positions=positions) for name, part in parts.items()})  # type: ignore
