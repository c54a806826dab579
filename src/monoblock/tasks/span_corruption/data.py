"""Training data for span corruption: blocks of running text whose spans are replaced by sentinels."""

from __future__ import annotations

from functools import partial

from monoblock.tasks.language_modeling.data import build_denoising_data
from monoblock.tasks.masked_lm.section import CorruptionSection
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import TaskData, TaskInputs
from monoblock.training.collate import collate_span_corruption


def build_span_corruption_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe: blocks of text with sentinels in place of spans, and the spans as targets.

    As in T5 (Raffel et al. 2020), a target starts with the padding token.
    """
    start, rate = special_token_ids(inputs.text_tokenizer).pad_id, inputs.section(CorruptionSection).mask_rate
    return build_denoising_data(inputs, collate=partial(collate_span_corruption, start=start, rate=rate))
