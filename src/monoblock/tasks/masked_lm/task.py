"""Masked language modeling: restore masked tokens (Devlin et al. 2019)."""

from __future__ import annotations

from monoblock.tasks.masked_lm.section import MASKED_LM_CORPUS_KINDS, CorruptionSection
from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults

MASKED_LM = Task(
    name="masked_lm",
    about="restore masked tokens",
    build_data=ImportedFunction("masked_lm.data", "build_masked_lm_data"),
    head="masked_lm",
    families=("encoder-only",),
    corpus_kinds=MASKED_LM_CORPUS_KINDS,
    section=CorruptionSection,
    special_tokens=lambda recipe, train: ["pad", "cls", "sep", "mask"],
    required_tokens=("mask",),
    predict=ImportedFunction("masked_lm.predict", "fill_masks"),
    evaluate=ImportedFunction("masked_lm.evaluate", "evaluate_masked_lm"),
    metrics=("loss", "perplexity", "accuracy"),
    supports_unpadded=True,
    supports_subword_sampling=True,
    defaults=TrainingDefaults(3, 32, 128),
)
