"""Linear layers for decoding on the CPU: C++ kernels multiply a few rows by a quantized matrix as it is stored.

`use_cpu_kernels(model)` returns a copy of a quantized model with these layers, which shares the model's weights.  Where
no kernel applies (another device or dtype, many rows, gradients), the layers dequantize the matrix, as those of
modules.py do.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from monoblock.kernels.cpu.library import can_multiply_many_rows, load_kernels
from monoblock.nn.lora import replace_module
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import copy_sharing_weights
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear
from monoblock.quantization.packing import PackedMatrix, group_size

ROW_MULTIPLE = 32  # the length of a dense row must be a multiple of this
# Numbers of rows of x for which the kernel is faster, by storage (measured with benchmarks/matvec.py --rows N); for
# more rows it is faster to dequantize the matrix once.  The kernel computes the same for a row alone and among others.
KERNEL_ROWS = {"dense": range(1, 9), "quantized": range(1, 33)}


class KernelLinear(QuantizedLinear):
    """Multiply x (…, in_features) by a quantized matrix with the C++ kernel for its storage."""

    bias: Tensor | None  # type: ignore[assignment]
    is_exact = False  # whether the bits of a row do not depend on the other rows

    def __init__(
        self, matrix: PackedMatrix, in_features: int, bias: Tensor | None = None, activation_bits: int = 16
    ) -> None:
        super().__init__(matrix, in_features, torch.float32)
        self.activation_bits = activation_bits
        self.register_buffer("bias", bias, persistent=False)
        has_kernel = can_multiply_many_rows(group_size(matrix))
        self.kernel_rows = range(1, sys.maxsize) if has_kernel else KERNEL_ROWS["quantized"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.packed_matrix if tensor is not None)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        is_supported = x.dtype == torch.float32 and x.device.type == "cpu" and not needs_gradient
        if not self.is_exact and (not is_supported or x.numel() // self.in_features not in self.kernel_rows):
            return super().linear(x, bias)
        out: Tensor = torch.ops.monoblock.linear(x, *self.packed_matrix, bias, self.activation_bits, self.is_exact)
        return out


class KernelEmbedding(KernelLinear):
    """A token embedding: `forward` looks up rows by id, and `linear` multiplies by the whole matrix for logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return self[ids]


def use_cpu_kernels(model: Transformer) -> Transformer:
    """Return a copy of a quantized model that uses the C++ kernels and shares the model's weights.

    If the model is not on a CPU or there are no kernels, return the model itself.
    """
    if next(iter(model.state_dict().values())).device.type != "cpu" or not load_kernels().is_ready:
        return model
    fast_model = copy_sharing_weights(model).eval()
    for path, module in list(fast_model.named_modules()):
        kind, bias = KernelLinear, getattr(module, "bias", None)
        if isinstance(module, QuantizedEmbedding) and module.dtype == torch.float32:
            kind = KernelEmbedding
        elif not isinstance(module, QuantizedLinear):
            continue
        fast = kind(module.packed_matrix, module.in_features, bias, module.activation_bits)
        replace_module(fast_model, path, fast)
    return fast_model
