"""Check that a model consists of this package's own modules, so that faster ones may replace them in decoding."""

from __future__ import annotations

from torch import Tensor, nn

from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.embedding import Embedding, FrameEmbedding, PatchEmbedding
from monoblock.nn.experts import Experts
from monoblock.nn.feedforward import ACTIVATIONS, FeedForward
from monoblock.nn.heads import Head
from monoblock.nn.lora import LoraLinear
from monoblock.nn.module_hooks import is_customized
from monoblock.nn.norm import Norm
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix

OWN_MODULES = {
    *(Transformer, Stack, Block, Attention, FeedForward, Experts, Norm, Head),
    *(Embedding, PatchEmbedding, FrameEmbedding, LoraLinear),
    *(QuantizedMatrix, QuantizedLinear, QuantizedEmbedding),
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d),
}


def reason_to_run_as_is(model: nn.Module) -> str | None:
    """Say why a model's modules must not be replaced (another class, hooks); None if they may."""
    for name, module in model.named_modules():
        if type(module) not in OWN_MODULES:
            return f"{name or 'the model'} is a {type(module).__name__}"
        if is_customized(module):
            return f"{name or 'the model'} has hooks or a forward of its own"
        if (attribute := _replaced_attribute(module)) is not None:
            return f"{name or 'the model'} has its own {attribute}"
    return None


def _replaced_attribute(module: nn.Module) -> str | None:
    """Name a method, activation or tensor class of a module that is not the package's own; None if all are."""
    method = next((key for key in module.__dict__ if callable(getattr(type(module), key, None))), None)
    if method is not None:
        return method
    if isinstance(module, FeedForward) and module.activation is not ACTIVATIONS[module.config.activation]:
        return "activation"
    tensors = {**module._parameters, **module._buffers}
    plain = (nn.Parameter, Tensor, type(None))
    return next((key for key, tensor in tensors.items() if type(tensor) not in plain), None)
