"""Gradients of a new model on random tokens, by layer."""

from __future__ import annotations

import torch

from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.model import ModelConfig
from monoblock.inspection.norms import StackNorms, gradient_norms
from monoblock.nn.transformer import Transformer

ROWS, LENGTH = 4, 64  # of the random tokens


def initial_norms(config: ModelConfig, seed: int, device: str = "cpu") -> StackNorms:
    """Return the norms of the last stack of a new model, with the gradients of its layers, in fp64.

    In fp32, the gradients of a deep stack without residuals and norms would vanish altogether.
    """
    torch.manual_seed(seed)
    model = Transformer(config).to(device, torch.float64).eval()
    assert isinstance(config.input, EmbeddingConfig)
    length = min(LENGTH, config.context or LENGTH)
    texts = 1 if config.encoder is None else 2
    ids = [torch.randint(config.input.vocab, (ROWS, length), device=device) for _ in range(texts)]
    return gradient_norms(model, *ids)[-1]
