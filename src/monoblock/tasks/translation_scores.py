"""Evaluate translation and transliteration: BLEU, chrF, word accuracy and character error rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monoblock.data.corpora.table import CORPORA
from monoblock.data.readers.by_path import ALIGNED_SUFFIX
from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError
from monoblock.metrics.text import TRANSLATION_METRICS, References, accuracy, cer
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import Hypothesis, LoadedModel
from monoblock.tasks.pairs import Seq2SeqSection, collect_references, prepare_pairs
from monoblock.tasks.translate import best_translations, fits_context, translate_texts
from monoblock.tasks.word_frequencies import WordFrequencies, tune_weight


def evaluate_pairs(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Evaluate a model by BLEU and chrF or, if every target is a single word, by accuracy and character error rate."""
    section = loaded.section(Seq2SeqSection)
    corpus = prepare_pairs(read_corpus(request, "pairs"), section)
    evaluate = evaluate_transliteration if has_single_word_targets(corpus.rows) else evaluate_translation
    evaluation = evaluate(loaded, request, corpus.rows)
    evaluation.metrics["split"] = corpus.split
    return evaluation


def has_single_word_targets(rows: Sequence[Pair]) -> bool:
    """Return whether every target is a single word."""
    return not any(" " in row.target for row in rows)


def evaluate_translation(loaded: LoadedModel, request: EvaluationRequest, rows: Sequence[Pair]) -> Evaluation:
    """Evaluate the best hypothesis of each source by BLEU and chrF; `accuracy` is the fraction of exact matches."""
    texts = best_translations(loaded, [row.source for row in rows], batch=request.batch, **request.options)
    references = [[row.target] for row in rows]
    language = request.language or target_language(request.data, loaded.section(Seq2SeqSection).direction)
    figures = score_translations(texts, references, lowercase=request.lowercase, language=language)
    return Evaluation(figures, _build_samples(rows, [[text] for text in texts], request.samples))


def target_language(data: str, direction: str) -> str:
    """Return the language of the targets, from a file name such as {split}.de-en; "en" if the name has no language."""
    corpus = CORPORA.get(data)
    languages = ALIGNED_SUFFIX.search(str(corpus.path_template) if corpus is not None else data)
    return "en" if languages is None else languages[1 if direction == "backward" else 2]


def score_translations(
    hypotheses: list[str], references_per_source: References, *, lowercase: bool = False, language: str = "en"
) -> dict[str, Any]:
    """Return the metrics of translations and the fraction of exact matches, with the signatures of sacreBLEU."""
    scores = {
        name: compute(hypotheses, references_per_source, lowercase, language)
        for name, compute in TRANSLATION_METRICS.items()
    }
    return {
        **{name: score.value for name, score in scores.items()},
        "accuracy": accuracy([[text] for text in hypotheses], references_per_source),
        "signature": scores["bleu"].signature,
        "signatures": {name: score.signature for name, score in scores.items()},
        "sources": len(hypotheses),
    }


def evaluate_transliteration(loaded: LoadedModel, request: EvaluationRequest, rows: Sequence[Pair]) -> Evaluation:
    """Evaluate each distinct source once by accuracy and CER; any of its targets in the data counts as correct."""
    references = collect_references(rows)
    hypotheses = generate_hypotheses(loaded, request, list(references))
    targets = list(references.values())
    evaluation = Evaluation(_word_metrics(hypotheses, targets, request.n_best))
    evaluation.notes.append("each distinct source counts once, and any target attested for it in the data is correct")
    if request.rescore:
        section = loaded.section(Seq2SeqSection)
        train = prepare_pairs(read_corpus(request, "pairs", "train"), section).rows
        all_references = collect_references([*rows, *train])
        evaluation.metrics["attested"] = accuracy(
            [[row[0].text] for row in hypotheses], [all_references[source] for source in references]
        )
        evaluation.notes.append(
            "attested: the accuracy if the targets that the training split has for a source are correct as well"
        )
        frequencies = evaluation.word_frequencies = _tune_frequencies(loaded, request, train, section)
        hypotheses = [frequencies.rerank(row) for row in hypotheses]
        rescored = _word_metrics(hypotheses, targets, request.n_best)
        gain = rescored["accuracy"] - evaluation.metrics["accuracy"]
        evaluation.metrics["rescored"] = rescored | {"gain": gain, "weight": frequencies.weight}
    unique = [Pair(source, " | ".join(targets)) for source, targets in references.items()]
    texts = [[hypothesis.text for hypothesis in row] for row in hypotheses]
    evaluation.samples = _build_samples(unique, texts, request.samples)
    return evaluation


def generate_hypotheses(loaded: LoadedModel, request: EvaluationRequest, sources: list[str]) -> list[list[Hypothesis]]:
    return translate_texts(loaded, sources, n_best=request.n_best, batch=request.batch, **request.options)


def _word_metrics(hypotheses: list[list[Hypothesis]], references_per_source: list[list[str]], k: int) -> dict[str, Any]:
    texts = [[hypothesis.text for hypothesis in row] for row in hypotheses]
    return {
        "accuracy": accuracy(texts, references_per_source),
        "top_k": accuracy(texts, references_per_source, k),
        "k": k,
        "cer": cer([row[0] for row in texts], references_per_source),
        "sources": len(texts),
    }


def _tune_frequencies(
    loaded: LoadedModel, request: EvaluationRequest, train: Sequence[Pair], section: Seq2SeqSection
) -> WordFrequencies:
    """Count the words of the training targets, and tune the weight for reranking by them on the validation split."""
    valid = collect_references(prepare_pairs(read_corpus(request, "pairs", "valid"), section).rows)
    hypotheses = generate_hypotheses(loaded, request, list(valid))
    return tune_weight(WordFrequencies.from_pairs(train), hypotheses, list(valid.values()))


def _build_samples(rows: Sequence[Pair], hypotheses: list[list[str]], count: int) -> list[dict[str, Any]]:
    samples = zip(rows[:count], hypotheses, strict=False)
    return [{"source": row.source, "reference": row.target, "hypothesis": texts[0]} for row, texts in samples]


def score_validation_pairs(loaded: LoadedModel, rows: Sequence[Pair], count: int) -> dict[str, float]:
    """Return metrics on the first `count` validation sources that fit into the context, for the model card.

    If sacreBLEU is not installed, BLEU and chrF are left out.
    """
    measured = [row for row in rows[: 2 * count] if fits_context(loaded, row.source)][:count]
    if not measured:
        return {}
    texts = best_translations(loaded, [row.source for row in measured])
    references = collect_references(rows)
    accepted = [references[row.source] for row in measured]
    exact = accuracy([[text] for text in texts], accepted)
    if has_single_word_targets(measured):
        return {"val_word_accuracy": exact, "val_cer": cer(texts, accepted)}
    try:
        figures = score_translations(texts, [[row.target] for row in measured])
    except ConfigError:  # sacreBLEU is not installed
        figures = {}
    return {f"val_{name}": figures[name] for name in ("bleu", "chrf") if name in figures} | {"val_exact": exact}
