"""The data of a training run: a task builds `TaskData`, training and validation batches, from `TaskInputs`.

Running text is one stream of tokens: blocks to train on, blocks with corrupted tokens, and windows to evaluate on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.data.batches import BatchIndices, BatchPlan, BucketBatchPlan, FixedBatchPlan, permutation
from monoblock.data.blocks import BlockDataset, EvaluationWindow, Packing, ResampledBlocks, evaluation_windows
from monoblock.data.corpora.load import Corpus, load_corpus
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import ConfigError, InputError, did_you_mean
from monoblock.parallel.world import SINGLE_PROCESS, World
from monoblock.recipes.schema import Recipe, TokenizerSection
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, TensorBatch
from monoblock.training.events import DecisionEvent, WarningEvent
from monoblock.training.loss import Loss

S = TypeVar("S")
EVALUATION_SEED = 0  # every evaluation masks the same tokens and has the same order of batches
Collate = Callable[..., tuple[dict[str, Tensor], Tensor]]  # takes a list of samples, and returns inputs and labels
SAMPLING_KEYS = {"bpe": "dropout", "unigram": "alpha"}  # the key of [tokenizer] that a kind of tokenizer samples with
COUNT_BLOCK, MAX_COUNTED = 2**18, 2**25  # tokens that are counted at a time, and in all


@dataclass(frozen=True)
class TaskData:
    tokenizer: Tokenizer | None
    special_tokens: SpecialTokenIds
    batch_plan: BatchPlan | None  # None if the user gives the batches
    build_batch: Callable[[BatchIndices], TensorBatch] | None
    evaluation_batches: Callable[[], Iterable[TensorBatch]] | None
    model_sizes: dict[str, Any] = field(default_factory=dict)  # sizes that follow from the data, such as `classes`
    model_files: dict[str, dict[str, Any]] = field(default_factory=dict)  # JSON files beside the model, by their names
    labels: list[str] = field(default_factory=list)  # the class names, in the order of the outputs
    summary: str = ""  # the amount of data, in words for the user
    bytes_per_token: float | None = None  # mean number of bytes per token of the validation text
    baseline_losses: dict[str, float] = field(default_factory=dict)  # validation losses of trivial models by name
    validation_rows: list[Any] = field(default_factory=list)  # rows on which the metrics of the model card are computed
    unit: str = "tokens"  # the unit of throughput
    batches: Callable[[int], Iterator[TensorBatch]] | None = None  # the user's batches from a step on
    content_digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the content of each split
    notices: tuple[DecisionEvent | WarningEvent, ...] = ()  # what the user is told about the data before training


def special_token_ids(tokenizer: Tokenizer) -> SpecialTokenIds:
    """Return the ids of the special tokens that collate functions need."""
    return SpecialTokenIds(
        pad_id=tokenizer.pad_id or 0,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        mask_id=tokenizer.mask_id,
        sentinel_ids=tuple(tokenizer.sentinel_ids),
        unmaskable_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
    )


def has_segments(config: ModelConfig | RecurrentConfig | None) -> bool:
    """Return whether a model has segment embeddings, which tell the two texts of a pair apart."""
    return getattr(getattr(config, "input", None), "segments", 0) > 1


@dataclass(frozen=True)
class TaskInputs:
    """What a task builds its data from."""

    recipe: Recipe
    context: int | None  # context length of the model in tokens; None means no limit
    tokenizer: Tokenizer | None  # None for images
    train: Corpus
    valid: Corpus | None
    labels: list[str] = field(default_factory=list)  # class names in the data, or of a stored head that is trained on
    config: ModelConfig | RecurrentConfig | None = None  # of the model; vocabulary and classes may be placeholders
    decoder_start_id: int | None = None  # the first token of targets, if training starts from a stored model

    @property
    def max_length(self) -> int | None:
        """Maximum length of a sample: the smaller of the model's context and data.max_length; None means no limit."""
        limits = (self.context, self.recipe.data.max_length)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, for tasks on text, which always have one."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def sampler(self) -> SubwordSampler | None:
        """The function that segments training texts at random, if the recipe asks for it."""
        section = self.recipe.tokenizer
        return SubwordSampler(self.text_tokenizer, section, self.recipe.train.seed) if section.sampling_key else None

    def section(self, kind: type[S]) -> S:
        """Return the task section of the recipe if it has the type `kind`, else a `kind` with its defaults."""
        return self.recipe.task if isinstance(self.recipe.task, kind) else kind()

    @property
    def has_segments(self) -> bool:
        return has_segments(self.config)

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def special_tokens(self) -> SpecialTokenIds:
        return SpecialTokenIds() if self.tokenizer is None else special_token_ids(self.tokenizer)

    @property
    def samples_per_step(self) -> int:
        return self.recipe.train.batch * self.recipe.train.accumulate

    def fixed_plan(self, count: int) -> FixedBatchPlan:
        """Return a plan of batches of equal size, for `count` samples that need not be grouped by length."""
        return FixedBatchPlan(count, min(self.samples_per_step, count), self.recipe.train.seed, last="drop")

    def bucket_plan(self, lengths: Any) -> BucketBatchPlan:
        """Return a plan of batches in which samples have similar lengths; `lengths` has the length of each sample."""
        return BucketBatchPlan(lengths, seed=self.recipe.train.seed, batch=self.samples_per_step)

    def truncation_note(self, count: int) -> str:
        """Return a note for `TaskData.summary` that says how many samples were truncated; "" if none were."""
        return f" ({count:,} of them cut to {self.max_length} tokens)" if count else ""

    def encoded_data(
        self,
        samples: Any,
        collate: Collate,
        validation: Any = None,
        *,
        resample: Callable[[int, int], dict[str, Any]] | None = None,
        plan: BatchPlan | None = None,
        validation_collate: Collate | None = None,
        validation_groups: Sequence[Sequence[int]] | None = None,
        **facts: Any,
    ) -> TaskData:
        """Return the data for training on encoded samples, by default in batches of similar lengths.

        samples, validation: an EncodedDataset; with a plan and groups, any sequence.
        collate: a function that converts a list of samples to the keyword arguments of the model and the labels.
        resample: a function (index, epoch) that returns a sample as it is in an epoch; None: it is always the same.
        validation_collate: the same as `collate` for validation samples, if it is another function.
        validation_groups: the indices of the validation samples in each batch.
        facts: further fields of `TaskData`.
        """

        def build_batch(batch: BatchIndices) -> TensorBatch:
            indices = batch.indices.tolist()
            rows = [samples[index] if resample is None else resample(index, batch.epoch) for index in indices]
            return TensorBatch(*collate(rows), batch.epoch, indices)

        evaluation = None
        if validation is not None:
            batch_size, function = self.recipe.train.batch, validation_collate or collate
            evaluation = partial(iterate_evaluation_batches, validation, batch_size, function, validation_groups)
        plan = plan or self.bucket_plan(samples.lengths)
        return TaskData(self.tokenizer, self.special_tokens, plan, build_batch, evaluation, **facts)

    def corrupted_data(
        self,
        collate: Collate,
        plan: BatchPlan,
        load: Callable[[int, int], NDArray[np.int64]],
        load_validation: Callable[[int], NDArray[np.int64]],
        validation_groups: Sequence[Sequence[int]],
        summary: str,
    ) -> TaskData:
        """Return the data for training on texts whose tokens `collate` corrupts, differently in every epoch.

        load, load_validation: functions that return the ids of a training text (index, epoch) or validation text.
        validation_groups: the indices of the validation texts in each batch.
        """
        special, train_seed = self.special_tokens, self.recipe.train.seed

        def build(rows: Iterable[NDArray[np.int64]], indices: Sequence[int], epoch: int, seed: int) -> TensorBatch:
            samples = [{"ids": ids, "sample": index} for index, ids in zip(indices, rows, strict=True)]
            return TensorBatch(*collate(samples, special, seed=seed, epoch=epoch), epoch, list(indices))

        def build_batch(batch: BatchIndices) -> TensorBatch:
            indices = batch.indices.tolist()
            return build((load(index, batch.epoch) for index in indices), indices, batch.epoch, train_seed)

        def evaluation() -> Iterator[TensorBatch]:
            for indices in validation_groups:
                yield build(map(load_validation, indices), indices, 0, EVALUATION_SEED)

        batches = evaluation if validation_groups else None
        return TaskData(self.tokenizer, special, plan, build_batch, batches, summary=summary)

    def task_data(
        self,
        samples: Sequence[Any],
        collate: Callable[[list[Any]], tuple[dict[str, Tensor], Tensor]],
        *,
        validation: Sequence[Any] | None = None,
        unit: str = "samples",
    ) -> TaskData:
        """Return the data for training on `samples`, which are shuffled in every epoch.

        samples, validation: the training and validation samples; any objects, such as the rows of a corpus.
        collate: a function that converts a list of samples to the keyword arguments of the model and the labels. The
            first dimension of every tensor is that of the samples, and labels of -100 are ignored.
        unit: the unit in which the progress display counts labels.
        """
        return self.encoded_data(
            samples,
            collate,
            validation or None,
            plan=self.fixed_plan(len(samples)),
            validation_groups=consecutive_groups(len(validation or ()), self.recipe.train.batch),
            summary=f"{len(samples):,} {unit} to train on",
            unit=unit,
        )


class SubwordSampler:
    """Called with a text, an epoch and the index of the row, return the ids of a random segmentation of the text.

    Segmenting texts at random, differently in every epoch, is subword regularization (Kudo 2018; Provilkov et al.
    2020). A segmentation depends only on the seed, the epoch, the index and the text, so that a resumed run sees the
    same tokens.
    """

    def __init__(self, tokenizer: Tokenizer, section: TokenizerSection, seed: int) -> None:
        kind, key = tokenizer.kind, SAMPLING_KEYS.get(tokenizer.kind)
        for name, is_set in (("dropout", bool(section.dropout)), ("alpha", section.alpha is not None)):
            if is_set and name != key:
                advice = "leave it out" if key is None else f"write tokenizer.{key}=0.1 instead"
                reason = "has only one segmentation of a text" if key is None else f"is sampled with tokenizer.{key}"
                raise ConfigError(f"tokenizer.{name} does not apply: a {kind} tokenizer {reason}; {advice}")
        self.tokenizer, self.seed = tokenizer, seed
        self.dropout, self.alpha = section.dropout or None, section.alpha
        self("", epoch=0, index=0)  # a tokenizer that cannot be sampled raises here, and not in the first batch

    def __call__(self, text: str, *, epoch: int, index: int) -> list[int]:
        return self.tokenizer.sample(
            text, seed=self.seed, epoch=epoch, index=index, dropout=self.dropout, alpha=self.alpha
        )


# -- labels -----------------------------------------------------------------------------------------------------------


def label_to_id(labels: Sequence[str]) -> dict[str, int]:
    return {label: index for index, label in enumerate(labels)}


def class_indices(corpus: Corpus, labels: Sequence[str]) -> list[int]:
    """Return the index in `labels` of the label of each row; raise InputError for a label that is not one of them."""
    names, ids = [str(row.label) for row in corpus.rows], label_to_id(labels)
    check_labels(corpus, ((name,) for name in names), labels)
    return [ids[name] for name in names]


def check_labels(corpus: Corpus, rows: Iterable[Sequence[str]], labels: Sequence[str]) -> None:
    """Raise InputError if a label in `rows` is not one of `labels`, the labels of the model.

    rows: the labels of each row of the corpus.
    """
    known = set(labels)
    for number, row in enumerate(rows, 1):
        unknown = next((label for label in row if label not in known), None)
        if unknown is not None:
            listed = f"{', '.join(list(labels)[:8])}{' …' * (len(labels) > 8)}"
            raise InputError(
                f"{corpus.name}, split {corpus.split}, row {number}: the label {unknown!r} was not seen in training"
                f"{did_you_mean(unknown, labels)}; the labels of the model are {listed}"
            )


# -- running text -----------------------------------------------------------------------------------------------------


def tokenize_corpus(corpus: Corpus, tokenizer: Tokenizer) -> TokenDataset:
    """Encode the texts of a corpus as one stream of tokens; the end token, if there is one, follows each text.

    A corpus of tokens is returned as it is, memory-mapped.
    """
    if corpus.kind == "tokens":
        tokens: TokenDataset = corpus.rows[0]
        if tokens.fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"{tokens.folder} was prepared with another tokenizer ({(tokens.fingerprint or '')[:12]}) than that of "
                f"the model ({tokenizer.fingerprint[:12]}); prepare the text again with --tokenizer"
            )
        return tokens
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents = (ids + eos for ids in tokenizer.encode_batch(list(corpus.texts())))
    return TokenDataset.from_documents(documents, tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)


def count_bytes(corpus: Corpus) -> int:
    """Return the number of bytes of the texts of a corpus."""
    if corpus.kind == "tokens":
        return int(corpus.rows[0].files.bytes)
    return sum(len(text.encode()) for text in corpus.texts())


def build_blocks(
    inputs: TaskInputs, tokens: TokenDataset, context: int, packing: Packing
) -> BlockDataset | ResampledBlocks:
    """Return the training blocks of a text: those of its tokens or, if the recipe asks for it, of random segmentations.

    tokens: the plain segmentation of the text, from which the number of blocks in an epoch follows.
    """
    blocks, sampler = BlockDataset(tokens, context, packing=packing), inputs.sampler
    if sampler is None:
        return blocks
    if inputs.train.kind == "tokens":
        raise ConfigError(
            f"{inputs.train.name} holds tokens, which cannot be segmented anew; leave out tokenizer.dropout and "
            "tokenizer.alpha, or train on the text"
        )
    texts, tokenizer = list(inputs.train.texts()), inputs.text_tokenizer
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def segment(epoch: int) -> TokenDataset:
        documents = (sampler(text, epoch=epoch, index=index) + eos for index, text in enumerate(texts))
        return TokenDataset.from_documents(documents, tokenizer.vocab_size)

    return ResampledBlocks(blocks, segment)


def unigram_loss(train: TokenDataset, text: TokenDataset) -> float:
    """Return the mean loss of a text, in nats per token, if every token has its frequency in the training data.

    The frequencies have add-one smoothing. Of large data, they are counted in blocks at equal distances.
    """
    counts = 1 + _count_tokens(train)
    losses = math.log(counts.sum()) - np.log(counts)  # of each token of the vocabulary
    seen = _count_tokens(text)
    return float((seen * losses).sum() / seen.sum())


def _count_tokens(tokens: TokenDataset) -> NDArray[np.int64]:
    """Count each token of the vocabulary, in at most about MAX_COUNTED tokens."""
    counts = np.zeros(tokens.vocab, np.int64)
    stride = COUNT_BLOCK * max(1, -(-len(tokens) // MAX_COUNTED))
    for start in range(0, len(tokens), stride):
        block = tokens.read(start, min(start + COUNT_BLOCK, len(tokens)))
        counts += np.bincount(block, minlength=tokens.vocab)
    return counts


def require_context(context: int | None) -> int:
    if context is None:
        raise ConfigError(
            "a language model is trained on blocks of fixed length; set model.context, as in model.context=256"
        )
    return context


def build_denoising_data(inputs: TaskInputs, *, collate: Collate) -> TaskData:
    """Build the training data of a recipe: blocks of fixed length, some tokens of which `collate` corrupts."""
    context, section = require_context(inputs.max_length), inputs.recipe.train
    if inputs.recipe.data.packing == "contiguous":
        raise ConfigError(f"data.packing=contiguous is not for train.objective={section.objective}; write stream")
    blocks = build_blocks(inputs, tokenize_corpus(inputs.train, inputs.text_tokenizer), context, "stream")
    validation = None
    if inputs.valid is not None:
        tokens = tokenize_corpus(inputs.valid, inputs.text_tokenizer)
        validation = BlockDataset(tokens, min(context, max(1, len(tokens) - 1)))  # a shorter text is one block

    def load_validation(index: int) -> NDArray[np.int64]:
        assert validation is not None
        return validation.sample(index, 0, EVALUATION_SEED)["ids"][:-1]

    return inputs.corrupted_data(
        collate,
        inputs.fixed_plan(len(blocks)),
        lambda index, epoch: blocks.sample(index, epoch, section.seed)["ids"][:-1],
        load_validation,
        consecutive_groups(0 if validation is None else len(validation), section.batch),
        f"{len(blocks):,} blocks of {context} tokens to train on",
    )


def iterate_windows(tokens: TokenDataset, context: int, batch: int, stride: int | None = None) -> Iterator[TensorBatch]:
    """Yield batches of windows over a text; every token of the text but the first is a label exactly once.

    context: the number of input tokens in a window; the windows of a batch have equal length.
    stride: windows begin this many tokens apart; None means that they do not overlap.
    """
    pending: list[EvaluationWindow] = []
    for window in evaluation_windows(tokens, context, stride):
        if pending and (len(pending) == batch or len(window.ids) != len(pending[0].ids)):
            yield _collate_windows(pending)
            pending = []
        pending.append(window)
    if pending:
        yield _collate_windows(pending)


def _collate_windows(windows: list[EvaluationWindow]) -> TensorBatch:
    ids = torch.from_numpy(np.stack([window.ids for window in windows]))
    labels = ids[:, 1:].clone()
    for row, window in enumerate(windows):
        labels[row, : labels.shape[1] - window.num_targets] = IGNORE_INDEX
    return TensorBatch({"source": ids[:, :-1].contiguous()}, labels, 0, [])


def iterate_lanes(tokens: TokenDataset, context: int, batch: int) -> Iterator[TensorBatch]:
    """Yield batches for a model that keeps its state: each row continues the row of the batch before.

    The text is divided into at most `batch` rows of equal length.  Every token but the first is a label exactly once.
    """
    targets = len(tokens) - 1
    lanes = max(1, min(batch, targets // context))
    size = -(-targets // lanes)  # of a lane
    for block, start in enumerate(range(0, size, context)):
        length = min(context, size - start)
        source, labels = torch.zeros(lanes, length, dtype=torch.long), torch.full((lanes, length), IGNORE_INDEX)
        for lane in range(lanes):
            first = lane * size + start
            ids = torch.from_numpy(tokens.read(min(first, targets), min(first + length, targets) + 1))
            source[lane, : len(ids) - 1], labels[lane, : len(ids) - 1] = ids[:-1], ids[1:]
        rows = {"lanes": torch.arange(lanes), "blocks": torch.full((lanes,), block)}
        yield TensorBatch({"source": source, **rows}, labels, 0, [])


def build_test_data(
    recipe: Recipe, config: ModelConfig | RecurrentConfig, tokenizer: Tokenizer, data: Path | None, stride: int | None
) -> TaskData:
    """Build the batches of the test split, in windows of the context length.

    stride: windows begin this many tokens apart; None means that they do not overlap.
    """
    tokens = tokenize_corpus(load_corpus(recipe.data.corpus, "test", folder=data), tokenizer)
    context = config.context if isinstance(config, ModelConfig) else int(recipe.model.get("context", 64))
    context = require_context(context)
    if isinstance(config, RecurrentConfig) and recipe.data.packing == "contiguous" and stride is None:
        evaluation = partial(iterate_lanes, tokens, context, recipe.train.batch)
    else:
        evaluation = partial(iterate_windows, tokens, context, recipe.train.batch, stride)
    return TaskData(tokenizer, special_token_ids(tokenizer), None, None, evaluation)


# -- evaluation -------------------------------------------------------------------------------------------------------


def consecutive_groups(count: int, batch: int) -> list[range]:
    """Group the indices of `count` samples into batches, in their order."""
    return [range(start, min(start + batch, count)) for start in range(0, count, batch)]


def group_by_length(lengths: Sequence[int], batch: int, *, longest_first: bool = True) -> list[list[int]]:
    """Group the indices of `lengths` into batches of similar length, so that little padding is needed."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index] if longest_first else lengths[index])
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def group_for_evaluation(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Group the indices of samples of similar length into batches.

    The batches are in random order, so that the first few are representative of all.
    """
    groups = group_by_length(lengths, batch, longest_first=False)
    return [groups[index] for index in permutation(EVALUATION_SEED, 0, len(groups)).tolist()]


def iterate_evaluation_batches(
    samples: Any, batch: int, collate: Collate, groups: Sequence[Sequence[int]] | None = None
) -> Iterator[TensorBatch]:
    """Yield batches that contain every sample once: those of `groups`, or of `batch` samples of similar length."""
    if groups is None:
        groups = group_for_evaluation([samples.length(index) for index in range(len(samples))], batch)
    for indices in groups:
        yield TensorBatch(*collate([samples[index] for index in indices]), 0, list(indices))


@torch.no_grad()
def validate(
    model: nn.Module,
    data: TaskData,
    loss: Loss,
    device: torch.device,
    *,
    max_batches: int = 0,
    world: World = SINGLE_PROCESS,
    evaluate_batch: Callable[..., dict[str, float]] | None = None,
) -> dict[str, float]:
    """Return the mean metrics over the targets of the validation batches, such as "val_loss" and "val_accuracy".

    max_batches: use at most this many batches; 0 means all.
    world: the processes among which the batches are divided; all must call this, and compute equally often.
    evaluate_batch: the method `Strategy.evaluate_batch`, if the model is divided among the processes.
    """
    totals: dict[str, float] = {"loss": 0.0}
    count = 0
    assert data.evaluation_batches is not None
    for batch in _divide(data.evaluation_batches(), max_batches, world):
        count += batch.target_count
        batch = batch.to(device)
        if evaluate_batch is None:
            values = loss.evaluate_batch(model, batch.inputs, batch.labels)
        else:
            values = evaluate_batch(loss.evaluate_batch, model, batch)
        for name, value in values.items():
            totals[name] = totals.get(name, 0) + value
    if world.size > 1:
        total, *sums = world.sum_over_data(count, *totals.values())
        count, totals = int(total), dict(zip(totals, sums, strict=True))
    metrics = {f"val_{name}": total / max(count, 1) for name, total in totals.items()} | {"val_tokens": count}
    if data.bytes_per_token is not None:
        metrics["val_bits_per_byte"] = metrics["val_loss"] / math.log(2) / data.bytes_per_token
    return metrics


def _divide(batches: Iterable[TensorBatch], max_batches: int, world: World) -> Iterator[TensorBatch]:
    """Yield the batches of one process, as many as every other process has; an additional one has no targets."""
    last, number = None, 0
    for number, last in enumerate(itertools.islice(batches, max_batches or None), 1):
        if (number - 1) % world.data_size == world.data_rank:
            yield last
    if last is not None and world.data_rank >= number % world.data_size > 0:
        yield last.without_targets()
