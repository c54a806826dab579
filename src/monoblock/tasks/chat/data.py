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

from monoblock.data.batching.encode import IGNORE_INDEX, EncodedDataset, RaggedArray
from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.chat import ASSISTANT_ROLE
from monoblock.data.readers.records import Chat
from monoblock.errors import InputError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import (
    TaskData,
    batch_builder,
    build_bucket_plan,
    iterate_evaluation_batches,
    truncation_note,
)
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, pad_rows


class EncodedChat(NamedTuple):
    """A conversation in ids, and beside them those that a model is to say, −100 elsewhere."""

    ids: list[int]
    labels: list[int]


def encode_chat(chat: Chat, tokenizer: Tokenizer) -> EncodedChat:
    """A conversation as it is trained on."""
    text = tokenizer.apply_chat_template(chat.to_dicts(), add_generation_prompt=False)
    pieces = tokenizer.pieces(text, allow_specials=True)
    ids = [piece.id for piece in pieces]
    labels = [IGNORE_INDEX] * len(ids)
    for number, message in enumerate(chat.messages):
        if message.role != ASSISTANT_ROLE:
            continue
        first, last = _answer_span(chat, number, text, tokenizer)
        places = [place for place, piece in enumerate(pieces) if first <= piece.start < last]
        ends = [place for place in places if ids[place] in tokenizer.special_ids]
        for place in places:
            if not ends or place <= ends[-1]:
                labels[place] = ids[place]
    return EncodedChat(ids, labels)


def _answer_span(chat: Chat, index: int, text: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Where an answer stands in the whole text: from the end of the prompt for it to the end of its turn."""
    prompt = tokenizer.apply_chat_template(chat.to_dicts(index), add_generation_prompt=True)
    turn = tokenizer.apply_chat_template(chat.to_dicts(index + 1), add_generation_prompt=False)
    if not (turn.startswith(prompt) and text.startswith(turn)):
        raise InputError(
            "the chat template writes a conversation otherwise once it goes on: where the answers stand cannot be told"
        )
    return len(prompt), len(turn)


def build_chat_data(
    recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None
) -> TaskData:
    """Answers to learn, each after all that was said before it."""
    special = special_token_ids(tokenizer)
    samples, cut = encode_chats(train.rows, tokenizer, context)
    held = None if valid is None else encode_chats(valid.rows, tokenizer, context)[0]
    prepare = partial(collate_chats, special=special)
    said = f"{len(samples):,} conversations to train on{truncation_note(cut, context)}"
    if len(samples) < len(train):
        said += f" ({len(train) - len(samples):,} without an answer in their first {context} tokens left out)"
    return TaskData(
        tokenizer,
        special,
        build_bucket_plan(recipe, samples.lengths),
        batch_builder(samples, prepare),
        None if held is None else partial(iterate_evaluation_batches, held, recipe.train.batch, prepare),
        summary=said,
    )


def encode_chats(rows: Sequence[Chat], tokenizer: Tokenizer, context: int | None) -> tuple[EncodedDataset, int]:
    """Conversations cut to one more token than the model reads, and how many lost a part of an answer.

    Those with no answer left are left out.
    """
    longest = None if context is None else context + 1
    whole = [encode_chat(row, tokenizer) for row in rows]
    made = [EncodedChat(ids[:longest], labels[:longest]) for ids, labels in whole]
    kept = [number for number, row in enumerate(made) if any(label != IGNORE_INDEX for label in row.labels[1:])]
    if not kept:
        raise InputError(f"no conversation has an answer in its first {context} tokens; raise data.longest")
    fields = {name: RaggedArray(getattr(made[number], name) for number in kept) for name in EncodedChat._fields}
    cut = 0 if longest is None else sum(any(n != IGNORE_INDEX for n in whole[row].labels[longest:]) for row in kept)
    return EncodedDataset(fields, np.array(kept, np.int64)), cut


def collate_chats(rows: Sequence[dict[str, Any]], special: SpecialTokenIds) -> tuple[dict[str, Tensor], Tensor]:
    """Each next token where it is asked for; padding stands on the right, where a causal mask sees nothing of it."""
    source = pad_rows([row["ids"][:-1] for row in rows], special.pad_id)
    return {"source": source}, pad_rows([row["labels"][1:] for row in rows], IGNORE_INDEX)
