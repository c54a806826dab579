"""Gradients reach every parameter and are finite, also beside rows that see nothing and in 16 bit."""

import pytest
import torch
from support import Asks, blocks, build, given, has_both, is_text, padded, presets, read, source, tokens

from monoblock.presets import tiny

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weigh(out):
    """A loss in which every output counts differently."""
    return (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).mean()


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("tap", [None, Asks("weights", "outputs")], ids=["fused", "plain"])
def test_every_parameter_learns(name, tap):
    model = build(tiny(name)).train()
    weigh(model(*given(model), tap=tap)).backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None, key
        assert weight.grad.isfinite().all(), key
        assert weight.grad.any(), key


@pytest.mark.parametrize("name", presets(is_text))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tap", [None, Asks("weights")], ids=["fused", "plain"])
def test_rows_that_see_nothing_give_no_nan(name, dtype, tap):
    """One row is padding from end to end, others begin or end with it."""
    model = build(tiny(name), dtype)
    wide, real = padded(tokens(), 2, 3)
    real[4] = False
    out = read(model, wide, real, tap=tap)
    assert out.isfinite().all()
    weigh(out).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("name", presets(has_both))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tap", [None, Asks("weights")], ids=["fused", "plain"])
def test_an_empty_source_gives_no_nan(name, dtype, tap):
    model, src = build(tiny(name), dtype), source()
    real = torch.ones_like(src)
    real[2] = 0
    out = model(src, tokens(), source_mask=real, tap=tap)
    assert out.isfinite().all()
    weigh(out).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("name", presets(is_text))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_and_the_last_of_the_vocabulary_are_fine(name, dtype):
    model = build(tiny(name), dtype)
    ids = torch.tensor([[0], [model.config.input.vocab - 1]])
    out = read(model, ids)
    assert out.dtype == dtype
    assert out.isfinite().all()


def norms_first(config):
    """Whether every sublayer norms what it reads: only then may fp16 hold numbers that no matrix could be given."""
    return all(block.norm_place in ("pre", "sandwich") and block.attention_norm for block in blocks(config))


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_at_the_edge_of_sixteen_bits_give_no_nan(name, dtype):
    """Activations of up to 6e4 enter the first block (fp16 ends at 65,504)."""
    model = build(tiny(name), dtype)
    size = 6e4 if dtype != torch.float16 or norms_first(model.config) else 1e2

    def tap(name, tensor):
        return tensor * (size / tensor.abs().max()) if name in ("input.output", "target.output") else tensor

    tap.wants = lambda name: False
    with torch.no_grad():
        assert not model(*given(model), tap=tap).isnan().any()
