"""Sequence to sequence: translate or transliterate a source into a target."""

from __future__ import annotations

from monoblock.tasks.seq2seq.data import build_seq2seq_data
from monoblock.tasks.seq2seq.evaluate import evaluate_pairs, score_validation_pairs
from monoblock.tasks.seq2seq.pairs import prepare_splits, seq2seq_special_tokens
from monoblock.tasks.seq2seq.predict import best_translations
from monoblock.tasks.seq2seq.section import Seq2SeqSection
from monoblock.tasks.task import Task, TrainingDefaults

SEQ2SEQ_OLD_KEYS = {
    "data.direction": "direction",
    "data.normalize": "normalize",
    "data.tag": "tag",
    "data.synthetic": "synthetic",
    "data.ratio": "synthetic_ratio",
}
SEQ2SEQ = Task(
    name="seq2seq",
    about="translate or transliterate a source into a target",
    build_data=build_seq2seq_data,
    families=("encoder-decoder",),
    corpus_kinds=("pairs",),
    section=Seq2SeqSection,
    special_tokens=seq2seq_special_tokens,
    required_tokens=("bos", "pad"),  # the start of a target; T5 starts with padding
    prepare_data=prepare_splits,
    predict=best_translations,
    evaluate=evaluate_pairs,
    score_validation=score_validation_pairs,
    metrics=("bleu", "chrf", "accuracy", "cer"),
    decoding="beam_search",
    verb="translate",
    defaults=TrainingDefaults(3, 16, 512),
    old_names=("pairs",),
    old_keys=SEQ2SEQ_OLD_KEYS,
)
