"""Attention within packed documents, with the kernel for documents of variable length."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.packed.documents import PackedDocuments

KERNEL_QUERIES = 64  # the kernel computes this many queries of a document at a time
MAX_HEAD_SIZE = 256
MIN_CAPABILITY = 8  # of the GPU (Ampere)


@functools.cache
def _find_kernel() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """Return `varlen_attn` and the names of its arguments, which depend on the version of torch; None before 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


_KERNEL = _find_kernel() if torch.version.cuda is not None else None  # looked up outside of compiled code


def supports_varlen(q: Tensor, v: Tensor, dtype: torch.dtype) -> bool:
    """Return whether this device has the kernel, for heads of these sizes that are computed in this dtype."""
    fits = q.shape[-1] == v.shape[-1] <= MAX_HEAD_SIZE and q.shape[-1] % 8 == 0
    return fits and _KERNEL is not None and q.is_cuda and dtype in HALF_DTYPES and _has_capability(q.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_capability(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).major >= MIN_CAPABILITY


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_documents: PackedDocuments,
    k_documents: PackedDocuments,
    *,
    causal: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute attention from each document of q (1, H, T, K) to the document of k, v with the same number.

    The result is (1, H, T, K), the same as with the mask `same_document`, or `causal & same_document`.  The kernel has
    no rule for autocast, so the inputs are converted to `dtype` here.
    """
    assert _KERNEL is not None
    kernel, names = _KERNEL
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if causal:
        options |= {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in names:
            options["enable_gqa"] = True
        else:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    q_tokens, k_tokens, v_tokens = (t.squeeze(0).transpose(0, 1).contiguous().to(dtype) for t in (q, k, v))
    lengths = (_round_length(documents.max_length) for documents in (q_documents, k_documents))
    out: Tensor = kernel(q_tokens, k_tokens, v_tokens, q_documents.offsets, k_documents.offsets, *lengths, **options)
    return out.transpose(0, 1)[None]


def _round_length(length: int) -> int:
    """Round up to a multiple of the kernel's block: it takes the same time, and compiled code sees few values."""
    return -(-length // KERNEL_QUERIES) * KERNEL_QUERIES
