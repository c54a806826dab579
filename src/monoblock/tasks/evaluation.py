"""How good a model is on a corpus, by its task: TASKS says what is measured for which objective.

Figures go by the words of the command line: loss, perplexity, bits_per_byte, bleu, bleu_tokenized, chrf, cer, accuracy,
top_k, f1, ece; `signature` says which BLEU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from monoblock.data import corpora
from monoblock.data.paths import ALIGNED, find, is_one
from monoblock.data.readers import Pair
from monoblock.errors import ConfigError, InputError
from monoblock.tasks import answering, labelling, scores, textscores
from monoblock.tasks.classifying import classifier
from monoblock.tasks.conversing import conversations
from monoblock.tasks.hiding import masked_lm
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.pairing import arranged, references
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.recipe import DataPart
from monoblock.tasks.rescoring import Frequencies, tune
from monoblock.tasks.texts import tokens_of, windows
from monoblock.tasks.translating import Answer, readable
from monoblock.training.objectives import IGNORE, Loss

# Of a folder that no recipe made.
FAMILIES = {"decoder-only": "causal", "encoder-decoder": "pairs"}
HEADS = {"classifier": "classify", "tagger": "label", "masked_lm": "masked", "spans": "answers"}
SMALLER = {"loss", "perplexity", "bits_per_byte", "cer", "ece"}  # is better


def evaluate(pipe: Pipeline, asked: Asked) -> Measured:
    """The figures of a model on a corpus, by what it was trained for; of a file it was not trained on, on all of it."""
    head = getattr(pipe.model.config, "head", None)
    objective = HEADS.get(head.kind if head is not None else "") or pipe.objective
    objective = objective or FAMILIES.get(pipe.model.config.family, "")
    if objective not in TASKS:
        raise InputError(f"evaluate knows no measure for {objective or pipe.model.config.family} models yet")
    return TASKS[objective](pipe, whole(asked, pipe.part))


def whole(asked: Asked, part: DataPart | None) -> Asked:
    """All of a single file is asked for unless a model was trained on it, or a list of words is to be tuned by it."""
    path = None if asked.data in corpora.CORPORA else find(asked.data, asked.folder)
    if path is None or not is_one(path) or asked.split is not None or asked.rescore:
        return asked
    trained = [] if part is None else [part.corpus, part.synthetic, *(task.corpus for task in part.tasks)]
    places = [find(one, asked.folder) for one in trained if one is not None]
    known = any(Path(one).resolve() == Path(path).resolve() for one in places if one is not None)
    return asked if known else replace(asked, split="all")


# -- language models ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def language_model(pipe: Pipeline, asked: Asked) -> Measured:
    """Loss over every token but the first, perplexity, bits per byte; in blocks of the context, or by `stride`."""
    corpus = read(asked, "text")
    context = asked.context or pipe.model.config.context or 256
    tokens, device = tokens_of(corpus, pipe.tokenizer), pipe.model.device
    loss, total, count = Loss(), 0.0, 0
    for batch in windows(tokens, context, max(1, asked.batch // 8), asked.stride):
        part = batch.to(device)
        total += float(loss.of(pipe.model(**part.inputs), part.labels))
        count += int((part.labels != IGNORE).sum())
    mean, size = total / max(1, count), sum(len(text.encode()) for text in corpus.texts())
    figures = {
        "loss": mean,
        "perplexity": scores.perplexity(mean),
        "bits_per_byte": scores.bits_per_byte(mean, len(tokens), size),
        "tokens": count,
        "split": corpus.split,
    }
    return Measured(figures)


# -- pairs ----------------------------------------------------------------------------------------------------------


def pairs(pipe: Pipeline, asked: Asked) -> Measured:
    """Translations measured by BLEU and chrF; single words by accuracy and character errors."""
    part = pipe.part if pipe.part is not None else DataPart(corpus=asked.data)
    if part.prefix or part.tasks:
        return textscores.measure(pipe, asked, part, partial(scored, lowercase=asked.lowercase))
    corpus = arranged(read(asked, "pairs"), part)
    measured = (transliteration if is_words(corpus.rows) else translation)(pipe, asked, corpus.rows)
    measured.figures["split"] = corpus.split
    return measured


def is_words(rows: Sequence[Pair]) -> bool:
    """Whether all targets are single words."""
    return not any(" " in row.target for row in rows)


def translation(pipe: Pipeline, asked: Asked, rows: Sequence[Pair]) -> Measured:
    """BLEU and chrF of the best hypotheses, a row a source; accuracy counts those that are right to the letter."""
    texts: list[str] = pipe.translate([row.source for row in rows], batch=asked.batch, **asked.options)
    accepted = [[row.target] for row in rows]
    language = asked.language or target_language(asked.data, pipe.part.direction if pipe.part else "forward")
    figures = scored(texts, accepted, lowercase=asked.lowercase, language=language)
    return Measured(figures, _samples(rows, [[text] for text in texts], asked.samples))


def target_language(data: str, direction: str) -> str:
    """The language of the targets of aligned files such as {split}.de-en."""
    known = corpora.CORPORA.get(data)
    languages = ALIGNED.search(str(known.path) if known is not None else data)
    return "en" if languages is None else languages[1 if direction == "backward" else 2]


def scored(
    texts: list[str], accepted: scores.References, *, lowercase: bool = False, language: str = "en"
) -> dict[str, Any]:
    """What is told of translations."""
    bleu = scores.bleu(texts, accepted, lowercase=lowercase)
    lower = scores.bleu(texts, accepted, lowercase=True)
    chrf, tokenized = scores.chrf(texts, accepted), scores.bleu_tokenized(texts, accepted, language)
    found = {"bleu": bleu, "bleu_lowercased": lower, "bleu_tokenized": tokenized, "chrf": chrf}
    return {
        "bleu": bleu.value,
        "bleu_lowercased": lower.value,
        "bleu_tokenized": tokenized.value,
        "chrf": chrf.value,
        "accuracy": scores.accuracy([[text] for text in texts], accepted),
        "signature": bleu.signature,
        "signatures": {name: score.signature for name, score in found.items()},
        "sources": len(texts),
    }


def transliteration(pipe: Pipeline, asked: Asked, rows: Sequence[Pair]) -> Measured:
    """Each source once; any target attested for it is right."""
    accepted = references(rows)
    found = hypotheses(pipe, asked, list(accepted))
    wanted = list(accepted.values())
    measured = Measured(_word_figures(found, wanted, asked.n_best))
    measured.notes.append("each source counts once, and any target attested for it is right")
    if asked.rescore:
        part = pipe.part if pipe.part is not None else DataPart(corpus=asked.data)
        train = arranged(read(asked, "pairs", "train"), part).rows
        known = references([*rows, *train])
        measured.figures["attested"] = scores.accuracy(
            [[row[0].text] for row in found], [known[one] for one in accepted]
        )
        measured.notes.append("attested: targets that the training split has for a source are right as well")
        measured.words = _tuned(pipe, asked, train, part)
        again = [measured.words.order(answers) for answers in found]
        better = _word_figures(again, wanted, asked.n_best)
        gain = better["accuracy"] - measured.figures["accuracy"]
        measured.figures["rescored"] = better | {"gain": gain, "weight": measured.words.weight}
        found = again
    once = [Pair(source, " | ".join(targets)) for source, targets in accepted.items()]
    measured.samples = _samples(once, [[answer.text for answer in row] for row in found], asked.samples)
    return measured


def hypotheses(pipe: Pipeline, asked: Asked, sources: list[str]) -> list[list[Answer]]:
    found: list[list[Answer]] = pipe.translate(sources, n_best=asked.n_best, batch=asked.batch, **asked.options)
    return found


def _word_figures(found: list[list[Answer]], accepted: list[list[str]], k: int) -> dict[str, Any]:
    texts = [[answer.text for answer in row] for row in found]
    return {
        "accuracy": scores.accuracy(texts, accepted),
        "top_k": scores.accuracy(texts, accepted, k),
        "k": k,
        "cer": scores.cer([row[0] for row in texts], accepted),
        "sources": len(texts),
    }


def _tuned(pipe: Pipeline, asked: Asked, train: Sequence[Pair], part: DataPart) -> Frequencies:
    """A list of words from the training targets, its weight tuned on the validation split."""
    held = references(arranged(read(asked, "pairs", "valid"), part).rows)
    return tune(Frequencies.of(train), hypotheses(pipe, asked, list(held)), list(held.values()))


def _samples(rows: Sequence[Pair], found: list[list[str]], count: int) -> list[dict[str, Any]]:
    shown = zip(rows[:count], found, strict=False)
    return [{"source": row.source, "reference": row.target, "hypothesis": texts[0]} for row, texts in shown]


def held_out_scores(pipe: Pipeline, rows: Sequence[Pair], count: int) -> dict[str, float]:
    """For a model card: what the first sources within the context become.  Without sacreBLEU, exact matches alone."""
    if pipe.part is not None and (pipe.part.prefix or pipe.part.tasks):
        return textscores.held_out(pipe, rows, count, pipe.part, scored)
    some = [row for row in rows[: 2 * count] if readable(pipe, row.source)][:count]
    if not some:
        return {}
    texts = pipe.translate([row.source for row in some])
    accepted = references(rows)
    right = scores.accuracy([[text] for text in texts], [accepted[row.source] for row in some])
    if is_words(some):
        return {"val_word_accuracy": right, "val_cer": scores.cer(texts, [accepted[row.source] for row in some])}
    try:
        figures = scored(texts, [[row.target] for row in some])
    except ConfigError:  # the package is not here
        figures = {}
    return {f"val_{name}": figures[name] for name in ("bleu", "chrf") if name in figures} | {"val_exact": right}


# Objective -> what is measured.  A task is one function and one row.
TASKS: dict[str, Callable[[Pipeline, Asked], Measured]] = {
    "causal": language_model,
    "pairs": pairs,
    "answers": answering.measure,
    "classify": classifier,
    "label": labelling.tagger,
    "masked": masked_lm,
    "chat": conversations,
}
# Objective -> what a model card says about the first validation rows.
HELD_OUT: dict[str, Callable[..., dict[str, float]]] = {
    "pairs": held_out_scores,
    "answers": answering.held_out,
    "label": labelling.held_out,
}
