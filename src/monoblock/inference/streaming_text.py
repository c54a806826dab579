"""Decode tokens to text while they are generated.

    text = StreamingText(tokenizer, stop=["\\n\\n"], context_ids=prompt_ids)
    for token in tokens:
        print(text.add(token), end="")
    print(text.finish())

The returned strings concatenate to the text that the tokenizer decodes from all tokens at once, up to the first stop
string.  Text is held back as long as later tokens can change it: a token may hold only some bytes of a character, its
leading space may depend on the token before it, and byte-fallback tokens such as <0xE2> are decoded as a whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from monoblock.errors import InputError
from monoblock.tokenizers.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes that are not a complete character yet
MIN_CONTEXT, MAX_CONTEXT = 8, 64  # earlier tokens that are decoded again with a new one: least and most


class StreamingText:
    """The text of one sequence, decoded while its tokens are generated.

    stop: strings that end the text; they are not part of it.
    context_ids: the tokens before the sequence, usually the prompt; they decide whether the text starts with a space.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), context_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise InputError("an empty stop string would end the text before its first character; leave it out")
        self.skipped_ids = tokenizer.special_ids - {tokenizer.unk_id}
        self.matched_stop: str | None = None  # the stop string that ended the text
        self.ids: list[int] = [*context_ids]
        self.num_emitted = len(self._decode()) if context_ids else 0  # how much of the text of `ids` is final
        self.pending = ""  # final text that may be the beginning of a stop string
        self._trim_context()

    def add(self, *tokens: int) -> str:
        """Append tokens and return the text that no later token can change."""
        if self.matched_stop is not None:
            return ""
        self.ids += tokens
        if self._is_inside_bytes():
            return ""
        text = self._decode()
        final = text.rstrip(REPLACEMENT_CHARACTER)
        new, self.num_emitted = final[self.num_emitted :], max(self.num_emitted, len(final))
        if text == final and len(self.ids) > MAX_CONTEXT:
            self._trim_context()
        return self._emit(new)

    def finish(self) -> str:
        """End the sequence and return the text that was held back."""
        if self.matched_stop is not None:
            return ""
        rest = self._emit(self._decode()[self.num_emitted :])
        rest, self.pending = rest + self.pending, ""
        return rest

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids)

    def _is_inside_bytes(self) -> bool:
        """Return whether the text ends with a byte-fallback token, so that the run of bytes may go on."""
        last = next((token for token in reversed(self.ids) if token not in self.skipped_ids), None)
        if last is None:
            return False
        raw = self.tokenizer.token_bytes(last)
        return raw is not None and len(raw) == 1 and self.tokenizer.token(last).startswith("<0x")

    def _trim_context(self) -> None:
        """Drop tokens whose text has been returned, except the last ones: enough of them to contain a character.

        Spaces and incomplete bytes do not count as characters.  A tokenizer drops a space at the start of a text and
        cannot decode bytes without the first byte of their character, so they do not show how the text goes on.
        """
        for size in range(MIN_CONTEXT, len(self.ids)):
            text = self.tokenizer.decode(self.ids[-size:])
            if text.strip(f" {REPLACEMENT_CHARACTER}"):
                self.ids, self.num_emitted = self.ids[-size:], len(text)
                return

    def _emit(self, new: str) -> str:
        """Return the text up to a stop string.  The end of the text stays pending if a stop string may begin there."""
        text = self.pending + new
        matches = [(text.find(stop), stop) for stop in self.stop_strings if stop in text]
        if matches:
            start, self.matched_stop = min(matches)
            self.pending = ""
            return text[:start]
        overlap = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        emitted = text[: len(text) - overlap]
        self.pending = text[len(emitted) :]
        return emitted


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a beginning of `stop`, but not all of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


# -- the outputs of an engine as text ---------------------------------------------------------------------------------


class TextChunk(NamedTuple):
    """The new text of one sequence of one prompt."""

    prompt_index: int
    sequence_index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None  # see FINISH_REASONS in inference/scheduler.py
    score: float | None = None  # beam search: sum of log-probabilities / length ** length_penalty
    ids: tuple[int, ...] = ()


def stream_chunks(
    engine: Any,
    prompt_of_request: dict[int, int],
    texts: dict[tuple[int, int], StreamingText],
    eos_ids: Sequence[int],
) -> Iterator[TextChunk]:
    """Run an engine until it is idle, and yield its outputs as text.

    A request is cancelled when stop strings have ended all of its sequences.

    engine: an `Engine`, or the own decoder of a model that has one.
    prompt_of_request: the index of the prompt of each request id.
    texts: the text of each sequence, by (request id, sequence index).
    eos_ids: end tokens, which are left out of the text.
    """
    running = set(texts)
    while engine.busy:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            key = (output.request_id, output.sequence_index)
            if key not in running:
                continue
            text, last = texts[key], output.tokens[-1] if output.tokens else None
            tokens = output.tokens[:-1] if output.finish_reason == "stop" and last in eos_ids else output.tokens
            new = text.add(*tokens) + (text.finish() if output.finish_reason else "")
            finish_reason = "stop" if text.matched_stop is not None else output.finish_reason
            place = prompt_of_request[output.request_id], output.sequence_index
            yield TextChunk(*place, new, len(output.tokens), finish_reason, output.score, output.tokens)
            if finish_reason:
                running.discard(key)
            if text.matched_stop is not None and not any(request == output.request_id for request, _ in running):
                engine.cancel(output.request_id)


def chunk_texts(chunks: Iterator[TextChunk]) -> Iterator[str]:
    """Yield the text of each chunk that has any."""
    return (chunk.text for chunk in chunks if chunk.text)
