"""Quantize a Transformer: replace its matrices by modules that store them in 8 or 4 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from monoblock.config.model import ModelConfig, QuantizeConfig
from monoblock.errors import InputError
from monoblock.nn.arguments import check_model
from monoblock.nn.experts import Experts
from monoblock.nn.lora import lora_layers, replace_module
from monoblock.nn.transformer import Transformer
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound=Transformer)

DEFAULT_GROUP_SIZES = {8: 64, 4: 32}  # bits -> weights that share a scale
TABLE_MODULES = ("input.token", "target.token", "head.output")  # quantized to table_bits


def quantize(
    model: T,
    *,
    bits: int = 8,
    group: int | None = None,
    table_bits: int = 8,
    activation_bits: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> T:
    """Return a copy of a model in which every matrix except routers is quantized to `bits` bits.

    The token embedding and the output matrix are quantized to `table_bits` bits instead.  `group` weights share a
    scale.  Adapters are merged into their weights first.  `progress(done, total)` is called after each matrix.

    With `activation_bits=8` the inputs of each matrix are rounded to 8 bits before every product, which costs some
    accuracy and makes prompts faster on a CPU (see `QuantizeConfig`).
    """
    check_model(model, Transformer, "quantize")
    if model.config.quantize is not None:
        raise InputError(
            f"this model is quantized to {model.config.quantize.bits} bits already; give the model before quantization"
        )
    numbers: dict[str, Any] = {"bits": bits, "table_bits": table_bits, "activation_bits": activation_bits}
    scheme = QuantizeConfig(**numbers, group=DEFAULT_GROUP_SIZES.get(bits, 64) if group is None else group)
    quantized = quantize_modules(copy_sharing_weights(merge_adapters(model)), scheme, progress)
    for tensor in [*quantized.parameters(), *quantized.buffers()]:
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.data = tensor.data.clone()  # norms, biases and positions, so that they are not shared with the model
    return quantized


def build_quantized(cls: type[T], config: ModelConfig, dtype: torch.dtype = torch.float32) -> T:
    """Build a model with quantized modules, into which stored weights can be loaded.

    On the meta device no weight is computed.
    """
    assert config.quantize is not None
    return quantize_modules(cls(replace(config, quantize=None)).to(dtype), config.quantize)


def dequantize(model: T) -> T:
    """Return a copy of a quantized model with floating-point matrices; other models are returned unchanged."""
    if model.config.quantize is None:
        return model
    with torch.device("meta"):
        dequantized = type(model)(replace(model.config, quantize=None))
    matrices = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedMatrix)}
    state = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in matrices}
    state |= {name: tensor for name, tensor in model.state_dict().items() if name.endswith(".bias")}
    parameters = dict(dequantized.named_parameters())
    for path, module in matrices.items():
        state[path if path in parameters else f"{path}.weight"] = module.weight.detach()
    dequantized.load_state_dict(state, assign=True, strict=True)
    dequantized.loaded_from = model.loaded_from
    return dequantized.train(model.training)


def merge_adapters(model: M) -> M:
    """Return a model without LoRA adapters: they are merged into its weights, and it is dequantized.

    A model without adapters is returned unchanged.  Otherwise the result is a new model, which shares the storage of
    the weights that have no adapter.
    """
    layers = dict(lora_layers(model))
    if not layers:
        return model
    merged: Any = copy_sharing_weights(model)
    for name, layer in layers.items():
        replace_module(merged, name, layer.to_linear())
    return cast(M, dequantize(merged) if isinstance(merged, Transformer) else merged)


def stored_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor that belongs to a quantized matrix, by its name in the state_dict."""
    matrices = [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedMatrix)]
    buffers = [(f"{path}.{name}", tensor) for path, module in matrices for name, tensor in module.named_buffers()]
    return {name: tensor.dtype for name, tensor in buffers}


def copy_sharing_weights(model: M) -> M:
    """Copy the modules of a model, but share the storage of the weights.

    Moving or casting one of the two models does not change the other.
    """
    memo: dict[int, object] = {id(buffer): buffer.detach() for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach(), p.requires_grad and not p.is_inference())
    return copy.deepcopy(model, memo)


def quantize_modules(model: T, config: QuantizeConfig, progress: Callable[[int, int], None] | None = None) -> T:
    """Replace the matrices of a model by quantized modules, in place."""
    matrices = list(quantizable_matrices(model))
    for done, (parent, name, path) in enumerate(matrices, start=1):
        bits = config.table_bits if path in TABLE_MODULES else config.bits
        quantized = _quantize_module(getattr(parent, name), bits, config.group)
        quantized.activation_bits = config.activation_bits
        parent._parameters.pop(name, None)  # of stacked experts
        parent._modules[name] = quantized.train(parent.training)
        if progress is not None:
            progress(done, len(matrices))
    model.config = replace(model.config, quantize=config)
    return model


def quantizable_matrices(model: Transformer) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (parent module, attribute name, full name) of every matrix that `quantize` replaces."""
    for path, module in model.named_modules():
        for name, child in module.named_children():
            full_name = f"{path}.{name}" if path else name
            # A router has few weights, and they decide which experts a token gets.
            is_linear = isinstance(child, nn.Linear) and name != "router"
            if is_linear or (isinstance(child, nn.Embedding) and full_name in TABLE_MODULES):
                yield module, name, full_name
        if isinstance(module, Experts):
            names = [name for name in ("up", "gate", "down") if module._parameters.get(name) is not None]
            yield from ((module, name, f"{path}.{name}") for name in names)


def _quantize_module(matrix: nn.Module | torch.Tensor, bits: int, group: int) -> QuantizedMatrix:
    if isinstance(matrix, torch.Tensor):
        return QuantizedMatrix.from_weight(matrix, bits, group)
    if isinstance(matrix, nn.Linear):
        return QuantizedLinear.from_linear(matrix, bits, group)
    assert isinstance(matrix, nn.Embedding)
    return QuantizedEmbedding.from_weight(matrix.weight, bits, group)
