"""What callers hand in, checked once: texts the library can take, ids that are whole numbers."""

from collections.abc import Iterable
from typing import Any

from monoblock.errors import InputError


def check_text(text: Any, what: str = "the text") -> None:
    """Raise InputError unless this is a string the library can take: it refuses half a surrogate pair."""
    if not isinstance(text, str):
        raise InputError(f"{what} is a {type(text).__name__}; give a str")
    if text.isascii():  # costs nothing, and spares most texts the look at every character
        return
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        code = ord(text[problem.start])
        place = f"U+{code:04X} at {problem.start}"
        raise InputError(f"{what} holds half a surrogate pair ({place}), which is no character") from None


def text_list(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise InputError("texts is one string, which would be read letter by letter; write [text]")
    texts = list(texts)
    for place, text in enumerate(texts):
        check_text(text, "the text" if len(texts) == 1 else f"text {place}")
    return texts


def id_list(ids: Any) -> list[int]:
    """Whole numbers from a list, a tensor or an array."""
    found = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(found, list) or not all(isinstance(number, int) for number in found):
        raise InputError("ids are not a list of whole numbers; give one sequence at a time")
    return found
