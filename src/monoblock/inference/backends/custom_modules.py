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
from monoblock.nn.modules.hooks import is_customized, is_patched
from monoblock.nn.modules.tree import list_modules
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
    """Return why a model's modules must not be replaced by faster ones, or None if they may be replaced.

    Reasons are a module of another class, hooks, a patched class, or a replaced method, mask, configuration or tensor.
    """
    modules = list_modules(model)
    for module in modules:
        if (reason := _reason_of_module(module)) is not None:
            name = next(name for name, one in model.named_modules() if one is module)
            return f"{name or 'the model'} {reason}"
    patched = next((kind for kind in {type(module) for module in modules} if is_patched(kind)), None)
    return None if patched is None else f"a method of {patched.__name__} was replaced"


def _reason_of_module(module: nn.Module) -> str | None:
    if type(module) not in OWN_MODULES:
        return f"is a {type(module).__name__}"
    if is_customized(module):
        return "has hooks or a forward of its own"
    attribute = _replaced_attribute(module)
    return None if attribute is None else f"has its own {attribute}"


def _replaced_attribute(module: nn.Module) -> str | None:
    """Return the name of an attribute of a module that was replaced, or None.

    It may be a method, mask, configuration or activation, or a tensor of another class.
    """
    methods = _method_names(type(module))
    if not methods.isdisjoint(module.__dict__):
        return next(key for key in module.__dict__ if key in methods)
    if isinstance(module, FeedForward) and module.activation is not ACTIVATIONS[module.config.activation]:
        return "activation"
    if isinstance(module, Stack):
        return _replaced_in_stack(module)
    if isinstance(module, Block) and (part := _part_with_own_config(module)) is not None:
        return f"{part}.config"
    tensors = {**module._parameters, **module._buffers}
    plain = (nn.Parameter, Tensor, type(None))
    return next((key for key, tensor in tensors.items() if type(tensor) not in plain), None)


_names_of_methods: dict[type, frozenset[str]] = {}


def _method_names(kind: type[nn.Module]) -> frozenset[str]:
    if kind not in _names_of_methods:
        _names_of_methods[kind] = frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))
    return _names_of_methods[kind]


def _replaced_in_stack(stack: Stack) -> str | None:
    """Return the name of an attribute of a stack that differs from the configurations of its blocks, or None."""
    if not stack.has_config_masks:
        return "masks"
    blocks = [block for block in stack.blocks if type(block) is Block]
    used = [stack.attention_configs[index] for index in stack.attention_config_index]
    same = len(blocks) == len(used) and all(
        config is block.config.attention or config == block.config.attention
        for config, block in zip(used, blocks, strict=True)
    )
    return None if same else "attention_configs"


def _part_with_own_config(block: Block) -> str | None:
    """Return the name of a block's sublayer whose own configuration differs from the block's, or None."""
    for name in ("attention", "cross", "feedforward"):
        config, part = getattr(block.config, name), getattr(block, name)
        part_config = None if part is None else getattr(part, "config", None)
        if part_config is not config and part_config != config:
            return name
    return None
