"""Checks of positions: used at all, used once, and counted from the right number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monoblock.doctor.examination import Examination, check, fail, warn
from monoblock.doctor.recorder import AttentionRecord, PositionAdd
from monoblock.doctor.report import Finding, NotChecked, Outcome
from monoblock.doctor.subject import difference

SAME = 0.99  # cosine from which two position vectors are the same up to a factor


@check("positions are used", "tokens", explains="cache")
def check_positions(exam: Examination) -> Outcome:
    """Repeat one token: if no query, key or score differs between positions, they are not used."""
    if exam.subject.declared.positions == "none" and exam.subject.kind != "bidirectional":
        # Chosen: with a causal mask two layers tell positions apart.
        return NotChecked("the configuration says that the model has no positions")
    ids = exam.ids[:2].clone()
    ids[:] = ids[:, :1]
    source = None if exam.subject.source is None else exam.subject.source[:2].clone()
    records = exam.record(ids, **({} if source is None else {"source": source})).attentions
    length = ids.shape[1]
    records = [r for r in records if r.weights.shape[-2:] == (length, length)]
    if not records:
        return _check_swap(exam)
    if not all(_is_blind(record) for record in records):
        return None
    if exam.recorded.same_adds:
        return fail(
            {"layers_without_positions": len(records), "tokens_repeated": length},
            "all tokens get the same position: one vector is added to all of them, so a repeated token has the same "
            "queries, keys and scores everywhere, and only the mask tells the order of words",
            "give each token its own position: x = token(ids) + position(torch.arange(T))",
            "all tokens get the same position",
            explains=("causality",),
        )
    return fail(
        {"layers_without_positions": len(records), "tokens_repeated": length},
        "the model does not use positions: a repeated token has the same queries, keys and scores everywhere, and "
        "only the mask tells the order of words",
        "add position vectors to the embeddings (x = token(ids) + position(torch.arange(T))), or rotate queries and "
        "keys",
    )


def _is_blind(record: AttentionRecord) -> bool:
    allowed = record.weights > 0
    if not bool(allowed.any()):
        return False
    for rows in (record.query.float(), record.key.float()):
        if float((rows - rows[:, :1]).abs().max()) > 1e-5 * float(rows.abs().max()) + 1e-12:
            return False
    scores = record.scores.float()
    highest = scores.masked_fill(~allowed, -math.inf).flatten(1).max(1).values
    lowest = scores.masked_fill(~allowed, math.inf).flatten(1).min(1).values
    size = float(scores[allowed].abs().max()) + 1e-3
    return float((highest - lowest).max()) <= 1e-5 * size


def _check_swap(exam: Examination) -> Finding | None:
    """Swap two tokens, near the end and far from it: without positions, the output of the last stays the same."""

    def change(ids: Tensor) -> float:
        """Return the difference that other ids make to the output of the last token, or of the text."""
        new, old = exam.run(ids), exam.output
        return difference(new[:, -1], old[:, -1]) if exam.is_per_token else difference(new, old)

    swapped, limit = list[float](), exam.subject.tolerance
    for first, second in ((-2, -3), (1, 4)):  # a recurrence may forget the second pair
        ids = exam.ids.clone()
        ids[:, [first, second]] = ids[:, [second, first]]
        swapped.append(change(ids))
    if max(swapped) > limit:
        return None
    ids = (exam.ids + exam.subject.vocab // 2) % exam.subject.vocab
    everywhere = change(ids)
    ids[:, -1] = exam.ids[:, -1]
    elsewhere = change(ids)
    evidence = {
        "difference_after_a_swap": max(swapped),
        "difference_with_other_earlier_tokens": elsewhere,
        "difference_with_other_tokens": everywhere,
    }
    if everywhere <= limit:
        reason = "the output is the same for all tokens: the ids do not reach it"
        fix = "follow the ids through the forward pass: the output must be computed from their embeddings"
    elif exam.is_per_token and elsewhere <= limit:
        reason = "the output at a position depends on the token there only: the model reads neither other tokens nor "
        reason += "positions"
        fix = "add attention, which reads the other tokens, and position vectors; check that its output is used"
    else:
        reason = "two tokens can be swapped without any change: the model does not use positions"
        fix = "add position vectors to the embeddings, or rotate queries and keys by their position"
    return fail(evidence, reason, fix)


@check("positions are added or rotated once", "tokens", explains="cache")
def check_positions_twice(exam: Examination) -> Outcome:
    """Look for the same position vectors added twice to one stream, and for queries and keys rotated twice."""
    recorder = exam.recorded
    for index, first in enumerate(recorder.position_adds):
        again = [a for a in recorder.position_adds[index + 1 :] if first.number in a.before and _is_same(first, a)]
        if again:
            return _added_again(first, again)
    rotations = max((record.rotations for record in recorder.attentions), default=0)
    if not recorder.position_adds and not rotations:
        return NotChecked("no positions are added to vectors, and no queries rotated")
    if rotations > 1:
        return fail(
            {"rotations": rotations},
            "queries or keys are rotated twice by their position, so that a distance of 1 looks like 2",
            "apply the rotary embedding once, to queries and keys, after their projection",
        )
    if rotations and any(record.value_rotations for record in recorder.attentions):
        return warn(
            {"rotations_of_values": max(record.value_rotations for record in recorder.attentions)},
            "the values are rotated by their position too: what a token hands on then depends on where it stands in "
            "the text, not only on the distance",
            "rotate queries and keys only",
        )
    return None


def _added_again(first: PositionAdd, again: list[PositionAdd]) -> Finding:
    """Report position vectors that are added to a stream which holds them already."""
    times, norms = 1 + len(again), (float(first.vectors.norm()), float(again[0].vectors.norm()))
    evidence = {"times": times, "norm_of_the_first": norms[0], "norm_of_the_second": norms[1]}
    if again[0].attentions == first.attentions:
        reason = "the same position vectors are added twice to the embeddings, so positions drown the tokens"
        fix = "add them in one place only: in the embedding, or in the model, not in both"
        return fail(evidence, reason, fix)
    later = [added.attentions for added in again]
    return fail(
        {**evidence, "attentions_before": ", ".join(str(number) for number in (first.attentions, *later))},
        f"the same position vectors are added {times} times, again between the layers: the residual stream keeps the "
        "first ones, so positions grow with depth and drown the tokens",
        "add them once, to the embeddings, and not inside the blocks: x = token(ids) + position(torch.arange(T))",
    )


def _is_same(first: PositionAdd, second: PositionAdd) -> bool:
    if first.vectors.shape != second.vectors.shape:
        return False
    cosine = torch.cosine_similarity(first.vectors.flatten(), second.vectors.flatten(), dim=0)
    return float(cosine) > SAME


@check("the first position is the right one", "tokens")
def check_position_offset(exam: Examination) -> Outcome:
    """Compare the first row of the position table that is used with the row it should be."""
    declared, length = exam.subject.declared, exam.ids.shape[1]
    is_plain, is_seen = type(exam.subject).__name__ == "PlainSubject", False
    for lookup in exam.recorded.lookups:
        row = lookup.positions(length)
        if row is None or lookup.rows < length:
            continue
        if not bool((row.diff() == 1).all()):
            if is_plain and 1 < (different := len(row.unique())) < length:
                return warn(
                    {"different_positions": different, "tokens": length},
                    f"positions repeat: {length} tokens without padding get {different} different rows of the table",
                    "give each token its own position: torch.arange(T)",
                )
            continue
        is_seen = True
        first, expected = int(row[0]), declared.table_offset
        if expected is None:  # there may be a few spare rows, before the first position or at the end
            spare = lookup.rows - declared.context if declared.context is not None else 0
            expected = first if first == spare <= 3 else 0
        if first != expected:
            return _offset_finding({"first_row": first, "expected": expected, "rows": lookup.rows})
    if declared.table_offset is None and is_plain:
        for added in exam.recorded.position_adds:
            start = _sinusoid_start(added.vectors)
            is_seen = is_seen or start is not None
            if start is not None and start > 0.5:
                return _offset_finding({"first_position": start, "expected": 0})
    if is_seen:
        return None
    is_added = bool(exam.recorded.position_adds)
    return NotChecked(
        "the added positions are neither rows of a table nor sinusoids" if is_added else "no table of positions is read"
    )


def _offset_finding(evidence: dict[str, float | int | str]) -> Finding:
    first, expected = evidence.get("first_row", evidence.get("first_position")), evidence["expected"]
    return fail(
        evidence,
        f"the first token has position {first} instead of {expected}: a text of full length runs past the table, and "
        "trained weights are read at the wrong rows",
        "count positions from 0: torch.arange(T), and mask.cumsum(1) - 1 with padding",
    )


def _sinusoid_start(vectors: Tensor) -> float | None:
    """Return the position of the first of these vectors if they are sinusoids (Vaswani et al. 2017), else None."""
    vectors = vectors.double()
    dim = vectors.shape[1]
    squares = vectors.square().sum(1)
    if dim % 2 or float((squares / squares[0] - 1).abs().max()) > 1e-3:
        return None
    size = math.sqrt(float(squares[0]) / (dim / 2))
    for sine, cosine in ((0, 1), (0, dim // 2)):
        angles = torch.atan2(vectors[:, sine], vectors[:, cosine])
        steps = torch.remainder(angles.diff(), 2 * math.pi)
        radii = (vectors[:, sine].square() + vectors[:, cosine].square()).sqrt()
        if float((steps - 1).abs().max()) < 1e-2 and float((radii - size).abs().max()) < 1e-2 * size:
            return float(torch.remainder(angles[0], 2 * math.pi)) if float(angles[0]) > 1e-3 else 0.0
    return None
