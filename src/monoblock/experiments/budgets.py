"""Budgets that several experiments share: small models that train in a minute or two on a GPU, several at once.

The models are small, so that a step is limited by kernel launches rather than by arithmetic: on a GPU it is recorded as
CUDA graphs, and several arms share the GPU (--jobs 8) with little loss. The seeds of an arm share what is compiled.
"""

from __future__ import annotations

from dataclasses import replace

from monoblock.experiments.experiment import Arm, Experiment
from monoblock.experiments.training import train_and_evaluate

# WikiText-2 by words: 2,000 steps of 8,192 words, eight passes over the corpus.
LANGUAGE_MODEL = (
    *("model.width=256", "model.depth=6", "model.heads=8", "model.hidden=1024", "model.context=256"),
    *("model.dropout=0.2", "model.attention_dropout=0.1", "model.embedding_dropout=0.2", "model.word_dropout=0.0"),
    *("model.head_dropout=0.2", "train.steps=2000", "train.batch=32", "train.lr=1e-3", "train.optimizer=adamw"),
    *("train.warmup=200", "train.weight_decay=0.1", "train.embedding_weight_decay=0.0", "train.ema=0.0"),
    *("train.min_lr_ratio=0.05", "train.compile=graphs", "train.eval_every=500", "train.save_every=0"),
)
# WikiText-2 by 4,096 subwords, so that few of the parameters are those of the embedding.
SUBWORD_MODEL = (*LANGUAGE_MODEL, "tokenizer.kind=bpe", "tokenizer.vocab=4096", "model.vocab=4096")
# Five passes over the corpus: too few to overfit, so dropout only slows these models down.
NO_DROPOUT = tuple(
    f"model.{name}=0.0" for name in ("dropout", "attention_dropout", "embedding_dropout", "head_dropout")
)
LANGUAGE_MODEL_BUDGET = "2,000 steps of 32 blocks of 256 tokens for every arm"
TEXT_STAND_IN = ("data.corpus=kjv", "tokenizer.kind=bpe", "tokenizer.vocab=4096", "model.vocab=4096")
TEXT_SMOKE = (
    *("tokenizer.kind=char", "tokenizer.vocab=64", "model.vocab=64", "model.width=16", "model.heads=2"),
    *("model.depth=2", "model.hidden=32", "model.context=8", "train.steps=3", "train.batch=4", "train.warmup=1"),
    *("train.eval_every=0", "train.optimizer=adamw", "train.compile=no", "train.ema=0.0"),
)
# Multi30k from German to English.
TRANSLATION = (
    *("train.steps=3000", "train.workers=1", "tokenizer.dropout=0.0", "train.eval_every=500"),
    *("train.save_every=0", "train.average_checkpoints=0", "generate.scored_rows=0"),
)
TRANSLATION_STAND_IN = ("data.corpus=kjv-web", "data.max_length=64")
TRANSLATION_SMOKE = (
    *("tokenizer.vocab=60", "tokenizer.dropout=0.0", "model.width=16", "model.heads=2", "model.depth=1"),
    *("model.hidden=32", "train.steps=3", "train.batch=8", "train.compile=no", "train.workers=0", "train.warmup=1"),
    *("train.average_checkpoints=0", "train.save_every=0", "train.eval_every=0"),
    *("generate.max_new_tokens=8", "generate.scored_rows=0"),
)


# Experiments with these language models; `replace` says what is particular to one.
ON_WORDS = Experiment(
    name="",
    claim="",
    source="",
    arms=(),
    rules=(),
    measure=train_and_evaluate,
    recipe="wikitext2",
    changes=LANGUAGE_MODEL,
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=TEXT_SMOKE,
    budget=LANGUAGE_MODEL_BUDGET,
    data="WikiText-2 by words, test split",
    columns=("loss", "perplexity", "validation_loss", "training_loss", "parameters", "seconds_training"),
)
ON_SUBWORDS = replace(ON_WORDS, changes=(*SUBWORD_MODEL, *NO_DROPOUT), data="WikiText-2 by 4,096 subwords, test split")


def sized_arm(depth: int, width: int) -> Arm:
    """Return an arm of this depth and width, with heads of 32 features."""
    sizes = (f"model.depth={depth}", f"model.width={width}", f"model.heads={width // 32}", f"model.hidden={4 * width}")
    return Arm(f"{depth}x{width}", f"{depth} layer{'s' * (depth > 1)} of width {width}", sizes)
