"""Every error monoblock raises on purpose.

    Exception
    └── MonoblockError          catch this to catch all of ours
        ├── ConfigError         a configuration that cannot be          (also a ValueError)
        ├── InputError          ids, masks or shapes a model cannot use (also a ValueError)
        └── FileError           a file or folder that cannot be used    (also a ValueError)
            └── SplitError      a split that a corpus does not have

A message is one line: what was given, why it cannot be, what to write instead. `assert` is kept for our own bugs.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class MonoblockError(Exception):
    """The root of the tree; raised itself only where no child fits."""


class ConfigError(MonoblockError, ValueError):
    """A configuration that cannot be: a wrong key, a value out of range, two choices that contradict each other."""


class InputError(MonoblockError, ValueError):
    """Something given to a model that it cannot use: ids, masks, shapes, lengths."""


# Not an OSError: its constructor gives several arguments a meaning (errno, filename), and ours takes one line of text.
class FileError(MonoblockError, ValueError):
    """A file or folder that is missing, damaged, in the way, or of another kind than asked for."""


class SplitError(FileError):
    """A split that a corpus does not have; one that is there with a fault is a FileError."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: "; did you mean 'width'?", or "" where nothing comes close."""
    by_folded = {choice.lower(): choice for choice in choices}
    close = get_close_matches(word.lower(), by_folded, n=1)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""


def with_article(words: str) -> str:
    """ "a decoder-only", "an encoder-only": for the middle of a message."""
    return f"{'an' if words[:1] in 'aeiou' else 'a'} {words}"
