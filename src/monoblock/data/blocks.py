"""Samples for language models: blocks of context + 1 token ids, where ids[:-1] are the input and ids[1:] the targets.

There are three ways to fill blocks, called packing:

    stream      concatenate all documents and cut them into blocks, from a different offset in every epoch
    contiguous  the blocks of "stream", in the order of the text: each row of a batch continues that of the batch before
    documents   pack several documents into a block, and split long ones; tokens attend only within their document

A sample depends only on (index, epoch, seed).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from monoblock.data.batches import permutation, random_uint64
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import InputError

Packing = Literal["stream", "contiguous", "documents"]
MAX_CACHED_EPOCHS = 2  # around the end of an epoch, a loader that runs ahead needs two
NO_DOCUMENT = -1  # the document index of padding


class BlockDataset:
    """A token dataset cut into blocks, the samples of a language model; `len()` is the number of samples per epoch.

    With packing="stream", every token is a target once per epoch, except for up to context − 1 tokens that do not fill
    a block; which tokens are left out differs between epochs. The last block of an epoch may wrap around to the first
    tokens.
    """

    def __init__(self, tokens: TokenDataset, context: int, *, packing: Packing = "stream") -> None:
        if context < 1:
            raise InputError(f"context={context} is too small; write 1 or more")
        if packing not in get_args(Packing):
            raise InputError(f"packing={packing!r} is unknown; write 'stream', 'contiguous' or 'documents'")
        self.tokens, self.context, self.packing = tokens, context, packing
        self._packed_rows: list[list[TokenRange]] = []
        if packing == "documents":
            self._packed_rows = pack_best_fit(split_documents(tokens, context), context + 1)
            if not self._packed_rows:
                raise InputError(
                    "no document has two or more tokens, so there is nothing to predict; try packing='stream'"
                )
        elif len(tokens) < context + 1:
            raise InputError(
                f"{len(tokens)} tokens are too few for context={context}; give more text, or a smaller context"
            )

    def __len__(self) -> int:
        return len(self._packed_rows) if self.packing == "documents" else len(self.tokens) // self.context

    def sample(self, index: int, epoch: int, seed: int) -> dict[str, NDArray[np.int64]]:
        """Return a dict with "ids" and, if packing="documents", also "documents"; both have shape (context + 1,).

        "documents" holds the index of each token's document within the block, or −1 for padding. A token is a target
        if it is in the same document as the token before it.
        """
        if not 0 <= index < len(self):
            raise InputError(f"index={index} is out of range; write 0 to {len(self) - 1}")
        if self.packing == "documents":
            return self._packed_sample(index)
        start = (self.epoch_offset(epoch, seed) + index * self.context) % len(self.tokens)
        stop = start + self.context + 1
        excess = max(stop - len(self.tokens), 0)
        ids = self.tokens.read(start, stop - excess)
        return {"ids": np.concatenate([ids, self.tokens.read(0, excess)]) if excess else ids}

    def epoch_offset(self, epoch: int, seed: int) -> int:
        """Return the index of the token at which the first block of an epoch begins, from 0 to context − 1."""
        return int(random_uint64(seed, epoch, 1, "offset")[0] % self.context)

    def _packed_sample(self, index: int) -> dict[str, NDArray[np.int64]]:
        ids = np.zeros(self.context + 1, np.int64)
        documents = np.full(self.context + 1, NO_DOCUMENT, np.int64)
        start = 0
        for number, part in enumerate(self._packed_rows[index]):
            end = start + part.stop - part.start
            ids[start:end] = self.tokens.read(*part)
            documents[start:end] = number
            start = end
        return {"ids": ids, "documents": documents}


class ResampledBlocks:
    """Blocks of a text that is segmented anew in every epoch; `len()` is that of the blocks of the plain segmentation.

    A random segmentation usually has more tokens, and so more blocks, than the plain one. An epoch visits as many of
    them as the plain segmentation has, and which ones differs between epochs.
    """

    def __init__(self, plain: BlockDataset, segment: Callable[[int], TokenDataset]) -> None:
        """Take the blocks of the plain segmentation, and a function that returns the tokens of an epoch."""
        self.plain, self.segment = plain, segment
        self._cache: dict[int, BlockDataset] = {}

    def __len__(self) -> int:
        return len(self.plain)

    def sample(self, index: int, epoch: int, seed: int) -> dict[str, NDArray[np.int64]]:
        """Return a sample as `BlockDataset.sample` does; it depends only on the arguments."""
        blocks = self._blocks(epoch)
        order = permutation(seed, epoch, len(blocks), "blocks")
        return blocks.sample(int(order[index % len(blocks)]), epoch, seed)

    def _blocks(self, epoch: int) -> BlockDataset:
        if epoch not in self._cache:
            while len(self._cache) >= MAX_CACHED_EPOCHS:
                del self._cache[next(iter(self._cache))]
            self._cache[epoch] = BlockDataset(self.segment(epoch), self.plain.context, packing=self.plain.packing)
        return self._cache[epoch]


class EvaluationWindow(NamedTuple):
    """A window of at most context + 1 token ids, of which the last `num_targets` are targets."""

    ids: NDArray[np.int64]
    num_targets: int


def evaluation_windows(tokens: TokenDataset, context: int, stride: int | None = None) -> Iterator[EvaluationWindow]:
    """Yield windows over all tokens, so that every token but the first is a target exactly once.

    Windows begin `stride` tokens apart (default: `context`). With a smaller stride the windows overlap: from the second
    window on, every target is predicted from at least context − stride + 1 tokens before it.
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise InputError(f"stride={stride} is out of range; write a number from 1 to the context, {context}")
    num_seen = 1  # the first token has nothing before it
    start = 0
    while num_seen < len(tokens):
        stop = min(start + context + 1, len(tokens))
        yield EvaluationWindow(tokens.read(start, stop), stop - num_seen)
        num_seen, start = stop, start + stride


# -- rows of whole documents, by best fit ------------------------------------------------------------------------------


class TokenRange(NamedTuple):
    """The tokens from `start` up to, but not including, `stop`: a document or a part of one."""

    start: int
    stop: int


def split_documents(tokens: TokenDataset, context: int) -> Iterator[TokenRange]:
    """Split documents into parts of at most context + 1 tokens.

    A part begins with the last token of the part before, so that every token of a document but the first is a target.
    """
    for start, stop in zip(tokens.document_offsets[:-1].tolist(), tokens.document_offsets[1:].tolist(), strict=True):
        for first in range(start, stop - 1, context):  # a document of one token has no target
            yield TokenRange(first, min(first + context + 1, stop))


def pack_best_fit(ranges: Iterator[TokenRange], width: int) -> list[list[TokenRange]]:
    """Pack ranges into rows of `width` tokens by best-fit decreasing and return the rows.

    The longest range is packed first, and each range goes into the fullest row that still has enough space.
    """
    rows: list[list[TokenRange]] = []
    rows_by_space: dict[int, list[int]] = {}  # the rows that have exactly this much free space
    spaces: list[int] = []  # sorted keys of `rows_by_space` whose list is not empty
    for item in sorted(ranges, key=lambda item: (item.start - item.stop, item.start)):
        length = item.stop - item.start
        index = bisect_left(spaces, length)
        if index == len(spaces):
            row, space = len(rows), width
            rows.append([])
        else:
            space = spaces[index]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[index]
        rows[row].append(item)
        if space > length:
            open_rows = rows_by_space.setdefault(space - length, [])
            if not open_rows:
                insort(spaces, space - length)
            open_rows.append(row)
    return rows
