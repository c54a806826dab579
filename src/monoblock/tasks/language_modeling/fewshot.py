"""Labels by prompting: a decoder that was never trained for a task says how likely each label is after a prompt.

    prompting = Prompting("Review: {text}\\nSentiment: {label}\\n\\n", {"0": "negative", "1": "positive"})
    shown = balanced(train.rows, prompting.labels, 4, seed=0)
    found = label_scores(loaded, prompting, shown, texts)             # (texts, labels) log-probabilities
    found = calibrated(found, content_free(loaded, prompting, shown))

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

from monoblock.data.batching.order import permutation
from monoblock.data.readers.records import LabelledText
from monoblock.decoding.prompt import pad_right
from monoblock.errors import ConfigError, InputError, did_you_mean, with_article
from monoblock.nn.cache import Cache
from monoblock.nn.transformer import Transformer
from monoblock.tasks.batching import group_by_length
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, Table, read_corpus
from monoblock.tasks.loaded_model import LoadedModel

TEXT_FIELD, LABEL_FIELD = "{text}", "{label}"
DEFAULT_TEMPLATE = "Text: {text}\nLabel: {label}\n\n"
# Corpus -> how its rows are put to a model that does not know it.
TEMPLATES = {"reviews": "Review: {text}\nSentiment: {label}\n\n"}
CONTENT_FREE = ("N/A", "", "[MASK]")  # texts that say nothing (Zhao et al. 2021, 5)


@dataclass(frozen=True)
class PromptTemplate:
    """A template with one {text} and after it one {label}, and the word that stands for each label."""

    template: str
    label_words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template.count(TEXT_FIELD) != 1 or self.template.count(LABEL_FIELD) != 1:
            raise ConfigError(f"the template {self.template!r:.60} needs {TEXT_FIELD} once and {LABEL_FIELD} once")
        if self.template.index(TEXT_FIELD) > self.template.index(LABEL_FIELD):
            raise ConfigError(f"the template {self.template!r:.60} asks for the label before the text; turn it round")
        if len(self.label_words) < 2 or len(set(self.label_words.values())) < len(self.label_words):
            raise ConfigError(
                f"{len(set(self.label_words.values()))} different words for labels; two or more are needed"
            )

    @property
    def labels(self) -> list[str]:
        return list(self.label_words)

    def format_example(self, row: LabelledText) -> str:
        return self.template.replace(LABEL_FIELD, self.label_words[row.label]).replace(TEXT_FIELD, row.text)

    def format_prompt(self, examples: Sequence[LabelledText], text: str) -> str:
        """The examples, then the text, up to where its label would stand.  A space before that belongs to the label."""
        asked = self.template[: self.template.index(LABEL_FIELD)].rstrip(" ").replace(TEXT_FIELD, text)
        return "".join(map(self.format_example, examples)) + asked

    def label_completion(self, label: str) -> str:
        """What follows the prompt."""
        before = self.template[: self.template.index(LABEL_FIELD)]
        return " " * (len(before) - len(before.rstrip(" "))) + self.label_words[label]


def sample_balanced(rows: Sequence[LabelledText], labels: Sequence[str], count: int, seed: int) -> list[LabelledText]:
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


def score_labels(
    loaded: LoadedModel,
    template: PromptTemplate,
    examples: Sequence[LabelledText],
    texts: Sequence[str],
    *,
    batch: int = 32,
) -> Tensor:
    """(texts, labels): the log-probability of each label's word after each text's prompt."""
    model = _require_decoder(loaded)
    rows = [_encode_prompt(loaded, template, examples, text) for text in texts]
    limit, longest = model.config.context, max(row.length for row in rows)
    if limit is not None and longest > limit:
        raise InputError(
            f"a prompt and its label have {longest} tokens, and the model reads {limit}; show fewer examples"
        )
    common = _shared_prefix_length([row.prompt_ids for row in rows])
    found = torch.empty(len(rows), len(template.label_words), dtype=torch.float64)
    with torch.inference_mode():
        prefix = _prefill(model, rows[0].prompt_ids[:common], longest)
        for numbers in group_by_length([len(row.prompt_ids) for row in rows], batch, longest_first=False):
            found[numbers] = _score_batch(model, prefix, common, [rows[number] for number in numbers], longest)
    return found


def calibrate_scores(scores: Tensor, content_free_scores: Tensor) -> Tensor:
    """Log-probabilities over the labels, each divided by what the label has after a text that says nothing.

    scores (texts, labels) and of_nothing (content-free texts, labels) are those of `label_scores`; the latter are made
    probabilities over the labels and averaged (Zhao et al. 2021, eq. 1 with W = diag(p)^-1, b = 0).
    """
    prior = content_free_scores.log_softmax(-1).exp().mean(0)
    return (scores.log_softmax(-1) - prior.log()).log_softmax(-1)


def score_content_free(
    loaded: LoadedModel, template: PromptTemplate, examples: Sequence[LabelledText], batch: int = 32
) -> Tensor:
    return score_labels(loaded, template, examples, CONTENT_FREE, batch=batch)


# -- measuring --------------------------------------------------------------------------------------------------------


def evaluate_few_shot(
    loaded: LoadedModel,
    request: EvaluationRequest,
    shots: Sequence[int],
    *,
    template: str | None = None,
    words: Mapping[str, str] | None = None,
    calibrate: bool = False,
    seed: int = 0,
) -> Evaluation:
    """Accuracy on a labelled corpus by the number of examples shown, plain or calibrated; the last is the figure."""
    corpus, train = read_corpus(request, "labelled"), read_corpus(request, "labelled", "train")
    if any(shots) and corpus.split in ("train", "all"):
        raise ConfigError(
            f"the split {corpus.split} of {request.data} has the examples in it; measure on test or valid"
        )
    named = {label: (words or {}).get(label, label) for label in train.labels()}
    unknown = next((label for label in words or {} if label not in named), None)
    if unknown is not None:
        raise InputError(
            f"no label {unknown!r}{did_you_mean(unknown, named)} in {request.data}; it has {', '.join(named)}"
        )
    prompting = PromptTemplate(template or TEMPLATES.get(request.data, DEFAULT_TEMPLATE), named)
    rows = [
        _evaluate_shots(loaded, prompting, corpus.rows, train.rows, count, request.batch, calibrate, seed)
        for count in shots
    ]
    figures = {"accuracy": rows[-1]["accuracy"], "shots": shots[-1], "few_shot": rows}
    figures |= {"calibrated": calibrate, "sources": len(corpus), "split": corpus.split}
    columns = list(rows[0])
    return Evaluation(
        figures,
        notes=[f"prompted by {prompting.template!r}, examples of the training split drawn by seed {seed}"],
        tables=[Table(columns, [[row[column] for column in columns] for row in rows])],
    )


def _evaluate_shots(
    loaded: LoadedModel,
    template: PromptTemplate,
    rows: Sequence[LabelledText],
    train: Sequence[LabelledText],
    num_shots: int,
    batch: int,
    calibrate: bool,
    seed: int,
) -> dict[str, Any]:
    shown = sample_balanced(train, template.labels, num_shots, seed)
    scores = score_labels(loaded, template, shown, [row.text for row in rows], batch=batch)
    told: dict[str, Any] = {"shots": num_shots}
    if calibrate:
        told["plain"] = accuracy(scores, rows, template.labels)
        scores = calibrate_scores(scores, score_content_free(loaded, template, shown))
    return told | {"accuracy": accuracy(scores, rows, template.labels)}


def accuracy(scores: Tensor, rows: Sequence[LabelledText], labels: Sequence[str]) -> float:
    """How many of a hundred have their own label as the most likely."""
    right = [labels[place] == row.label for place, row in zip(scores.argmax(-1).tolist(), rows, strict=True)]
    return 100 * sum(right) / len(right)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrompt:
    prompt_ids: list[int]
    label_ids: list[list[int]]  # the tokens of each label's word after this prompt

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + max(map(len, self.label_ids))


def _encode_prompt(
    loaded: LoadedModel, template: PromptTemplate, examples: Sequence[LabelledText], text: str
) -> EncodedPrompt:
    prompt = template.format_prompt(examples, text)
    if not prompt and loaded.tokenizer.bos_id is None and loaded.tokenizer.eos_id is None:
        raise InputError(
            "an empty text leaves an empty prompt, and this tokenizer has no start token; put a word before {text}"
        )
    ids = list(loaded.encode_prompt(prompt).ids)
    whole = [list(loaded.encode_prompt(prompt + template.label_completion(label)).ids) for label in template.labels]
    if not prompt:  # the start token stands before a text that is empty, and no other
        whole = [one if one[: len(ids)] == ids else [*ids, *one] for one in whole]
    labels = [one[len(ids) :] for one in whole]
    if not all(labels) or any(one[: len(ids)] != ids for one in whole):
        raise InputError("a label's word melts into the end of the prompt; put a space or a line before {label}")
    return EncodedPrompt(ids, labels)


def _require_decoder(loaded: LoadedModel) -> Transformer:
    model = loaded.model
    head = model.config.head if isinstance(model, Transformer) else None
    if not isinstance(model, Transformer) or model.decoder is None or model.encoder is not None or head is None:
        kind = with_article(model.config.family)
        raise InputError(f"labels are prompted for from a decoder, and this is {kind} model")
    return model


def _shared_prefix_length(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts begin with; each keeps one of its own to read."""
    most = min(map(len, prompts)) - 1
    return next((n for n in range(most) if len({prompt[n] for prompt in prompts}) > 1), most)


def _prefill(model: Transformer, ids: list[int], capacity: int) -> Cache:
    cache = model.make_cache(batch=1, capacity=capacity, chunk=max(1, capacity))
    if ids:
        at = torch.tensor([[0]], device=model.device)
        model(torch.tensor([ids], device=model.device), cache=cache, logits_at=at)
        cache.advance(len(ids))
    return cache


def _score_batch(
    model: Transformer, prefix: Cache, prefix_length: int, prompts: Sequence[EncodedPrompt], capacity: int
) -> Tensor:
    cache = (
        copy.deepcopy(prefix)
        if prefix_length
        else model.make_cache(batch=len(prompts), capacity=capacity, chunk=capacity)
    )
    if prefix_length:
        cache.select(torch.zeros(len(prompts), dtype=torch.long, device=model.device))
    ids, real = pad_right([row.prompt_ids[prefix_length:] for row in prompts], model.device)
    counts = torch.tensor([len(row.prompt_ids) - prefix_length for row in prompts], device=model.device)
    first = model(ids, attention_mask=real, cache=cache, logits_at=counts[:, None] - 1)[:, 0].double().log_softmax(-1)
    cache.advance(counts)
    scores = [
        _score_label(model, cache, first, [row.label_ids[place] for row in prompts])
        for place in range(len(prompts[0].label_ids))
    ]
    return torch.stack(scores, -1).cpu()


def _score_label(model: Transformer, cache: Cache, first_log_probs: Tensor, tokens: Sequence[list[int]]) -> Tensor:
    """The log-probability of each row's tokens.  The pass writes beyond what the cache holds, and nothing is kept."""
    ids = torch.tensor([one[0] for one in tokens], device=first_log_probs.device)
    total = first_log_probs.gather(-1, ids[:, None])[:, 0]
    longest = max(map(len, tokens))
    if longest == 1:
        return total
    filled = torch.tensor([one + [one[-1]] * (longest - len(one)) for one in tokens], device=first_log_probs.device)
    lengths = torch.tensor([len(one) for one in tokens], device=first_log_probs.device)
    read = torch.arange(longest - 1, device=first_log_probs.device) < lengths[:, None] - 1
    logits = model(filled[:, :-1], attention_mask=read, cache=cache).double().log_softmax(-1)
    each = logits.gather(-1, filled[:, 1:, None])[..., 0]
    return total + each.masked_fill(~read, 0.0).sum(-1)
