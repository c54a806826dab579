"""Checks of labels and losses: what a loss compares is read off its gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from monoblock.doctor.examination import Examination, check, fail, warn
from monoblock.doctor.report import Finding, NotChecked, Outcome
from monoblock.doctor.subject import hooks

OVERFIT_STEPS, MAX_OVERFIT_STEPS = 40, 160  # more than 40 only while the loss falls
SHIFTS = (1, 0, 2, 3, -1)  # positions that labels may be ahead; the right one first, since all fit a repeated token
AGREES = 0.9  # share of equal labels


# -- labels ---------------------------------------------------------------------------------------------------------


@check(
    "labels are the next tokens",
    "tokens",
    "batch_or_step",
    "per_token",
    explains="overfit initial_loss",
    group="training",
)
def check_label_shift(exam: Examination) -> Finding | None:
    """Read off the gradient which label is compared with which logits: it must be the next token of the same row."""
    readings = [read_step(exam)] if exam.subject.kind == "causal" else []
    if exam.options.batch is not None:
        ids, labels = exam.options.batch
        if labels.shape == ids.shape and not labels.is_floating_point():
            readings.insert(0, read_batch(exam))
    found = (
        _check_sign(reading) or _check_shift(exam, reading) or _check_mixing(reading)
        for reading in readings
        if reading is not None
    )
    return next((result for result in found if result is not None), None)


def _check_sign(reading: Reading) -> Finding | None:
    """Look for a training step that lowers the logit of the label and raises all others."""
    if reading.labels is not None:
        return None  # initial_loss looks at the number itself
    gradient = reading.gradient
    lowered = gradient.argmax(-1).masked_fill(gradient.abs().amax(-1) == 0, IGNORED)
    is_single = (gradient > 0).sum(-1)[lowered != IGNORED] == 1
    if gradient.shape[-1] < 3 or not bool(is_single.all()) or _shift(reading.ids, lowered) is None:
        return None
    cause, fix = "the loss has the wrong sign", "write loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())"
    if reading.maximizes:
        cause, fix = "the optimizer is built with maximize=True", "leave it out: AdamW(model.parameters(), lr=3e-4)"
    return fail(
        {"share_of_labels_that_are_pulled_down": 1.0, "maximize": reading.maximizes},
        f"the training step makes the right token less likely, and the cross-entropy rises: {cause}",
        fix,
        "the loss rises",
        explains=("learning_rate",),
        check="initial_loss",
    )


def _check_shift(exam: Examination, reading: Reading) -> Finding | None:
    if exam.subject.kind not in ("causal", "encoder-decoder"):
        return None
    total = _shift(reading.ids, reading.targets)
    if total is None or total == 1:
        return None
    evidence: dict[str, Any] = {"places_ahead": total, "expected": 1}
    ahead = None if reading.labels is None else _shift(reading.ids, reading.labels)
    if ahead is not None:
        evidence |= {"labels_ahead_of_ids": ahead, "moved_by_the_loss": total - ahead}
    if total == 0:
        title = "labels are not shifted"
        reason = f"{title}: the model learns to copy the token it reads, and its loss falls to 0"
    elif total < 0:
        title = "labels are shifted the wrong way"
        reason = f"{title}: the model learns to predict the token before the one it reads"
    else:
        title = f"labels are shifted {'twice' if total == 2 else f'{total} times'}"
        reason = f"{title}: the model learns to predict the token {total} positions ahead"
    fix = (
        "shift once: inputs = tokens[:, :-1], labels = tokens[:, 1:], and no shift in the loss; with transformers pass "
        "labels = ids, because the model shifts them itself"
    )
    return fail(evidence, f"{reason} (seen in {reading.place})", fix, title)


def _shift(ids: Tensor, labels: Tensor) -> int | None:
    """Return how many positions labels are ahead of ids; None if no number fits."""
    shares = {k: _agreement(ids[:, max(k, 0) :], labels[:, max(-k, 0) :]) for k in SHIFTS}
    best = max(shares, key=lambda k: shares[k])
    return best if shares[best] >= AGREES else None


def _agreement(labels: Tensor, read: Tensor) -> float:
    """Return the share of equal labels, where both are given."""
    length = min(labels.shape[-1], read.shape[-1])
    labels, read = labels[..., :length], read[..., :length]
    kept = (read != IGNORED) & (labels != IGNORED)
    return float((labels == read)[kept].float().mean()) if bool(kept.any()) else 0.0


def _check_mixing(reading: Reading) -> Finding | None:
    """Look for labels that are compared with the logits of another row or token."""
    targets, gradient, labels = reading.targets, reading.gradient, reading.labels
    if labels is None:  # those of a language model
        labels = F.pad(reading.ids[:, 1:], (0, 1), value=IGNORED)
    if labels.shape != targets.shape or _shift(labels, targets) is not None:
        return None
    rows, length, outputs = gradient.shape
    causes = {
        "rows of the logits and of the labels are mixed: one of the two is transposed before it is flattened, so that "
        "the logits of a text are compared with labels of other texts": (
            (targets.mT.flatten(), labels.flatten()),
            (targets.flatten(), labels.mT.flatten()),
        ),
        "tokens and classes of the logits are mixed: .view or .reshape in place of .transpose cuts them at the wrong "
        "places, so that logits are compared with labels of other tokens": (
            (read_targets(gradient.reshape(rows, outputs, length).mT), labels),
            (read_targets(gradient.mT.reshape(-1, outputs)), labels.flatten()),
        ),
    }
    cause = next((why for why, pairs in causes.items() if max(_agreement(b, a) for a, b in pairs) >= AGREES), None)
    if cause is None:
        return None
    return fail(
        {"share_of_labels_that_meet_their_own_logits": _agreement(labels, targets)},
        f"{cause} (seen in {reading.place})",
        "flatten both in the same order: F.cross_entropy(logits.flatten(0, 1), labels.flatten()), without a transpose; "
        "or write F.cross_entropy(logits.transpose(1, 2), labels)",
        cause.partition(":")[0],
    )


@check("padding is left out of the loss", "tokens", "batch", group="training")
def check_pad_in_loss(exam: Examination) -> Outcome:
    """Look for a gradient at padding, then add more padding: the loss must not change."""
    ids, labels = exam.batch
    if labels.shape != ids.shape or labels.is_floating_point():
        return None
    pad_id = exam.subject.pad_id
    if pad_id is None and not bool((labels == IGNORED).any()):
        how = "pass pad_id=0, the id of padding"
        return NotChecked("which token is padding is not known", how, "pad_id=0")
    reading = read_batch(exam)
    if reading is None or reading.gradient.shape[:2] != ids.shape or _check_mixing(reading) is not None:
        return None
    return _check_gradient_at_padding(exam, reading) or _check_more_padding(exam)


def _check_gradient_at_padding(exam: Examination, reading: Reading) -> Finding | None:
    pad_id, targets = exam.subject.pad_id, reading.targets
    if pad_id is None:
        return None
    padding = (reading.ids == pad_id) & (targets == pad_id)  # padding before a text has its first token as label
    if not bool(padding.any()):
        return None
    share = float(padding.sum()) / float((targets != IGNORED).sum())
    return fail(
        {"padding_share_of_the_loss": share, "tokens_of_padding": int(padding.sum())},
        f"padding takes part in the loss: {share:.0%} of the tokens it averages are padding, which is easy to predict",
        f"set the labels of padding to -100, or write F.cross_entropy(…, ignore_index={pad_id})",
    )


def _check_more_padding(exam: Examination) -> Finding | None:
    """Replace the second half by padding, and leave it out: a mean over tokens does not change."""
    (ids, labels), pad_id = exam.batch, exam.subject.pad_id
    fill, half = IGNORED if bool((labels == IGNORED).any()) else pad_id, ids.shape[1] // 2
    if fill is None or not bool((labels == fill).any()) or not half:
        return None
    padded, logits = labels.clone(), synthetic_logits(exam, ids)
    padded[:, half:] = fill
    try:
        after = float(loss_function(exam)(logits, padded))
        before = float(loss_function(exam)(logits[:, :half].contiguous(), padded[:, :half].contiguous()))
    except FAILURES as error:
        exam.notes.append(f"the loss of a shorter batch could not be computed: {error!s:.80}")
        return None
    if math.isclose(before, after, rel_tol=1e-4) or not math.isfinite(before):
        return None
    return fail(
        {"loss": before, "loss_with_twice_the_length_in_padding": after},
        "the loss is divided by a number that counts the padding: the more padding a batch has, the smaller its loss "
        "and its gradient",
        "divide by the number of tokens: F.cross_entropy(…, reduction='sum') / (labels != ignore_index).sum()",
    )


# -- losses ---------------------------------------------------------------------------------------------------------


@check("the first loss is that of a guess, ln V", "batch_or_run", explains="overfit", group="training")
def check_initial_loss(exam: Examination) -> Finding | None:
    """Compare the first loss with that of a guess without knowledge."""
    history = exam.options.history
    fix = "initialize embeddings and the output with a standard deviation of about 0.02, and check what labels are"
    if history is not None and history.steps and history.starts_fresh and history.uniform_loss:
        first, uniform = float(history.steps[0]["loss"]), history.uniform_loss
        if int(history.steps[0].get("step", 1)) > 5:
            return None
        if first < 0.5 * uniform:
            beside_guess = "much lower than a guess: the model sees the answer, or the labels are trivial"
            return fail(
                {"loss": first, "uniform_guess": uniform}, f"the loss at the start is {first:.2f}, {beside_guess}", fix
            )
    elif exam.options.batch is not None:
        ids, labels = exam.batch
        uniform = math.log(exam.output.shape[-1])
        if labels.is_floating_point():
            return None
        try:
            first = float(loss_function(exam)(exam.run(ids), labels))
        except FAILURES:
            return None
        if (found := _check_low_loss(exam, labels, first)) is not None:
            return found
    else:
        return None
    if first <= 1.3 * uniform + 0.7:  # a fresh GPT-2 starts at ln V + 0.1
        return None
    tokens = 0 if exam.options.batch is None else int((exam.options.batch[1] != IGNORED).sum())
    if tokens > 4 and abs(first / tokens - uniform) < 0.3 * uniform:
        return fail(
            {"loss": first, "uniform_guess": uniform, "tokens": tokens, "loss_of_a_token": first / tokens},
            f"the loss is a sum over {tokens} tokens, not their mean: it and its gradient grow with the batch",
            "write F.cross_entropy(…, reduction='mean'), or divide by the number of tokens that are not padding",
        )
    beside_guess = "much higher than a guess: the logits are too large at the start, or the labels wrong"
    return fail({"loss": first, "uniform_guess": uniform}, f"the loss at the start is {first:.2f}, {beside_guess}", fix)


def _check_low_loss(exam: Examination, labels: Tensor, first: float) -> Finding | None:
    """Look for a loss that is below 0 at the start or at perfect answers, or far below the cross-entropy of a guess."""
    ids, outputs = exam.batch[0], exam.output.shape[-1]
    if labels.dim() != exam.output.dim() - 1:
        return None
    perfect, wrong = perfect_output(exam, labels), perfect_output(exam, (labels + 1).clamp(min=0) % outputs)
    try:
        lowest, highest = (float(loss_function(exam)(output, labels)) for output in (perfect, wrong))
        guess, mistaken = (cross_entropy_of(exam, output, labels) for output in (exam.run(ids), wrong))
    except FAILURES:
        return None
    fix = "write F.cross_entropy(logits.flatten(0, 1), labels.flatten()), without a minus and without a softmax"
    if min(first, lowest) < -1e-3:
        return fail(
            {"loss": first, "loss_of_perfect_answers": lowest, "cross_entropy": guess},
            f"the loss is negative{'' if first < -1e-3 else ' as soon as the model learns'}: its sign is wrong, or it "
            "is given logits or probabilities where log-probabilities belong",
            fix + "; F.nll_loss takes logits.log_softmax(-1)",
            "the loss is negative",
        )
    # A cross-entropy divided by a number, as by the steps of gradient accumulation, is as much lower for any answer.
    is_fresh, share = guess > 0.7 * math.log(outputs), highest / max(mistaken, 1e-6)
    if not is_fresh or not first < 0.5 * guess or not share < 0.7 * first / guess:
        return None
    return warn(
        {"loss": first, "cross_entropy": guess, "loss_of_wrong_answers": highest},
        f"the loss at the start is {first:.2g}, but the cross-entropy of the same logits is {guess:.2f}, that of a "
        f"guess: this is another loss, which hardly tells wrong answers ({highest:.2g}) from a guess",
        fix,
        "not a cross-entropy",
    )


@check("a few steps learn one batch", "module", "batch", group="training", is_slow=True, max_parameters=3e7)
def check_overfit(exam: Examination) -> Finding | None:
    """Train a few steps on one batch: its loss must fall."""
    module = exam.module
    ids, labels = exam.batch
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters or labels.is_floating_point():
        return None
    if (twice := _check_softmax_twice(exam, labels)) is not None:
        return twice
    counts = torch.unique(labels[labels != IGNORED], return_counts=True)[1].double()
    shares = counts / counts.sum()
    frequencies = float(-(shares * shares.log()).sum())  # the cross-entropy of a guess by the frequencies of labels
    losses, first, best = list[float](), 0.0, 0.0
    with restoring(module), exam.subject.evaluating(), torch.enable_grad():
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
        while len(losses) < MAX_OVERFIT_STEPS:
            loss = loss_function(exam)(exam.subject.logits(ids), labels)
            if not loss.requires_grad:
                return None  # gradient_flow says so
            losses.append(float(loss.detach()))
            if len(losses) >= OVERFIT_STEPS and len(losses) % 10 == 0:
                first, best = losses[0], min(losses[-5:])
                if best < max(0.85 * min(first, frequencies), 0.1) or not best < 0.99 * min(losses[-20:-10]):
                    break  # it has learned, or its loss no longer falls
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    exam.pictures["loss on one batch"] = losses
    if best < max(0.85 * min(first, frequencies), 0.1):
        return None
    cause, fix = "", "check that logits and labels belong together, that no layer is frozen or detached, and that "
    fix += "inputs reach the output"
    if are_probabilities(exam.output):
        cause = ". Its outputs are probabilities, and the loss takes their softmax again"
        fix = "return logits, without the softmax: F.cross_entropy applies it"
    return fail(
        {"loss_before": first, "loss_after": best, "steps": len(losses), "loss_of_label_frequencies": frequencies},
        f"the model cannot learn a single batch: after {len(losses)} steps its loss is still {best:.2f}, not much "
        f"better than the frequencies of the labels without any input ({frequencies:.2f}){cause}",
        fix,
    )


def _check_softmax_twice(exam: Examination, labels: Tensor) -> Finding | None:
    """Give the loss perfect answers: it is 0, or ln(e + V - 1) - 1 where it takes the softmax of probabilities."""
    if labels.dim() != exam.output.dim() - 1:
        return None
    outputs, function = exam.output.shape[-1], loss_function(exam)
    perfect = F.one_hot(labels.clamp(min=0), outputs).float()
    is_output = are_probabilities(exam.output)
    # The loss of a forward pass is computed from what its head gives, which comes before the softmax.
    has_head = exam.options.loss is None and exam.subject.own_loss is not None
    scales = (1.0,) if is_output and not has_head else (30.0, 60.0)
    try:
        blind = float(function(torch.full_like(perfect, 1 / outputs), labels))
        lowest = [float(function(scale * perfect, labels)) for scale in scales]
    except FAILURES:
        return None
    expected = (math.log(math.e + outputs - 1) - 1) / math.log(outputs)
    if blind <= 0 or any(abs(loss / blind - expected) > 1e-3 for loss in lowest):
        return None
    cause = "its outputs are probabilities" if is_output else "the loss makes probabilities of the logits"
    return fail(
        {"loss_of_perfect_answers": lowest[0], "expected": 0.0, "loss_of_a_guess": blind},
        f"the softmax is taken twice: {cause}, and F.cross_entropy takes the softmax of them again, so that the loss "
        f"stays at {lowest[0]:.2f} however good the model is, and its gradients are small",
        "return logits, without the softmax, and hand them to the loss as they are: F.cross_entropy(logits, labels) "
        "applies the softmax itself",
        "softmax before the cross-entropy",
    )


IGNORED = -100
FAILURES = (RuntimeError, TypeError, ValueError, IndexError)


def default_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over labels that are not -100."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def loss_function(exam: Examination) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of logits and labels: that of the user, that of the model, or cross-entropy."""
    return exam.options.loss or exam.subject.own_loss or default_loss


def synthetic_logits(exam: Examination, ids: Tensor) -> Tensor:
    """Return logits (B, T, C) in which neighbours differ; those of a longer text begin with the same ones."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(67, exam.output.shape[-1], generator=generator).to(exam.subject.device)
    rows, columns = (torch.arange(n, device=ids.device) for n in ids.shape)
    logits = table[(13 * rows[:, None] + columns) % 67]
    return logits.softmax(-1) if are_probabilities(exam.output) else logits


def perfect_output(exam: Examination, labels: Tensor) -> Tensor:
    """Return what a perfect model of this kind gives for labels: logits, probabilities or their logarithms."""
    perfect = F.one_hot(labels.clamp(min=0), exam.output.shape[-1]).float()
    if are_probabilities(exam.output):
        return perfect
    return (30 * perfect).log_softmax(-1) if are_probabilities(exam.output.float().exp()) else 30 * perfect


def cross_entropy_of(exam: Examination, output: Tensor, labels: Tensor) -> float:
    """Return the cross-entropy of an output of the model, whether it is of logits or of probabilities."""
    return float(default_loss(output.clamp(min=1e-12).log() if are_probabilities(exam.output) else output, labels))


def are_probabilities(output: Tensor) -> bool:
    sums = output.float().sum(-1)
    return output.shape[-1] > 1 and bool((output >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())


@dataclass
class Reading:
    """The gradient (B, T, C) of one loss at the logits of these ids, and where that loss is computed.

    An optimizer moves against it; if it maximizes, the gradient is negated.
    """

    ids: Tensor
    gradient: Tensor
    place: str
    labels: Tensor | None = None  # of the batch
    maximizes: bool = False

    @property
    def targets(self) -> Tensor:
        return read_targets(self.gradient)


def read_targets(gradient: Tensor) -> Tensor:
    """Return the class whose logit a loss raises at each position, its label; -100 where the loss ignores it."""
    return gradient.argmin(-1).masked_fill(gradient.abs().amax(-1) == 0, IGNORED)


def read_batch(exam: Examination) -> Reading | None:
    """Read the loss of the batch; None if it cannot be called or has no gradient."""
    ids, labels = exam.batch
    logits = synthetic_logits(exam, ids).requires_grad_()
    try:
        with torch.enable_grad():
            loss = loss_function(exam)(logits, labels)
        gradient = torch.autograd.grad(loss, logits, allow_unused=True)[0]
    except FAILURES as error:
        exam.notes.append(f"the loss could not be called as loss(logits, labels): {error!s:.80}")
        return None
    return None if gradient is None else Reading(ids, gradient, "the loss", labels)


def read_step(exam: Examination) -> Reading | None:
    """Read the loss inside a training step; None if no logits of its ids are seen."""
    module, step = exam.subject.module, exam.options.step
    if module is None or step is None:
        return None
    with restoring(module) as updates, _watching(exam) as seen:
        step()
    if not seen:
        return None
    optimizers = updates if exam.options.optimizer is None else [*updates, exam.options.optimizer]
    maximizes = any(group.get("maximize") for optimizer in optimizers for group in optimizer.param_groups)
    ids, gradient = seen[-1]
    return Reading(ids, -gradient if maximizes else gradient, "the training step", maximizes=maximizes)


@contextmanager
def _watching(exam: Examination) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield a list to which the ids and the gradient at the logits of each later pass are added."""
    module, outputs = exam.subject.module, exam.output.shape[-1]
    assert module is not None
    ids, logits, seen = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor]]()

    def before(_: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        given = [t for t in (*inputs, *options.values()) if isinstance(t, Tensor) and t.dim() == 2]
        ids[:] = [t for t in given if not t.is_floating_point()][:1]
        logits.clear()

    def after(_: nn.Module, inputs: object, output: object) -> None:
        if ids and isinstance(output, Tensor) and output.shape == (*ids[0].shape, outputs) and output.requires_grad:
            logits[:] = [output]

    def after_all(_: nn.Module, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not logits:
            after(module, inputs, first)
        if logits:
            given = ids[0]
            logits[0].register_hook(lambda gradient: seen.append((given, gradient.detach())))

    handles = [module.register_forward_pre_hook(before, with_kwargs=True)]
    handles += [part.register_forward_hook(after) for part in module.modules() if part is not module]
    handles.append(module.register_forward_hook(after_all))
    with hooks(handles):
        yield seen


@contextmanager
def restoring(module: nn.Module) -> Iterator[list[Optimizer]]:
    """Restore weights, buffers and the state of each optimizer that makes a step.

    Yield a list to which an optimizer is added with each step that it makes.
    """
    saved = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    steps, states = list[Optimizer](), dict[Optimizer, dict[str, Any]]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        steps.append(optimizer)
        if optimizer not in states:
            states[optimizer] = copy.deepcopy(optimizer.state_dict())

    watch = register_optimizer_step_pre_hook(before_step)
    try:
        yield steps
    finally:
        watch.remove()
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(saved[name])
                p.grad = None
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        for optimizer, state in states.items():
            optimizer.load_state_dict(state)
