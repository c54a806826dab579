"""The exceptions, and the suggestion at the end of a message."""

import pytest

from monoblock import errors
from monoblock.errors import ConfigError, FileError, InputError, MonoblockError, did_you_mean


@pytest.mark.parametrize("child", [ConfigError, InputError, FileError])
def test_every_error_is_a_monoblock_error_and_a_value_error(child):
    with pytest.raises(MonoblockError, match="a message"):
        raise child("a message")
    assert issubclass(child, ValueError)


def test_the_module_docstring_lists_every_error():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert all(name in errors.__doc__ for name in defined)


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("widht", "; did you mean 'width'?"),
        ("WIDTH", "; did you mean 'width'?"),
        ("kvheads", "; did you mean 'kv_heads'?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_did_you_mean_suggests_the_nearest_choice_or_nothing(word, suggestion):
    assert did_you_mean(word, ["width", "depth", "kv_heads"]) == suggestion


def test_did_you_mean_accepts_any_iterable_even_an_empty_one():
    assert did_you_mean("width", {}) == ""
    assert did_you_mean("Gpt2", {"gpt2": 1, "GPT-J": 2}) == "; did you mean 'gpt2'?"
    assert did_you_mean("gpt-j", (name for name in ["gpt2", "GPT-J"])) == "; did you mean 'GPT-J'?"
