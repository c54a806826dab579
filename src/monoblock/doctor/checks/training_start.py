"""Checks of a batch, a loss, an optimizer and a training step, before a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.report import Finding

IGNORED = -100
OVERFIT_STEPS = 40


def default_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over labels that are not -100."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def _loss(exam: Examination) -> Any:
    return exam.handed.loss or exam.subject.own_loss or default_loss


def _batch(exam: Examination) -> tuple[Tensor, Tensor]:
    assert exam.handed.batch is not None
    ids, labels = exam.handed.batch
    return ids.to(exam.subject.device), labels.to(exam.subject.device)


# -- labels ---------------------------------------------------------------------------------------------------------


def check_label_shift(exam: Examination) -> Finding | None:
    """Find by how many places labels are ahead of ids, and how many more the loss moves them."""
    ids, labels = _batch(exam)
    if exam.subject.kind not in ("causal", "encoder-decoder") or labels.shape != ids.shape:
        return None
    ahead = _best_shift(lambda k: _agreement(ids, labels, k), lowest=0.9)
    inside = _shift_inside_loss(exam)
    if ahead is None or inside is None:
        return None
    total = ahead + inside
    if total == 1:
        return None
    evidence: dict[str, Any] = {
        "labels_ahead_of_ids": ahead,
        "moved_by_the_loss": inside,
        "total": total,
        "expected": 1,
    }
    if total == 0:
        reason = "labels are not shifted: the model learns to copy the token it reads, and its loss falls to 0"
    elif total < 0:
        reason = "labels are shifted the wrong way: the model learns to predict the token before the one it reads"
    else:
        reason = (
            f"labels are shifted {'twice' if total == 2 else f'{total} times'}: the model learns to predict the token "
        )
        reason += f"{total} places ahead"
    fix = (
        "shift once: inputs = tokens[:, :-1], labels = tokens[:, 1:], and no shift in the loss; with transformers pass "
    )
    fix += "labels = ids, because the model shifts them itself"
    return finding("label_shift", "fail", evidence, reason, fix)


def _agreement(ids: Tensor, labels: Tensor, k: int) -> float:
    if k < 0:
        ids, labels, k = ids[:, :k], labels[:, -k:], 0
    length = ids.shape[1] - k
    kept = labels[:, :length] != IGNORED
    if not bool(kept.any()):
        return 0.0
    return float((ids[:, k:] == labels[:, :length])[kept].float().mean())


def _best_shift(score: Any, lowest: float) -> int | None:
    scores = {k: score(k) for k in (0, 1, 2, 3, -1)}
    best = max(scores, key=lambda k: scores[k])
    return best if scores[best] >= lowest else None


def _shift_inside_loss(exam: Examination) -> int | None:
    """Find the shift of the loss: logits that name the labels k places ahead give the lowest loss."""
    if exam.handed.loss is None and exam.subject.own_loss is None:
        return 1 if type(exam.subject).__name__ == "TransformersSubject" and exam.subject.kind == "causal" else 0
    outputs = exam.output.shape[-1]
    length = 29 if exam.handed.loss is not None else exam.ids.shape[1]  # a loss inside the model reads what it reads
    labels = torch.randint(0, outputs, (2, length), generator=torch.Generator().manual_seed(0)).to(exam.subject.device)

    def negative_loss(k: int) -> float:
        target = labels.roll(-k, dims=1)
        logits = 10.0 * F.one_hot(target, outputs).float()
        return -float(_loss(exam)(logits, labels))

    try:
        return _best_shift(negative_loss, lowest=-1.0)  # the right shift gives nearly 0, the others about 10
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        exam.notes.append(f"the loss could not be called as loss(logits, labels): {error!s:.80}")
        return None


def check_pad_in_loss(exam: Examination) -> Finding | None:
    """Change the logits at padding, then add more padding: the loss must not change."""
    ids, labels = _batch(exam)
    if labels.shape != ids.shape or labels.is_floating_point():
        return None
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(*ids.shape, exam.output.shape[-1], generator=generator).to(exam.subject.device)
    try:
        return _check_logits_at_padding(exam, logits) or _check_more_padding(exam, logits)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        exam.notes.append(f"the loss could not be called as loss(logits, labels): {error!s:.80}")
        return None


def _check_logits_at_padding(exam: Examination, logits: Tensor) -> Finding | None:
    (ids, labels), pad_id = _batch(exam), exam.subject.pad_id
    padding = (ids == (-1 if pad_id is None else pad_id)) & (labels != IGNORED)
    padding[:, 0] = False
    if not bool(padding.any()):
        return None
    changed, others = logits.clone(), logits.roll(1, dims=-1)
    changed[padding] = 3 * others[padding]
    before, after = (float(_loss(exam)(t, labels)) for t in (logits, changed))
    if math.isclose(before, after, rel_tol=1e-6):
        return None
    share = float(padding.sum()) / float((labels != IGNORED).sum())
    return finding(
        "pad_in_loss",
        "fail",
        {"padding_share_of_the_loss": share, "loss": before, "loss_with_other_logits_at_padding": after},
        f"padding takes part in the loss: {share:.0%} of the tokens it averages are padding, which is easy to predict",
        f"set the labels of padding to -100, or write cross_entropy(…, ignore_index={pad_id})",
    )


def _check_more_padding(exam: Examination, logits: Tensor) -> Finding | None:
    """Double the length by padding: a mean over tokens stays the same, a mean over all places does not."""
    labels, pad_id = _batch(exam)[1], exam.subject.pad_id
    fill = IGNORED if bool((labels == IGNORED).any()) else pad_id
    if fill is None or not bool((labels == fill).any()):
        return None
    longer = torch.cat((labels, torch.full_like(labels, fill)), 1)
    before = float(_loss(exam)(logits, labels))
    after = float(_loss(exam)(torch.cat((logits, logits), 1), longer))
    if math.isclose(before, after, rel_tol=1e-5):
        return None
    return finding(
        "pad_in_loss",
        "fail",
        {"loss": before, "loss_with_twice_the_length_in_padding": after},
        "the loss is divided by a number that counts the padding: the more padding a batch has, the smaller its loss "
        "and its gradient",
        "divide by the number of tokens: cross_entropy(…, reduction='sum') / (labels != ignore_index).sum()",
    )


# -- losses ---------------------------------------------------------------------------------------------------------


def check_initial_loss(exam: Examination) -> Finding | None:
    """Compare the first loss with that of a guess without knowledge."""
    history = exam.handed.history
    if history is not None and history.steps and history.starts_fresh and history.uniform_loss:
        first, uniform = float(history.steps[0]["loss"]), history.uniform_loss
        if int(history.steps[0].get("step", 1)) > 5:
            return None
        if first < 0.5 * uniform:
            return _initial(
                first, uniform, "much lower than a guess: the model sees the answer, or the labels are trivial"
            )
    elif exam.handed.batch is not None:
        ids, labels = _batch(exam)
        output = exam.run(ids)
        uniform = math.log(output.shape[-1])
        if labels.is_floating_point():
            return None
        try:
            first = float(_loss(exam)(output, labels))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
    else:
        return None
    if first <= 1.3 * uniform + 0.7:  # a fresh GPT-2 starts at ln V + 0.1
        return None
    tokens = 0 if exam.handed.batch is None else int((exam.handed.batch[1] != IGNORED).sum())
    if tokens > 4 and abs(first / tokens - uniform) < 0.3 * uniform:
        return finding(
            "initial_loss",
            "fail",
            {"loss": first, "uniform_guess": uniform, "tokens": tokens, "loss_of_a_token": first / tokens},
            f"the loss is a sum over {tokens} tokens, not their mean: it and its gradient grow with the batch",
            "write F.cross_entropy(…, reduction='mean'), or divide by the number of tokens that are not padding",
        )
    return _initial(
        first, uniform, "much higher than a guess: the logits are too large at the start, or the labels wrong"
    )


def _initial(first: float, uniform: float, reason: str) -> Finding:
    return finding(
        "initial_loss",
        "fail",
        {"loss": first, "uniform_guess": uniform},
        f"the loss at the start is {first:.2f}, {reason}",
        "initialize embeddings and the output with a standard deviation of about 0.02, and check what labels are",
    )


@contextmanager
def restoring(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Put the weights, the buffers and the state of the optimizer back after an experiment."""
    saved = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(saved[name])
                p.grad = None
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)


def check_overfit(exam: Examination) -> Finding | None:
    """Train a few steps on one batch: its loss must fall."""
    module = exam.subject.module
    assert module is not None
    ids, labels = _batch(exam)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters or labels.is_floating_point():
        return None
    losses: list[float] = []
    with restoring(module), exam.subject.evaluating(), torch.enable_grad():
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
        for _ in range(OVERFIT_STEPS):
            loss = _loss(exam)(exam.subject.logits(ids), labels)
            if not loss.requires_grad:
                return None  # gradient_flow says so
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    exam.pictures["loss on one batch"] = losses
    first, best, frequencies = losses[0], min(losses[-5:]), _entropy(labels)
    if best < max(0.85 * min(first, frequencies), 0.1):
        return None
    cause, fix = "", "check that logits and labels belong together, that no layer is frozen or detached, and that "
    fix += "inputs reach the output"
    if _are_probabilities(exam.output):
        cause = ". Its outputs are probabilities, of which the loss takes the softmax again"
        fix = "return logits, without the softmax: F.cross_entropy applies it"
    return finding(
        "overfit",
        "fail",
        {"loss_before": first, "loss_after": best, "steps": OVERFIT_STEPS, "loss_of_label_frequencies": frequencies},
        f"the model cannot learn a single batch: after {OVERFIT_STEPS} steps its loss is still {best:.2f}, not much "
        f"better than the frequencies of the labels without any input ({frequencies:.2f}){cause}",
        fix,
    )


def _are_probabilities(output: Tensor) -> bool:
    sums = output.float().sum(-1)
    return output.shape[-1] > 1 and bool((output >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())


def _entropy(labels: Tensor) -> float:
    """Return the cross-entropy of a guess by the frequencies of the labels."""
    counts = torch.unique(labels[labels != IGNORED], return_counts=True)[1].double()
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum())
