"""Helpers for tests of the CPU operators of decoding."""

import torch

import monoblock as mb
from monoblock.inference import fast_modules, generate
from monoblock.inference.fast_linear import Choices, FastQuantizedLinear
from monoblock.inference.runners.cpu import CpuStack
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.nn.lora import replace_module
from monoblock.quantization.convert import copy_sharing_weights
from monoblock.quantization.modules import QuantizedLinear, QuantizedMatrix

ON_CPU = Choices(fuse=False, quantized=False, native=False)


def record_operator_steps(monkeypatch):
    """Return a list of the number of tokens in each step of a decoder that the operator takes, also for toy models."""
    taken, step = [], CpuStack.step

    def record(self, x, lengths, counts, *args, **options):
        if options.get("causal", True):
            taken.append(int(counts.sum()))
        return step(self, x, lengths, counts, *args, **options)

    monkeypatch.setattr(CpuStack, "step", record)
    use_kernels_for_toys(monkeypatch)
    return taken


def use_kernels_for_toys(monkeypatch):
    """Use the CPU kernels for models of every size."""
    assert generate.MIN_NATIVE_WEIGHTS, "it is imported before, so that it keeps its own number"
    monkeypatch.setattr(fast_modules, "MIN_NATIVE_WEIGHTS", 0)


def use_cpu_kernels(model):
    """A copy of a quantized model whose matrices are multiplied by the CPU kernels; it shares the model's weights."""
    fast = copy_sharing_weights(model).eval()
    for path, module in list(fast.named_modules()):
        if isinstance(module, QuantizedMatrix) and type(module) in fast_modules.FAST_MODULES:
            replace_module(fast, path, fast_modules.FAST_MODULES[type(module)](module, ON_CPU))
    return fast


def kernel_layer(matrix, inputs, bias=None, activation_bits=16):
    """A linear layer with a packed matrix that is multiplied by the CPU kernels."""
    layer = QuantizedLinear(matrix, inputs, torch.float32)
    layer.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    layer.activation_bits = activation_bits
    return FastQuantizedLinear(layer, ON_CPU)


def optimize(model):
    """The optimized model, or the model itself if it cannot be optimized."""
    return model if reason_not_to_optimize(model) else mb.optimize(model)
