"""The list of tasks, and functions that choose the task for a name, a model or a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from monoblock.data.readers.records import CorpusKind
from monoblock.errors import ConfigError, did_you_mean
from monoblock.tasks.causal_lm import CausalLM
from monoblock.tasks.chat import ChatTask
from monoblock.tasks.classification import Classification
from monoblock.tasks.masked_lm import MaskedLM, SpanCorruption
from monoblock.tasks.question_answering import QuestionAnswering
from monoblock.tasks.seq2seq import Seq2Seq
from monoblock.tasks.task import Task
from monoblock.tasks.text_to_text import TextToText
from monoblock.tasks.token_classification import TokenClassification

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import LoadedModel

# If several tasks fit a corpus or a model, the first in this order is used.
TASKS: tuple[Task, ...] = (
    CausalLM(),
    Seq2Seq(),
    Classification(),
    TokenClassification(),
    QuestionAnswering(),
    ChatTask(),
    MaskedLM(),
    SpanCorruption(),
    TextToText(),
)


def find_task(name: str, tasks: Iterable[Task] = TASKS) -> Task:
    """Return the task with this name; raise ConfigError if there is none."""
    tasks = list(tasks)
    found = next((task for task in tasks if name == task.name), None)
    if found is None:
        names = [task.name for task in tasks]
        raise ConfigError(f"the objective {name!r} is not one of {', '.join(names)}{did_you_mean(name, names)}")
    return found


def task_of_model(loaded: LoadedModel) -> Task | None:
    """Return the task by which a model is evaluated; None if there is none.

    A task that is not in the package comes first, then the kind of head decides. Several tasks train language models:
    for these, return the task of the training recipe or, without one, the first task for the family of the model.
    """
    own: Task | None = getattr(loaded, "task", None)  # of a Pipeline
    if own is not None:
        return own
    config = loaded.model.config
    head = getattr(config, "head", None)
    kind = "" if head is None else head.kind
    if kind not in ("", "language_model"):
        by_head = next((task for task in TASKS if task.head == kind), None)
        if by_head is not None:
            return by_head
    by_recipe = next((task for task in TASKS if task.name == loaded.objective), None)
    kind = kind or "language_model"  # LSTMs have no head configuration
    return by_recipe or next((task for task in TASKS if config.family in task.families and kind == task.head), None)


def task_of_corpus(kind: CorpusKind, family: str) -> Task | None:
    """Return the first task that reads this kind of corpus and trains models of this family.

    If there is none, return the first task that reads the corpus; for text, return None.
    """
    readers = [task for task in TASKS if kind in task.corpus_kinds]
    fallback = readers[0] if readers and kind != "text" else None
    return next((task for task in readers if family in task.families), fallback)
