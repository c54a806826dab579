"""The exceptions of the package.

    Exception
    └── MonoblockError          the base class of all the others
        ├── ConfigError         an invalid configuration                (also a ValueError)
        ├── InputError          invalid ids, masks or shapes            (also a ValueError)
        └── FileError           an unusable file or folder              (also a ValueError)
            └── SplitError      a split that a corpus does not have

A message is one line of at most 300 characters: what was given, why it is invalid, what to write instead. `assert`
guards against bugs in the package itself.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

MAX_MESSAGE_LENGTH = 300
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def shorten_message(text: str) -> str:
    """Return a message as one line of at most 300 characters; a longer one loses its middle, and keeps its advice."""
    text = CONTROL_CHARACTERS.sub(" ", text)
    if len(text) <= MAX_MESSAGE_LENGTH:
        return text
    return f"{text[: 2 * MAX_MESSAGE_LENGTH // 3]} … {text[3 - MAX_MESSAGE_LENGTH // 3 :]}"


class MonoblockError(Exception):
    """The base class of all exceptions of the package; raised directly only if no subclass fits."""

    def __str__(self) -> str:
        return shorten_message(super().__str__())


class ConfigError(MonoblockError, ValueError):
    """An invalid configuration: an unknown key, a value out of range, or choices that contradict each other."""


class InputError(MonoblockError, ValueError):
    """Input that a model cannot process, because its ids, masks, shapes or lengths are invalid."""


# Not an OSError, whose constructor interprets its arguments as errno and filename.
class FileError(MonoblockError, ValueError):
    """A file or folder that is missing, damaged, already there, or of the wrong kind."""


class SplitError(FileError):
    """A split that a corpus does not have. For a split that exists but is damaged, a plain FileError is raised."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message that suggests the choice most similar to `word`: "; did you mean 'width'?".

    Return "" if no choice is similar.
    """
    by_lowercase = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(word.lower(), by_lowercase, n=1)
    return f"; did you mean {by_lowercase[matches[0]]!r}?" if matches else ""


def with_article(words: str) -> str:
    """Return the words after "a" or "an", as in "a decoder-only" and "an encoder-only"."""
    return f"{'an' if words[:1].lower() in 'aeiou' else 'a'} {words}"
