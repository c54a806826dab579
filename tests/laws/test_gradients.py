"""Gradients reach every parameter and are finite, also with rows of padding only and in 16 bits."""

import pytest
import torch
from support import (
    ActivationTap,
    block_configs,
    build_model,
    example_inputs,
    is_encoder_decoder,
    is_text,
    law_names,
    pad_rows,
    random_source,
    random_tokens,
    run_model,
    tiny_config,
    tiny_names,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weighted_mean(out):
    """A loss that weights every output differently."""
    return (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).mean()


@pytest.mark.parametrize("name", law_names())
@pytest.mark.parametrize("tap", [None, ActivationTap("weights", "outputs")], ids=["fused", "plain"])
def test_every_parameter_has_a_gradient(name, tap):
    model = build_model(tiny_config(name)).train()
    weighted_mean(model(*example_inputs(model), tap=tap)).backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None, key
        assert weight.grad.isfinite().all(), key
        assert weight.grad.any(), key


@pytest.mark.parametrize("name", law_names(is_text))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tap", [None, ActivationTap("weights")], ids=["fused", "plain"])
def test_rows_that_see_nothing_give_no_nan(name, dtype, tap):
    """One row is all padding; the others begin and end with it."""
    model = build_model(tiny_config(name), dtype)
    padded, valid = pad_rows(random_tokens(), 2, 3)
    valid[4] = False
    out = run_model(model, padded, valid, tap=tap)
    assert out.isfinite().all()
    weighted_mean(out).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("name", law_names(is_encoder_decoder))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tap", [None, ActivationTap("weights")], ids=["fused", "plain"])
def test_an_empty_source_gives_no_nan(name, dtype, tap):
    model, source = build_model(tiny_config(name), dtype), random_source()
    valid = torch.ones_like(source)
    valid[2] = 0
    out = model(source, random_tokens(), source_mask=valid, tap=tap)
    assert out.isfinite().all()
    weighted_mean(out).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("name", law_names(is_text))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_and_the_last_of_the_vocabulary_are_fine(name, dtype):
    model = build_model(tiny_config(name), dtype)
    ids = torch.tensor([[0], [model.config.input.vocab - 1]])
    out = run_model(model, ids)
    assert out.dtype == dtype
    assert out.isfinite().all()


def has_norm_before_every_sublayer(config):
    """Whether every sublayer normalizes its input, which keeps large fp16 activations out of products."""
    return all(block.norm_place in ("pre", "sandwich") and block.attention_norm for block in block_configs(config))


@pytest.mark.parametrize("name", tiny_names())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_near_the_largest_fp16_number_give_no_nan(name, dtype):
    """Activations of up to 6e4 enter the first block (fp16 ends at 65,504)."""
    model = build_model(tiny_config(name), dtype)
    size = 6e4 if dtype != torch.float16 or has_norm_before_every_sublayer(model.config) else 1e2

    def tap(name, tensor):
        return tensor * (size / tensor.abs().max()) if name in ("input.output", "target.output") else tensor

    tap.wants = lambda name: False
    with torch.no_grad():
        assert not model(*example_inputs(model), tap=tap).isnan().any()
