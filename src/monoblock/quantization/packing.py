"""Quantize weights to 8 or 4 bits and back: each row is split into groups, and each group has its own scale.

    8 bits   w = s q            q from -127 to 127
    4 bits   w = m + s q        q from 0 to 15, two in a byte: of 32 neighbouring weights, the first 16 are the lower
                                nibbles of 16 bytes and the others the upper nibbles

Scales s and minima m are bfloat16; q is chosen after they are rounded to bfloat16, so that the rounding adds almost no
error.  Activations can be rounded to 8 bits with the same groups, as x = s q with s = max |x| / 127 in fp32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.errors import InputError
from monoblock.kernels.cpu.library import load_kernels

NIBBLE_BLOCK = 16
SMALLEST = 1e-30  # activations whose largest |x| in a group is not above this become zeros
KERNEL_MIN_WEIGHTS = 1 << 20  # for fewer weights, the packing kernel is not worth compiling
CHUNK_WEIGHTS = 1 << 22  # weights quantized at once, which limits the memory that 4-bit quantization needs
RANGE_STEPS = [14.0 + step / 4 for step in range(9)]  # 4 bits: steps across a group's range; beyond 15 it is clipped


class PackedMatrix(NamedTuple):
    """A quantized matrix (…, rows, columns)."""

    packed: Tensor  # int8 (…, rows, columns), or uint8 (…, rows, columns / 2)
    scale: Tensor  # (…, rows, groups)
    least: Tensor | None = None  # (…, rows, groups), 4 bits only


def pack(weight: Tensor, bits: int, group: int) -> PackedMatrix:
    """Quantize a matrix (…, rows, in_features); the last group of a row is padded with zeros."""
    if not bool(weight.isfinite().all()):
        raise InputError("a weight is not a finite number, so it cannot be quantized; look for where training diverged")
    groups = F.pad(weight.detach(), (0, -weight.shape[-1] % group)).reshape(-1, group)
    quantize_groups = _quantize_int8 if bits == 8 else _quantize_int4
    chunks = [quantize_groups(chunk.float()) for chunk in groups.split(max(1, CHUNK_WEIGHTS // group))]
    integers, *scales = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    if bits == 4:
        low, high = integers.unflatten(-1, (-1, 2, NIBBLE_BLOCK)).unbind(-2)
        integers = (low | high << 4).flatten(-2)
    rows = weight.shape[:-1]
    return PackedMatrix(integers.reshape(*rows, -1), *(scale.reshape(*rows, -1) for scale in scales))


def unpack(matrix: PackedMatrix, in_features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a matrix to (…, rows, in_features), rounded once to `dtype`."""
    integers = matrix.packed
    if matrix.least is not None:
        blocks = integers.unflatten(-1, (-1, NIBBLE_BLOCK))
        integers = torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)
    weight = integers.unflatten(-1, (matrix.scale.shape[-1], -1)).to(dtype)
    scale = matrix.scale.to(dtype)[..., None]
    if matrix.least is None:
        weight = weight * scale
    else:  # in 16 bits the product alone would be rounded, by more than the weight; addcmul rounds the sum
        weight = torch.addcmul(matrix.least.to(dtype)[..., None], weight, scale)
    return weight.flatten(-2)[..., :in_features]


def group_size(matrix: PackedMatrix) -> int:
    """Return the number of weights that share a scale."""
    return matrix.packed.shape[-1] * (1 if matrix.least is None else 2) // matrix.scale.shape[-1]


def empty_packed(shape: tuple[int, ...], bits: int, group: int, device: torch.device) -> PackedMatrix:
    """Allocate the tensors of a quantized matrix of this shape, without setting their values."""
    *rows, in_features = shape
    groups = math.ceil(in_features / group)
    dtype, columns = (torch.int8, groups * group) if bits == 8 else (torch.uint8, groups * group // 2)
    integers = torch.empty((*rows, columns), dtype=dtype, device=device)
    scale = torch.empty((*rows, groups), dtype=torch.bfloat16, device=device)
    return PackedMatrix(integers, scale, torch.empty_like(scale) if bits == 4 else None)


# -- groups: tensors of shape (groups, weights) -----------------------------------------------------------------------


def _quantize_int8(group: Tensor) -> tuple[Tensor, Tensor]:
    """Map the largest magnitude of a group to ±127; return integers and scales.

    The scale is rounded up to bfloat16, so that nothing is clipped.
    """
    is_large = group.device.type == "cpu" and group.numel() >= KERNEL_MIN_WEIGHTS
    if not is_large or group.shape[-1] % NIBBLE_BLOCK or not load_kernels().is_ready:
        return quantize_int8_reference(group)
    integers, scale = torch.ops.monoblock.quantize_int8(group.contiguous())
    return integers, scale


def quantize_int8_reference(group: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_quantize_int8` with torch operations."""
    scale = _round_up_to_bfloat16(group.abs().amax(-1) / 127)
    integers = (group / _replace_zeros(scale.float())[:, None]).round().clamp(-127, 127)
    return integers.to(torch.int8), scale


def _replace_zeros(tensor: Tensor) -> Tensor:
    return torch.where(tensor == 0, 1.0, tensor)


def _round_up_to_bfloat16(tensor: Tensor) -> Tensor:
    nearest = tensor.to(torch.bfloat16)
    return torch.where(nearest.float() < tensor, torch.nextafter(nearest, torch.full_like(nearest, math.inf)), nearest)


def _quantize_int4(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to 4 bits; return integers, scales and minima.

    Several step sizes are tried.  For each of them, s and m are fitted to the resulting integers, and every group takes
    the step size with the least squared error.
    """
    low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
    spread = _replace_zeros(high - low)
    best = torch.full_like(low, math.inf)
    scale, least = spread / 15, low
    for steps in RANGE_STEPS:
        start = (high + low) / 2 - 7.5 * spread / steps
        integers = ((group - start) * (steps / spread)).round().clamp(0, 15)
        s, m = _fit_scale_and_minimum(group, integers)
        error = (_nearest_levels(group, s, m) * s + m - group).square().sum(-1, keepdim=True)
        better = error < best
        best, scale, least = (torch.where(better, new, old) for new, old in ((error, best), (s, scale), (m, least)))
    scale, least = scale.to(torch.bfloat16), least.to(torch.bfloat16)
    integers = _nearest_levels(group, scale.float(), least.float())
    return integers.to(torch.uint8), scale[:, 0], least[:, 0]


def _fit_scale_and_minimum(group: Tensor, integers: Tensor) -> tuple[Tensor, Tensor]:
    """Fit s and m, rounded to bfloat16, so that m + s q approximates a group w by least squares."""
    mean_w, mean_q = group.mean(-1, keepdim=True), integers.mean(-1, keepdim=True)
    centered = integers - mean_q
    s = (centered * (group - mean_w)).sum(-1, keepdim=True) / _replace_zeros(centered.square().sum(-1, keepdim=True))
    s = s.to(torch.bfloat16).float()
    return s, (mean_w - s * mean_q).to(torch.bfloat16).float()


def _nearest_levels(group: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    return ((group - least) / _replace_zeros(scale)).round().clamp(0, 15)


# -- activations ------------------------------------------------------------------------------------------------------


def round_activations(x: Tensor, group: int) -> Tensor:
    """Return activations x (…, inputs) rounded to 8 bits; the last group may have fewer inputs.

    A group with an infinity or a NaN becomes NaN.  The gradient passes through unchanged.  The C++ kernels of
    kernels/cpu round with the same floating-point operations.
    """
    return _RoundActivations.apply(x, group)


class _RoundActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        groups = F.pad(wide, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
        largest = groups.abs().amax(-1, keepdim=True)
        scale = torch.full_like(largest, 127) / largest  # 127 / largest would be 127 (1 / largest)
        integers = (groups * torch.where(largest > SMALLEST, scale, 0.0)).round()
        rounded = integers * (largest / 127)
        return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
