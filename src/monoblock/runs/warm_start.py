"""Start training from a stored model: `[model] folder` gives configuration, weights and tokenizer.

The folder is a run, a Hugging Face folder or a GGUF file. A head of another kind than the objective needs is
initialized anew; all other weights are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, did_you_mean
from monoblock.interop.digest import compute_digest
from monoblock.interop.folder import load_model
from monoblock.interop.labels import read_labels
from monoblock.interop.tokenizer_folder import load_tokenizer
from monoblock.nn.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.recipes.stored_config import FRESH_HEAD, read_stored_config, resolve_model_folder
from monoblock.runs.generation_config import DECODER_START_KEY, read_generation_defaults
from monoblock.tokenizers.tokenizer import Tokenizer

POOLER_PREFIX = "head.pooler."  # heads of several kinds have one, so it is copied even if the head is not


@dataclass(frozen=True)
class WarmStart:
    """The model that training starts from."""

    folder: Path
    model: Transformer | Recurrent  # in fp32 on the CPU
    tokenizer: Tokenizer | None
    labels: tuple[str, ...]  # of its head, if they have names
    special_tokens: Mapping[str, Any]  # fields of generation_config.json: end, padding, start of a target

    @property
    def config(self) -> ModelConfig | RecurrentConfig:
        return self.model.config

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights; a resumed run must start from weights with the same digest."""
        return compute_digest(self.model.state_dict())

    def keeps_head(self, kind: str, model: Mapping[str, Any]) -> bool:
        """Whether training keeps the stored head: it is of this kind, and the [model] section asks for no other."""
        head = self.config.head if isinstance(self.config, ModelConfig) else None
        return head is not None and head.kind == model.get("head", kind) == kind

    def match_labels(self, labels: Sequence[str]) -> list[str]:
        """Return the labels of the stored head, which must include `labels`; `labels` if it has no label names."""
        unknown = next((label for label in labels if label not in self.labels), None)
        if not self.labels or unknown is None:
            return list(self.labels or labels)
        raise ConfigError(
            f"the label {unknown!r} of the data is not one of the head of {self.folder}: {', '.join(self.labels[:8])}"
            f"{did_you_mean(unknown, self.labels)}; write model.head={FRESH_HEAD} to train a new head"
        )


def load_warm_start(model: Mapping[str, Any]) -> WarmStart | None:
    """Load the model in `folder` of the [model] section of a recipe; return None if the section has no `folder`."""
    if "folder" not in model:
        return None
    folder = resolve_model_folder(model["folder"])
    cls: Any = Recurrent if isinstance(read_stored_config(folder), RecurrentConfig) else Transformer
    stored = load_model(cls, folder)
    vision = isinstance(stored.config, ModelConfig) and stored.config.family == "vision"
    tokenizer = None if vision else load_tokenizer(folder, stored.config)
    special_tokens = {} if tokenizer is None else _read_special_tokens(folder, tokenizer, stored.config)
    return WarmStart(folder, stored, tokenizer, tuple(read_labels(folder)), special_tokens)


def _read_special_tokens(folder: Path, tokenizer: Tokenizer, config: ModelConfig | RecurrentConfig) -> dict[str, Any]:
    defaults = read_generation_defaults(folder, tokenizer)
    tokens = {name: defaults.options[name] for name in ("eos_token_id", "pad_token_id") if name in defaults.options}
    if isinstance(config, ModelConfig):
        has_encoder_and_decoder = config.family == "encoder-decoder"
    else:
        has_encoder_and_decoder = config.kind == "encoder_decoder"
    return tokens | ({DECODER_START_KEY: defaults.decoder_start_token_id} if has_encoder_and_decoder else {})


@torch.no_grad()
def copy_weights(model: nn.Module, start: WarmStart, *, keep_head: bool) -> list[str]:
    """Copy the stored weights (the head only if `keep_head`) into a model; return the names of weights not copied."""
    own, stored = model.state_dict(), start.model.state_dict()
    copied = {name: tensor for name, tensor in stored.items() if keep_head or not name.startswith("head.")}
    copied |= {name: tensor for name, tensor in stored.items() if name.startswith(POOLER_PREFIX) and name in own}
    for name, tensor in copied.items():
        if name not in own or own[name].shape != tensor.shape:
            shape = tuple(own[name].shape) if name in own else "nothing"
            raise ConfigError(
                f"model.folder={start.folder} stores {name} of shape {tuple(tensor.shape)}, and this recipe needs "
                f"{shape}; leave out the keys of [model] that change it "
                "(instead of model.context, write data.max_length)"
            )
        own[name].copy_(tensor)
    fresh = [name for name in own if name not in copied]
    missing = next((name for name in fresh if not name.startswith("head.")), None)
    if missing is not None:
        raise ConfigError(
            f"model.folder={start.folder} has no weight {missing}, which this recipe needs; "
            f"leave out the keys of [model] that add it"
        )
    return fresh
