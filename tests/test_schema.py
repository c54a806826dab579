"""What is said of a wrong field: by its class where that is all there is, by the user's own key where one is known."""

import pickle
from dataclasses import dataclass

import pytest

from monoblock.config import ModelConfig
from monoblock.errors import ConfigError
from monoblock.families import gpt
from monoblock.schema import FieldError, check, check_at_least, check_fraction, check_positive, from_dict


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    rate: float = 0.0
    cap: float | None = None

    def __post_init__(self):
        check(self)
        check_at_least(self, 1, "size")
        check_fraction(self, "rate")
        check_positive(self, "cap")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    several: tuple[Inner, ...] = ()
    table: dict

    def __post_init__(self):
        check(self)


WRONG = {
    "size='x' cannot be: it is a whole number": {"size": "x"},
    "size=0 is too small; write 1 or more": {"size": 0},
    "rate=1.5 is no rate; write a number from 0 to below 1": {"rate": 1.5},
    "cap=0 must be positive; None switches it off": {"cap": 0},
}


@pytest.mark.parametrize(("said", "given"), WRONG.items(), ids=WRONG)
def test_a_wrong_field_is_named_by_its_class_or_by_where_it_was_written(said, given):
    for build, place in [
        (lambda: Inner(**given), "Inner"),
        (lambda: from_dict(Inner, given), "Inner"),
        (lambda: from_dict(Inner, given, "train"), "train"),
        (lambda: from_dict(Outer, {"table": {}, "inner": given}), "inner"),
        (lambda: from_dict(Outer, {"table": {}, "several": [{}, given]}, "a"), "a.several.1"),
    ]:
        with pytest.raises(ConfigError) as caught:
            build()
        assert str(caught.value) == f"{place}.{said}"


def test_a_table_is_called_one():
    with pytest.raises(ConfigError, match=r"^Outer\.table=3 cannot be: it is a table$"):
        from_dict(Outer, {"table": 3})


def test_a_mistake_deep_in_a_model_is_named_with_its_place():
    data = gpt(vocab=5, width=8, depth=1, heads=2, context=4).to_dict()
    data["decoder"]["pattern"][0]["blocks"][0]["feedforward"]["hidden"] = "many"
    with pytest.raises(ConfigError, match=r"^decoder\.pattern\.0\.blocks\.0\.feedforward\.hidden='many' cannot be"):
        ModelConfig.from_dict(data)


def test_it_travels_from_one_process_to_another():
    error = pickle.loads(pickle.dumps(FieldError("train", "lr", "=x cannot be").at("model")))
    assert str(error) == "model.lr=x cannot be"
    assert str(error.at("")) == "lr=x cannot be"
