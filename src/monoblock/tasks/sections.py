"""The sections of a recipe: every key with its default and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monoblock.errors import ConfigError
from monoblock.schema import check, check_at_least, check_fraction, check_positive


@dataclass(frozen=True, kw_only=True)
class AugmentPart:
    """How training images are varied, anew in every epoch; all off unless asked for."""

    shift: int = 0  # by up to so many pixels each way, the gap filled with nothing
    turn: float = 0.0  # by up to so many degrees
    zoom: float = 0.0  # by up to so large a share of the size
    flip: float = 0.0  # left and right exchanged, so often
    cutout: int = 0  # a square of so many pixels blanked out

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 0, "shift", "turn", "cutout")
        check_fraction(self, "zoom", "flip")


@dataclass(frozen=True, kw_only=True)
class TaskPart:
    """A further task of a model that reads and writes text."""

    corpus: str  # of pairs, labelled texts or questions, by name or by path
    prefix: str  # put before each source: "classify:"
    limit: int | None = None  # at most so many training samples

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "limit")


@dataclass(frozen=True, kw_only=True)
class DataPart:
    corpus: str  # a named corpus or a path
    packing: Literal["stream", "documents"] = "stream"  # one endless text, or documents that do not see each other
    limit: int | None = None  # at most so many training samples
    held: int = 0  # so many of the last training rows validate instead; 0: the split `valid`, where there is one
    direction: Literal["forward", "backward", "both"] = "forward"  # pairs: which side is the source
    normalize: Literal["none", "indic"] = "none"  # pairs: one spelling for what looks the same
    tag: Literal["none", "script"] = "none"  # pairs: the source begins with the target's script, as in <2tamil>
    synthetic: str | None = None  # pairs: a file of made ones, such as `monoblock backtranslate` writes
    ratio: float = 1.0  # made pairs for each real one
    prefix: str = ""  # pairs: put before each source, to say what is wanted: "summarize:"
    tasks: tuple[TaskPart, ...] = ()  # pairs: further tasks for the same model, each with its prefix
    stride: int | None = None  # answers: by how many tokens the windows of a long context move on; None: by half of one
    impossible: bool = False  # answers: questions may have none, and the model may say so
    exchange: float = 0.0  # label: a share of the entities are exchanged for others of their kind, in training only
    hide: float = 0.0  # label: a share of the words is hidden, in training only
    capitals: float = 0.0  # label: a share of the rows is in capitals, as headlines are, in training only
    join: int = 1  # label: up to so many neighbouring rows are read together
    longest: int | None = None  # tokens: of a block, of a text (cut), of a side of a pair (left out); None: by context
    augment: AugmentPart = AugmentPart()  # images: how they are varied in training

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "limit", "longest", "join", "stride")
        check_fraction(self, "exchange", "hide", "capitals")
        check_at_least(self, 0, "held")
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
    objective: Literal["causal", "masked", "spans", "pairs", "classify", "label", "answers", "chat"] = "causal"
    steps: int = 1000
    epochs: float | None = None  # so many passes over the data instead; steps follows from it
    batch: int = 16  # sequences in a micro-batch
    tokens: int | None = None  # pairs: tokens in a batch instead, padding included
    accumulate: int = 1  # micro-batches in an update
    lr: float = 1e-3
    schedule: Literal["noam", "constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: float = 100  # steps; below 1, a share of them
    floor: float = 0.1  # the share of lr that is left at the end
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    table_decay: float = 0.0  # weight decay of embeddings; the usual is none
    adam_factor: float = 1.0  # beside Muon: AdamW's rate as a multiple of lr
    layer_decay: float = 1.0  # a layer's rate as a share of that of the layer above it
    freeze: int | None = None  # the embedding and so many first layers stay as they are; None: nothing does
    clip: float = 1.0
    label_smoothing: float = 0.0
    adversarial: float = 0.0  # how far words move to where they are worst, in lengths of a word's vector; 0: nowhere
    balance: float = 0.01  # experts: weight of the load-balancing loss
    mask_rate: float = 0.15
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto", "yes", "no", "graphs"] = "auto"  # graphs: kernels replayed; for batches of one shape
    device: str = "auto"
    deterministic: bool = False
    checkpointing: bool = False  # activations recomputed in backward
    seed: int = 1
    workers: int = 0
    save_every: float = 500  # steps; below 1, a share of them
    eval_every: float = 500
    eval_batches: int = 0  # 0: the whole validation split
    sample_every: int = 0
    keep: int = 3
    ema: float = 0.0
    average: int = 0  # the final model is the mean of so many last checkpoints
    best: bool = False  # the final model is the checkpoint that lost least on the validation split
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
            "adversarial",
            "save_every",
            "eval_every",
            "workers",
            "spike",
        )
        check_fraction(self, "label_smoothing", "ema", "mask_rate")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(f"train.layer_decay={self.layer_decay} is no share; write above 0, and 1 for none")
        if self.adversarial and self.objective not in ("classify", "label", "answers"):
            raise ConfigError(
                f"train.adversarial is for classify, label and answers, not {self.objective}; leave it out"
            )
        if self.average > self.keep:
            raise ConfigError(f"train.average={self.average} checkpoints need train.keep={self.average} or more")


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """Low-rank adapters beside frozen weights (lora.py)."""

    rank: int = 0  # 0: none
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "value")  # ends of names of projections; "all"
    dropout: float = 0.0
    bits: Literal[0, 4, 8] = 0  # the frozen weights in so many bits; 0: as they are

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 0, "rank")
        check_positive(self, "alpha")
        check_fraction(self, "dropout")
        if self.bits and not self.rank:
            raise ConfigError(f"lora.bits={self.bits} stores the weights beside adapters; write lora.rank=8 as well")


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
