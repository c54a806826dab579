"""Checks of what a token may see beside the future: beyond a prefix or a window, other rows, other documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, finding, not_applicable
from monoblock.doctor.report import Finding, Outcome
from monoblock.doctor.subject import difference

Run = Callable[[Tensor], Tensor]


def check_prefix(exam: Examination) -> Finding | None:
    """Change a token after the prefix: nothing before it may change."""
    ids, T = exam.ids, exam.ids.shape[1]
    prefix = torch.zeros_like(ids, dtype=torch.bool)
    prefix[:, : T // 3] = True
    cut = T // 2
    changed = ids.clone()
    changed[:, cut + 1 :] = exam.subject.other_tokens(ids)[:, cut + 1 :]
    new, old = exam.run(changed, prefix=prefix), exam.run(ids, prefix=prefix)
    worst = exam.is_off(new[:, : cut + 1], old[:, : cut + 1])
    if not worst:
        return None
    return finding(
        "prefix",
        "fail",
        {"max_difference": worst, "prefix_length": T // 3, "at_position": cut},
        "tokens see beyond the prefix: a token after the prefix changes outputs before it",
        "let tokens see all of the prefix, and of the rest only what comes before them: (j < prefix) | (j <= i)",
    )


def check_window(exam: Examination) -> Outcome:
    """Count the keys that each layer lets a query see, and compare with the declared window."""
    declared, is_causal = exam.subject.declared, exam.subject.kind != "bidirectional"
    records, T = exam.self_attentions, exam.ids.shape[1]
    windows = declared.windows if declared.windows is not None else (declared.window,) * len(records)
    if not records or exam.subject.kind == "encoder-decoder" or len(records) != len(windows):
        return not_applicable("window", f"{len(records)} attentions were seen where {len(windows)} are declared")
    for layer, (record, window) in enumerate(zip(records, windows, strict=True)):
        expected = T if window is None else min(T, window if is_causal else 2 * window - 1)
        seen = int(record.visible.sum(-1).max())
        if seen != expected:
            return _window_finding(window or T, seen if is_causal else (seen + 1) // 2, f"layer {layer}")
    return None


def _window_finding(window: int, seen: int, where: str) -> Finding:
    return finding(
        "window",
        "fail",
        {"window": window, "keys_seen": seen, "where": where},
        f"the window is {window}, but a query sees {seen} keys (itself included)"
        + ("; off by one" if abs(seen - window) == 1 else ""),
        f"allow the keys with 0 <= i - j < {window}: with {window} in place of {window + 1} or {window - 1} at the "
        "edge",
    )


def check_batch(exam: Examination) -> Finding | None:
    """Run the first and the last row alone and with other neighbours: they must not change."""
    ids, source = exam.ids, exam.subject.source

    def run(rows: Tensor) -> Tensor:
        return exam.run(rows) if source is None else exam.run(rows, source=source[:1].expand(len(rows), -1))

    output, neighbours, alone = run(ids), 0.0, 0.0
    for row in (0, len(ids) - 1):
        others = exam.subject.other_tokens(ids) if exam.subject.reads_tokens else -ids
        others[row] = ids[row]
        expected = output[row : row + 1]
        neighbours = max(neighbours, exam.is_off(run(others)[row : row + 1], expected))
        alone = max(alone, exam.is_off(run(ids[row : row + 1]), expected))
    if not neighbours and not alone:
        module = exam.subject.module
        modules = [] if module is None or not exam.subject.reads_tokens else module.modules()
        norms = [m for m in modules if getattr(m, "running_mean", None) is not None]
        if not norms:
            return None
        return finding(
            "batch",
            "warn",
            {"batch_norms": len(norms)},
            "a batch norm averages over rows and positions while it trains, also over padding and later tokens, and "
            "uses other numbers in evaluation",
            "write self.norm = nn.LayerNorm(width), which normalizes each token by itself: x = self.norm(x)",
        )
    return _batch_finding(
        exam, run, output, {"difference_with_other_neighbours": neighbours, "difference_alone": alone}
    )


def _batch_finding(exam: Examination, run: Run, output: Tensor, evidence: dict[str, float]) -> Finding:
    """Name the cause: something kept between calls, a layer that expects the time first, the place in the batch."""
    ids = exam.ids
    run(exam.subject.other_tokens(ids) if exam.subject.reads_tokens else -ids)
    if again := exam.is_off(run(ids), output):
        return finding(
            "batch",
            "fail",
            {**evidence, "difference_after_other_calls": again},
            "the same ids give another output after other calls: the model keeps something from one call to the next, "
            "such as a state or a cache in self",
            "begin every call anew; take the state as an argument and return it: logits, state = model(ids, state)",
        )
    if name := _layer_with_time_first(exam):
        return finding(
            "batch",
            "fail",
            evidence,
            f"the output of a row depends on the other rows of its batch: {name} takes the batch for the sequence, "
            "because it expects (T, B, width)",
            f"build it with batch_first=True, or transpose before and after {name}",
        )
    if not evidence["difference_with_other_neighbours"]:
        return finding(
            "batch",
            "fail",
            evidence,
            "the output of a row depends on its place in the batch or on the number of rows, though not on what the "
            "other rows are: position vectors are added along the batch axis, or something is divided by the rows",
            "give the table of positions the shape (1, T, width) where the input is (B, T, width), and (T, 1, width) "
            "where it is (T, B, width)",
        )
    return finding(
        "batch",
        "fail",
        evidence,
        "the output of a row depends on the other rows of its batch: a norm takes statistics over the batch, a "
        "reshape mixes rows, attention takes the batch for the sequence, or experts with a capacity drop tokens",
        "normalize over the features only: x.mean(-1, keepdim=True), nn.LayerNorm(width); transpose before view, and "
        "keep the batch axis first (layers of PyTorch with attention need batch_first=True)",
    )


def _layer_with_time_first(exam: Examination) -> str | None:
    """Return the first layer of PyTorch that is given the batch where it expects the sequence."""
    module, found, rows = exam.subject.module, list[str](), exam.ids.shape[0]
    if module is None:
        return None

    def watch(name: str) -> Any:
        def hook(part: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape[:2] == (rows, exam.ids.shape[1]):
                found.append(name)

        return hook

    layers = [(n, m) for n, m in module.named_modules() if getattr(m, "batch_first", None) is False]
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    try:
        exam.run(exam.ids)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def check_packing(exam: Examination) -> Finding | None:
    """Pack two documents in a row: each must give what it gives alone."""
    ids, T = exam.ids, exam.ids.shape[1]
    cut = T // 2
    documents = torch.zeros_like(ids)
    documents[:, cut:] = 1
    packed = exam.run(ids, documents=documents)
    first = exam.is_off(packed[:, :cut], exam.run(ids[:, :cut]))
    second = exam.is_off(packed[:, cut:], exam.run(ids[:, cut:]))
    if not first and not second:
        return None
    changed = ids.clone()
    changed[:, :cut] = exam.subject.other_tokens(ids)[:, :cut]
    leak = difference(exam.run(changed, documents=documents)[:, cut:], packed[:, cut:])
    leaks = leak > exam.subject.tolerance or first
    return finding(
        "packing",
        "fail",
        {"first_document": first, "second_document": second, "leak_between_documents": leak},
        "a packed document sees its neighbour"
        if leaks
        else "a packed document sees no other, but its positions do not start again at 0",
        "mask pairs of different documents: document[i] == document[j]; count positions from the start of each "
        "document",
    )
