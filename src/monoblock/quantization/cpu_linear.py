"""Linear layers for decoding on the CPU: C++ kernels multiply a few rows by a stored matrix without dequantizing it.

`use_cpu_kernels(model)` returns a copy of a model with these layers, which shares the model's weights.  Where no kernel
applies (another device or dtype, many rows, gradients), the layers dequantize the matrix and multiply with torch.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.kernels.cpu.library import can_multiply_many_rows, load_kernels
from monoblock.nn.transformer import Transformer
from monoblock.quantization.activations import round_activations
from monoblock.quantization.convert import TABLE_MODULES, copy_sharing_weights, replace_child
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix
from monoblock.quantization.packing import PackedMatrix, group_size, unpack

ROW_MULTIPLE = 32  # the length of a dense row must be a multiple of this
# Numbers of rows of x for which the kernel is faster, by storage (measured with benchmarks/matvec.py --rows N); for
# more rows it is faster to dequantize the matrix once.  The kernel computes the same for a row alone and among others.
KERNEL_ROWS = {"dense": range(1, 9), "half": range(1, 9), "int8": range(1, 33), "int4": range(1, 33)}


class KernelLinear(nn.Module):
    """Multiply x (…, in_features) by a matrix with the C++ kernel for its storage, which is dense, int8 or int4."""

    bias: Tensor | None
    is_exact = False  # whether the bits of a row do not depend on the other rows

    def __init__(
        self,
        matrix: PackedMatrix | Tensor,
        in_features: int,
        bias: Tensor | None = None,
        activation_bits: int = 16,
    ) -> None:
        super().__init__()
        self.activation_bits = activation_bits
        tensors = (matrix,) if isinstance(matrix, Tensor) else tuple(tensor for tensor in matrix if tensor is not None)
        self.in_features, self.num_tensors = in_features, len(tensors)
        self.storage = {1: "dense", 2: "int8", 3: "int4"}[len(tensors)]
        for index, tensor in enumerate(tensors):
            self.register_buffer(str(index), tensor, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.kernel_rows = self._choose_kernel_rows()

    def _choose_kernel_rows(self) -> range:
        """Return the numbers of rows of x for which the kernel is faster than torch."""
        first = self.tensors[0]
        if self.group and can_multiply_many_rows(self.group):
            return range(1, sys.maxsize)
        return KERNEL_ROWS["half" if first.dtype == torch.bfloat16 else self.storage]

    @property
    def group(self) -> int:
        """The number of weights that share a scale; 0 if the matrix is not quantized."""
        return 0 if self.storage == "dense" else group_size(PackedMatrix(*self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers[str(index)] for index in range(self.num_tensors))  # type: ignore[misc]

    @property
    def weight(self) -> Tensor:
        return self.dequantize(torch.float32)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        if self.storage == "dense":
            return self.tensors[0].to(dtype)
        return unpack(PackedMatrix(*self.tensors), self.in_features, dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_exact:
            scale, least = (*self.tensors[1:], None, None)[:2]
            out: Tensor = torch.ops.monoblock.linear_exact(x, self.tensors[0], scale, least, bias, self.activation_bits)
            return out
        if self._supports(x):
            kernel = getattr(torch.ops.monoblock, f"linear_{self.storage}")
            bits = () if self.activation_bits == 16 else (self.activation_bits,)
            return kernel(x, *self.tensors, bias, *bits)
        if self.activation_bits == 8:
            x = round_activations(x, self.group)
        return F.linear(x, self.dequantize(x.dtype), bias)

    def _supports(self, x: Tensor) -> bool:
        if x.dtype != torch.float32 or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            return False
        return x.numel() // self.in_features in self.kernel_rows

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.bias)


class KernelEmbedding(KernelLinear):
    """A token embedding: `forward` looks up rows by id, and `linear` multiplies by the whole matrix for logits."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.storage == "dense":
            return F.embedding(ids, self.tensors[0])
        return unpack(PackedMatrix(*(tensor[ids] for tensor in self.tensors)), self.in_features)


def use_cpu_kernels(model: Transformer) -> Transformer:
    """Return a copy of a model that uses the C++ kernels and shares the model's weights.

    If the model is not on a CPU or there are no kernels, return the model itself.
    """
    if next(iter(model.state_dict().values())).device.type != "cpu" or not load_kernels().is_ready:
        return model
    fast_model = copy_sharing_weights(model).eval()
    for path, module in list(fast_model.named_modules()):
        fast = _kernel_module(module) if path in TABLE_MODULES or not isinstance(module, nn.Embedding) else None
        if fast is not None:
            parent, _, name = path.rpartition(".")
            replace_child(fast_model.get_submodule(parent), name, fast)
    return fast_model


def _kernel_module(module: nn.Module) -> KernelLinear | None:
    """Return the layer that computes the same as `module`, but with a kernel, or None if no kernel applies."""
    if isinstance(module, QuantizedEmbedding):
        if module.dtype != torch.float32:
            return None
        return KernelEmbedding(module.packed_matrix, module.in_features, activation_bits=module.activation_bits)
    if isinstance(module, QuantizedLinear):
        return KernelLinear(module.packed_matrix, module.in_features, module.bias, module.activation_bits)
    if isinstance(module, QuantizedMatrix) or not isinstance(module, (nn.Linear, nn.Embedding)):
        return None
    weight = module.weight.detach()
    if weight.shape[-1] % ROW_MULTIPLE or not weight.is_contiguous() or weight.dtype != torch.float32:
        return None
    if isinstance(module, nn.Linear):
        return KernelLinear(weight, weight.shape[-1], module.bias)
    return KernelEmbedding(weight, weight.shape[-1])
