"""Errors of invalid fields name the path under which the user wrote them, or else the class."""

import pickle
from dataclasses import dataclass

import pytest

from monoblock.config.families import gpt
from monoblock.config.model import ModelConfig
from monoblock.config.schema import FieldError, check_at_least, check_fraction, check_positive, check_types, from_dict
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    rate: float = 0.0
    cap: float | None = None

    def __post_init__(self):
        check_types(self)
        check_at_least(self, 1, "size")
        check_fraction(self, "rate")
        check_positive(self, "cap")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    items: tuple[Inner, ...] = ()
    table: dict

    def __post_init__(self):
        check_types(self)


INVALID = {
    "size='x' is not a whole number": {"size": "x"},
    "size=0 is too small; write 1 or more": {"size": 0},
    "rate=1.5 is not a rate; write 0 or more and less than 1": {"rate": 1.5},
    "cap=0 must be positive, or None": {"cap": 0},
}


@pytest.mark.parametrize(("problem", "fields"), INVALID.items(), ids=INVALID)
def test_an_invalid_field_is_named_by_its_class_or_its_path(problem, fields):
    for build, path in [
        (lambda: Inner(**fields), "Inner"),
        (lambda: from_dict(Inner, fields), "Inner"),
        (lambda: from_dict(Inner, fields, "train"), "train"),
        (lambda: from_dict(Outer, {"table": {}, "inner": fields}), "inner"),
        (lambda: from_dict(Outer, {"table": {}, "items": [{}, fields]}, "a"), "a.items.1"),
    ]:
        with pytest.raises(ConfigError) as caught:
            build()
        assert str(caught.value) == f"{path}.{problem}"


def test_a_dict_is_called_a_table():
    with pytest.raises(ConfigError, match=r"^Outer\.table=3 is not a table$"):
        from_dict(Outer, {"table": 3})


def test_a_mistake_deep_in_a_model_is_reported_with_its_path():
    data = gpt(vocab=5, width=8, depth=1, heads=2, context=4).to_dict()
    data["decoder"]["pattern"][0]["blocks"][0]["feedforward"]["hidden"] = "many"
    with pytest.raises(
        ConfigError, match=r"^decoder\.pattern\.0\.blocks\.0\.feedforward\.hidden='many' is not a whole number"
    ):
        ModelConfig.from_dict(data)


def test_a_field_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(FieldError("train", "lr", "=x is not a number").with_path("model")))
    assert str(error) == "model.lr=x is not a number"
    assert str(error.with_path("")) == "lr=x is not a number"
