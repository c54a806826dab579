"""Remove the padding of a batch: its texts become one row of tokens, one after the other (`PackedDocuments`).

The row is a little longer than the texts, so that batches have few different shapes and compiled code is used again.
The tokens that fill it are documents of their own, which no text sees and whose labels do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.nn.packed_documents import PackedDocuments

SIZES_PER_DOUBLING = 16  # how many different sizes there are from one power of two to the next
NUM_FILL = 8  # documents that fill a row; none is empty, because a query of the target must see a key of the source
LENGTH_MULTIPLE = {"cuda": 64}  # of the longest document; 8 on other devices


def round_size(size: int, max_multiple: int = 256) -> int:
    """Round a number of tokens up to one of few sizes, multiples of 8 to `max_multiple`, at most 1/16 larger."""
    largest_power = 1 << max(size, 1).bit_length() - 1
    multiple = min(max(largest_power // SIZES_PER_DOUBLING, 8), max_multiple)
    return -(-size // multiple) * multiple


def remove_padding(
    inputs: dict[str, Tensor], labels: Tensor, device_type: str = "cpu"
) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs and labels of a batch whose rows are padded on the right, without this padding.

    The inputs are those of `collate_seq2seq`, `collate_masked_lm`, `collate_classification` or
    `collate_token_classification`. The labels that count in the loss are the same.
    """
    mask = inputs.get("source_mask", inputs.get("attention_mask"))
    lengths = {"source": _source_lengths(inputs["source"], mask)}
    if "target" in inputs:
        lengths["target"] = _target_lengths(labels)
    packed = _pack(lengths, LENGTH_MULTIPLE.get(device_type, 8))
    names = {"source": "documents"} if "target" not in inputs else {side: f"{side}_documents" for side in lengths}
    unpadded: dict[str, Any] = {names[side]: documents for side, documents in packed.items()}
    for name in ("source", "target", "segments"):
        if name in inputs:
            side = "target" if name == "target" else "source"
            unpadded[name] = _flatten(inputs[name], lengths[side], packed[side], fill=0)
    if "logits_at" in inputs:
        unpadded["logits_at"], labels = _select(inputs["logits_at"], labels, packed["source"])
    elif labels.dim() == 1:
        missing = packed["source"].num_documents() - len(labels)
        labels = torch.nn.functional.pad(labels, (0, missing), value=IGNORE_INDEX)
    else:
        side = "target" if "target" in inputs else "source"
        labels = _flatten(labels, lengths[side], packed[side], fill=IGNORE_INDEX)
    return unpadded, labels


def _source_lengths(source: Tensor, mask: Tensor | None) -> Tensor:
    return torch.full((len(source),), source.shape[1]) if mask is None else mask.sum(1)


def _target_lengths(labels: Tensor) -> Tensor:
    """Return how many tokens of each target are needed: those up to the last label that counts."""
    return ((labels != IGNORE_INDEX) * torch.arange(1, labels.shape[1] + 1)).amax(1)


def _pack(lengths: dict[str, Tensor], multiple: int) -> dict[str, PackedDocuments]:
    """Return the documents of each side: texts, NUM_FILL documents that fill the row, and empty documents.

    With the empty ones, the number of documents is a multiple of 8. No document is longer than the longest text,
    whose length is rounded up to `multiple`.
    """
    num_texts = len(next(iter(lengths.values())))
    empty = [0] * (-num_texts % 8)
    packed = {}
    for side, counts in lengths.items():
        longest, total = max(1, -(-int(counts.max()) // multiple)) * multiple, int(counts.sum())
        fill = round_size(total + NUM_FILL, max_multiple=4 * longest) - total  # NUM_FILL to NUM_FILL · longest
        filling = [fill // NUM_FILL + (number < fill % NUM_FILL) for number in range(NUM_FILL)]
        packed[side] = PackedDocuments.from_lengths([*counts.tolist(), *filling, *empty], longest)
    return packed


def _flatten(rows: Tensor, lengths: Tensor, documents: PackedDocuments, fill: int) -> Tensor:
    """Return the first `lengths` tokens of rows (B, T) one after the other, as (1, tokens)."""
    flat = torch.full_like(documents.numbers, fill)
    tokens = rows[torch.arange(rows.shape[1]) < lengths[:, None]]
    flat[0, : len(tokens)] = tokens
    return flat


def _select(positions: Tensor, labels: Tensor, documents: PackedDocuments) -> tuple[Tensor, Tensor]:
    """Return the positions (1, N) of the targets in the packed row, and their labels; both are (B, n) before."""
    is_target = labels != IGNORE_INDEX
    index = (positions + documents.offsets[: len(positions), None])[is_target]
    last_token = documents.numbers.shape[1] - 1
    size = round_size(max(len(index), 1))
    logits_at = torch.full((1, size), last_token)
    logits_at[0, : len(index)] = index
    selected = torch.full((1, size), IGNORE_INDEX)
    selected[0, : len(index)] = labels[is_target]
    return logits_at, selected
