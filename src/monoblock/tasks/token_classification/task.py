"""Token classification: predict a label for each word, to find named entities or restore punctuation."""

from __future__ import annotations

from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults
from monoblock.tasks.token_classification.section import TokenClassificationSection

TOKEN_CLASSIFICATION = Task(
    name="token_classification",
    about="predict a label for each word, to find named entities or restore punctuation",
    build_data=ImportedFunction("token_classification.data", "build_token_classification_data"),
    head="tagger",
    families=("encoder-only",),
    corpus_kinds=("tagged",),
    section=TokenClassificationSection,
    special_tokens=lambda recipe, train: ["pad", "cls", "sep", "mask"],
    predict=ImportedFunction("token_classification.predict", "tag_texts"),
    evaluate=ImportedFunction("token_classification.evaluate", "evaluate_tagger"),
    score_validation=ImportedFunction("token_classification.evaluate", "score_validation_tags"),
    metrics=("f1", "precision", "recall", "accuracy"),
    supports_adversarial=True,
    supports_unpadded=True,
    supports_subword_sampling=True,
    defaults=TrainingDefaults(3, 32, 512),
)
