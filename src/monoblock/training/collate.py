"""Collate samples into model inputs and labels, one function for each objective.

Each function returns a dict with the keyword arguments of the model, and the labels. Labels are IGNORE_INDEX at
positions that do not count in the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.training.corruption import corrupt_spans, mask_tokens, sample_generator
from monoblock.training.unpad import remove_padding

Ids = NDArray[np.int64]


class TensorBatch(NamedTuple):
    """The inputs and labels of one batch, with the epoch and indices of its samples.

    With `unpadded`, padding is removed when the batch is moved to the device of the model; before, rows can be split.
    """

    inputs: dict[str, Any]
    labels: Tensor
    epoch: int
    samples: list[int]
    unpadded: bool = False

    @property
    def target_count(self) -> int:
        """The number of labels that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    @property
    def batch_size(self) -> int:
        return self.labels.shape[0]

    def split(self, num_micro_batches: int) -> list[TensorBatch]:
        """Split the batch into at most `num_micro_batches` micro-batches of nearly equal size; none is empty."""
        bounds = [round(self.batch_size * n / num_micro_batches) for n in range(num_micro_batches + 1)]
        return [self._slice(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start]

    def split_alike(self, num_micro_batches: int, rows: int) -> list[TensorBatch]:
        """Split the batch into as many micro-batches as every other process, the largest of whose batches has `rows`.

        Those that this batch is too small for have no targets.
        """
        micro_batches = self.split(num_micro_batches)
        missing = min(num_micro_batches, rows) - len(micro_batches)
        return micro_batches + [micro_batches[-1].without_targets()] * missing

    def _slice(self, start: int, stop: int) -> TensorBatch:
        inputs = {name: tensor[start:stop] for name, tensor in self.inputs.items()}
        labels, samples = self.labels[start:stop], self.samples[start:stop]
        return self._replace(inputs=inputs, labels=labels, samples=samples)

    def without_targets(self) -> TensorBatch:
        """Return the same batch with no label that counts in the loss."""
        return self._replace(labels=torch.full_like(self.labels, IGNORE_INDEX))

    def to(self, device: torch.device) -> TensorBatch:
        inputs, labels = self.inputs, self.labels
        if self.unpadded:
            inputs, labels = remove_padding(inputs, labels, device.type)
        inputs = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
        return self._replace(inputs=inputs, labels=labels.to(device, non_blocking=True), unpadded=False)


def pad_rows(rows: Sequence[Ids], value: int, length: int | None = None) -> Tensor:
    """Pad rows on the right with `value` to the length of the longest row, or to `length`.

    The result has shape (B, T).
    """
    width = max(len(row) for row in rows) if length is None else length
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def valid_mask(rows: Sequence[Ids], length: int) -> Tensor:
    """Return a mask of rows that are padded to `length`: True for tokens and False for padding.

    The mask has shape (B, length).
    """
    return torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]


@dataclass(frozen=True)
class SpecialTokenIds:
    """The ids of the special tokens that objectives need; None if the tokenizer has no such token."""

    pad_id: int = 0
    bos_id: int | None = None
    eos_id: int | None = None
    mask_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()
    unmaskable_ids: frozenset[int] = frozenset()
    vocab_size: int = 0


def collate_causal_lm(samples: Sequence[dict[str, Any]], special: SpecialTokenIds) -> tuple[dict[str, Tensor], Tensor]:
    """Collate blocks of T + 1 ids for causal language modelling, in which each token predicts the next one.

    Inputs and labels have shape (B, T). In blocks of several documents, tokens attend only within their document, and
    the first token of a document is not a target.
    """
    ids = torch.from_numpy(np.stack([sample["ids"] for sample in samples]))
    inputs, labels = {"source": ids[:, :-1].contiguous()}, ids[:, 1:].clone()
    if "documents" in samples[0]:
        documents = torch.from_numpy(np.stack([sample["documents"] for sample in samples]))
        inputs["documents"] = documents[:, :-1].contiguous()
        labels[documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
        labels[documents[:, 1:] < 0] = IGNORE_INDEX  # padding has the document number -1
    return inputs, labels


def collate_masked_lm(
    samples: Sequence[dict[str, Any]], special: SpecialTokenIds, *, seed: int, epoch: int, rate: float = 0.15
) -> tuple[dict[str, Tensor], Tensor]:
    """Collate texts for masked language modelling (Devlin et al. 2019); every epoch masks other tokens.

    Logits are computed at N positions of each row (`select_target_positions`). The labels are the original ids at these
    positions and have shape (B, N).
    """
    assert special.mask_id is not None
    masked = [
        mask_tokens(
            sample["ids"],
            sample_generator(seed, epoch, sample["sample"]),
            mask_id=special.mask_id,
            vocab=special.vocab_size,
            special=special.unmaskable_ids,
            rate=rate,
        )
        for sample in samples
    ]
    ids = pad_rows([row for row, _ in masked], special.pad_id)
    inputs = {"source": ids}
    valid = valid_mask([row for row, _ in masked], ids.shape[1])
    if not bool(valid.all()):
        inputs["attention_mask"] = valid
    inputs["logits_at"], labels = select_target_positions(pad_rows([labels for _, labels in masked], IGNORE_INDEX))
    return inputs, labels


def select_target_positions(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the labels that are not IGNORE_INDEX, and the labels there.

    `labels` has shape (B, T), and both results have shape (B, N). Logits are then computed at these positions only.
    N is the largest number of targets in a row, rounded up to a multiple of eight to keep the number of shapes small;
    rows with fewer targets are filled with positions whose label is IGNORE_INDEX.
    """
    is_target = labels != IGNORE_INDEX
    count = min(labels.shape[1], -(-int(is_target.sum(1).max()) // 8) * 8)
    positions = (~is_target).byte().argsort(dim=1, stable=True)[:, : max(1, count)]
    return positions, labels.gather(1, positions)


def collate_seq2seq(
    samples: Sequence[dict[str, Any]], special: SpecialTokenIds, *, start: int, pad_to: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Collate pairs of source and target for an encoder-decoder.

    The input of the encoder is the source followed by eos, and the input of the decoder is `start` followed by the
    target; the labels are the target followed by eos. With `pad_to` all rows are padded to this length, because CUDA
    graphs require batches of one shape.
    """
    sources = [sample["source"] for sample in samples]
    targets = [sample["target"] for sample in samples]
    eos = [] if special.eos_id is None else [special.eos_id]
    source = pad_rows([np.concatenate((row, eos)).astype(np.int64) for row in sources], special.pad_id, pad_to)
    target = pad_rows([np.concatenate(([start], row)).astype(np.int64) for row in targets], special.pad_id, pad_to)
    labels = pad_rows([np.concatenate((row, eos)).astype(np.int64) for row in targets], IGNORE_INDEX)
    labels = F.pad(labels, (0, target.shape[1] - labels.shape[1]), value=IGNORE_INDEX)
    inputs = {"source": source, "target": target}
    valid = valid_mask([np.append(row, eos) for row in sources], source.shape[1])
    if pad_to is not None or not bool(valid.all()):
        inputs["source_mask"] = valid  # the target needs no mask, because padding on the right is causally hidden
    return inputs, labels


def collate_span_corruption(
    samples: Sequence[dict[str, Any]],
    special: SpecialTokenIds,
    *,
    seed: int,
    epoch: int,
    start: int,
    rate: float = 0.15,
) -> tuple[dict[str, Tensor], Tensor]:
    """Collate texts for span corruption (Raffel et al. 2020).

    The source is the text with random spans replaced by sentinels, and the target lists these spans.
    """
    pairs = []
    for sample in samples:
        rng = sample_generator(seed, epoch, sample["sample"])
        source, target = corrupt_spans(sample["ids"], rng, sentinels=list(special.sentinel_ids), rate=rate)
        pairs.append({"source": source, "target": target})
    return collate_seq2seq(pairs, special, start=start)


def collate_classification(
    samples: Sequence[dict[str, Any]], special: SpecialTokenIds
) -> tuple[dict[str, Tensor], Tensor]:
    """Collate texts or images that have one label each; the labels have shape (B,)."""
    labels = torch.from_numpy(np.array([sample["label"] for sample in samples], np.int64).reshape(-1))
    if "pixels" in samples[0]:
        return {"source": torch.from_numpy(np.stack([sample["pixels"] for sample in samples]))}, labels
    return _collate_ids(samples, special), labels


def collate_token_classification(
    samples: Sequence[dict[str, Any]], special: SpecialTokenIds
) -> tuple[dict[str, Tensor], Tensor]:
    """Collate texts that have one label per word; the labels have shape (B, T).

    The first token of each word has the label of the word, and all other tokens have IGNORE_INDEX.
    """
    inputs = _collate_ids(samples, special)
    return inputs, pad_rows([sample["labels"] for sample in samples], IGNORE_INDEX)


def collate_question_answering(
    samples: Sequence[dict[str, Any]], special: SpecialTokenIds
) -> tuple[dict[str, Tensor], Tensor]:
    """Collate texts, each a question and a context, in which the answer is to be found; the labels have shape (B, 2).

    The labels are the positions of the first and last token of the answer; both are 0 if the text does not contain it.
    """
    labels = torch.from_numpy(np.stack([sample["answer"] for sample in samples]))
    return _collate_ids(samples, special), labels


def _collate_ids(samples: Sequence[dict[str, Any]], special: SpecialTokenIds) -> dict[str, Tensor]:
    """Return the model inputs for texts: padded ids, and segments if the samples have them.

    If any row is padded, there is also an attention mask. All inputs have shape (B, T).
    """
    ids = pad_rows([sample["ids"] for sample in samples], special.pad_id)
    inputs = {"source": ids}
    valid = valid_mask([sample["ids"] for sample in samples], ids.shape[1])
    if not bool(valid.all()):
        inputs["attention_mask"] = valid
    if "segments" in samples[0]:
        inputs["segments"] = pad_rows([sample["segments"] for sample in samples], 0)
    return inputs
