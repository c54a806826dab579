"""Training data from conversations, which the chat template of the tokenizer renders as text.

Only the tokens of answers have labels. An answer is the rendered text from the end of the generation prompt to the
token that ends the assistant's turn, including that token, so that the model learns to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from monoblock.data.batching.encode import IGNORE_INDEX, EncodedDataset, RaggedArray
from monoblock.data.readers.chat import ASSISTANT_ROLE
from monoblock.data.readers.records import Chat
from monoblock.errors import InputError
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import (
    TaskData,
    TaskInputs,
    batch_builder,
    build_bucket_plan,
    iterate_evaluation_batches,
    truncation_note,
)
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, pad_rows


class EncodedChat(NamedTuple):
    """The token ids of a conversation, and their labels, which are the same ids in answers and −100 elsewhere."""

    ids: list[int]
    labels: list[int]


def encode_chat(chat: Chat, tokenizer: Tokenizer) -> EncodedChat:
    """Encode a conversation with the chat template of the tokenizer, with labels for the answers."""
    text = tokenizer.apply_chat_template(chat.to_dicts(), add_generation_prompt=False)
    pieces = tokenizer.pieces(text, allow_specials=True)
    ids = [piece.id for piece in pieces]
    labels = [IGNORE_INDEX] * len(ids)
    for index, message in enumerate(chat.messages):
        if message.role != ASSISTANT_ROLE:
            continue
        start, end = _answer_span(chat, index, text, tokenizer)
        positions = [position for position, piece in enumerate(pieces) if start <= piece.start < end]
        specials = [position for position in positions if ids[position] in tokenizer.special_ids]
        for position in positions:
            if not specials or position <= specials[-1]:  # the last special token ends the turn
                labels[position] = ids[position]
    return EncodedChat(ids, labels)


def _answer_span(chat: Chat, index: int, text: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the start and end, in characters of the rendered text, of the answer `chat.messages[index]`."""
    prompt = tokenizer.apply_chat_template(chat.to_dicts(index), add_generation_prompt=True)
    turn = tokenizer.apply_chat_template(chat.to_dicts(index + 1), add_generation_prompt=False)
    if not (turn.startswith(prompt) and text.startswith(turn)):
        raise InputError(
            "the chat template changes earlier messages as a conversation grows, so answers cannot be located; "
            "give a tokenizer whose chat template only appends messages"
        )
    return len(prompt), len(turn)


def build_chat_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe: conversations in which only the tokens of the answers have labels."""
    recipe, context, tokenizer = inputs.recipe, inputs.max_length, inputs.text_tokenizer
    train, valid, special = inputs.train, inputs.valid, special_token_ids(tokenizer)
    samples, num_truncated = encode_chats(train.rows, tokenizer, context)
    validation = None if valid is None else encode_chats(valid.rows, tokenizer, context)[0]
    collate = partial(collate_chats, special=special)
    summary = f"{len(samples):,} conversations to train on{truncation_note(num_truncated, context)}"
    if len(samples) < len(train):
        summary += f" ({len(train) - len(samples):,} without an answer in their first {context} tokens left out)"
    return TaskData(
        tokenizer,
        special,
        build_bucket_plan(recipe, samples.lengths),
        batch_builder(samples, collate),
        None if validation is None else partial(iterate_evaluation_batches, validation, recipe.train.batch, collate),
        summary=summary,
    )


def encode_chats(rows: Sequence[Chat], tokenizer: Tokenizer, context: int | None) -> tuple[EncodedDataset, int]:
    """Encode conversations; also return how many of them lost part of an answer by truncation.

    Conversations are truncated to context + 1 tokens, because the labels are the inputs shifted by one token. A
    conversation in which no token has a label is left out.
    """
    longest = None if context is None else context + 1
    encoded = [encode_chat(row, tokenizer) for row in rows]
    truncated = [EncodedChat(ids[:longest], labels[:longest]) for ids, labels in encoded]
    kept = [index for index, row in enumerate(truncated) if any(label != IGNORE_INDEX for label in row.labels[1:])]
    if not kept:
        raise InputError(f"no conversation has an answer in its first {context} tokens; raise data.max_length")
    fields = {name: RaggedArray(getattr(truncated[index], name) for index in kept) for name in EncodedChat._fields}
    num_truncated = 0
    if longest is not None:
        num_truncated = sum(any(label != IGNORE_INDEX for label in encoded[index].labels[longest:]) for index in kept)
    return EncodedDataset(fields, np.array(kept, np.int64)), num_truncated


def collate_chats(rows: Sequence[dict[str, Any]], special: SpecialTokenIds) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and next-token labels, both of shape (B, T) and padded on the right.

    No padding mask is needed, because attention is causal.
    """
    source = pad_rows([row["ids"][:-1] for row in rows], special.pad_id)
    return {"source": source}, pad_rows([row["labels"][1:] for row in rows], IGNORE_INDEX)
