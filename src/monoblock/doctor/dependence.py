"""Pictures of what outputs depend on: each token is changed in turn, and the change of every output is measured.

This needs nothing but a function of ids, so that it shows a leak in any model; attention weights that were recorded are
drawn beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from monoblock.doctor.examination import Examination, pad
from monoblock.doctor.report import Finding, Panel, Panels, Report

PLACES, PLACES_OF_LARGE = 32, 12  # of a long text that are drawn
PAD = 3
Run = Callable[[Tensor], Tensor]


def draw_dependence(exam: Examination, report: Report) -> dict[str, Panels]:
    """Return a picture for each finding of structure that one can show, and for a model without any, one of it."""
    drawn: dict[str, Panels] = {}
    if not exam.subject.reads_tokens or not exam.has_states:
        return drawn
    for finding in (*report.findings, *report.unsupported):
        if (draw := PICTURES.get(finding.check)) is not None:
            picture = replace(draw(exam, finding), check=finding.check)
            drawn[f"{finding.check}: {picture.caption}"] = picture
    if not drawn:
        picture = _draw_tokens(exam, None)
        drawn[picture.caption] = picture
    return drawn


def measure(run: Run, ids: Tensor, others: Tensor, places: Sequence[int]) -> Tensor:
    """Change the token at each place in turn; return the change of the outputs, in standard deviations, (T, places)."""
    rows = ids[:1].expand(len(places), -1).clone()
    for row, place in enumerate(places):
        rows[row, place] = others[0, place]
    return _change(run(rows), run(ids[:1])).T.cpu()


def _change(new: Tensor, old: Tensor) -> Tensor:
    """Return the largest change of each output (B, T, *), in standard deviations of the old ones, (B, T)."""
    new, old = new.detach().float(), old.detach().float()
    spread = max(float(old.std()), 0.1 * float(old.abs().max()), 1e-6)
    return ((new - old).abs().flatten(2).amax(-1) / spread).nan_to_num(nan=1.0, posinf=1.0)


def expected_dependence(exam: Examination, length: int) -> Tensor:
    """Return which tokens an output may depend on, through all layers together, (T, T)."""
    declared, is_causal = exam.subject.declared, exam.subject.kind in ("causal", "encoder-decoder")
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    windows = declared.windows
    if windows is None and declared.window is not None:
        windows = (declared.window,) * len(exam.self_attentions)
    reach = length if not windows or None in windows else sum(w - 1 for w in windows if w is not None)
    return ((distance >= 0) if is_causal else torch.ones_like(distance, dtype=torch.bool)) & (distance.abs() <= reach)


# -- the pictures -----------------------------------------------------------------------------------------------------


def _draw_tokens(exam: Examination, finding: Finding | None) -> Panels:
    """Draw which tokens each output depends on; in the long text if the fault shows in that one only."""
    ids = exam.ids
    if finding is not None and exam.long_ids is not None and finding.evidence.get("length") == exam.long_ids.shape[1]:
        ids = exam.long_ids
    length, most = ids.shape[1], PLACES_OF_LARGE if exam.subject.is_large else PLACES
    places = sorted({round(i * (length - 1) / (most - 1)) for i in range(most)}) if length > most else range(length)
    index = torch.tensor(places)
    change = measure(exam.states, ids, exam.subject.other_tokens(ids), places)[index]
    names = _numbers(places)
    panels = _panels(exam, change, expected_dependence(exam, length)[index][:, index], names, names)
    if ids is exam.ids and exam.self_attentions:
        panels += (_attention_panel(exam, names),)
    return Panels("which tokens the output at each position depends on", panels)


def _attention_panel(exam: Examination, names: tuple[str, ...]) -> Panel:
    """Draw the attention of the first layer that sees later keys, or of the first one at all."""
    subject, length = exam.subject, exam.ids.shape[1]
    largest = [
        record.final_weights.detach().float().nan_to_num().amax(0).clamp(0, 1).cpu() for record in exam.self_attentions
    ]
    leaking = [layer for layer, weights in enumerate(largest) if bool(weights.triu(1).any())]
    layer = leaking[0] if leaking and subject.kind != "bidirectional" else 0
    windows = subject.declared.windows
    window = windows[layer] if windows and layer < len(windows) else subject.declared.window
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    visible = distance >= 0 if subject.kind != "bidirectional" else distance == distance
    visible = visible if window is None else visible & (distance.abs() < window)
    title, values = f"attention, layer {layer}", largest[layer]
    return Panel(title, _rows(values), _rows(visible), names, names, "query", "key")


def _draw_rows(exam: Examination, finding: Finding) -> Panels:
    """Draw which rows of a batch the output of each row depends on."""
    ids, others, columns = exam.ids, exam.subject.other_tokens(exam.ids), []
    for row in range(len(ids)):
        changed = ids.clone()
        changed[row] = others[row]
        columns.append(_change(exam.run(changed)[:, None], exam.run(ids)[:, None])[:, 0].cpu())
    names, allowed = _numbers(range(len(ids))), torch.eye(len(ids), dtype=torch.bool)
    axes = {"row_axis": "output of row", "column_axis": "row that is changed"}
    panels = _panels(exam, torch.stack(columns, 1), allowed, names, names, **axes)
    return Panels("which rows of a batch an output depends on", panels)


def _draw_marked(exam: Examination, finding: Finding) -> Panels:
    """Draw which tokens an output depends on in a row of two packed documents, or after a prefix."""
    length = exam.ids.shape[1]
    places, allowed = torch.arange(length), expected_dependence(exam, length)
    if finding.check == "packing":
        option, value = "documents", (places >= length // 2).long()
        allowed = allowed & (value[:, None] == value[None, :])
        caption = f"which tokens an output depends on, with a new document from position {length // 2} on"
    else:
        option, value = "prefix", places < length // 3
        allowed = allowed | value[None, :]
        caption = f"which tokens an output depends on, with a prefix of {length // 3} tokens"
    value, names = value.to(exam.ids.device), _numbers(range(length))

    def run(ids: Tensor) -> Tensor:
        return exam.run(ids, **{option: value.expand(ids.shape)})

    change = measure(run, exam.ids, exam.subject.other_tokens(exam.ids), range(length))
    return Panels(caption, _panels(exam, change, allowed, names, names))


def _draw_source(exam: Examination, finding: Finding) -> Panels:
    """Draw which tokens of a padded source the outputs of the target depend on."""
    assert exam.subject.source is not None
    padded, mask = pad(exam.subject.source[:1], 0, PAD, exam.subject.pad_id)
    ids, length = exam.ids[:1], padded.shape[1]

    def run(sources: Tensor) -> Tensor:
        rows = len(sources)
        return exam.run(ids.expand(rows, -1), source=sources, source_mask=mask.expand(rows, -1))

    change = measure(run, padded, exam.subject.other_tokens(padded), range(length))
    rows, columns = _numbers(range(ids.shape[1])), (*_numbers(range(length - PAD)), *["pad"] * PAD)
    allowed, axis = mask[0].bool().cpu().expand(len(rows), -1), "position of the source that is changed"
    panels = _panels(exam, change, allowed, rows, columns, column_axis=axis)
    return Panels("which tokens of a source an output depends on", panels)


def _draw_padding(exam: Examination, finding: Finding) -> Panels:
    """Draw which tokens and which padding an output depends on, and what padding changes at each token."""
    ids = exam.ids[:1, : exam.ids.shape[1] - PAD]
    is_left = not finding.evidence.get("difference_right") and bool(finding.evidence.get("difference_left"))
    left, right = (PAD, 0) if is_left else (0, PAD)
    padded, mask = pad(ids, left, right, exam.subject.pad_id)
    real, length = mask[0].bool().cpu(), padded.shape[1]
    columns = tuple(str(i - left) if is_real else "pad" for i, is_real in enumerate(real.tolist()))
    rows = tuple(name for name in columns if name != "pad") if exam.is_per_token else ("text",)

    def run(changed: Tensor) -> Tensor:
        output = exam.run(changed, mask.expand(len(changed), -1))
        return output[:, left : left + ids.shape[1]] if exam.is_per_token else output[:, None]

    change = measure(run, padded, exam.subject.other_tokens(padded), range(length))
    allowed = (expected_dependence(exam, length)[real] & real) if exam.is_per_token else real[None]
    output = run(padded)
    moved = _shades(exam, _change(output, exam.run(ids).view_as(output))[0, :, None].cpu())
    none = torch.zeros(len(rows), 1, dtype=torch.bool)
    bar = Panel("change by padding", _rows(moved), _rows(none), rows, ("",), column_axis="")
    side = "left" if is_left else "right"
    caption = f"what outputs depend on with {PAD} tokens of padding on the {side}, and what the padding changes"
    return Panels(caption, (*_panels(exam, change, allowed, rows, columns), bar))


PICTURES: dict[str, Callable[[Examination, Finding], Panels]] = {
    **dict.fromkeys(("causality", "window", "mask_after_softmax", "positions", "positions_twice"), _draw_tokens),
    **dict.fromkeys(("packing", "prefix"), _draw_marked),
    "cross_padding": _draw_source,
    "batch": _draw_rows,
    "padding": _draw_padding,
}


def _panels(
    exam: Examination, change: Tensor, allowed: Tensor, rows: tuple[str, ...], columns: tuple[str, ...], **axes: str
) -> tuple[Panel, ...]:
    """Return a panel of measured changes, and one of what may change."""
    found = {"measured": _shades(exam, change), "expected": 0.6 * allowed.float()}
    return tuple(Panel(title, _rows(shades), _rows(allowed), rows, columns, **axes) for title, shades in found.items())


def _shades(exam: Examination, change: Tensor) -> Tensor:
    """Return 0 for changes that rounding explains, and otherwise 0.3 to 1 on a logarithmic scale."""
    shares = 1 + 0.15 * (change.clamp(min=1e-12) / max(float(change.max()), 1e-12)).log10()
    return shares.clamp(0.3, 1).where(change > exam.subject.tolerance, 0.0)


def _rows(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())


def _numbers(places: Sequence[int]) -> tuple[str, ...]:
    return tuple(map(str, places))
