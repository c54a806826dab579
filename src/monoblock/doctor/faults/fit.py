"""Faults of fit: tokenizer, head, task, context and decoding options that belong to another model."""

from __future__ import annotations

from dataclasses import replace

import torch

from monoblock.doctor.faults.fault import Fault, Patient
from monoblock.model import Transformer
from monoblock.nn.norm import Norm


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


def _tokenizer_too_large(patient: Patient) -> None:
    patient.options["tokenizer"] = ToyTokenizer([], patient.vocab + 7)


def _unknown_words(patient: Patient) -> None:
    patient.options["tokenizer"] = ToyTokenizer(["the", "a"], patient.vocab)
    patient.options["texts"] = ["der Hund und die Katze"]


def _no_mask_token(patient: Patient) -> None:
    patient.options |= {"tokenizer": ToyTokenizer([], patient.vocab, mask_id=None), "objective": "masked_lm"}


def _fresh_head(patient: Patient) -> None:
    """Give the blocks the look of trained ones: norms that differ from 1, biases that differ from 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in patient.model.named_parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
            if not name.startswith("head"):
                parameter.add_(noise)
        for module in patient.model.modules():
            if isinstance(module, Norm) and module.weight is not None:
                module.weight.add_(0.1 * torch.randn(module.weight.shape, generator=generator).to(module.weight))
        for name, parameter in patient.model.named_parameters():
            if name.startswith("head") and name.endswith("bias"):
                parameter.zero_()


def _wrong_number_of_classes(patient: Patient) -> None:
    head = patient.model.config.head
    assert head is not None
    patient.options["labels"] = [f"class {index}" for index in range((head.classes or 2) + 2)]


def _encoder_for_generation(patient: Patient) -> None:
    patient.options["objective"] = "causal_lm"


def _decoder_read_at_first_token(patient: Patient) -> None:
    config = patient.model.config
    assert config.head is not None
    patient.model = Transformer(replace(config, head=replace(config.head, pooling="first"))).eval()


def _context_overrun(patient: Patient) -> None:
    context = patient.model.config.context or 32
    ids = patient.tokens(2, context + 9)
    patient.options["batch"] = (ids[:, :-1], ids[:, 1:])


def _end_token_unknown(patient: Patient) -> None:
    patient.options["generation"] = {"eos_token_id": patient.vocab + 3}


FIT = (
    Fault("tokenizer_too_large", "the tokenizer has more tokens than the model", "tokenizer", _tokenizer_too_large),
    Fault("unknown_words", "the tokenizer is of another language", "tokenizer", _unknown_words),
    Fault("no_mask_token", "a masked language model without a mask token", "tokenizer", _no_mask_token, "encoder"),
    Fault("fresh_head", "a fresh head on trained blocks", "head", _fresh_head, "classifier"),
    Fault("wrong_number_of_classes", "labels for more classes than the head has", "head", _wrong_number_of_classes,
          "classifier"),
    Fault("encoder_for_generation", "an encoder is to write text", "model_type", _encoder_for_generation, "encoder"),
    Fault("decoder_read_at_first_token", "a decoder classifies by its first token", "model_type",
          _decoder_read_at_first_token, "decoder with a classifier"),
    Fault("context_overrun", "texts are longer than the context", "context", _context_overrun, "learned positions"),
    Fault("end_token_unknown", "the end token is not in the vocabulary", "generation_defaults", _end_token_unknown),
)  # fmt: skip
