"""Span corruption: restore spans of running text that were replaced by sentinels (Raffel et al. 2020)."""

from __future__ import annotations

from monoblock.tasks.masked_lm.section import CorruptionSection
from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults

SPAN_CORRUPTION = Task(
    name="span_corruption",
    about="restore spans of running text that were replaced by sentinels",
    build_data=ImportedFunction("span_corruption.data", "build_span_corruption_data"),
    families=("encoder-decoder",),
    section=CorruptionSection,
    special_tokens=lambda recipe, train: ["pad", "eos", "sentinels=100"],
    required_tokens=("sentinels",),
    supports_subword_sampling=True,
    defaults=TrainingDefaults(1, 16, 512),
)
