"""Collate samples into model inputs and labels, one function for each objective.

Each function returns a dict with the keyword arguments of the model, and the labels. Labels are IGNORE_INDEX at
positions that do not count in the loss. Masked language modelling masks tokens, span corruption replaces spans by
sentinels, and with data.padding="none" the texts of a batch become one row, one after the other.
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

from monoblock.data.encode import IGNORE_INDEX
from monoblock.nn.packed_documents import PackedDocuments

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
    inputs = _collate_ids([{"ids": row} for row, _ in masked], special)
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


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the random generator of one sample in one epoch."""
    # NumPy would convert a plain list with a large seed to float and lose its lower bits.
    key = np.array([seed & (2**64 - 1), (epoch << 40) ^ sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def mask_tokens(
    ids: Ids, rng: np.random.Generator, *, mask_id: int, vocab: int, special: frozenset[int], rate: float = 0.15
) -> tuple[Ids, Ids]:
    """Mask a random selection of tokens (Devlin et al. 2019); return the masked ids and the labels.

    The fraction `rate` of the tokens is selected, at least one, but never a token in `special`. Of the selected tokens,
    80 % become the mask token, 10 % a random token, and 10 % stay. The labels are the original ids of the selected
    tokens, and IGNORE_INDEX elsewhere.
    """
    eligible = np.flatnonzero(~np.isin(ids, list(special)))
    count = min(len(eligible), max(1, round(rate * len(eligible))))
    chosen = rng.permutation(eligible)[:count]
    labels = np.full_like(ids, IGNORE_INDEX)
    labels[chosen] = ids[chosen]
    masked = ids.copy()
    draws = rng.random(count)
    masked[chosen[draws < 0.8]] = mask_id
    swapped = chosen[(draws >= 0.8) & (draws < 0.9)]
    masked[swapped] = rng.integers(0, vocab, len(swapped))
    return masked, labels


def corrupt_spans(
    ids: Ids,
    rng: np.random.Generator,
    *,
    sentinels: list[int],
    eos: int | None = None,
    rate: float = 0.15,
    mean: float = 3.0,
) -> tuple[Ids, Ids]:
    """Return a source with random spans replaced by sentinels, and a target of these spans (Raffel et al. 2020).

    The target has each sentinel followed by the span it replaces, and one more sentinel at the end. Together, the spans
    have the fraction `rate` of all tokens; a span has `mean` tokens on average.
    """
    length = len(ids)
    num_noise = min(max(1, round(rate * length)), max(1, length - 1))
    num_spans = min(max(1, round(num_noise / mean)), num_noise, max(1, length - num_noise), len(sentinels) - 1)
    noise_lengths = _random_partition(num_noise, num_spans, rng)
    kept_lengths = _random_partition(length - num_noise, num_spans, rng)
    source: list[int] = []
    target: list[int] = []
    position = 0
    for sentinel, kept, noise in zip(sentinels, kept_lengths, noise_lengths, strict=False):
        source += [*ids[position : position + kept].tolist(), sentinel]
        position += kept
        target += [sentinel, *ids[position : position + noise].tolist()]
        position += noise
    source += ids[position:].tolist()
    target.append(sentinels[num_spans])
    if eos is not None:
        source.append(eos)
        target.append(eos)
    return np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)


def _random_partition(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Return `parts` random positive integers with the sum `total`; if `total` < `parts`, the last ones are 0."""
    if total < parts:
        return [1] * total + [0] * (parts - total)
    bounds = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], bounds, [total]))).tolist()


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
    mask, source = inputs.get("source_mask", inputs.get("attention_mask")), inputs["source"]
    lengths = {"source": torch.full((len(source),), source.shape[1]) if mask is None else mask.sum(1)}
    if "target" in inputs:  # the tokens up to the last label that counts
        lengths["target"] = ((labels != IGNORE_INDEX) * torch.arange(1, labels.shape[1] + 1)).amax(1)
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
