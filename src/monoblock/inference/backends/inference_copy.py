"""A copy of a model for decoding: faster modules that share the model's weights.

    copy = build_inference_copy(model)      # a Transformer in evaluation mode; the model itself is not changed

Parameters are shared, not copied.  There are two exceptions on a GPU: projections that are computed together
(fused_linear.py) and an output table with padding (padded_vocabulary.py).  These are copied, unless the weights have
been arranged in memory for them (`mb.optimize`).
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from monoblock.inference.backends.cpu_step import InferenceStack, fuse_stack
from monoblock.inference.backends.custom_modules import reason_to_run_as_is
from monoblock.inference.backends.fast_modules.gpu_quantized_linear import (
    InferenceQuantizedEmbedding,
    InferenceQuantizedLinear,
)
from monoblock.inference.backends.fast_modules.inference_experts import InferenceExperts
from monoblock.inference.backends.fast_modules.inference_modules import (
    InferenceAttention,
    InferenceBlock,
    InferenceFeedForward,
    InferenceHead,
    InferenceLinear,
    InferenceNorm,
)
from monoblock.inference.backends.fast_modules.joined_norms import join_norms
from monoblock.inference.backends.supported_fields import (
    ATTENTION,
    BLOCK,
    EXPERTS,
    FEEDFORWARD,
    NORM,
    POSITIONS,
    SCALING,
    AllowList,
    allow,
    one_of,
    unsupported_field,
)
from monoblock.kernels.cpu.autograd import gelu_tanh_inference
from monoblock.kernels.cpu.library import load_kernels
from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.experts import Experts
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.heads import Head
from monoblock.nn.norm import Norm
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer
from monoblock.quantization.cpu_linear import KERNEL_ROWS, use_cpu_kernels
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear

M = TypeVar("M", bound=nn.Module)

MIN_NATIVE_WEIGHTS = 2_000_000  # for smaller models, compiling the CPU kernels takes longer than they save

INFERENCE_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: InferenceLinear,
    Attention: InferenceAttention,
    Block: InferenceBlock,
    FeedForward: InferenceFeedForward,
    Experts: InferenceExperts,
    Norm: InferenceNorm,
    Head: InferenceHead,
    Stack: InferenceStack,
    QuantizedLinear: InferenceQuantizedLinear,
    QuantizedEmbedding: InferenceQuantizedEmbedding,
}

SUPPORTED: AllowList = {
    **allow(f"{BLOCK} cross"),
    **allow(NORM, "norm."),
    **allow(ATTENTION, "attention."),
    "attention.kind": one_of("softmax"),
    **allow(NORM, "attention.qk_norm."),
    **allow(POSITIONS, "attention.positions."),
    **allow(SCALING, "attention.positions.scaling."),
    **allow(ATTENTION, "cross."),
    **allow(NORM, "cross.qk_norm."),
    **allow(f"{FEEDFORWARD} experts", "feedforward."),
    **allow(EXPERTS, "feedforward.experts."),
}


def reason_for_no_copy(model: Transformer) -> str | None:
    """Return why a model cannot be decoded with an inference copy, or None if the copy would give the same results."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    for stack in (model.encoder, model.decoder):
        for block in dict.fromkeys(stack.config.layers()) if stack is not None else ():
            if (field := unsupported_field(block, SUPPORTED)) is not None:
                return f"the inference copy does not support {field}"
    return reason_to_run_as_is(model)


def build_inference_copy(model: Transformer, *, fuse: bool | None = None) -> Transformer:
    """Build the inference copy of a model.

    On a CPU with a C++ compiler, its decoder runs a few tokens at a time in one C++ operator (cpu_step.py).  `fuse` is
    whether to join projections and pad the output table; None does so only on a GPU, where it is faster.
    """
    with torch.inference_mode(False), torch.no_grad():
        if model.config.quantize is not None:
            copied = _copy_module(use_cpu_kernels(model))
            if model.device.type == "cuda":
                _fuse_weights(copied)
                for module in copied.modules():
                    if isinstance(module, InferenceNorm):
                        module.quantizes = True
                if copied.decoder is not None:
                    join_norms(copied.decoder)
            return _use_fused_stack(copied)
        copied = _copy_module(model)
        if fuse if fuse is not None else model.device.type == "cuda":
            _fuse_weights(copied)
        large = sum(weight.numel() for weight in model.parameters()) >= MIN_NATIVE_WEIGHTS
        if is_cpu_fp32(model) and large and load_kernels().is_ready:
            for module in copied.modules():
                if isinstance(module, (InferenceLinear, InferenceHead)):
                    module.kernel_rows = KERNEL_ROWS["dense"]
                elif isinstance(module, InferenceAttention):
                    module.uses_row_kernel = True
            _use_fused_stack(copied)
        return copied


def is_cpu_fp32(model: nn.Module) -> bool:
    weight = next(iter(model.parameters()))
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _use_fused_stack(model: Transformer) -> Transformer:
    if isinstance(model.decoder, InferenceStack) and is_cpu_fp32(model) and load_kernels().is_ready:
        model.decoder.fused_stack = fuse_stack(model.decoder)
        for module in model.modules():
            if isinstance(module, InferenceFeedForward) and module.config.activation == "gelu_tanh":
                module.activation = gelu_tanh_inference
    return model


def _copy_module(module: M) -> M:
    """Copy a module and its children but not their tensors; give each copy its class in INFERENCE_CLASSES, if any."""
    copied = copy.copy(module)
    copied.training = False
    copied._modules = {name: None if child is None else _copy_module(child) for name, child in module._modules.items()}
    kind: Any = INFERENCE_CLASSES.get(type(module))
    if kind is not None:
        copied.__class__ = kind
    return copied


def _fuse_weights(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, (InferenceAttention, InferenceFeedForward)):
            module.fuse()
        elif isinstance(module, InferenceHead):
            module.pad(model.output_embedding)
