"""Arrange weights in memory for a GPU, so that the fast copy of a model shares them instead of copying them.

Weights that one product reads lie next to each other, and an output table (V, D) has room for rows of zeros up to a
multiple of 8: tensor cores write eight 16-bit results at a time.  With GPT-2's V = 50,257 they write one by one, and
the product that computes the logits takes six times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from monoblock.nn.attention import Attention
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.linear import can_join
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.transformer import Transformer
from monoblock.quantization.modules import QuantizedLinear

ROW_MULTIPLE = 8


def arrange_weights(model: Transformer) -> None:
    """Arrange the weights of a model.  Parameters keep their names, shapes and values."""
    join_projection_storage(model)
    head = model.head
    table = model.output_embedding if head is None or head.output is None else getattr(head.output, "weight", None)
    if isinstance(table, Tensor) and needs_padding(table):
        with torch.no_grad():
            make_room(table)


@torch.no_grad()
def join_projection_storage(model: Transformer) -> None:
    """Place the query, key and value weights of each attention layer in one storage, and likewise gate and up."""
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


def can_join_quantized(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers are quantized alike for the kernel, and either all of them or none have a bias."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    kinds = {
        (layer.packed.dtype, layer.packed.shape[-1], layer.scale.shape[-1], layer.bias is None) for layer in quantized
    }
    return len(quantized) == len(layers) and len(kinds) == 1 and all(layer.activation_bits == 16 for layer in quantized)


# -- next to each other ---------------------------------------------------------------------------------------------


def join_storage(tensors: Sequence[Tensor]) -> None:
    """Move tensors into one storage, one after the other, so that `adjacent_view` can view them as one tensor."""
    if adjacent_view(tensors) is None:
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, joined.split([tensor.shape[0] for tensor in tensors]), strict=True):
            tensor.data = part


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view of several tensors as one tensor, concatenated along dimension 0.

    Return None if they do not follow each other in one storage.
    """
    first = tensors[0]
    storage = first.untyped_storage()
    end = first.data_ptr()
    for tensor in tensors:
        is_here = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not is_here or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in tensors)
    view = torch.empty(0, dtype=first.dtype, device=first.device)
    return view.set_(storage, first.storage_offset(), (rows, *first.shape[1:]), first.stride())


# -- rows of zeros --------------------------------------------------------------------------------------------------


def needs_padding(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in HALF_DTYPES and weight.shape[0] % ROW_MULTIPLE != 0


def make_room(weight: Tensor) -> None:
    """Move a weight into a larger storage with rows of zeros after it; the shape and values of the weight stay."""
    if _padded_view(weight) is None:
        weight.data = padded_table(weight)[: len(weight)]


def padded_table(weight: Tensor) -> Tensor:
    """Return a weight with rows of zeros after it: a view if they are stored there (see `make_room`), else a copy."""
    view, missing = _padded_view(weight), -len(weight) % ROW_MULTIPLE
    return torch.cat((weight.detach(), weight.new_zeros(missing, weight.shape[1]))) if view is None else view


def _padded_view(weight: Tensor) -> Tensor | None:
    rows, width = weight.shape
    size = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    nbytes = size * width * weight.element_size()
    has_room = weight.is_contiguous() and weight.storage_offset() == 0 and weight.untyped_storage().nbytes() == nbytes
    return weight.detach().as_strided((size, width), (width, 1)) if has_room and rows < size else None
