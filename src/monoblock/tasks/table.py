"""The list of tasks, and the task of a recipe, a model or a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from monoblock.data.readers.records import CorpusKind
from monoblock.errors import ConfigError, did_you_mean
from monoblock.tasks.chat.task import CHAT
from monoblock.tasks.classification.task import CLASSIFICATION
from monoblock.tasks.language_modeling.task import CAUSAL_LM
from monoblock.tasks.masked_lm.task import MASKED_LM
from monoblock.tasks.question_answering.task import QUESTION_ANSWERING
from monoblock.tasks.seq2seq.task import SEQ2SEQ
from monoblock.tasks.span_corruption.task import SPAN_CORRUPTION
from monoblock.tasks.task import Task
from monoblock.tasks.text_to_text.task import TEXT_TO_TEXT
from monoblock.tasks.token_classification.task import TOKEN_CLASSIFICATION

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import LoadedModel

# The first task that fits a corpus or a model is the default for it.
TASKS: tuple[Task, ...] = (
    CAUSAL_LM,
    SEQ2SEQ,
    CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    QUESTION_ANSWERING,
    CHAT,
    MASKED_LM,
    SPAN_CORRUPTION,
    TEXT_TO_TEXT,
)


def find_task(name: str, tasks: Iterable[Task] = TASKS) -> Task:
    """Return the task of this name or former name; raise ConfigError for an unknown one."""
    tasks = list(tasks)
    found = next((task for task in tasks if name == task.name), None)
    found = found or next((task for task in tasks if name in task.old_names), None)
    if found is None:
        names = [task.name for task in tasks]
        raise ConfigError(f"the objective {name!r} is not one of {', '.join(names)}{did_you_mean(name, names)}")
    return found


def task_of_model(loaded: LoadedModel) -> Task | None:
    """Return the task to evaluate a model by: that of its head, else of its recipe, else of its family."""
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
    """Return the task that trains a model of this family on this kind of corpus; None if there is none.

    Where no task fits both, return the first that reads the corpus, unless the corpus is text.
    """
    readers = [task for task in TASKS if kind in task.corpus_kinds]
    fallback = readers[0] if readers and kind != "text" else None
    return next((task for task in readers if family in task.families), fallback)
