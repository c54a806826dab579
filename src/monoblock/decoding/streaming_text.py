"""Decode tokens to text while they are generated.

    text = StreamingText(tokenizer, stop=["\\n\\n"], context_ids=prompt_ids)
    for token in tokens:
        print(text.add(token), end="")
    print(text.finish())

The emitted pieces concatenate to the text that the tokenizer decodes from all tokens at once, up to a stop string. Text
is held back as long as later tokens can change it: a token may be part of a character (bytes), its leading space may
depend on its neighbour, and byte-fallback tokens are decoded only as a complete run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from monoblock.decoding.engine import Engine
from monoblock.errors import InputError
from monoblock.tokenizers.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes that are not a complete character yet
MIN_CONTEXT, MAX_CONTEXT = 8, 64  # tokens decoded again with each new one: kept at least, and allowed at most


class StreamingText:
    """The growing text of one sequence; `context_ids`, the tokens before it, decide whether it starts with a space."""

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), context_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, _check_stops(stop)
        self.skipped_ids = tokenizer.special_ids - {tokenizer.unk_id}
        self.matched_stop: str | None = None  # the stop string that ended the text
        self.ids: list[int] = [*context_ids]
        self.num_emitted = len(self._decode()) if context_ids else 0  # final characters of the text of `ids`
        self.pending = ""  # final, but possibly the beginning of a stop string
        self._trim_context()

    def add(self, *tokens: int) -> str:
        """Append tokens; return the text that has become final."""
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
        """Return the text that was held back, since no token follows."""
        if self.matched_stop is not None:
            return ""
        rest = self._emit(self._decode()[self.num_emitted :])
        rest, self.pending = rest + self.pending, ""
        return rest

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids)

    def _is_inside_bytes(self) -> bool:
        """Whether the last token is a byte-fallback token, whose run is decoded as a whole."""
        last = next((token for token in reversed(self.ids) if token not in self.skipped_ids), None)
        if last is None:
            return False
        raw = self.tokenizer.token_bytes(last)
        return raw is not None and len(raw) == 1 and self.tokenizer.token(last).startswith("<0x")

    def _trim_context(self) -> None:
        """Forget emitted tokens, but keep enough of them to contain a letter.

        Decoders drop the first space of a text, and bytes cut off from the first of their run decode to no letter.
        """
        for size in range(MIN_CONTEXT, len(self.ids)):
            text = self.tokenizer.decode(self.ids[-size:])
            if text.strip(f" {REPLACEMENT_CHARACTER}"):
                self.ids, self.num_emitted = self.ids[-size:], len(text)
                return

    def _emit(self, new: str) -> str:
        """Return the text up to a stop string, or up to a possible beginning of one, which stays pending."""
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
    """The length of the longest suffix of the text that is a proper prefix of the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _check_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise InputError("an empty stop string would stop before the first word; leave it out")
    return stops


# -- the outputs of an engine as text ---------------------------------------------------------------------------------


class TextChunk(NamedTuple):
    """New text of one sequence of one prompt."""

    prompt_index: int
    sequence_index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None  # "stop": an end token or a stop string; "length": no more room
    score: float | None = None  # beam search: sum of log-probabilities / length ** length_penalty
    ids: tuple[int, ...] = ()


def stream_chunks(
    engine: Engine,
    prompt_of_request: dict[int, int],
    texts: dict[tuple[int, int], StreamingText],
    eos_ids: Sequence[int],
) -> Iterator[TextChunk]:
    """Run an engine and decode its outputs; a request is cancelled once stop strings have ended all its texts.

    prompt_of_request: request id -> index of its prompt.
    texts: (request id, sequence index) -> the text to append to.
    """
    running = set(texts)
    while engine.busy:
        for output in engine.step():
            key = (output.request_id, output.sequence_index)
            if key not in running:
                continue
            text, last = texts[key], output.tokens[-1] if output.tokens else None
            tokens = output.tokens[:-1] if output.finish_reason == "stop" and last in eos_ids else output.tokens
            new = text.add(*tokens) + (text.finish() if output.finish_reason else "")
            finish_reason = "stop" if text.matched_stop is not None else output.finish_reason
            yield TextChunk(
                prompt_of_request[output.request_id],
                output.sequence_index,
                new,
                len(output.tokens),
                finish_reason,
                output.score,
                output.tokens,
            )
            if finish_reason:
                running.discard(key)
            if text.matched_stop is not None and not any(request == output.request_id for request, _ in running):
                engine.cancel(output.request_id)


def chunk_texts(chunks: Iterator[TextChunk]) -> Iterator[str]:
    """Yield the texts of the chunks, without empty ones."""
    return (chunk.text for chunk in chunks if chunk.text)
