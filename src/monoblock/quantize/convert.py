"""A model with its matrices quantised: the same Transformer, with other modules in the places of its matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from monoblock.config import ModelConfig, QuantizeConfig
from monoblock.errors import ConfigError, InputError
from monoblock.experts import Experts
from monoblock.model import Transformer
from monoblock.quantize.modules import STORED, Quantized, QuantizedEmbedding, QuantizedLinear

GROUPS = {8: 64, 4: 32}  # bits -> weights that share a scale, where nobody says otherwise
TABLES = ("input.token", "target.token", "head.output")  # what table_bits is for
KEPT = ("router",)  # a router's few weights decide where tokens go


def quantized(
    model: Transformer,
    *,
    bits: int = 8,
    group: int | None = None,
    table_bits: int = 8,
    watch: Callable[[int, int], None] | None = None,
) -> Transformer:
    """A copy with every matrix but routers' in `bits` bits; the model given keeps its own.

    The token table and the output matrix take `table_bits`.  `watch(done, of)` is called after each matrix.
    """
    if bits not in GROUPS or table_bits not in GROUPS:
        wrong = f"bits={bits}" if bits not in GROUPS else f"table_bits={table_bits}"
        raise ConfigError(f"{wrong} cannot be: weights are stored in 8 or 4 bits; write 8 or 4")
    if not isinstance(model, Transformer):
        raise InputError(f"a {type(model).__name__} is not quantised here; give a Transformer")
    if model.config.quantize is not None:
        raise InputError(f"this model is quantised to {model.config.quantize.bits} bits already; give the original")
    scheme = QuantizeConfig(bits=bits, group=GROUPS[bits] if group is None else group, table_bits=table_bits)  # type: ignore[arg-type]
    made = lay_out(sharing(model), scheme, watch)
    for tensor in [*made.parameters(), *made.buffers()]:
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.data = tensor.data.clone()  # norms, biases, positions: small, and the copy's own
    return made


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """A quantised model with room for its weights, as the device in force says (meta, to lay stored ones in)."""
    assert config.quantize is not None
    return lay_out(Transformer(replace(config, quantize=None)).to(dtype), config.quantize)


def widened(model: Transformer) -> Transformer:
    """The same model with ordinary matrices, worth what the small numbers are worth; one that has them is itself."""
    if model.config.quantize is None:
        return model
    with torch.device("meta"):
        made = Transformer(replace(model.config, quantize=None))
    small = {path: module for path, module in model.named_modules() if isinstance(module, Quantized)}
    wide = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in small}
    wide |= {name: tensor for name, tensor in model.state_dict().items() if name.endswith(".bias")}
    for path, module in small.items():
        wide[path if path in dict(made.named_parameters()) else f"{path}.weight"] = module.weight.detach()
    made.load_state_dict(wide, assign=True, strict=True)
    return made.train(model.training)


def stored_formats(model: nn.Module) -> dict[str, torch.dtype]:
    """The tensors of quantised matrices by their names in the model, with the format each must have."""
    held = [(path, module) for path, module in model.named_modules() if isinstance(module, Quantized)]
    found = [(f"{path}.{name}", getattr(module, name)) for path, module in held for name in STORED]
    return {name: tensor.dtype for name, tensor in found if tensor is not None}


def sharing(model: Transformer) -> Transformer:
    """A copy of the modules around the same numbers; moving or casting the one leaves the other where it is."""
    memo: dict[int, object] = {id(one): nn.Parameter(one.detach(), one.requires_grad) for one in model.parameters()}
    memo |= {id(buffer): buffer.detach() for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def lay_out(model: Transformer, scheme: QuantizeConfig, watch: Callable[[int, int], None] | None = None) -> Transformer:
    """Put quantised modules in the places of a model's matrices."""
    places = list(matrices(model))
    for done, (parent, name, full) in enumerate(places, start=1):
        bits = scheme.table_bits if full in TABLES else scheme.bits
        put(parent, name, _small(getattr(parent, name), bits, scheme.group))
        if watch is not None:
            watch(done, len(places))
    model.config = replace(model.config, quantize=scheme)
    return model


def matrices(model: Transformer) -> Iterator[tuple[nn.Module, str, str]]:
    """The matrices that are quantised: the module each hangs on, its name there, its name in the model."""
    for path, module in model.named_modules():
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            linear, words = isinstance(child, nn.Linear), isinstance(child, nn.Embedding)
            if (linear and name not in KEPT) or (words and full in TABLES):
                yield module, name, full
        if isinstance(module, Experts):
            stacked = [name for name in ("up", "gate", "down") if module._parameters.get(name) is not None]
            yield from ((module, name, f"{path}.{name}") for name in stacked)


def _small(matrix: nn.Module | torch.Tensor, bits: int, group: int) -> Quantized:
    if isinstance(matrix, torch.Tensor):
        return Quantized.of(matrix, bits, group)
    if isinstance(matrix, nn.Linear):
        return QuantizedLinear.of_linear(matrix, bits, group)
    assert isinstance(matrix, nn.Embedding)
    return QuantizedEmbedding.of(matrix.weight, bits, group)


def put(parent: nn.Module, name: str, module: nn.Module) -> None:
    parent._parameters.pop(name, None)
    parent._modules.pop(name, None)
    parent.add_module(name, module)
