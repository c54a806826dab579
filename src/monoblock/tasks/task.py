"""The class `Task`, which describes a training objective: its data, models, loss, prediction and evaluation.

A task is a subclass, and tasks/table.py lists those of the package. To add a task of your own, write a subclass and
pass an object of it to `mb.train(…, task=…)` and `mb.load(…, task=…)` (docs/tasks.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.readers.by_path import Holdout
from monoblock.data.readers.records import CorpusKind
from monoblock.errors import InputError
from monoblock.recipes.schema import DataSection, Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs


@dataclass(frozen=True)
class CorpusSplits:
    train: Corpus
    valid: Corpus | None
    labels: list[str]  # all labels of the training rows, before data.limit is applied and rows are held out
    digests: dict[str, str]  # SHA-256 of the content of each split


def holdout_of(section: DataSection) -> Holdout:
    """Return how a recipe holds out rows for validation."""
    return Holdout(section.split, section.validation_rows)


def load_splits(
    recipe: Recipe, kinds: Sequence[CorpusKind], folder: Path | None, *, kind: CorpusKind | None = None
) -> tuple[Corpus, Corpus | None]:
    """Read the training and the validation rows of a recipe.

    The validation rows are `data.validation_rows` of the training rows, chosen as `data.split` says. If that key is 0,
    they are the split `valid`, or a tenth of a single file, or None if the corpus has neither.

    kinds: the kinds of corpus that the task reads.
    folder: the user's folder of corpora.
    kind: the kind of corpus that a path is read as; None infers it from the suffix and `kinds`.
    """
    name = recipe.data.corpus
    kind = kind if kind is not None else infer_corpus_kind(name, tuple(kinds), folder=folder)
    options: dict[str, Any] = {"folder": folder, "kind": kind, "holdout": holdout_of(recipe.data)}
    return load_corpus(name, "train", **options), load_corpus_if_present(name, "valid", **options)


class TrainingDefaults(NamedTuple):
    """The hyperparameters of `monoblock finetune` for a task; overrides on the command line replace them."""

    epochs: float
    batch: int
    max_length: int  # maximum number of tokens in a sample; the context of the model may lower it


class Task:
    """A training objective, such as "seq2seq"; a subclass sets `name` and defines `data`, the rest is optional.

    Modules that define tasks of the package import torch and numpy inside the methods, so that listing recipes and
    tasks is fast.
    """

    name: str  # the value of train.objective, and the name of the recipe section with the keys of the task
    about: str = ""  # a short description
    head: str = "language_model"  # the kind of head that models of the task have
    families: tuple[str, ...] = ("decoder-only",)  # the model families that the task trains
    # The kinds of corpus that the task reads; a file whose suffix suits several is read as the first.
    corpus_kinds: tuple[CorpusKind, ...] = ("text",)
    section: type | None = None  # a frozen dataclass with the keys of the recipe section; None: no keys
    required_tokens: tuple[str, ...] = ()  # a tokenizer that is loaded needs a special token for one of these roles
    classes_are_positions: bool = False  # whether the classes of the cross-entropy are token positions of the input
    metrics: tuple[str, ...] = ("loss",)  # the main metrics, for `monoblock ls tasks`
    decoding: Literal["none", "sampling", "beam_search"] = "none"  # how models of the task generate text by default
    verb: Literal["generate", "translate", "chat", "evaluate"] = "evaluate"  # what to use a trained model with
    supports_adversarial: bool = False  # whether train.adversarial can be used
    supports_unpadded: bool = False  # data.padding="none": `remove_padding` knows the inputs and labels
    supports_subword_sampling: bool = False  # tokenizer.dropout and tokenizer.alpha: `data` uses `TaskInputs.sampler`
    defaults: TrainingDefaults = TrainingDefaults(3, 16, 512)

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build the training and validation batches."""
        raise NotImplementedError(f"the task {self.name!r} has no method data")

    def load_data(self, recipe: Recipe, folder: Path | None, /) -> tuple[Corpus, Corpus | None]:
        """Read the training and the validation corpus of a recipe; `folder` is the user's folder of corpora."""
        return load_splits(recipe, self.corpus_kinds, folder)

    def prepare_data(self, splits: CorpusSplits, recipe: Recipe, folder: Path | None, /) -> CorpusSplits:
        """Change the training and validation rows after data.limit has been applied."""
        return splits

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        """Return the special tokens of a new tokenizer."""
        return ["pad", "cls", "sep"]

    def loss(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, /) -> Tensor:
        """Return the loss summed over the targets of a batch.

        A task without this method is trained by cross-entropy with the options of [train], such as label smoothing.
        """
        raise NotImplementedError

    def predict(self, loaded: LoadedModel, inputs: Sequence[Any], /) -> Sequence[Any]:
        """Return the prediction for each input; `Pipeline.predict` calls this."""
        raise InputError("the task of this model has no method predict; give mb.load the task, or call generate")

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute the metrics of `mb.evaluate` and `monoblock evaluate`."""
        raise InputError(f"evaluate has no metrics for {self.name} models; give another model")

    def score_validation(self, loaded: LoadedModel, rows: Sequence[Any], count: int, /) -> dict[str, float]:
        """Compute metrics on the first `count` validation rows, for the model card."""
        return {}

    @property
    def has_own_loss(self) -> bool:
        return type(self).loss is not Task.loss

    @property
    def scores_validation(self) -> bool:
        """Whether `score_validation` computes anything."""
        return type(self).score_validation is not Task.score_validation
