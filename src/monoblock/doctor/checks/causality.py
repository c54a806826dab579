"""The check of causality: nothing up to a place may depend on later tokens; the recorded weights tell the cause."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.records import AttentionRecord
from monoblock.doctor.report import Finding

SEEN = 1e-7  # weights on later keys below this are rounding: exp(-16)
CONSEQUENCE = "In training the model can copy the answer; in generation there is nothing to copy"
HIDDEN = "torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)"  # true for the keys after each query
MASK_FIX = (
    f"hide the keys after each query in every layer, before the softmax: scores = scores.masked_fill({HIDDEN}, "
    "float('-inf'))"
)
MODULE_FIX = f"hide the keys after each query in every layer: self.attention(x, x, x, attn_mask={HIDDEN})"
FUSED_FIX = (
    "hide the keys after each query in every layer: F.scaled_dot_product_attention(q, k, v, is_causal=True), or "
    f"attn_mask=~{HIDDEN}"
)


def check_causality(exam: Examination) -> Finding | None:
    """Change the tokens after a place, in short texts and in a long one: nothing up to that place may change."""
    ids = exam.ids
    worst, place = find_leak(exam, ids)
    if not worst and (leak := _gradient_leak(exam)):
        # In evaluation nn.TransformerEncoder takes another path, which reads a mask of floats as one of booleans.
        records = exam.self_attentions
        leaking, cause, fix = [record for record in records if bool(_later(record).any())], "", MASK_FIX
        if leaking:
            cause, fix = _mask_cause(leaking[0], "", mask_fix(exam, records))
        return finding(
            "causality",
            "fail",
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
    return finding(
        "causality",
        "fail",
        {"max_difference": worst, "at_position": place, "tokens_ahead": reach, "length": T},
        f"a token sees {ahead} (counted over all layers): {cause}. {CONSEQUENCE}{unless}",
        fix,
    )


def _check_length(exam: Examination) -> Finding | None:
    """Cut the end of a text off: its first tokens give what they gave before."""
    T, cut = exam.ids.shape[1], exam.ids.shape[1] // 2 + 1
    try:
        short = exam.states(exam.ids[:, :cut])
    except Exception:  # a model may read texts of one length only
        return None
    distance = exam.is_off(short, exam.states(exam.ids)[:, :cut])
    if not distance:
        return None
    return finding(
        "causality",
        "fail",
        {"max_difference": distance, "length": T, "shorter_length": cut},
        "the output at a token depends on how many tokens follow it, though not on which: positions are counted from "
        "the end, something is divided by the length of the text, or heads are split without a transpose, by "
        ".view(B, heads, T, -1). In generation the length is another one at each step",
        "count positions from the start, torch.arange(T); divide by the number of tokens up to each place; split heads "
        "by .view(B, T, heads, -1).transpose(1, 2)",
    )


def find_leak(exam: Examination, ids: Tensor) -> tuple[float, int]:
    """Change the tokens after one place in each row; return the largest change up to it, and the place."""
    T = ids.shape[1]
    cuts = (T // 2, T - 2, 0)[: len(ids)]
    changed, others = ids.clone(), exam.subject.other_tokens(ids)
    for row, cut in enumerate(cuts):
        changed[row, cut + 1 :] = others[row, cut + 1 :]
    new, old = exam.states(changed), exam.states(ids)
    found = [(exam.is_off(new[row, : cut + 1], old[row, : cut + 1]), cut) for row, cut in enumerate(cuts)]
    return max(found, key=lambda pair: pair[0])


def _reach_ahead(exam: Examination, ids: Tensor, place: int) -> int:
    """Return how many positions before a token, which is changed, the first changed output lies."""
    ids = ids[:1]
    changed = ids.clone()
    changed[:, place] = exam.subject.other_tokens(ids)[:, place]
    new, old = exam.states(changed), exam.states(ids)
    moved = [i for i in range(place) if exam.is_off(new[:, i], old[:, i])]
    return place - min(moved) if moved else 1


# -- causes ---------------------------------------------------------------------------------------------------------


def _cause(exam: Examination, ids: Tensor, reaches: list[int]) -> tuple[str, str]:
    """Tell a missing, shifted, partial or weak mask from a path outside attention by the weights on later keys.

    reaches: how far ahead outputs see a token, for tokens at several places.
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
        if reach < T - 2 and reach <= 2 * min(reaches):  # as far from every place
            what = "a convolution or a shift reads later tokens"
            fix = "pad convolutions on the left only: F.pad(x, (kernel - 1, 0)); shift to the right only"
        elif reach < T - 2:
            what = (
                "a reshape without a transpose mixes heads and positions, or tokens are chosen from the whole text (as "
                "by experts that choose their tokens), since some places see further than others"
            )
            fix = (
                "split heads by .view(B, T, heads, -1).transpose(1, 2), and merge them by .transpose(1, 2)"
                ".reshape(B, T, width); let each token choose its experts, router(x).topk(k, dim=-1)"
            )
        else:
            what = "a norm or a mean over the sequence, or a reshape without a transpose that mixes heads and positions"
            fix = (
                "normalize over the features only, x.mean(-1, keepdim=True); merge heads by "
                ".transpose(1, 2).reshape(B, T, width)"
            )
        return f"the mask of attention is right, but information crosses positions outside attention: {what}", fix
    where = "" if len(leaking) == len(records) else f" in layer {leaking[0]}"
    return _mask_cause(records[leaking[0]], where, fix)


def mask_fix(exam: Examination, records: list[AttentionRecord]) -> str:
    """Return the line that applies a causal mask, in the words of the model."""
    modules = [] if exam.subject.module is None else exam.subject.module.modules()
    if any(isinstance(module, nn.MultiheadAttention) for module in modules):
        return MODULE_FIX
    return FUSED_FIX if any(record.is_fused for record in records) else MASK_FIX


def _cause_without_attention(exam: Examination, *, is_all: bool) -> tuple[str, str]:
    """Name the layer of PyTorch that reads later tokens; is_all: all of them."""
    module = exam.subject.module
    parts = [] if module is None else list(module.named_modules())
    for name, part in parts:
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
        what = "no causal mask is applied, or a norm, a sum or a recurrence runs over the whole text"
    else:
        what = "a mask that is off by one, or a convolution"
    fix = "; pad convolutions on the left only; take sums up to each place, x.cumsum(1)"
    return f"{what} (no attention was recorded that could tell)", MASK_FIX + fix


def _later(record: AttentionRecord) -> Tensor:
    """Return which weights on later keys are not 0, (T, S), of any row and head."""
    used = record.used_weights
    weights = used if used is not None and used.shape == record.weights.shape else record.weights
    return (weights.float().nan_to_num() > SEEN).any(0).triu(1)


def _mask_cause(record: AttentionRecord, where: str, fix: str) -> tuple[str, str]:
    later, T = _later(record), record.weights.shape[-1]
    distance = (torch.arange(T)[None, :] - torch.arange(T)[:, None]).to(later.device)
    if not bool((record.weights.float().nan_to_num() > SEEN).any(0).tril(-1).any()):
        return (
            f"the mask is inverted{where}: query i sees the keys after it and none before it",
            fix,
        )
    farthest = int(distance[later].max())
    if farthest <= 2 < T - 1:
        return (
            f"the mask is off by {'one' if farthest == 1 else 'two'}{where}: query i also sees key i + {farthest}",
            fix,
        )
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
    slope, offset = _line(products[:, ~later], scores[:, ~later])
    added = scores - slope * products - offset
    constant = float(added[:, later].mean())
    is_constant = float((added[:, later] - constant).abs().max()) < 1e-3 * max(1.0, abs(constant))
    is_added = is_constant and abs(constant) > 0.1 and float(added[:, ~later].abs().max()) < 1e-3
    return constant if is_added else None, is_added


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return slope and offset of the line through points: the factor on scores, and a number added to all of them."""
    centered = x - x.mean()
    slope = float((centered * y).sum() / centered.square().sum().clamp(min=1e-30))
    return slope, float(y.mean()) - slope * float(x.mean())


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
            if not captured or not output.requires_grad or not exam.is_per_token:
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
