"""Heads against the few matrix products they are; pooling against a loop over rows."""

import pytest
import torch
from support import build, close, tokens
from torch.nn.functional import gelu, layer_norm, linear

from monoblock.config import EmbeddingConfig, HeadConfig
from monoblock.families import bert, gpt
from monoblock.heads import pool
from monoblock.knobs import rebuild

B, T, D, V = 2, 5, 6, 11
SIZES = {"vocab": V, "width": D, "depth": 1, "heads": 3, "context": 13}
REAL = torch.tensor([[False, True, True, False, True], [True, True, False, False, False]])


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def head(config, **changes):
    """A stirred head of a model, and the table it may be tied to."""

    def edit(part, values):
        if isinstance(part, HeadConfig):
            values.update({key: value for key, value in changes.items() if key in values})
        if isinstance(part, EmbeddingConfig) and "dim" in changes:
            values["dim"] = changes["dim"]

    model = build(rebuild(config, edit), torch.float64)
    return model.head, model.input.token.weight


@pytest.mark.parametrize("how", ["first", "last", "mean"])
def test_pooling_looks_at_real_tokens_only(how):
    hidden = draw(B, T, D)
    for row in range(B):
        real = hidden[row, REAL[row]]
        expected = {"first": real[0], "last": real[-1], "mean": real.mean(0)}[how]
        close(pool(hidden, REAL, how)[row], expected)
    close(pool(hidden, None, how), pool(hidden, torch.ones(B, T, dtype=torch.bool), how))


@pytest.mark.parametrize("how", ["first", "last", "mean"])
def test_pooling_of_nothing_gives_no_nan(how):
    assert pool(draw(B, T, D), torch.zeros(B, T, dtype=torch.bool), how).isfinite().all()


def test_a_tied_language_model_multiplies_with_the_table():
    layer, table = head(gpt(**SIZES))
    hidden = draw(B, T, D)
    assert not list(layer.parameters())
    close(layer(hidden, table=table), hidden @ table.T)


def test_dropout_before_the_head_zeroes_features_in_training_and_scales_the_rest():
    layer, _ = head(gpt(**SIZES, head_dropout=0.25))
    hidden, table = draw(101, 97, D), torch.eye(D, dtype=torch.float64)  # the logits are the features themselves
    close(layer(hidden, table=table), hidden)
    torch.manual_seed(3)
    out = layer.train()(hidden, table=table)
    close(out, torch.where(out == 0, 0, hidden / 0.75))
    assert abs((out == 0).double().mean() - 0.25) < 5 * (0.25 * 0.75 / out.numel()) ** 0.5


def test_an_untied_language_model_has_a_matrix_of_its_own():
    layer, table = head(gpt(**SIZES, tie="none"), bias="learned")
    hidden = draw(B, T, D)
    close(layer(hidden, table=table), hidden @ layer.output.weight.T + layer.bias)


@pytest.mark.parametrize(("scale", "factor"), [(0.5, 0.5), ("inverse_sqrt_width", 6**-0.5)])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_logits_are_scaled_then_capped(scale, factor, cap):
    layer, table = head(gpt(**SIZES), scale=scale, softcap=cap)
    hidden = draw(B, T, D)
    logits = factor * hidden @ table.T
    close(layer(hidden, table=table), logits if cap is None else cap * torch.tanh(logits / cap))


def test_a_fixed_bias_is_stored_and_never_trained():
    layer, table = head(gpt(**SIZES), bias="fixed")
    assert "fixed_bias" in layer.state_dict()
    assert not list(layer.parameters())
    close(layer(draw(B, T, D), table=table), draw(B, T, D) @ table.T + layer.fixed_bias)


def test_a_tied_factorised_language_model_goes_back_through_the_small_size():
    layer, table = head(gpt(**SIZES), dim=4)
    close(layer(draw(B, T, D), table=table), draw(B, T, D) @ layer.projection.weight.T @ table.T)


@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("tie", ["output", "none"])
def test_a_masked_lm_transforms_norms_and_multiplies(dim, tie):
    layer, table = head(bert(**SIZES, head="masked_lm", tie=tie), dim=dim)
    hidden, norm = draw(B, T, D), layer.norm
    x = gelu(linear(hidden, layer.transform.weight, layer.transform.bias))
    x = layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-12)
    weight = table if tie == "output" else layer.output.weight
    close(layer(hidden, table=table), x @ weight.T + layer.bias)


@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("tie", ["output", "none"])
def test_a_masked_lm_without_a_transform_answers_too(dim, tie):
    layer, table = head(bert(**SIZES, head="masked_lm", tie=tie), dim=dim, transform=None, norm=None)
    assert layer(draw(B, T, D), table=table).shape == (B, T, V)


@pytest.mark.parametrize("pooler", ["none", "tanh"])
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_a_classifier_reads_the_pooled_vector(pooler, pooling):
    layer, _ = head(bert(**SIZES, head="classifier", classes=7), pooler=pooler, pooling=pooling)
    hidden = draw(B, T, D)
    x = pool(hidden, REAL, pooling)
    x = torch.tanh(layer.pooler(x)) if pooler == "tanh" else x
    close(layer(hidden, real=REAL), x @ layer.output.weight.T + layer.bias)


def test_a_tagger_and_spans_read_every_token():
    hidden = draw(B, T, D)
    tagger, _ = head(bert(**SIZES, head="tagger", classes=7))
    close(tagger(hidden), hidden @ tagger.output.weight.T + tagger.bias)
    spans, _ = head(bert(**SIZES, head="spans"))
    assert spans(hidden).shape == (B, T, 2)


def test_pooled_vectors_may_have_length_one():
    layer, _ = head(bert(**SIZES), normalize=True, pooler="none", pooling="mean")
    out = layer(draw(B, T, D), real=REAL)
    close(out.norm(dim=-1), torch.ones(B, dtype=torch.float64))
    close(out, torch.nn.functional.normalize(pool(draw(B, T, D), REAL, "mean"), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [gpt(**SIZES), bert(**SIZES, head="masked_lm"), bert(**SIZES)], ids=["lm", "mlm", "pool"]
)
def test_hidden_states_at_the_edge_of_sixteen_bits_give_no_nan(config, dtype):
    hidden = draw(B, T, D)
    hidden = (hidden * 6e4 / hidden.abs().max()).to(dtype)
    model = build(config, dtype)
    assert not model.head(hidden, table=model.input.token.weight).isnan().any()


def test_capped_logits_stay_below_the_cap_whatever_comes():
    layer, table = head(gpt(**SIZES), softcap=30.0)
    layer, table = layer.half(), table.half()
    out = layer(torch.full((B, T, D), 6e4, dtype=torch.float16), table=table)
    assert out.abs().max() <= 30


def test_logits_have_a_column_a_class():
    assert build(bert(**SIZES, head="tagger", classes=7))(tokens(B, T, V)).shape == (B, T, 7)
    assert build(bert(**SIZES, head="classifier", classes=7))(tokens(B, T, V)).shape == (B, 7)
