"""Heads against their formulas; pooling against a loop over rows."""

import pytest
import torch
from support import assert_near, build_model, random_tokens
from torch.nn.functional import gelu, layer_norm, linear

from monoblock.config.families import bert, gpt
from monoblock.config.knobs import rebuild
from monoblock.config.model import EmbeddingConfig, HeadConfig
from monoblock.errors import InputError
from monoblock.nn.heads import pool

B, T, D, V = 2, 5, 6, 11
SIZES = {"vocab": V, "width": D, "depth": 1, "heads": 3, "context": 13}
VALID = torch.tensor([[False, True, True, False, True], [True, True, False, False, False]])


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def build_head(config, **changes):
    """A head with random weights, and the embedding it may be tied to."""

    def edit(part, values):
        if isinstance(part, HeadConfig):
            values.update({key: value for key, value in changes.items() if key in values})
        if isinstance(part, EmbeddingConfig) and "dim" in changes:
            values["dim"] = changes["dim"]

    model = build_model(rebuild(config, edit), torch.float64)
    return model.head, model.input.token.weight


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_pooling_uses_valid_tokens_only(pooling):
    hidden = randn(B, T, D)
    for row in range(B):
        valid_tokens = hidden[row, VALID[row]]
        expected = {"first": valid_tokens[0], "last": valid_tokens[-1], "mean": valid_tokens.mean(0)}[pooling]
        assert_near(pool(hidden, VALID, pooling)[row], expected)
    assert_near(pool(hidden, None, pooling), pool(hidden, torch.ones(B, T, dtype=torch.bool), pooling))


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_pooling_of_padding_gives_no_nan(pooling):
    assert pool(randn(B, T, D), torch.zeros(B, T, dtype=torch.bool), pooling).isfinite().all()


def test_a_tied_language_model_multiplies_with_the_table():
    layer, table = build_head(gpt(**SIZES))
    hidden = randn(B, T, D)
    assert not list(layer.parameters())
    assert_near(layer(hidden, table=table), hidden @ table.T)


def test_dropout_before_the_head_zeroes_features_in_training_and_scales_the_rest():
    layer, _ = build_head(gpt(**SIZES, head_dropout=0.25))
    hidden, table = randn(101, 97, D), torch.eye(D, dtype=torch.float64)  # the logits are the features themselves
    assert_near(layer(hidden, table=table), hidden)
    torch.manual_seed(3)
    out = layer.train()(hidden, table=table)
    assert_near(out, torch.where(out == 0, 0, hidden / 0.75))
    assert abs((out == 0).double().mean() - 0.25) < 5 * (0.25 * 0.75 / out.numel()) ** 0.5


def test_an_untied_language_model_has_a_matrix_of_its_own():
    layer, table = build_head(gpt(**SIZES, tie="none"), bias="learned")
    hidden = randn(B, T, D)
    assert_near(layer(hidden, table=table), hidden @ layer.output.weight.T + layer.bias)


@pytest.mark.parametrize(("scale", "factor"), [(0.5, 0.5), ("inverse_sqrt_width", 6**-0.5)])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_logits_are_scaled_then_capped(scale, factor, cap):
    layer, table = build_head(gpt(**SIZES), scale=scale, softcap=cap)
    hidden = randn(B, T, D)
    logits = factor * hidden @ table.T
    assert_near(layer(hidden, table=table), logits if cap is None else cap * torch.tanh(logits / cap))


def test_a_fixed_bias_is_stored_and_never_trained():
    layer, table = build_head(gpt(**SIZES), bias="fixed")
    assert "fixed_bias" in layer.state_dict()
    assert not list(layer.parameters())
    assert_near(layer(randn(B, T, D), table=table), randn(B, T, D) @ table.T + layer.fixed_bias)


def test_a_tied_factorized_language_model_projects_to_the_embedding_size():
    layer, table = build_head(gpt(**SIZES), dim=4)
    assert_near(layer(randn(B, T, D), table=table), randn(B, T, D) @ layer.projection.weight.T @ table.T)


@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("tie", ["output", "none"])
def test_a_masked_lm_transforms_norms_and_multiplies(dim, tie):
    layer, table = build_head(bert(**SIZES, head="masked_lm", tie=tie), dim=dim)
    hidden, norm = randn(B, T, D), layer.norm
    x = gelu(linear(hidden, layer.transform.weight, layer.transform.bias))
    x = layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-12)
    weight = table if tie == "output" else layer.output.weight
    assert_near(layer(hidden, table=table), x @ weight.T + layer.bias)


@pytest.mark.parametrize("dim", [None, 4])
@pytest.mark.parametrize("tie", ["output", "none"])
def test_a_masked_lm_may_have_no_transform(dim, tie):
    layer, table = build_head(bert(**SIZES, head="masked_lm", tie=tie), dim=dim, transform=None, norm=None)
    assert layer(randn(B, T, D), table=table).shape == (B, T, V)


@pytest.mark.parametrize("pooler", ["none", "tanh"])
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_a_classifier_or_a_regression_reads_the_pooled_vector(kind, pooler, pooling):
    layer, _ = build_head(bert(**SIZES, head=kind, classes=7), pooler=pooler, pooling=pooling)
    hidden = randn(B, T, D)
    x = pool(hidden, VALID, pooling)
    x = torch.tanh(layer.pooler(x)) if pooler == "tanh" else x
    assert_near(layer(hidden, valid=VALID), x @ layer.output.weight.T + layer.bias)


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_a_classifier_or_a_regression_may_have_a_transform(kind):
    layer, _ = build_head(bert(**SIZES, head=kind, classes=7), transform="gelu", pooler="none")
    x = gelu(linear(randn(B, T, D)[:, 0], layer.transform.weight, layer.transform.bias))
    assert_near(layer(randn(B, T, D)), x @ layer.output.weight.T + layer.bias)


def test_a_tagger_and_spans_read_every_token():
    hidden = randn(B, T, D)
    tagger, _ = build_head(bert(**SIZES, head="tagger", classes=7))
    assert_near(tagger(hidden), hidden @ tagger.output.weight.T + tagger.bias)
    spans, _ = build_head(bert(**SIZES, head="spans"))
    assert spans(hidden).shape == (B, T, 2)


def test_pooled_vectors_may_have_length_one():
    layer, _ = build_head(bert(**SIZES), normalize=True, pooler="none", pooling="mean")
    out = layer(randn(B, T, D), valid=VALID)
    assert_near(out.norm(dim=-1), torch.ones(B, dtype=torch.float64))
    assert_near(out, torch.nn.functional.normalize(pool(randn(B, T, D), VALID, "mean"), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [gpt(**SIZES), bert(**SIZES, head="masked_lm"), bert(**SIZES)], ids=["lm", "mlm", "pool"]
)
def test_large_sixteen_bit_hidden_states_give_no_nan(config, dtype):
    hidden = randn(B, T, D)
    hidden = (hidden * 6e4 / hidden.abs().max()).to(dtype)
    model = build_model(config, dtype)
    assert not model.head(hidden, table=model.input.token.weight).isnan().any()


def test_capped_logits_stay_below_the_cap():
    layer, table = build_head(gpt(**SIZES), softcap=30.0)
    layer, table = layer.half(), table.half()
    out = layer(torch.full((B, T, D), 6e4, dtype=torch.float16), table=table)
    assert out.abs().max() <= 30


def test_logits_have_one_column_for_each_class():
    assert build_model(bert(**SIZES, head="tagger", classes=7))(random_tokens(B, T, V)).shape == (B, T, 7)
    assert build_model(bert(**SIZES, head="classifier", classes=7))(random_tokens(B, T, V)).shape == (B, 7)


def test_a_regression_gives_one_number_or_several_for_each_sequence():
    model = build_model(bert(**SIZES, head="regression"))
    assert model(random_tokens(B, T, V)).shape == (B, 1)
    with pytest.raises(InputError, match="one output for a sequence"):
        model(random_tokens(B, T, V), logits_at=torch.zeros(B, 1, dtype=torch.long))
    assert build_model(bert(**SIZES, head="regression", classes=7))(random_tokens(B, T, V)).shape == (B, 7)
