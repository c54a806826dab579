"""Exact mode: the bits of every logit depend on its request alone, and so do its tokens.

    fast = mb.optimize(model, exact=True)        # or Engine(model, exact=True)

It does not matter what runs beside a request, how its prompt is cut into chunks, whether its prefix was in the cache,
whether it was preempted, or whether a token was proposed before it was verified.  This holds within one kind of device,
library version, dtype and number of threads: every sum has one order, that of the positions in the row and in the
weight.  Sources are encoded one by one.  This file says what is covered; the sums are in `exact_linear`
(fast_linear.py, kernels/gpu.py), `attend_pages(exact=True)` (kernels/gpu_attention.py) and, on a CPU, the operator's
`exact` (`CpuStack.step`), to which `ModelRunner.run` gives no more tokens at a time than it takes.

                              CPU                           GPU
    weights                   fp32, 8 and 4 bits            16 bits
    greedy, samples, beams    yes                           yes
    speculation               yes                           yes
    decoder-only              yes                           yes
    encoder-decoder           yes                           yes
    windows, grouped heads    yes                           yes
    rotary, learned, sine     yes                           yes
    ALiBi, relative buckets   yes                           no
    softcap, sinks, clipping  yes                           no
    norms with offset         yes                           no
    experts, linear attention, prefix masks: no
    ensembles, adapters, edits, captures, taps: no
"""

from __future__ import annotations

import torch

from monoblock.inference.runners.cpu import STEP_SUPPORTED
from monoblock.inference.supported_models import NATIVE_NORMS, AllowList, one_of, unsupported_field
from monoblock.kernels import gpu
from monoblock.kernels.cpu.library import load_kernels
from monoblock.kernels.gpu_attention import is_head_size
from monoblock.nn.linear import Linear
from monoblock.nn.lora import LoraLinear
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.transformer import Transformer

GPU_SUPPORTED: AllowList = {
    **STEP_SUPPORTED,
    "norm.unit_offset": one_of(False),
    "attention.positions.kind": one_of("rotary"),
    **{f"attention.{name}": one_of(None) for name in ("softcap", "clip")},
    "attention.sinks": one_of(False),
    "attention.qk_norm.unit_offset": one_of(False),
    "attention.qk_norm_over": one_of("head", "width"),
    "feedforward.activation": lambda value: True,
}
ROW_MULTIPLE = 16  # the length of a row of a weight on a GPU must be a multiple of this


def reason_not_exact(model: Transformer) -> str | None:
    """Return why a model that can be optimized has no exact mode, or None if it has one."""
    assert model.decoder is not None
    assert model.head is not None
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        return "it has a LoRA adapter"
    if model.head.teacher is not None:
        return "its head has a teacher"
    device, stack = model.device.type, model.decoder.config
    dtypes = {weight.dtype for weight in model.parameters()}
    if device == "cuda":
        if not gpu.is_available():
            return "Triton or a GPU of compute capability 8.0 is missing"
        if model.config.quantize is not None:
            return "8- and 4-bit weights have none on a GPU"
        if len(dtypes) > 1 or not dtypes <= set(HALF_DTYPES):
            return f"its weights are in {next(iter(dtypes))}, and on a GPU 16 bits are needed"
        for name, module in model.named_modules():
            if isinstance(module, Linear | torch.nn.Linear) and module.in_features % ROW_MULTIPLE:
                return f"{name} has {module.in_features} inputs, not a multiple of {ROW_MULTIPLE}"
        for block in stack.layers():
            for attention in filter(None, (block.attention, block.cross)):
                size, value_size = attention.key_size(block.width), attention.value_size(block.width)
                if size != value_size or not is_head_size(size):
                    return f"heads of {size} and {value_size} are not a power of two from 16 to 256"
    elif device != "cpu":
        return f"there is none on {model.device}"
    elif dtypes - {torch.float32}:
        return f"its weights are in {next(iter(dtypes - {torch.float32}))}, and on a CPU fp32 is needed"
    elif not load_kernels().is_ready:
        return load_kernels().reason
    norm = stack.norm
    if norm is not None and (norm.kind not in NATIVE_NORMS or (device == "cuda" and norm.unit_offset)):
        return f"its decoder ends with {norm}"
    allowed = GPU_SUPPORTED if device == "cuda" else STEP_SUPPORTED
    fields = (unsupported_field(block, allowed) for block in stack.layers())
    field = next((field for field in fields if field is not None), None)
    return None if field is None else f"it has {field}"
