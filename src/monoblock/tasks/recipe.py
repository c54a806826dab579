"""A recipe: what is trained on what and how, as TOML with a default for every key.

Command line beats file beats default; a word that means nothing is refused with the nearest one that does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.families import bart, bert, gpt, llama, t5, vaswani, vit
from monoblock.knobs import vary
from monoblock.presets import preset
from monoblock.schema import FieldError, check, from_dict, to_dict
from monoblock.tasks.sections import DataPart, GeneratePart, LoraPart, TokenizerPart, TrainPart

FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "vaswani": vaswani,
    "t5": t5,
    "bart": bart,
    "vit": vit,
}
NAMING = ("preset", "family", "folder")  # what [model] is named by
REGULARISE = ("dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout", "pooling")
SECTIONS = ("data", "tokenizer", "model", "train", "lora", "generate")
OBJECTIVES = ("causal", "masked", "spans", "pairs", "classify", "label", "answers", "chat")
# Objective -> the kinds of model it trains, and what their head must be.
TRAINS = {
    "causal": (("decoder-only",), "language_model"),
    "masked": (("encoder-only",), "masked_lm"),
    "spans": (("encoder-decoder",), "language_model"),
    "pairs": (("encoder-decoder",), "language_model"),
    "classify": (("encoder-only", "vision"), "classifier"),
    "label": (("encoder-only",), "tagger"),
    "answers": (("encoder-only",), "spans"),
    "chat": (("decoder-only",), "language_model"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str = "run"
    about: str = ""
    data: DataPart
    tokenizer: TokenizerPart = TokenizerPart()
    model: dict  # preset or family, and knobs
    train: TrainPart = TrainPart()
    lora: LoraPart = LoraPart()
    generate: GeneratePart = GeneratePart()

    def __post_init__(self) -> None:
        check(self)
        _check_named(self.model)

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(_without_none(to_dict(self)))


def _without_none(value: Any) -> Any:
    """TOML has no none: a key that is not there."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


# -- reading ------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The recipes that come with the package."""
    files = resources.files("monoblock.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by name or path, with `section.key=value` words applied."""
    data = _table(name_or_path)
    data.setdefault("name", Path(name_or_path).stem)
    return resolve(data, overrides)


def resolve(data: dict[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """The recipe that tables say, with `section.key=value` words applied."""
    for word in sorted(overrides, key=lambda word: not word.startswith("model.folder=")):
        _override(data, word)
    try:
        return from_dict(Recipe, data)
    except FieldError as problem:
        raise (problem.at("") if problem.place == Recipe.__name__ else problem) from None


def _table(name_or_path: str) -> dict[str, Any]:
    path = Path(name_or_path)
    if name_or_path in names():
        text = (resources.files("monoblock.recipes") / f"{name_or_path}.toml").read_text(encoding="utf-8")
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    elif path.suffix == ".toml" or "/" in name_or_path:
        raise FileError(f"there is no recipe file {name_or_path}")
    else:
        raise ConfigError(
            f"there is no recipe {name_or_path!r}{did_you_mean(name_or_path, names())} (monoblock ls recipes)"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise FileError(f"{name_or_path} is not TOML: {problem}") from None


def _override(data: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    section, dot, name = key.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{word!r} is no override; write section.key=value, as in train.lr=3e-4")
    if section not in SECTIONS:
        raise ConfigError(f"{word!r}: a recipe has no section {section!r}{did_you_mean(section, SECTIONS)}")
    table = data.setdefault(section, {})
    if section == "data" and name.startswith("augment."):  # a table within a section
        table, name = table.setdefault("augment", {}), name.removeprefix("augment.")
    if section == "model" and name == "folder" and name not in table:  # its sizes are its own, not the file's
        data[section] = table = {key: kept for key, kept in table.items() if key in REGULARISE}
    if (section, name) == ("train", "steps"):
        table.pop("epochs", None)  # the file's: they would be steps again
    given = value(text)
    table[name] = given.split(",") if (section, name) == ("lora", "targets") and isinstance(given, str) else given


def value(text: str) -> Any:
    """A TOML value, or the text itself: `model.family=gpt` needs no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


# -- the model ----------------------------------------------------------------------------------------------------


def model_config(
    recipe: Recipe, vocab: int | None, stored: ModelConfig | RecurrentConfig | None = None, **data_sizes: Any
) -> ModelConfig | RecurrentConfig:
    """The configuration a recipe asks for; vocab is the tokenizer's, `data_sizes` (classes, image …) the data's.

    `stored` is the configuration in model.folder, where it is known already.
    """
    if "folder" in recipe.model:
        from monoblock.tasks.starting import adapted, stored_config

        begun = stored_config(recipe.model["folder"]) if stored is None else stored
        config = adapted(begun, TRAINS[recipe.train.objective][1], recipe.model, **data_sizes)
        if isinstance(config, ModelConfig):
            _check_trainable(recipe.train.objective, config)
        return config
    knobs = {**data_sizes, **recipe.model}
    if vocab is not None and isinstance(asked := knobs.setdefault("vocab", vocab), int) and asked < vocab:
        raise ConfigError(f"model.vocab={asked} is less than the {vocab} tokens of the tokenizer; leave it out")
    try:
        config = _config(recipe, knobs)
    except FieldError as problem:  # it may lie deep in the configuration; the user wrote model.heads
        raise (problem.at("model") if problem.field in recipe.model else problem) from None
    if isinstance(config, ModelConfig):
        _check_trainable(recipe.train.objective, config)
    return config


def _check_named(model: Mapping[str, Any]) -> None:
    """One preset, one family or one folder, and one that there is."""
    if sum(name in model for name in NAMING) != 1:
        raise ConfigError("[model] names a preset, a family or a folder with weights; write one of the three")
    if "folder" in model:
        return  # whether it is there is asked when it is read: the recipe of a finished run may have lost it
    if "preset" in model:
        preset(str(model["preset"]))
        return
    family, known = model["family"], ["lstm", *FAMILIES]
    if family not in known:
        raise ConfigError(f"model.family={family!r} is none of {', '.join(known)}{did_you_mean(str(family), known)}")


def is_vision(recipe: Recipe) -> bool:
    """Whether the model looks at images, by family, by preset or by what lies in a folder."""
    if "folder" in recipe.model:
        from monoblock.tasks.starting import stored_config

        stored = stored_config(recipe.model["folder"])
        return isinstance(stored, ModelConfig) and stored.family == "vision"
    if "preset" in recipe.model:
        return preset(str(recipe.model["preset"])).family == "vision"
    return recipe.model["family"] == "vit"


def _config(recipe: Recipe, knobs: dict[str, Any]) -> ModelConfig | RecurrentConfig:
    """A preset with knobs turned, or a family; an encoder whose head is not named gets the objective's."""
    encoders, head = TRAINS[recipe.train.objective]
    if "preset" in knobs:
        published = preset(str(knobs.pop("preset")))
        if published.family in encoders and published.family == "encoder-only":
            knobs.setdefault("head", head)
        return vary(published, **knobs)
    family = knobs.pop("family")
    if family == "bert" and "encoder-only" in encoders:
        knobs.setdefault("head", head)
    if family == "lstm":
        knobs.pop("context", None)  # the length of its blocks is no part of it
        kind = "encoder_decoder" if recipe.train.objective == "pairs" else "language_model"
        return from_dict(RecurrentConfig, {"kind": kind, **knobs}, "model")
    try:
        return FAMILIES[family](**knobs)
    except TypeError as problem:  # a size the family needs is missing
        raise ConfigError(f"model.family={family!r}: {str(problem).split(') ')[-1]}") from None


def _check_trainable(objective: str, config: ModelConfig) -> None:
    if config.head is None or config.head.kind != TRAINS[objective][1]:
        has = config.head.kind if config.head is not None else "none"
        raise _cannot(objective, f"{config.family} with {has!r}")
    check_family(objective, config)


def check_family(objective: str, config: ModelConfig | RecurrentConfig) -> None:
    """Raise unless an objective trains models of this kind, whatever their head."""
    if isinstance(config, ModelConfig) and config.family not in TRAINS[objective][0]:
        raise _cannot(objective, config.family)


def _cannot(objective: str, given: str) -> ConfigError:
    families, head = TRAINS[objective]
    instead = "begin with one of those"
    if given.startswith("decoder-only") and objective in ("classify", "pairs"):
        instead += ", or prompt this one for labels: monoblock evaluate MODEL DATA --shots 4"
    return ConfigError(
        f"train.objective={objective!r} trains {' or '.join(families)} models with the head {head!r}; "
        f"this one is {given}: {instead}"
    )
