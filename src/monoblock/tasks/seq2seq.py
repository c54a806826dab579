"""Sequence to sequence: translate or transliterate a source into a target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import CorpusKind
from monoblock.recipes.schema import Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
from monoblock.tasks.pairs import Seq2SeqSection, prepare_splits, recipe_section
from monoblock.tasks.splits import CorpusSplits
from monoblock.tasks.tags import TagAwareEncoder, script_tags
from monoblock.tasks.task import Task

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs


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
        return prepare_splits(splits, recipe, folder)

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build batches of encoded pairs of similar length, of at most the context and data.max_length tokens."""
        import numpy as np

        from monoblock.data.batching.encode import encode_pairs
        from monoblock.data.batching.plans import BatchPlan, BucketBatchPlan
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
        from monoblock.tasks.translation_scores import evaluate_pairs

        return evaluate_pairs(loaded, request)

    def score_validation(self, loaded: LoadedModel, rows: Sequence[Any], count: int, /) -> dict[str, float]:
        from monoblock.tasks.translation_scores import score_validation_pairs

        return score_validation_pairs(loaded, rows, count)
