"""Classification: predict one label for a text, a pair of texts or an image."""

from __future__ import annotations

from monoblock.tasks.classification.section import ClassificationSection
from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults

CLASSIFICATION = Task(
    name="classification",
    about="predict one label for a text, a pair of texts or an image",
    build_data=ImportedFunction("classification.data", "build_classification_data"),
    head="classifier",
    families=("encoder-only", "decoder-only", "vision"),
    corpus_kinds=("labelled", "images"),
    section=ClassificationSection,
    special_tokens=lambda recipe, train: ["pad", "cls", "sep"],
    required_tokens=("cls",),
    predict=ImportedFunction("classification.predict", "predict_classes"),
    evaluate=ImportedFunction("classification.evaluate", "evaluate_classifier"),
    metrics=("accuracy", "f1", "ece"),
    supports_adversarial=True,
    supports_unpadded=True,
    supports_subword_sampling=True,
    defaults=TrainingDefaults(3, 32, 512),
)
