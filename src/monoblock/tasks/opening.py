"""What lies in a model folder: the model, its tokenizer, the names of its classes, how it pools and how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from monoblock.config import ModelConfig
from monoblock.errors import FileError, InputError
from monoblock.interop.folder import CONFIG, load_model
from monoblock.interop.labels import labels_in
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.tasks.folder import tokenizer_in, vocab_of
from monoblock.tasks.seeing import Normal, normal_in
from monoblock.tokenizers.identity import check_belongs
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted import inside, present, read_json


@dataclass(frozen=True)
class Found:
    model: Transformer | Recurrent
    tokenizer: Tokenizer | None
    labels: list[str]
    pooling: str
    pixels: Normal


def found_in(folder: Path, device: str, dtype: torch.dtype | str) -> Found:
    """The parts of a run folder, a Hugging Face folder or a GGUF file."""
    data = read_json(inside(folder, CONFIG)) if folder.is_dir() and present(folder, CONFIG) else {}
    if "format" in data and "recurrent" in data:
        model: Transformer | Recurrent = load_model(Recurrent, folder, dtype=dtype, device=device)
    else:
        model = Transformer.from_pretrained(folder, dtype=dtype, device=device)
    tokenizer = None
    if not (isinstance(model.config, ModelConfig) and model.config.family == "vision"):
        tokenizer = tokenizer_in(folder) if "format" in data else _published(folder, model)
    return Found(model.eval(), tokenizer, _labels(folder, model), _pooling(folder), normal_in(folder))


def _published(folder: Path, model: Transformer | Recurrent) -> Tokenizer:
    tokenizer = Tokenizer.from_pretrained(folder)
    try:
        check_belongs(tokenizer, vocab_of(model.config))
    except InputError as problem:
        raise FileError(f"{folder}: {problem}") from None
    return tokenizer


def _labels(folder: Path, model: Transformer | Recurrent) -> list[str]:
    """The names of the classes, as many as the head has; numbers where nobody named them."""
    head = model.config.head if isinstance(model.config, ModelConfig) else None
    classes = 0 if head is None else head.classes or 0
    found = labels_in(folder) if classes else []
    if found and len(found) != classes:
        raise FileError(f"{folder} names {len(found)} labels, and the head of its model has {classes}")
    return found or [f"LABEL_{number}" for number in range(classes)]


def _pooling(folder: Path) -> str:
    """As sentence-transformers says it beside a model; else the mean."""
    place = folder / "1_Pooling"
    said = read_json(inside(place, CONFIG)) if place.is_dir() and present(place, CONFIG) else {}
    return "cls" if said.get("pooling_mode_cls_token") is True else "mean"
