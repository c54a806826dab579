"""Adversarial training: the loss on perturbed embeddings."""

import pytest
import torch
from support import build_model

from monoblock.config.families import bert, vit
from monoblock.errors import ConfigError, InputError
from monoblock.runs.recipe import read_recipe
from monoblock.training.loss import (
    EMBEDDING_NAME,
    AdversarialLoss,
    CrossEntropyLoss,
    EmbeddingTap,
    adversarial_perturbation,
)

EPSILON = 0.03


class AddTap:
    """A tap that adds a tensor to the embeddings."""

    def __init__(self, addend):
        self.addend = addend

    def __call__(self, name, tensor):
        return tensor + self.addend if name == EMBEDDING_NAME else tensor

    def wants(self, name):
        return False


def model_and_batch():
    model = (
        build_model(bert(vocab=23, width=9, depth=2, heads=3, context=11, classes=3, head="classifier")).double().eval()
    )
    generator = torch.Generator().manual_seed(3)
    inputs = {"source": torch.randint(23, (5, 7), generator=generator), "attention_mask": torch.ones(5, 7).bool()}
    inputs["attention_mask"][1:3, 4:] = False
    return model, inputs, torch.tensor([0, 2, 1, 1, 0])


def embeddings_of(model, inputs):
    tap = EmbeddingTap()
    model(**inputs, tap=tap)
    return tap.embeddings


def test_the_loss_is_the_mean_of_both_losses_by_numerical_gradients():
    model, inputs, labels = model_and_batch()
    loss, embeddings = CrossEntropyLoss(label_smoothing=0.1), embeddings_of(model, inputs).detach()
    gradient = torch.zeros_like(embeddings)
    for index in range(embeddings.numel()):  # central differences
        step = torch.zeros(embeddings.numel(), dtype=embeddings.dtype)
        step[index] = 1e-5
        step = step.view_as(embeddings)
        with torch.no_grad():
            up, down = (loss(model, inputs, labels, AddTap(sign * step)) for sign in (1, -1))
        gradient.view(-1)[index] = (up - down) / 2e-5
    perturbations = []
    for row, valid in enumerate(inputs["attention_mask"]):
        scale = embeddings[row, valid].norm(dim=-1).square().mean().sqrt()
        perturbations.append(EPSILON * scale * gradient[row] / gradient[row].norm())
    expected = (loss(model, inputs, labels) + loss(model, inputs, labels, AddTap(torch.stack(perturbations)))) / 2
    actual = AdversarialLoss(loss, EPSILON)(model, inputs, labels)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_the_perturbation_is_worse_than_random_ones_of_its_norm_and_zero_for_padding():
    model, inputs, labels = model_and_batch()
    loss = CrossEntropyLoss()
    tap = EmbeddingTap()
    first = loss(model, inputs, labels, tap)
    perturbation = adversarial_perturbation(first, tap.embeddings, inputs["attention_mask"], EPSILON)
    assert not perturbation[~inputs["attention_mask"]].any()
    after = loss(model, inputs, labels, AddTap(perturbation))
    assert after > first
    for seed in range(20):
        other = torch.randn(perturbation.shape, generator=torch.Generator().manual_seed(seed), dtype=perturbation.dtype)
        other = other * inputs["attention_mask"][..., None]
        other = other * (perturbation.flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1))[:, None, None]
        assert loss(model, inputs, labels, AddTap(other)) < after


def test_no_gradient_flows_through_the_perturbation():
    model, inputs, labels = model_and_batch()
    table = model.input.token.weight
    (actual,) = torch.autograd.grad(AdversarialLoss(CrossEntropyLoss(), EPSILON)(model, inputs, labels), table)
    tap = EmbeddingTap()
    first = CrossEntropyLoss()(model, inputs, labels, tap)
    perturbation = adversarial_perturbation(first, tap.embeddings, inputs["attention_mask"], EPSILON).detach()
    (expected,) = torch.autograd.grad(
        (first + CrossEntropyLoss()(model, inputs, labels, AddTap(perturbation))) / 2, table
    )
    torch.testing.assert_close(actual, expected)


def test_freezing_the_embedding_does_not_change_other_gradients():
    model, inputs, labels = model_and_batch()
    weight = model.encoder.blocks[0].attention.query.weight
    (expected,) = torch.autograd.grad(AdversarialLoss(CrossEntropyLoss(), EPSILON)(model, inputs, labels), weight)
    model.input.requires_grad_(False)
    (actual,) = torch.autograd.grad(AdversarialLoss(CrossEntropyLoss(), EPSILON)(model, inputs, labels), weight)
    torch.testing.assert_close(actual, expected)


def test_padding_does_not_change_the_loss():
    model, inputs, labels = model_and_batch()
    unpadded = sum(
        AdversarialLoss(CrossEntropyLoss(), EPSILON)(
            model, {"source": inputs["source"][n : n + 1, : int(valid.sum())]}, labels[n : n + 1]
        )
        for n, valid in enumerate(inputs["attention_mask"])
    )
    torch.testing.assert_close(AdversarialLoss(CrossEntropyLoss(), EPSILON)(model, inputs, labels), unpadded)


def test_a_model_without_token_embeddings_is_an_error():
    model = build_model(vit(image=8, patch=4, width=16, depth=1, heads=2, classes=2))
    with pytest.raises(InputError, match=r"which this model lacks; leave train\.adversarial out"):
        AdversarialLoss(CrossEntropyLoss(), EPSILON)(model, {"source": torch.randn(2, 3, 8, 8)}, torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="not causal_lm; leave it out"):
        read_recipe("gpt-tiny", ["train.adversarial=0.1"])
