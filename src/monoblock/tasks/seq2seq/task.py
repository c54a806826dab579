"""Sequence to sequence: translate or transliterate a source into a target."""

from __future__ import annotations

from monoblock.tasks.seq2seq.section import Seq2SeqSection
from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults

SEQ2SEQ = Task(
    name="seq2seq",
    about="translate or transliterate a source into a target",
    build_data=ImportedFunction("seq2seq.data", "build_seq2seq_data"),
    families=("encoder-decoder",),
    corpus_kinds=("pairs",),
    section=Seq2SeqSection,
    special_tokens=ImportedFunction("seq2seq.pairs", "seq2seq_special_tokens"),
    required_tokens=("bos", "pad"),  # a target starts with one of these; T5 uses padding
    prepare_data=ImportedFunction("seq2seq.pairs", "prepare_splits"),
    predict=ImportedFunction("seq2seq.predict", "best_translations"),
    evaluate=ImportedFunction("seq2seq.evaluate", "evaluate_pairs"),
    score_validation=ImportedFunction("seq2seq.evaluate", "score_validation_pairs"),
    metrics=("bleu", "chrf", "accuracy", "cer"),
    decoding="beam_search",
    verb="translate",
    supports_unpadded=True,
    supports_subword_sampling=True,
    defaults=TrainingDefaults(3, 16, 512),
)
