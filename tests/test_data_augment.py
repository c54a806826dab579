"""Images varied: each change against its definition pixel by pixel, and the chances against (seed, epoch, sample)."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from monoblock.data.augment import EACH, augment, chances, covered, flipped, shifted, turned

B, CHANNELS, HEIGHT, WIDTH = 5, 2, 7, 11
PIXELS = torch.rand(B, CHANNELS, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))


def test_chances_are_a_function_of_seed_epoch_and_sample_and_even():
    found = chances(3, 2, 4001)
    assert found.shape == (4001, EACH)
    assert (found[:17] == chances(3, 2, 17)).all(), "how many samples there are changes nothing"
    assert (found >= 0).all()
    assert (found < 1).all()
    assert not (found[:17] == chances(3, 1, 17)).any()
    assert not (found[:17] == chances(4, 2, 17)).any()
    counts = np.histogram(found, bins=20, range=(0, 1))[0]
    expected = found.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8, "chi-squared with 19 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("most", [1, 3])
def test_a_shift_moves_every_pixel_by_the_same_and_brings_in_nothing(most):
    steps = 2 * most + 1
    places = torch.rand(B, 2, generator=torch.Generator().manual_seed(1))
    found = shifted(PIXELS, places, most)
    for image, (one, other) in enumerate(places.tolist()):
        down, right = int(steps * one) - most, int(steps * other) - most
        for row in range(HEIGHT):
            for column in range(WIDTH):
                inside = 0 <= row - down < HEIGHT and 0 <= column - right < WIDTH
                wanted = PIXELS[image, :, row - down, column - right] if inside else torch.zeros(CHANNELS)
                assert torch.equal(found[image, :, row, column], wanted)


def test_shifts_reach_both_ends_and_are_even():
    one = torch.zeros(1, 1, 5, 5)
    one[0, 0, 2, 2] = 1
    drawn = torch.from_numpy(chances(0, 0, 2500)[:, :2])
    found = shifted(one.expand(2500, -1, -1, -1), drawn, 2)[:, 0].sum(0)  # where the pixel went
    assert found.sum() == 2500
    assert ((found - 100) ** 2 / 100).sum() < 51.2  # 24 degrees of freedom, p = 0.001


def test_a_flip_mirrors_the_share_that_was_asked_for():
    chance = torch.tensor([0.0, 0.29, 0.3, 0.7, 0.99])
    found = flipped(PIXELS, chance, 0.3)
    mirrored = torch.from_numpy(PIXELS.numpy()[..., ::-1].copy())
    assert torch.equal(found, torch.cat((mirrored[:2], PIXELS[2:])))


@pytest.mark.parametrize("side", [2, 3])
def test_a_cutout_is_a_square_about_a_place_in_the_image(side):
    places = torch.rand(B, 2, generator=torch.Generator().manual_seed(2))
    found = covered(PIXELS + 1, places, side)
    for image, (one, other) in enumerate(places.tolist()):
        top, left = math.floor(one * HEIGHT) - side // 2, math.floor(other * WIDTH) - side // 2
        wanted = (PIXELS[image] + 1).clone()
        wanted[:, max(0, top) : top + side, max(0, left) : left + side] = 0
        assert torch.equal(found[image], wanted)


@pytest.mark.parametrize(("degrees", "zoom"), [(20.0, 0.0), (0.0, 0.3), (15.0, 0.2)])
def test_a_turn_is_what_scipy_computes_by_bilinear_interpolation(degrees, zoom):
    chance = torch.rand(B, 2, generator=torch.Generator().manual_seed(3))
    found = turned(PIXELS, chance, degrees, zoom)
    middle = np.array([(HEIGHT - 1) / 2, (WIDTH - 1) / 2])
    for image, (one, other) in enumerate(chance.double().tolist()):
        angle, size = math.radians(degrees * (2 * one - 1)), 1 + zoom * (2 * other - 1)
        back = (
            np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / size
        )  # (row, column)
        for channel in range(CHANNELS):
            wanted = ndimage.affine_transform(
                PIXELS[image, channel].double().numpy(), back, middle - back @ middle, order=1, mode="grid-constant"
            )
            np.testing.assert_allclose(found[image, channel], wanted, atol=2e-5)


def test_nothing_asked_for_is_nothing_changed_and_each_change_has_chances_of_its_own():
    chance = torch.from_numpy(chances(1, 0, B))
    assert augment(PIXELS, chance) is PIXELS
    both = augment(PIXELS, chance, shift=2, cutout=3)
    assert torch.equal(both, covered(shifted(PIXELS, chance[:, :2], 2), chance[:, 5:], 3))
    every = augment(PIXELS, chance, shift=2, turn=9.0, zoom=0.1, flip=0.5, cutout=3)
    parts = [
        augment(PIXELS[n : n + 1], chance[n : n + 1], shift=2, turn=9.0, zoom=0.1, flip=0.5, cutout=3) for n in range(B)
    ]
    torch.testing.assert_close(every, torch.cat(parts))
