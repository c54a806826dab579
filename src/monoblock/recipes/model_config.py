"""Build the model configuration that a recipe describes."""

from __future__ import annotations

from typing import Any

from monoblock.config.knobs import KNOBS, vary
from monoblock.config.model import ModelConfig, PatchConfig, RecurrentConfig
from monoblock.config.presets import preset
from monoblock.config.schema import FieldError, from_dict
from monoblock.errors import ConfigError
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
        from monoblock.recipes.stored_config import adapt_config, read_stored_config

        base = read_stored_config(recipe.model["folder"]) if stored is None else stored
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
        from monoblock.recipes.stored_config import read_stored_config

        return read_stored_config(recipe.model["folder"])
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
