"""The head in an adapter file: its configuration, and the weights that are trained in full along with the adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from monoblock.config.model import HeadConfig, ModelConfig
from monoblock.config.schema import from_dict, to_dict
from monoblock.errors import ConfigError, FileError
from monoblock.interop.adapter_names import AdapterNames
from monoblock.interop.safetensors_reader import SafetensorsWeights
from monoblock.nn.heads import Head
from monoblock.nn.transformer import Transformer
from monoblock.untrusted_files import short_repr

HEAD_KEY = "monoblock_head"  # key in the metadata of the weights file, which peft ignores
HEAD_PREFIX = "head."
PEFT_PREFIX = "base_model.model."
PEFT_TASK_TYPES = {
    "classifier": "SEQ_CLS",
    "regression": "SEQ_CLS",
    "tagger": "TOKEN_CLS",
    "spans": "QUESTION_ANS",
}
LORA_WEIGHT = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


def describe_head(config: ModelConfig) -> dict[str, str]:
    """Return the metadata of an adapter file that describe the head of a model."""
    if config.head is None:
        return {}
    return {HEAD_KEY: json.dumps({"head": to_dict(config.head), "tie": config.tie})}


def collect_head_weights(model: Transformer, names: AdapterNames) -> dict[str, Tensor]:
    """Return the trained weights that are not adapters, by their names in the file.

    A head whose kind is in PEFT_TASK_TYPES is always included.
    """
    state = model.state_dict()
    has_classifier = model.config.head is not None and model.config.head.kind in PEFT_TASK_TYPES
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    trained |= {name for name in state if has_classifier and name.startswith(HEAD_PREFIX)}
    weights: dict[str, Tensor] = {}
    for mapping in names.mappings:
        if trained & set(mapping.ours):  # adapters have no mapping, so they are left out
            tensors = mapping.save([state[key] for key in mapping.ours])
            keys = [key.removeprefix(names.omitted_prefix) for key in mapping.theirs]
            weights |= dict(zip(keys, tensors, strict=True))
    return weights


def build_stored_head(model: Transformer, metadata: Mapping[str, str], folder: Path) -> tuple[ModelConfig, Head] | None:
    """Build the head that an adapter was trained with, and the configuration of the model with it.

    Return None if the model has this head already, or if the file does not describe its head.
    """
    text = metadata.get(HEAD_KEY)
    if text is None:
        return None
    try:
        data = json.loads(text)
        config = replace(model.config, head=from_dict(HeadConfig, data["head"], "head"), tie=data["tie"])
    except (ConfigError, ValueError, TypeError, KeyError) as error:
        raise FileError(f"{folder}: the head of this adapter does not fit: {error}") from None
    if config == model.config:
        return None
    dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
    return config, Head(config).to(model.device, dtype).train(model.training)


def load_head_weights(
    state: Mapping[str, Tensor], names: AdapterNames, stored: SafetensorsWeights, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) for stored weights that are not adapters, such as those of a new head.

    state: the weights of the model, by our names.
    """
    unprefixed = {key.removeprefix(PEFT_PREFIX): key for key in stored}
    keys = {name: key for name, key in unprefixed.items() if not LORA_WEIGHT.fullmatch(name)}
    known = {names.prefix + key: key for key in keys} | {key: key for key in keys}
    for mapping in names.mappings:
        if any(name in known for name in mapping.theirs):
            tensors = mapping.load([stored[keys.pop(known[name])] for name in mapping.theirs])
            for key, tensor in zip(mapping.ours, tensors, strict=True):
                if state[key].shape != tensor.shape:
                    name = short_repr(mapping.theirs[0])
                    shapes = f"{tuple(tensor.shape)}, but {tuple(state[key].shape)} in this model"
                    raise FileError(f"{folder} is an adapter for another model: {name} has shape {shapes}")
                yield key, tensor
    if keys:
        raise FileError(
            f"{folder} is an adapter for another model: this model has no {short_repr(min(keys))}; "
            "give a model with the head that the adapter was trained with"
        )
