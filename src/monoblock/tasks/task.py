"""A task as one row: what it reads, which models it trains, and how these are trained, used and evaluated.

Each folder of tasks/ has a task.py with one `Task`; tasks/table.py lists them. A task of your own is another `Task`,
given to `mb.train(…, task=…)` and `mb.load(…, task=…)` (docs/tasks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """What `monoblock finetune` trains with unless told otherwise."""

    epochs: float
    batch: int
    max_length: int  # tokens in a sample, if the context of the model allows


DEFAULT_TRAINING = TrainingDefaults(3, 16, 512)


def imported(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `name` from a module of monoblock.tasks when it is called.

    The rows of the package use it, so that recipes and tasks can be listed without torch.
    """

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"monoblock.tasks.{module}"), name)(*args, **options)

    call.__name__ = name
    return call


def _keep_splits(splits: CorpusSplits, recipe: Recipe, folder: Path | None) -> CorpusSplits:
    return splits


@dataclass(frozen=True, kw_only=True)
class Task:
    """One objective, such as "seq2seq": data, loss, prediction and evaluation.

    name: the value of train.objective in a recipe, and the name of the recipe section with the keys of the task.
    build_data: builds the training and validation batches from `TaskInputs`.
    head, families: the kind of head and the model families that the task trains.
    corpus_kinds: the kinds of corpus that it reads. A file is read by its suffix, or else as the first kind.
    section: a frozen dataclass with the keys of the recipe section; None if the task has no keys of its own.
    special_tokens: the special tokens of a tokenizer that is trained for the task.
    required_tokens: special tokens of which a given tokenizer must have at least one.
    load_data: reads the training and the validation corpus of a recipe.
    prepare_data: changes the rows after data.limit was applied.
    loss: a function (model, inputs, labels) that returns the loss summed over the targets of a batch; None is
        cross-entropy with the options of [train].
    classes_are_positions: the cross-entropy is over the positions of a row instead of the outputs of the head.
    predict: predicts a list of inputs with a loaded model; `Pipeline.predict` calls it.
    evaluate: computes the metrics of `mb.evaluate` and `monoblock evaluate`.
    score_validation: computes metrics of the first validation rows for the model card.
    metrics: the names of the main metrics, for `monoblock ls tasks`.
    decoding: how models of the task generate text by default.
    verb: the command that uses a trained model.
    supports_adversarial: whether train.adversarial can be used.
    defaults: what `monoblock finetune` trains with.
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
    defaults: TrainingDefaults = DEFAULT_TRAINING
    old_names: tuple[str, ...] = ()
    old_keys: Mapping[str, str] = field(default_factory=dict)
