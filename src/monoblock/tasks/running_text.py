"""Running text as one stream of tokens: blocks to train on, blocks with corrupted tokens, windows to evaluate on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.data.batches import BatchIndices, FixedBatchPlan
from monoblock.data.blocks import BlockDataset, EvaluationWindow, Packing, ResampledBlocks, evaluation_windows
from monoblock.data.corpora.load import Corpus, load_corpus
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.token_folder import TokenDataset
from monoblock.errors import ConfigError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.task_data import EVALUATION_SEED, Collate, TaskData, TaskInputs, special_token_ids
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import TensorBatch

Blocks = BlockDataset | ResampledBlocks
COUNT_BLOCK, MAX_COUNTED = 2**18, 2**25  # tokens that are counted at a time, and in all


def tokenize_corpus(corpus: Corpus, tokenizer: Tokenizer) -> TokenDataset:
    """Encode the texts of a corpus as one stream of tokens; the end token, if there is one, follows each text.

    A corpus of tokens is returned as it is, memory-mapped.
    """
    if corpus.kind == "tokens":
        tokens: TokenDataset = corpus.rows[0]
        check_tokenizer(tokens, tokenizer)
        return tokens
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents = (ids + eos for ids in tokenizer.encode_batch(list(corpus.texts())))
    return TokenDataset.from_documents(documents, tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)


def count_bytes(corpus: Corpus) -> int:
    """Return the number of bytes of the texts of a corpus."""
    if corpus.kind == "tokens":
        return int(corpus.rows[0].files.bytes)
    return sum(len(text.encode()) for text in corpus.texts())


def check_tokenizer(tokens: TokenDataset, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless prepared tokens were made by this tokenizer."""
    if tokens.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"{tokens.folder} was prepared with another tokenizer ({(tokens.fingerprint or '')[:12]}) than that of the "
            f"model ({tokenizer.fingerprint[:12]}); prepare the text again with --tokenizer"
        )


def build_blocks(inputs: TaskInputs, tokens: TokenDataset, context: int, packing: Packing) -> Blocks:
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


def check_contiguous(inputs: TaskInputs) -> None:
    """Raise ConfigError if a recipe cannot carry the state of its model from batch to batch."""
    section = inputs.recipe.train
    if isinstance(inputs.config, ModelConfig):
        raise ConfigError(
            "data.packing=contiguous carries the state of an LSTM, which a Transformer does not have; write "
            "data.packing=stream, or model.family=lstm"
        )
    if inputs.sampler is not None or section.adversarial:
        raise ConfigError(
            "data.packing=contiguous cannot be used with tokenizer.dropout, tokenizer.alpha or train.adversarial; "
            "leave them out, or write data.packing=stream"
        )


def baseline_losses(train: TokenDataset, validation: TokenDataset) -> dict[str, float]:
    """Return the validation losses of a uniform distribution and of a unigram distribution, in nats per token."""
    return {"uniform": math.log(train.vocab), "unigram": unigram_loss(train, validation)}


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
    return TaskData(tokenizer, special_token_ids(tokenizer), FixedBatchPlan(1, 1, 0), _refuse_training, evaluation)


def _refuse_training(batch: BatchIndices) -> TensorBatch:
    raise AssertionError("a test split is not trained on")


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


def _collate_windows(windows: list[EvaluationWindow]) -> TensorBatch:
    ids = torch.from_numpy(np.stack([window.ids for window in windows]))
    labels = ids[:, 1:].clone()
    for row, window in enumerate(windows):
        labels[row, : labels.shape[1] - window.num_targets] = IGNORE_INDEX
    return TensorBatch({"source": ids[:, :-1].contiguous()}, labels, 0, [])


def build_denoising_data(inputs: TaskInputs, *, collate: Collate) -> TaskData:
    """Build the training data of a recipe: blocks of fixed length, some tokens of which `collate` corrupts."""
    context, section = require_context(inputs.max_length), inputs.recipe.train
    if inputs.recipe.data.packing == "contiguous":
        raise ConfigError(f"data.packing=contiguous is not for train.objective={section.objective}; write stream")
    blocks = build_blocks(inputs, tokenize_corpus(inputs.train, inputs.text_tokenizer), context, "stream")
    validation, batches = None, list[range]()
    if inputs.valid is not None:
        tokens = tokenize_corpus(inputs.valid, inputs.text_tokenizer)
        validation = BlockDataset(tokens, min(context, max(1, len(tokens) - 1)))  # a shorter text is one block
        starts = range(0, len(validation), section.batch)
        batches = [range(start, min(start + section.batch, len(validation))) for start in starts]

    def load_validation(index: int) -> NDArray[np.int64]:
        assert validation is not None
        return validation.sample(index, 0, EVALUATION_SEED)["ids"][:-1]

    return inputs.corrupted_data(
        collate,
        inputs.fixed_plan(len(blocks)),
        lambda index, epoch: blocks.sample(index, epoch, section.seed)["ids"][:-1],
        load_validation,
        batches,
        f"{len(blocks):,} blocks of {context} tokens to train on",
    )
