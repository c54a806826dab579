"""Checks of padding: it must change nothing, wherever it is."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress

import torch
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, check, fail, pad, unsupported
from monoblock.doctor.report import Finding

PAD = 3
SEEN = 1e-6  # weights on padding below this are rounding
MASK_FIX = (
    "join the padding mask to the causal mask, scores.masked_fill(mask[:, None, None, :] == 0, -inf), in every layer"
)


@check("padding changes nothing", "tokens", "mask", explains="cache")
def check_padding(exam: Examination) -> Finding | None:
    """Pad a text on the right, the left and inside: the outputs of its tokens must not change.

    A decoder that cannot be given positions need not take padding on the left, but is said not to support it.
    """
    subject = exam.subject
    if subject.inverted_mask is not None:
        return fail(
            {"difference_with_a_mask_of_tokens_only": subject.inverted_mask},
            "the mask is inverted: it is 1 for tokens and 0 for padding, but the model ignores what is 1 and attends "
            "to what is 0",
            "hide the keys where the mask is 0: scores.masked_fill(mask[:, None, None, :] == 0, -inf); or name the "
            "argument key_padding_mask, which is True for padding",
        )
    ids = exam.ids[:, : exam.ids.shape[1] - PAD]
    plain = exam.run(ids)
    sides = {"right": _padded(exam, ids, plain, ids.shape[1])}
    left = 0.0
    with nullcontext() if subject.left_padding else suppress(Exception):  # a model may refuse what it need not take
        left = _padded(exam, ids, plain, 0)
    if subject.left_padding:
        sides["left"] = left
    if subject.inner_padding:
        sides["inside"] = _padded(exam, ids, plain, ids.shape[1] // 2)
    if not any(sides.values()) and left and subject.kind == "causal":
        return _left_finding(exam, ids, left)
    if not any(sides.values()):
        return _check_training(exam, ids)
    evidence = {f"difference_{side}": value for side, value in sides.items()}
    return fail(evidence, *_cause(exam, ids, sides))


def _check_training(exam: Examination, ids: Tensor) -> Finding | None:
    """Look at the weights on padding that attention of PyTorch has in training, where a mask of floats is added."""
    if not any(isinstance(part, nn.MultiheadAttention) for _, part in exam.named_modules):
        return None
    seen, layer = _weight_on_padding(exam, ids, 0, PAD)  # a recorded pass takes the path of training
    if seen <= SEEN:
        return None
    return fail(
        {"largest_weight_on_padding": seen, "layer": layer},
        "padding is hidden in evaluation, but not in training: the mask is of floats, which nn.MultiheadAttention adds "
        "to the scores",
        "pass a boolean mask, True for padding: src_key_padding_mask=(ids == pad_id), or key_padding_mask",
        "mask of floats",
    )


def _left_finding(exam: Examination, ids: Tensor, left: float) -> Finding:
    """Report a decoder that is right with padding on the right, where no token sees it, and wrong on the left."""
    seen, layer = _weight_on_padding(exam, ids, PAD, 0)
    evidence = {"difference_left": left, "difference_right": 0.0}
    takes_mask = getattr(exam.subject, "mask_argument", None) is not None
    if seen > SEEN and takes_mask:
        return fail(
            {**evidence, "largest_weight_on_padding": seen, "layer": layer},
            f"tokens attend to padding on the left in layer {layer}, although the mask hides it: the mask does not "
            "reach this attention",
            MASK_FIX,
        )
    fix = "take position ids and make them from the mask: position_ids = (mask.cumsum(1) - 1).clamp(min=0)"
    if seen > SEEN:
        cause = "tokens attend to it, and positions count it"
        fix = "take a mask and hide the padding: scores.masked_fill(mask[:, None, None, :] == 0, -inf); then " + fix
    elif not exam.recorded.attentions:
        cause = "a recurrence or a convolution reads it, or positions count it"
        fix = (
            "pack the rows by their lengths (nn.utils.rnn.pack_padded_sequence), or keep the state where the mask is 0"
        )
    elif not math.isfinite(left):
        cause = "a query at padding sees no key, its softmax is NaN, and NaN spreads to the tokens"
        fix = "let padding see itself: mask | torch.eye(T, dtype=torch.bool); then " + fix
    else:
        cause = "positions count the padding, and the model takes no position ids that could leave it out"
    return unsupported(
        evidence,
        f"padding on the left changes the logits of the tokens: {cause}. Batches of prompts of unequal length generate "
        "other text than each prompt alone",
        f"{fix}; until then, pad on the right only",
    )


def _weight_on_padding(exam: Examination, ids: Tensor, left: int, right: int) -> tuple[float, int]:
    """Return the largest weight of a token on padding in a recorded pass, and its layer."""
    padded, mask = pad(ids, left, right, exam.subject.pad_id)
    length, end = padded.shape[1], left + ids.shape[1]
    found = [(0.0, 0)]
    for layer, record in enumerate(exam.record(padded, mask).attentions):
        used = record.weights if record.used_weights is None else record.used_weights
        if used.shape[-1] == length:
            queries = used[:, left:end] if used.shape[-2] == length else used
            weights = torch.cat((queries[..., :left], queries[..., end:]), -1).float().nan_to_num()
            found.append((float(weights.max()), layer))
    return max(found, key=lambda pair: pair[0])


def _padded(exam: Examination, ids: Tensor, plain: Tensor, place: int) -> float:
    """Return how much the outputs of a text change with padding before the token at a place, or after the last one."""
    gap = torch.full_like(ids[:, :PAD], 0 if exam.subject.pad_id is None else exam.subject.pad_id)
    padded = torch.cat((ids[:, :place], gap, ids[:, place:]), 1)
    mask = torch.ones_like(padded)
    mask[:, place : place + PAD] = 0
    output = exam.run(padded, mask)
    if output.dim() >= 3 and output.shape[1] == padded.shape[1]:
        output = torch.cat((output[:, :place], output[:, place + PAD :]), 1)
    return exam.is_off(output, plain)


def _cause(exam: Examination, ids: Tensor, sides: dict[str, float]) -> tuple[str, str]:
    records = exam.recorded.attentions
    seen, _ = _weight_on_padding(exam, ids, 0, PAD)
    is_pooled = not exam.is_per_token
    if records and seen < SEEN and is_pooled:
        return (
            "attention ignores the padding, but the pooling does not: padded positions are summed or averaged with "
            "the rest, or the last position is read, which is padding",
            "pool over tokens only: (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True); the last token is "
            "hidden[torch.arange(B), mask.sum(1) - 1]",
        )
    if not records and is_pooled:
        return (
            "padding changes the output of the text: a recurrence runs on over it, and its last state is that of "
            "padding, or the pooling counts it",
            "read the state at the last token, states[torch.arange(B), lengths - 1], or pack the rows by their lengths "
            "(nn.utils.rnn.pack_padded_sequence)",
        )
    if not sides.get("right") and (sides.get("left") or sides.get("inside")):
        before, layer = _weight_on_padding(exam, ids, PAD, 0)
        if before > SEEN:
            return (
                f"tokens attend to the padding before them in layer {layer}, although the mask hides it: the mask does "
                "not reach this attention",
                MASK_FIX,
            )
        if not records:
            return (
                "the padding before a token changes its output, although the mask hides it: a recurrence or a "
                "convolution reads it, or positions count it",
                "where the mask is 0, set the inputs to zero and keep the state as it was; or pad on the right only",
            )
        return (
            "positions count the padding: a token after padding gets a later position than the same token without it",
            "count tokens only: position_ids = mask.cumsum(1) - 1, and give them to the position encoding",
        )
    return (
        "padding changes the outputs of the tokens: they attend to it, or it takes part in a norm or a convolution",
        MASK_FIX,
    )


@check("padding of the source changes nothing", "tokens", "source")
def check_cross_padding(exam: Examination) -> Finding | None:
    """Pad the source of an encoder-decoder: the outputs of the target must not change."""
    subject = exam.subject
    assert subject.source is not None
    source = subject.source[:1].expand(exam.ids.shape[0], -1).contiguous()
    plain = exam.run(exam.ids, source=source)
    if not exam.is_off(exam.run(exam.ids, source=subject.other_tokens(source)), plain):
        return fail(
            {"difference_with_another_source": 0.0},
            "the outputs do not depend on the source at all: every source gets the same translation",
            "give what the encoder returns to cross-attention as keys and values, and add its result to the stream",
        )
    padded, mask = pad(source, 0, PAD, subject.pad_id)
    distance = exam.is_off(exam.run(exam.ids, source=padded, source_mask=mask), plain)
    if not distance:
        return None
    records = exam.record(exam.ids, source=padded, source_mask=mask).attentions
    length, real = padded.shape[1], source.shape[1]
    shares = {"encoder": 0.0, "cross": 0.0}
    for record in records:
        if record.weights.shape[-1] == length:
            place = "encoder" if record.weights.shape[-2] == length else "cross"
            rows = record.weights[:, :real] if place == "encoder" else record.weights
            shares[place] = max(shares[place], float(rows[..., real:].nan_to_num().max()))
    evidence = {"max_difference": distance, "largest_weight_on_source_padding": shares["cross"]}
    if shares["encoder"] > 1e-6 and shares["cross"] <= 1e-6:
        return fail(
            {"max_difference": distance, "largest_weight_on_source_padding": shares["encoder"]},
            "tokens of the source attend to the padding of the source in the encoder",
            "give the source mask to the self-attention of the encoder",
            check="padding",
        )
    if shares["cross"] <= SEEN:
        return fail(
            {"max_difference": distance},
            "the padding of the source changes the outputs, though no attention of the decoder reads it: the encoder "
            "is a recurrence or a convolution that runs over it, or its states are averaged with those of padding",
            "read the state of the encoder at the last token, states[torch.arange(B), lengths - 1], or pack the rows "
            "by their lengths (nn.utils.rnn.pack_padded_sequence)",
        )
    return fail(
        evidence,
        "the decoder attends to the padding of the source: a translation depends on the longest sentence of its batch",
        "give the source mask to cross-attention in every decoder layer (memory_key_padding_mask in nn.Transformer)",
    )
