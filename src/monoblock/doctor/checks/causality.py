"""Checks of what a token may see: nothing later, nothing beyond a window or a prefix, no other row or document."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, check, fail, warn
from monoblock.doctor.recorder import AttentionRecord
from monoblock.doctor.report import Finding, NotChecked, Outcome
from monoblock.doctor.subject import difference, hooks

Run = Callable[[Tensor], Tensor]


SEEN = 1e-7  # weights on later keys below this are rounding: exp(-16)
HIDDEN = "torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)"  # true for the keys after each query
MASK_FIX = (
    f"hide the keys after each query in every layer, before the softmax: scores = scores.masked_fill({HIDDEN}, "
    "float('-inf'))"
)
KEEPS_STATE = "the model keeps something from one call to the next, such as a state or a cache in self"
STATE_FIX = (
    "start every call with an empty state; take the state as an argument and return it: logits, state = model(ids, "
    "state)"
)
MODULE_FIX = f"hide the keys after each query in every layer: self.attention(x, x, x, attn_mask={HIDDEN})"
FUSED_FIX = (
    "hide the keys after each query in every layer: F.scaled_dot_product_attention(q, k, v, is_causal=True), or "
    f"attn_mask=~{HIDDEN}"
)


# -- rows --------------------------------------------------------------------------------------------------------------


@check("a row does not depend on its neighbours", explains="causality padding packing cache cross_padding positions")
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
        modules = exam.named_modules if exam.subject.reads_tokens else []
        norms = [part for _, part in modules if getattr(part, "running_mean", None) is not None]
        if not norms:
            return None
        return warn(
            {"batch_norms": len(norms)},
            "a batch norm averages over rows and positions while it trains, also over padding and later tokens, and "
            "uses other numbers in evaluation",
            "write self.norm = nn.LayerNorm(width), which normalizes each token by itself: x = self.norm(x)",
        )
    return _batch_finding(
        exam, run, output, {"difference_with_other_neighbours": neighbours, "difference_alone": alone}
    )


def _batch_finding(exam: Examination, run: Run, output: Tensor, evidence: dict[str, float]) -> Finding:
    """Name the cause: state kept between calls, a layer that expects time first, the position in the batch."""
    ids = exam.ids
    run(exam.subject.other_tokens(ids) if exam.subject.reads_tokens else -ids)
    if again := exam.is_off(run(ids), output):
        return fail(
            {**evidence, "difference_after_other_calls": again},
            f"the same ids give another output after other calls: {KEEPS_STATE}",
            STATE_FIX,
        )
    if name := _layer_with_time_first(exam):
        return fail(
            evidence,
            f"the output of a row depends on the other rows of its batch: {name} takes the batch for the sequence, "
            "because it expects (T, B, width)",
            f"build it with batch_first=True, or transpose before and after {name}",
        )
    if not evidence["difference_with_other_neighbours"]:
        return fail(
            evidence,
            "the output of a row depends on its place in the batch or on the number of rows, though not on what the "
            "other rows are: position vectors are added along the batch axis, or something is divided by the rows",
            "give the table of positions the shape (1, T, width) where the input is (B, T, width), and (T, 1, width) "
            "where it is (T, B, width)",
        )
    return fail(
        evidence,
        "the output of a row depends on the other rows of its batch: a norm takes statistics over the batch, a "
        "reshape mixes rows, attention takes the batch for the sequence, or experts with a capacity drop tokens",
        "normalize over the features only: x.mean(-1, keepdim=True), nn.LayerNorm(width); transpose before view, and "
        "keep the batch axis first (layers of PyTorch with attention need batch_first=True)",
    )


def _layer_with_time_first(exam: Examination) -> str | None:
    """Return the first layer of PyTorch that is given the batch where it expects the sequence."""
    found, shape = list[str](), exam.ids.shape[:2]

    def watch(name: str) -> Any:
        def hook(part: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape[:2] == shape:
                found.append(name)

        return hook

    layers = [(name, part) for name, part in exam.named_modules if getattr(part, "batch_first", None) is False]
    with hooks([layer.register_forward_pre_hook(watch(name)) for name, layer in layers]):
        exam.run(exam.ids)
    return found[0] if found else None


# -- later tokens ------------------------------------------------------------------------------------------------------


@check("no output depends on later tokens", "tokens", "causal", explains="cache padding packing window prefix")
def check_causality(exam: Examination) -> Finding | None:
    """Change the tokens after a position, in short texts and in a long one: nothing up to it may change."""
    ids = exam.ids
    worst, place = find_leak(exam, ids)
    if not worst and (leak := _gradient_leak(exam)):
        # In evaluation nn.TransformerEncoder takes another path, which reads a mask of floats as one of booleans.
        records = exam.self_attentions
        leaking, cause, fix = [record for record in records if bool(_later(record).any())], "", MASK_FIX
        if leaking:
            cause, fix = _mask_cause(leaking[0], "", mask_fix(exam, records))
        return fail(
            {"gradient_from_the_future": leak},
            "the output at a token has a gradient with respect to later tokens, so training uses the future"
            + (f": {cause}" if cause else ""),
            fix,
        )
    if not worst and exam.long_ids is not None:
        ids = exam.long_ids
        worst, place = find_leak(exam, ids)
    if not worst:
        return _check_length(exam)
    T = ids.shape[1]
    reaches = [_reach_ahead(exam, ids, place) for place in (T - 1, 3 * T // 4, T // 2)]
    reach = max(reaches)
    ahead = "all later tokens" if reach >= T - 2 else f"{reach} token{'s' if reach > 1 else ''} ahead"
    cause, fix = _cause(exam, ids, reaches)
    if ids is not exam.ids:
        cause += f"; texts of {exam.ids.shape[1]} tokens are right, texts of {T} are not"
    presumed = getattr(exam.subject, "kind_is_presumed", False)
    unless = ". If the model is meant to read in both directions, pass kind='bidirectional'" if presumed else ""
    return fail(
        {"max_difference": worst, "at_position": place, "tokens_ahead": reach, "length": T},
        f"a token sees {ahead} (counted over all layers): {cause}. In training the model can copy the answer; in "
        f"generation there is nothing to copy{unless}",
        fix,
    )


def _check_length(exam: Examination) -> Finding | None:
    """Truncating a text must not change the outputs of its first tokens."""
    T, cut = exam.ids.shape[1], exam.ids.shape[1] // 2 + 1
    try:
        short = exam.states(exam.ids[:, :cut])
    except Exception:  # a model may read texts of one length only
        return None
    distance = exam.is_off(short, exam.states(exam.ids)[:, :cut])
    if not distance:
        return None
    return fail(
        {"max_difference": distance, "length": T, "shorter_length": cut},
        "the output at a token depends on how many tokens follow it, though not on which: positions are counted from "
        "the end, something is divided by the length of the text, or heads are split without a transpose, by "
        ".view(B, heads, T, -1). In generation the length is another one at each step",
        "count positions from the start, torch.arange(T); divide by the number of tokens up to each one; split heads "
        "by .view(B, T, heads, -1).transpose(1, 2)",
    )


def find_leak(exam: Examination, ids: Tensor) -> tuple[float, int]:
    """Change the tokens after one position in each row; return the largest change up to it, and the position."""
    T = ids.shape[1]
    cuts = (T // 2, T - 2, 0)[: len(ids)]
    changed, others = ids.clone(), exam.subject.other_tokens(ids)
    for row, cut in enumerate(cuts):
        changed[row, cut + 1 :] = others[row, cut + 1 :]
    new, old = exam.states(changed), exam.states(ids)
    found = [(exam.is_off(new[row, : cut + 1], old[row, : cut + 1]), cut) for row, cut in enumerate(cuts)]
    return max(found, key=lambda pair: pair[0])


def _reach_ahead(exam: Examination, ids: Tensor, place: int) -> int:
    """Return how many positions before a changed token the first changed output lies."""
    ids = ids[:1]
    changed = ids.clone()
    changed[:, place] = exam.subject.other_tokens(ids)[:, place]
    new, old = exam.states(changed), exam.states(ids)
    moved = [i for i in range(place) if exam.is_off(new[:, i], old[:, i])]
    return place - min(moved) if moved else 1


# -- causes ---------------------------------------------------------------------------------------------------------


def _cause(exam: Examination, ids: Tensor, reaches: list[int]) -> tuple[str, str]:
    """Tell a missing, shifted, partial or weak mask from a path outside attention by the weights on later keys.

    reaches: how far ahead outputs see a token, for several tokens.
    """
    T, source, reach = ids.shape[1], exam.subject.source, max(reaches)
    records = exam.record(ids[:2].clone()).attentions if source is None or source.shape[1] != T else []
    records = [record for record in records if record.weights.shape[-2:] == (T, T)]
    fix = mask_fix(exam, records)
    leaking = [layer for layer, record in enumerate(records) if bool(_later(record).any())]
    if not records:
        return _cause_without_attention(exam, is_all=reach >= T - 2)
    if not leaking:
        if (found := _heads_not_transposed(exam)) is not None:
            return found
        if reach < T - 2 and reach <= 2 * min(reaches):  # as far from every position
            reason = "a convolution or a shift reads later tokens"
            fix = "pad convolutions on the left only: F.pad(x, (kernel - 1, 0)); shift to the right only"
        elif reach < T - 2:
            reason = (
                "a reshape without a transpose mixes heads and positions, or tokens are chosen from the whole text (as "
                "by experts that choose their tokens), since some tokens see further than others"
            )
            fix = (
                "split heads by .view(B, T, heads, -1).transpose(1, 2), and merge them by .transpose(1, 2)"
                ".reshape(B, T, width); let each token choose its experts, router(x).topk(k, dim=-1)"
            )
        else:
            reason = (
                "a norm or a mean over the sequence, or a reshape without a transpose that mixes heads and positions"
            )
            fix = (
                "normalize over the features only, x.mean(-1, keepdim=True); merge heads by "
                ".transpose(1, 2).reshape(B, T, width)"
            )
        return f"the mask of attention is right, but information crosses positions outside attention: {reason}", fix
    where = "" if len(leaking) == len(records) else f" in layer {leaking[0]}"
    return _mask_cause(records[leaking[0]], where, fix)


def mask_fix(exam: Examination, records: list[AttentionRecord]) -> str:
    """Return the line that applies a causal mask, in the style of the model's code."""
    if any(isinstance(part, nn.MultiheadAttention) for _, part in exam.named_modules):
        return MODULE_FIX
    return FUSED_FIX if any(record.is_fused for record in records) else MASK_FIX


def _cause_without_attention(exam: Examination, *, is_all: bool) -> tuple[str, str]:
    """Name the layer of PyTorch that reads later tokens; is_all: all of them."""
    for name, part in exam.named_modules:
        if isinstance(part, nn.RNNBase) and part.bidirectional and is_all:
            return (
                f"{name} is bidirectional: it reads the text from its end, too",
                f"build it with bidirectional=False: nn.{type(part).__name__}(…, batch_first=True)",
            )
        if isinstance(part, nn.Conv1d) and part.padding != (0,) and part.padding != "valid" and not is_all:
            return (
                f"the convolution {name} pads both ends (padding={part.padding!r}), so its kernel reaches later tokens",
                "pad on the left only: F.pad(x, ((kernel - 1) * dilation, 0)) before nn.Conv1d(…, padding=0)",
            )
    if is_all:
        reason = "no causal mask is applied, or a norm, a sum or a recurrence runs over the whole text"
    else:
        reason = "a mask that is off by one, or a convolution"
    fix = "; pad convolutions on the left only; take sums up to each token, x.cumsum(1)"
    return f"{reason} (no attention was recorded that could tell)", MASK_FIX + fix


def _later(record: AttentionRecord) -> Tensor:
    """Return which weights on later keys are not 0, (T, S), of any row and head."""
    return (record.final_weights.float().nan_to_num() > SEEN).any(0).triu(1)


def _mask_cause(record: AttentionRecord, where: str, fix: str) -> tuple[str, str]:
    later, T = _later(record), record.weights.shape[-1]
    distance = (torch.arange(T)[None, :] - torch.arange(T)[:, None]).to(later.device)
    if not bool((record.weights.float().nan_to_num() > SEEN).any(0).tril(-1).any()):
        return f"the mask is inverted{where}: query i sees the keys after it and none before it", fix
    farthest = int(distance[later].max())
    if farthest <= 2 < T - 1:
        number = "one" if farthest == 1 else "two"
        return f"the mask is off by {number}{where}: query i also sees key i + {farthest}", fix
    value, is_added = _value_of_mask(record, distance > 0)
    if value is not None and value > 0 and is_added:
        return (
            f"the mask{where} is of floats, which are added to the scores ({value:+.3g}): later keys gain by it",
            "pass a boolean mask, mask.bool(), or floats of 0 and -inf; " + fix,
        )
    if value is not None:
        return (
            f"the mask is too weak{where}: it sets or lowers masked scores by the finite value {value:.3g}, which "
            "leaves later keys a weight above 0",
            "use float('-inf') in place of it, and do not multiply scores by the mask; " + fix,
        )
    queries = later.any(1)[:-1]
    first = int(queries.int().argmax())
    if first and bool(queries[first:].all()):
        return (
            f"the mask covers only the first {first} queries{where}, and later ones see what follows them",
            "build the mask for the length of the text, torch.ones(T, T).tril(), not for a fixed size",
        )
    if float(later.sum()) < 0.9 * T * (T - 1) / 2:
        return f"the mask hides only a part of the later keys{where}", fix
    if record.is_mask_lost:
        return f"no causal mask is applied{where}: masked_fill is called, but what it returns is not used", fix
    return f"no causal mask is applied{where}", fix


def _value_of_mask(record: AttentionRecord, later: Tensor) -> tuple[float | None, bool]:
    """Return the constant that later scores were set to, or that was added to them, and which; None if none."""
    scores = record.scores.float()
    if record.query.shape[0] != scores.shape[0] or record.key.shape[0] != scores.shape[0]:
        return None, False
    if float(scores[:, later].std()) < 1e-6:
        return float(scores[:, later].mean()), False
    if record.scale is None:
        return None, False
    products = record.query.float() @ record.key.float().mT
    # The line through the other scores has the factor on them as its slope, and a number added to all as its offset.
    x, y = products[:, ~later], scores[:, ~later]
    slope = float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum().clamp(min=1e-30))
    added = scores - slope * products - (float(y.mean()) - slope * float(x.mean()))
    constant = float(added[:, later].mean())
    is_constant = float((added[:, later] - constant).abs().max()) < 1e-3 * max(1.0, abs(constant))
    is_added = is_constant and abs(constant) > 0.1 and float(added[:, ~later].abs().max()) < 1e-3
    return constant if is_added else None, is_added


def _heads_not_transposed(exam: Examination) -> tuple[str, str] | None:
    """Look at the first attention: each token moves a slice of every head, and heads lie side by side in what is read.

    Without a transpose, a head is made of a few whole tokens, and a token of pieces of several tokens.
    """
    ids, recorder = exam.ids[:2], exam.recorded
    first = recorder.attentions[0]
    if len(first.query) % 2 or first.value is None or first.used_weights is None:
        return None
    changed = ids.clone()
    changed[:, 1] = exam.subject.other_tokens(ids)[:, 1]
    moved = (exam.record(changed).attentions[0].query - first.query).abs().amax((1, 2)) > 0  # of each row and head
    if not bool(moved.all()):
        return (
            "heads are split without a transpose: a reshape without a transpose makes each head of a few whole tokens, "
            "not of a slice of every token",
            "split heads by q = q.view(B, T, heads, -1).transpose(1, 2), and k and v in the same way",
        )
    out = (first.used_weights.float() @ first.value.float()).unflatten(0, (2, -1))[:, 0]  # (B, T, K)
    for given in (p.given.float() for p in recorder.products if first.term in p.reads):
        parts = given.reshape(2, -1, *out.shape[1:]) if given.numel() % out.numel() == 0 else given[None, :0]
        if parts.shape[1] > 1 and any(torch.allclose(part, out, atol=1e-6) for part in parts.unbind(1)):
            return (
                "heads are merged without a transpose: a reshape without a transpose makes a token of pieces of "
                "several tokens",
                "merge heads by y = y.transpose(1, 2).reshape(B, T, width)",
            )
    return None


def _gradient_leak(exam: Examination) -> float:
    """Return the size of the gradient from a later token, relative to that from the token itself."""
    tables = [part for _, part in exam.named_modules if isinstance(part, nn.Embedding)]
    captured: list[Tensor] = []

    def hook(table: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if output.dim() == 3 and output.shape[1] == exam.ids.shape[1] and torch.equal(inputs[0], exam.ids[:1]):
            captured.append(output.detach().requires_grad_())
            return captured[-1]
        return None

    gradients: tuple[Tensor | None, ...] = ()
    place = exam.ids.shape[1] // 2
    handles = [table.register_forward_hook(hook) for table in tables]
    with hooks(handles), exam.subject.evaluating(), torch.enable_grad(), suppress(RuntimeError, NotImplementedError):
        output = exam.subject.logits(exam.ids[:1])
        if not captured or not output.requires_grad or not exam.is_per_token:
            return 0.0
        weights = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype)
        gradients = torch.autograd.grad((output[:, place] * weights).sum(), captured, allow_unused=True)
    leak = 0.0
    for gradient in gradients:  # none if the output is computed without one
        if gradient is not None and bool(gradient.isfinite().all()):
            own = float(gradient[:, : place + 1].abs().max())
            leak = max(leak, float(gradient[:, place + 1 :].abs().max()) / max(own, 1e-30))
    return leak if leak > exam.subject.tolerance else 0.0


# -- windows, prefixes and documents -----------------------------------------------------------------------------------


@check("each layer sees as many keys as its window says", "tokens", "window", explains="cache")
def check_window(exam: Examination) -> Outcome:
    """Count the keys that each layer lets a query see, and compare with the declared window."""
    declared, is_causal = exam.subject.declared, exam.subject.kind != "bidirectional"
    records, T = exam.self_attentions, exam.ids.shape[1]
    windows = declared.windows if declared.windows is not None else (declared.window,) * len(records)
    if not records or exam.subject.kind == "encoder-decoder" or len(records) != len(windows):
        return NotChecked(f"{len(records)} attentions were seen where {len(windows)} are declared")
    for layer, (record, window) in enumerate(zip(records, windows, strict=True)):
        expected = T if window is None else min(T, window if is_causal else 2 * window - 1)
        seen = int(record.visible.sum(-1).max())
        if seen != expected:
            size, seen = window or T, seen if is_causal else (seen + 1) // 2
            return fail(
                {"window": size, "keys_seen": seen, "where": f"layer {layer}"},
                f"the window is {size}, but a query sees {seen} keys (itself included)"
                + ("; off by one" if abs(seen - size) == 1 else ""),
                f"allow the keys with 0 <= i - j < {size}, not {size + 1} or {size - 1}",
            )
    return None


@check("no output depends on tokens after it and after the prefix", "tokens", "per_token", "prefix")
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
    return fail(
        {"max_difference": worst, "prefix_length": T // 3, "at_position": cut},
        "tokens see beyond the prefix: a token after the prefix changes outputs before it",
        "let tokens see all of the prefix, and of the rest only what comes before them: (j < prefix) | (j <= i)",
    )


@check("packed documents do not see each other", "tokens", "per_token", "documents")
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
    return fail(
        {"first_document": first, "second_document": second, "leak_between_documents": leak},
        "a packed document sees its neighbour"
        if leaks
        else "a packed document sees no other, but its positions do not start again at 0",
        "mask pairs of different documents: document[i] == document[j]; count positions from the start of each "
        "document",
    )
