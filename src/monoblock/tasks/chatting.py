"""Conversations as ground: the tokenizer's own template renders them, and only the answers are asked for.

An answer is what the template writes between the prompt for it and the end of the assistant's turn, the token that
ends the turn included: a model must learn to stop.  Whatever the template writes after that token, and all that others
say, is read and not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from monoblock.data.batches import BucketPlan
from monoblock.data.chats import ANSWERS, Chat
from monoblock.data.corpora import Corpus
from monoblock.data.pairs import IGNORED, Ragged, Samples
from monoblock.errors import InputError
from monoblock.tasks.ground import Ground, per_update, special_of
from monoblock.tasks.recipe import Recipe
from monoblock.tasks.samples import in_order
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.objectives import Prepared, Special


class Asked(NamedTuple):
    """A conversation in ids, and beside them those that a model is to say, −100 elsewhere."""

    ids: list[int]
    labels: list[int]


def asked(chat: Chat, tokenizer: Tokenizer) -> Asked:
    """A conversation as it is trained on."""
    text = tokenizer.chat(chat.told(), add_generation_prompt=False)
    pieces = tokenizer.pieces(text, allow_specials=True)
    ids = [piece.id for piece in pieces]
    labels = [IGNORED] * len(ids)
    for number, message in enumerate(chat.messages):
        if message.role != ANSWERS:
            continue
        first, last = _span(chat, number, text, tokenizer)
        places = [place for place, piece in enumerate(pieces) if first <= piece.start < last]
        ends = [place for place in places if ids[place] in tokenizer.special_ids]
        for place in places:
            if not ends or place <= ends[-1]:
                labels[place] = ids[place]
    return Asked(ids, labels)


def _span(chat: Chat, number: int, text: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Where an answer stands in the whole text: from the end of the prompt for it to the end of its turn."""
    prompt = tokenizer.chat(chat.told(number), add_generation_prompt=True)
    turn = tokenizer.chat(chat.told(number + 1), add_generation_prompt=False)
    if not (turn.startswith(prompt) and text.startswith(turn)):
        raise InputError(
            "the chat template writes a conversation otherwise once it goes on: where the answers stand cannot be told"
        )
    return len(prompt), len(turn)


def chat(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    """Answers to learn, each after all that was said before it."""
    special = special_of(tokenizer)
    samples, cut = samples_of(train.rows, tokenizer, context)
    held = None if valid is None else samples_of(valid.rows, tokenizer, context)[0]
    prepare = partial(answered, special=special)
    said = f"{len(samples):,} conversations to train on"
    said += f" ({cut:,} of them cut to {context} tokens)" if cut else ""
    if len(samples) < len(train):
        said += f" ({len(train) - len(samples):,} without an answer in their first {context} tokens left out)"
    return Ground(
        tokenizer,
        special,
        BucketPlan(samples.lengths, seed=recipe.train.seed, batch=per_update(recipe)),
        lambda batch: Prepared(*prepare([samples[int(n)] for n in batch.samples]), batch.epoch, batch.samples.tolist()),
        None if held is None else partial(in_order, held, recipe.train.batch, prepare),
        said=said,
    )


def samples_of(rows: Sequence[Chat], tokenizer: Tokenizer, context: int | None) -> tuple[Samples, int]:
    """Conversations cut to one more token than the model reads, and how many lost a part of an answer.

    Those with no answer left are left out.
    """
    longest = None if context is None else context + 1
    whole = [asked(row, tokenizer) for row in rows]
    made = [Asked(ids[:longest], labels[:longest]) for ids, labels in whole]
    kept = [number for number, row in enumerate(made) if any(label != IGNORED for label in row.labels[1:])]
    if not kept:
        raise InputError(f"no conversation has an answer in its first {context} tokens; raise data.longest")
    fields = {name: Ragged(getattr(made[number], name) for number in kept) for name in Asked._fields}
    cut = 0 if longest is None else sum(any(n != IGNORED for n in whole[row].labels[longest:]) for row in kept)
    return Samples(fields, np.array(kept, np.int64)), cut


def answered(rows: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    """Each next token where it is asked for; padding stands on the right, where a causal mask sees nothing of it."""
    source = objectives.pad([row["ids"][:-1] for row in rows], special.pad)
    return {"source": source}, objectives.pad([row["labels"][1:] for row in rows], IGNORED)
