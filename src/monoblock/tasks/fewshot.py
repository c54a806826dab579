"""Few-shot classification: choose the label that is most probable after a prompt (Brown et al. 2020).

    template = PromptTemplate("Review: {text}\\nSentiment: {label}\\n\\n", {"0": "negative", "1": "positive"})
    examples = sample_balanced(train.rows, template.labels, 4, seed=0)
    scores = score_labels(loaded, template, examples, texts)          # (texts, labels) log-probabilities
    scores = calibrate_scores(scores, score_content_free(loaded, template, examples))

The score of a label is the sum of the log-probabilities of its tokens. All prompts begin with the same tokens, mainly
those of the examples; these are processed once, and their keys and values are cached.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monoblock.data.batches import permutation
from monoblock.data.readers.records import LabelledText
from monoblock.errors import ConfigError, InputError, did_you_mean, with_article
from monoblock.inference.scheduler import pad_right
from monoblock.model import Transformer
from monoblock.nn.cache import Cache
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, Table, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task_data import group_by_length

TEXT_FIELD, LABEL_FIELD = "{text}", "{label}"
DEFAULT_TEMPLATE = "Text: {text}\nLabel: {label}\n\n"
# Maps corpora to their templates; other corpora have DEFAULT_TEMPLATE.
TEMPLATES = {"reviews": "Review: {text}\nSentiment: {label}\n\n"}
CONTENT_FREE = ("N/A", "", "[MASK]")  # texts without content (Zhao et al. 2021, section 5)


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt template, and the word that is written for each label.

    The template contains {text} once and, after it, {label} once.
    """

    template: str
    label_words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template.count(TEXT_FIELD) != 1 or self.template.count(LABEL_FIELD) != 1:
            raise ConfigError(
                f"the template {self.template!r:.60} must contain {TEXT_FIELD} once and {LABEL_FIELD} once"
            )
        if self.template.index(TEXT_FIELD) > self.template.index(LABEL_FIELD):
            raise ConfigError(f"the template {self.template!r:.60} has {LABEL_FIELD} before {TEXT_FIELD}; swap them")
        num_labels, num_words = len(self.label_words), len(set(self.label_words.values()))
        if num_labels < 2 or num_words < num_labels:
            raise ConfigError(
                f"{num_labels} labels have {num_words} different words; give two or more labels, each with its own word"
            )

    @property
    def labels(self) -> list[str]:
        return list(self.label_words)

    def format_example(self, row: LabelledText) -> str:
        return self.template.replace(LABEL_FIELD, self.label_words[row.label]).replace(TEXT_FIELD, row.text)

    def format_prompt(self, examples: Sequence[LabelledText], text: str) -> str:
        """Return the prompt: the examples with their labels, then the text up to the place of its label.

        Spaces directly before that place are left out; they belong to the completion.
        """
        query = self.template[: self.template.index(LABEL_FIELD)].rstrip(" ").replace(TEXT_FIELD, text)
        return "".join(map(self.format_example, examples)) + query

    def label_completion(self, label: str) -> str:
        """Return what follows the prompt if the label is right: its word, with the spaces before it."""
        before = self.template[: self.template.index(LABEL_FIELD)]
        return " " * (len(before) - len(before.rstrip(" "))) + self.label_words[label]


def sample_balanced(rows: Sequence[LabelledText], labels: Sequence[str], count: int, seed: int) -> list[LabelledText]:
    """Sample `count` rows in random order, with equally many rows of each label, or one more of some labels."""
    order = permutation(seed, 0, len(rows)).tolist()
    sampled: list[int] = []
    for label_index, label in enumerate(labels):
        num_rows = count // len(labels) + (label_index < count % len(labels))
        indices = [index for index in order if rows[index].label == label][:num_rows]
        if len(indices) < num_rows:
            raise InputError(
                f"{count} shots need {num_rows} examples of the label {label!r}, but the training split has only "
                f"{len(indices)}; use fewer shots"
            )
        sampled += indices
    return [rows[sampled[index]] for index in permutation(seed, 1, count).tolist()] if count else []


def score_labels(
    loaded: LoadedModel,
    template: PromptTemplate,
    examples: Sequence[LabelledText],
    texts: Sequence[str],
    *,
    batch: int = 32,
) -> Tensor:
    """Return the log-probability of the word of each label after the prompt of each text, of shape (texts, labels)."""
    model = loaded.model
    head = model.config.head if isinstance(model, Transformer) else None
    if not isinstance(model, Transformer) or model.decoder is None or model.encoder is not None or head is None:
        family = with_article(model.config.family)
        raise InputError(
            f"few-shot prompts need a decoder-only language model, but this is {family} model; give another model"
        )
    rows = [_encode_prompt(loaded, template, examples, text) for text in texts]
    limit, longest = model.config.context, max(row.length for row in rows)
    if limit is not None and longest > limit:
        raise InputError(
            f"a prompt and its label have {longest} tokens, but the model reads at most {limit}; use fewer shots"
        )
    # The tokens with which all prompts begin are processed once; at least one token of each prompt is left over.
    prompts = [row.prompt_ids for row in rows]
    most = min(map(len, prompts)) - 1
    shared = next((n for n in range(most) if len({prompt[n] for prompt in prompts}) > 1), most)
    scores = torch.empty(len(rows), len(template.label_words), dtype=torch.float64)
    with torch.inference_mode():
        prefix = _prefill(model, rows[0].prompt_ids[:shared], longest)
        for indices in group_by_length([len(prompt) for prompt in prompts], batch, longest_first=False):
            scores[indices] = _score_batch(model, prefix, shared, [rows[index] for index in indices], longest)
    return scores


def calibrate_scores(scores: Tensor, content_free_scores: Tensor) -> Tensor:
    """Divide the probability of each label by its probability after texts without content, and renormalize.

    scores: the scores of the texts to classify, from `score_labels`, of shape (texts, labels).
    content_free_scores: the scores from `score_content_free`, of shape (content-free texts, labels).

    Return log-probabilities of shape (texts, labels) (Zhao et al. 2021, eq. 1 with W = diag(p)^-1, b = 0).
    """
    prior = content_free_scores.log_softmax(-1).exp().mean(0)
    return (scores.log_softmax(-1) - prior.log()).log_softmax(-1)


def score_content_free(
    loaded: LoadedModel, template: PromptTemplate, examples: Sequence[LabelledText], batch: int = 32
) -> Tensor:
    return score_labels(loaded, template, examples, CONTENT_FREE, batch=batch)


# -- evaluation -------------------------------------------------------------------------------------------------------


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
    """Compute accuracy on a labelled corpus for each number of examples in `shots`.

    The metric "accuracy" is the accuracy with the last number of examples.

    template: the template of a PromptTemplate; None uses the default for the corpus.
    words: the words that are written for labels; any other label is written as it is named in the corpus.
    """
    corpus, train = read_corpus(request, "labelled"), read_corpus(request, "labelled", "train")
    if any(shots) and corpus.split in ("train", "all"):
        raise ConfigError(
            f"the split {corpus.split} of {request.data} contains the examples that prompts show; use test or valid"
        )
    label_words = {label: (words or {}).get(label, label) for label in train.labels()}
    unknown = next((label for label in words or {} if label not in label_words), None)
    if unknown is not None:
        known = f"{', '.join(label_words)}{did_you_mean(unknown, label_words)}"
        raise InputError(f"{request.data} has no label {unknown!r}; it has {known}")
    prompt = PromptTemplate(template or TEMPLATES.get(request.data, DEFAULT_TEMPLATE), label_words)
    rows, texts = [], [row.text for row in corpus.rows]
    for count in shots:
        examples = sample_balanced(train.rows, prompt.labels, count, seed)
        row: dict[str, Any] = {"shots": count}
        scores = score_labels(loaded, prompt, examples, texts, batch=request.batch_size)
        if calibrate:
            row["plain"] = accuracy(scores, corpus.rows, prompt.labels)
            scores = calibrate_scores(scores, score_content_free(loaded, prompt, examples))
        rows.append(row | {"accuracy": accuracy(scores, corpus.rows, prompt.labels)})
    metrics = {"accuracy": rows[-1]["accuracy"], "shots": shots[-1], "few_shot": rows}
    metrics |= {"calibrated": calibrate, "sources": len(corpus), "split": corpus.split}
    columns = list(rows[0])
    return Evaluation(
        metrics,
        notes=[f"template {prompt.template!r}, examples sampled from the training split with seed {seed}"],
        tables=[Table(columns, [[row[column] for column in columns] for row in rows])],
    )


def accuracy(scores: Tensor, rows: Sequence[LabelledText], labels: Sequence[str]) -> float:
    """Return the fraction of rows whose own label has the highest score; `scores` has the shape (rows, labels)."""
    correct = [labels[index] == row.label for index, row in zip(scores.argmax(-1).tolist(), rows, strict=True)]
    return sum(correct) / len(correct)


# -- scoring ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrompt:
    prompt_ids: list[int]
    label_ids: list[list[int]]  # for each label, the tokens that its word adds to the prompt

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + max(map(len, self.label_ids))


def _encode_prompt(
    loaded: LoadedModel, template: PromptTemplate, examples: Sequence[LabelledText], text: str
) -> EncodedPrompt:
    prompt = template.format_prompt(examples, text)
    if not prompt and loaded.tokenizer.bos_id is None and loaded.tokenizer.eos_id is None:
        raise InputError(
            "an empty text gives an empty prompt, and the tokenizer has no start token; put a word before {text} in "
            "the template"
        )
    ids = list(loaded.encode_prompt(prompt).ids)
    full = [list(loaded.encode_prompt(prompt + template.label_completion(label)).ids) for label in template.labels]
    if not prompt:  # only an empty text is encoded with a start token
        full = [row if row[: len(ids)] == ids else [*ids, *row] for row in full]
    label_ids = [row[len(ids) :] for row in full]
    if not all(label_ids) or any(row[: len(ids)] != ids for row in full):
        raise InputError(
            "the word of a label is merged with the end of the prompt into one token; put a space or a line break "
            "before {label} in the template"
        )
    return EncodedPrompt(ids, label_ids)


def _prefill(model: Transformer, ids: list[int], capacity: int) -> Cache:
    """Return a key-value cache for one sequence of up to `capacity` tokens, filled with `ids`."""
    cache = model.make_cache(batch=1, capacity=capacity, chunk=max(1, capacity))
    if ids:
        first = torch.tensor([[0]], device=model.device)  # the logits are not used: compute them at one position only
        model(torch.tensor([ids], device=model.device), cache=cache, logits_at=first)
        cache.advance(len(ids))
    return cache


def _score_batch(
    model: Transformer, prefix: Cache, prefix_length: int, prompts: Sequence[EncodedPrompt], capacity: int
) -> Tensor:
    """Return the log-probability of each label after each prompt, of shape (prompts, labels).

    prefix: the cache of the first `prefix_length` tokens, which are the same in all prompts.
    """
    if prefix_length:
        cache = copy.deepcopy(prefix)
        cache.select(torch.zeros(len(prompts), dtype=torch.long, device=model.device))
    else:
        cache = model.make_cache(batch=len(prompts), capacity=capacity, chunk=capacity)
    ids, valid = pad_right([row.prompt_ids[prefix_length:] for row in prompts], model.device)
    lengths = torch.tensor([len(row.prompt_ids) - prefix_length for row in prompts], device=model.device)
    logits = model(ids, attention_mask=valid, cache=cache, logits_at=lengths[:, None] - 1)[:, 0]
    first_log_probs = logits.double().log_softmax(-1)
    cache.advance(lengths)
    scores = [
        _score_label(model, cache, first_log_probs, [row.label_ids[label] for row in prompts])
        for label in range(len(prompts[0].label_ids))
    ]
    return torch.stack(scores, -1).cpu()


def _score_label(model: Transformer, cache: Cache, first_log_probs: Tensor, tokens: Sequence[list[int]]) -> Tensor:
    """Return the log-probability of the label tokens of each row, of shape (B,); do not advance the cache.

    first_log_probs: the log-probabilities of the first token after each prompt, of shape (B, V).
    tokens: the label tokens of each row.
    """
    device = first_log_probs.device
    first = torch.tensor([row[0] for row in tokens], device=device)
    total = first_log_probs.gather(-1, first[:, None])[:, 0]
    longest = max(map(len, tokens))
    if longest == 1:
        return total
    ids = torch.tensor([row + [row[-1]] * (longest - len(row)) for row in tokens], device=device)
    lengths = torch.tensor([len(row) for row in tokens], device=device)
    valid = torch.arange(longest - 1, device=device) < lengths[:, None] - 1
    log_probs = model(ids[:, :-1], attention_mask=valid, cache=cache).double().log_softmax(-1)
    token_log_probs = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    return total + token_log_probs.masked_fill(~valid, 0.0).sum(-1)
