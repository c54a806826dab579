"""Check arguments: texts must be acceptable to the `tokenizers` library, and ids must be integers."""

from collections.abc import Iterable
from typing import Any

from monoblock.errors import InputError


def check_text(text: Any, name: str = "the text") -> None:
    """Raise InputError unless `text` is a str without lone surrogates, which the `tokenizers` library rejects.

    The error calls the text `name`.
    """
    if not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}; give a str")
    if text.isascii():  # a flag that every str stores, so that most texts are not scanned
        return
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        code = ord(text[problem.start])
        raise InputError(
            f"{name} holds half a surrogate pair (U+{code:04X} at {problem.start}), which is no character; remove it"
        ) from None


def check_texts(texts: Iterable[str]) -> list[str]:
    """Check each text with `check_text` and return the texts as a list."""
    if isinstance(texts, str):
        raise InputError("texts is one string, which would be read letter by letter; write [text]")
    texts = list(texts)
    for index, text in enumerate(texts):
        check_text(text, "the text" if len(texts) == 1 else f"text {index}")
    return texts


def to_id_list(ids: Any) -> list[int]:
    """Convert a list, a tensor or an array of ids to a list of int."""
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise InputError("ids are not a list of whole numbers; give one sequence at a time")
    return values
