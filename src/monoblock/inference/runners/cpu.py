"""Stacks on a CPU as C++ operators: a decoder that reads and writes keys and values in pages, and an encoder.

    decoder = fuse_stack(model.decoder)                   # a CpuStack, or None if a block is not supported
    if decoder is not None and decoder.supports(x, counts):
        y = decoder.step(
            x,                                            # (R, T, D) fp32: embedded tokens
            lengths, counts,                              # (R,) int64: tokens stored before, and new ones, at most T
            tables,                                       # (R, P) int32: the pages of each row
            keys, values,                                 # a pool (pages, G, 16, K) for each block
            source_keys, source_values,                   # likewise for each block with cross-attention, else ()
            source_tables, source_lengths,                # (R, PS) int32 and (R,) int64, or None
            positions,                                    # (R, T) int64, or None: the number of tokens before
        )                                                 # (R, T, D), zeros behind the new tokens of a row
    encoder = fuse_encoder(model.encoder)                 # a CpuEncoder, or None
    y = encoder(x, lengths)                               # (N, D): texts of these lengths one after the other

Token number i of a row lies at `pool[tables[row, i // 16], :, i % 16]`.  A step first writes the keys and values of all
new tokens to the pages in the tables, so no page that is written may be in two rows.  A row with counts 0 does nothing.
Windows and biases go by the number of tokens in between; `positions` are only those of rotary angles.  Padding entries
of a table are never read.  Several threads may call one CpuStack at the same time with different pages.

With `exact=True` the bits of a row do not depend on other rows, nor on how its tokens are divided into steps; otherwise
products of few and of many tokens differ in the last bits.

`torch.ops.monoblock.copy_pages(pools, sources, targets, used)` copies the first used[i] tokens of page sources[i] to
page targets[i] in all pools; the other three are int64 (C,).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.inference.backends.cpu_search_operators import build_encoder
from monoblock.inference.backends.cpu_step import FusedStack, can_fuse
from monoblock.nn.stack import Stack

PAGE_SIZE = 16  # tokens in a page
MAX_TOKENS = 512  # maximum number of tokens in one step, of all rows together


def fuse_stack(stack: Stack) -> CpuStack | None:
    """Build the C++ operator for a decoder; return None if it does not support one of the blocks."""
    return CpuStack(stack) if can_fuse(stack) else None


class CpuStack:
    """The C++ operator that runs all blocks of a decoder, with its position tables."""

    max_tokens = MAX_TOKENS

    def __init__(self, stack: Stack) -> None:
        fused = FusedStack(stack)
        self.stack, self.native, self.position_tables = stack, fused.native_stack, fused.position_tables

    def supports(self, x: Tensor, counts: Tensor | Sequence[int]) -> bool:
        """Return whether the operator runs the `counts` new tokens of each row of x (R, T, D), and is fast for them."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.stack.training:
            return False
        return x.dtype == torch.float32 and x.device.type == "cpu" and int(sum(counts)) <= self.max_tokens

    def step(
        self,
        x: Tensor,
        lengths: Tensor,
        counts: Tensor,
        tables: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        source_keys: Sequence[Tensor] = (),
        source_values: Sequence[Tensor] = (),
        source_tables: Tensor | None = None,
        source_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        exact: bool = False,
    ) -> Tensor:
        """Run x (R, T, D) through the stack; return (R, T, D)."""
        length = tables.shape[1] * PAGE_SIZE
        if positions is not None and positions.numel():
            length = max(length, int(positions.max()) + 1)
        rotary_cos, rotary_sin, biases = self.position_tables.get(length)
        out: Tensor = self.native.run(
            x=x,
            lengths=lengths,
            counts=counts,
            tables=tables,
            keys=list(keys),
            values=list(values),
            source_keys=list(source_keys),
            source_values=list(source_values),
            source_tables=source_tables,
            source_lengths=source_lengths,
            positions=positions,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            position_biases=biases,
            exact=exact,
        )
        return out


def fuse_encoder(stack: Stack | None) -> CpuEncoder | None:
    """Build the C++ operator for an encoder; return None if it does not support one of the blocks."""
    native = build_encoder(stack)
    return None if native is None else CpuEncoder(native)


class CpuEncoder:
    """The C++ operator that runs all blocks of an encoder over texts without padding between them."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Encode embedded tokens x (N, D), those of texts of these lengths one after the other; return (N, D)."""
        out: Tensor = torch.ops.monoblock.encode(self.native, x.contiguous(), torch.tensor(lengths, dtype=torch.long))
        return out
