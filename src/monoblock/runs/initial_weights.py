"""The initial weights of a run: those of a stored model, and which of them are trained.

model.folder is a run folder, a Hugging Face folder or a GGUF file, which gives the configuration, the weights and the
tokenizer. All weights are copied, but if the objective needs another kind of head, a new head is initialized. A recipe
trains all weights, only the upper layers, or only LoRA adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, did_you_mean
from monoblock.interop.model_folder import load_model
from monoblock.interop.weights import compute_digest
from monoblock.model import Transformer
from monoblock.nn.lora import add_lora, lora_layers
from monoblock.quantization.convert import quantize
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import FRESH_HEAD, open_stored_model
from monoblock.tasks.loaded_model import DECODER_START_KEY, read_generation_defaults, stated_settings
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.events import DecisionEvent
from monoblock.training.optimizer import count_layers_above

POOLER_PREFIX = "head.pooler."  # several kinds of head have a pooler, so it is copied even if the head is new
Model = Transformer | Recurrent


@dataclass(frozen=True)
class WarmStart:
    """The stored model that training starts from."""

    folder: Path
    model: Transformer | Recurrent  # in fp32 on the CPU
    tokenizer: Tokenizer | None
    labels: tuple[str, ...]  # the class names of its head; () if they are not stored
    special_tokens: Mapping[str, Any]  # ids of the end, padding and start tokens, as fields of generation_config.json
    published: Mapping[str, Any]  # the fields of the Hugging Face config.json that it was read from, or {}
    generation: Mapping[str, Any]  # its settings of generation, as fields of generation_config.json; {} if it has none

    @property
    def config(self) -> ModelConfig | RecurrentConfig:
        return self.model.config

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the weights; a run can only be resumed if its initial weights have the same digest."""
        return compute_digest(self.model.state_dict())

    def keeps_head(self, kind: str, model: Mapping[str, Any]) -> bool:
        """Return whether training keeps the stored head: it is of this kind, and the recipe asks for no other head.

        kind: the kind of head that the objective needs.
        model: the [model] section of the recipe.
        """
        head = self.config.head if isinstance(self.config, ModelConfig) else None
        return head is not None and head.kind == model.get("head", kind) == kind

    def match_labels(self, labels: Sequence[str]) -> list[str]:
        """Return the labels of the stored head; if they are not stored, return `labels`, the labels of the data.

        Raise ConfigError if one of `labels` is not among the stored labels.
        """
        unknown = next((label for label in labels if label not in self.labels), None)
        if not self.labels or unknown is None:
            return list(self.labels or labels)
        raise ConfigError(
            f"the label {unknown!r} of the data is not a label of the model in {self.folder}: "
            f"{', '.join(self.labels[:8])}{did_you_mean(unknown, self.labels)}; "
            f"write model.head={FRESH_HEAD} to train a new head"
        )


def load_warm_start(path: str | Path) -> WarmStart:
    """Load the model in model.folder of a recipe."""
    folder = open_stored_model(path)
    cls: Any = Recurrent if isinstance(folder.config, RecurrentConfig) else Transformer
    stored = load_model(cls, folder)
    tokenizer, special_tokens = None, dict[str, Any]()
    if stored.config.family != "vision":
        tokenizer = folder.load_tokenizer(stored.config)
        defaults = read_generation_defaults(folder, tokenizer)
        names = ("eos_token_id", "pad_token_id")
        special_tokens = {name: defaults.options[name] for name in names if name in defaults.options}
        if stored.config.family == "encoder-decoder":
            special_tokens[DECODER_START_KEY] = defaults.decoder_start_token_id
    published, generation = folder.published_fields, stated_settings(folder)
    return WarmStart(folder.path, stored, tokenizer, tuple(folder.labels), special_tokens, published, generation)


@torch.no_grad()
def copy_weights(model: nn.Module, start: WarmStart, *, keep_head: bool) -> list[str]:
    """Copy the stored weights into a model, but those of the head only if `keep_head`.

    Return the names of the weights of the model that were not copied.
    """
    own, stored = model.state_dict(), start.model.state_dict()
    copied = {name: tensor for name, tensor in stored.items() if keep_head or not name.startswith("head.")}
    copied |= {name: tensor for name, tensor in stored.items() if name.startswith(POOLER_PREFIX) and name in own}
    for name, tensor in copied.items():
        if name not in own or own[name].shape != tensor.shape:
            shape = tuple(own[name].shape) if name in own else "no such weight"
            raise ConfigError(
                f"model.folder={start.folder} stores {name} of shape {tuple(tensor.shape)}, but this recipe needs "
                f"{shape}; leave out the keys of [model] that change it "
                "(instead of model.context, write data.max_length)"
            )
        own[name].copy_(tensor)
    fresh = [name for name in own if name not in copied]
    missing = next((name for name in fresh if not name.startswith("head.")), None)
    if missing is not None:
        raise ConfigError(
            f"model.folder={start.folder} has no weight {missing}, which this recipe needs; "
            f"leave out the key of [model] that adds it"
        )
    return fresh


def prepare_trainable(model: Model, recipe: Recipe, fresh: Sequence[str]) -> tuple[Model, DecisionEvent]:
    """Add adapters and freeze weights as a recipe says; return the model and an event that reports what is trained.

    fresh: the names of newly initialized weights, which are always trained.
    """
    lora, freeze = recipe.lora, recipe.train.freeze_layers
    if not isinstance(model, Transformer):
        raise ConfigError("an LSTM is trained as a whole; leave out lora.rank and train.freeze_layers")
    depth = max(len(list(stack.layers())) for stack in model.config.stacks.values())
    if freeze is not None and freeze > depth:
        raise ConfigError(
            f"train.freeze_layers={freeze} is more than the {depth} layers of this model; write at most {depth}"
        )
    total = sum(weight.numel() for weight in model.parameters())
    reasons = []
    if lora.rank:
        reason = f"LoRA of rank {lora.rank}"
        if lora.bits:
            head = model.head
            model = quantize(model, bits=lora.bits)
            if any(name.startswith("head.") for name in fresh):
                model.head = head  # a newly initialized head is not quantized
            reason += f" with {lora.bits}-bit weights"
        names = add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dropout=lora.dropout)
        reasons.append(f"{reason} on {len(names)} projections")
        total += sum(layer.a.numel() + layer.b.numel() for _, layer in lora_layers(model))
    if freeze is not None:
        reasons.append(f"the first {freeze} layers frozen{' with their adapters' if lora.rank else ''}")
        layers_above = count_layers_above(name for name, _ in model.named_parameters())
        for name, weight in model.named_parameters():
            stack, index = (name.split(".") + [""])[:2]
            is_first = stack in ("encoder", "decoder") and index.isdigit() and int(index) < freeze
            if is_first or (stack in ("input", "target") and layers_above[name]):  # the embeddings
                weight.requires_grad_(False)
    for name, weight in model.named_parameters():
        if name in fresh or (fresh and name.startswith("head.")):
            weight.requires_grad_(True)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if not trained:
        raise ConfigError(f"train.freeze_layers={freeze} leaves nothing to train; write a smaller number")
    return model, DecisionEvent(f"{trained:,} of {total:,} weights are trained", ", ".join(reasons))
