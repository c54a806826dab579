"""Span corruption: restore spans of running text that were replaced by sentinels (Raffel et al. 2020)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from monoblock.data.corpora.load import Corpus
from monoblock.recipes.schema import Recipe
from monoblock.tasks.masked_lm import CorruptionSection
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from monoblock.tasks.task_data import TaskData, TaskInputs


class SpanCorruption(Task):
    name = "span_corruption"
    about = "restore spans of running text that were replaced by sentinels"
    families = ("encoder-decoder",)
    section = CorruptionSection
    required_tokens = ("sentinels",)
    supports_subword_sampling = True
    defaults = TrainingDefaults(1, 16, 512)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["pad", "eos", "sentinels=100"]

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build blocks of text with sentinels in place of spans, and the spans as targets.

        As in T5, a target starts with the padding token.
        """
        from monoblock.tasks.running_text import build_denoising_data
        from monoblock.training.collate import collate_span_corruption

        start, rate = inputs.special_tokens.pad_id, inputs.section(CorruptionSection).mask_rate
        return build_denoising_data(inputs, collate=partial(collate_span_corruption, start=start, rate=rate))
