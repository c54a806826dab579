"""Token classification: one label for each word, such as named entities or punctuation."""

from __future__ import annotations

from monoblock.tasks.task import Task, TrainingDefaults
from monoblock.tasks.token_classification.data import build_token_classification_data
from monoblock.tasks.token_classification.evaluate import evaluate_tagger, score_validation_tags
from monoblock.tasks.token_classification.predict import tag_texts
from monoblock.tasks.token_classification.section import TokenClassificationSection

TOKEN_CLASSIFICATION = Task(
    name="token_classification",
    about="one label for each word, such as named entities or punctuation",
    build_data=build_token_classification_data,
    head="tagger",
    families=("encoder-only",),
    corpus_kinds=("tagged",),
    section=TokenClassificationSection,
    special_tokens=lambda recipe, train: ["pad", "cls", "sep", "mask"],
    predict=tag_texts,
    evaluate=evaluate_tagger,
    score_validation=score_validation_tags,
    metrics=("f1", "precision", "recall", "accuracy"),
    supports_adversarial=True,
    defaults=TrainingDefaults(3, 32, 512),
    old_names=("label",),
    old_keys={
        "data.exchange": "replace_entities",
        "data.hide": "mask_words",
        "data.capitals": "uppercase_rows",
        "data.join": "join_rows",
    },
)
