"""Translate many sources in batches of similar length; results are in the order of the sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import torch

from monoblock.errors import InputError, with_article
from monoblock.inference.runners.plain import mean_log_probs
from monoblock.inference.scheduler import Prompt, pad_right
from monoblock.inference.settings import Settings
from monoblock.nn.generation_options import GenerationOptions
from monoblock.tasks.batching import check_long_mode
from monoblock.tasks.input_template import split_text
from monoblock.tasks.loaded_model import Hypothesis, LoadedModel
from monoblock.tasks.task_data import group_by_length

LongSourceMode = Literal["refuse", "split"]
LONG_SOURCE_MODES = ("refuse", "split")  # what to do with a source that is longer than the context


class TranslationRequest(NamedTuple):
    line: int
    prompt: Prompt
    settings: Settings


def translate_texts(
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    n_best: int | None = None,
    batch: int | None = None,
    to: str | None = None,
    long: LongSourceMode = "refuse",
    first_index: int = 0,
    **options: Unpack[GenerationOptions],
) -> list[list[Hypothesis]]:
    """Return the hypotheses for each text, best first; the hypotheses for an empty text are empty.

    n_best: return this many hypotheses with scores; without beam search, another forward pass computes the scores.
    batch: number of sources decoded at once; None: 64, or as many as suit a GPU.
    to: the script of the target, for a model that writes several scripts.
    long: "refuse" a source that is longer than the context, or "split" it into sentences.
    first_index: the line number of the first text, counted from 0; with a seed, line n is sampled with seed + n.
    options: decoding options, which override the defaults of the model.
    """
    if loaded.model.encoder is None:
        raise InputError(
            f"translate needs an encoder, but this is {with_article(loaded.model.config.family)} model; call generate"
        )
    if n_best is not None:
        options["num_return_sequences"] = n_best
        options["num_beams"] = max(n_best, options.get("num_beams") or loaded.defaults.options.get("num_beams", 1))
    settings = loaded.resolve_settings(options)
    check_long_mode(long, LONG_SOURCE_MODES)
    requests = [
        request
        for line, text in enumerate(texts, first_index)
        for request in _build_requests(loaded, line, text, settings, to, long)
    ]
    if batch is None:
        batch = loaded.default_batch(max((len(request.prompt.ids) for request in requests), default=1), settings)
    results: list[list[Hypothesis]] = [[] for _ in requests]
    for indices in group_by_length([len(request.prompt.source or ()) for request in requests], max(1, batch)):
        prompts = [requests[index].prompt for index in indices]
        rows = loaded.decode(prompts, [requests[index].settings for index in indices])
        if n_best is not None and settings.num_beams == 1:
            _score_hypotheses(loaded, prompts, [row[0] for row in rows], settings)
        for index, row in zip(indices, rows, strict=True):
            results[index] = row
    parts_per_line: list[list[list[Hypothesis]]] = [[] for _ in texts]
    for request, hypotheses in zip(requests, results, strict=True):
        parts_per_line[request.line - first_index].append(hypotheses)
    return [_join_parts(parts, settings.num_return_sequences) for parts in parts_per_line]


def best_translations(loaded: LoadedModel, texts: Sequence[str], **options: Any) -> list[str]:
    """Return the best translation of each text; the options are those of `translate_texts`."""
    return [hypotheses[0].text for hypotheses in translate_texts(loaded, texts, **options)]


@torch.inference_mode()
def _score_hypotheses(
    loaded: LoadedModel, prompts: list[Prompt], hypotheses: list[Hypothesis], settings: Settings
) -> None:
    """Set the score of each hypothesis to its log-probability / `length_divisor`, the score of beam search."""
    device = loaded.model.device
    source, mask = pad_right([prompt.source or () for prompt in prompts], device)
    targets = [(*prompt.ids, *hypothesis.ids) for prompt, hypothesis in zip(prompts, hypotheses, strict=True)]
    target, _ = pad_right([ids[:-1] for ids in targets], device)  # needs no mask: attention over the target is causal
    log_probs = mean_log_probs([model(source, target, mask) for model in (loaded.model, *loaded.ensemble)])
    for row, (prompt, hypothesis) in enumerate(zip(prompts, hypotheses, strict=True)):
        positions = torch.arange(len(prompt.ids) - 1, len(targets[row]) - 1, device=device)
        total = log_probs[row, positions, torch.tensor(hypothesis.ids, device=device)].sum().item()
        hypothesis.score = total / settings.length_divisor(max(1, len(hypothesis.ids)))


def _build_requests(
    loaded: LoadedModel, line: int, text: str, settings: Settings, to: str | None, long: str
) -> list[TranslationRequest]:
    """Build the request for a line or, if the line is longer than the context and long="split", for each sentence.

    An empty line has no request.
    """
    if not text.strip():
        return []
    limit = loaded.model.config.context
    tag = script_tag_for(loaded, text, to)

    def prompt(part: str) -> Prompt:
        return loaded.encode_prompt(f"{tag} {part}" if tag else part)

    def fits(part: str) -> bool:
        return limit is None or len(prompt(part).source or ()) <= limit

    if long == "refuse" and not fits(text):
        length = len(prompt(text).source or ())
        raise InputError(
            f"line {line + 1} has {length} tokens, but the model reads at most {limit}; "
            f"shorten it, or give long='split' to translate it sentence by sentence"
        )
    if settings.seed is not None and settings.temperature > 0:
        settings = replace(settings, seed=settings.seed + line)
    # Sentences are not joined: a model that was trained on single sentences translates only one of several.
    try:
        return [TranslationRequest(line, prompt(part), settings) for part in split_text(text, fits, pack=False)]
    except InputError as problem:
        raise InputError(f"line {line + 1}: {problem}") from None


def fits_context(loaded: LoadedModel, text: str) -> bool:
    """Return whether a source fits into the context of the model."""
    limit = loaded.model.config.context
    return limit is None or len(loaded.encode_prompt(text).source or ()) <= limit


def script_tag_for(loaded: LoadedModel, text: str, to: str | None) -> str:
    """Return the tag for the script `to`; "" if the text begins with a tag or the model has no script tags."""
    if not loaded.defaults.from_recipe or (to is None and loaded.normalize_source(text)[1]):
        if to is not None:
            raise InputError(f"to={to!r} has no effect, because this model has no script tags; leave it out")
        return ""
    return loaded.source_encoder.find_script_tag(to)


def _join_parts(parts: list[list[Hypothesis]], count: int) -> list[Hypothesis]:
    """Return the hypotheses for a line: the n-th best one joins the n-th best hypotheses for all parts of the line.

    Its score is the mean of their scores, weighted by their numbers of tokens.
    """
    if not parts:
        return [Hypothesis("", 0, "stop", 0.0) for _ in range(count)]
    if len(parts) == 1:
        return parts[0]
    joined = []
    for rank in range(count):
        hypotheses = [part[rank] for part in parts]
        num_tokens = sum(hypothesis.num_tokens for hypothesis in hypotheses)
        weighted = [one.score * one.num_tokens for one in hypotheses if one.score is not None]
        score = sum(weighted) / max(1, num_tokens) if len(weighted) == len(hypotheses) else None
        reason = next((one.finish_reason for one in hypotheses if one.finish_reason != "stop"), "stop")
        joined.append(Hypothesis(" ".join(one.text.strip() for one in hypotheses), num_tokens, reason, score))
    return joined
