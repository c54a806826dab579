"""Build the C++ operators that run whole steps of a beam search and the encoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monoblock.inference.backends.cpu_step import (
    FusedStack,
    has_plain_matrices,
    has_readable_weights,
    is_plain_fp32,
)
from monoblock.inference.fast_modules import FastStack
from monoblock.inference.supported_models import (
    NATIVE_ACTIVATIONS,
    NATIVE_NORMS,
    NATIVE_RESIDUALS,
    SUPPORTED,
    AllowList,
    one_of,
    positive,
    unsupported_field,
)
from monoblock.kernels.cpu.library import can_multiply_many_rows
from monoblock.nn.block import Block
from monoblock.nn.embedding import Embedding
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer
from monoblock.quantization.cpu_linear import KernelLinear

ENCODER_SUPPORTED: AllowList = {
    **SUPPORTED,
    "cross": one_of(None),
    "norm.kind": one_of(*NATIVE_NORMS),
    "residual": one_of(*NATIVE_RESIDUALS),
    "attention.mask": one_of("full"),
    "attention.window": one_of(None),
    "attention.global_tokens": one_of(False),
    "attention.random_blocks": one_of(0),
    "attention.positions": one_of(None),
    "attention.qk_norm.kind": one_of(*NATIVE_NORMS),
    "feedforward.hidden": positive,
    "feedforward.activation": one_of(*NATIVE_ACTIVATIONS),
    "feedforward.experts": one_of(None),
}


class SearchOperators(NamedTuple):
    search_model: Any  # the C++ object with the decoder and the output table
    embedding: Embedding | None  # what the operator uses to embed tokens; None if it takes embedded tokens
    encoder: Any  # the C++ object with the encoder; None if the encoder runs in PyTorch


def build_search_operators(model: Transformer) -> SearchOperators | None:
    """Build the beam-search operators for an inference copy; return None if its decoder or head is not supported."""
    embedding = _find_plain_embedding(model)
    search_model = _build_search_model(model, embedding)
    return None if search_model is None else SearchOperators(search_model, embedding, build_encoder(model.encoder))


def _find_plain_embedding(model: Transformer) -> Embedding | None:
    """Return the embedding of target tokens if it does no more than scale a table and add positions, else None."""
    embedding = model.target if model.target is not None else model.input
    if not isinstance(embedding, Embedding) or _token_table(model, embedding) is None:
        return None
    is_plain = embedding.norm is None and embedding.projection is None and embedding.segment is None
    return embedding if is_plain else None


def _token_table(model: Transformer, embedding: Embedding) -> Tensor | None:
    """Return an embedding's token table (V, D): its own, or the encoder's if the two share one.

    Return None if the table is not a contiguous fp32 tensor on the CPU.
    """
    shared = model.input.token if isinstance(model.input, Embedding) else None
    table = embedding.token if embedding.token is not None else shared
    return table.weight.detach() if isinstance(table, nn.Embedding) and is_plain_fp32(table.weight) else None


def _build_search_model(model: Transformer, embedding: Embedding | None) -> Any:
    stack, head = model.decoder, model.head
    fused = stack.fused_stack if isinstance(stack, FastStack) else None
    if fused is None or head is None:
        return None
    output = model.output_embedding if head.output is None else head.output
    table = _table_tensors(output)
    if table is None:
        return None
    has_layers = head.transform is not None or head.projection is not None or head.norm is not None
    if has_layers or head.teacher is not None or head.config.softcap is not None:
        return None
    bias = head.bias if head.bias is not None else head.fixed_bias
    output_bias = None if bias is None else bias.detach().flatten()
    if output_bias is not None and not is_plain_fp32(output_bias):
        return None
    if not fused.native_stack.supports_batches():
        return None
    return torch.classes.monoblock.SearchModel(
        stack=fused.native_stack,
        output_table=table[0],
        table_scale=table[1] if len(table) > 1 else None,
        table_least=table[2] if len(table) > 2 else None,
        output_bias=output_bias,
        output_scale=head.scale,
        token_table=None if embedding is None else _token_table(model, embedding),
        token_scale=1.0 if embedding is None else embedding.scale,
        activation_bits=output.activation_bits if isinstance(output, KernelLinear) else 16,
    )


def _table_tensors(table: Tensor | nn.Module | None) -> tuple[Tensor, ...] | None:
    """Return an output table as the operator reads it: in fp32, or quantized with its scales and minima.

    Return None if the operator does not support it.
    """
    if isinstance(table, KernelLinear) and table.storage != "dense":
        return table.tensors if can_multiply_many_rows(table.group) else None
    weight = table if isinstance(table, Tensor) else getattr(table, "weight", None)
    return (weight.detach(),) if isinstance(weight, Tensor) and is_plain_fp32(weight) else None


def build_encoder(encoder: Stack | None) -> Any:
    """Build the C++ operator for an encoder; return None if it does not support one of the blocks."""
    if encoder is None or not all(_is_plain_encoder_block(block) for block in encoder.blocks):
        return None
    if encoder.config.norm is not None and encoder.config.norm.kind not in NATIVE_NORMS:
        return None
    stack = FusedStack(encoder).native_stack
    return stack if stack.supports_batches() else None


def _is_plain_encoder_block(block: Block) -> bool:
    """Return whether the encoder operator supports a block: full attention, fp32 or quantized weights on the CPU."""
    if unsupported_field(block.config, ENCODER_SUPPORTED) is not None:
        return False
    return has_plain_matrices(block) and all(has_readable_weights(module) for module in block.modules())
