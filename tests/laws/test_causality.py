"""A future token never changes a past logit: the same bits, and no gradient."""

import pytest
import torch
from support import (
    LeafTap,
    T,
    all_experts_tap,
    assert_bit_equal,
    assert_near,
    has_decoder,
    has_experts,
    is_encoder_decoder,
    law_names,
    random_tokens,
    run_model,
    tiny_model,
)

DECODERS = law_names(has_decoder)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("index", [1, 7, T - 1])
def test_a_future_token_never_changes_a_past_logit(name, index):
    model, ids = tiny_model(name), random_tokens()
    changed = ids.index_fill(1, torch.tensor([index]), 0)
    with torch.no_grad():
        before, after = (run_model(model, text, tap=all_experts_tap()) for text in (ids, changed))
    assert_bit_equal(after[:, :index], before[:, :index])
    assert not torch.equal(after[:, index], before[:, index])


@pytest.mark.parametrize("name", DECODERS)
def test_all_future_tokens_together_never_change_a_past_logit(name):
    model, ids = tiny_model(name), random_tokens()
    changed = torch.cat((ids[:, :5], random_tokens(seed=1)[:, 5:]), 1)
    with torch.no_grad():
        before, after = (run_model(model, text, tap=all_experts_tap()) for text in (ids, changed))
    assert_bit_equal(after[:, :5], before[:, :5])


@pytest.mark.parametrize("name", law_names(lambda config: has_decoder(config) and has_experts(config)))
def test_gathered_experts_are_causal_up_to_rounding(name):
    model, ids = tiny_model(name), random_tokens()
    changed = ids.index_fill(1, torch.tensor([7]), 0)
    assert_near(model(changed)[:, :7], model(ids)[:, :7])


@pytest.mark.parametrize("name", DECODERS)
def test_past_logits_have_no_gradient_in_future_embeddings(name):
    model, index = tiny_model(name), 6
    has_target = model.target is not None or is_encoder_decoder(model.config)
    tap = LeafTap("target.output" if has_target else "input.output")
    run_model(model, random_tokens(), tap=tap)[:, : index + 1].sin().sum().backward()
    assert not tap.leaf.grad[:, index + 1 :].any()
    assert tap.leaf.grad[:, : index + 1].abs().amax((0, 2)).gt(0).all()


@pytest.mark.parametrize("name", law_names(is_encoder_decoder))
def test_every_target_token_sees_the_whole_source(name):
    model, tap = tiny_model(name), LeafTap("input.output")
    run_model(model, random_tokens(), tap=tap)[:, :1].sin().sum().backward()
    assert tap.leaf.grad.abs().amax((0, 2)).gt(0).all()
