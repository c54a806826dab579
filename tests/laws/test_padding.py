"""Padding, left or right or both, changes nothing for real tokens, whatever stands in it."""

import pytest
import torch
from support import (
    PADDINGS,
    B,
    close,
    given,
    has_both,
    is_text,
    padded,
    presets,
    read,
    real_part,
    source,
    tokens,
    toy,
)


@pytest.mark.parametrize("name", presets(is_text))
@pytest.mark.parametrize("side", PADDINGS)
def test_padding_changes_nothing_for_real_tokens(name, side):
    model, ids = toy(name), tokens()
    wide, real = padded(ids, *PADDINGS[side])
    with torch.no_grad():
        expected, found = read(model, ids), read(model, wide, real)
    close(real_part(found, real), expected)


@pytest.mark.parametrize("name", presets(is_text))
def test_padding_changes_nothing_in_double_precision(name):
    model, ids = toy(name, torch.float64), tokens()
    wide, real = padded(ids, *PADDINGS["ragged"])
    with torch.no_grad():
        expected, found = read(model, ids), read(model, wide, real)
    close(real_part(found, real), expected)


@pytest.mark.parametrize("name", presets(has_both))
@pytest.mark.parametrize("side", PADDINGS)
def test_padding_of_the_source_changes_nothing(name, side):
    model, ids, src = toy(name), tokens(), source()
    wide, real = padded(src, *PADDINGS[side])
    with torch.no_grad():
        close(real_part(model.encode(wide, real), real), model.encode(src))
        close(model(wide, ids, source_mask=real), model(src, ids))


@pytest.mark.parametrize("name", presets(has_both))
def test_padding_of_source_and_target_together_changes_nothing(name):
    model, ids, src = toy(name), tokens(), source()
    wide, real = padded(src, *PADDINGS["ragged"])
    wide_ids, real_ids = padded(ids, *PADDINGS["both"])
    with torch.no_grad():
        found = model(wide, wide_ids, source_mask=real, target_mask=real_ids)
        close(real_part(found, real_ids), model(src, ids))


@pytest.mark.parametrize("name", presets(is_text))
def test_what_stands_in_the_padding_does_not_matter(name):
    model = toy(name)
    wide, real = padded(tokens(), *PADDINGS["ragged"])
    other = torch.where(real, wide, tokens(*wide.shape, seed=9))
    with torch.no_grad():
        close(real_part(read(model, other, real), real), real_part(read(model, wide, real), real))


@pytest.mark.parametrize("name", presets(is_text))
def test_a_mask_of_ones_is_no_mask(name):
    model, ids = toy(name), tokens()
    with torch.no_grad():
        assert torch.equal(read(model, ids, torch.ones_like(ids)), read(model, ids))


@pytest.mark.parametrize("name", presets())
def test_rows_move_with_the_batch(name):
    model = toy(name)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(model(*(t[order] for t in given(model))), model(*given(model))[order])


@pytest.mark.parametrize("name", presets())
def test_a_row_alone_gives_what_it_gives_among_others(name):
    model = toy(name)
    with torch.no_grad():
        close(model(*(t[4:5] for t in given(model))), model(*given(model))[4:5])
