"""Padding, left or right or both, changes nothing for real tokens, whatever ids it has."""

import pytest
import torch
from support import (
    PADDINGS,
    B,
    assert_near,
    example_inputs,
    is_encoder_decoder,
    is_text,
    law_names,
    pad_rows,
    random_source,
    random_tokens,
    run_model,
    tiny_model,
    unpad_rows,
)


@pytest.mark.parametrize("name", law_names(is_text))
@pytest.mark.parametrize("side", PADDINGS)
def test_padding_changes_nothing_for_real_tokens(name, side):
    model, ids = tiny_model(name), random_tokens()
    padded, valid = pad_rows(ids, *PADDINGS[side])
    with torch.no_grad():
        expected, actual = run_model(model, ids), run_model(model, padded, valid)
    assert_near(unpad_rows(actual, valid), expected)


@pytest.mark.parametrize("name", law_names(is_text))
def test_padding_changes_nothing_in_double_precision(name):
    model, ids = tiny_model(name, torch.float64), random_tokens()
    padded, valid = pad_rows(ids, *PADDINGS["ragged"])
    with torch.no_grad():
        expected, actual = run_model(model, ids), run_model(model, padded, valid)
    assert_near(unpad_rows(actual, valid), expected)


@pytest.mark.parametrize("name", law_names(is_encoder_decoder))
@pytest.mark.parametrize("side", PADDINGS)
def test_padding_of_the_source_changes_nothing(name, side):
    model, ids, source = tiny_model(name), random_tokens(), random_source()
    padded, valid = pad_rows(source, *PADDINGS[side])
    with torch.no_grad():
        assert_near(unpad_rows(model.encode(padded, valid), valid), model.encode(source))
        assert_near(model(padded, ids, source_mask=valid), model(source, ids))


@pytest.mark.parametrize("name", law_names(is_encoder_decoder))
def test_padding_of_source_and_target_together_changes_nothing(name):
    model, ids, source = tiny_model(name), random_tokens(), random_source()
    padded, valid = pad_rows(source, *PADDINGS["ragged"])
    padded_ids, valid_ids = pad_rows(ids, *PADDINGS["both"])
    with torch.no_grad():
        actual = model(padded, padded_ids, source_mask=valid, target_mask=valid_ids)
        assert_near(unpad_rows(actual, valid_ids), model(source, ids))


@pytest.mark.parametrize("name", law_names(is_text))
def test_the_ids_of_padding_do_not_matter(name):
    model = tiny_model(name)
    padded, valid = pad_rows(random_tokens(), *PADDINGS["ragged"])
    other = torch.where(valid, padded, random_tokens(*padded.shape, seed=9))
    with torch.no_grad():
        assert_near(
            unpad_rows(run_model(model, other, valid), valid), unpad_rows(run_model(model, padded, valid), valid)
        )


@pytest.mark.parametrize("name", law_names(is_text))
def test_a_mask_of_ones_is_no_mask(name):
    model, ids = tiny_model(name), random_tokens()
    with torch.no_grad():
        assert torch.equal(run_model(model, ids, torch.ones_like(ids)), run_model(model, ids))


@pytest.mark.parametrize("name", law_names())
def test_permuting_the_batch_permutes_the_output(name):
    model = tiny_model(name)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_near(model(*(t[order] for t in example_inputs(model))), model(*example_inputs(model))[order])


@pytest.mark.parametrize("name", law_names())
def test_a_row_alone_gives_what_it_gives_in_a_batch(name):
    model = tiny_model(name)
    with torch.no_grad():
        assert_near(model(*(t[4:5] for t in example_inputs(model))), model(*example_inputs(model))[4:5])
