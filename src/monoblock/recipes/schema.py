"""A recipe and its sections: every key with its default and its meaning.

A recipe says what is trained, on what and how. It is written as TOML (parse.py reads it) and stored as recipe.toml in
the folder of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from monoblock.config.families import bart, bert, gpt, llama, t5, vaswani, vit
from monoblock.config.model import ModelConfig
from monoblock.config.presets import preset
from monoblock.config.schema import check_at_least, check_fraction, check_positive, check_types, to_dict
from monoblock.errors import ConfigError, did_you_mean

Objective = Literal["causal", "masked", "spans", "pairs", "classify", "label", "answers", "chat"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
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


class ObjectiveRequirements(NamedTuple):
    """The model families that an objective can train, and the kind of head it needs."""

    families: tuple[str, ...]
    head: str


OBJECTIVE_REQUIREMENTS = {
    "causal": ObjectiveRequirements(("decoder-only",), "language_model"),
    "masked": ObjectiveRequirements(("encoder-only",), "masked_lm"),
    "spans": ObjectiveRequirements(("encoder-decoder",), "language_model"),
    "pairs": ObjectiveRequirements(("encoder-decoder",), "language_model"),
    "classify": ObjectiveRequirements(("encoder-only", "vision"), "classifier"),
    "label": ObjectiveRequirements(("encoder-only",), "tagger"),
    "answers": ObjectiveRequirements(("encoder-only",), "spans"),
    "chat": ObjectiveRequirements(("decoder-only",), "language_model"),
}


@dataclass(frozen=True, kw_only=True)
class AugmentSection:
    """Augmentation of training images, drawn anew in every epoch; off by default."""

    shift: int = 0  # up to so many pixels in each direction, filled with zeros
    turn: float = 0.0  # up to so many degrees
    zoom: float = 0.0  # up to this fraction of the size
    flip: float = 0.0  # probability of a horizontal flip
    cutout: int = 0  # side in pixels of a square that is blanked out

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "shift", "turn", "cutout")
        check_fraction(self, "zoom", "flip")


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """A task that a text-to-text model learns besides that of data.corpus."""

    corpus: str  # of pairs, labelled texts or questions: a named corpus or a path
    prefix: str  # put before each source: "classify:"
    limit: int | None = None  # at most so many training samples

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    corpus: str  # a named corpus or a path
    packing: Literal["stream", "documents"] = "stream"  # one running text, or documents that do not see each other
    limit: int | None = None  # at most so many training samples
    held: int = 0  # the last so many training rows are the validation split; 0: the split `valid`, if there is one
    direction: Literal["forward", "backward", "both"] = "forward"  # pairs: which side is the source
    normalize: Literal["none", "indic"] = "none"  # pairs: unify spellings that look the same
    tag: Literal["none", "script"] = "none"  # pairs: the source begins with the script of the target, as in <2tamil>
    synthetic: str | None = None  # pairs: a file of synthetic ones, such as `monoblock backtranslate` writes
    ratio: float = 1.0  # synthetic pairs for each real one
    prefix: str = ""  # pairs: put before each source to name the task: "summarize:"
    tasks: tuple[TaskSection, ...] = ()  # pairs: further tasks of the same model, each with its prefix
    stride: int | None = None  # answers: tokens between the windows of a long context; None: half a window
    impossible: bool = False  # answers: questions may have no answer
    exchange: float = 0.0  # label: fraction of the entities replaced by others of their type, in training only
    hide: float = 0.0  # label: fraction of the words replaced by the mask token, in training only
    capitals: float = 0.0  # label: fraction of the rows in upper case, as in headlines, in training only
    join: int = 1  # label: up to so many neighbouring rows in one sample
    longest: int | None = None  # tokens of a block, a text (truncated) or a side of a pair (left out); None: context
    augment: AugmentSection = AugmentSection()  # images

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit", "longest", "join", "stride")
        check_fraction(self, "exchange", "hide", "capitals")
        check_at_least(self, 0, "held")
        check_positive(self, "ratio")


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
    objective: Objective = "causal"
    steps: int = 1000
    epochs: float | None = None  # passes over the data; overrides steps
    batch: int = 16  # sequences in a micro-batch
    tokens: int | None = None  # pairs: tokens in a micro-batch instead, padding included
    accumulate: int = 1  # micro-batches in an update
    lr: float = 1e-3
    schedule: Literal["noam", "constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: float = 100  # steps; below 1, a fraction of them
    floor: float = 0.1  # the final learning rate as a fraction of lr
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    table_decay: float = 0.0  # weight decay of embeddings
    adam_factor: float = 1.0  # with Muon: the learning rate of AdamW as a multiple of lr
    layer_decay: float = 1.0  # the learning rate of a layer as a fraction of that of the layer above
    freeze: int | None = None  # the embeddings and so many first layers are not trained; None: all are
    clip: float = 1.0  # largest norm of the gradient
    label_smoothing: float = 0.0
    adversarial: float = 0.0  # size of the perturbation of embeddings, relative to their norm; 0: none
    balance: float = 0.01  # experts: weight of the load-balancing loss
    mask_rate: float = 0.15
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto", "yes", "no", "graphs"] = "auto"  # graphs: CUDA graphs, for batches of one shape
    device: str = "auto"
    deterministic: bool = False
    checkpointing: bool = False  # recompute activations in the backward pass
    seed: int = 1
    workers: int = 0
    save_every: float = 500  # steps; below 1, a fraction of them
    eval_every: float = 500  # as save_every
    eval_batches: int = 0  # 0: the whole validation split
    sample_every: int = 0  # steps between sampled texts; 0: none
    keep: int = 3  # checkpoints
    ema: float = 0.0  # decay of an exponential moving average of the weights; 0: none
    average: int = 0  # the final model is the mean of so many last checkpoints
    best: bool = False  # the final model is the checkpoint with the lowest validation loss
    spike: float = 10.0  # skip an update whose gradient norm is so many times the usual; 0: never
    patience: int = 5  # skipped updates in a row before training returns to a checkpoint

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one = ("steps", "batch", "tokens", "accumulate", "keep", "patience")
        check_at_least(self, 1, *at_least_one)
        rates = ("lr", "warmup", "clip", "weight_decay", "table_decay", "adversarial")
        check_at_least(self, 0, *rates, "save_every", "eval_every", "workers", "spike")
        check_fraction(self, "label_smoothing", "ema", "mask_rate")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(f"train.layer_decay={self.layer_decay} is not in (0, 1]; write 1 for no decay")
        if self.adversarial and self.objective not in ("classify", "label", "answers"):
            raise ConfigError(
                f"train.adversarial is for classify, label and answers, not {self.objective}; leave it out"
            )
        if self.average > self.keep:
            raise ConfigError(f"train.average={self.average} checkpoints need train.keep={self.average} or more")


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
            raise ConfigError(f"lora.bits={self.bits} quantizes the weights beside adapters; write lora.rank=8 as well")


@dataclass(frozen=True, kw_only=True)
class GenerateSection:
    prompt: str = ""
    max_new_tokens: int = 120
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    num_beams: int = 4  # pairs
    length_penalty: float = 1.0
    measure: int = 100  # pairs: validation sources to translate for the model card; 0: none

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "num_beams", "max_new_tokens")
        check_at_least(self, 0, "measure")


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

    def __post_init__(self) -> None:
        check_types(self)
        _check_model_source(self.model)

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(_without_none(to_dict(self)))


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
