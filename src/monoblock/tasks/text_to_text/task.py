"""Text to text: one model for several tasks, each named by a prefix of the source (Raffel et al. 2020)."""

from __future__ import annotations

from dataclasses import replace

from monoblock.tasks.seq2seq.task import SEQ2SEQ
from monoblock.tasks.task import ImportedFunction, Task
from monoblock.tasks.text_to_text.section import TEXT_CORPUS_KINDS, TextToTextSection

TEXT_TO_TEXT: Task = replace(
    SEQ2SEQ,
    name="text_to_text",
    about="learn several tasks with one model, each named by a prefix of the source",
    corpus_kinds=TEXT_CORPUS_KINDS,
    section=TextToTextSection,
    load_data=ImportedFunction("text_to_text.data", "load_text_splits"),
    prepare_data=ImportedFunction("text_to_text.data", "prepare_text_splits"),
    evaluate=ImportedFunction("text_to_text.evaluate", "evaluate_text_to_text"),
    score_validation=ImportedFunction("text_to_text.evaluate", "score_validation_texts"),
    metrics=("bleu", "rouge", "accuracy", "f1"),
)
