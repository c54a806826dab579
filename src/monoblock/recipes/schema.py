"""A recipe and its sections: every key with its default and its meaning.

A recipe says which model is trained, on which data and how. It is written as TOML (parse.py reads it) and stored as
recipe.toml in the run folder. A task adds a section of its own, such as [question_answering] (tasks/*/section.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from monoblock.config.families import bart, bert, gpt, llama, t5, vaswani, vit
from monoblock.config.model import ModelConfig
from monoblock.config.presets import preset
from monoblock.config.schema import check_at_least, check_fraction, check_positive, check_types, to_dict
from monoblock.errors import ConfigError, did_you_mean

FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "vaswani": vaswani,
    "t5": t5,
    "bart": bart,
    "vit": vit,
}
MODEL_SOURCES = ("preset", "family", "folder")  # [model] has exactly one of these keys


class TaskKeys(Protocol):
    """The part of a task (tasks/task.py) that a recipe depends on."""

    @property
    def name(self) -> str:
        """The value of train.objective."""

    @property
    def section(self) -> type | None:
        """The dataclass of the recipe section with the name of the task; None if the task has no keys of its own."""

    @property
    def families(self) -> tuple[str, ...]:
        """The model families that the task trains."""

    @property
    def head(self) -> str:
        """The kind of head that the task needs."""

    @property
    def supports_adversarial(self) -> bool:
        """Whether train.adversarial can be used."""

    @property
    def old_names(self) -> tuple[str, ...]:
        """Former values of train.objective that select this task."""

    @property
    def old_keys(self) -> Mapping[str, str]:
        """Former key ("question_answering.stride") to the key in the section of the task ("stride")."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    corpus: str  # a named corpus or a path
    packing: Literal["stream", "documents"] = "stream"  # one running text, or documents that do not see each other
    limit: int | None = None  # use at most this many training rows
    validation_rows: int = 0  # hold out this many last training rows for validation; 0: use the split `valid`, if any
    max_length: int | None = None  # tokens: longer texts are cut, longer pairs left out; None: the model's context

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit", "max_length")
        check_at_least(self, 0, "validation_rows")


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    kind: Literal["char", "byte", "word", "bpe", "wordpiece", "unigram"] = "bpe"
    vocab: int = 4096
    marker: str | None = None  # character-level BPE: "@@" or "▁"
    lowercase: bool = False
    dropout: float = 0.0  # of merges, in training only (BPE-dropout, Provilkov et al. 2020)
    tags: tuple[str, ...] = ()  # further special tokens, recognized in texts: "<bt>"
    folder: str | None = None  # use the tokenizer of this folder instead

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 2, "vocab")
        check_fraction(self, "dropout")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    objective: str = "causal_lm"  # the name of a task (monoblock ls tasks)
    steps: int = 1000
    epochs: float | None = None  # passes over the data; overrides steps
    batch: int = 16  # sequences in a micro-batch
    batch_tokens: int | None = None  # seq2seq, text_to_text: tokens in a micro-batch instead, padding included
    accumulate: int = 1  # micro-batches in an update
    lr: float = 1e-3  # the peak learning rate; with schedule="noam", a factor
    schedule: Literal["noam", "constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: float = 100  # warm-up steps; below 1, a fraction of all steps
    min_lr_ratio: float = 0.1  # the final learning rate as a fraction of lr
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    embedding_weight_decay: float = 0.0
    adam_lr_factor: float = 1.0  # with Muon: the learning rate of AdamW as a multiple of lr
    layer_decay: float = 1.0  # the learning rate of a layer as a fraction of that of the layer above
    freeze_layers: int | None = None  # do not train the embeddings and this many first layers; None: train all
    clip: float = 1.0  # largest norm of the gradient
    label_smoothing: float = 0.0
    adversarial: float = 0.0  # perturb embeddings by this fraction of their norm (Miyato et al. 2017); 0: do not
    load_balancing: float = 0.01  # experts: weight of the load-balancing loss
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto", "yes", "no", "graphs"] = "auto"  # graphs: CUDA graphs, for batches of one shape
    device: str = "auto"
    deterministic: bool = False
    activation_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    seed: int = 1
    workers: int = 0  # processes that prepare batches
    save_every: float = 500  # steps between checkpoints; below 1, a fraction of all steps
    eval_every: float = 500  # steps between evaluations; below 1, a fraction of all steps
    eval_batches: int = 0  # validation batches in an evaluation; 0: all
    sample_every: int = 0  # steps between sampled texts; 0: none
    keep_checkpoints: int = 3  # delete older ones
    ema: float = 0.0  # decay of an exponential moving average of the weights; 0: none
    average_checkpoints: int = 0  # the final model is the mean of this many last checkpoints; 0: the last weights
    load_best: bool = False  # the final model is the checkpoint with the lowest validation loss
    spike_threshold: float = 10.0  # skip an update whose gradient norm is this many times the usual one; 0: never
    max_skipped_updates: int = 5  # after this many skipped updates in a row, return to a checkpoint

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one = ("steps", "batch", "batch_tokens", "accumulate", "keep_checkpoints", "max_skipped_updates")
        check_at_least(self, 1, *at_least_one)
        rates = ("lr", "warmup", "clip", "weight_decay", "embedding_weight_decay", "adversarial")
        check_at_least(self, 0, *rates, "save_every", "eval_every", "workers", "spike_threshold")
        check_fraction(self, "label_smoothing", "ema")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(f"train.layer_decay={self.layer_decay} is not in (0, 1]; write 1 for no decay")
        if self.average_checkpoints > self.keep_checkpoints:
            count = self.average_checkpoints
            raise ConfigError(f"train.average_checkpoints={count} needs train.keep_checkpoints={count} or more")


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Low-rank adapters beside frozen weights (Hu et al. 2021)."""

    rank: int = 0  # 0: no adapters
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "value")  # suffixes of the names of projections, or "all"
    dropout: float = 0.0
    bits: Literal[0, 4, 8] = 0  # of the frozen weights; 0: not quantized

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "rank")
        check_positive(self, "alpha")
        check_fraction(self, "dropout")
        if self.bits and not self.rank:
            raise ConfigError(
                f"lora.bits={self.bits} quantizes the frozen weights, which needs LoRA adapters; also write lora.rank=8"
            )


@dataclass(frozen=True, kw_only=True)
class GenerateSection:
    prompt: str = ""
    max_new_tokens: int = 120
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    num_beams: int = 4  # for tasks that decode by beam search
    length_penalty: float = 1.0
    scored_rows: int = 100  # validation rows to predict for the metrics in the model card; 0: none

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "num_beams", "max_new_tokens")
        check_at_least(self, 0, "scored_rows")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str = "run"
    about: str = ""
    data: DataSection
    tokenizer: TokenizerSection = TokenizerSection()
    model: dict  # a preset, a family or a folder, and the knobs to change in it
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    generate: GenerateSection = GenerateSection()
    task: object = None  # the keys of the task alone: in TOML, the section with the name of the objective

    def __post_init__(self) -> None:
        check_types(self)
        _check_model_source(self.model)

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(_without_none(self.to_tables()))

    def to_tables(self) -> dict[str, Any]:
        """Return the recipe as nested dicts, with the keys of the task under the name of the objective."""
        tables: dict[str, Any] = to_dict(self)
        task = tables.pop("task")
        return tables if task is None else tables | {self.train.objective: task}


def _without_none(value: Any) -> Any:
    """Drop the keys whose value is None, which TOML cannot express."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _check_model_source(model: Mapping[str, Any]) -> None:
    """Raise unless [model] names exactly one preset, family or folder.

    A folder is looked up only when it is read: the recipe of a finished run may outlive the folder it started from.
    """
    if sum(name in model for name in MODEL_SOURCES) != 1:
        raise ConfigError("[model] must have exactly one of the keys preset, family and folder")
    if "preset" in model:
        preset(str(model["preset"]))
    elif "family" in model:
        family, known = model["family"], ["lstm", *FAMILIES]
        if family not in known:
            raise ConfigError(
                f"model.family={family!r} is not one of {', '.join(known)}{did_you_mean(str(family), known)}"
            )
