"""Read the configuration of a stored model, and apply the changes that a recipe makes to it.

A recipe may change dropout and the context, which leave the weights usable, but not the shape of a weight. It may
replace the head by a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from monoblock.config.knobs import KNOBS, suggest_knob, vary
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.errors import ConfigError, FileError
from monoblock.interop.folder import CONFIG_FILE, FORMAT_NAME, read_config
from monoblock.interop.hub import resolve_model_path
from monoblock.untrusted_files import has_file, read_json, reading, safe_join

CHANGEABLE_KNOBS = ("context", "dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout")
HEAD_KNOBS = ("head", "classes", "pooling", "pooler")
POOLED = ("classifier", "regression")  # heads that a decoder can have instead of its own
FRESH_HEAD = "fresh"  # model.head="fresh" asks for a new head even if the stored head is of the kind that is needed


def resolve_model_folder(folder: Any) -> Path:
    """Return the local path of model.folder; a model named by its id on the Hugging Face hub is downloaded."""
    path = resolve_model_path(str(folder))
    if not path.exists():
        raise FileError(
            f"model.folder={folder} does not exist; give a run folder, a Hugging Face folder or a .gguf file"
        )
    return path


def read_stored_config(folder: Any) -> ModelConfig | RecurrentConfig:
    """Read the configuration in a run folder, a Hugging Face folder or a GGUF file, without the weights."""
    path = resolve_model_folder(folder)
    with reading(path):
        return _read_config(path)


def _read_config(path: Path) -> ModelConfig | RecurrentConfig:
    if path.is_file() and path.suffix == ".gguf":
        from monoblock.interop.gguf.reader import read_gguf_config

        return read_gguf_config(path)
    if not has_file(path, CONFIG_FILE):
        raise FileError(f"model.folder={path} is not a model folder: it has no {CONFIG_FILE}; give another folder")
    data = read_json(safe_join(path, CONFIG_FILE))
    if data.get("format") == FORMAT_NAME:
        return read_config(path)
    from monoblock.interop.huggingface.load import config_from_hf

    try:
        return config_from_hf(data)
    except (ConfigError, FileError) as problem:
        raise FileError(f"{path}: {problem}") from None


def adapt_config(
    config: ModelConfig | RecurrentConfig, head: str, model: Mapping[str, Any], **data_sizes: Any
) -> ModelConfig | RecurrentConfig:
    """Return a stored configuration with the changes that a recipe makes to it.

    head: the kind of head that the objective needs.
    model: the [model] section of the recipe.
    data_sizes: sizes that follow from the data, such as `classes`.
    """
    knobs = {name: value for name, value in model.items() if name != "folder"}
    if isinstance(config, RecurrentConfig):
        return _adapt_lstm_config(config, knobs)
    for name, value in knobs.items():
        if name not in KNOBS:
            raise ConfigError(f"[model] has no key {name!r}{suggest_knob(name)}")
        if name not in (*CHANGEABLE_KNOBS, *HEAD_KNOBS) and vary(config, **{name: value}) != config:
            raise ConfigError(
                f"model.{name}={value!r} is not what the weights of model.folder were trained with; leave it out "
                f"(only these can be changed: {', '.join(CHANGEABLE_KNOBS)})"
            )
    for name, value in data_sizes.items():
        if name != "classes" and vary(config, **{name: value}) != config:
            raise ConfigError(
                f"the data need a model with {name}={value}, but the model in model.folder has another {name}; "
                "give other data or another model"
            )
    changes = {name: value for name, value in knobs.items() if name in CHANGEABLE_KNOBS and name != "head_dropout"}
    return _configure_head(vary(config, **changes), head, knobs, data_sizes.get("classes"))


def _configure_head(config: ModelConfig, kind: str, knobs: Mapping[str, Any], classes: int | None) -> ModelConfig:
    """Keep the stored head if it has the requested kind, else replace it by a new one."""
    requested, classes = knobs.get("head", kind), knobs.get("classes", classes)
    if config.head is not None and requested == config.head.kind:
        if classes is not None and config.head.classes != classes:
            raise ConfigError(
                f"the head of the model in model.folder has {config.head.classes} classes, but {classes} are needed; "
                f"write model.head={FRESH_HEAD} to train a new head"
            )
        config = replace(config, head=replace(config.head, multi_label=False))  # the objective trains exclusive classes
    elif config.family not in ("encoder-only", "vision") and not (config.family == "decoder-only" and kind in POOLED):
        return config  # build_model_config raises if the objective cannot train it
    else:
        config = _replace_head(config, kind if requested == FRESH_HEAD else requested, classes)
    head_knobs = {name: knobs[name] for name in ("head_dropout", "pooling", "pooler") if name in knobs}
    return vary(config, **head_knobs) if head_knobs else config


def _replace_head(config: ModelConfig, kind: str, classes: int | None) -> ModelConfig:
    """Return the configuration with a new head, which has the defaults of its kind."""
    config = vary(replace(config, head=None, tie="none"), head=kind)  # type: ignore[arg-type]
    if kind not in HEADS_WITH_CLASSES:
        return config
    config = vary(config, pooler="none") if config.family == "vision" else config
    return vary(config, classes=classes) if classes is not None else config


def _adapt_lstm_config(config: RecurrentConfig, knobs: Mapping[str, Any]) -> RecurrentConfig:
    changes = {name: value for name, value in knobs.items() if name != "context"}
    fixed = next((name for name in changes if "dropout" not in name or not hasattr(config, name)), None)
    if fixed is not None:
        raise ConfigError(f"model.{fixed}: only the dropout of a stored LSTM can be changed; leave out model.{fixed}")
    return replace(config, **changes)
