"""What is asked of a model: samples become inputs and labels, and one token-weighted loss compares.

An objective turns a batch of samples into `Prepared`: keyword inputs of the model and labels (-100: not asked).  The
loss of a step is the sum over all asked places divided by their number over the *whole* step, so that accumulation,
ranks, padding and bucketing never change it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from monoblock.experts import load_balancing_loss
from monoblock.norm import HALF
from monoblock.tap import Tap, tapped, wants
from monoblock.training.corruption import IGNORE, corrupt_spans, generator, mask_tokens

Ids = NDArray[np.int64]


class Prepared(NamedTuple):
    """One batch for the model, and which samples it came from."""

    inputs: dict[str, Tensor]
    labels: Tensor
    epoch: int
    samples: list[int]

    @property
    def asked(self) -> int:
        """How many places count in the loss."""
        return int((self.labels != IGNORE).sum())

    @property
    def rows(self) -> int:
        return self.labels.shape[0]

    def split(self, parts: int) -> list[Prepared]:
        """Micro-batches of as equal size as possible; together they are this batch."""
        cuts = [round(self.rows * n / parts) for n in range(parts + 1)]
        return [self._rows(a, b) for a, b in itertools.pairwise(cuts) if b > a]

    def _rows(self, a: int, b: int) -> Prepared:
        inputs = {name: tensor[a:b] for name, tensor in self.inputs.items()}
        return Prepared(inputs, self.labels[a:b], self.epoch, self.samples[a:b])

    def to(self, device: torch.device) -> Prepared:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return self._replace(inputs=moved, labels=self.labels.to(device, non_blocking=True))


def pad(rows: Sequence[Ids], value: int, width: int | None = None) -> Tensor:
    """Rows padded on the right to the longest, or to a width: (B, T)."""
    longest = max(len(row) for row in rows) if width is None else width
    out = np.full((len(rows), longest), value, dtype=np.int64)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return torch.from_numpy(out)


def lengths_mask(rows: Sequence[Ids], width: int) -> Tensor:
    """True where a padded row is real: (B, T)."""
    return torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


# -- from samples to inputs and labels ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Special:
    """The ids an objective needs; None where the tokenizer has none."""

    pad: int = 0
    bos: int | None = None
    eos: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()
    never_masked: frozenset[int] = frozenset()
    vocab: int = 0


def causal(samples: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    """Predict each next token of fixed-length blocks; across packed documents nothing is seen and nothing asked."""
    ids = torch.from_numpy(np.stack([sample["ids"] for sample in samples]))
    inputs, labels = {"source": ids[:, :-1].contiguous()}, ids[:, 1:].clone()
    if "documents" in samples[0]:
        documents = torch.from_numpy(np.stack([sample["documents"] for sample in samples]))
        inputs["documents"] = documents[:, :-1].contiguous()
        labels[documents[:, 1:] != documents[:, :-1]] = IGNORE
        labels[documents[:, 1:] < 0] = IGNORE  # rows are filled up with document -1
    return inputs, labels


def masked(
    samples: Sequence[dict[str, Any]], special: Special, *, seed: int, epoch: int, rate: float = 0.15
) -> tuple[dict[str, Tensor], Tensor]:
    """Restore hidden tokens, hidden anew every epoch."""
    assert special.mask is not None
    made = [
        mask_tokens(
            sample["ids"],
            generator(seed, epoch, sample["sample"]),
            mask_id=special.mask,
            vocab=special.vocab,
            special=special.never_masked,
            rate=rate,
        )
        for sample in samples
    ]
    ids = pad([hidden for hidden, _ in made], special.pad)
    inputs = {"source": ids}
    real = lengths_mask([hidden for hidden, _ in made], ids.shape[1])
    if not bool(real.all()):
        inputs["attention_mask"] = real
    inputs["logits_at"], labels = asked_first(pad([labels for _, labels in made], IGNORE))
    return inputs, labels


def asked_first(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The asked places of each row (B, T) and their labels, (B, n) both: few logits of a masked text are asked for.

    n is that of the fullest row, in steps of eight: few shapes.  Rows that have fewer are filled up with other places.
    """
    asked = labels != IGNORE
    most = min(labels.shape[1], -(-int(asked.sum(1).max()) // 8) * 8)
    places = (~asked).byte().argsort(dim=1, stable=True)[:, : max(1, most)]
    return places, labels.gather(1, places)


def pairs(
    samples: Sequence[dict[str, Any]], special: Special, *, start: int, width: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Write the target of each source: the decoder reads start + target and is asked for target + end.

    With a width all batches have one shape, which recorded kernels need.
    """
    sources = [sample["source"] for sample in samples]
    targets = [sample["target"] for sample in samples]
    ends = [] if special.eos is None else [special.eos]
    source = pad([np.concatenate((row, ends)).astype(np.int64) for row in sources], special.pad, width)
    target = pad([np.concatenate(([start], row)).astype(np.int64) for row in targets], special.pad, width)
    labels = pad([np.concatenate((row, ends)).astype(np.int64) for row in targets], IGNORE)
    labels = F.pad(labels, (0, target.shape[1] - labels.shape[1]), value=IGNORE)
    inputs = {"source": source, "target": target}
    real = lengths_mask([np.append(row, ends) for row in sources], source.shape[1])
    if width is not None or not bool(real.all()):
        inputs["source_mask"] = real  # the target is padded on the right, where a causal mask sees nothing anyway
    return inputs, labels


def spans(
    samples: Sequence[dict[str, Any]], special: Special, *, seed: int, epoch: int, start: int, rate: float = 0.15
) -> tuple[dict[str, Tensor], Tensor]:
    """Restore hidden spans from their sentinels: span corruption as a pair of sequences."""
    made = []
    for sample in samples:
        draw = generator(seed, epoch, sample["sample"])
        source, target = corrupt_spans(sample["ids"], draw, sentinels=list(special.sentinels), rate=rate)
        made.append({"source": source, "target": target})
    return pairs(made, special, start=start)


def classified(samples: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    """One label a text (or an image)."""
    labels = torch.tensor([int(sample["label"]) for sample in samples])
    if "pixels" in samples[0]:
        return {"source": torch.from_numpy(np.stack([sample["pixels"] for sample in samples]))}, labels
    return _padded(samples, special), labels


def labelled(samples: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    """One label a token; a label of -100 is not asked (later pieces of a word)."""
    inputs = _padded(samples, special)
    return inputs, pad([sample["labels"] for sample in samples], IGNORE)


def answers(samples: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    """The first and the last place of an answer: (B, 2); both 0 where a row does not hold it."""
    labels = torch.from_numpy(np.stack([sample["answer"] for sample in samples]))
    return _padded(samples, special), labels


def _padded(samples: Sequence[dict[str, Any]], special: Special) -> dict[str, Tensor]:
    ids = pad([sample["ids"] for sample in samples], special.pad)
    real = lengths_mask([sample["ids"] for sample in samples], ids.shape[1])
    inputs = {"source": ids} if bool(real.all()) else {"source": ids, "attention_mask": real}
    return inputs | (
        {"segments": pad([sample["segments"] for sample in samples], 0)} if "segments" in samples[0] else {}
    )


# -- the loss -----------------------------------------------------------------------------------------------------


class Routers:
    """A tap that keeps what the routers of experts said, and hands everything on to another."""

    def __init__(self, tap: Tap | None = None) -> None:
        self.logits: list[Tensor] = []
        self.tap = tap

    def wants(self, name: str) -> bool:
        return wants(self.tap, name)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith(".feedforward.router"):
            self.logits.append(tensor)
        return tapped(self.tap, name, tensor)


@dataclass(frozen=True)
class Loss:
    """Cross-entropy summed over the asked places; with experts, the load-balancing loss for each asked place too."""

    label_smoothing: float = 0.0
    balance: float = 0.0  # weight of the load-balancing loss
    top_k: int = 1
    places: bool = False  # of spans: what is chosen from are the real places of a row

    def plain(self) -> Loss:
        """The loss evaluations report: no smoothing, no balancing."""
        return replace(self, label_smoothing=0.0, balance=0.0)

    def __call__(
        self,
        model: Callable[..., Tensor] | nn.Module,
        inputs: dict[str, Tensor],
        labels: Tensor,
        tap: Tap | None = None,
    ) -> Tensor:
        routers = Routers(tap) if self.balance else None
        heard = tap if routers is None else routers
        loss = self.of(self.logits(model, inputs, **({} if heard is None else {"tap": heard})), labels)
        if routers is not None and routers.logits:
            real = (labels != IGNORE) if labels.shape == routers.logits[0].shape[:-1] else None
            even = torch.stack([load_balancing_loss(one, self.top_k, real) for one in routers.logits]).mean()
            loss = loss + self.balance * even * (labels != IGNORE).sum()
        return loss

    def logits(self, model: Callable[..., Tensor] | nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
        """What labels are compared with, (…, choices); of spans (B, 2, T): places for a start, and for an end."""
        logits: Tensor = model(**inputs, **more)
        if not self.places:
            return logits
        real = inputs.get("attention_mask")
        return logits.mT if real is None else logits.mT.masked_fill(~real[:, None], -torch.inf)

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of logits (…, classes), summed over the labels (…) that are asked."""
        flat = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(
            flat.float() if flat.dtype in HALF else flat,
            labels.reshape(-1),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
