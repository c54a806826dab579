"""Position encodings against the formulas in fp64 and against transformers."""

import math
from types import SimpleNamespace

import pytest
import torch
from support import assert_near
from torch.autograd import gradcheck
from torch.testing import assert_close

from monoblock.config.model import Alibi, Buckets, Rotary, Scaling, Sinusoid
from monoblock.nn.positions import (
    RotaryAngles,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    bucket_bias,
    grid_sinusoid,
    relative_position_bucket,
    rotary_angles,
    rotary_frequencies,
    sinusoid,
)

POSITIONS = torch.arange(53)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- sinusoids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_are_the_papers(width):
    table = sinusoid(POSITIONS, width)
    for position in (0, 1, 17, 52):
        for i in range(width):
            angle = position / 10000 ** (2 * (i // 2) / width)
            assert table[position, i].item() == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_in_halves_are_marians(width):
    marian = pytest.importorskip("transformers.models.marian.modeling_marian")
    table = marian.MarianSinusoidalPositionalEmbedding(53, width).create_weight()
    assert_close(sinusoid(POSITIONS, width, Sinusoid(form="halves")), table, atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [6, 10])
def test_fairseqs_sinusoids_are_those_of_m2m100(width):
    m2m = pytest.importorskip("transformers.models.m2m_100.modeling_m2m_100")
    table = m2m.M2M100SinusoidalPositionalEmbedding.get_embedding(53, width)
    assert_close(sinusoid(POSITIONS, width, Sinusoid(form="fairseq")), table, atol=1e-5, rtol=0)


def test_an_offset_shifts_the_positions():
    assert_near(sinusoid(POSITIONS, 6, Sinusoid(offset=2)), sinusoid(POSITIONS + 2, 6))


def test_a_later_position_is_a_rotation_of_an_earlier_one():
    """PE(pos + k) is a linear function of PE(pos), the same for every pos (Vaswani et al. 2017, 3.5)."""
    table = sinusoid(POSITIONS, 6).double().unflatten(-1, (3, 2))
    angle = 5 / 10000 ** (torch.arange(3, dtype=torch.float64) / 3)
    sin, cos = table[:-5].unbind(-1)
    rotated = torch.stack((sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin()), -1)
    assert_close(table[5:], rotated, atol=1e-6, rtol=0)


def test_a_grid_encodes_rows_and_columns():
    grid = grid_sinusoid(5, 12, Sinusoid(form="grid"), torch.device("cpu")).unflatten(0, (5, 5))
    waves = sinusoid(torch.arange(5), 6, Sinusoid(form="halves"))
    for row in range(5):
        for column in range(5):
            assert_near(grid[row, column], torch.cat((waves[row], waves[column])))


# -- rotary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [None, 4, 10])
def test_rotation_is_a_product_of_complex_numbers(layout, dim):
    x, position, size = randn(2, 3, 7, 10), torch.tensor([[0, 1, 2, 3, 5, 8, 13], [4, 4, 0, 1, 9, 2, 40]]), dim or 10
    pairs = size // 2
    first, second = (slice(0, size, 2), slice(1, size, 2)) if layout == "interleaved" else (
        slice(0, pairs), slice(pairs, size)
    )  # fmt: skip
    angles = position[:, None, :, None] * 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) * 2 / size)
    z = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)
    expected = x.clone()
    expected[..., first], expected[..., second] = z.real, z.imag
    actual = apply_rotary(x, rotary_angles(Rotary(layout=layout, dim=dim), 10, position, torch.float64))
    assert_close(actual, expected, atol=1e-5, rtol=0)  # angles are computed in fp32


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [None, 4])
def test_scores_depend_on_the_distance_alone(layout, dim):
    q, k = randn(1, 3, 1, 6), randn(1, 3, 1, 6, seed=1)
    rotary = Rotary(layout=layout, dim=dim)

    def score(q_position, k_position):
        angles = (
            rotary_angles(rotary, 6, torch.tensor([[position]]), torch.float64) for position in (q_position, k_position)
        )
        return apply_rotary(q, next(angles)) @ apply_rotary(k, next(angles)).mT

    assert_close(score(9, 4), score(31, 26), atol=1e-5, rtol=0)
    assert (score(9, 4) - score(9, 5)).abs().min() > 1e-4


def test_rotation_keeps_lengths():
    x = randn(2, 3, 5, 6)
    angles = rotary_angles(Rotary(), 6, torch.arange(5)[None], torch.float64)
    assert_close(apply_rotary(x, angles).norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=0)


def test_rotations_gradient_is_that_of_finite_differences():
    x, cos, sin = randn(2, 3, 5, 6).requires_grad_(), randn(2, 1, 5, 2, seed=1), randn(2, 1, 5, 2, seed=2)
    for interleaved in (False, True):
        assert gradcheck(lambda x, i=interleaved: apply_rotary(x, RotaryAngles(cos, sin, i)), (x,))


FACTORS = tuple(1 + i / 7 for i in range(8)), tuple(2 + i / 3 for i in range(8))
SCALINGS = {
    "linear": (Scaling(kind="linear", factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (
        Scaling(kind="dynamic", factor=3.0, original_context=64),
        {"rope_type": "dynamic", "factor": 3.0},
    ),
    "yarn": (
        Scaling(kind="yarn", factor=5.0, original_context=64),
        {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": 64},
    ),
    "yarn with betas": (
        Scaling(kind="yarn", factor=5.0, original_context=64, beta_fast=8.0, beta_slow=2.0, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 5.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    "yarn with attention factor": (
        Scaling(kind="yarn", factor=5.0, original_context=64, attention_factor=1.7),
        {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": 64, "attention_factor": 1.7},
    ),
    "llama3": (
        Scaling(kind="llama3", factor=8.0, original_context=64, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "longrope": (
        Scaling(kind="longrope", factor=4.0, original_context=64, short_factors=FACTORS[0], long_factors=FACTORS[1]),
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "short_factor": FACTORS[0],
            "long_factor": FACTORS[1],
        },
    ),
    "proportional": (
        Scaling(kind="proportional", factor=2.0),
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("base", [100.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("length", [40, 64, 65, 300])
@pytest.mark.parametrize("kind", SCALINGS)
def test_every_scaling_is_that_of_transformers(kind, length, base):
    reference = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    ours, theirs = SCALINGS[kind]
    config = SimpleNamespace(
        head_dim=16,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={**theirs, "rope_theta": base},
        standardize_rope_params=lambda: None,
        per_layer_config={},
    )
    expected, expected_factor = reference[theirs["rope_type"]](config, "cpu", seq_len=length)
    dim = 8 if kind == "proportional" else None
    actual, factor = rotary_frequencies(Rotary(base=base, dim=dim, scaling=ours), 16, torch.arange(length)[None])
    actual = actual[0] if actual.dim() > 1 else actual  # kinds that depend on the length have one row for each text
    assert_close(actual, expected, atol=0, rtol=2e-6)
    assert factor == pytest.approx(expected_factor)


def test_ntk_scales_the_slowest_pair_like_linear_scaling_and_the_fastest_not_at_all():
    plain, _ = rotary_frequencies(Rotary(), 16)
    actual, _ = rotary_frequencies(Rotary(scaling=Scaling(kind="ntk", factor=6.0)), 16)
    assert_close(actual[0], plain[0], atol=0, rtol=1e-6)
    assert_close(actual[-1], plain[-1] / 6, atol=0, rtol=1e-5)


def test_a_scaling_by_one_changes_nothing():
    plain, _ = rotary_frequencies(Rotary(), 16)
    for scaling in (
        Scaling(kind="linear"),
        Scaling(kind="ntk"),
        Scaling(kind="proportional"),
        Scaling(kind="yarn", original_context=64),
        Scaling(kind="llama3", original_context=64),
        Scaling(kind="dynamic", original_context=64),
    ):
        actual, factor = rotary_frequencies(Rotary(scaling=scaling), 16)
        assert_close(actual, plain, atol=0, rtol=1e-6)
        assert factor == 1.0


# -- biases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 71])
def test_alibis_slopes_are_blooms(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    table = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # slope * place
    assert_close(torch.tensor(alibi_slopes(heads)), table[:, 0, 1], atol=0, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 71])
@pytest.mark.parametrize("maximum", [8.0, 4.0])
def test_alibis_slopes_are_mpts(heads, maximum):
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    table = mpt.build_mpt_alibi_tensor(heads, 2, alibi_bias_max=maximum)  # slope * (place - last)
    slopes = torch.tensor(alibi_slopes(heads, Alibi(max_bias=maximum)))
    assert_close(slopes, -table[:, 0, 0], atol=0, rtol=1e-6)


@pytest.mark.parametrize("heads", [4, 71])
def test_falcons_bias_is_that_of_transformers_up_to_a_constant_in_each_row(heads):
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    table = falcon.build_alibi_tensor(torch.ones(1, 53), heads, torch.bfloat16).view(1, heads, 1, 53)
    actual = alibi_bias(Alibi(form="falcon"), heads, 16, POSITIONS[None], POSITIONS[None])
    difference = actual - table.float() / 16**0.5
    assert_near(difference, difference[..., :1].expand_as(difference))


def test_alibi_is_a_penalty_on_distance():
    q, k = torch.tensor([[3, 9], [0, 7]]), torch.tensor([[0, 1, 2, 3, 4], [5, 5, 8, 1, 2]])
    bias = alibi_bias(Alibi(), 3, 16, q, k)
    assert bias.shape == (2, 3, 2, 5)
    for b, h, t, s in torch.cartesian_prod(*map(torch.arange, bias.shape)).tolist():
        slope = alibi_slopes(3, Alibi())[h]
        assert bias[b, h, t, s].item() == pytest.approx(-slope * abs(int(q[b, t] - k[b, s])), rel=1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "maximum"), [(32, 128), (8, 20), (16, 17), (32, 64)])
def test_buckets_are_t5s(bidirectional, count, maximum):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(offsets, bidirectional, count, maximum)
    assert torch.equal(
        relative_position_bucket(Buckets(count=count, max_distance=maximum), offsets, bidirectional=bidirectional),
        expected,
    )


def test_a_bucket_bias_is_looked_up_for_each_pair():
    config, table = Buckets(count=8, max_distance=11), randn(8, 3)
    q, k = torch.tensor([[3, 9], [0, 7]]), torch.tensor([[0, 1, 2, 3, 4], [5, 5, 8, 1, 2]])
    bias = bucket_bias(config, table.__getitem__, q, k, bidirectional=True)
    assert bias.shape == (2, 3, 2, 5)
    for b, t, s in torch.cartesian_prod(*map(torch.arange, (2, 2, 5))).tolist():
        assert torch.equal(
            bias[b, :, t, s], table[relative_position_bucket(config, k[b, s] - q[b, t], bidirectional=True)]
        )
