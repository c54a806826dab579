"""Token classification: predict a label for each word, to find named entities or restore punctuation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import TaggedSentence
from monoblock.recipes.schema import Recipe
from monoblock.tasks.bio import is_iob1, to_bio
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
from monoblock.tasks.input_template import InputTemplate, WordEncoder
from monoblock.tasks.labels import check_labels, label_to_id
from monoblock.tasks.tag_augmentation import (
    TaggedAugmenter,
    TokenClassificationSection,
    concatenate_rows,
    group_rows,
)
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from monoblock.data.batching.encode import EncodedDataset
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.tag_words import TaggedText
    from monoblock.tasks.task_data import TaskData, TaskInputs


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

        from monoblock.data.batching.encode import align_labels, encode_tagged
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
        from monoblock.tasks.tag_words import split_words, tag_words

        return tag_words(loaded, [split_words(loaded, text) for text in texts])

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        from monoblock.tasks.tag_scores import evaluate_tagger

        return evaluate_tagger(loaded, request)

    def score_validation(self, loaded: LoadedModel, rows: Sequence[TaggedSentence], count: int, /) -> dict[str, float]:
        from monoblock.tasks.tag_scores import score_validation_tags

        return score_validation_tags(loaded, rows, count)


def _encode_joined(
    rows: Sequence[TaggedSentence], join: int, words: WordEncoder, labels: Sequence[str]
) -> EncodedDataset:
    """Encode validation rows, joining up to `join` neighbouring rows into one sample, as in prediction."""
    from monoblock.data.batching.encode import encode_tagged

    groups = group_rows([row.words for row in rows], join, words)
    encoded = iter([words.encode_rows([rows[index].words for index in group]) for group in groups])
    joined = [concatenate_rows(rows[group.start : group.stop]) for group in groups]
    return encode_tagged(joined, lambda _: next(encoded), labels)
