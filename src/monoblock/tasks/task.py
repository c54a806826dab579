"""The class `Task`, which describes a training objective: its data, models, loss, prediction and evaluation.

Each folder of tasks/ has a task.py with one `Task`; tasks/table.py lists them. To add a task of your own, create a
`Task` and pass it to `mb.train(…, task=…)` and `mb.load(…, task=…)` (docs/tasks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import CorpusKind
from monoblock.recipes.schema import Recipe
from monoblock.tasks.splits import CorpusSplits, load_splits

if TYPE_CHECKING:
    from torch import Tensor, nn

    from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs


class TrainingDefaults(NamedTuple):
    """The hyperparameters of `monoblock finetune` for a task; overrides on the command line replace them."""

    epochs: float
    batch: int
    max_length: int  # maximum number of tokens in a sample; the context of the model may lower it


DEFAULT_TRAINING = TrainingDefaults(3, 16, 512)


@dataclass(frozen=True)
class ImportedFunction:
    """A function of monoblock.tasks that is imported when it is called.

    The rows of the package use it, so that recipes and tasks can be listed without importing torch.
    """

    module: str
    name: str

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(f"monoblock.tasks.{self.module}"), self.name)
        return function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.load()(*args, **options)


def _keep_splits(splits: CorpusSplits, recipe: Recipe, folder: Path | None) -> CorpusSplits:
    return splits


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training objective, such as "seq2seq", with its data, loss, prediction and evaluation.

    name: the value of train.objective in a recipe, and the name of the recipe section with the keys of the task.
    build_data: a function that builds the training and validation batches from `TaskInputs`.
    about: a short description of the task.
    head, families: the kind of head and the model families that the task trains.
    corpus_kinds: the kinds of corpus that the task reads. The kind of a file follows from its suffix; if the suffix is
        ambiguous, the first kind is used.
    section: a frozen dataclass with the keys of the recipe section; None if the task has no keys of its own.
    special_tokens: a function (recipe, training corpus) that returns the special tokens of a new tokenizer.
    required_tokens: roles of special tokens, such as "mask". A tokenizer that is loaded instead of trained must have a
        special token for at least one of these roles.
    load_data: a function that reads the training and the validation corpus of a recipe.
    prepare_data: a function that changes the training and validation rows after data.limit has been applied.
    loss: a function (model, inputs, labels) that returns the loss summed over the targets of a batch; None means
        cross-entropy with the options in the recipe section [train], such as label smoothing.
    classes_are_positions: whether the classes of the cross-entropy are the token positions of an input, as for the
        start and end of an answer, instead of the outputs of the head.
    predict: a function that predicts a list of inputs with a loaded model; `Pipeline.predict` calls it.
    evaluate: a function that computes the metrics of `mb.evaluate` and `monoblock evaluate`.
    score_validation: a function that computes metrics on the first validation rows, for the model card.
    metrics: the names of the main metrics, for `monoblock ls tasks`.
    decoding: how models of the task generate text by default.
    verb: the monoblock command to use a trained model with.
    supports_adversarial: whether train.adversarial can be used.
    supports_unpadded: whether data.padding="none" can be used, with inputs and labels that `remove_padding` knows.
    supports_subword_sampling: whether tokenizer.dropout and tokenizer.alpha can be used (`TaskInputs.sampler`).
    defaults: the default hyperparameters of `monoblock finetune`.
    """

    name: str
    build_data: Callable[[TaskInputs], TaskData]
    about: str = ""
    head: str = "language_model"
    families: tuple[str, ...] = ("decoder-only",)
    corpus_kinds: tuple[CorpusKind, ...] = ("text",)
    section: type | None = None
    special_tokens: Callable[[Recipe, Corpus], Sequence[str]] = lambda recipe, train: ["pad", "cls", "sep"]
    required_tokens: tuple[str, ...] = ()
    load_data: Callable[[Recipe, Sequence[CorpusKind], Path | None], tuple[Corpus, Corpus | None]] = load_splits
    prepare_data: Callable[[CorpusSplits, Recipe, Path | None], CorpusSplits] = _keep_splits
    loss: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor] | None = None
    classes_are_positions: bool = False
    predict: Callable[[LoadedModel, Sequence[Any]], Sequence[Any]] | None = None
    evaluate: Callable[[LoadedModel, EvaluationRequest], Evaluation] | None = None
    score_validation: Callable[[LoadedModel, Sequence[Any], int], dict[str, float]] | None = None
    metrics: tuple[str, ...] = ("loss",)
    decoding: Literal["none", "sampling", "beam_search"] = "none"
    verb: Literal["generate", "translate", "chat", "evaluate"] = "evaluate"
    supports_adversarial: bool = False
    supports_unpadded: bool = False
    supports_subword_sampling: bool = False
    defaults: TrainingDefaults = DEFAULT_TRAINING
