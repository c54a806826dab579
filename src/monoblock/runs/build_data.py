"""Build the data of a recipe: read the corpus, load or train the tokenizer, and let the task build the batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from monoblock.recipes.schema import Recipe
from monoblock.runs.initial_weights import WarmStart
from monoblock.runs.recipe import build_model_config, check_family, is_decoder, is_vision, task_of_recipe
from monoblock.tasks.loaded_model import DECODER_START_KEY
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tasks.task import CorpusSplits, Task
from monoblock.tasks.task_data import TaskData, TaskInputs, special_token_ids
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, TensorBatch
from monoblock.training.events import DecisionEvent, WarningEvent

Notice = DecisionEvent | WarningEvent
TOKENIZER_FILE = "tokenizer.json"
DEFAULT_LSTM_CONTEXT = 64  # length of training blocks for an LSTM, whose context is unlimited
MAX_CLASSES_SHOWN = 5
MAX_UNKNOWN = 0.02  # share of the tokens of the training text that may be unknown
MAX_UNKNOWN_WORDS = 0.2  # the same for a vocabulary of whole words, which leaves out rare words by design
MAX_CHARACTERS, MAX_PARTS, PART_LENGTH = 400_000, 10_000, 4_000  # of the text that is encoded, in parts of a length


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
    notices = list(_describe_splits(splits, recipe))
    splits = task.prepare_data(splits, recipe, data_folder)
    train = splits.train
    if (train.kind == "images") != is_vision(recipe):
        reads = "reads images; give a corpus of images" if is_vision(recipe) else "reads text; write model.family='vit'"
        raise ConfigError(f"the corpus {train.name} is {train.kind}, but this model {reads}")
    tokenizer = None
    if train.kind != "images":
        tokenizer = _find_tokenizer(recipe, task, train, run_folder, start)
        if run_folder is None:  # a resumed run continues with what it was begun with
            is_loaded = recipe.tokenizer.folder is not None or start is not None or train.kind == "tokens"
            notices += _check_unknown_tokens(tokenizer, train, recipe, is_loaded=is_loaded)
    start_id = None if start is None else start.special_tokens.get(DECODER_START_KEY)
    data = task.data(TaskInputs(recipe, context, tokenizer, train, splits.valid, splits.labels, config, start_id))
    data, build = replace(data, content_digests=splits.digests, notices=tuple(notices)), data.build_batch
    if recipe.data.padding != "none" or build is None:
        return data
    if not isinstance(config, ModelConfig):
        raise ConfigError("data.padding=none is for Transformers that read text; leave it out")
    return replace(data, build_batch=lambda batch: build(batch)._replace(unpadded=True))


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


# -- the corpus -------------------------------------------------------------------------------------------------------


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


def _describe_splits(splits: CorpusSplits, recipe: Recipe) -> Iterator[Notice]:
    """Say which rows are held out for validation, and warn of classes that a split lacks."""
    train, valid = splits.train, splits.valid
    if valid is not None and valid.selection:
        if train.kind == "text" and len(train) == len(valid) == 1:
            yield DecisionEvent(f"{valid.selection} is held out for validation", "a running text has no rows to draw")
        else:
            count = f"{len(valid):,} row{'s are' if len(valid) > 1 else ' is'} held out for validation"
            yield DecisionEvent(count, valid.selection)
    elif train.kind == "tagged":
        return  # published corpora of tagged words have tags that are rare
    missing = _missing_classes(train, splits.labels)
    if missing:
        limit = f": data.limit={recipe.data.limit} takes the first rows; raise it, or shuffle the file"
        yield WarningEvent(f"no training row has {missing}{limit if recipe.data.limit else '; it cannot be learned'}")
    missing = "" if valid is None else _missing_classes(valid, splits.labels)
    if missing:
        header = " (if the first line of the file names its columns, call them label and text)"
        labels = [row.label for row in train.rows] if train.kind == "labelled" else []
        hint = header if labels and labels.count(labels[0]) == 1 else ""
        yield WarningEvent(f"no validation row has {missing}; the validation metrics say nothing about it{hint}")


def _missing_classes(corpus: Corpus, labels: Sequence[str]) -> str:
    """Name the classes that no row of a corpus has; "" if there are none."""
    present = set(corpus.labels())
    missing = [label for label in labels if label not in present]
    if not missing:
        return ""
    names = ", ".join(map(repr, missing[:MAX_CLASSES_SHOWN])) + ", …" * (len(missing) > MAX_CLASSES_SHOWN)
    return f"the class {names}" if len(missing) == 1 else f"any of {len(missing)} classes: {names}"


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def _find_tokenizer(
    recipe: Recipe, task: Task, train: Corpus, run_folder: Path | None, start: WarmStart | None
) -> Tokenizer:
    """Return the tokenizer of the run folder or, if there is none, of the stored model that training starts from.

    Without such a model, load the tokenizer in tokenizer.folder or, if that key is not set, that of prepared tokens;
    for a corpus of text, train a new one. Raise FileError if a loaded one lacks the special tokens that the task needs.
    """
    section = recipe.tokenizer
    if run_folder is not None and (run_folder / TOKENIZER_FILE).is_file():
        folder, tokenizer = run_folder, ModelFolder(run_folder).load_tokenizer()
    elif start is not None and start.tokenizer is not None:
        folder, tokenizer = Path(recipe.model["folder"]), start.tokenizer
    elif section.folder or train.kind == "tokens":
        folder = Path(section.folder) if section.folder else train.rows[0].folder
        if section.folder and not (folder / TOKENIZER_FILE).is_file():
            raise FileError(
                f"tokenizer.folder={folder} has no {TOKENIZER_FILE}; "
                "give another folder, or leave tokenizer.folder unset to train a new tokenizer"
            )
        tokenizer = Tokenizer.from_pretrained(folder)
    else:
        return Tokenizer.train(
            section.kind,
            train.texts(),
            section.vocab,
            marker=section.marker,
            specials=task.special_tokens(recipe, train),
            lowercase=section.lowercase,
        )
    reads_last = task.head == "classifier" and is_decoder(recipe)  # not the token at the start
    roles = () if reads_last else task.required_tokens
    present = {*tokenizer.special_tokens_map, *(["sentinels"] if tokenizer.sentinel_ids else [])}
    if roles and present.isdisjoint(roles):
        raise FileError(
            f"the tokenizer in {folder} has no {' or '.join(roles)} token, which train.objective={task.name!r} needs; "
            "give the folder of another tokenizer, or leave tokenizer.folder unset to train a new one"
        )
    return tokenizer


def _check_unknown_tokens(
    tokenizer: Tokenizer, train: Corpus, recipe: Recipe, *, is_loaded: bool
) -> Iterator[DecisionEvent]:
    """Raise ConfigError if too much of the training text is unknown; say so if many words of a word vocabulary are.

    is_loaded: whether the tokenizer was loaded from a folder, and not trained on these texts.
    """
    if train.kind == "tokens":  # they were counted when they were made
        share = train.rows[0].files.unknown / len(train.rows[0])
    else:
        share = unknown_share(tokenizer, list(train.texts()))
    if share <= MAX_UNKNOWN:
        return
    if "folder" in recipe.model:
        remedy = "give a model that was trained on such text, in model.folder"
    elif is_loaded:
        remedy = "leave out tokenizer.folder to train a tokenizer on these texts, or give another one"
    else:
        vocab = recipe.tokenizer.vocab
        remedy = f'raise tokenizer.vocab={vocab}, or write tokenizer.kind="bpe", which knows every character'
    problem = f"{share:.0%} of the tokens of {train.name} are unknown to the tokenizer"
    if share > (MAX_UNKNOWN_WORDS if tokenizer.kind == "word" else MAX_UNKNOWN):
        raise ConfigError(f"{problem} (the limit is {MAX_UNKNOWN:.0%}); {remedy}")
    yield DecisionEvent(problem, f"its vocabulary has whole words only; {remedy}")


def unknown_share(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Return the share of tokens that are unknown, in parts of the texts.

    An unknown token that is written out in a text, as in WikiText, does not count.
    """
    unknown = tokenizer.special_tokens_map.get("unk")
    if tokenizer.unk_id is None or unknown is None:
        return 0.0
    parts, encode = _parts(texts), TagAwareEncoder(tokenizer)
    rows = [encode(part) for part in parts] if encode.tags else tokenizer.encode_batch(parts)
    written = sum(part.count(unknown) for part in parts) if tokenizer.kind == "word" else 0
    count = sum(row.count(tokenizer.unk_id) for row in rows) - written
    return max(0, count) / max(1, sum(map(len, rows)))


def _parts(texts: Sequence[str]) -> list[str]:
    """Return parts of the texts at equal distances, of at most about MAX_CHARACTERS; texts that are short are whole.

    The first and the last word of a part, which may be cut, are left out.
    """
    places = [(text, start) for text in texts for start in range(0, len(text), PART_LENGTH)]
    step = max(1, sum(map(len, texts)) // MAX_CHARACTERS, len(places) // MAX_PARTS)
    parts = []
    for text, start in places[::step]:
        part = text if len(text) <= PART_LENGTH else text[start : start + PART_LENGTH]
        words = part.split(" ") if part is not text else ()
        parts.append(" ".join(words[1:-1]) if len(words) > 2 else part)
    return parts


# -- what is given from Python ----------------------------------------------------------------------------------------

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
