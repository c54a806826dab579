"""Start training from a stored model: model.folder gives its configuration, weights and tokenizer.

model.folder is a run folder, a Hugging Face folder or a GGUF file. All weights are copied, but if the objective needs
another kind of head, a new head is initialized.
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
from monoblock.interop.model_folder import ModelFolder, load_model
from monoblock.interop.weights import compute_digest
from monoblock.model import Transformer
from monoblock.recipes.model_config import FRESH_HEAD, open_stored_model
from monoblock.runs.generation_config import DECODER_START_KEY, read_generation_defaults, stated_settings
from monoblock.tokenizers.tokenizer import Tokenizer

POOLER_PREFIX = "head.pooler."  # several kinds of head have a pooler, so it is copied even if the head is new


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


def load_warm_start(model: Mapping[str, Any]) -> WarmStart | None:
    """Load the model in model.folder of a recipe; return None if the recipe does not set this key.

    model: the [model] section of the recipe.
    """
    if "folder" not in model:
        return None
    folder = open_stored_model(model["folder"])
    cls: Any = Recurrent if isinstance(folder.config, RecurrentConfig) else Transformer
    stored = load_model(cls, folder)
    vision = isinstance(stored.config, ModelConfig) and stored.config.family == "vision"
    tokenizer = None if vision else folder.load_tokenizer(stored.config)
    special_tokens = {} if tokenizer is None else _read_special_tokens(folder, tokenizer, stored.config)
    published, generation = folder.published_fields, stated_settings(folder)
    return WarmStart(folder.path, stored, tokenizer, tuple(folder.labels), special_tokens, published, generation)


def _read_special_tokens(
    folder: ModelFolder, tokenizer: Tokenizer, config: ModelConfig | RecurrentConfig
) -> dict[str, Any]:
    defaults = read_generation_defaults(folder, tokenizer)
    tokens = {name: defaults.options[name] for name in ("eos_token_id", "pad_token_id") if name in defaults.options}
    if isinstance(config, ModelConfig):
        has_encoder_and_decoder = config.family == "encoder-decoder"
    else:
        has_encoder_and_decoder = config.kind == "encoder_decoder"
    return tokens | ({DECODER_START_KEY: defaults.decoder_start_token_id} if has_encoder_and_decoder else {})


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
