"""Documents of different lengths in one row of tokens, one after the other, without padding between them.

`attend_varlen` attends within them with the kernel for documents of variable length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from monoblock.errors import InputError
from monoblock.kernels.gpu import assume_constant_result
from monoblock.nn.norm import HALF_DTYPES


class PackedDocuments(NamedTuple):
    """Where documents begin in a single row of tokens, (1, T); a token sees only tokens of its own document.

    In an encoder-decoder, the tokens of target document n see source document n.  A document may be empty.
    """

    numbers: Tensor  # (1, T) the number of each token's document, from 0 in ascending order
    offsets: Tensor  # (documents + 1,) int32, the index of the first token of each document, and T
    max_length: int  # no document has more tokens; it need not be exact, so that few values occur

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], max_length: int | None = None) -> PackedDocuments:
        """Return the documents with these numbers of tokens; `max_length` is by default the largest."""
        message = "lengths must be whole numbers, at least one above 0; give one for each document"
        try:
            counts = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(message) from None
        if counts.is_floating_point() or counts.dim() != 1 or not len(counts):
            raise InputError(message)
        counts = counts.long()
        if int(counts.min()) < 0 or not int(counts.sum()):
            raise InputError(message)
        longest = int(counts.max())
        if max_length is not None and max_length < longest:
            raise InputError(f"max_length={max_length} is below the longest document of {longest} tokens; raise it")
        numbers = torch.arange(len(counts)).repeat_interleave(counts)[None]
        offsets = torch.zeros(len(counts) + 1, dtype=torch.int32)
        offsets[1:] = counts.cumsum(0)
        return cls(numbers, offsets, longest if max_length is None else max_length)

    def num_documents(self) -> int:
        """Return the number of documents, empty ones included."""
        return self.offsets.shape[0] - 1

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedDocuments:
        numbers, offsets = (t.to(device, non_blocking=non_blocking) for t in (self.numbers, self.offsets))
        return PackedDocuments(numbers, offsets, self.max_length)

    def positions(self) -> Tensor:
        """Return the position of each token in its document, (1, T)."""
        index = torch.arange(self.numbers.shape[1], device=self.numbers.device)
        return index - self.offsets[self.numbers].long()

    def valid(self) -> Tensor:
        """Return which places hold a token if each document is a row of `max_length`, (documents, max_length)."""
        lengths = self.offsets[1:] - self.offsets[:-1]
        return torch.arange(self.max_length, device=lengths.device) < lengths[:, None]


class DocumentRows:
    """The same documents as rows of equal length: `to_rows` adds padding, and `from_rows` removes it."""

    def __init__(self, documents: PackedDocuments) -> None:
        starts, length = documents.offsets.long(), documents.max_length
        column = torch.arange(length, device=starts.device)
        tokens = documents.numbers.shape[1]
        self.shape = (documents.num_documents(), length)
        self.is_token = documents.valid().flatten()
        self.token_index = (starts[:-1, None] + column).clamp(max=tokens - 1).flatten()  # of each place in the rows
        self.row_index = (documents.numbers * length + documents.positions())[0]  # (T,) where each token is in the rows

    def to_rows(self, x: Shaped[Tensor, "T ..."]) -> Shaped[Tensor, "documents length ..."]:
        """Return tokens as rows, one for each document, with zeros for padding."""
        rows: Tensor = _GatherOnce.apply(x, self.token_index, self.row_index, self.is_token, None)
        return rows.unflatten(0, self.shape)

    def from_rows(self, rows: Shaped[Tensor, "documents length ..."]) -> Shaped[Tensor, "T ..."]:
        """Return the tokens of rows, without the padding."""
        x: Tensor = _GatherOnce.apply(rows.flatten(0, 1), self.row_index, self.token_index, None, self.is_token)
        return x


class _GatherOnce(torch.autograd.Function):
    """Select `index` from x (N, …), where no element is selected twice: the gradient is selected by `inverse`.

    `kept` and `inverse_kept` are False where the result, or the gradient, is zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, kept: Tensor | None, inverse_kept: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(inverse, inverse_kept)
        return _select(x, index, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, inverse_kept = ctx.saved_tensors
        return _select(grad, inverse, inverse_kept), None, None, None, None


def _select(x: Tensor, index: Tensor, kept: Tensor | None) -> Tensor:
    out = x.index_select(0, index)
    return out if kept is None else out.masked_fill(~kept.view(-1, *[1] * (x.dim() - 1)), 0)


KERNEL_QUERIES = 64  # the kernel computes this many queries of a document at a time
MAX_HEAD_SIZE = 256
MIN_CAPABILITY = 8  # of the GPU (Ampere)


# The kernel and the names of its arguments, which depend on the version of torch; looked up outside of compiled code.
_KERNEL: tuple[Callable[..., Any], frozenset[str]] | None = None
if torch.version.cuda is not None:
    from torch.nn.attention.varlen import varlen_attn

    _KERNEL = varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def supports_varlen(q: Tensor, v: Tensor, dtype: torch.dtype) -> bool:
    """Return whether this device has the kernel, for heads of these sizes that are computed in this dtype."""
    fits = q.shape[-1] == v.shape[-1] <= MAX_HEAD_SIZE and q.shape[-1] % 8 == 0
    return fits and _KERNEL is not None and q.is_cuda and dtype in HALF_DTYPES and _has_capability(q.device)


@assume_constant_result
def _has_capability(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).major >= MIN_CAPABILITY


def attend_varlen(
    q: Float[Tensor, "1 H T K"],
    k: Float[Tensor, "1 G S K"],
    v: Float[Tensor, "1 G S K"],
    q_documents: PackedDocuments,
    k_documents: PackedDocuments,
    *,
    causal: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> Float[Tensor, "1 H T K"]:
    """Compute attention from each document of q to the document of k, v with the same number.

    The result is the same as with the mask `same_document`, or `causal & same_document`.  The kernel has no rule for
    autocast, so the inputs are converted to `dtype` here.
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
