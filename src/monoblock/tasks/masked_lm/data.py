"""Training data for masked language modelling: blocks of running text, or one document per row (documents.py)."""

from __future__ import annotations

from functools import partial

from monoblock.tasks.language_modeling.data import build_denoising_data
from monoblock.tasks.masked_lm.documents import build_masked_document_data
from monoblock.tasks.masked_lm.section import CorruptionSection
from monoblock.tasks.task_data import TaskData, TaskInputs
from monoblock.training.collate import collate_masked_lm


def build_masked_lm_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe, in which masked tokens are predicted (Devlin et al. 2019).

    The inputs are blocks of running text or, with data.packing="documents", single documents.
    """
    if inputs.recipe.data.packing == "documents":
        return build_masked_document_data(inputs)
    collate = partial(collate_masked_lm, rate=inputs.section(CorruptionSection).mask_rate)
    return build_denoising_data(inputs, collate=collate)
