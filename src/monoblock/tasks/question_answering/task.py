"""Extractive question answering: mark the start and end of the answer in a context (Rajpurkar et al. 2016)."""

from __future__ import annotations

from monoblock.tasks.question_answering.section import QuestionAnsweringSection
from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults

QUESTION_ANSWERING = Task(
    name="question_answering",
    about="mark the start and end of the answer in a context",
    build_data=ImportedFunction("question_answering.data", "build_question_answering_data"),
    head="spans",
    families=("encoder-only",),
    corpus_kinds=("questions",),
    section=QuestionAnsweringSection,
    special_tokens=lambda recipe, train: ["pad", "cls", "sep", "mask"],
    required_tokens=("cls",),
    classes_are_positions=True,
    predict=ImportedFunction("question_answering.predict", "best_answers"),
    evaluate=ImportedFunction("question_answering.evaluate", "evaluate_question_answering"),
    score_validation=ImportedFunction("question_answering.evaluate", "score_validation_answers"),
    metrics=("f1", "exact_match"),
    supports_adversarial=True,
    defaults=TrainingDefaults(2, 16, 384),
)
