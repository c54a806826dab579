"""The check of cached decoding: it must give what the full pass gives."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.doctor.examination import Examination, check, fail, pad
from monoblock.doctor.recorder import Recorder
from monoblock.doctor.report import Finding
from monoblock.doctor.subject import difference

LEFT = 3  # tokens of padding before the shorter rows


@check("steps with the cache give what the full pass gives", "tokens", "causal", "per_token", "cache", is_slow=True)
def check_cache(exam: Examination) -> Finding | None:
    """Read a text token by token, in chunks and after padding: the outputs must be those of the full pass."""
    subject, ids = exam.subject, exam.ids
    full = exam.output
    results = {
        "token_by_token": exam.is_off(_run_cached(exam, ids, 1), full),
        "in_chunks": exam.is_off(_run_cached(exam, ids, 4), full),
    }
    if subject.takes_mask and subject.masks_cache:
        results["after_padding"] = _after_padding(exam)
    if not any(results.values()):
        return None
    reason, fix = _cause(exam, results)
    return fail({f"difference_{name}": value for name, value in results.items()}, reason, fix)


def _run_cached(exam: Examination, ids: Tensor, size: int, mask: Tensor | None = None) -> Tensor:
    """Read the first tokens at once and the others in chunks; return the outputs of all."""
    parts, state, done = [], None, 0
    first = LEFT + 2 if exam.has_window else ids.shape[1] - 5  # a window must be left behind
    with exam.subject.evaluating():
        while done < ids.shape[1]:
            count = min(first if done == 0 else size, ids.shape[1] - done)
            seen = None if mask is None else mask[:, : done + count]
            try:
                output, state = exam.subject.cached(ids[:, done : done + count], state, seen)
            except (RuntimeError, IndexError, ValueError) as error:
                if size > 1 and done:
                    exam.notes.append(f"the cache takes one token at a time ({error!s:.80})")
                    return exam.run(ids)
                raise
            parts.append(output[:, -count:] if output.dim() >= 3 else output[:, None])
            done += count
    if parts[0].shape[1] != min(first, ids.shape[1]):  # only the last output of a call
        full = exam.run(ids, mask)
        return torch.cat([full[:, : ids.shape[1] - len(parts) + 1], *[p[:, -1:] for p in parts[1:]]], 1)
    return torch.cat(parts, 1)


def _after_padding(exam: Examination) -> float:
    """Read a text after padding on the left; without it, the full pass gives what is right."""
    subject = exam.subject
    ids = exam.ids[:, : exam.ids.shape[1] - LEFT]
    padded, mask = pad(ids, LEFT, 0, subject.pad_id)
    plain = exam.run(ids)
    full = exam.run(padded, mask)[:, LEFT:]
    if difference(full, plain) > subject.tolerance:
        return 0.0  # padding on the left is wrong already without a cache, which is another check
    cached = _run_cached(exam, padded, 1, mask)[:, LEFT:]
    return exam.is_off(cached, plain)


def _cause(exam: Examination, results: dict[str, float]) -> tuple[str, str]:
    if not results["token_by_token"] and not results["in_chunks"]:
        return (
            "after padding, the position of a new token is wrong: it counts the padding, or is off by one",
            "continue after the last token of each row: position = mask.sum(1), which is its number of tokens so far",
        )
    if not results["token_by_token"]:
        return (
            "single tokens are right, but several new tokens at once are not: the mask of a chunk is wrong, or a "
            "recurrence begins a chunk without its state",
            "let token i of a chunk after n cached tokens see the keys j <= n + i; begin with the stored state",
        )
    cause = _compare_first_layer(exam)
    if cause:
        return cause
    if not exam.recorded.attentions:
        return (
            "a step gives other outputs than the full pass: it does not begin with the state of the step before, or "
            "does not return its own",
            "give the recurrence the stored state and return the new one: x, state = self.rnn(x, state)",
        )
    return (
        "a step with the cache gives other outputs than the full pass, from the second layer on",
        "store keys and values of every layer, and give each layer its own",
    )


def _compare_first_layer(exam: Examination) -> tuple[str, str] | None:
    """Compare the queries and keys of the first attention in a cached step with those of the full pass."""
    ids, state = exam.ids[:1], None
    n = ids.shape[1] - 4
    full = next(iter(exam.record(ids[:, : n + 1].clone()).attentions), None)
    step_recorder, new = Recorder(), ids[:, n : n + 1].clone()
    with exam.subject.evaluating():
        for start, end in ((0, n - 1), (n - 1, n)):
            _, state = exam.subject.cached(ids[:, start:end], state, None)
        with step_recorder.recording(new):
            _, state = exam.subject.cached(new, state, None, recorded=True)
    step = next(iter(step_recorder.attentions), None)
    if full is None or step is None or step.key.shape[0] != full.key.shape[0]:
        return None
    seen = step.key.shape[-2]
    if seen != n + 1 and not exam.has_window:
        return (
            f"a new token sees {seen} keys where it should see {n + 1}: the cache forgets or repeats tokens",
            "append the new keys and values to all earlier ones: k = torch.cat((cached_k, k), dim=-2)",
        )
    if seen != n + 1:
        return None
    old_keys = difference(step.key[:, : n - 1], full.key[:, : n - 1])  # of the first pass
    new_key = difference(step.key[:, n - 1 :], full.key[:, n - 1 :])  # of single steps
    limit = exam.subject.tolerance * 10
    if old_keys > limit and (full.rotations or step.rotations):
        return (
            "the cached keys are not those of the full pass: they are stored without their rotation (RoPE), or are "
            "rotated again",
            "rotate a key once, by its own position, before it is stored in the cache",
        )
    if old_keys > limit:
        return (
            "the cached keys are not those of the full pass: they were overwritten, or belong to another layer",
            "give each layer a cache of its own, and write new keys after the old ones",
        )
    if new_key > limit or difference(step.query[:, -1:], full.query[:, -1:]) > limit:
        return (
            "a new token gets the wrong position: not the number of tokens before it",
            "give the step position_ids = cache_length, which starts at the length of the prompt",
        )
    return None
