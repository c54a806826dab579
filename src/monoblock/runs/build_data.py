"""Build the data of a recipe: read the corpus, load or train the tokenizer, and let the task build the batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.data.corpora.load import Corpus, fingerprint_rows
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.model_folder import ModelFolder
from monoblock.model import Transformer
from monoblock.recipes.model_config import check_family, is_decoder, is_vision
from monoblock.recipes.schema import Recipe
from monoblock.runs.generation_config import DECODER_START_KEY
from monoblock.runs.recipe import build_model_config, task_of_recipe
from monoblock.runs.warm_start import WarmStart
from monoblock.tasks.splits import CorpusSplits, describe_splits
from monoblock.tasks.table import TASKS
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData, TaskInputs, special_token_ids
from monoblock.tasks.tokenizer_checks import check_required_tokens, check_unknown_tokens, requested_key
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, TensorBatch
from monoblock.training.events import DecisionEvent, WarningEvent

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_LSTM_CONTEXT = 64  # length of training blocks for an LSTM, whose context is unlimited


def build_task_data(
    recipe: Recipe,
    context: int | None,
    *,
    task: Task | None = None,
    config: ModelConfig | RecurrentConfig | None = None,
    data_folder: Path | None = None,
    run_folder: Path | None = None,
    start: WarmStart | None = None,
) -> TaskData:
    """Read the corpus of a recipe and prepare its training and validation batches.

    context: the context of the model in tokens; None means no limit.
    task: a task of your own, which the recipe selects by its name in train.objective.
    config: the result of `expected_config`; None computes it.
    data_folder: the user's folder of corpora.
    run_folder: the folder of a resumed run, whose tokenizer is used.
    start: the stored model that training starts from, if any.
    """
    task = task_of_recipe(recipe, task)
    config = expected_config(recipe, task, start) if config is None else config
    splits = _load_splits(recipe, task, data_folder, start)
    notices: tuple[DecisionEvent | WarningEvent, ...] = tuple(describe_splits(splits, recipe))
    splits = task.prepare_data(splits, recipe, data_folder)
    _check_modality(recipe, splits.train)
    tokenizer = None
    if splits.train.kind != "images":
        tokenizer = find_tokenizer(recipe, task, splits.train, run_folder, start)
        _check_subword_sampling(recipe, task)
        if run_folder is None:  # a resumed run continues with what it was begun with
            is_loaded = recipe.tokenizer.folder is not None or start is not None or splits.train.kind == "tokens"
            notices += tuple(check_unknown_tokens(tokenizer, splits.train, recipe, is_loaded=is_loaded))
    start_id = None if start is None else start.special_tokens.get(DECODER_START_KEY)
    inputs = TaskInputs(recipe, context, tokenizer, splits.train, splits.valid, splits.labels, config, start_id)
    data = replace(task.data(inputs), content_digests=splits.digests, notices=notices)
    return _without_padding(data, config) if recipe.data.padding == "none" else data


def _without_padding(data: TaskData, config: ModelConfig | RecurrentConfig | None) -> TaskData:
    """Return the same data with training batches whose padding is removed."""
    if not isinstance(config, ModelConfig):
        raise ConfigError("data.padding=none is for Transformers that read text; leave it out")
    build = data.build_batch
    return data if build is None else replace(data, build_batch=lambda batch: build(batch)._replace(unpadded=True))


def expected_config(recipe: Recipe, task: Task, start: WarmStart | None) -> ModelConfig | RecurrentConfig | None:
    """Return the configuration of the model as far as it is known before the data are read.

    The size of the vocabulary and the number of classes are placeholders. Return None for a new vision model, which
    depends on the size of the images.
    """
    if start is not None:
        check_family(task, start.config)
        return start.config
    if is_vision(recipe):
        return None
    sizes: dict[str, Any] = {"classes": 2} if task.head in HEADS_WITH_CLASSES else {}
    return build_model_config(recipe, 3, task=task, **sizes)


def model_context(recipe: Recipe, config: ModelConfig | RecurrentConfig | None, start: WarmStart | None) -> int | None:
    """Return the context of the model in tokens; None means no limit."""
    if config is None:
        return None
    context = config.context if isinstance(config, ModelConfig) else DEFAULT_LSTM_CONTEXT
    if start is not None or isinstance(config, RecurrentConfig):
        return recipe.model.get("context", context)
    return context


def _load_splits(recipe: Recipe, task: Task, data_folder: Path | None, start: WarmStart | None) -> CorpusSplits:
    """Read the training rows, up to data.limit, and the validation rows."""
    train, valid = task.load_data(recipe, data_folder)
    if train.kind not in task.corpus_kinds:
        kinds = " or ".join(task.corpus_kinds)
        raise ConfigError(
            f"train.objective={task.name!r} needs {kinds}, but the corpus {train.name} is {train.kind}; "
            "give another corpus or another objective"
        )
    # The labels of all rows, before data.limit is applied: no class is lost, wherever a rare label was drawn to.
    held_out = valid.rows if valid is not None and valid.selection else []
    labels = replace(train, rows=[*train.rows, *held_out]).labels()
    if start is not None and start.keeps_head(task.head, recipe.model):
        labels = start.match_labels(labels)
    if train.kind == "tokens" and recipe.data.limit is not None:
        raise ConfigError(f"data.limit counts texts, but {train.name} holds tokens; leave it out")
    digests = {corpus.split: fingerprint_rows(corpus) for corpus in (train, valid) if corpus is not None}
    train = replace(train, rows=train.rows[: recipe.data.limit])
    return CorpusSplits(train, valid, labels, digests)


def _check_subword_sampling(recipe: Recipe, task: Task) -> None:
    """Raise ConfigError if the recipe asks for random segmentations, and the task cannot use them."""
    key = requested_key(recipe.tokenizer)
    if key is not None and not task.supports_subword_sampling:
        names = ", ".join(known.name for known in TASKS if known.supports_subword_sampling)
        raise ConfigError(f"{key} is for {names}, not {task.name}; leave it out")


def _check_modality(recipe: Recipe, train: Corpus) -> None:
    """Raise ConfigError unless the corpus has images for a vision model, or text for any other model."""
    if (train.kind == "images") != is_vision(recipe):
        reads = "reads images; give a corpus of images" if is_vision(recipe) else "reads text; write model.family='vit'"
        raise ConfigError(f"the corpus {train.name} is {train.kind}, but this model {reads}")


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def find_tokenizer(
    recipe: Recipe, task: Task, train: Corpus, run_folder: Path | None, start: WarmStart | None = None
) -> Tokenizer:
    """Return the tokenizer of the run folder or, if there is none, of the stored model that training starts from.

    Without such a model, load the tokenizer in tokenizer.folder or, if that key is not set, that of prepared tokens;
    for a corpus of text, train a new one.
    """
    section = recipe.tokenizer
    reads_last = task.head == "classifier" and is_decoder(recipe)  # not the token at the start
    roles = () if reads_last else task.required_tokens
    if run_folder is not None and (run_folder / TOKENIZER_FILE).is_file():
        return check_required_tokens(ModelFolder(run_folder).load_tokenizer(), roles, task.name, run_folder)
    if start is not None and start.tokenizer is not None:
        return check_required_tokens(start.tokenizer, roles, task.name, Path(recipe.model["folder"]))
    if section.folder:
        folder = Path(section.folder)
        if not (folder / TOKENIZER_FILE).is_file():
            raise FileError(
                f"tokenizer.folder={folder} has no {TOKENIZER_FILE}; "
                "give another folder, or leave tokenizer.folder unset to train a new tokenizer"
            )
        return check_required_tokens(Tokenizer.from_pretrained(folder), roles, task.name, folder)
    if train.kind == "tokens":
        folder = train.rows[0].folder
        return check_required_tokens(Tokenizer.from_pretrained(folder), roles, task.name, folder)
    return Tokenizer.train(
        section.kind,
        train.texts(),
        section.vocab,
        marker=section.marker,
        specials=task.special_tokens(recipe, train),
        lowercase=section.lowercase,
    )


Batch = tuple[dict[str, Tensor], Tensor]  # keyword arguments of the model, and labels; -100 means no label

OPTIMIZER_ADVICE = (
    "write optimizer=lambda model: torch.optim.AdamW(model.parameters()), or set train.optimizer in the recipe"
)


@dataclass(frozen=True)
class CustomParts:
    """The parts of a run that a recipe cannot describe; they are arguments of `mb.train`."""

    task: Task | None = None
    model_class: type[Transformer] = Transformer
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    batches: Iterable[Batch] | None = None
    validation_batches: Iterable[Batch] | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.task is not None and not isinstance(self.task, Task):
            raise InputError(
                f"task={self.task!r:.60} is not an object of a subclass of mb.Task; give task=MyTask(), or name a "
                "task of the package in train.objective"
            )
        if not (isinstance(self.model_class, type) and issubclass(self.model_class, Transformer)):
            raise InputError(f"model_class={self.model_class!r:.60} is not a class; give a subclass of mb.Transformer")
        is_torch_class = isinstance(self.optimizer, type) and self.optimizer.__module__.startswith("torch.")
        if self.optimizer is not None and (is_torch_class or not callable(self.optimizer)):
            raise InputError(f"optimizer={self.optimizer!r:.60} is not a function of the model; {OPTIMIZER_ADVICE}")
        for name, batches in (("batches", self.batches), ("validation_batches", self.validation_batches)):
            if batches is not None and not isinstance(batches, Iterable):
                raise InputError(f"{name}={batches!r:.60} is not iterable; give a list of pairs (inputs, labels)")

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that the user's function builds for a model."""
        assert self.optimizer is not None
        optimizer = self.optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"the function optimizer returned {type(optimizer).__name__}, not a torch optimizer; {OPTIMIZER_ADVICE}"
            )
        return optimizer


NO_CUSTOM_PARTS = CustomParts()


def build_custom_data(parts: CustomParts, start: WarmStart | None) -> TaskData:
    """Return the data of a run that trains on the user's batches."""
    assert parts.batches is not None
    if parts.validation_batches is not None and iter(parts.validation_batches) is parts.validation_batches:
        raise ConfigError("validation_batches are read several times, and an iterator only once; give a list instead")
    tokenizer = parts.tokenizer if parts.tokenizer is not None or start is None else start.tokenizer
    batches, validation = parts.batches, parts.validation_batches
    count = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    return TaskData(
        tokenizer,
        SpecialTokenIds() if tokenizer is None else special_token_ids(tokenizer),
        None,
        None,
        None if validation is None else lambda: (to_tensor_batch(batch, 0, "validation") for batch in validation),
        summary="batches given from Python" if count is None else f"{count:,} batches given from Python",
        batches=lambda step: repeat_batches(batches, step),
        unit="targets",
    )


def repeat_batches(batches: Iterable[Batch], start: int) -> Iterator[TensorBatch]:
    """Yield the user's batches from step `start` on; after the last batch, continue with the first."""
    step = 0
    for epoch in itertools.count():
        before = step
        for batch in batches:
            if step >= start:
                yield to_tensor_batch(batch, epoch, f"batch {step}")
            step += 1
        if step == before:
            problem = "are empty" if step == 0 else f"ended after {step:,} and cannot be read again"
            raise InputError(f"the batches {problem}; give a list, or lower train.steps")


def to_tensor_batch(batch: Batch, epoch: int, name: str) -> TensorBatch:
    """Convert a batch of the user to a `TensorBatch`; raise InputError if it is not a pair (inputs, labels).

    name: what error messages call the batch.
    """
    inputs, labels = batch if isinstance(batch, tuple) and len(batch) == 2 else (None, None)
    if not (isinstance(inputs, dict) and isinstance(labels, Tensor)):
        raise InputError(
            f"{name} is not a pair (inputs, labels); give a dict of tensors for the model, and a tensor of labels"
        )
    return TensorBatch(inputs, labels, epoch, list(range(len(labels))))
