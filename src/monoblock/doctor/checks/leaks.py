"""Checks of what a token may see: the future, beyond a prefix, beyond a window, other rows, other documents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.report import Finding
from monoblock.doctor.subject import difference


def check_causality(exam: Examination) -> Finding | None:
    """Change the tokens after a place: nothing up to that place may change."""
    ids, T = exam.ids, exam.ids.shape[1]
    worst, place = 0.0, 0
    cuts = (T // 2, T - 2, 0)[: len(ids)]  # one for each row
    changed = ids.clone()
    for row, cut in enumerate(cuts):
        changed[row, cut + 1 :] = exam.subject.other_tokens(ids)[row, cut + 1 :]
    output = exam.run(changed)
    for row, cut in enumerate(cuts):
        distance = exam.is_off(output[row, : cut + 1], exam.output[row, : cut + 1])
        if distance > worst:
            worst, place = distance, cut
    leak = 0.0 if worst else _gradient_leak(exam)
    if not worst and not leak:
        return None
    if not worst:
        return finding(
            "causality",
            "fail",
            {"gradient_from_the_future": leak},
            "the output at a token has a gradient with respect to later tokens, so training uses the future",
            "apply the causal mask in every layer, before the softmax",
        )
    reach = _reach_ahead(exam)
    presumed = getattr(exam.subject, "kind_is_presumed", False)
    words = (
        "every token sees all later tokens: no causal mask is applied, or not in every layer"
        if reach >= T - 2
        else f"a token sees up to {reach} tokens ahead, all layers together: a mask that is off by one, or a "
        "convolution or shift that reads the next token"
    )
    unless = "; if the model is meant to read in both directions, pass kind='bidirectional'" if presumed else ""
    return finding(
        "causality",
        "fail",
        {"max_difference": worst, "at_position": place, "tokens_ahead": reach},
        f"{words}; training becomes copying, and generation, where the future does not exist yet, fails{unless}",
        "allow a query at position i the keys j <= i in every layer: scores.masked_fill(j > i, -inf) before the "
        "softmax; pad convolutions on the left only",
    )


def _reach_ahead(exam: Examination) -> int:
    """Return how many positions before a changed token the first changed output lies."""
    ids = exam.ids[:1]
    changed = ids.clone()
    changed[:, -1] = exam.subject.other_tokens(ids)[:, -1]
    new, old = exam.run(changed), exam.run(ids)
    moved = [i for i in range(ids.shape[1] - 1) if exam.is_off(new[:, i], old[:, i])]
    return ids.shape[1] - 1 - min(moved) if moved else 1


def _gradient_leak(exam: Examination) -> float:
    """Return the size of the gradient from a later token, relative to that from the token itself."""
    module = exam.subject.module
    tables = [] if module is None else [m for m in module.modules() if isinstance(m, nn.Embedding)]
    captured: list[Tensor] = []

    def hook(table: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if output.dim() == 3 and output.shape[1] == exam.ids.shape[1] and torch.equal(inputs[0], exam.ids[:1]):
            captured.append(output.detach().requires_grad_())
            return captured[-1]
        return None

    handles = [table.register_forward_hook(hook) for table in tables]
    try:
        with exam.subject.evaluating(), torch.enable_grad():
            output = exam.subject.logits(exam.ids[:1])
            if not captured or not output.requires_grad:
                return 0.0
            place = exam.ids.shape[1] // 2
            weights = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype)
            total = (output[:, place] * weights).sum()
            gradients = torch.autograd.grad(total, captured, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # no gradient: the output may be computed without one
        return 0.0
    finally:
        for handle in handles:
            handle.remove()
    leak = 0.0
    for gradient in gradients:
        if gradient is not None and bool(gradient.isfinite().all()):
            own = float(gradient[:, : place + 1].abs().max())
            leak = max(leak, float(gradient[:, place + 1 :].abs().max()) / max(own, 1e-30))
    return leak if leak > exam.subject.tolerance else 0.0


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


def check_window(exam: Examination) -> Finding | None:
    """Count the keys that each layer lets a query see, and compare with the declared window."""
    declared, is_causal = exam.subject.declared, exam.subject.kind != "bidirectional"
    records, T = exam.self_attentions, exam.ids.shape[1]
    windows = declared.windows if declared.windows is not None else (declared.window,) * len(records)
    if exam.subject.kind == "encoder-decoder" or len(records) != len(windows):
        return None
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
    """Run a row alone and with other neighbours: it must not change."""
    ids = exam.ids
    others = ids.clone()
    others[1:] = exam.subject.other_tokens(ids[1:]) if exam.subject.reads_tokens else -ids[1:]
    neighbours = exam.is_off(exam.run(others)[:1], exam.output[:1])
    alone = exam.is_off(exam.run(ids[:1]), exam.output[:1])
    if not neighbours and not alone:
        module = exam.subject.module
        norms = [] if module is None or not exam.subject.reads_tokens else list(module.modules())
        if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms):
            return None
        return finding(
            "batch",
            "warn",
            {"batch_norms": sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms)},
            "a batch norm averages over rows and positions while it trains, also over padding and later tokens, and "
            "uses other numbers in evaluation",
            "use nn.LayerNorm or nn.RMSNorm, which normalize each token by itself",
        )
    return finding(
        "batch",
        "fail",
        {"difference_with_other_neighbours": neighbours, "difference_alone": alone},
        "the output of a row depends on the other rows of its batch: a norm takes statistics over the batch, or a "
        "reshape mixes rows",
        "normalize over the features only: x.mean(-1, keepdim=True), nn.LayerNorm(width); transpose before view, and "
        "keep the batch axis first",
    )


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
