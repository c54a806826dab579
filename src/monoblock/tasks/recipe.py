"""A recipe: what is trained on what and how, as TOML with a default for every key.

Command line beats file beats default; a word that means nothing is refused with the nearest one that does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError, FileError, did_you_mean
from monoblock.families import bart, bert, gpt, llama, t5, vaswani, vit
from monoblock.knobs import vary
from monoblock.presets import preset
from monoblock.schema import FieldError, check, check_at_least, check_fraction, check_positive, from_dict, to_dict

FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "vaswani": vaswani,
    "t5": t5,
    "bart": bart,
    "vit": vit,
}
SECTIONS = ("data", "tokenizer", "model", "train", "generate")
OBJECTIVES = ("causal", "masked", "spans", "pairs", "classify", "label")
# Objective -> the kinds of model it trains, and what their head must be.
TRAINS = {
    "causal": (("decoder-only",), "language_model"),
    "masked": (("encoder-only",), "masked_lm"),
    "spans": (("encoder-decoder",), "language_model"),
    "pairs": (("encoder-decoder",), "language_model"),
    "classify": (("encoder-only", "vision"), "classifier"),
    "label": (("encoder-only",), "tagger"),
}


@dataclass(frozen=True, kw_only=True)
class DataPart:
    corpus: str  # a named corpus or a path
    packing: Literal["stream", "documents"] = "stream"  # one endless text, or documents that do not see each other
    limit: int | None = None  # at most so many training samples
    direction: Literal["forward", "backward", "both"] = "forward"  # pairs: which side is the source
    normalize: Literal["none", "indic"] = "none"  # pairs: one spelling for what looks the same
    tag: Literal["none", "script"] = "none"  # pairs: the source begins with the target's script, as in <2tamil>
    synthetic: str | None = None  # pairs: a file of made ones, such as `monoblock backtranslate` writes
    ratio: float = 1.0  # made pairs for each real one
    longest: int | None = None  # pairs: those with more tokens on a side are left out; None: by the model's context

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "limit", "longest")
        check_positive(self, "ratio")


@dataclass(frozen=True, kw_only=True)
class TokenizerPart:
    kind: Literal["char", "byte", "word", "bpe", "wordpiece", "unigram"] = "bpe"
    vocab: int = 4096
    marker: str | None = None  # character-level BPE: "@@" or "▁"
    lowercase: bool = False
    dropout: float = 0.0  # of merges, in training only (BPE-dropout)
    tags: tuple[str, ...] = ()  # further special tokens, read where a text has them: "<bt>"
    folder: str | None = None  # reuse one instead

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 2, "vocab")
        check_fraction(self, "dropout")


@dataclass(frozen=True, kw_only=True)
class TrainPart:
    objective: Literal["causal", "masked", "spans", "pairs", "classify", "label"] = "causal"
    steps: int = 1000
    batch: int = 16  # sequences in a micro-batch
    tokens: int | None = None  # pairs: tokens in a batch instead, padding included
    accumulate: int = 1  # micro-batches in an update
    lr: float = 1e-3
    schedule: Literal["noam", "constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: int = 100
    floor: float = 0.1  # the share of lr that is left at the end
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    table_decay: float = 0.0  # weight decay of embeddings; the usual is none
    adam_factor: float = 1.0  # beside Muon: AdamW's rate as a multiple of lr
    clip: float = 1.0
    label_smoothing: float = 0.0
    balance: float = 0.01  # experts: weight of the load-balancing loss
    mask_rate: float = 0.15
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto", "yes", "no", "graphs"] = "auto"  # graphs: kernels replayed; for batches of one shape
    device: str = "auto"
    deterministic: bool = False
    checkpointing: bool = False  # activations recomputed in backward
    seed: int = 1
    workers: int = 0
    save_every: int = 500
    eval_every: int = 500
    eval_batches: int = 0  # 0: the whole validation split
    sample_every: int = 0
    keep: int = 3
    ema: float = 0.0
    average: int = 0  # the final model is the mean of so many last checkpoints
    spike: float = 10.0  # skip an update whose gradient is so many times the usual; 0: never
    patience: int = 5

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "steps", "batch", "tokens", "accumulate", "keep", "patience")
        check_at_least(
            self,
            0,
            "lr",
            "warmup",
            "clip",
            "weight_decay",
            "table_decay",
            "save_every",
            "eval_every",
            "workers",
            "spike",
        )
        check_fraction(self, "label_smoothing", "ema", "mask_rate")
        if self.average > self.keep:
            raise ConfigError(f"train.average={self.average} checkpoints need train.keep={self.average} or more")


@dataclass(frozen=True, kw_only=True)
class GeneratePart:
    prompt: str = ""
    max_new_tokens: int = 120
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    num_beams: int = 4  # pairs: how targets are searched for
    length_penalty: float = 1.0
    measure: int = 100  # pairs: so many validation sources are translated for the model card; 0: none

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "num_beams", "max_new_tokens")
        check_at_least(self, 0, "measure")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str = "run"
    about: str = ""
    data: DataPart
    tokenizer: TokenizerPart = TokenizerPart()
    model: dict  # preset or family, and knobs
    train: TrainPart = TrainPart()
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
    return value


# -- reading ------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The recipes that come with the package."""
    files = resources.files("monoblock.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def read(name_or_path: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by name or path, with `section.key=value` words applied."""
    data = _table(name_or_path)
    for word in overrides:
        _override(data, word)
    data.setdefault("name", Path(name_or_path).stem)
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
    data.setdefault(section, {})[name] = value(text)


def value(text: str) -> Any:
    """A TOML value, or the text itself: `model.family=gpt` needs no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


# -- the model ----------------------------------------------------------------------------------------------------


def model_config(recipe: Recipe, vocab: int | None, **data_sizes: Any) -> ModelConfig | RecurrentConfig:
    """The configuration a recipe asks for; vocab is the tokenizer's, `data_sizes` (classes, image …) the data's."""
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
    """One preset or one family, and one that there is."""
    if ("preset" in model) == ("family" in model):
        raise ConfigError("[model] names either a preset or a family; write one of the two")
    if "preset" in model:
        preset(str(model["preset"]))
        return
    family, known = model["family"], ["lstm", *FAMILIES]
    if family not in known:
        raise ConfigError(f"model.family={family!r} is none of {', '.join(known)}{did_you_mean(str(family), known)}")


def is_vision(recipe: Recipe) -> bool:
    """Whether the model looks at images, by family or by preset."""
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
    families, head = TRAINS[objective]
    has = config.head.kind if config.head is not None else "none"
    if config.family not in families or has != head:
        raise ConfigError(
            f"train.objective={objective!r} trains {' or '.join(families)} models with the head {head!r}; "
            f"this one is {config.family} with {has!r}"
        )
