"""Sequence to sequence: translate or transliterate a source into a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.config.schema import check_positive, check_types
from monoblock.data.corpora.load import Corpus, load_corpus
from monoblock.data.corpora.table import CORPORA
from monoblock.data.readers.by_path import ALIGNED_SUFFIX
from monoblock.data.readers.records import CorpusKind, Pair
from monoblock.errors import ConfigError
from monoblock.metrics.text import TRANSLATION_METRICS, References, accuracy, cer
from monoblock.recipes.schema import Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.tags import NORMALIZERS, TagAwareEncoder, script_tag, script_tags
from monoblock.tasks.task import CorpusSplits, Task
from monoblock.tasks.word_frequencies import WordFrequencies, tune_weight

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import Hypothesis, LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSection:
    """The direction of translation, normalization, tags and synthetic pairs."""

    direction: Literal["forward", "backward", "both"] = (
        "forward"  # "backward": swap source and target; "both": both ways
    )
    normalize: Literal["none", "indic"] = "none"  # "indic": spell Indic words that look the same in one way
    tag: Literal["none", "script"] = "none"  # "script": begin each source with the script of its target, as in <2tamil>
    synthetic: str | None = None  # a file of synthetic training pairs, written by `monoblock backtranslate`
    synthetic_ratio: float = 1.0  # how many synthetic pairs to train on for each real pair

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "synthetic_ratio")


class Seq2Seq(Task):
    name = "seq2seq"
    about = "translate or transliterate a source into a target"
    families = ("encoder-decoder",)
    corpus_kinds: tuple[CorpusKind, ...] = ("pairs",)
    section = Seq2SeqSection
    required_tokens = ("bos", "pad")  # a target starts with one of these; T5 uses padding
    metrics = ("bleu", "chrf", "accuracy", "cer")
    decoding = "beam_search"
    verb = "translate"
    supports_unpadded = True
    supports_subword_sampling = True

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        """Return padding, start, end and the tags of a new tokenizer.

        The tags are tokenizer.tags and, with seq2seq.tag="script", a tag for each script in which a target is written.
        """
        scripts = [] if recipe_section(recipe).tag == "none" else script_tags(row.target for row in train.rows)
        return ["pad", "bos", "eos", *recipe.tokenizer.tags, *scripts]

    def prepare_data(self, splits: CorpusSplits, recipe: Recipe, folder: Path | None, /) -> CorpusSplits:
        """Apply the keys of [seq2seq] to all rows: normalize, swap and tag the pairs, and add synthetic training pairs.

        Pairs in the file seq2seq.synthetic are neither normalized nor tagged.
        """
        from monoblock.data.corpora.load import fingerprint_rows

        section, digests = recipe_section(recipe), dict(splits.digests)
        prefix = getattr(section, "prefix", "")  # of [text_to_text]
        train = prepare_pairs(splits.train, section, prefix)
        if section.synthetic is not None:
            synthetic = load_corpus(section.synthetic, "all", folder=folder, kind="pairs")
            digests["synthetic"] = fingerprint_rows(synthetic)
            train = replace(train, rows=mix_pairs(train.rows, synthetic.rows, section.synthetic_ratio))
        valid = None if splits.valid is None else prepare_pairs(splits.valid, section, prefix)
        return replace(splits, train=train, valid=valid, digests=digests)

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build batches of encoded pairs of similar length, of at most the context and data.max_length tokens."""
        import numpy as np

        from monoblock.data.batches import BatchPlan, BucketBatchPlan
        from monoblock.data.encode import encode_pairs
        from monoblock.training.collate import collate_seq2seq

        context, train, valid, sampler = inputs.context, inputs.train, inputs.valid, inputs.sampler
        section, special, start = inputs.recipe.train, inputs.special_tokens, inputs.decoder_start_id
        limits = (context and context - 1, inputs.recipe.data.max_length)
        longest = min((limit for limit in limits if limit is not None), default=None)
        pad_to = None if section.compile != "graphs" or longest is None else longest + 1
        encode = TagAwareEncoder(inputs.text_tokenizer)
        samples = encode_pairs(train.rows, encode, encode, longest=longest)
        if start is None:
            start = special.pad_id if special.bos_id is None else special.bos_id

        def resample(index: int, epoch: int) -> dict[str, Any]:
            """Return a pair that is segmented differently in every epoch."""
            assert sampler is not None
            number = int(samples.row_numbers[index])
            source, target = (
                encode.encode_with(text, partial(sampler, epoch=epoch, index=2 * number + side))[:longest]
                for side, text in enumerate((train.rows[number].source, train.rows[number].target))
            )
            return {"source": np.array(source, np.int64), "target": np.array(target, np.int64)}

        plan: BatchPlan | None = None
        if pad_to is not None:
            plan = inputs.fixed_plan(len(samples))  # batches of one shape
        elif section.batch_tokens:
            plan = BucketBatchPlan(samples.lengths, seed=section.seed, max_tokens=section.batch_tokens)
        summary = f"{len(samples):,} pairs to train on"
        if len(samples) < len(train):
            summary += f" ({len(train) - len(samples):,} empty or longer than {longest} tokens left out)"
        collate = partial(collate_seq2seq, special=special, start=start)
        return inputs.encoded_data(
            samples,
            partial(collate, pad_to=pad_to),
            None if valid is None else encode_pairs(valid.rows, encode, encode, longest=longest),
            resample=None if sampler is None else resample,
            plan=plan,
            validation_collate=collate,
            summary=summary,
            validation_rows=[] if valid is None else valid.rows,
        )

    def predict(self, loaded: LoadedModel, texts: Sequence[str], /) -> list[str]:
        from monoblock.tasks.translate import best_translations

        return best_translations(loaded, texts)

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute BLEU and chrF or, if every target is a single word, accuracy and character error rate."""
        section = loaded.section(Seq2SeqSection)
        corpus = prepare_pairs(read_corpus(request, "pairs"), section)
        has_words = has_single_word_targets(corpus.rows)
        evaluate = evaluate_transliteration if has_words else evaluate_translation
        evaluation = evaluate(loaded, request, corpus.rows)
        evaluation.metrics["split"] = corpus.split
        return evaluation

    def score_validation(self, loaded: LoadedModel, rows: Sequence[Any], count: int, /) -> dict[str, float]:
        """Return metrics on the first `count` validation sources that fit into the context.

        If sacreBLEU is not installed, BLEU and chrF are left out.
        """
        from monoblock.tasks.translate import best_translations, fits_context

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


# -- pairs ------------------------------------------------------------------------------------------------------------


def recipe_section(recipe: Recipe) -> Seq2SeqSection:
    assert isinstance(recipe.task, Seq2SeqSection)
    return recipe.task


def prepare_pairs(corpus: Corpus, section: Seq2SeqSection, prefix: str = "") -> Corpus:
    """Normalize, swap and tag the pairs of a corpus as `section` says, and put a prefix before each source."""
    normalize, rows = NORMALIZERS[section.normalize], []
    for source, target, frequency in corpus.rows:
        pair = Pair(normalize(source), normalize(target), frequency)
        both_ways = (("forward", pair), ("backward", Pair(pair.target, pair.source, frequency)))
        for direction, (source, target, frequency) in both_ways:
            if section.direction in (direction, "both"):
                tag = "" if section.tag == "none" else script_tag(target)
                source = " ".join(part for part in (prefix, tag, source) if part)
                rows.append(Pair(source, target, frequency))
    return replace(corpus, rows=rows)


def mix_pairs(real: Sequence[Pair], synthetic: Sequence[Pair], ratio: float) -> list[Pair]:
    """Return all real and all synthetic pairs, with `ratio` synthetic pairs for each real pair.

    To reach the ratio, one of the two lists is repeated from its beginning, the last time only in part. No pair is
    dropped, so an epoch contains every pair at least once.
    """
    if len(synthetic) / ratio >= len(real):
        return [*islice(cycle(real), round(len(synthetic) / ratio)), *synthetic]
    return [*real, *islice(cycle(synthetic), round(len(real) * ratio))]


def collect_references(rows: Iterable[Pair]) -> dict[str, list[str]]:
    """Map each source to its distinct targets, in the order of the rows."""
    references: dict[str, list[str]] = {}
    for row in rows:
        targets = references.setdefault(row.source, [])
        if row.target not in targets:
            targets.append(row.target)
    return references


# -- evaluation -------------------------------------------------------------------------------------------------------


def has_single_word_targets(rows: Sequence[Pair]) -> bool:
    """Return whether every target is a single word."""
    return not any(" " in row.target for row in rows)


def evaluate_translation(loaded: LoadedModel, request: EvaluationRequest, rows: Sequence[Pair]) -> Evaluation:
    """Evaluate the best hypothesis of each source by BLEU and chrF; `accuracy` is the fraction of exact matches."""
    from monoblock.tasks.translate import best_translations

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
    from monoblock.tasks.translate import translate_texts

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
