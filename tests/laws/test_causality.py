"""A future token never moves a past logit: the same bits, and no gradient at all."""

import pytest
import torch
from support import (
    Leaf,
    T,
    all_experts,
    bit_equal,
    close,
    has_both,
    has_experts,
    is_decoder,
    presets,
    read,
    tokens,
    toy,
)

DECODERS = presets(is_decoder)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("place", [1, 7, T - 1])
def test_a_future_token_never_moves_a_past_logit(name, place):
    model, ids = toy(name), tokens()
    changed = ids.index_fill(1, torch.tensor([place]), 0)
    with torch.no_grad():
        before, after = (read(model, text, tap=all_experts()) for text in (ids, changed))
    bit_equal(after[:, :place], before[:, :place])
    assert not torch.equal(after[:, place], before[:, place])


@pytest.mark.parametrize("name", DECODERS)
def test_the_whole_future_never_moves_a_past_logit(name):
    model, ids = toy(name), tokens()
    changed = torch.cat((ids[:, :5], tokens(seed=1)[:, 5:]), 1)
    with torch.no_grad():
        before, after = (read(model, text, tap=all_experts()) for text in (ids, changed))
    bit_equal(after[:, :5], before[:, :5])


@pytest.mark.parametrize("name", presets(lambda config: is_decoder(config) and has_experts(config)))
def test_gathered_experts_are_causal_up_to_rounding(name):
    model, ids = toy(name), tokens()
    changed = ids.index_fill(1, torch.tensor([7]), 0)
    close(model(changed)[:, :7], model(ids)[:, :7])


@pytest.mark.parametrize("name", DECODERS)
def test_past_logits_have_no_gradient_in_future_embeddings(name):
    model, place = toy(name), 6
    own = model.target is not None or has_both(model.config)
    tap = Leaf("target.output" if own else "input.output")
    read(model, tokens(), tap=tap)[:, : place + 1].sin().sum().backward()
    assert not tap.leaf.grad[:, place + 1 :].any()
    assert tap.leaf.grad[:, : place + 1].abs().amax((0, 2)).gt(0).all()


@pytest.mark.parametrize("name", presets(has_both))
def test_every_target_token_sees_the_whole_source(name):
    model, tap = toy(name), Leaf("input.output")
    read(model, tokens(), tap=tap)[:, :1].sin().sum().backward()
    assert tap.leaf.grad.abs().amax((0, 2)).gt(0).all()
