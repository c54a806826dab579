"""Arrange the weights of a model for decoding, in place.

    model = mb.optimize(mb.Transformer.from_pretrained(folder).to("cuda"))

On a GPU, decoding computes query, key and value in one matrix product, as well as gate and up, and pads the output
table.  This needs a second copy of those weights, unless `optimize` has placed them next to each other in memory.
Parameters keep their names, shapes and values; training, saving and loading work as before.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from monoblock.decoding.backends.inference.fused_linear import join_storage
from monoblock.decoding.backends.inference.gpu_quantized_linear import can_join_quantized
from monoblock.decoding.backends.inference.padded_vocabulary import make_room, needs_padding, output_table
from monoblock.decoding.backends.inference_copy import reason_for_no_copy
from monoblock.nn.attention import Attention
from monoblock.nn.check_model import check_model
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.linear import can_join
from monoblock.nn.recurrent.lstm import Recurrent
from monoblock.nn.transformer import Transformer

M = TypeVar("M", Transformer, Recurrent)


def optimize(model: M) -> M:
    """Place weights that decoding uses in one matrix product next to each other in memory; return the same model.

    This does nothing to an LSTM, or to a model that is on a CPU or decoded without an inference copy.
    """
    check_model(model, (Transformer, Recurrent), "optimize")
    if isinstance(model, Recurrent) or model.device.type != "cuda" or reason_for_no_copy(model) is not None:
        return model
    join_projection_storage(model)
    table = output_table(model)
    if table is not None and needs_padding(table):
        with torch.no_grad():
            make_room(table)
    return model


def join_projection_storage(model: Transformer) -> None:
    """Place the query, key and value weights of each attention layer in one storage, and likewise gate and up."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Attention):
                layers = [module.query, module.key, module.value]
            elif isinstance(module, FeedForward) and module.gate is not None and module.config.clamp is None:
                layers = [module.gate, module.up]
            else:
                continue
            if can_join(layers):
                join_storage([layer.weight for layer in layers])
                if layers[0].bias is not None:
                    join_storage([layer.bias for layer in layers])
            elif can_join_quantized(layers):
                for buffers in zip(*(layer.packed_matrix for layer in layers), strict=True):
                    if buffers[0] is not None:
                        join_storage(buffers)
