"""Gradients by layer: of a new model on random tokens, and of a trained language model on text."""

from __future__ import annotations

import torch

from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.model import ModelConfig
from monoblock.inspection.norms import StackNorms, gradient_norms
from monoblock.model import Transformer
from monoblock.tasks.evaluation_report import EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.running_text import iterate_windows, tokenize_corpus

ROWS, LENGTH = 4, 64  # of the tokens; a text has rows of the model's context


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


def trained_norms(loaded: LoadedModel, request: EvaluationRequest) -> StackNorms:
    """Return the norms of a trained language model on the first rows of the text of a request, in fp64."""
    config = loaded.model.config
    assert isinstance(config, ModelConfig)
    tokens = tokenize_corpus(read_corpus(request, ("text", "tokens")), loaded.tokenizer)
    ids = next(iterate_windows(tokens, config.context or LENGTH, ROWS)).inputs["source"]
    model = Transformer(config)
    model.load_state_dict(loaded.model.state_dict())
    return gradient_norms(model.double().eval(), ids)[-1]
