"""Input embeddings against their formulas, patches against a loop, and inputs that are refused."""

import pytest
import torch
from support import assert_near, randomize_weights
from torch import nn
from torch.nn.functional import cross_entropy

from monoblock.config.families import gpt
from monoblock.config.model import EmbeddingConfig, Learned, NormConfig, PatchConfig, Sinusoid
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.nn.embedding import Embedding, PatchEmbedding
from monoblock.nn.masks import TokenPositions, arange_positions
from monoblock.nn.norm import layer_norm
from monoblock.nn.positions import grid_sinusoid, sinusoid

B, T, D, V, N = 2, 5, 7, 11, 13  # N: the context
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 10, 0]])


def build(width=D, **options):
    return randomize_weights(Embedding(width, EmbeddingConfig(vocab=V, context=N, **options)).double()).eval()


def test_tokens_are_rows_of_the_table():
    layer = build()
    assert_near(layer(IDS, arange_positions(T)), layer.token.weight[IDS])


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (0.5, 0.5), ("sqrt_width", 7**0.5)])
def test_tokens_are_scaled_and_positions_are_not(scale, factor):
    layer = build(scale=scale, positions=Learned())
    assert_near(layer(IDS, arange_positions(T)), factor * layer.token.weight[IDS] + layer.position.weight[:T])


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_are_rows_of_their_table_after_the_offset(offset):
    layer, positions = build(positions=Learned(offset=offset)), torch.tensor([[0, 1, 2, 3, 12], [4, 0, 0, 7, 1]])
    assert layer.position.weight.shape == (N + offset, D)
    assert_near(
        layer(IDS, TokenPositions(positions)), layer.token.weight[IDS] + layer.position.weight[positions + offset]
    )


@pytest.mark.parametrize("form", ["interleaved", "halves", "fairseq"])
def test_sinusoids_are_added(form):
    layer, positions = build(positions=Sinusoid(form=form)), torch.tensor([[0, 1, 2, 3, 40], [4, 0, 0, 7, 1]])
    assert_near(
        layer(IDS, TokenPositions(positions)), layer.token.weight[IDS] + sinusoid(positions, D, Sinusoid(form=form))
    )


def test_segments_are_added_and_zero_when_not_given():
    layer, segments = build(segments=3), torch.tensor([[0, 0, 1, 2, 2], [1, 1, 0, 0, 2]])
    assert_near(
        layer(IDS, arange_positions(T), segments=segments), layer.token.weight[IDS] + layer.segment.weight[segments]
    )
    assert_near(layer(IDS, arange_positions(T)), layer.token.weight[IDS] + layer.segment.weight[0])


def test_the_norm_comes_after_positions_and_segments():
    layer = build(positions=Learned(), segments=2, norm=NormConfig(eps=1e-3))
    added = layer.token.weight[IDS] + layer.position.weight[:T] + layer.segment.weight[0]
    assert_near(layer(IDS, arange_positions(T)), layer_norm(added, layer.norm.weight, layer.norm.bias, 1e-3))


@pytest.mark.parametrize("bias", [True, False])
def test_a_factorised_table_is_projected_to_the_width(bias):
    layer = build(dim=3, projection_bias=bias, positions=Learned(), norm=NormConfig())
    assert {name: tuple(weight.shape) for name, weight in layer.named_parameters() if "weight" in name} == {
        "token.weight": (V, 3),
        "position.weight": (N, 3),
        "norm.weight": (3,),
        "projection.weight": (D, 3),
    }
    assert (layer.projection.bias is not None) == bias
    hidden = layer.norm(layer.token.weight[IDS] + layer.position.weight[:T])
    assert_near(layer(IDS, arange_positions(T)), layer.projection(hidden))


def test_a_target_may_use_the_token_embedding_of_the_source():
    layer = Embedding(D, EmbeddingConfig(vocab=V), owns_tokens=False).double()
    table = torch.randn(V, D, dtype=torch.float64)
    assert not list(layer.parameters())
    assert_near(layer(IDS, arange_positions(T), tied_token=nn.Embedding.from_pretrained(table)), table[IDS])


def test_dropout_acts_in_training_only():
    layer = build(dropout=0.5)
    assert torch.equal(layer(IDS, arange_positions(T)), layer(IDS, arange_positions(T)))
    assert (layer.train()(IDS, arange_positions(T)) == 0).any()


def test_word_dropout_zeroes_whole_words_and_scales_the_rest_but_for_the_first():
    layer, rate, ids = build(word_dropout=0.25), 0.25, torch.randint(V, (101, 97))
    plain = layer.token.weight[ids]
    assert_near(layer(ids, arange_positions(97)), plain)  # not in training: nothing is dropped
    torch.manual_seed(3)
    out = layer.train()(ids, arange_positions(97))
    assert_near(out[:, 0], plain[:, 0])
    out, plain = out[:, 1:], plain[:, 1:]
    dropped = (out == 0).all(-1)
    assert_near(out, torch.where(dropped[..., None], 0, plain / (1 - rate)))
    assert abs(dropped.double().mean() - rate) < 5 * (rate * (1 - rate) / dropped.numel()) ** 0.5
    assert not torch.equal(dropped[0], dropped[1])  # each row loses words of its own


def test_word_dropout_leaves_the_first_word_of_every_document_in_a_row():
    layer, positions = build(word_dropout=0.9).train(), torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    torch.manual_seed(3)
    for _ in range(20):
        assert_near(layer(IDS, TokenPositions(positions))[positions == 0], layer.token.weight[IDS[positions == 0]])


def test_word_dropout_leaves_gradients_of_a_deep_model_their_size():
    """If the first word were zero, the norm of every block would multiply its gradient."""
    sizes = []
    for rate in (0.0, 0.5):
        torch.manual_seed(7)
        model = Transformer(
            gpt(vocab=V, width=21, depth=9, heads=3, context=N, positions="none", std=0.05, word_dropout=rate)
        )
        ids = torch.randint(V, (31, N + 1))
        loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        sizes.append(torch.stack([weight.grad.norm() for weight in model.parameters()]).norm())
    assert sizes[1] < 30 * sizes[0]


@pytest.mark.parametrize("wrong", [-1, V, 999])
def test_an_id_outside_the_vocabulary_is_named(wrong):
    ids = IDS.clone()
    ids[1, 3] = wrong
    with pytest.raises(InputError, match=rf"id {wrong} is outside the vocabulary of 11 tokens \(0 to 10\)"):
        build().check_inputs(ids, arange_positions(T))


def test_the_last_id_and_the_last_place_are_inside():
    ids = torch.full((B, N), V - 1)
    build(positions=Learned()).check_inputs(ids, arange_positions(N))


@pytest.mark.parametrize(
    "positions",
    [arange_positions(N + 1), TokenPositions(torch.arange(N + 1).expand(B, N + 1))],
    ids=["counted", "given"],
)
def test_a_text_longer_than_the_learned_positions_is_refused(positions):
    ids = torch.ones(B, N + 1, dtype=torch.long)
    with pytest.raises(InputError, match="14 tokens is longer than the 13 learned positions"):
        build(positions=Learned()).check_inputs(ids, positions)
    build(positions=Sinusoid()).check_inputs(ids, positions)


# -- patches --------------------------------------------------------------------------------------------------------

PIXELS = torch.randn(B, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build_patches(**options):
    return randomize_weights(PatchEmbedding(D, PatchConfig(image=6, patch=2, **options)).double()).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_cut_row_by_row_and_multiplied(bias):
    layer = build_patches(class_token=False, positions=None, bias=bias)
    out = layer(PIXELS)
    assert out.shape == (B, 9, D)
    for row in range(3):
        for column in range(3):
            patch = PIXELS[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
            expected = patch @ layer.patch.weight.flatten(1).T + (layer.patch.bias if bias else 0)
            assert_near(out[:, 3 * row + column], expected)


def test_a_class_token_and_registers_stand_in_front():
    layer = build_patches(registers=4, positions=None)
    out = layer(PIXELS)
    assert out.shape == (B, 1 + 4 + 9, D)
    assert_near(out[1, 0], layer.class_token)
    assert_near(out[1, 1:5], layer.registers)


def test_class_token_and_patches_have_learned_places_and_registers_have_none():
    layer = build_patches(registers=2)
    assert layer.position.weight.shape == (1 + 9, D)
    out = layer(PIXELS)
    assert out.shape == (B, 1 + 2 + 9, D)
    assert_near(out[1, 0], layer.class_token + layer.position.weight[0])
    assert_near(out[1, 1:3], layer.registers)


@pytest.mark.parametrize("form", ["interleaved", "grid"])
def test_sinusoids_mark_patches_and_leave_the_class_token(form):
    with_waves, without = build_patches(positions=Sinusoid(form=form)), build_patches(positions=None)
    waves = sinusoid(torch.arange(9), D) if form == "interleaved" else grid_sinusoid(3, D, Sinusoid(), PIXELS.device)
    assert_near(with_waves(PIXELS) - without(PIXELS), torch.cat((torch.zeros(1, D), waves)).double().expand(B, 10, D))


@pytest.mark.parametrize("shape", [(B, 3, 6, 8), (B, 1, 6, 6), (3, 6, 6), (B, 3, 4, 4)])
def test_an_image_of_the_wrong_size_is_refused(shape):
    with pytest.raises(InputError, match=r"this model takes \(batch, 3, 6, 6\)"):
        build_patches().check_inputs(torch.zeros(shape))
