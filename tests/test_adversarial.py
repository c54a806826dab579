"""Adversarial training: the loss again where the words of a text lie worse by so much."""

import pytest
import torch
from support import build

from monoblock.errors import ConfigError, InputError
from monoblock.families import bert, vit
from monoblock.tasks.recipe import read
from monoblock.training.adversarial import WORDS, Adversarial, Words, worst
from monoblock.training.objectives import Loss

SIZE = 0.03


class Moved:
    """A tap that adds to the words."""

    def __init__(self, by):
        self.by = by

    def __call__(self, name, tensor):
        return tensor + self.by if name == WORDS else tensor

    def wants(self, name):
        return False


def texts():
    model = build(bert(vocab=23, width=21, depth=2, heads=3, context=11, classes=3, head="classifier")).double().eval()
    draw = torch.Generator().manual_seed(3)
    inputs = {"source": torch.randint(23, (5, 7), generator=draw), "attention_mask": torch.ones(5, 7).bool()}
    inputs["attention_mask"][1:3, 4:] = False
    return model, inputs, torch.tensor([0, 2, 1, 1, 0])


def seen(model, inputs):
    tap = Words()
    model(**inputs, tap=tap)
    return tap.seen


def test_it_is_the_mean_of_both_losses_by_numerical_gradients():
    model, inputs, labels = texts()
    loss, words = Loss(label_smoothing=0.1), seen(model, inputs).detach()
    gradient = torch.zeros_like(words)
    for place in range(words.numel()):  # central differences of each number of each word
        step = torch.zeros(words.numel(), dtype=words.dtype)
        step[place] = 1e-5
        step = step.view_as(words)
        with torch.no_grad():
            up, down = (loss(model, inputs, labels, Moved(sign * step)) for sign in (1, -1))
        gradient.view(-1)[place] = (up - down) / 2e-5
    moves = []
    for row, real in enumerate(inputs["attention_mask"]):
        length = words[row, real].norm(dim=-1).square().mean().sqrt()
        moves.append(SIZE * length * gradient[row] / gradient[row].norm())
    expected = (loss(model, inputs, labels) + loss(model, inputs, labels, Moved(torch.stack(moves)))) / 2
    found = Adversarial(loss, SIZE)(model, inputs, labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_move_is_worse_than_others_of_its_length_and_leaves_padding():
    model, inputs, labels = texts()
    loss = Loss()
    tap = Words()
    first = loss(model, inputs, labels, tap)
    move = worst(first, tap.seen, inputs["attention_mask"], SIZE)
    assert not move[~inputs["attention_mask"]].any()
    after = loss(model, inputs, labels, Moved(move))
    assert after > first
    for seed in range(20):
        other = torch.randn(move.shape, generator=torch.Generator().manual_seed(seed), dtype=move.dtype)
        other = other * inputs["attention_mask"][..., None]
        other = other * (move.flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1))[:, None, None]
        assert loss(model, inputs, labels, Moved(other)) < after


def test_the_move_is_a_constant_of_the_gradient():
    model, inputs, labels = texts()
    table = model.input.token.weight
    (found,) = torch.autograd.grad(Adversarial(Loss(), SIZE)(model, inputs, labels), table)
    tap = Words()
    first = Loss()(model, inputs, labels, tap)
    move = worst(first, tap.seen, inputs["attention_mask"], SIZE).detach()
    (expected,) = torch.autograd.grad((first + Loss()(model, inputs, labels, Moved(move))) / 2, table)
    torch.testing.assert_close(found, expected)


def test_an_embedding_that_is_frozen_changes_nothing_for_the_rest():
    model, inputs, labels = texts()
    weight = model.encoder.blocks[0].attention.query.weight
    (expected,) = torch.autograd.grad(Adversarial(Loss(), SIZE)(model, inputs, labels), weight)
    model.input.requires_grad_(False)
    (found,) = torch.autograd.grad(Adversarial(Loss(), SIZE)(model, inputs, labels), weight)
    torch.testing.assert_close(found, expected)


def test_padding_changes_nothing():
    model, inputs, labels = texts()
    alone = sum(
        Adversarial(Loss(), SIZE)(model, {"source": inputs["source"][n : n + 1, : int(real.sum())]}, labels[n : n + 1])
        for n, real in enumerate(inputs["attention_mask"])
    )
    torch.testing.assert_close(Adversarial(Loss(), SIZE)(model, inputs, labels), alone)


def test_what_has_no_words_is_refused():
    model = build(vit(image=8, patch=4, width=16, depth=1, heads=2, classes=2))
    with pytest.raises(InputError, match="reads none; leave it out"):
        Adversarial(Loss(), SIZE)(model, {"source": torch.randn(2, 3, 8, 8)}, torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="not causal; leave it out"):
        read("gpt-tiny", ["train.adversarial=0.1"])
