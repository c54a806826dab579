"""What stands behind [MASK]: the most probable tokens, by a model that was trained to restore hidden ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from monoblock.errors import InputError
from monoblock.tasks.passing import Tell, check_long, fitted, nobody, numbered, passed
from monoblock.tasks.predicting import Choice, check_head

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

MASK = "[MASK]"  # how it may be written, whatever a tokenizer calls it
LETTERS = ("char", "byte")  # kinds of tokenizer to which a space is a token of its own


class Filled(NamedTuple):
    text: str  # with the most probable token for each
    masks: list[list[Choice]]  # for each, best first


def filled(
    pipe: Pipeline,
    texts: Sequence[str],
    *,
    top: int = 5,
    batch: int = 64,
    long: str = "refuse",
    lines: Sequence[int] | None = None,
    tell: Tell = nobody,
) -> list[Filled]:
    """Each mask by itself: the others stay hidden while one is guessed."""
    check_head(pipe, "masked_lm")
    check_long(long)
    tokenizer = pipe.tokenizer
    if tokenizer.mask_id is None:
        raise InputError("this tokenizer has no mask; give a model that was trained on masked tokens")
    rows = []
    for line, text in numbered(texts, lines):
        spelled = text.replace(MASK, tokenizer.roles["mask"])
        if tokenizer.roles["mask"] not in spelled:
            raise InputError(f"line {line + 1} has no {MASK} to fill in; write it where a word is missing")
        parts = fitted(pipe, line, spelled, lambda part: masked_ids(pipe, part), long)
        rows.append([part for part in parts if tokenizer.mask_id in part.ids])
        if not rows[-1]:
            raise InputError(f"line {line + 1} lost its {MASK} when it was cut; shorten it, or give long='split'")
    asked = [part for parts in rows for part in parts]
    places = [[place for place, token in enumerate(part.ids) if token == tokenizer.mask_id] for part in asked]
    answers = iter(zip(asked, places, passed(pipe, asked, batch, pipe.model, places=places, tell=tell), strict=True))
    found = []
    for parts in rows:
        masks: list[list[Choice]] = []
        said = []
        for _ in parts:
            part, at, logits = next(answers)
            ids = list(part.ids)
            shares = logits[:, : tokenizer.vocab_size].softmax(-1)
            for place, row in zip(at, shares, strict=True):
                values, tokens = row.topk(min(top, len(row)))
                masks.append(_choices(pipe, tokens.tolist(), values.tolist()))
                ids[place] = int(tokens[0])
            said.append(tokenizer.decode(ids).strip())
        found.append(Filled(" ".join(said), masks))
    return found


def _choices(pipe: Pipeline, tokens: list[int], values: list[float]) -> list[Choice]:
    tokenizer = pipe.tokenizer
    plain = ["" if token in tokenizer.special_ids else tokenizer.decode([token]).strip() for token in tokens]
    spelled = [text or tokenizer.token(token) for text, token in zip(plain, tokens, strict=True)]
    return [Choice(text, value) for text, value in zip(spelled, values, strict=True)]


def masked_ids(pipe: Pipeline, text: str) -> list[int]:
    """The ids of a text with its masks, and no other special token in it.

    In running text a space belongs to the word after it; a mask stands for the word with its space.
    """
    tokenizer = pipe.tokenizer
    assert tokenizer.mask_id is not None
    parts = text.split(tokenizer.roles["mask"])
    ids: list[int] = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        plain = part if last or tokenizer.kind in LETTERS else part.removesuffix(" ")
        ids += [*(tokenizer.encode(plain) if plain else []), *([] if last else [tokenizer.mask_id])]
    return ids
