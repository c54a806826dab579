"""Fill [MASK] with the most probable tokens of a masked language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from monoblock.errors import InputError
from monoblock.tasks.batching import ProgressCallback, no_progress, run_batches
from monoblock.tasks.input_template import EncodedInput
from monoblock.tasks.labels import Prediction
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.long_inputs import LongTextMode, check_long_mode, enumerate_lines, fit_to_context

MASK = "[MASK]"  # what users write for the mask token, whatever it is called in the tokenizer
CHARACTER_TOKENIZERS = ("char", "byte")  # kinds of tokenizer that encode a space as a token of its own


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
    progress: ProgressCallback = no_progress,
) -> list[FilledText]:
    """Predict the `top` most probable tokens for every mask; several masks of a text are predicted independently.

    long: "refuse", "cut" or "split" a text that is longer than the context.
    lines: the line numbers of the texts for error messages, counted from 0.
    """
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
