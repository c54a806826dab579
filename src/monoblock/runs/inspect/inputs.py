"""Encode what is to be inspected: a text, a source with its target, or an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import EmbeddingConfig, PatchConfig
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.plots.figure import check_length, readable_tokens
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.image_inputs import read_pixels

MAX_TARGET = 64  # tokens of a target that the model writes itself


@dataclass(frozen=True)
class InspectedInput:
    """The arguments of the model for one input, and the names of its tokens."""

    arguments: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    source_tokens: list[str] = field(default_factory=list)  # of a model of one stack: its tokens
    target_tokens: list[str] = field(default_factory=list)  # of an encoder-decoder
    pixels: Any = None  # (channels, height, width), from 0 to 1
    num_special: int = 0  # tokens before the first patch of an image

    @property
    def tokens(self) -> list[str]:
        """The tokens that the model predicts from: those of the target, if there is one."""
        return self.target_tokens or self.source_tokens


def transformer_of(pipe: Pipeline) -> Transformer:
    if not isinstance(pipe.model, Transformer):
        raise InputError("inspect reads Transformers, but this model is an LSTM; use mb.trace in Python")
    return pipe.model


def encode_input(pipe: Pipeline, text: str, target: str | None = None) -> InspectedInput:
    """Encode a text as the model was trained to read it; of a vision model, the text is the path of an image."""
    model = transformer_of(pipe)
    if target is not None and model.config.family != "encoder-decoder":
        raise InputError(f"a target is for an encoder-decoder, but this model is {model.config.family}; leave it out")
    if isinstance(model.config.input, PatchConfig):
        return _encode_image(pipe, model, Path(text))
    if not isinstance(model.config.input, EmbeddingConfig):
        raise InputError("inspect reads texts and images, but this model reads audio; use mb.trace in Python")
    if not text.strip():
        raise InputError("the text to inspect is empty; give at least one word")
    if model.config.family == "encoder-decoder":
        return _encode_pair(pipe, model, text, target)
    loaded, options = pipe.loaded, {}
    if model.encoder is None:
        ids = list(loaded.encode_prompt(text).ids)
    else:
        encoded = loaded.input_template()(pipe.tokenizer.encode(text))
        ids = encoded.ids
        if model.config.input.segments > 1:
            options["segments"] = torch.tensor([encoded.segments], device=model.device)
    check_length(len(ids))
    return InspectedInput((torch.tensor([ids], device=model.device),), options, readable_tokens(pipe.tokenizer, ids))


def _encode_image(pipe: Pipeline, model: Transformer, path: Path) -> InspectedInput:
    config = model.config.input
    assert isinstance(config, PatchConfig)
    preprocessing = pipe.loaded.image_preprocessing
    pixels = read_pixels(path, config, preprocessing)[0]
    tensor = preprocessing(torch.from_numpy(pixels))[None].to(model.device, model_dtype(model))
    num_special = config.num_class_tokens + config.registers
    side = config.image // config.patch
    special = [f"token {number}" for number in range(num_special)]
    if config.class_token:
        special[0] = "class"
    patches = [f"{row},{column}" for row in range(side) for column in range(side)]
    return InspectedInput((tensor,), {}, special + patches, pixels=pixels, num_special=num_special)


def model_dtype(model: Transformer) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _encode_pair(pipe: Pipeline, model: Transformer, text: str, target: str | None) -> InspectedInput:
    prompt = pipe.loaded.encode_prompt(text)
    assert prompt.source is not None
    check_length(len(prompt.source))
    if target is None:
        settings = pipe.loaded.resolve_settings({"max_new_tokens": MAX_TARGET})
        target_ids = list(pipe.loaded.generate([prompt], settings)[0][0].ids)
    else:
        target_ids = pipe.tokenizer.encode(target)
        check_length(len(target_ids))
    ids = [*prompt.ids, *target_ids]
    source_tokens, target_tokens = (readable_tokens(pipe.tokenizer, list(part)) for part in (prompt.source, ids))
    arguments = tuple(torch.tensor([list(part)], device=model.device) for part in (prompt.source, ids))
    return InspectedInput(arguments, {}, source_tokens, target_tokens)
