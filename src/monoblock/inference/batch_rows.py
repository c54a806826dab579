"""How many sequences to decode at the same time."""

from __future__ import annotations

import torch

from monoblock.nn.transformer import Transformer

CPU_ROWS = 512  # each beam counts as one
MAX_GPU_ROWS = 2560  # of a small model, the fastest measured on an H200 with 5 beams; fewer leave the GPU idle
MEMORY_SHARE = 0.4  # of the free memory of the GPU, for caches and logits


def default_max_rows(model: Transformer, capacity: int) -> int:
    """Return how many sequences of at most `capacity` tokens to decode at the same time.

    On a GPU these are as many as fit into its free memory, at least one and at most MAX_GPU_ROWS.
    """
    if model.device.type != "cuda":
        return CPU_ROWS
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    fitting = int(MEMORY_SHARE * free / row_bytes(model, capacity))
    return max(1, min(MAX_GPU_ROWS, fitting))


def row_bytes(model: Transformer, capacity: int) -> int:
    """Return an estimate of the memory of one row in bytes: its keys and values, and three copies of its logits."""
    assert model.decoder is not None
    width, size = model.config.width, next(model.parameters()).element_size()
    attentions = [block.attention for block in model.decoder.config.layers()]
    values = sum(one.num_kv_heads * (one.key_size(width) + one.value_size(width)) for one in attentions)
    vocab: int = model.config.target_input.vocab  # type: ignore[union-attr]
    return values * size * capacity + 3 * 4 * vocab
