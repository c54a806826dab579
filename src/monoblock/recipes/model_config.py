"""Build the configuration of the model that a recipe describes: a new one, or that of a stored model with changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from monoblock.config.knobs import KNOBS, suggest_knob, vary
from monoblock.config.model import ModelConfig, PatchConfig, RecurrentConfig
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.config.presets import preset
from monoblock.config.schema import FieldError, from_dict
from monoblock.errors import ConfigError, FileError
from monoblock.interop.model_folder import ModelFolder
from monoblock.recipes.schema import FAMILIES, Recipe, TaskKeys

NEW_HEADS = ("encoder-only", "decoder-only")  # that get the head of a task; others are built with theirs
DECODERS = ("gpt", "llama")


def build_model_config(
    recipe: Recipe,
    task: TaskKeys,
    vocab: int | None,
    stored: ModelConfig | RecurrentConfig | None = None,
    **data_sizes: Any,
) -> ModelConfig | RecurrentConfig:
    """Build the configuration of the model that a recipe trains.

    task: the task of the recipe, which must be able to train the model.
    vocab: the size of the tokenizer's vocabulary; None if there is no tokenizer.
    stored: the configuration in model.folder; None reads it from there.
    data_sizes: sizes that follow from the data, such as `classes` or `image`.
    """
    if "folder" in recipe.model:
        base = open_stored_model(recipe.model["folder"]).config if stored is None else stored
        config = adapt_config(base, task.head, recipe.model, **data_sizes)
    else:
        config = _build_new_config(recipe, task, vocab, data_sizes)
    if isinstance(config, ModelConfig):
        _check_trainable(task, config)
    return config


def _build_new_config(
    recipe: Recipe, task: TaskKeys, vocab: int | None, data_sizes: dict[str, Any]
) -> ModelConfig | RecurrentConfig:
    knobs = {**data_sizes, **recipe.model}
    if vocab is not None and isinstance(size := knobs.setdefault("vocab", vocab), int) and size < vocab:
        raise ConfigError(f"model.vocab={size} is less than the {vocab} tokens of the tokenizer; leave out model.vocab")
    try:
        return _apply_knobs(task, knobs)
    except FieldError as problem:  # name the key that the user wrote, such as model.heads
        raise (problem.with_path("model") if problem.field in recipe.model else problem) from None


def _apply_knobs(task: TaskKeys, knobs: dict[str, Any]) -> ModelConfig | RecurrentConfig:
    """Build a configuration from knobs, which include a preset or a family.

    A model of one stack gets the head that the task needs, unless the knobs include a head.
    """
    if "preset" in knobs:
        published = preset(str(knobs.pop("preset")))
        if published.family in task.families and published.family in NEW_HEADS and task.head != "language_model":
            knobs.setdefault("head", task.head)
        return vary(published, **knobs)
    family = knobs.pop("family")
    one_stack = "encoder-only" if family == "bert" else "decoder-only" if family in DECODERS else None
    if one_stack in task.families and task.head != "language_model":
        knobs.setdefault("head", task.head)
    if family == "lstm":
        knobs.pop("context", None)  # the length of training blocks, not a size of the LSTM
        kind = "encoder_decoder" if "encoder-decoder" in task.families else "language_model"
        fields = RecurrentConfig.__dataclass_fields__
        if wrong := next((name for name in knobs if name in KNOBS and name not in fields), None):
            raise ConfigError(
                f"model.{wrong} is for Transformers, and family='lstm' has no such key; leave it out, or, if the "
                "recipe sets it, start from one that trains an LSTM, such as wikitext2-lstm or multi30k-lstm"
            )
        return from_dict(RecurrentConfig, {"kind": kind, **knobs}, "model")
    try:
        return FAMILIES[family](**knobs)
    except TypeError as problem:  # a size that the family requires is missing
        raise ConfigError(f"model.family={family!r}: {str(problem).split(') ')[-1]}") from None


def is_vision(recipe: Recipe) -> bool:
    """Return whether the model of a recipe reads images."""
    return _family(recipe) in ("vision", "vit")


def is_decoder(recipe: Recipe) -> bool:
    """Return whether the model of a recipe is a decoder without an encoder."""
    return _family(recipe) in ("decoder-only", *DECODERS)


def image_size(recipe: Recipe) -> int | None:
    """Return the width of the images that the model of a recipe reads; None if it follows from the data."""
    base = _base_config(recipe)
    return recipe.model.get("image", base.input.image if _reads_patches(base) else None)


def image_channels(recipe: Recipe) -> int | None:
    """Return the channels of the images that the model of a recipe reads; None if they follow from the data."""
    base = _base_config(recipe)
    return recipe.model.get("channels", base.input.channels if _reads_patches(base) else None)


def _reads_patches(config: Any) -> bool:
    return isinstance(config, ModelConfig) and isinstance(config.input, PatchConfig)


def _family(recipe: Recipe) -> str:
    """Return the family of the model of a recipe: of a configuration, or the name of the function that builds one."""
    base = _base_config(recipe)
    if base is None:
        return str(recipe.model["family"])
    return base.family if isinstance(base, ModelConfig) else "lstm"


def _base_config(recipe: Recipe) -> Any:
    """Return the stored or published configuration that a recipe begins with; None if there is none."""
    if "folder" in recipe.model:
        return open_stored_model(recipe.model["folder"]).config
    return preset(str(recipe.model["preset"])) if "preset" in recipe.model else None


def _check_trainable(task: TaskKeys, config: ModelConfig) -> None:
    if config.head is None or config.head.kind != task.head:
        head = config.head.kind if config.head is not None else "none"
        raise _incompatible_model_error(task, f"{config.family} with the head {head!r}")
    check_family(task, config)


def check_family(task: TaskKeys, config: ModelConfig | RecurrentConfig) -> None:
    """Raise ConfigError unless the task trains models of the family of `config`; the head is not checked."""
    if isinstance(config, ModelConfig) and config.family not in task.families:
        raise _incompatible_model_error(task, config.family)


def _incompatible_model_error(task: TaskKeys, model: str) -> ConfigError:
    advice = "start from such a model"
    if model.startswith("decoder-only") and "encoder-decoder" in task.families:
        advice += ", or prompt this model for labels with monoblock evaluate MODEL DATA --shots 4"
    return ConfigError(
        f"train.objective={task.name!r} trains {' or '.join(task.families)} models with the head {task.head!r}; "
        f"this model is {model}; {advice}"
    )


def has_segments(config: ModelConfig | RecurrentConfig) -> bool:
    """Return whether a model has segment embeddings, which tell the two texts of a pair apart."""
    return getattr(getattr(config, "input", None), "segments", 0) > 1


CHANGEABLE_KNOBS = ("context", "dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout")
HEAD_KNOBS = ("head", "classes", "pooling", "pooler")
POOLED = ("classifier", "regression")  # heads that a decoder can have instead of its own
FRESH_HEAD = "fresh"  # model.head="fresh" asks for a new head even if the stored head is of the kind that is needed


def open_stored_model(folder: Any) -> ModelFolder:
    """Return model.folder; a model named by its id on the Hugging Face hub is downloaded."""
    stored = ModelFolder(str(folder))
    if not stored.path.exists():
        raise FileError(
            f"model.folder={folder} does not exist; give a run folder, a Hugging Face folder or a .gguf file"
        )
    return stored


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
