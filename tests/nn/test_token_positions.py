"""`monoblock.Where`, the old name of `TokenPositions`, with the old names of its fields."""

import copy
import warnings

import pytest
import torch

import monoblock as mb
from monoblock.nn import token_positions
from monoblock.nn.token_positions import TokenPositions

POSITIONS = torch.tensor([[0, 1, 2]])
VALID = torch.tensor([[True, True, False]])
FLAGS = torch.tensor([[True, False, False]])


@pytest.fixture(autouse=True)
def never_warned(monkeypatch):
    monkeypatch.setattr(token_positions, "_has_warned", False)
    vars(mb).pop("Where", None)
    yield
    vars(mb).pop("Where", None)


def test_where_takes_the_old_arguments_and_warns_once():
    with pytest.warns(DeprecationWarning, match="monoblock.Where is now monoblock.TokenPositions") as caught:
        where = mb.Where(at=POSITIONS, real=VALID, flags=FLAGS)
    assert [one.filename for one in caught] == [__file__]
    # From here on a warning would be an error.
    assert where.at is POSITIONS
    assert where.real is VALID
    assert where.flags is FLAGS
    assert mb.Where(POSITIONS, None, VALID).real is VALID
    assert where.each(lambda t: t[:, :2]).length == 2
    assert isinstance(where, mb.Where)
    assert isinstance(where, TokenPositions)
    assert where.positions is POSITIONS
    assert where.valid is VALID
    assert where.prefix_or_global is FLAGS


def test_the_old_fields_alone_warn_once():
    positions = TokenPositions(POSITIONS, valid=VALID)
    with pytest.warns(DeprecationWarning, match="at, real, flags and each are now positions") as caught:
        assert positions.at is POSITIONS
    assert [one.filename for one in caught] == [__file__]
    assert positions.real is VALID


def test_an_old_object_masks_as_the_new_one():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = mb.Where(at=POSITIONS, real=VALID)
    new = TokenPositions(POSITIONS, valid=VALID)
    assert torch.equal(mb.causal.dense(where, where), mb.causal.dense(new, new))
    assert type(copy.deepcopy(where)) is TokenPositions
