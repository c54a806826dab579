"""Tokens in, text out, as soon as it is certain: whole characters only, and nothing of a string that stops the text.

    text = Text(tokenizer, stop=["\n\n"], after=prompt_ids)
    for token in tokens:
        show(text.add(token))
    show(text.end())

What is shown, put together, is what the tokenizer makes of all the tokens at once (up to a stop string).  A token may
be a part of a character (bytes), bring a space that its neighbour decides about, or be one byte of a run that is a text
only as a whole; so text is held back while tokens to come can still change it.
"""

from __future__ import annotations

from collections.abc import Sequence

from monoblock.errors import InputError
from monoblock.tokenizers.tokenizer import Tokenizer

PARTIAL = "\ufffd"  # what bytes that are no character yet are decoded to
KEPT, MOST = 8, 64  # tokens of context that are decoded again with each new one: at least, and before it is cut


class Text:
    """The text of one sequence of tokens, bit by bit; `after` are the tokens before it, which decide about spaces."""

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, _stops(stop)
        self.unseen = tokenizer.special_ids - {tokenizer.unk_id}
        self.stopped: str | None = None  # the stop string that ended the text
        self.ids: list[int] = [*after]
        self.said = len(self._whole()) if after else 0  # characters of the text of `ids` that are certain
        self.held = ""  # certain, but perhaps the beginning of a stop string
        self._cut()

    def add(self, *tokens: int) -> str:
        """What has become certain with these tokens."""
        if self.stopped is not None:
            return ""
        self.ids += tokens
        if self._within_bytes():
            return ""
        whole = self._whole()
        certain = whole.rstrip(PARTIAL)
        new, self.said = certain[self.said :], max(self.said, len(certain))
        if whole == certain and len(self.ids) > MOST:
            self._cut()
        return self._before_stop(new)

    def end(self) -> str:
        """What was held back, now that nothing follows."""
        if self.stopped is not None:
            return ""
        rest = self._before_stop(self._whole()[self.said :])
        rest, self.held = rest + self.held, ""
        return rest

    # -- tokens to text -------------------------------------------------------------------------------------------

    def _whole(self) -> str:
        return self.tokenizer.decode(self.ids)

    def _within_bytes(self) -> bool:
        """Whether the last token is a byte that stands for itself: such a run is read as a whole or not at all."""
        last = next((token for token in reversed(self.ids) if token not in self.unseen), None)
        if last is None:
            return False
        found = self.tokenizer.bytes_of(last)
        return found is not None and len(found) == 1 and self.tokenizer.token(last).startswith("<0x")

    def _cut(self) -> None:
        """Forget tokens whose text is out; a few stay, with letters among them, since a first space is dropped and
        bytes that are cut off from the first of their run are no letters."""
        for size in range(KEPT, len(self.ids)):
            part = self.tokenizer.decode(self.ids[-size:])
            if part.strip(f" {PARTIAL}"):
                self.ids, self.said = self.ids[-size:], len(part)
                return

    # -- stop strings ---------------------------------------------------------------------------------------------

    def _before_stop(self, new: str) -> str:
        """The text that can be shown: none of a stop string, nor of what may be the beginning of one."""
        waiting = self.held + new
        found = [(waiting.find(stop), stop) for stop in self.stops if stop in waiting]
        if found:
            place, self.stopped = min(found)
            self.held = ""
            return waiting[:place]
        begun = max((_overlap(waiting, stop) for stop in self.stops), default=0)
        shown = waiting[: len(waiting) - begun]
        self.held = waiting[len(shown) :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many last characters of the text are the first of the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError("an empty stop string would stop before the first word; leave it out")
    return stops
