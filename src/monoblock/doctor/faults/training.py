"""Faults of training and of fit: labels, loss, optimizer, weights, runs, tokenizer, head, task."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.doctor.faults.fault import Fault, Plant, Setup, change_output
from monoblock.doctor.options import TrainingHistory
from monoblock.model import Transformer
from monoblock.nn.norm import Norm

PAD = 0


# -- means of planting ----------------------------------------------------------------------------------------------


def _options(make: Callable[[Setup], dict[str, Any]]) -> Plant:
    """Examine the model with these options."""
    return lambda setup: setup.options.update(make(setup))


def _each_block(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the output of each block."""

    def plant(setup: Setup) -> None:
        for block in setup.blocks:
            block.register_forward_hook(lambda module, inputs, output: change(output))

    return plant


def _batch(setup: Setup) -> tuple[Tensor, Tensor]:
    tokens = setup.tokens()
    return tokens[:, :-1], tokens[:, 1:]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def _adamw(setup: Setup, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(setup.model.parameters(), **{"betas": (0.9, 0.95), **settings})


def _with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Examine the model with a batch and this loss."""
    return _options(lambda setup: {"batch": _batch(setup), "loss": loss})


def _make_step(setup: Setup, lr: float = 1e-3, *, zero_grad: bool = True, step: bool = True) -> Callable[[], Tensor]:
    """Return a function that makes one training step."""
    ids, labels = _batch(setup)
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=lr)

    def make_step() -> Tensor:
        loss = _loss(setup.model(ids), labels)
        if zero_grad:
            optimizer.zero_grad()
        loss.backward()
        if step:
            optimizer.step()
        return loss.detach()

    return make_step


def _make_generate(setup: Setup, *, evaluates: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that continues ids, with a model that has dropout."""
    setup.blocks[0].register_forward_hook(lambda block, _, output: F.dropout(output, 0.1, training=block.training))

    def generate(ids: Tensor) -> Tensor:
        if evaluates:
            setup.model.eval()
        for _ in range(3):
            ids = torch.cat((ids, setup.model(ids)[:, -1:].argmax(-1)), 1)
        return ids

    return generate


def _run(losses: list[float] | None = None, norms: list[float] | None = None, **settings: Any) -> Plant:
    """Examine a run with these losses and norms of the gradient, by default without a fault, and these settings."""
    losses = losses or [4.0 - 2.0 * step / 40 for step in range(40)]
    rows = enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1)
    steps = [{"step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in rows]
    settings = {"lr": 1e-3, "warmup": 10, "clip": 1.0, "total_steps": len(losses), **settings}
    return _options(lambda setup: {"history": TrainingHistory(steps=steps, **settings)})


# -- controls -------------------------------------------------------------------------------------------------------


def _healthy_training(setup: Setup) -> None:
    """Pass all that belongs to a training, without a fault."""
    ids, labels = (t.clone() for t in _batch(setup))
    ids[:2, 8:] = labels[:2, 7:] = PAD
    setup.options |= {
        "batch": (ids, labels),
        "loss": _loss,
        "pad_id": PAD,
        "step": _make_step(setup),
        "optimizer": _adamw(setup),
        "generate": _make_generate(setup, evaluates=True),
    }


# -- faults of several lines ----------------------------------------------------------------------------------------


class ToyTokenizer:
    """A tokenizer of words; unknown ones get the id 1."""

    kind = "word"
    pad_id, unk_id, eos_id = 0, 1, 2
    special_ids = frozenset((0, 1, 2))

    def __init__(self, words: list[str], vocab_size: int, mask_id: int | None = 3) -> None:
        self.ids = {word: index + 4 for index, word in enumerate(words)}
        self.vocab_size, self.mask_id = vocab_size, mask_id

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(word, self.unk_id) for word in text.split()]


def _labels_shuffled(setup: Setup) -> None:
    generator = torch.Generator().manual_seed(0)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        order = torch.randperm(labels.numel(), generator=generator)
        return _loss(logits, labels.flatten()[order])

    setup.options |= {"batch": _batch(setup), "loss": loss}


def _padded_batch(setup: Setup) -> tuple[Tensor, Tensor]:
    tokens = setup.tokens()
    tokens[:2, 8:] = PAD
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def _duplicate_heads(setup: Setup) -> None:
    attention = setup.blocks[0].attention
    for layer in (attention.query, attention.key, attention.value):
        size = layer.out_features // attention.config.heads
        layer.weight[size : 2 * size] = layer.weight[:size]
        if layer.bias is not None:
            layer.bias[size : 2 * size] = layer.bias[:size]


@torch.no_grad()
def _dead_head(setup: Setup) -> None:
    layer = setup.blocks[0].attention.value
    size = layer.out_features // setup.blocks[0].attention.config.num_kv_heads
    layer.weight[:size] = 0
    if layer.bias is not None:
        layer.bias[:size] = 0


def _fresh_head(setup: Setup) -> None:
    """Make the blocks look trained: norms that differ from 1, biases that differ from 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in setup.model.named_parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
            if not name.startswith("head"):
                parameter.add_(noise)
        for module in setup.model.modules():
            if isinstance(module, Norm) and module.weight is not None:
                module.weight.add_(0.1 * torch.randn(module.weight.shape, generator=generator).to(module.weight))
        for name, parameter in setup.model.named_parameters():
            if name.startswith("head") and name.endswith("bias"):
                parameter.zero_()


def _decoder_read_at_first_token(setup: Setup) -> None:
    config = setup.model.config
    assert config.head is not None
    setup.model = Transformer(replace(config, head=replace(config.head, pooling="first"))).eval()


def _wrong_number_of_classes(setup: Setup) -> None:
    head = setup.model.config.head
    assert head is not None
    setup.options["labels"] = [f"class {index}" for index in range((head.classes or 2) + 2)]


def _context_overrun(setup: Setup) -> None:
    context = setup.model.config.context or 32
    ids = setup.tokens(2, context + 9)
    setup.options["batch"] = (ids[:, :-1], ids[:, 1:])


@torch.no_grad()
def _attention_collapse(setup: Setup) -> None:
    attention = setup.blocks[0].attention
    attention.query.weight.mul_(3e3)
    attention.key.weight.mul_(3e2)


def _logits_too_large(setup: Setup) -> None:
    setup.options["batch"] = _batch(setup)
    change_output(lambda s: s.model.head, lambda out: out * 300)(setup)


def _validation(*losses: float) -> list[dict[str, float]]:
    return [{"step": 10 * (number + 1), "val_loss": loss} for number, loss in enumerate(losses)]


# -- the tables -----------------------------------------------------------------------------------------------------

WITH_TRAINING = (
    Fault("labels_shuffled", "labels do not belong to the inputs", "overfit", _labels_shuffled),
    Fault("labels_not_shifted", "labels are the inputs", "label_shift",
          _options(lambda s: {"batch": (s.tokens(), s.tokens())})),
    Fault("labels_shifted_twice", "data and loss both shift the labels", "label_shift",
          _with_loss(lambda logits, labels: _loss(logits[:, :-1], labels[:, 1:]))),
    Fault("rows_mixed_in_loss", "the loss transposes logits, but not labels", "label_shift",
          _with_loss(lambda logits, labels: _loss(logits.transpose(0, 1), labels))),
    Fault("softmax_before_cross_entropy", "the loss is given probabilities", "overfit",
          _with_loss(lambda logits, labels: _loss(logits.softmax(-1), labels))),
    Fault("padding_in_loss", "the loss counts the padding", "pad_in_loss",
          _options(lambda s: {"batch": _padded_batch(s), "pad_id": PAD})),
    Fault("learning_rate_too_high", "the learning rate is 3", "learning_rate",
          _options(lambda s: {"step": _make_step(s, 3.0)})),
    Fault("learning_rate_of_one", "the learning rate is 1", "learning_rate",
          _options(lambda s: {"optimizer": _adamw(s, lr=1.0)})),
    Fault("optimizer_of_another_model", "the optimizer holds a copy's weights", "optimizer",
          _options(lambda s: {"optimizer": torch.optim.AdamW(copy.deepcopy(s.model).parameters())})),
    Fault("no_optimizer_step", "optimizer.step() is not called", "optimizer",
          _options(lambda s: {"step": _make_step(s, step=False)})),
    Fault("no_zero_grad", "gradients are never set to zero", "optimizer",
          _options(lambda s: {"step": _make_step(s, zero_grad=False)})),
    Fault("no_eval_in_generation", "text is generated in training mode", "dropout",
          _options(lambda s: {"generate": _make_generate(s, evaluates=False)})),
    Fault("beta2_too_low", "beta2 is 0.5", "optimizer_settings",
          _options(lambda s: {"optimizer": _adamw(s, betas=(0.9, 0.5))})),
    Fault("weight_decay_too_high", "weight decay is 2", "optimizer_settings",
          _options(lambda s: {"optimizer": _adamw(s, weight_decay=2.0)})),
    Fault("repeated_rows", "a batch holds one row four times", "repeated_data",
          _options(lambda s: {"batch": tuple(t[:1].expand(4, -1) for t in _batch(s))})),
)  # fmt: skip
OF_A_RUN = (
    Fault("learning_rate_too_low", "the loss of a run never moves", "learning_rate",
          _run([4.0 + 0.001 * (i % 3) for i in range(40)], lr=1e-9)),
    Fault("post_norm_without_warmup", "post-norm and no warm-up", "warmup", _run(warmup=0), "post-norm"),
    Fault("spikes_without_clipping", "gradients spike and are not clipped", "clipping",
          _run(norms=[{20: 35.0, 31: 90.0}.get(i, 1.0) for i in range(40)], clip=0.0)),
    Fault("overfitted_run", "the validation loss rises again", "train_eval_gap",
          _run(evaluations=_validation(3.5, 3.0, 3.6, 4.1))),
)  # fmt: skip
IN_WEIGHTS = (
    Fault("logits_too_large", "the output starts with large weights", "initial_loss", _logits_too_large),
    Fault("detached_block", "a block is cut off from the gradient", "gradient_flow",
          change_output(lambda s: s.blocks[-1], lambda out: out.detach())),
    Fault("shrinking_blocks", "every block divides the stream by 20", "gradient_flow",
          _each_block(lambda out: out / 20), "deep decoder"),
    Fault("duplicate_heads", "two heads have the same weights", "heads", _duplicate_heads),
    Fault("dead_head", "the values of a head are zero", "heads", _dead_head),
    Fault("attention_collapse", "scores are so large that one key takes all", "collapse", _attention_collapse),
    Fault("residual_explosion", "every block multiplies the stream", "residual_growth",
          _each_block(lambda out: 8 * out), "deep decoder"),
    Fault("nan_in_a_layer", "a weight is NaN", "overflow",
          torch.no_grad()(lambda s: s.blocks[-1].feedforward.down.weight[0, 0].fill_(float("nan")))),
    Fault("fp16_overflow", "activations are above 65,504", "overflow",
          torch.no_grad()(lambda s: s.blocks[-1].feedforward.down.weight.mul_(1e9))),
)  # fmt: skip
FIT = (
    Fault("tokenizer_too_large", "the tokenizer has more tokens than the model", "tokenizer",
          _options(lambda s: {"tokenizer": ToyTokenizer([], s.vocab + 7)})),
    Fault("unknown_words", "the tokenizer is of another language", "tokenizer",
          _options(lambda s: {"tokenizer": ToyTokenizer(["the", "a"], s.vocab), "texts": ["der Hund und die Katze"]})),
    Fault("no_mask_token", "a masked language model without a mask token", "tokenizer",
          _options(lambda s: {"tokenizer": ToyTokenizer([], s.vocab, mask_id=None), "objective": "masked_lm"}),
          "encoder"),
    Fault("fresh_head", "a fresh head on trained blocks", "head", _fresh_head, "classifier"),
    Fault("wrong_number_of_classes", "labels for more classes than the head has", "head",
          _wrong_number_of_classes, "classifier"),
    Fault("encoder_for_generation", "an encoder is to write text", "model_type",
          _options(lambda s: {"objective": "causal_lm"}), "encoder"),
    Fault("decoder_read_at_first_token", "a decoder classifies by its first token", "model_type",
          _decoder_read_at_first_token, "decoder with a classifier"),
    Fault("context_overrun", "texts are longer than the context", "context", _context_overrun, "learned positions"),
    Fault("end_token_unknown", "the end token is not in the vocabulary", "generation_defaults",
          _options(lambda s: {"generation": {"eos_token_id": s.vocab + 3}})),
)  # fmt: skip
TRAINING = (
    *(replace(fault, control=_healthy_training) for fault in WITH_TRAINING),
    *(replace(fault, control=_run(evaluations=_validation(3.6, 3.1, 2.6, 2.1))) for fault in OF_A_RUN),
    *IN_WEIGHTS,
)
