"""Token classification: predict a label for each word, to find named entities or restore punctuation.

The labels of a model decide what is found and measured: entities, punctuation and capitals, or single labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from monoblock.config.schema import check_at_least, check_fraction, check_types
from monoblock.data.corpora.load import Corpus
from monoblock.data.corpora.punctuation import LABELS, MARK_TO_LABEL, restore_punctuation, strip_punctuation
from monoblock.data.readers.records import TaggedSentence
from monoblock.errors import FileError, InputError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.bio import (
    OUTSIDE,
    MatchCounts,
    build_transitions,
    count_entities,
    extract_entities,
    is_chunking_scheme,
    is_iob1,
    sum_counts,
    to_bio,
    viterbi_decode,
)
from monoblock.tasks.evaluation_report import MAX_MISTAKES, Evaluation, EvaluationRequest, Table, read_corpus
from monoblock.tasks.input_template import EncodedInput, EncodedWords, InputTemplate, WordEncoder
from monoblock.tasks.task import Task, TrainingDefaults, holdout_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from monoblock.data.encode import EncodedDataset
    from monoblock.plots.confusion_matrix import Mistake
    from monoblock.tasks.batching import LongTextMode, ProgressCallback
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import SubwordSampler, TaskData, TaskInputs

# A punctuation mark is a separate word; 1,000.5 and well-known are single words.
WORD_PATTERN = re.compile(r"\w+(?:[.,]\d+|[-'’]\w+)*|[^\w\s]")
SENTENCES_PER_ROW = 20  # sentences scored for each row that `score_validation` is asked for; they are short
CONTEXT_WORDS = 5  # words shown on either side of a mistake
NUM_SEGMENTATIONS = 32  # how many random segmentations of a word there are
# The possible values of the first and the second part of a label such as COMMA+CAP.
LABEL_PARTS = ([mark for mark in MARK_TO_LABEL.values() if mark != OUTSIDE], ["CAP", "UPPER"])


@dataclass(frozen=True, kw_only=True)
class TokenClassificationSection:
    """How training rows are augmented and joined."""

    replace_entities: float = 0.0  # training: replace this fraction of the entities by others of the same type
    mask_words: float = 0.0  # training: replace this fraction of the words by the mask token
    uppercase_rows: float = 0.0  # training: write this fraction of the rows in capitals, like headlines
    join_rows: int = 1  # join up to this many neighbouring rows into one sample, also in evaluation

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "join_rows")
        check_fraction(self, "replace_entities", "mask_words", "uppercase_rows")

    @property
    def changes_rows(self) -> bool:
        """Whether training rows are joined or augmented."""
        return self.join_rows > 1 or bool(self.replace_entities or self.mask_words or self.uppercase_rows)


class TokenClassification(Task):
    name = "token_classification"
    about = "predict a label for each word, to find named entities or restore punctuation"
    head = "tagger"
    families = ("encoder-only",)
    corpus_kinds = ("tagged",)
    section = TokenClassificationSection
    metrics = ("f1", "precision", "recall", "accuracy")
    supports_adversarial = True
    supports_unpadded = True
    supports_subword_sampling = True
    defaults = TrainingDefaults(3, 32, 512)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["pad", "cls", "sep", "mask"]

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build batches in which the first token of each word has its label; IOB1 labels are converted to BIO."""
        import numpy as np

        from monoblock.data.encode import align_labels, encode_tagged
        from monoblock.tasks.task_data import check_labels, label_to_id
        from monoblock.training.collate import collate_token_classification

        tokenizer, valid, labels = inputs.text_tokenizer, inputs.valid, inputs.labels
        section, sampler, seed = inputs.section(TokenClassificationSection), inputs.sampler, inputs.recipe.train.seed
        words = WordEncoder(tokenizer, InputTemplate(tokenizer, inputs.max_length))
        rows, validation_rows, note = inputs.train.rows, [] if valid is None else valid.rows, ""
        if is_iob1(rows, labels):
            rows, validation_rows = [to_bio(row) for row in rows], [to_bio(row) for row in validation_rows]
            bio_labels = {label for row in (*rows, *validation_rows) for label in row.labels}
            # Keep the order of the labels if possible: a pretrained head may depend on it.
            labels = labels if bio_labels <= set(labels) else sorted(bio_labels | set(labels))
            note = "; labels converted from IOB1 to BIO"
        if valid is not None:
            check_labels(valid, (row.labels for row in validation_rows), labels)
        samples = encode_tagged(rows, words, labels)
        num_truncated = sum(len(words(row.words).word_positions) < len(row.words) for row in rows)
        resample = None
        if section.changes_rows or sampler is not None:
            augmenter, label_ids = TaggedAugmenter(rows, words, section, sampler, seed), label_to_id(labels)

            def resample(index: int, epoch: int) -> dict[str, Any]:
                """Return a row that is augmented differently in every epoch."""
                row, encoded = augmenter(index, epoch)
                ids, targets = align_labels(row, *encoded, label_ids)
                return {"ids": np.array(ids, np.int64), "labels": np.array(targets, np.int64)}

        return inputs.encoded_data(
            samples,
            partial(collate_token_classification, special=inputs.special_tokens),
            None if valid is None else _encode_joined(validation_rows, section.join_rows, words, labels),
            resample=resample,
            plan=inputs.fixed_plan(len(rows)) if section.join_rows > 1 else None,  # the lengths of joined rows vary
            model_sizes={"classes": len(labels)},
            labels=labels,
            summary=f"{len(samples):,} samples of {len(labels)} classes to train on"
            f"{inputs.truncation_note(num_truncated)}{note}",
            validation_rows=validation_rows,
            unit="words",
        )

    def predict(self, loaded: LoadedModel, texts: Sequence[str | Sequence[str]], /) -> list[TaggedText]:
        """Label every word of each text or list of words, and find its entities or restore its punctuation."""
        return tag_words(loaded, [split_words(loaded, text) for text in texts])

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute the accuracy, the loss, the calibration error and the F1 of a tagger.

        The labels of the model decide whether F1 is that of entities, of punctuation and capitals, or of single labels.
        """
        import numpy as np

        from monoblock.metrics import classification
        from monoblock.plots.confusion_matrix import save_confusion_matrix
        from monoblock.tasks.task_data import check_labels

        corpus = read_corpus(request, "tagged")
        notes = []
        if is_iob1(corpus.rows, {*loaded.labels, *corpus.labels()}):
            corpus = Corpus(corpus.name, corpus.kind, corpus.split, [to_bio(row) for row in corpus.rows])
            notes.append("the labels of the data were converted from IOB1 to BIO")
        check_labels(corpus, (row.labels for row in corpus.rows), loaded.labels)
        training, section = request, loaded.data_section
        if request.split == "all" and section is not None:  # the baseline comes from the corpus of the training
            training = replace(request, data=section.corpus, holdout=holdout_of(section))
        row_probabilities = _predict_probabilities(loaded, corpus.rows, request.batch_size)
        predictions = _decode_rows(loaded, row_probabilities)
        probabilities = np.concatenate([row.double().numpy() for row in row_probabilities])
        predicted, gold = (
            _label_ids(rows, loaded.labels) for rows in (predictions, [row.labels for row in corpus.rows])
        )
        counts = classification.confusion_matrix(predicted, gold, len(loaded.labels))
        metrics: dict[str, Any] = {
            "accuracy": classification.accuracy(counts),
            **_f1_metrics(loaded.labels, predictions, corpus.rows, training, notes),
            "loss": float(classification.negative_log_likelihood(probabilities, gold).mean()),
            "ece": classification.calibration_error(probabilities, gold),
            "majority": classification.majority_accuracy(gold),
            "words": len(gold),
            "sources": len(corpus),
            "split": corpus.split,
        }
        rows = metrics.pop("rows")
        columns = list(next(iter(rows.values()), {}))
        max_count = max(MAX_MISTAKES, request.samples)
        mistakes = _worst_mistakes(corpus.rows, probabilities, predicted, gold, loaded.labels, max_count)
        samples = [mistake.to_sample() for mistake in mistakes]
        report = classification.classification_report(counts, loaded.labels)
        return Evaluation(
            metrics | report | {"kinds": rows, "worst": samples[:MAX_MISTAKES]},
            samples[: request.samples],
            notes,
            tables=[Table(["kind", *columns], [[kind, *row.values()] for kind, row in rows.items()])],
            save_plot=lambda path: save_confusion_matrix(counts, loaded.labels, mistakes[:MAX_MISTAKES], path),
        )

    def score_validation(self, loaded: LoadedModel, rows: Sequence[TaggedSentence], count: int, /) -> dict[str, float]:
        """Return the F1 on the first SENTENCES_PER_ROW * count validation sentences."""
        rows = rows[: SENTENCES_PER_ROW * count]
        predictions = _decode_rows(loaded, _predict_probabilities(loaded, rows))
        return {"val_f1": _f1_metrics(loaded.labels, predictions, rows, None, [])["f1"]}


def _encode_joined(
    rows: Sequence[TaggedSentence], join: int, words: WordEncoder, labels: Sequence[str]
) -> EncodedDataset:
    """Encode validation rows, joining up to `join` neighbouring rows into one sample, as in prediction."""
    from monoblock.data.encode import encode_tagged

    groups = group_rows([row.words for row in rows], join, words)
    encoded = iter([words.encode_rows([rows[index].words for index in group]) for group in groups])
    joined = [concatenate_rows(rows[group.start : group.stop]) for group in groups]
    return encode_tagged(joined, lambda _: next(encoded), labels)


# -- training rows ----------------------------------------------------------------------------------------------------


class TaggedAugmenter:
    """Called with the index of a row and an epoch, return an augmented sentence, and its encoding.

    Entities are replaced by others of the same type, words are masked, sentences are written in capitals, words are
    segmented at random, and neighbouring sentences are joined. The result depends only on (seed, epoch, row), so that
    a resumed run sees the same data.
    """

    def __init__(
        self,
        rows: Sequence[TaggedSentence],
        words: WordEncoder,
        section: TokenClassificationSection,
        sampler: SubwordSampler | None,
        seed: int,
    ) -> None:
        self.rows, self.words, self.section, self.sampler, self.seed = rows, words, section, sampler, seed
        self.mentions = collect_mentions(rows) if section.replace_entities else {}
        self.segmentations: dict[tuple[str, int], list[int]] = {}
        tokenizer = words.tokenizer
        self.mask_id = tokenizer.mask_id if tokenizer.mask_id is not None else words.fallback_ids[0]

    def __call__(self, index: int, epoch: int) -> tuple[TaggedSentence, EncodedWords]:
        from monoblock.training.collate import sample_generator

        rng = sample_generator(self.seed, epoch, index)
        count = int(rng.integers(1, self.section.join_rows + 1)) if self.section.join_rows > 1 else 1
        rows = replace_mentions(self.rows[index : index + count], self.mentions, self.section.replace_entities, rng)
        rows = [
            row._replace(words=tuple(word.upper() for word in row.words))
            if self.section.uppercase_rows and rng.random() < self.section.uppercase_rows
            else row
            for row in rows
        ]
        pieces = [[self._encode_word(word, rng) for word in row.words] for row in rows]
        return concatenate_rows(rows), self.words.encode_pieces(self.words.join_rows(pieces))

    def _encode_word(self, word: str, rng: np.random.Generator) -> list[int]:
        if self.section.mask_words and rng.random() < self.section.mask_words:
            return [self.mask_id]
        if self.sampler is None:
            return self.words.encode_word(word)
        key = (word, int(rng.integers(NUM_SEGMENTATIONS)))
        if key not in self.segmentations:  # sampling is slow
            self.segmentations[key] = self.sampler(f" {word}", epoch=0, index=key[1]) or self.words.fallback_ids
        return self.segmentations[key]


def collect_mentions(rows: Sequence[TaggedSentence]) -> dict[str, list[TaggedSentence]]:
    """Return the distinct entities of each type; each entity is given by its words and their labels."""
    mentions: dict[str, dict[TaggedSentence, None]] = {}
    for row in rows:
        for kind, start, end in extract_entities(row.labels):
            mentions.setdefault(kind, {})[TaggedSentence(row.words[start:end], row.labels[start:end])] = None
    return {kind: list(entities) for kind, entities in mentions.items()}


def replace_mentions(
    rows: Sequence[TaggedSentence], mentions: dict[str, list[TaggedSentence]], rate: float, rng: np.random.Generator
) -> list[TaggedSentence]:
    """Replace entities by others of the same type, with probability `rate` (mention replacement, Dai and Adel 2020).

    If an entity occurs several times in `rows`, all its occurrences are replaced by the same entity, so that the text
    stays consistent.

    mentions: the entities of each type to choose from, from `collect_mentions`.
    """
    if not rate:
        return list(rows)
    replacements: dict[tuple[str, TaggedSentence], TaggedSentence] = {}

    def replacement(kind: str, mention: TaggedSentence) -> TaggedSentence:
        candidates, key = mentions.get(kind, []), (kind, mention)
        if key not in replacements:
            replaced = candidates and rng.random() < rate
            replacements[key] = candidates[int(rng.integers(len(candidates)))] if replaced else mention
        return replacements[key]

    result = []
    for row in rows:
        parts: list[TaggedSentence] = []
        done = 0
        for kind, start, end in extract_entities(row.labels):
            parts.append(TaggedSentence(row.words[done:start], row.labels[done:start]))
            parts.append(replacement(kind, TaggedSentence(row.words[start:end], row.labels[start:end])))
            done = end
        result.append(concatenate_rows([*parts, TaggedSentence(row.words[done:], row.labels[done:])]))
    return result


def concatenate_rows(rows: Sequence[TaggedSentence]) -> TaggedSentence:
    """Join tagged sentences into one."""
    words = tuple(word for row in rows for word in row.words)
    return TaggedSentence(words, tuple(label for row in rows for label in row.labels))


def group_rows(
    rows: Sequence[Sequence[str]], max_rows: int, words: WordEncoder, separator_length: int = 1
) -> list[range]:
    """Group neighbouring rows of words, so that each group can be encoded as one input; return ranges of row indices.

    A group has at most `max_rows` rows, and fits into the maximum length of the template of `words`.

    separator_length: the number of tokens between two rows of a group.
    """
    groups: list[range] = []
    start, length = 0, 0
    num_special, limit = words.encoded_length(()), words.template.max_length
    for index, row in enumerate(rows):
        added = words.encoded_length(row) - num_special + separator_length
        too_long = limit is not None and num_special + length + added - separator_length > limit
        if index > start and (index - start == max_rows or too_long):
            groups.append(range(start, index))
            start, length = index, 0
        length += added
    return [*groups, range(start, len(rows))] if rows else []


# -- prediction -------------------------------------------------------------------------------------------------------


class TaggedWord(NamedTuple):
    word: str
    label: str
    probability: float


class PredictedEntity(NamedTuple):
    """An entity, which consists of words[start:end]; its probability is the lowest among those of its labels."""

    text: str
    label: str
    start: int
    end: int
    probability: float


class TaggedText(NamedTuple):
    words: list[TaggedWord]
    entities: list[PredictedEntity]  # empty if the labels are not a chunking scheme
    restored_text: str | None = None  # the text with punctuation, if the model restores punctuation


def has_punctuation_labels(labels: Sequence[str]) -> bool:
    """Return whether a model with these labels restores punctuation and capitals."""
    return set(labels) <= set(LABELS) and len(labels) > 1


def split_words(loaded: LoadedModel, text: str | Sequence[str], split_punctuation: bool = True) -> list[str]:
    """Split a text into the words that the model labels.

    For a model that restores punctuation, these are lowercase words without punctuation. For other models, punctuation
    marks are separate words; with split_punctuation=False, the text is split at spaces only. A list of words is
    returned unchanged.
    """
    if not isinstance(text, str):
        empty = next((word for word in text if not word.strip()), None)
        if empty is not None:
            raise InputError(f"the word {empty!r} is empty or white space; leave it out")
        return list(text)
    if has_punctuation_labels(loaded.labels):
        return list(strip_punctuation(text).words)
    return WORD_PATTERN.findall(text) if split_punctuation else text.split()


def tag_words(
    loaded: LoadedModel,
    rows: Sequence[Sequence[str]],
    *,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
) -> list[TaggedText]:
    """Predict the label of each word in rows of words, and from the labels the entities or the punctuation.

    The arguments are those of `predict_word_probabilities`.
    """
    row_probabilities = predict_word_probabilities(loaded, rows, batch=batch, long=long, lines=lines, progress=progress)
    tagged, names = [], loaded.labels
    for row, probabilities in zip(rows, row_probabilities, strict=True):
        label_ids = decode_labels(names, probabilities)
        labels = [names[label] for label in label_ids]
        chosen = [probabilities[index, label].item() for index, label in enumerate(label_ids)]
        words = list(row[: len(labels)])
        entities = [
            PredictedEntity(" ".join(words[start:end]), kind, start, end, min(chosen[start:end]))
            for kind, start, end in extract_entities(labels)
        ]
        restored = restore_punctuation(words, labels) if has_punctuation_labels(names) else None
        tagged_words = [TaggedWord(*word) for word in zip(words, labels, chosen, strict=True)]
        tagged.append(TaggedText(tagged_words, entities, restored))
    return tagged


def decode_labels(labels: Sequence[str], probabilities: Tensor) -> list[int]:
    """Return the class indices of the most probable valid sequence of labels.

    probabilities: class probabilities of shape (words, classes).
    """
    import numpy as np

    return viterbi_decode(np.log(np.maximum(probabilities.double().numpy(), 1e-300)), build_transitions(labels))


def predict_word_probabilities(
    loaded: LoadedModel,
    rows: Sequence[Sequence[str]],
    *,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    join: int = 1,
    progress: ProgressCallback | None = None,
) -> list[Tensor]:
    """Return the class probabilities of each row of words, of shape (words, classes), at the first tokens of words.

    long: "refuse", "cut" or "split" (between words) a row that is longer than the context.
    lines: the line numbers of the rows for error messages, counted from 0.
    join: encode up to this many neighbouring rows together.
    """
    import torch

    from monoblock.tasks.batching import check_long_mode, enumerate_lines, run_batches

    loaded.check_head("tagger")
    check_long_mode(long)
    encoder = WordEncoder(loaded.tokenizer, loaded.input_template(loaded.model.config.context))
    parts = [
        (index, part)
        for index, (line, row) in enumerate(enumerate_lines(rows, lines))
        for part in _split_row(encoder, line, row, long)
    ]
    groups = group_rows([part for _, part in parts], join, encoder)
    encoded = [encoder.encode_rows([part for _, part in parts[group.start : group.stop]]) for group in groups]
    inputs = [EncodedInput(words.ids, [0] * len(words.ids)) for words in encoded]
    outputs = run_batches(loaded, inputs, batch, loaded.model, progress=progress)
    results: list[list[Tensor]] = [[] for _ in rows]
    for group, words, logits in zip(groups, encoded, outputs, strict=True):
        start = 0
        for index, part in parts[group.start : group.stop]:
            positions = words.word_positions[start : start + len(part)]
            results[index].append(logits[positions].softmax(-1))
            start += len(part)
    return [torch.cat(parts_of_row) if parts_of_row else torch.empty(0, len(loaded.labels)) for parts_of_row in results]


def _split_row(encoder: WordEncoder, line: int, row: Sequence[str], long: str) -> list[Sequence[str]]:
    """Return the parts of a row, each of which fits into the context.

    If the row is longer than the context, long="split" returns several parts, "cut" returns the first part only, and
    "refuse" raises InputError.
    """
    from monoblock.tasks.batching import too_long_error

    if not row:
        return []
    limit, length = encoder.template.max_length, encoder.encoded_length(row)
    if limit is None or length <= limit:
        return [row]
    if long == "refuse":
        raise too_long_error(line, length, limit)
    groups = group_rows([[word] for word in row], len(row), encoder, separator_length=0)
    parts = [row[group.start : group.stop] for group in groups]
    return parts[:1] if long == "cut" else parts


# -- evaluation -------------------------------------------------------------------------------------------------------


def _predict_probabilities(loaded: LoadedModel, rows: Sequence[TaggedSentence], batch: int = 64) -> list[Tensor]:
    """Return the class probabilities of each row, of shape (words, classes); rows are joined as in training."""
    join = loaded.section(TokenClassificationSection).join_rows
    return predict_word_probabilities(loaded, [row.words for row in rows], batch=batch, long="split", join=join)


def _decode_rows(loaded: LoadedModel, probabilities: Sequence[Tensor]) -> list[list[str]]:
    return [[loaded.labels[label] for label in decode_labels(loaded.labels, row)] for row in probabilities]


def _label_ids(rows: Sequence[Sequence[str]], labels: Sequence[str]) -> list[int]:
    """Return the class indices of all labels in all rows as one list."""
    ids = {label: index for index, label in enumerate(labels)}
    return [ids[label] for row in rows for label in row]


def _f1_metrics(
    labels: Sequence[str],
    predictions: Sequence[Sequence[str]],
    rows: Sequence[TaggedSentence],
    request: EvaluationRequest | None,
    notes: list[str],
) -> dict[str, Any]:
    """Compute "f1" and related metrics, and append explanations to `notes`.

    The key "rows" has the scores of each entity type, punctuation mark or label.
    request: where the training split for the baseline of punctuation is read from; None means no training split.
    """
    from monoblock.metrics import classification

    references = [row.labels for row in rows]
    if is_chunking_scheme(labels):
        notes.append("f1 is the F1 of whole entities, micro-averaged over their types as in conlleval")
        entity_counts = count_entities(predictions, references)
        total = sum_counts(entity_counts)
        kinds = {kind: _format_counts(counts) for kind, counts in entity_counts.items()}
        return {"f1": total.f1, "precision": total.precision, "recall": total.recall, "rows": kinds}
    if has_punctuation_labels(labels):
        return _punctuation_metrics(predictions, rows, _most_frequent_labels(request, rows), notes)
    notes.append("f1 is the mean of the F1 of all labels")
    predicted, gold = (_label_ids(names, labels) for names in (predictions, references))
    counts = classification.confusion_matrix(predicted, gold, len(labels))
    scores = zip(labels, classification.class_scores(counts), strict=True)
    return {
        "f1": classification.macro_f1(counts),
        "rows": {label: score.to_dict() for label, score in scores if score.support},
    }


def _format_counts(counts: MatchCounts) -> dict[str, Any]:
    return {"precision": counts.precision, "recall": counts.recall, "f1": counts.f1, "there": counts.gold}


def _punctuation_metrics(
    predictions: Sequence[Sequence[str]],
    rows: Sequence[TaggedSentence],
    baseline: Sequence[Sequence[str]],
    notes: list[str],
) -> dict[str, Any]:
    """Compute the F1 of every punctuation mark and of capitals, their mean, and the same for the baseline.

    baseline: the labels that the baseline predicts for each row.
    """
    import numpy as np

    kinds: dict[str, Any] = {}
    for index, names in enumerate(LABEL_PARTS):
        predicted, guessed, gold = (
            np.array([label.partition("+")[2 * index] for row in label_rows for label in row])
            for label_rows in (predictions, baseline, [row.labels for row in rows])
        )
        for name in names:
            if not (gold == name).any():
                continue
            has_name, total = gold == name, int((gold == name).sum())
            counts, baseline_counts = (
                MatchCounts(int(((parts == name) & has_name).sum()), int((parts == name).sum()), total)
                for parts in (predicted, guessed)
            )
            margin = counts.f1 - baseline_counts.f1
            kinds[name] = _format_counts(counts) | {"baseline": baseline_counts.f1, "margin": margin}
    mean, base = (float(np.mean([row[key] for row in kinds.values()] or [0.0])) for key in ("f1", "baseline"))
    notes.append(
        "f1 is the mean over marks and capitals; the baseline gives each word its most frequent label in training"
    )
    return {"f1": mean, "baseline": base, "margin": mean - base, "rows": kinds}


def _most_frequent_labels(request: EvaluationRequest | None, rows: Sequence[TaggedSentence]) -> list[list[str]]:
    """Label each word with its most frequent label in the training split, or O if it does not occur there."""
    frequencies: dict[str, Counter[str]] = {}
    try:
        for row in read_corpus(request, "tagged", "train").rows if request is not None else ():
            for word, label in zip(row.words, row.labels, strict=True):
                frequencies.setdefault(word, Counter())[label] += 1
    except FileError:  # there is no training split
        pass
    best = {word: counts.most_common(1)[0][0] for word, counts in frequencies.items()}
    return [[best.get(word, OUTSIDE) for word in row.words] for row in rows]


def _worst_mistakes(
    rows: Sequence[TaggedSentence],
    probabilities: Any,
    predictions: list[int],
    gold: list[int],
    labels: Sequence[str],
    max_count: int,
) -> list[Mistake]:
    """Return the wrongly labelled words whose true labels have the lowest probabilities, with the words around them."""
    import numpy as np

    from monoblock.metrics import classification
    from monoblock.plots.confusion_matrix import Mistake

    words = [(row.words, index) for row in rows for index in range(len(row.words))]
    wrong = np.flatnonzero(np.array(predictions) != np.array(gold))
    loss = classification.negative_log_likelihood(probabilities, gold)
    mistakes = []
    for word in wrong[np.argsort(-loss[wrong], kind="stable")][:max_count].tolist():
        sentence, index = words[word]
        marked = [*sentence[:index], f"[{sentence[index]}]", *sentence[index + 1 :]]
        text = " ".join(marked[max(0, index - CONTEXT_WORDS) : index + CONTEXT_WORDS + 1])
        probability = float(probabilities[word, predictions[word]])
        mistakes.append(Mistake(text, labels[gold[word]], labels[predictions[word]], probability))
    return mistakes
