"""Many sources to their targets: sorted by length, a batch at a time, and back in the order they came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from monoblock.decoding.prompt import Prompt, pad_right
from monoblock.decoding.settings import Settings
from monoblock.errors import InputError
from monoblock.tasks.batching import group_by_length
from monoblock.tasks.loaded_model import Hypothesis, LoadedModel
from monoblock.tasks.long_inputs import check_long_mode
from monoblock.tasks.text_splitting import split_text

LONG_SOURCE_MODES = ("refuse", "split")  # what is done with a source beyond the context


class TranslationRequest(NamedTuple):
    line: int
    prompt: Prompt
    settings: Settings


def translate_texts(
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    n_best: int | None = None,
    batch: int = 64,
    to: str | None = None,
    long: str = "refuse",
    first_index: int = 0,
    **options: Any,
) -> list[list[Hypothesis]]:
    """The hypotheses of each text, best first; an empty text has empty ones.

    n_best: return so many hypotheses with scores; texts that were not found by beam search are scored by another pass.
    first_index: the line number of the first text; with a seed, line n is sampled with seed + n.
    """
    if loaded.model.encoder is None:
        raise InputError(f"a {loaded.model.config.family} model continues texts and translates none; call generate")
    if n_best is not None:
        beams = max(n_best, options.get("num_beams") or loaded.defaults.options.get("num_beams", 1))
        options |= {"num_return_sequences": n_best, "num_beams": beams}
    settings = loaded.resolve_settings(options)
    check_long_mode(long, LONG_SOURCE_MODES)
    requests = [
        request
        for line, text in enumerate(texts, first_index)
        for request in _build_requests(loaded, line, text, settings, to, long)
    ]
    parts: list[list[list[Hypothesis]]] = [[] for _ in texts]
    for request, hypotheses in zip(
        requests, _run_requests(loaded, requests, settings, max(1, batch), n_best is not None), strict=True
    ):
        parts[request.line - first_index].append(hypotheses)
    return [_join_parts(some, settings.num_return_sequences) for some in parts]


def best_translations(loaded: LoadedModel, texts: Sequence[str], **options: Any) -> list[str]:
    """The best hypothesis of each text; options as in `translate_texts`."""
    return [hypotheses[0].text for hypotheses in translate_texts(loaded, texts, **options)]


def _run_requests(
    loaded: LoadedModel, requests: Sequence[TranslationRequest], settings: Settings, batch: int, with_scores: bool
) -> list[list[Hypothesis]]:
    """The hypotheses of each request, decoded in batches of similar length."""
    results: list[list[Hypothesis]] = [[] for _ in requests]
    for indices in group_by_length([len(request.prompt.source or ()) for request in requests], batch):
        prompts = [requests[index].prompt for index in indices]
        hypotheses = loaded.generate(prompts, [requests[index].settings for index in indices])
        if with_scores and settings.num_beams == 1:
            _score_hypotheses(loaded, prompts, [row[0] for row in hypotheses], settings.length_penalty)
        for index, row in zip(indices, hypotheses, strict=True):
            results[index] = row
    return results


@torch.inference_mode()
def _score_hypotheses(loaded: LoadedModel, prompts: list[Prompt], hypotheses: list[Hypothesis], penalty: float) -> None:
    """Give each answer the score a beam search would have given it."""
    device = loaded.model.device
    source, mask = pad_right([prompt.source or () for prompt in prompts], device)
    said = [(*prompt.ids, *answer.ids) for prompt, answer in zip(prompts, hypotheses, strict=True)]
    target, _ = pad_right([ids[:-1] for ids in said], device)  # filled up on the right, which no earlier place sees
    shares = loaded.model(source, target, mask).float().log_softmax(-1)
    for row, (prompt, answer) in enumerate(zip(prompts, hypotheses, strict=True)):
        places = torch.arange(len(prompt.ids) - 1, len(said[row]) - 1, device=device)
        total = shares[row, places, torch.tensor(answer.ids, device=device)].sum().item()
        answer.score = total / max(1, len(answer.ids)) ** penalty


def _build_requests(
    loaded: LoadedModel, line: int, text: str, settings: Settings, to: str | None, long: str
) -> list[TranslationRequest]:
    """What is translated for a line: itself, or the parts it is cut into."""
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
            f"line {line + 1} has {length} tokens, and the model reads {limit}; "
            f"shorten it, or split it with long='split'"
        )
    own = settings if settings.seed is None else replace(settings, seed=settings.seed + line)
    # Models of sentences say but one of several: each is translated by itself.
    try:
        return [TranslationRequest(line, prompt(part), own) for part in split_text(text, fits, pack=False)]
    except InputError as problem:
        raise InputError(f"line {line + 1}: {problem}") from None


def fits_context(loaded: LoadedModel, text: str) -> bool:
    """Whether a source fits into the model's context."""
    limit = loaded.model.config.context
    return limit is None or len(loaded.encode_prompt(text).source or ()) <= limit


def script_tag_for(loaded: LoadedModel, text: str, to: str | None) -> str:
    """The script to be asked for, unless the text itself does."""
    if not loaded.defaults.from_recipe or (to is None and loaded.normalize_source(text)[1]):
        if to is not None:
            raise InputError(f"this model has no script {to!r} to ask for; leave it out")
        return ""
    return loaded.source_encoder.find_script_tag(to)


def _join_parts(parts: list[list[Hypothesis]], count: int) -> list[Hypothesis]:
    """The hypotheses of a line from those of its parts, the first with the first; scores weighed by length."""
    if not parts:
        return [Hypothesis("", 0, "stop", 0.0) for _ in range(count)]
    if len(parts) == 1:
        return parts[0]
    return [_concatenate([part[rank] for part in parts]) for rank in range(count)]


def _concatenate(hypotheses: list[Hypothesis]) -> Hypothesis:
    tokens = sum(answer.num_tokens for answer in hypotheses)
    scores: list[Any] = [answer.score for answer in hypotheses]
    score = None
    if None not in scores:
        score = sum(one * answer.num_tokens for one, answer in zip(scores, hypotheses, strict=True)) / max(1, tokens)
    finished = "length" if any(answer.finish_reason == "length" for answer in hypotheses) else "stop"
    return Hypothesis(" ".join(answer.text.strip() for answer in hypotheses), tokens, finished, score)
