"""Linear probes: what a linear classifier can read from the hidden states of each layer (Tenney et al. 2019).

A probe may also memorize.  The control task (Hewitt and Liang 2019) gives every word type a random label, drawn from
the distribution of the true ones; what a probe reaches there, it has not read from the representation.  The selectivity
of a probe is its accuracy minus that on the control task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.nn.transformer import Transformer

WEIGHT_DECAY = 1e-3  # of the probe; features are standardized
STEPS = 100
TEST_SHARE = 0.3


class ProbeResult(NamedTuple):
    name: str  # "input" or "layer 3"
    accuracy: float  # on held-out texts
    control_accuracy: float

    @property
    def selectivity(self) -> float:
        return self.accuracy - self.control_accuracy


class LabelledText(NamedTuple):
    """A text as token ids, with the position and the label of each item: of words, or one for the whole text."""

    ids: Sequence[int]
    positions: Sequence[Sequence[int]]  # the tokens of each item, whose hidden states are averaged
    labels: Sequence[int]
    types: Sequence[str]  # the word of each item: words that are equal have the same label in the control task


class ProbeReport(NamedTuple):
    layers: list[ProbeResult]
    majority: float  # the accuracy of always predicting the most frequent label
    num_train: int
    num_test: int

    @property
    def best(self) -> ProbeResult:
        return max(self.layers, key=lambda layer: layer.accuracy)


def probe_layers(model: Transformer, texts: Sequence[LabelledText], *, seed: int = 0) -> ProbeReport:
    """Train a linear probe on the residual stream before and after every block; test it on texts held out."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=generator).tolist()
    num_test = int(TEST_SHARE * len(texts))
    if num_test < 1 or len(texts) - num_test < 2:
        count = f"{len(texts)} labelled text{'s' if len(texts) != 1 else ''}"
        raise InputError(f"the training part of the data has {count}, too few for a probe; it needs at least 4")
    test, train = ([texts[index] for index in part] for part in (order[:num_test], order[num_test:]))
    parts = {"train": train, "test": test}
    labels = {key: torch.tensor([label for text in part for label in text.labels]) for key, part in parts.items()}
    if not bool(torch.isin(labels["test"], labels["train"]).any()):
        raise InputError(
            "no label of the texts that are held out occurs among the others, so a probe cannot learn it; give several "
            "texts of each label (a .tsv file has the label first: label<TAB>text)"
        )
    classes = int(max(part.max() for part in labels.values())) + 1
    control = _control_labels(parts, labels["train"], generator)
    features = {key: layer_features(model, part) for key, part in parts.items()}
    results = []
    for name in features["train"]:
        own, other = features["train"][name], features["test"][name]
        mean, std = own.mean(0), own.std(0).clamp(min=1e-6)
        inputs = {"train": (own - mean) / std, "test": (other - mean) / std}
        accuracies = [_fit(inputs, targets, classes) for targets in (labels, control)]
        results.append(ProbeResult(name, *accuracies))
    counts = labels["train"].bincount(minlength=classes)
    majority = float((labels["test"] == counts.argmax()).double().mean())
    return ProbeReport(results, majority, len(labels["train"]), len(labels["test"]))


@torch.no_grad()
def layer_features(model: Transformer, texts: Sequence[LabelledText]) -> dict[str, Tensor]:
    """Return the mean hidden state of the tokens of each item, (items, D), before and after every block."""
    stack = "encoder" if model.encoder is not None else "decoder"
    depth = len(model.get_submodule(stack).blocks)  # type: ignore[arg-type]
    names = {f"{stack}.0.input": "input"} | {f"{stack}.{layer}.output": f"layer {layer}" for layer in range(depth)}
    rows: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    for text in texts:
        ids = torch.tensor([list(text.ids)], device=model.device)
        inputs = (ids, ids[:, :1]) if model.config.family == "encoder-decoder" else (ids,)
        seen = trace(model, *inputs, names=list(names))
        for key, name in names.items():
            rows[name] += [seen[key][0, list(tokens)].mean(0).float().cpu() for tokens in text.positions]
    return {name: torch.stack(vectors) for name, vectors in rows.items()}


def _control_labels(
    parts: dict[str, list[LabelledText]], labels: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Give each word type a label at random, with the frequencies of the labels that are used in training."""
    words = {key: [word for text in part for word in text.types] for key, part in parts.items()}
    types = sorted({word for part in words.values() for word in part})
    drawn = labels[torch.randint(len(labels), (len(types),), generator=generator)].tolist()
    label_of = dict(zip(types, drawn, strict=True))
    return {key: torch.tensor([label_of[word] for word in part]) for key, part in words.items()}


def _fit(inputs: dict[str, Tensor], labels: dict[str, Tensor], classes: int) -> float:
    """Fit a logistic regression; return its accuracy on the test items."""
    weight = torch.zeros(classes, inputs["train"].shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            logits = F.linear(inputs["train"], weight, bias)
            loss = F.cross_entropy(logits, labels["train"]) + WEIGHT_DECAY * weight.square().sum()
            loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        predictions = F.linear(inputs["test"], weight, bias).argmax(-1)
    return float((predictions == labels["test"]).double().mean())
