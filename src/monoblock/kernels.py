"""Kernels of our own for one-token steps on a GPU, in Triton: a matrix times a vector, a norm, attention over a cache.

A step reads every weight once and does next to nothing with it, so what counts is how fast memory is read and how few
kernels are started.  Each function here is the same as the plain path beside it, to rounding; tests compare them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

ROTATES = {None: 0, "halves": 1, "interleaved": 2}
BLOCK, WARPS, STAGES = (
    64,
    4,
    2,
)  # of the attention kernel: places at a time, warps, blocks loaded ahead; measured on an H200
PROGRAMS = 264  # two for each multiprocessor of a large GPU: fewer leave some idle


@functools.cache
def available() -> bool:
    """Whether Triton is here and a GPU it can compile for."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


@functools.cache
def _compiled() -> Any:
    from monoblock import kernels_triton

    return kernels_triton


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None, beside: Tensor | None = None) -> Tensor:
    """weight (N, K) times the one vector in x (…, K), plus bias, plus what it is added to: (…, N)."""
    N, K = weight.shape
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    rows, columns, warps = _tiles(N, K)
    _compiled().matvec_kernel[(-(-N // rows),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if beside is None else beside,
        out,
        N,
        K,
        bias is not None,
        beside is not None,
        rows,
        columns,
        num_warps=warps,
    )
    return out


def _tiles(N: int, K: int) -> tuple[int, int, int]:
    """Rows and columns a program takes at a time, and its warps: the best of sixty measured on an H200."""
    if K <= 1024:
        return (8, 256, 2) if N > 16384 else (2, 1024, 4)
    if K > 8192:
        return 4, 1024, 2
    return (2, 2048, 2) if N >= 2048 else (1, 1024, 8)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centered: bool, cast_after_scale: bool
) -> Tensor:
    """`norm.layer_norm` (centered) or `norm.rms_norm` in one kernel."""
    out, K = torch.empty_like(x), x.shape[-1]
    block = 1 << (K - 1).bit_length()
    given = (x if weight is None else weight, x if bias is None else bias)
    _compiled().norm_kernel[(x.numel() // K,)](
        x, *given, out, K, eps,
        CENTERED=centered, SCALED=weight is not None, BIASED=bias is not None, AFTER=cast_after_scale, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up for the joined output [gate | up] (…, 2F): (…, F)."""
    F = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
    blocks = -(-F // 512)
    _compiled().gated_kernel[(gate_up.numel() // (2 * F), blocks)](gate_up, out, F, GATES[activation], 512, num_warps=4)
    return out


GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str | None = None,
) -> Tensor:
    """One new token a row: turned, written behind what is cached, and attention over all of it.

    q (B, H, 1, K), k and v (B, G, 1, K), keys and values (B, G, capacity, K), lengths (B,) before the new token.
    """
    B, H, _, K = q.shape
    G, capacity = keys.shape[1], keys.shape[2]
    splits = max(1, min(-(-capacity // 64), PROGRAMS // (B * G)))
    out = torch.empty(B, H, 1, K, dtype=q.dtype, device=q.device)
    parts = torch.empty(B * H * splits * (K + 2) if splits > 1 else 1, dtype=torch.float32, device=q.device)
    turned = ROTATES[layout] if cos is not None else 0
    pairs = cos.shape[-1] if cos is not None else 1
    rows = cos.shape[0] if cos is not None else 1
    heads = H // G
    padded = max(16, 1 << (heads - 1).bit_length())
    _compiled().attend_kernel[(B * G, splits)](
        q, k, v, keys, values, lengths, cos if cos is not None else q, sin if sin is not None else q, out, parts,
        K**-0.5 if scale is None else scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
        pairs if rows > 1 else 0, H, G, splits,
        HEADS=heads, PADDED=padded, K=K, PAIRS=pairs, TURNED=turned,
        BLOCK=BLOCK if K <= 128 else BLOCK // 2, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _compiled().combine_kernel[(B * H,)](parts, out, splits, 1 << (splits - 1).bit_length(), K, num_warps=1)
    return out
