"""What `mb.optimize` honours: a model of this package's own modules, with configurations that the fast ones know.

    reason_not_to_optimize(model)           # None, or why the model must run as it is
    unsupported_field(block, SUPPORTED)     # None, or the first field that a table does not allow

A field that is missing from a table is not supported, whatever its value.  So no fast path runs a configuration with a
new field until the field is added here.  The C++ operators allow fewer values, in tables derived from this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.embedding import Embedding, FrameEmbedding, PatchEmbedding
from monoblock.nn.experts import Experts
from monoblock.nn.feedforward import ACTIVATIONS, FeedForward
from monoblock.nn.heads import Head
from monoblock.nn.linear import Linear
from monoblock.nn.lora import LoraLinear
from monoblock.nn.norm import Norm
from monoblock.nn.stack import Stack
from monoblock.nn.tap import is_customized
from monoblock.nn.transformer import Transformer
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix

MODULES = {
    *(Transformer, Stack, Block, Attention, FeedForward, Experts, Norm, Head),
    *(Embedding, PatchEmbedding, FrameEmbedding, LoraLinear),
    *(QuantizedMatrix, QuantizedLinear, QuantizedEmbedding),
    *(Linear, nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d),
}
TENSORS = (nn.Parameter, Tensor, type(None))


def reason_not_to_optimize(model: Transformer) -> str | None:
    """Return why a model has no fast path, or None if it has one."""
    if model.decoder is None or model.head is None or model.head.config.kind != "language_model":
        return "it generates no text"
    if any(module.training for module in model.modules()):
        return "it is in training mode (write model.eval() first)"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    reasons = (f"{name or 'the model'} {why}" for name, one in model.named_modules() if (why := _reason(one)))
    return next(reasons, None)


def _reason(module: nn.Module) -> str | None:
    """Return why a module must not be replaced by a faster one: it is not as this package builds it."""
    kind = type(module)
    if kind not in MODULES and not _adds_to_transformer(kind):
        return f"is a {kind.__name__}"
    if is_customized(module) or is_patched(kind) or any(callable(getattr(kind, name, None)) for name in vars(module)):
        return "has hooks or methods of its own"
    if any(type(tensor) not in TENSORS for tensor in (*module._parameters.values(), *module._buffers.values())):
        return "has weights that are split among processes, or of another class"
    if isinstance(module, FeedForward) and module.activation is not ACTIVATIONS[module.config.activation]:
        return "has an activation of its own"
    if isinstance(module, Stack):
        if not module.has_config_masks:
            return "has masks of its own"
        attention = [module.attention_configs[index] for index in module.attention_config_index]
        if attention != [block.attention for block in module.config.layers()]:
            return "has attention_configs of its own"
    if isinstance(module, Block):
        for name in ("attention", "cross", "feedforward"):
            part, config = getattr(module, name), getattr(module.config, name)
            if type(part) in MODULES and part.config != config:
                return f"has a {name}.config of its own"
        field = unsupported_field(module.config, SUPPORTED)
        return None if field is None else f"has {field}, which is not supported"
    return None


def _adds_to_transformer(kind: type) -> bool:
    """Return whether a class adds methods to a Transformer, as `mb.Transformer` does, and changes none."""
    if not issubclass(kind, Transformer):
        return False
    classes = kind.__mro__[: kind.__mro__.index(Transformer) + 1]
    names = [name for one in classes for name in vars(one) if name in ("__init__", "__call__") or name[:2] != "__"]
    return len(names) == len(set(names))


# -- fields of configurations ---------------------------------------------------------------------------------------

Rule = Callable[[Any], bool]
AllowList = Mapping[str, Rule]

# The kinds that the C++ operators implement.
NATIVE_NORMS = ("layer", "rms")
NATIVE_RESIDUALS = ("sequential", "parallel", "parallel_shared")
NATIVE_POSITIONS = ("rotary", "alibi", "buckets")
NATIVE_ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid", "tanh", "identity")


def one_of(*values: object) -> Rule:
    """Return a rule that allows only these values."""
    return lambda value: value in values


def positive(value: object) -> bool:
    """Allow numbers above 0."""
    return isinstance(value, int | float) and value > 0


def _allow(prefix: str, names: str) -> dict[str, Rule]:
    return {f"{prefix}{name}": lambda value: True for name in names.split()}


NORM = "kind eps affine unit_offset cast"
HEADS = "kind heads kv_heads head_dim value_dim kept_heads unpruned_heads bias scale dropout"
PATTERN = "mask window global_tokens random_blocks block_size random_seed"
SCORES = "qk_norm qk_norm_over softcap clip sinks"
ATTENTION = f"{HEADS} {PATTERN} {SCORES} positions"
# The fields are written out, not read from the classes, so that a new one is not allowed before somebody adds it here.
SUPPORTED: AllowList = {
    **_allow("", "width norm norm_place attention_norm residual residual_scale layer_scale dropout"),
    **_allow("", "attention cross feedforward"),
    **_allow("norm.", NORM),
    **_allow("attention.", ATTENTION),
    "attention.kind": one_of("softmax"),  # linear attention has no fast path
    **_allow("attention.qk_norm.", NORM),
    **_allow("attention.positions.", "kind base dim layout scaling form max_bias count max_distance shared"),
    **_allow(
        "attention.positions.scaling.",
        "kind factor original_context low_freq_factor high_freq_factor beta_fast beta_slow truncate attention_factor "
        "short_factors long_factors",
    ),
    **_allow("cross.", ATTENTION),
    **_allow("cross.qk_norm.", NORM),
    **_allow("feedforward.", "hidden activation gated clamp bias dropout experts"),
    **_allow("feedforward.experts.", "count top_k router router_bias"),
}


def unsupported_field(config: object, allowed: AllowList) -> str | None:
    """Return the first field that is not allowed, such as "attention.window=128", or None if all are allowed."""
    for path, value in _flatten(config):
        rule = allowed.get(path)
        if rule is None or not rule(value):
            return f"{path}={value!r}"
    return None


def _flatten(config: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for each field of a configuration, and then for the fields of its value, if any."""
    for field in fields(config):  # type: ignore[arg-type]
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        yield path, value
        if is_dataclass(value):
            yield from _flatten(value, f"{path}.")


# -- patched classes ------------------------------------------------------------------------------------------------

_CALL_METHODS = ("__call__", "_wrapped_call_impl", "_call_impl")
_attributes_as_defined: dict[type, tuple[object, ...]] = {}  # of classes whose methods have been checked


def is_patched(kind: type[nn.Module]) -> bool:
    """Return whether a method of a module class, or of one of its base classes, was replaced."""
    if torch.compiler.is_compiling():  # a compiled graph keeps the methods it was traced with
        return False
    for base in kind.__mro__:
        if base is nn.Module:
            return not all(_is_defined_in(base.__dict__.get(name), base.__module__) for name in _CALL_METHODS)
        if _has_replaced_method(base):
            return True
    return False


def _has_replaced_method(kind: type) -> bool:
    attributes = tuple(kind.__dict__.values())
    if _attributes_as_defined.get(kind) == attributes:
        return False
    if not all(_is_defined_in(attribute, kind.__module__) for attribute in attributes):
        return True
    _attributes_as_defined[kind] = attributes
    return False


def _is_defined_in(attribute: object, module: str) -> bool:
    """Return whether a function, method or property comes from the source of a module; True for other attributes."""
    function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
    while isinstance(function, FunctionType) and function.__globals__["__name__"] == "torch.utils._contextlib":
        function = function.__wrapped__  # type: ignore[attr-defined]  # under torch.no_grad()
    if isinstance(function, FunctionType):
        return function.__globals__ is vars(sys.modules[module])
    return not callable(function) or isinstance(function, type)
