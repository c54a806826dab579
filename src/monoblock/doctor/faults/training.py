"""Faults of training: labels, loss, optimizer, weights, and runs that went wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.doctor.examination import TrainingHistory
from monoblock.doctor.faults.fault import Fault, Patient

PAD = 0


def _batch(patient: Patient) -> tuple[Tensor, Tensor]:
    tokens = patient.tokens()
    return tokens[:, :-1], tokens[:, 1:]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def _make_step(
    patient: Patient, lr: float = 1e-3, *, zero_grad: bool = True, step: bool = True
) -> Callable[[], Tensor]:
    """Return a function that makes one training step."""
    ids, labels = _batch(patient)
    optimizer = torch.optim.AdamW(patient.model.parameters(), lr=lr)

    def make_step() -> Tensor:
        loss = _loss(patient.model(ids), labels)
        if zero_grad:
            optimizer.zero_grad()
        loss.backward()
        if step:
            optimizer.step()
        return loss.detach()

    return make_step


def _make_generate(patient: Patient, *, evaluates: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that writes on from ids, with a model that has dropout."""
    patient.blocks[0].register_forward_hook(lambda block, _, output: F.dropout(output, 0.1, training=block.training))

    def generate(ids: Tensor) -> Tensor:
        if evaluates:
            patient.model.eval()
        for _ in range(3):
            ids = torch.cat((ids, patient.model(ids)[:, -1:].argmax(-1)), 1)
        return ids

    return generate


def _healthy_training(patient: Patient) -> None:
    """Hand over all that a training needs, and right: the control of the faults below."""
    ids, labels = (t.clone() for t in _batch(patient))
    ids[:2, 8:] = labels[:2, 7:] = PAD
    patient.options |= {
        "batch": (ids, labels),
        "loss": _loss,
        "pad_id": PAD,
        "step": _make_step(patient),
        "optimizer": torch.optim.AdamW(patient.model.parameters(), lr=1e-3, betas=(0.9, 0.95)),
        "generate": _make_generate(patient, evaluates=True),
    }


def _history(losses: list[float], **settings: Any) -> TrainingHistory:
    norms = settings.pop("norms", [1.0] * len(losses))
    steps = [{"step": i + 1, "loss": x, "grad_norm": n} for i, (x, n) in enumerate(zip(losses, norms, strict=True))]
    return TrainingHistory(steps=steps, total_steps=len(losses), **settings)


def _falling(count: int = 40) -> list[float]:
    return [4.0 - 2.0 * index / count for index in range(count)]


def _healthy_run(patient: Patient) -> None:
    """Hand over a run that went well: the control of the faults of runs."""
    evaluations = [{"step": s, "val_loss": 4.1 - 0.05 * s} for s in (10, 20, 30, 40)]
    patient.options["history"] = _history(_falling(), evaluations=evaluations, lr=1e-3, warmup=10, clip=1.0)


def _logits_too_large(patient: Patient) -> None:
    patient.options["batch"] = _batch(patient)
    head: Any = patient.model.head
    head.register_forward_hook(lambda _, inputs, output: output * 300)


def _labels_shuffled(patient: Patient) -> None:
    patient.options["batch"] = _batch(patient)
    generator = torch.Generator().manual_seed(0)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        order = torch.randperm(labels.numel(), generator=generator)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()[order])

    patient.options["loss"] = loss


def _labels_not_shifted(patient: Patient) -> None:
    tokens = patient.tokens()
    patient.options["batch"] = (tokens, tokens)


def _labels_shifted_twice(patient: Patient) -> None:
    patient.options["batch"] = _batch(patient)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    patient.options["loss"] = loss


def _padding_in_loss(patient: Patient) -> None:
    tokens = patient.tokens()
    tokens[:2, 8:] = 0
    patient.options |= {"batch": (tokens[:, :-1], tokens[:, 1:]), "pad_id": 0}


def _rows_mixed_in_loss(patient: Patient) -> None:
    loss = lambda logits, labels: F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten())
    patient.options |= {"batch": _batch(patient), "loss": loss}


def _softmax_before_cross_entropy(patient: Patient) -> None:
    patient.options |= {"batch": _batch(patient), "loss": lambda logits, labels: _loss(logits.softmax(-1), labels)}


def _no_zero_grad(patient: Patient) -> None:
    patient.options["step"] = _make_step(patient, zero_grad=False)


def _no_optimizer_step(patient: Patient) -> None:
    patient.options["step"] = _make_step(patient, step=False)


def _no_eval_in_generation(patient: Patient) -> None:
    patient.options["generate"] = _make_generate(patient, evaluates=False)


def _learning_rate_of_one(patient: Patient) -> None:
    patient.options["optimizer"] = torch.optim.AdamW(patient.model.parameters(), lr=1.0, betas=(0.9, 0.95))


def _learning_rate_too_high(patient: Patient) -> None:
    patient.options["step"] = _make_step(patient, 3.0)


def _learning_rate_too_low(patient: Patient) -> None:
    patient.options["history"] = _history([4.0 + 0.001 * (i % 3) for i in range(40)], lr=1e-9, clip=1.0, warmup=10)


def _post_norm_without_warmup(patient: Patient) -> None:
    patient.options["history"] = _history(_falling(), lr=1e-3, warmup=0, clip=1.0)


def _spikes_without_clipping(patient: Patient) -> None:
    norms = [1.0] * 40
    norms[20], norms[31] = 35.0, 90.0
    patient.options["history"] = _history(_falling(), norms=norms, lr=1e-3, warmup=10, clip=0.0)


def _overfitted_run(patient: Patient) -> None:
    evaluations = [{"step": s, "val_loss": v} for s, v in ((10, 3.5), (20, 3.0), (30, 3.6), (40, 4.1))]
    patient.options["history"] = _history(_falling(), evaluations=evaluations, lr=1e-3, warmup=10, clip=1.0)


def _detached_block(patient: Patient) -> None:
    patient.blocks[-1].register_forward_hook(lambda _, inputs, output: output.detach())


def _shrinking_blocks(patient: Patient) -> None:
    for block in patient.blocks:
        block.register_forward_hook(lambda _, inputs, output: output / 20)


@torch.no_grad()
def _duplicate_heads(patient: Patient) -> None:
    attention = patient.blocks[0].attention
    for layer in (attention.query, attention.key, attention.value):
        size = layer.out_features // attention.config.heads
        layer.weight[size : 2 * size] = layer.weight[:size]
        if layer.bias is not None:
            layer.bias[size : 2 * size] = layer.bias[:size]


@torch.no_grad()
def _dead_head(patient: Patient) -> None:
    layer = patient.blocks[0].attention.value
    size = layer.out_features // patient.blocks[0].attention.config.num_kv_heads
    layer.weight[:size] = 0
    if layer.bias is not None:
        layer.bias[:size] = 0


@torch.no_grad()
def _attention_collapse(patient: Patient) -> None:
    patient.blocks[0].attention.query.weight.mul_(3e3)
    patient.blocks[0].attention.key.weight.mul_(3e2)


def _residual_explosion(patient: Patient) -> None:
    for block in patient.blocks:
        block.register_forward_hook(lambda _, inputs, output: 8 * output)


@torch.no_grad()
def _nan_in_a_layer(patient: Patient) -> None:
    patient.blocks[-1].feedforward.down.weight[0, 0] = float("nan")


@torch.no_grad()
def _fp16_overflow(patient: Patient) -> None:
    patient.blocks[-1].feedforward.down.weight.mul_(1e9)


def _optimizer_of_another_model(patient: Patient) -> None:
    patient.options["optimizer"] = torch.optim.AdamW(copy.deepcopy(patient.model).parameters())


def _beta2_too_low(patient: Patient) -> None:
    patient.options["optimizer"] = torch.optim.AdamW(patient.model.parameters(), betas=(0.9, 0.5))


def _weight_decay_too_high(patient: Patient) -> None:
    patient.options["optimizer"] = torch.optim.AdamW(patient.model.parameters(), betas=(0.9, 0.95), weight_decay=2.0)


def _repeated_rows(patient: Patient) -> None:
    tokens = patient.tokens()[:1].expand(4, -1)
    patient.options["batch"] = (tokens[:, :-1], tokens[:, 1:])


IN_WHAT_IS_HANDED_OVER = (
    Fault("labels_shuffled", "labels do not belong to the inputs", "overfit", _labels_shuffled),
    Fault("labels_not_shifted", "labels are the inputs", "label_shift", _labels_not_shifted),
    Fault("labels_shifted_twice", "data and loss both shift the labels", "label_shift", _labels_shifted_twice),
    Fault("rows_mixed_in_loss", "the loss transposes logits, but not labels", "label_shift", _rows_mixed_in_loss),
    Fault("softmax_before_cross_entropy", "the loss is given probabilities", "overfit", _softmax_before_cross_entropy),
    Fault("padding_in_loss", "the loss counts the padding", "pad_in_loss", _padding_in_loss),
    Fault("learning_rate_too_high", "the learning rate is 3", "learning_rate", _learning_rate_too_high),
    Fault("learning_rate_of_one", "the learning rate is 1", "learning_rate", _learning_rate_of_one),
    Fault("optimizer_of_another_model", "the optimizer holds a copy's weights", "optimizer",
          _optimizer_of_another_model),
    Fault("no_optimizer_step", "optimizer.step() is not called", "optimizer", _no_optimizer_step),
    Fault("no_zero_grad", "gradients are never set to zero", "optimizer", _no_zero_grad),
    Fault("no_eval_in_generation", "text is generated in training mode", "dropout", _no_eval_in_generation),
    Fault("beta2_too_low", "beta2 is 0.5", "optimizer_settings", _beta2_too_low),
    Fault("weight_decay_too_high", "weight decay is 2", "optimizer_settings", _weight_decay_too_high),
    Fault("repeated_rows", "a batch holds one row four times", "repeated_data", _repeated_rows),
)  # fmt: skip
OF_A_RUN = (
    Fault("learning_rate_too_low", "the loss of a run never moves", "learning_rate", _learning_rate_too_low),
    Fault("post_norm_without_warmup", "post-norm and no warm-up", "warmup", _post_norm_without_warmup, "post-norm"),
    Fault("spikes_without_clipping", "gradients spike and are not clipped", "clipping", _spikes_without_clipping),
    Fault("overfitted_run", "the validation loss rises again", "train_eval_gap", _overfitted_run),
)  # fmt: skip
INSIDE = (
    Fault("logits_too_large", "the output starts with large weights", "initial_loss", _logits_too_large),
    Fault("detached_block", "a block is cut off from the gradient", "gradient_flow", _detached_block),
    Fault("shrinking_blocks", "every block divides the stream by 20", "gradient_flow", _shrinking_blocks,
          "deep decoder"),
    Fault("duplicate_heads", "two heads have the same weights", "heads", _duplicate_heads),
    Fault("dead_head", "the values of a head are zero", "heads", _dead_head),
    Fault("attention_collapse", "scores are so large that one key takes all", "collapse", _attention_collapse),
    Fault("residual_explosion", "every block multiplies the stream", "residual_growth", _residual_explosion,
          "deep decoder"),
    Fault("nan_in_a_layer", "a weight is NaN", "overflow", _nan_in_a_layer),
    Fault("fp16_overflow", "activations are above 65,504", "overflow", _fp16_overflow),
)  # fmt: skip
TRAINING = (
    *(replace(fault, control=_healthy_training) for fault in IN_WHAT_IS_HANDED_OVER),
    *(replace(fault, control=_healthy_run) for fault in OF_A_RUN),
    *INSIDE,
)
