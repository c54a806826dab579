"""Restore masked tokens (Devlin et al. 2019), or spans that were replaced by sentinels (Raffel et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from monoblock.config.schema import check_fraction, check_types
from monoblock.data.corpora.load import Corpus
from monoblock.errors import InputError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.classification import Prediction
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from monoblock.tasks.batching import LongTextMode, ProgressCallback
    from monoblock.tasks.input_template import EncodedInput
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import Collate, TaskData, TaskInputs

MASK = "[MASK]"  # what users write for the mask token, whatever it is called in the tokenizer
MASK_RATE = 0.15
CHARACTER_TOKENIZERS = ("char", "byte")  # kinds of tokenizer that encode a space as a token of its own


@dataclass(frozen=True, kw_only=True)
class CorruptionSection:
    """How many tokens are masked or replaced by sentinels."""

    mask_rate: float = MASK_RATE  # the fraction of the tokens that are masked, or in masked spans

    def __post_init__(self) -> None:
        check_types(self)
        check_fraction(self, "mask_rate")


class MaskedLM(Task):
    name = "masked_lm"
    about = "restore masked tokens"
    head = "masked_lm"
    families = ("encoder-only",)
    corpus_kinds = ("text", "labelled", "tagged")  # labels are ignored
    section = CorruptionSection
    required_tokens = ("mask",)
    metrics = ("loss", "perplexity", "accuracy")
    supports_unpadded = True
    supports_subword_sampling = True
    defaults = TrainingDefaults(3, 32, 128)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["pad", "cls", "sep", "mask"]

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build blocks of running text or, with data.packing="documents", one document per row."""
        from monoblock.tasks.task_data import build_denoising_data
        from monoblock.training.collate import collate_masked_lm

        collate = partial(collate_masked_lm, rate=inputs.section(CorruptionSection).mask_rate)
        build = _build_document_data if inputs.recipe.data.packing == "documents" else build_denoising_data
        return build(inputs, collate=collate)

    def predict(self, loaded: LoadedModel, inputs: Sequence[str], /) -> list[FilledText]:
        return fill_masks(loaded, inputs)

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute loss, perplexity and accuracy over the masked tokens, which are the same in every evaluation.

        Of the masked tokens, 80 % are replaced by [MASK] and 10 % by random tokens; 10 % are unchanged (Devlin et al.
        2019). The inputs are blocks of text or single documents, as in training; labels of the corpus are ignored.
        """
        import numpy as np

        from monoblock.data.blocks import BlockDataset
        from monoblock.tasks import task_data
        from monoblock.tasks.batching import score_tokens
        from monoblock.training.collate import TensorBatch, collate_masked_lm

        corpus, batch = read_corpus(request, self.corpus_kinds), max(1, request.batch_size // 4)
        if loaded.trained_on_documents:
            template = loaded.input_template(loaded.training_length(request.context))
            texts = [template(ids).ids for ids in loaded.tokenizer.encode_batch(_nonempty_texts(corpus))]

            def row(index: int) -> NDArray[np.int64]:
                return np.array(texts[index], np.int64)

            groups: Sequence[Sequence[int]] = task_data.group_for_evaluation([len(ids) for ids in texts], batch)
        else:
            tokens = task_data.tokenize_corpus(corpus, loaded.tokenizer)
            length = min(request.context or loaded.model.config.context or 256, max(1, len(tokens) - 1))
            blocks = BlockDataset(tokens, length)

            def row(index: int) -> NDArray[np.int64]:
                return blocks.sample(index, 0, task_data.EVALUATION_SEED)["ids"][:-1]

            groups = task_data.consecutive_groups(len(blocks), batch)
        collate = partial(collate_masked_lm, special=loaded.special_tokens, seed=task_data.EVALUATION_SEED, epoch=0)
        samples = ([{"ids": row(index), "sample": index} for index in indices] for indices in groups)
        metrics = score_tokens(loaded, (TensorBatch(*collate(one, rate=MASK_RATE), 0, []) for one in samples))
        if not metrics["tokens"]:
            raise InputError(f"{corpus.name} is so short that none of its tokens is masked; give more text")
        notes = [f"over the {MASK_RATE:.0%} of the tokens that are masked, always the same tokens"]
        return Evaluation({**metrics, "split": corpus.split}, notes=notes)


class SpanCorruption(Task):
    name = "span_corruption"
    about = "restore spans of running text that were replaced by sentinels"
    families = ("encoder-decoder",)
    section = CorruptionSection
    required_tokens = ("sentinels",)
    supports_subword_sampling = True
    defaults = TrainingDefaults(1, 16, 512)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["pad", "eos", "sentinels=100"]

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build blocks of text with sentinels in place of spans, and the spans as targets.

        As in T5, a target starts with the padding token.
        """
        from monoblock.tasks.task_data import build_denoising_data
        from monoblock.training.collate import collate_span_corruption

        start, rate = inputs.special_tokens.pad_id, inputs.section(CorruptionSection).mask_rate
        return build_denoising_data(inputs, collate=partial(collate_span_corruption, start=start, rate=rate))


# -- documents --------------------------------------------------------------------------------------------------------


def _build_document_data(inputs: TaskInputs, *, collate: Collate) -> TaskData:
    """Build the training data of a recipe: each row is a document, truncated to the context.

    Documents have the same special tokens as the inputs of a classifier, so that fine-tuning does not change the
    format. With `tokenizer.dropout` or `tokenizer.alpha` a document is segmented anew in every epoch.
    """
    import numpy as np

    from monoblock.tasks.input_template import InputTemplate
    from monoblock.tasks.task_data import group_for_evaluation

    tokenizer, valid, sampler = inputs.text_tokenizer, inputs.valid, inputs.sampler
    template, texts = InputTemplate(tokenizer, inputs.max_length), _nonempty_texts(inputs.train)
    encoded = [template(ids) for ids in tokenizer.encode_batch(texts)]
    num_truncated = sum(row.num_truncated > 0 for row in encoded)
    if not encoded:
        raise InputError("all documents of the corpus are empty; give a corpus that contains text")

    def load(index: int, epoch: int) -> NDArray[np.int64]:
        row = encoded[index]
        if sampler is not None:
            row = template(sampler(texts[index], epoch=epoch, index=index))
        return np.array(row.ids, np.int64)

    validation = [] if valid is None else [template(ids).ids for ids in tokenizer.encode_batch(_nonempty_texts(valid))]
    return inputs.corrupted_data(
        collate,
        inputs.bucket_plan([len(row.ids) for row in encoded]),
        load,
        lambda index: np.array(validation[index], np.int64),
        group_for_evaluation([len(ids) for ids in validation], inputs.recipe.train.batch),
        f"{len(encoded):,} texts to train on{inputs.truncation_note(num_truncated)}",
    )


def _nonempty_texts(corpus: Corpus) -> list[str]:
    """Return the texts of a corpus that are not only white space."""
    return [text for text in corpus.texts() if text.strip()]


# -- filling masks ----------------------------------------------------------------------------------------------------


class FilledText(NamedTuple):
    text: str  # with every mask replaced by its most probable token
    masks: list[list[Prediction]]  # the most probable tokens for each mask, best first


def fill_masks(
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    top: int = 5,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
) -> list[FilledText]:
    """Predict the `top` most probable tokens for every mask; several masks of a text are predicted independently.

    long: "refuse", "cut" or "split" a text that is longer than the context.
    lines: the line numbers of the texts for error messages, counted from 0.
    """
    from monoblock.tasks.batching import check_long_mode, enumerate_lines, fit_to_context, run_batches

    loaded.check_head("masked_lm")
    check_long_mode(long)
    tokenizer = loaded.tokenizer
    if tokenizer.mask_id is None:
        raise InputError("this tokenizer has no mask token; give a model that was trained on masked tokens")
    mask = tokenizer.special_tokens_map["mask"]
    texts_in_parts = []
    for line, text in enumerate_lines(texts, lines):
        masked = text.replace(MASK, mask)
        if mask not in masked:
            raise InputError(f"line {line + 1} has no {MASK} to fill in; write it where a word is missing")
        parts = fit_to_context(loaded, line, masked, lambda part: encode_masked_text(loaded, part), long)
        texts_in_parts.append([part for part in parts if tokenizer.mask_id in part.ids])
        if not texts_in_parts[-1]:
            raise InputError(
                f"line {line + 1} lost its {MASK} when its end was cut off; shorten it, or give long='split'"
            )
    rows = [part for parts in texts_in_parts for part in parts]
    positions = [[index for index, token in enumerate(row.ids) if token == tokenizer.mask_id] for row in rows]
    logits = run_batches(loaded, rows, batch, loaded.model, positions=positions, progress=progress)
    filled = iter([_fill_part(loaded, *part, top) for part in zip(rows, positions, logits, strict=True)])
    results = []
    for parts in texts_in_parts:
        filled_parts = [next(filled) for _ in parts]
        masks = [choices for part in filled_parts for choices in part.masks]
        results.append(FilledText(" ".join(part.text for part in filled_parts), masks))
    return results


def _fill_part(
    loaded: LoadedModel, encoded: EncodedInput, positions: Sequence[int], logits: Tensor, top: int
) -> FilledText:
    """Fill the masks at `positions` of an encoded text with their most probable tokens.

    logits: the logits at these positions, of shape (masks, V).
    """
    ids, masks = list(encoded.ids), []
    probabilities = logits[:, : loaded.tokenizer.vocab_size].softmax(-1)
    for position, row in zip(positions, probabilities, strict=True):
        values, tokens = row.topk(min(top, len(row)))
        masks.append(_build_choices(loaded, tokens.tolist(), values.tolist()))
        ids[position] = int(tokens[0])
    return FilledText(loaded.tokenizer.decode(ids).strip(), masks)


def _build_choices(loaded: LoadedModel, tokens: list[int], probabilities: list[float]) -> list[Prediction]:
    """Pair tokens with probabilities; a special token or white space is shown by its entry in the vocabulary."""
    tokenizer = loaded.tokenizer
    texts = ["" if token in tokenizer.special_ids else tokenizer.decode([token]).strip() for token in tokens]
    names = [text or tokenizer.token(token) for text, token in zip(texts, tokens, strict=True)]
    return [Prediction(name, value) for name, value in zip(names, probabilities, strict=True)]


def encode_masked_text(loaded: LoadedModel, text: str) -> list[int]:
    """Encode a text with masks; names of other special tokens in the text are encoded as plain text.

    Most tokenizers encode a space together with the word after it, so the space before a mask is left out.
    """
    tokenizer = loaded.tokenizer
    assert tokenizer.mask_id is not None
    parts = text.split(tokenizer.special_tokens_map["mask"])
    ids: list[int] = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        segment = part if last or tokenizer.kind in CHARACTER_TOKENIZERS else part.removesuffix(" ")
        ids += [*(tokenizer.encode(segment) if segment else []), *([] if last else [tokenizer.mask_id])]
    return ids
