"""Chat: answer as the assistant in conversations, which the chat template of the tokenizer renders as text.

Only the tokens of answers have labels. An answer is the rendered text from the end of the generation prompt to the
token that ends the assistant's turn, including that token, so that the model learns to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import Chat
from monoblock.data.readers.text import ASSISTANT_ROLE
from monoblock.errors import InputError
from monoblock.recipes.schema import Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from torch import Tensor

    from monoblock.data.encode import EncodedDataset
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs
    from monoblock.tokenizers.tokenizer import Tokenizer
    from monoblock.training.collate import SpecialTokenIds


class ChatTask(Task):
    name = "chat"
    about = "answer as the assistant in conversations"
    corpus_kinds = ("chat",)
    metrics = ("loss", "perplexity")
    decoding = "sampling"
    verb = "chat"
    defaults = TrainingDefaults(3, 8, 1024)

    def special_tokens(self, recipe: Recipe, train: Corpus, /) -> list[str]:
        return ["pad", "eos"]

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build the training data of a recipe: conversations in which only the tokens of the answers have labels."""
        context, train, valid = inputs.max_length, inputs.train, inputs.valid
        samples, num_truncated = encode_chats(train.rows, inputs.text_tokenizer, context)
        validation = None if valid is None else encode_chats(valid.rows, inputs.text_tokenizer, context)[0]
        summary = f"{len(samples):,} conversations to train on{inputs.truncation_note(num_truncated)}"
        if len(samples) < len(train):
            summary += f" ({len(train) - len(samples):,} without an answer in their first {context} tokens left out)"
        collate = partial(collate_chats, special=inputs.special_tokens)
        return inputs.encoded_data(samples, collate, validation, summary=summary)

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute loss, perplexity and accuracy over the tokens of the answers, including those that end the turns."""
        from monoblock.tasks.batching import score_tokens
        from monoblock.tasks.task_data import iterate_evaluation_batches

        corpus, limit = read_corpus(request, "chat"), request.context or loaded.model.config.context
        samples, num_truncated = encode_chats(corpus.rows, loaded.tokenizer, limit)
        collate = partial(collate_chats, special=loaded.special_tokens)
        metrics = score_tokens(loaded, iterate_evaluation_batches(samples, max(1, request.batch_size // 8), collate))
        notes = ["measured on the tokens of the answers, including the tokens that end turns"]
        if num_truncated:
            notes.append(f"{num_truncated:,} of {len(corpus):,} conversations were cut to {limit} tokens")
        num_dropped = len(corpus) - len(samples)
        if num_dropped:
            notes.append(f"{num_dropped:,} conversations without an answer in their first {limit} tokens were left out")
        return Evaluation({**metrics, "sources": len(samples), "split": corpus.split}, notes=notes)


def encode_chats(rows: Sequence[Chat], tokenizer: Tokenizer, context: int | None) -> tuple[EncodedDataset, int]:
    """Encode conversations; also return how many of them lost part of an answer by truncation.

    Conversations are truncated to context + 1 tokens, because the labels are the inputs shifted by one token. A
    conversation in which no token has a label is left out.
    """
    from monoblock.data.encode import IGNORE_INDEX, EncodedDataset

    longest = None if context is None else context + 1
    samples, num_truncated = [], 0
    for number, row in enumerate(rows):
        ids, labels = encode_chat(row, tokenizer)
        if any(label != IGNORE_INDEX for label in labels[1:longest]):
            samples.append((number, {"ids": ids[:longest], "labels": labels[:longest]}))
            num_truncated += longest is not None and any(label != IGNORE_INDEX for label in labels[longest:])
    if not samples:
        raise InputError(f"no conversation has an answer in its first {context} tokens; raise data.max_length")
    return EncodedDataset.from_samples(samples), num_truncated


def encode_chat(chat: Chat, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Encode a conversation; return its token ids, and their labels: the same ids in answers and −100 elsewhere."""
    from monoblock.data.encode import IGNORE_INDEX

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
    return ids, labels


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


def collate_chats(rows: Sequence[dict[str, Any]], special: SpecialTokenIds) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and next-token labels, both of shape (B, T) and padded on the right.

    No padding mask is needed, because attention is causal.
    """
    from monoblock.data.encode import IGNORE_INDEX
    from monoblock.training.collate import pad_rows

    source = pad_rows([row["ids"][:-1] for row in rows], special.pad_id)
    return {"source": source}, pad_rows([row["labels"][1:] for row in rows], IGNORE_INDEX)
