"""The sections of a recipe: every key with its default and its meaning.

A recipe says which model is trained, on which data and how. It is written as TOML (runs/recipe.py reads it) and stored
as recipe.toml in the run folder. A task may add a section of its own, such as [question_answering], which is defined
beside the task.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin

from monoblock.accounting.memory import Optimizer
from monoblock.config.families import bart, bert, gpt, llama, t5, vaswani, vit
from monoblock.config.field_description import REQUIRED, FieldDescription, describe_fields
from monoblock.config.model import ModelConfig
from monoblock.config.presets import preset
from monoblock.config.schema import check_at_least, check_fraction, check_positive, check_types, to_dict, union_members
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
RUN_NAME = re.compile(r"\w[\w .+=,@-]{0,99}")
# [model] has exactly one of these keys; the others in it are knobs.
MODEL_SOURCES = {
    "preset": "the architecture of a published model (monoblock ls presets), with new weights",
    "family": f"a family of architectures, whose sizes are further keys: {', '.join(FAMILIES)}, or lstm",
    "folder": "start from the weights in this run folder, Hugging Face folder or GGUF file",
}


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The data to train on."""

    corpus: str  # the name of a corpus (monoblock ls corpora), or the path of a file or folder
    # train on one running text or on separate documents; contiguous: on a text in order, with the state of an LSTM
    packing: Literal["stream", "contiguous", "documents"] = "stream"
    # pad the texts of a batch to the longest, or store them one after the other: the same losses without padding, and
    # faster with large batches of texts of different lengths on a GPU
    padding: Literal["longest", "none"] = "longest"
    limit: int | None = None  # train on at most this many rows
    # number of training rows to hold out for validation; 0: use the split `valid`, or a tenth of a single file
    validation_rows: int = 0
    split: Literal["random", "last"] = "random"  # which rows are held out: by class, with a fixed seed; or the last
    max_length: int | None = None  # in tokens; longer texts are cut, longer pairs left out; by default the context

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit", "max_length")
        check_at_least(self, 0, "validation_rows")


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """The tokenizer, which is trained on the training data unless `folder` is given."""

    kind: Literal["char", "byte", "word", "bpe", "wordpiece", "unigram"] = "bpe"  # the kind of tokenizer to train
    vocab: int = 4096  # the size of the vocabulary
    marker: str | None = (
        None  # how character-level BPE marks word boundaries, "@@" or "▁"; by default BPE is byte-level
    )
    lowercase: bool = False  # convert texts to lower case
    dropout: float = 0.0  # bpe: probability of skipping a merge, in training (BPE-dropout, Provilkov et al. 2020)
    alpha: float | None = None  # unigram: sample segmentations by probability^alpha, in training (Kudo 2018), as 0.1
    tags: tuple[str, ...] = ()  # further special tokens that are recognized in texts, such as "<bt>"
    folder: str | None = None  # load the tokenizer from this folder instead of training one

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 2, "vocab")
        check_at_least(self, 0, "alpha")
        check_fraction(self, "dropout")

    @property
    def sampling_key(self) -> Literal["dropout", "alpha"] | None:
        """The key that asks for random segmentations of the training texts; None if neither does."""
        return "dropout" if self.dropout else None if self.alpha is None else "alpha"


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """The objective, the optimizer and its schedule, checkpoints and evaluations during training."""

    objective: str = "causal_lm"  # the name of a task (monoblock ls tasks)
    steps: int = 1000  # number of updates
    epochs: float | None = None  # number of passes over the training data; overrides steps
    batch: int = 16  # number of sequences in a micro-batch
    batch_tokens: int | None = None  # seq2seq, text_to_text: tokens in an update, with padding; overrides batch
    accumulate: int = 1  # number of micro-batches in an update
    lr: float = 1e-3  # the peak learning rate; with schedule="noam", a factor on the formula of the paper
    schedule: Literal["noam", "constant", "linear", "cosine", "wsd"] = "cosine"  # how the learning rate falls
    warmup: float = 100  # number of warm-up steps; below 1, a fraction of all steps
    min_lr_ratio: float = 0.1  # the final learning rate as a fraction of lr
    # "muon": Muon for matrices in blocks, AdamW for the rest; "sgd": without momentum
    optimizer: Optimizer = "adamw"
    beta1: float = 0.9  # of Adam: decay of the mean gradient
    beta2: float = 0.95  # of Adam: decay of the mean squared gradient
    eps: float = 1e-8  # of Adam: added to the denominator
    weight_decay: float = 0.1  # weight decay of matrices; embeddings, norms and biases are not decayed
    embedding_weight_decay: float = 0.0  # weight decay of embeddings
    adam_lr_factor: float = 1.0  # with Muon: the learning rate of the weights that AdamW updates, as a multiple of lr
    layer_decay: float = 1.0  # the learning rate of a layer as a fraction of that of the next layer
    freeze_layers: int | None = None  # freeze the embeddings and this many layers from the bottom; by default none
    clip: float = 1.0  # the largest gradient norm; a larger gradient is scaled down to it; 0: no clipping
    label_smoothing: float = 0.0  # share of the target probability that is spread over all classes
    adversarial: float = (
        0.0  # adversarial noise on embeddings, as a fraction of their norm (Miyato et al. 2017); 0: off
    )
    load_balancing: float = 0.01  # for models with experts: the weight of the load-balancing loss
    # "auto": bf16 on a GPU, fp32 on a CPU; "fp8": bf16 with matrix products in 8 bits (Ada, Hopper and newer GPUs)
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    compile: Literal["auto", "yes", "no", "graphs"] = "auto"  # whether to use torch.compile; "graphs": with CUDA graphs
    device: str = "auto"  # such as "cpu" or "cuda"; "auto": a GPU if there is one
    deterministic: bool = False  # use deterministic algorithms, which can be slower
    # Recompute activations in the backward pass to save memory; "selective": only those that are cheap to compute
    activation_checkpointing: bool | Literal["selective"] = False
    parallel: Literal["ddp", "fsdp", "tp", "fsdp+tp", "pp"] = "ddp"  # how several processes share the model
    seed: int = 1  # of the initial weights, the order of the data, dropout and augmentation
    workers: int = 0  # number of processes that prepare batches; 0: the training process prepares them
    save_every: float = 500  # steps between checkpoints; below 1, a fraction of all steps; 0: only at the end
    save_async: bool = False  # write checkpoints while training continues, from a copy in CPU memory
    eval_every: float = 500  # steps between evaluations; below 1, a fraction of all steps; 0: none during training
    eval_batches: int = 0  # number of validation batches in an evaluation; 0: all
    sample_every: int = 0  # steps between texts sampled for the log; 0: none
    keep_checkpoints: int = 3  # number of checkpoints to keep; older ones are deleted
    ema: float = 0.0  # decay of an exponential moving average of the weights, which becomes the model; 0: none
    average_checkpoints: int = 0  # number of last checkpoints whose mean is the final model; 0: no averaging
    load_best: bool = False  # the final model is the checkpoint with the lowest validation loss
    spike_threshold: float = 10.0  # skip an update whose gradient norm is this many times the usual one; 0: never
    max_skipped_updates: int = 5  # after this many skipped updates in a row, return to the last good checkpoint

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
            raise ConfigError(
                f"train.average_checkpoints={count} averages more checkpoints than are kept; "
                f"write train.keep_checkpoints={count} or more"
            )


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Low-rank adapters, which are trained instead of the weights (Hu et al. 2021)."""

    rank: int = 0  # the rank of the adapters; 0: no adapters, all weights are trained
    alpha: float = 16.0  # the output of an adapter is multiplied by alpha / rank
    targets: tuple[str, ...] = ("query", "value")  # projections that get an adapter, by the end of the name; or "all"
    dropout: float = 0.0  # dropout probability of the inputs of an adapter
    bits: Literal[0, 4, 8] = 0  # quantize the frozen weights to this many bits; 0: do not quantize

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
class ParallelSection:
    """Training in several processes; train.parallel chooses the strategy."""

    tensor: int = 0  # tp, fsdp+tp: processes that share every matrix; 0: all, or those of one machine with fsdp+tp
    sequence: bool = False  # tp, fsdp+tp: divide the positions of norms, residuals and dropout among these processes
    reshard_after_forward: bool = True  # fsdp: free the gathered weights of a block after its forward pass
    pipeline: int = 0  # pp: number of stages, each some of the blocks; 0: that of the processes
    microbatches: int = 0  # pp: micro-batches of a step, at least train.accumulate; 0: about two for each stage
    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # pp: alternate forward and backward passes, or forward passes first
    offload: bool = False  # fsdp on GPUs: keep weights, gradients and optimizer states in CPU memory
    timeout: float = 1800.0  # seconds after which a process that waits for another one ends the run

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "timeout")
        check_at_least(self, 0, "tensor", "pipeline", "microbatches")


@dataclass(frozen=True, kw_only=True)
class GenerateSection:
    """How texts are generated during training; the trained model keeps these settings as its defaults."""

    prompt: str = ""  # the text that samples during training continue
    max_new_tokens: int = 120  # maximum number of generated tokens
    temperature: float = 0.8  # sampling temperature; 0: always the most probable token
    top_k: int = 0  # sample from this many most probable tokens; 0: from all
    top_p: float = 0.95  # sample from the most probable tokens whose probabilities add up to this
    num_beams: int = 4  # number of beams, for tasks that decode by beam search
    length_penalty: float = 1.0  # beam search divides the log-probability by the length, or form, to this power
    length_penalty_form: Literal["length", "gnmt"] = "length"  # the length, or (5 + length) / 6 (Wu et al. 2016)
    scored_rows: int = 100  # number of validation rows on which the metrics of the model card are computed; 0: none

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "num_beams", "max_new_tokens")
        check_at_least(self, 0, "scored_rows")

    def new_tokens_within(self, context: int | None) -> int:
        """Return max_new_tokens, or as many as fit in a context after a prompt of one token."""
        return self.max_new_tokens if context is None else min(self.max_new_tokens, max(1, context - 1))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str = "run"  # the name of the run folder in runs/; a file without this key has the name of the file
    about: str = ""  # what the recipe is for, in a sentence
    data: DataSection  # the data to train on
    tokenizer: TokenizerSection = TokenizerSection()  # the tokenizer to train or to load
    model: dict  # one of preset, family and folder, and the knobs to set in it
    train: TrainSection = TrainSection()  # how the model is trained
    lora: LoraSection = LoraSection()  # low-rank adapters
    parallel: ParallelSection = ParallelSection()  # training in several processes
    generate: GenerateSection = GenerateSection()  # how texts are generated
    task: object = None  # the keys of the task; in TOML, the section that has the name of the objective

    def __post_init__(self) -> None:
        check_types(self)
        if not RUN_NAME.fullmatch(self.name):
            raise ConfigError(
                f"name={self.name!r:.60} is not the name of a folder in runs/; write letters, digits, spaces, - and _"
            )
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
    """Raise ConfigError unless [model] has exactly one of the keys preset, family and folder, with a known value.

    A folder need not exist: the recipe of a finished run may outlive the folder that the run started from.
    """
    if sum(name in model for name in MODEL_SOURCES) != 1:
        raise ConfigError("[model] must have exactly one of the keys preset, family and folder; write one of them")
    if "preset" in model:
        preset(str(model["preset"]))
    elif "family" in model:
        family, known = model["family"], ["lstm", *FAMILIES]
        if family not in known:
            raise ConfigError(
                f"model.family={family!r} is not one of {', '.join(known)}{did_you_mean(str(family), known)}"
            )


class SectionDescription(NamedTuple):
    name: str  # such as "train" or "classification.augment"; "" for the keys before the first section
    about: str
    keys: list[FieldDescription]
    is_list: bool = False  # the section may be repeated: [[text_to_text.tasks]]
    task: str = ""  # the objective that has the section; "" if all have it


def list_sections(tasks: Iterable[Any]) -> list[SectionDescription]:
    """Describe all sections: those that every recipe has, then those of the tasks (tasks/task.py)."""
    sections = list(_describe_section("", Recipe, "", is_list=False))
    for task in tasks:
        if task.section is not None:
            own = _describe_section(task.name, task.section, _docstring(task.section), is_list=False)
            sections += [section._replace(task=task.name) for section in own]
    return sections


def _describe_section(name: str, cls: type, about: str, *, is_list: bool) -> Iterator[SectionDescription]:
    """Describe the section of a dataclass, and then one section for each dataclass in it."""
    keys, inner = [], []
    for field in describe_fields(cls):
        path = f"{name}.{field.name}" if name else field.name
        if path == "model":
            sources = [FieldDescription(key, str, REQUIRED, meaning) for key, meaning in MODEL_SOURCES.items()]
            inner.append(
                SectionDescription(path, "The model: exactly one of these keys, and the knobs to set in it.", sources)
            )
        elif part := _inner_dataclass(field.hint):
            about_part = _docstring(part) or field.meaning
            inner += _describe_section(path, part, about_part, is_list=get_origin(field.hint) is tuple)
        elif path != "task":  # in TOML, the keys of the task are in a section with its name
            keys.append(field)
    yield SectionDescription(name, about, keys, is_list)
    yield from inner


def _inner_dataclass(hint: Any) -> type | None:
    members = [get_args(member)[0] if get_origin(member) is tuple else member for member in union_members(hint)]
    return next((member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)), None)


def _docstring(cls: type) -> str:
    """Return the docstring of a section; that which dataclasses write themselves, with the signature, is none."""
    text = inspect.getdoc(cls) or ""
    return "" if text.startswith(f"{cls.__name__}(") else text
