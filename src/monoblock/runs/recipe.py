"""Read recipes from TOML, apply overrides, and build the configuration of the model that a recipe describes.

Overrides take precedence over the file, and the file over the defaults. For an unknown key, the error message suggests
the most similar known key.
"""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from monoblock import untrusted_files
from monoblock.config.knobs import KNOBS, suggest_knob, vary
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.config.presets import preset
from monoblock.config.schema import FieldError, from_dict
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.interop.model_folder import RECIPE_FILE, ModelFolder
from monoblock.recipes.schema import FAMILIES, Recipe
from monoblock.tasks.table import TASKS
from monoblock.tasks.task import Task

Overrides = Iterable[str] | Mapping[str, Any]  # "section.key=value" or {"section.key": value}
SECTIONS = ("data", "tokenizer", "model", "train", "lora", "parallel", "generate")
# The keys of [model] that are kept if `model.folder=…` on the command line replaces the model of the file.
REGULARIZATION_KEYS = ("dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout", "pooling")


def list_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    files = resources.files("monoblock.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read_recipe(name_or_path: str | Path, overrides: Overrides = (), *, task: Task | None = None) -> Recipe:
    """Read a recipe of the package by its name, or a TOML file by its path, and apply overrides `section.key=value`.

    task: a task of your own, which the recipe selects by its name in train.objective.
    """
    with untrusted_files.reading(name_or_path):
        return parse_recipe(read_toml(str(name_or_path)), overrides, task=task)


def parse_recipe(data: dict[str, Any], overrides: Overrides = (), *, task: Task | None = None) -> Recipe:
    """Build a recipe from the nested dicts of its sections; the other arguments are those of `read_recipe`."""
    tasks = known_tasks(task)
    data = copy.deepcopy(data)
    changes = _parse_overrides(overrides, (*SECTIONS, *(one.name for one in tasks if one.section is not None)))
    for key, value in sorted(changes, key=lambda change: change[0] != "model.folder"):
        _apply_override(data, key, value)

    train = data.get("train")
    objective = train.get("objective", "causal_lm") if isinstance(train, Mapping) else "causal_lm"
    names = [one.name for one in tasks]
    if objective not in names:
        raise ConfigError(
            f"train.objective={objective!r} is not one of {', '.join(names)}{did_you_mean(str(objective), names)}; "
            "a task of your own is given in Python, as task=…"
        )
    other = next((name for name in data if name != objective and name in names), None)
    if other is not None:
        raise ConfigError(
            f"the section [{other}] is for train.objective={other!r}, but this recipe has train.objective={objective!r}"
            "; leave out the section, or change the objective"
        )
    chosen, own = tasks[names.index(objective)], data.pop(objective, {})
    try:
        recipe = from_dict(Recipe, data)
        if chosen.section is not None:
            recipe = replace(recipe, task=from_dict(chosen.section, own, objective))
        elif own:
            raise ConfigError(f"the objective {objective} has no keys of its own; leave out [{objective}]")
    except FieldError as problem:
        raise (problem.with_path("") if problem.path == Recipe.__name__ else problem) from None
    _check_supported(recipe, chosen, tasks)
    return recipe


def _check_supported(recipe: Recipe, task: Task, tasks: Sequence[Task]) -> None:
    """Raise ConfigError for a choice that not every task can be trained with, if this one cannot."""
    unpadded, sampled = recipe.data.padding == "none", recipe.tokenizer.sampling_key
    rows = (
        ("supports_adversarial", "train.adversarial" if recipe.train.adversarial else None),
        ("supports_unpadded", "data.padding=none" if unpadded else None),
        ("supports_subword_sampling", sampled and f"tokenizer.{sampled}"),
    )
    for flag, choice in rows:
        if choice and not getattr(task, flag):
            names = ", ".join(one.name for one in tasks if getattr(one, flag))
            raise ConfigError(f"{choice} is for {names}, not {task.name}; leave it out")
    if unpadded and recipe.train.adversarial:
        raise ConfigError("train.adversarial needs one text in a row; leave it out, or leave out data.padding=none")
    if unpadded and recipe.train.compile == "graphs":
        raise ConfigError("train.compile=graphs needs batches of one shape; write auto, or leave out data.padding=none")


def known_tasks(task: Task | None = None) -> tuple[Task, ...]:
    """Return the tasks of the package and `task`; raise ConfigError if its name is already that of another task."""
    if task is None or task in TASKS:
        return TASKS
    if any(task.name == known.name for known in TASKS):
        raise ConfigError(f"monoblock already has a task with the name {task.name!r}; give your task another name")
    return (*TASKS, task)


def task_of_recipe(recipe: Recipe, task: Task | None = None) -> Task:
    """Return the task that train.objective names: `task` if it has this name, else a task of the package."""
    return next(known for known in known_tasks(task) if known.name == recipe.train.objective)


def read_toml(name_or_path: str) -> dict[str, Any]:
    """Return the tables of a recipe, which is given by its name in the package or by the path of a TOML file.

    If the recipe has no key `name`, its name is that of the file.
    """
    path, names = Path(name_or_path), list_recipes()
    if name_or_path in names:
        file = resources.files("monoblock.recipes") / f"{name_or_path}.toml"
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    elif path.is_file():
        tables = untrusted_files.read_toml(path)
    elif os.path.lexists(path) and not path.is_dir():
        raise FileError(f"{name_or_path} is not a regular file; give a recipe file")
    elif path.suffix == ".toml" or "/" in name_or_path:
        raise FileError(f"there is no recipe file {name_or_path}; check the path")
    else:
        raise ConfigError(
            f"there is no recipe {name_or_path!r}{did_you_mean(name_or_path, names)} (`monoblock ls recipes` lists all)"
        )
    return {"name": path.stem} | tables


def recipe_path(folder: str | Path) -> Path:
    """Return the path of the recipe in the folder of a run; raise FileError if it is a link out of the folder."""
    return untrusted_files.safe_join(folder, RECIPE_FILE)


# -- overrides --------------------------------------------------------------------------------------------------------


def _parse_overrides(overrides: Overrides, sections: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the keys and values of overrides; raise ConfigError for one that names no section of a recipe."""
    changes = []
    for override in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(override, str):
            key, equals, text = override.partition("=")
            value = parse_value(text)
            if key == "lora.targets" and isinstance(value, str):
                value = value.split(",")
        else:
            (key, value), equals = override, "="
        shown = repr(override if isinstance(override, str) else key)
        section, dot, _ = key.partition(".")
        if not (equals and dot):
            raise ConfigError(f"{shown} is not an override; write section.key=value, as in train.lr=3e-4")
        if section not in sections:
            raise ConfigError(f"{shown}: a recipe has no section {section!r}{did_you_mean(section, sections)}")
        changes.append((key, value))
    return changes


def _apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a key in the tables of a recipe, and remove the keys that the new value replaces."""
    if key == "model.folder" and "folder" not in data.get("model", {}):  # the file has the sizes of another model
        data["model"] = {name: size for name, size in data.get("model", {}).items() if name in REGULARIZATION_KEYS}
    if key == "train.steps":
        data.get("train", {}).pop("epochs", None)  # epochs in the file would override the steps
    *path, last = key.split(".")
    for name in path:
        data = data.setdefault(name, {})
    data[last] = value


def parse_value(text: str) -> Any:
    """Parse a TOML value; text that is not TOML becomes a string, so that `model.family=gpt` needs no quotes."""
    try:
        return untrusted_files.parse_toml(f"v = {text}", "the value")["v"]
    except FileError:
        return text


# -- several processes ------------------------------------------------------------------------------------------------


# The strategies for which each key of the section [parallel] means something.
KEY_STRATEGIES = {
    "tensor": ("tp", "fsdp+tp"),
    "sequence": ("tp", "fsdp+tp"),
    "reshard_after_forward": ("fsdp", "fsdp+tp"),
    "offload": ("fsdp", "fsdp+tp"),
    "pipeline": ("pp",),
    "microbatches": ("pp",),
    "schedule": ("pp",),
}


def check_parallel(recipe: Recipe, processes: int, *, has_own_loss: bool = False) -> None:
    """Raise ConfigError if a choice of the recipe does not work with weights that are split among processes.

    has_own_loss: whether the loss of the task is another function than the cross-entropy.
    """
    section = recipe.train
    if processes > 1 and recipe.data.packing == "contiguous":
        raise ConfigError(
            "data.packing=contiguous keeps the state of an LSTM in one process; write data.packing=stream, or train in "
            "one process"
        )
    if processes == 1 or section.parallel == "ddp":
        return
    strategy, unpadded = section.parallel, recipe.data.padding == "none"
    # What is set, what it is called, and what to write instead.
    refused = (
        (unpadded and strategy != "fsdp", "data.padding=none", "write train.parallel=fsdp, or leave it out"),
        (section.adversarial, "train.adversarial", "write train.parallel=ddp"),
        (recipe.model.get("norm") == "batch", "model.norm=batch", "write train.parallel=ddp, or model.norm=layer"),
        (section.precision in ("fp16", "fp8"), f"train.precision={section.precision}", "write train.precision=bf16"),
        (strategy == "pp" and has_own_loss, "an objective with a loss of its own", "write train.parallel=fsdp"),
        (recipe.lora.rank, "lora.rank", "write train.parallel=ddp"),
    )
    for is_set, choice, advice in refused:
        if is_set:
            raise ConfigError(f"{choice} cannot be used with train.parallel={strategy}; {advice}")


def list_unused_keys(recipe: Recipe, processes: int) -> list[str]:
    """Return a note for each key of [parallel] that differs from its default and changes nothing."""
    section, default = recipe.parallel, type(recipe.parallel)()
    changed = [key for key in KEY_STRATEGIES if getattr(section, key) != getattr(default, key)]
    if processes == 1:
        return [f"parallel.{key} changes nothing in a single process" for key in changed]
    return [
        f"parallel.{key} changes nothing with train.parallel={recipe.train.parallel}"
        for key in changed
        if recipe.train.parallel not in KEY_STRATEGIES[key]
    ]


# -- the configuration of the model -----------------------------------------------------------------------------------

NEW_HEADS = ("encoder-only", "decoder-only")  # that get the head of a task; others are built with theirs
DECODERS = ("gpt", "llama")
CHANGEABLE_KNOBS = ("context", "dropout", "attention_dropout", "embedding_dropout", "word_dropout", "head_dropout")
HEAD_KNOBS = ("head", "classes", "pooling", "pooler")
POOLED = ("classifier", "regression")  # heads that a decoder can have instead of its own
FRESH_HEAD = "fresh"  # model.head="fresh" asks for a new head even if the stored head is of the kind that is needed


def build_model_config(
    recipe: Recipe,
    vocab: int | None,
    stored: ModelConfig | RecurrentConfig | None = None,
    *,
    task: Task | None = None,
    **data_sizes: Any,
) -> ModelConfig | RecurrentConfig:
    """Build the configuration of the model that a recipe trains: a new one, or a stored one with changes.

    vocab: the size of the tokenizer's vocabulary; None if there is no tokenizer.
    stored: the configuration in model.folder; None reads it from there.
    task: a task of your own, which the recipe selects by its name in train.objective.
    data_sizes: sizes that follow from the data, such as `classes` or `image`.
    """
    task = task_of_recipe(recipe, task)
    if "folder" in recipe.model:
        base = open_stored_model(recipe.model["folder"]).config if stored is None else stored
        config = adapt_config(base, task.head, recipe.model, **data_sizes)
    else:
        knobs = {**data_sizes, **recipe.model}
        if vocab is not None and isinstance(size := knobs.setdefault("vocab", vocab), int) and size < vocab:
            raise ConfigError(
                f"model.vocab={size} is less than the {vocab} tokens of the tokenizer; leave out model.vocab"
            )
        try:
            config = _apply_knobs(task, knobs)
        except FieldError as problem:  # name the key that the user wrote, such as model.heads
            raise (problem.with_path("model") if problem.field in recipe.model else problem) from None
    if isinstance(config, ModelConfig):
        if config.head is None or config.head.kind != task.head:
            head = config.head.kind if config.head is not None else "none"
            raise _incompatible_model_error(task, f"{config.family} with the head {head!r}")
        check_family(task, config)
    return config


def _apply_knobs(task: Task, knobs: dict[str, Any]) -> ModelConfig | RecurrentConfig:
    """Build a configuration from knobs, which include a preset or a family.

    A model of one stack gets the head that the task needs, unless the knobs include a head.
    """
    published = preset(str(knobs.pop("preset"))) if "preset" in knobs else None
    family = knobs.pop("family") if published is None else published.family
    one_stack = "encoder-only" if family == "bert" else "decoder-only" if family in DECODERS else family
    if one_stack in task.families and one_stack in NEW_HEADS and task.head != "language_model":
        knobs.setdefault("head", task.head)
    if published is not None:
        return vary(published, **knobs)
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


def _family(recipe: Recipe) -> str:
    """Return the family of the model of a recipe: of a configuration, or the name of the function that builds one."""
    if "family" in recipe.model:
        return str(recipe.model["family"])
    if "preset" in recipe.model:
        return preset(str(recipe.model["preset"])).family
    stored = open_stored_model(recipe.model["folder"]).config
    return stored.family if isinstance(stored, ModelConfig) else "lstm"


def check_family(task: Task, config: ModelConfig | RecurrentConfig) -> None:
    """Raise ConfigError unless the task trains models of the family of `config`; the head is not checked."""
    if isinstance(config, ModelConfig) and config.family not in task.families:
        raise _incompatible_model_error(task, config.family)


def _incompatible_model_error(task: Task, model: str) -> ConfigError:
    advice = "start from such a model"
    if model.startswith("decoder-only") and "encoder-decoder" in task.families:
        advice += ", or prompt this model for labels with monoblock evaluate MODEL DATA --shots 4"
    return ConfigError(
        f"train.objective={task.name!r} trains {' or '.join(task.families)} models with the head {task.head!r}; "
        f"this model is {model}; {advice}"
    )


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
