"""What enters the first block: each part added by hand, patches against a loop, and what cannot be embedded."""

import pytest
import torch
from support import close, stir
from torch.nn.functional import cross_entropy

from monoblock.config import EmbeddingConfig, Learned, NormConfig, PatchConfig, Sinusoid
from monoblock.embedding import Embedding, Patches
from monoblock.errors import InputError
from monoblock.families import gpt
from monoblock.masks import Where, run
from monoblock.model import Transformer
from monoblock.norm import layer_norm
from monoblock.positions import grid_sinusoid, sinusoid

B, T, D, V, N = 2, 5, 7, 11, 13  # N: the context
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 10, 0]])


def build(width=D, **options):
    return stir(Embedding(width, EmbeddingConfig(vocab=V, context=N, **options)).double()).eval()


def test_tokens_are_rows_of_the_table():
    layer = build()
    close(layer(IDS, run(T)), layer.token.weight[IDS])


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (0.5, 0.5), ("sqrt_width", 7**0.5)])
def test_tokens_are_scaled_and_positions_are_not(scale, factor):
    layer = build(scale=scale, positions=Learned())
    close(layer(IDS, run(T)), factor * layer.token.weight[IDS] + layer.position.weight[:T])


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_are_rows_of_their_table_after_the_offset(offset):
    layer, at = build(positions=Learned(offset=offset)), torch.tensor([[0, 1, 2, 3, 12], [4, 0, 0, 7, 1]])
    assert layer.position.weight.shape == (N + offset, D)
    close(layer(IDS, Where(at)), layer.token.weight[IDS] + layer.position.weight[at + offset])


@pytest.mark.parametrize("form", ["interleaved", "halves", "fairseq"])
def test_sinusoids_are_added(form):
    layer, at = build(positions=Sinusoid(form=form)), torch.tensor([[0, 1, 2, 3, 40], [4, 0, 0, 7, 1]])
    close(layer(IDS, Where(at)), layer.token.weight[IDS] + sinusoid(at, D, Sinusoid(form=form)))


def test_segments_are_added_and_zero_when_not_given():
    layer, segments = build(segments=3), torch.tensor([[0, 0, 1, 2, 2], [1, 1, 0, 0, 2]])
    close(layer(IDS, run(T), segments=segments), layer.token.weight[IDS] + layer.segment.weight[segments])
    close(layer(IDS, run(T)), layer.token.weight[IDS] + layer.segment.weight[0])


def test_a_norm_comes_after_all_that_is_added():
    layer = build(positions=Learned(), segments=2, norm=NormConfig(eps=1e-3))
    added = layer.token.weight[IDS] + layer.position.weight[:T] + layer.segment.weight[0]
    close(layer(IDS, run(T)), layer_norm(added, layer.norm.weight, layer.norm.bias, 1e-3))


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
    small = layer.norm(layer.token.weight[IDS] + layer.position.weight[:T])
    close(layer(IDS, run(T)), layer.projection(small))


def test_a_target_may_read_the_sources_table():
    layer = Embedding(D, EmbeddingConfig(vocab=V), owns_tokens=False).double()
    table = torch.randn(V, D, dtype=torch.float64)
    assert not list(layer.parameters())
    close(layer(IDS, run(T), table=table), table[IDS])


def test_dropout_acts_in_training_only():
    layer = build(dropout=0.5)
    assert torch.equal(layer(IDS, run(T)), layer(IDS, run(T)))
    assert (layer.train()(IDS, run(T)) == 0).any()


def test_word_dropout_zeroes_whole_words_and_scales_the_rest_but_for_the_first():
    layer, rate, ids = build(word_dropout=0.25), 0.25, torch.randint(V, (101, 97))
    plain = layer.token.weight[ids]
    close(layer(ids, run(97)), plain)  # not in training: nothing is dropped
    torch.manual_seed(3)
    out = layer.train()(ids, run(97))
    close(out[:, 0], plain[:, 0])
    out, plain = out[:, 1:], plain[:, 1:]
    gone = (out == 0).all(-1)
    close(out, torch.where(gone[..., None], 0, plain / (1 - rate)))
    assert abs(gone.double().mean() - rate) < 5 * (rate * (1 - rate) / gone.numel()) ** 0.5
    assert not torch.equal(gone[0], gone[1])  # each row loses words of its own


def test_word_dropout_leaves_the_first_word_of_every_document_in_a_row():
    layer, at = build(word_dropout=0.9).train(), torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    torch.manual_seed(3)
    for _ in range(20):
        close(layer(IDS, Where(at))[at == 0], layer.token.weight[IDS[at == 0]])


def test_word_dropout_leaves_gradients_of_a_deep_model_their_size():
    """A text whose first word were zero would be zero in every block, each of whose norms multiplies the gradient."""
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
    with pytest.raises(InputError, match=rf"id {wrong} is outside the vocabulary of 11 \(0 to 10\)"):
        build().check(ids, run(T))


def test_the_last_id_and_the_last_place_are_inside():
    ids = torch.full((B, N), V - 1)
    build(positions=Learned()).check(ids, run(N))


@pytest.mark.parametrize("where", [run(N + 1), Where(torch.arange(N + 1).expand(B, N + 1))], ids=["counted", "given"])
def test_a_text_longer_than_the_learned_positions_is_refused(where):
    ids = torch.ones(B, N + 1, dtype=torch.long)
    with pytest.raises(InputError, match="14 tokens is longer than the 13 learned positions"):
        build(positions=Learned()).check(ids, where)
    build(positions=Sinusoid()).check(ids, where)


# -- patches --------------------------------------------------------------------------------------------------------

PIXELS = torch.randn(B, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def patches(**options):
    return stir(Patches(D, PatchConfig(image=6, patch=2, **options)).double()).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_cut_row_by_row_and_multiplied(bias):
    layer = patches(class_token=False, positions=None, bias=bias)
    out = layer(PIXELS)
    assert out.shape == (B, 9, D)
    for row in range(3):
        for column in range(3):
            patch = PIXELS[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
            expected = patch @ layer.patch.weight.flatten(1).T + (layer.patch.bias if bias else 0)
            close(out[:, 3 * row + column], expected)


def test_a_class_token_and_registers_stand_in_front():
    layer = patches(registers=4, positions=None)
    out = layer(PIXELS)
    assert out.shape == (B, 1 + 4 + 9, D)
    close(out[1, 0], layer.class_token)
    close(out[1, 1:5], layer.registers)


def test_class_token_and_patches_have_learned_places_and_registers_have_none():
    layer = patches(registers=2)
    assert layer.position.weight.shape == (1 + 9, D)
    out = layer(PIXELS)
    assert out.shape == (B, 1 + 2 + 9, D)
    close(out[1, 0], layer.class_token + layer.position.weight[0])
    close(out[1, 1:3], layer.registers)


@pytest.mark.parametrize("form", ["interleaved", "grid"])
def test_sinusoids_mark_patches_and_leave_the_class_token(form):
    with_waves, without = patches(positions=Sinusoid(form=form)), patches(positions=None)
    waves = sinusoid(torch.arange(9), D) if form == "interleaved" else grid_sinusoid(3, D, Sinusoid(), PIXELS.device)
    close(with_waves(PIXELS) - without(PIXELS), torch.cat((torch.zeros(1, D), waves)).double().expand(B, 10, D))


@pytest.mark.parametrize("shape", [(B, 3, 6, 8), (B, 1, 6, 6), (3, 6, 6), (B, 3, 4, 4)])
def test_an_image_of_the_wrong_size_is_refused(shape):
    with pytest.raises(InputError, match=r"this model takes \(batch, 3, 6, 6\)"):
        patches().check(torch.zeros(shape))
