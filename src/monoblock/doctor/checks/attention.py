"""Checks of the steps inside attention: scale, mask, softmax, heads."""

from __future__ import annotations

import math
from itertools import combinations

import torch

from monoblock.doctor.checks.causality import find_leak
from monoblock.doctor.examination import Examination, check, fail, finding, warn
from monoblock.doctor.recorder import AttentionRecord
from monoblock.doctor.report import Finding

AXIS_FIX = "take the softmax over the keys: weights = scores.softmax(dim=-1)"
HALF = (torch.float16, torch.bfloat16)


@check("scores are divided by sqrt(head size), or as configured", "attention", explains="collapse")
def check_scale(exam: Examination) -> Finding | None:
    """Compare the factor between q·k and the scores with the configuration, or with 1 / sqrt(head size)."""
    declared = exam.subject.declared.scales
    for layer, record in enumerate(exam.recorded.attentions):
        if record.scale is None or record.size < 2 or (declared is None and _is_cosine(record)):
            continue
        expected = record.size**-0.5
        known = (*(declared or ()), expected)
        if any(math.isclose(record.scale, value, rel_tol=0.02) for value in known):
            continue
        ratio, divisor = record.scale / expected, _name_divisor(exam, record)
        if declared is None and divisor is None and 0.2 < ratio < 1.4:
            continue  # a constant of the author's, with which a model trains
        if type(exam.subject).__name__ == "TransformersSubject" and record.scale < 0.99:
            continue  # a factor of its own that the configuration does not state
        fault = "are not divided by sqrt(head size)" if ratio > 1 else "are divided by sqrt(head size) more than once"
        if math.isclose(record.scale, record.size**0.5, rel_tol=0.02):
            fault = "are multiplied by sqrt(head size) instead of divided by it"
        if divisor is not None:
            fault = f"are divided by {divisor}"
        return finding(
            "fail" if ratio > 1 else "warn",
            {"factor": record.scale, "expected": expected, "head_size": record.size, "layer": layer},
            f"the scores {fault}: "
            + (
                "they grow with the head size, the softmax saturates, and its gradient vanishes"
                if ratio > 1
                else "attention is nearer to uniform, and learns more slowly"
            ),
            "leave q and k as they are: F.scaled_dot_product_attention(q, k, v) divides by math.sqrt(q.size(-1))"
            if record.is_fused
            else "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
        )
    return None


def _name_divisor(exam: Examination, record: AttentionRecord) -> str | None:
    """Return which size the scores are divided by instead of sqrt(head size); None if it is unknown."""
    if not record.scale:
        return None
    heads = record.query.shape[0] // 2  # the recorded pass has two rows
    widths = {heads * record.size} | {width for _, width in exam.recorded.token_tables}
    widths, divisor = {width for width in widths if width > record.size}, 1 / record.scale
    twice = ", or by its square root twice: scaled_dot_product_attention divides by it, too" if record.is_fused else ""
    known = {
        "sqrt(width) instead of sqrt(head size)": [width**0.5 for width in widths],
        f"the head size, {record.size}, without the square root{twice}": [record.size],
        "the width, without the square root, instead of sqrt(head size)": widths,
    }
    names = [name for name, sizes in known.items() if any(math.isclose(divisor, x, rel_tol=0.02) for x in sizes)]
    return " or ".join(names) or None


def _is_cosine(record: AttentionRecord) -> bool:
    """Return whether a score is a cosine times a temperature: all queries and all keys are equally long, some 1."""
    lengths = [t.float().norm(dim=-1) for t in (record.query, record.key)]
    are_equal = all(float(length.max() - length.min()) < 1e-2 * float(length.max()) for length in lengths)
    return are_equal and any(abs(float(length.mean()) - 1) < 1e-2 for length in lengths)


@check(
    "weights that reach the values sum to 1",
    "tokens",
    "attention",
    explains="causality padding cache cross_padding window batch packing",
)
def check_mask_after_softmax(exam: Examination) -> Finding | None:
    """Add up the weights that the values are multiplied by.

    They do not sum to 1 if the mask is applied after the softmax, or if the softmax is taken over another axis.
    """
    for layer, record in enumerate(exam.recorded.attentions):
        used = record.used_weights
        if record.is_fused or used is None or used.shape != record.weights.shape:
            continue
        sums = used.float().sum(-1)
        if bool(((sums - 1).abs() <= 1e-2).all()):
            continue
        evidence = {"smallest_row_sum": float(sums.nan_to_num().min()), "expected": 1.0, "layer": layer}
        if torch.equal(used, record.weights.mT):
            return fail(
                evidence,
                "the weights are transposed before they meet the values: query i takes from key j what query j should "
                "take from key i, so weights do not sum to 1, and a mask of the future shows only the future",
                "multiply them as they are: y = weights @ v, without a transpose",
                "weights are transposed",
            )
        if record.softmax_axis != -1:
            return _axis_finding(exam, record, {**evidence, "largest_row_sum": float(sums.nan_to_num().max())})
        # Weights that were 0 before were masked before the softmax as well: then the sums are right.
        dropped = (record.weights > 0) & (used == 0)
        if not bool(dropped.any()) and bool(sums.isfinite().all()):
            continue
        return fail(
            evidence,
            "the mask is applied after the softmax: masked keys still count in the denominator, so weights do not sum "
            "to 1 and the future leaks in through it",
            "mask the scores, then take the softmax: scores.masked_fill(~mask, -inf).softmax(-1)",
        )
    return None


def _axis_finding(exam: Examination, record: AttentionRecord, evidence: dict[str, float]) -> Finding:
    """Report a softmax over another axis than the keys, and whether it lets a token see later ones."""
    leak, axis = find_leak(exam, exam.ids)[0] if exam.is_causal else 0.0, record.softmax_axis
    others, evidence = softmax_over(record), {**evidence, "axis": axis}
    reason = (
        f"the softmax is taken over the wrong axis, {axis}: {others} instead of keys (-1). The weights of a query do "
        f"not sum to 1, and {others} share the weight of a key"
    )
    if leak:
        evidence["change_by_later_tokens"] = leak
        how = "later queries share it too" if axis == -2 else "a masked key gets as much weight as all others there"
        reason += f". The future leaks in, even if the mask of the scores is right: {how}"
    return fail(evidence, reason, AXIS_FIX, f"the softmax is taken over the {others}")


def softmax_over(record: AttentionRecord) -> str:
    """Return what the axis of a softmax over scores (B, H, T, S) or (B, T, S) stands for."""
    names = ("keys", "queries", *(("heads",) if record.scores_dim > 3 else ()), "rows of the batch")
    return names[min(-record.softmax_axis, len(names)) - 1]


@check(
    "the softmax is computed in 32 bits", "attention", explains="cache padding causality packing batch cross_padding"
)
def check_softmax_precision(exam: Examination) -> Finding | None:
    """Look at the dtype of the scores that the softmax is given."""
    for layer, record in enumerate(exam.recorded.attentions):
        if record.is_fused or record.dtype not in HALF:
            continue
        largest = float(record.scores[record.weights > 0].abs().max()) if bool((record.weights > 0).any()) else 0.0
        fp16 = record.dtype == torch.float16
        return finding(
            "fail" if fp16 else "warn",
            {"dtype": str(record.dtype).removeprefix("torch."), "largest_score": largest, "layer": layer},
            "the softmax of attention is computed in 16 bits: "
            + ("scores above 65,504 overflow to inf" if fp16 else "weights have three digits")
            + ", and small weights are lost",
            "compute it in 32 bits: scores.float().softmax(-1).to(q.dtype), or use scaled_dot_product_attention",
        )
    return None


@check("every head computes something of its own", "attention", group="training")
def check_heads(exam: Examination) -> Finding | None:
    """Look for heads that compute the same as another, and for heads that compute nothing."""
    for layer, record in enumerate(exam.recorded.attentions):
        used, value = record.used_weights, record.value
        if value is None or used is None or record.query.shape[0] % 2 or used.shape[-1] != value.shape[-2]:
            continue
        out = used.float() @ value.float()  # of a pass over two rows
        q, k, out = (t.float().unflatten(0, (2, -1)) for t in (record.query, record.key, out))  # (B, H, T, *)
        count, size = q.shape[1], out.square().sum((0, 2, 3)).sqrt()
        if count < 2:
            continue
        fix = (
            "initialize each head with its own random numbers, and check that slices of the projections do not "
            "overlap; heads that stay useless can be pruned"
        )
        if dead := [h for h in range(count) if float(size[h]) <= 1e-6 * float(size.max())]:
            evidence = {"dead_heads": len(dead), "heads": count, "layer": layer}
            return warn(evidence, f"heads {dead} of layer {layer} add nothing: their output is zero", fix)
        for a, b in combinations(range(count), 2):
            if all(float((t[:, a] - t[:, b]).norm()) <= 1e-4 * float(t[:, b].norm()) for t in (q, k, out)):
                return warn(
                    {"duplicate_heads": 2, "heads": count, "layer": layer},
                    f"heads {[a, b]} of layer {layer} have equal queries, keys and values, so one of them is wasted",
                    fix,
                )
    return None


@check("attention does not collapse to single keys", "attention", group="training")
def check_collapse(exam: Examination) -> Finding | None:
    """Look for layers in which every query of every head attends to a single key."""
    for layer, record in enumerate(exam.recorded.attentions):
        weights = record.weights.float()
        visible = record.visible.sum(-1)
        rows = weights[:, weights.shape[-2] // 2 :]  # queries that have many keys to choose from
        if int(visible.max()) < 4 or not bool(rows.isfinite().all()):
            continue
        entropy = -(rows * rows.clamp(min=1e-30).log()).sum(-1)
        share = float(entropy.mean()) / math.log(int(visible.max()))
        if share < 0.01:  # uniform attention has 1; trained heads on random text have between 0.1 and 0.9
            return warn(
                {
                    "entropy_share": share,
                    "largest_score": float(record.scores[record.weights > 0].max()),
                    "layer": layer,
                },
                f"attention of layer {layer} has collapsed: every query puts all its weight on one key, where the "
                "softmax has no gradient",
                "lower the learning rate, normalize queries and keys (qk_norm), and check the scale of the scores",
            )
    return None
