"""Labels by prompting: a decoder that was never trained for a task says how likely each label is after a prompt.

    prompting = Prompting("Review: {text}\\nSentiment: {label}\\n\\n", {"0": "negative", "1": "positive"})
    shown = balanced(train.rows, prompting.labels, 4, seed=0)
    found = label_scores(pipe, prompting, shown, texts)             # (texts, labels) log-probabilities
    found = calibrated(found, content_free(pipe, prompting, shown))

The score of a label is the sum of the log-probabilities of its tokens.  What all prompts begin with, the examples above
all, is read once and its keys and values are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monoblock.cache import Cache
from monoblock.data.order import permutation
from monoblock.data.readers import Labelled
from monoblock.decoding.rows import padded
from monoblock.errors import ConfigError, InputError, did_you_mean, with_article
from monoblock.model import Transformer
from monoblock.tasks.measured import Asked, Measured, Table, read
from monoblock.tasks.pipeline import Pipeline

TEXT, LABEL = "{text}", "{label}"
DEFAULT = "Text: {text}\nLabel: {label}\n\n"
# Corpus -> how its rows are put to a model that does not know it.
TEMPLATES = {"reviews": "Review: {text}\nSentiment: {label}\n\n"}
CONTENT_FREE = ("N/A", "", "[MASK]")  # texts that say nothing (Zhao et al. 2021, 5)


@dataclass(frozen=True)
class Prompting:
    """A template with one {text} and after it one {label}, and the word that stands for each label."""

    template: str
    words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template.count(TEXT) != 1 or self.template.count(LABEL) != 1:
            raise ConfigError(f"the template {self.template!r:.60} needs {TEXT} once and {LABEL} once")
        if self.template.index(TEXT) > self.template.index(LABEL):
            raise ConfigError(f"the template {self.template!r:.60} asks for the label before the text; turn it round")
        if len(self.words) < 2 or len(set(self.words.values())) < len(self.words):
            raise ConfigError(f"{len(set(self.words.values()))} different words for labels; two or more are needed")

    @property
    def labels(self) -> list[str]:
        return list(self.words)

    def example(self, row: Labelled) -> str:
        return self.template.replace(LABEL, self.words[row.label]).replace(TEXT, row.text)

    def prompt(self, shown: Sequence[Labelled], text: str) -> str:
        """The examples, then the text, up to where its label would stand.  A space before that belongs to the label."""
        asked = self.template[: self.template.index(LABEL)].rstrip(" ").replace(TEXT, text)
        return "".join(map(self.example, shown)) + asked

    def word(self, label: str) -> str:
        """What follows the prompt."""
        before = self.template[: self.template.index(LABEL)]
        return " " * (len(before) - len(before.rstrip(" "))) + self.words[label]


def balanced(rows: Sequence[Labelled], labels: Sequence[str], count: int, seed: int) -> list[Labelled]:
    """So many rows, of each label as many as of the others or one more; which and in what order, the seed decides."""
    order = permutation(seed, 0, len(rows)).tolist()
    chosen: list[int] = []
    for place, label in enumerate(labels):
        wanted = count // len(labels) + (place < count % len(labels))
        found = [number for number in order if rows[number].label == label][:wanted]
        if len(found) < wanted:
            raise InputError(f"{wanted} examples of {label!r} were asked for and the training split has {len(found)}")
        chosen += found
    return [rows[chosen[place]] for place in permutation(seed, 1, count).tolist()] if count else []


def label_scores(
    pipe: Pipeline, prompting: Prompting, shown: Sequence[Labelled], texts: Sequence[str], *, batch: int = 32
) -> Tensor:
    """(texts, labels): the log-probability of each label's word after each text's prompt."""
    model = _decoder(pipe)
    rows = [_row(pipe, prompting, shown, text) for text in texts]
    limit, longest = model.config.context, max(row.length for row in rows)
    if limit is not None and longest > limit:
        raise InputError(
            f"a prompt and its label have {longest} tokens, and the model reads {limit}; show fewer examples"
        )
    common = _common([row.prompt for row in rows])
    found = torch.empty(len(rows), len(prompting.words), dtype=torch.float64)
    order = sorted(range(len(rows)), key=lambda number: len(rows[number].prompt))
    with torch.inference_mode():
        prefix = _read(model, rows[0].prompt[:common], longest)
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            found[numbers] = _batch(model, prefix, common, [rows[number] for number in numbers], longest)
    return found


def calibrated(scores: Tensor, of_nothing: Tensor) -> Tensor:
    """Log-probabilities over the labels, each divided by what the label has after a text that says nothing.

    scores (texts, labels) and of_nothing (content-free texts, labels) are those of `label_scores`; the latter are made
    probabilities over the labels and averaged (Zhao et al. 2021, eq. 1 with W = diag(p)^-1, b = 0).
    """
    prior = of_nothing.log_softmax(-1).exp().mean(0)
    return (scores.log_softmax(-1) - prior.log()).log_softmax(-1)


def content_free(pipe: Pipeline, prompting: Prompting, shown: Sequence[Labelled], batch: int = 32) -> Tensor:
    return label_scores(pipe, prompting, shown, CONTENT_FREE, batch=batch)


# -- measuring --------------------------------------------------------------------------------------------------------


def few_shot(
    pipe: Pipeline,
    asked: Asked,
    shots: Sequence[int],
    *,
    template: str | None = None,
    words: Mapping[str, str] | None = None,
    calibrate: bool = False,
    seed: int = 0,
) -> Measured:
    """Accuracy on a labelled corpus by the number of examples shown, plain or calibrated; the last is the figure."""
    corpus, train = read(asked, "labelled"), read(asked, "labelled", "train")
    if any(shots) and corpus.split in ("train", "all"):
        raise ConfigError(f"the split {corpus.split} of {asked.data} has the examples in it; measure on test or valid")
    named = {label: (words or {}).get(label, label) for label in train.labels()}
    unknown = next((label for label in words or {} if label not in named), None)
    if unknown is not None:
        raise InputError(
            f"no label {unknown!r}{did_you_mean(unknown, named)} in {asked.data}; it has {', '.join(named)}"
        )
    prompting = Prompting(template or TEMPLATES.get(asked.data, DEFAULT), named)
    rows = [_told(pipe, prompting, corpus.rows, train.rows, count, asked.batch, calibrate, seed) for count in shots]
    figures = {"accuracy": rows[-1]["accuracy"], "shots": shots[-1], "few_shot": rows}
    figures |= {"calibrated": calibrate, "sources": len(corpus), "split": corpus.split}
    columns = list(rows[0])
    return Measured(
        figures,
        notes=[f"prompted by {prompting.template!r}, examples of the training split drawn by seed {seed}"],
        tables=[Table(columns, [[row[column] for column in columns] for row in rows])],
    )


def _told(
    pipe: Pipeline,
    prompting: Prompting,
    rows: Sequence[Labelled],
    train: Sequence[Labelled],
    count: int,
    batch: int,
    calibrate: bool,
    seed: int,
) -> dict[str, Any]:
    shown = balanced(train, prompting.labels, count, seed)
    scores = label_scores(pipe, prompting, shown, [row.text for row in rows], batch=batch)
    told: dict[str, Any] = {"shots": count}
    if calibrate:
        told["plain"] = accuracy(scores, rows, prompting.labels)
        scores = calibrated(scores, content_free(pipe, prompting, shown))
    return told | {"accuracy": accuracy(scores, rows, prompting.labels)}


def accuracy(scores: Tensor, rows: Sequence[Labelled], labels: Sequence[str]) -> float:
    """How many of a hundred have their own label as the most likely."""
    right = [labels[place] == row.label for place, row in zip(scores.argmax(-1).tolist(), rows, strict=True)]
    return 100 * sum(right) / len(right)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    labels: list[list[int]]  # the tokens of each label's word after this prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + max(map(len, self.labels))


def _row(pipe: Pipeline, prompting: Prompting, shown: Sequence[Labelled], text: str) -> Row:
    prompt = prompting.prompt(shown, text)
    if not prompt and pipe.tokenizer.bos_id is None and pipe.tokenizer.eos_id is None:
        raise InputError(
            "an empty text leaves an empty prompt, and this tokenizer has no start token; put a word before {text}"
        )
    ids = list(pipe.prompt(prompt).ids)
    whole = [list(pipe.prompt(prompt + prompting.word(label)).ids) for label in prompting.labels]
    if not prompt:  # the start token stands before a text that is empty, and no other
        whole = [one if one[: len(ids)] == ids else [*ids, *one] for one in whole]
    labels = [one[len(ids) :] for one in whole]
    if not all(labels) or any(one[: len(ids)] != ids for one in whole):
        raise InputError("a label's word melts into the end of the prompt; put a space or a line before {label}")
    return Row(ids, labels)


def _decoder(pipe: Pipeline) -> Transformer:
    model = pipe.model
    head = model.config.head if isinstance(model, Transformer) else None
    if not isinstance(model, Transformer) or model.decoder is None or model.encoder is not None or head is None:
        kind = with_article(model.config.family)
        raise InputError(f"labels are prompted for from a decoder, and this is {kind} model")
    return model


def _common(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts begin with; each keeps one of its own to read."""
    most = min(map(len, prompts)) - 1
    return next((n for n in range(most) if len({prompt[n] for prompt in prompts}) > 1), most)


def _read(model: Transformer, ids: list[int], capacity: int) -> Cache:
    cache = model.make_cache(batch=1, capacity=capacity, chunk=max(1, capacity))
    if ids:
        at = torch.tensor([[0]], device=model.device)
        model(torch.tensor([ids], device=model.device), cache=cache, logits_at=at)
        cache.advance(len(ids))
    return cache


def _batch(model: Transformer, prefix: Cache, common: int, rows: Sequence[Row], capacity: int) -> Tensor:
    cache = copy.deepcopy(prefix) if common else model.make_cache(batch=len(rows), capacity=capacity, chunk=capacity)
    if common:
        cache.select(torch.zeros(len(rows), dtype=torch.long, device=model.device))
    ids, real = padded([row.prompt[common:] for row in rows], model.device)
    counts = torch.tensor([len(row.prompt) - common for row in rows], device=model.device)
    first = model(ids, attention_mask=real, cache=cache, logits_at=counts[:, None] - 1)[:, 0].double().log_softmax(-1)
    cache.advance(counts)
    scores = [_label(model, cache, first, [row.labels[place] for row in rows]) for place in range(len(rows[0].labels))]
    return torch.stack(scores, -1).cpu()


def _label(model: Transformer, cache: Cache, first: Tensor, tokens: Sequence[list[int]]) -> Tensor:
    """The log-probability of each row's tokens.  The pass writes beyond what the cache holds, and nothing is kept."""
    ids = torch.tensor([one[0] for one in tokens], device=first.device)
    total = first.gather(-1, ids[:, None])[:, 0]
    longest = max(map(len, tokens))
    if longest == 1:
        return total
    filled = torch.tensor([one + [one[-1]] * (longest - len(one)) for one in tokens], device=first.device)
    lengths = torch.tensor([len(one) for one in tokens], device=first.device)
    read = torch.arange(longest - 1, device=first.device) < lengths[:, None] - 1
    logits = model(filled[:, :-1], attention_mask=read, cache=cache).double().log_softmax(-1)
    each = logits.gather(-1, filled[:, 1:, None])[..., 0]
    return total + each.masked_fill(~read, 0.0).sum(-1)
