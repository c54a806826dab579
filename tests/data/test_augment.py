"""Augmentation of images: each against its definition pixel by pixel, and the random numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from monoblock.data.augment import (
    NUMBERS_PER_IMAGE,
    augment,
    random_cutout,
    random_flip,
    random_rotate_and_zoom,
    random_shift,
    uniform_numbers,
)

B, CHANNELS, HEIGHT, WIDTH = 5, 2, 7, 11
PIXELS = torch.rand(B, CHANNELS, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))


def test_random_numbers_depend_on_seed_epoch_and_sample_and_are_uniform():
    result = uniform_numbers(3, 2, 4001)
    assert result.shape == (4001, NUMBERS_PER_IMAGE)
    assert (result[:17] == uniform_numbers(3, 2, 17)).all(), "the number of samples does not matter"
    assert (result >= 0).all()
    assert (result < 1).all()
    assert not (result[:17] == uniform_numbers(3, 1, 17)).any()
    assert not (result[:17] == uniform_numbers(4, 2, 17)).any()
    counts = np.histogram(result, bins=20, range=(0, 1))[0]
    expected = result.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8, "chi-squared with 19 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("max_pixels", [1, 3])
def test_a_shift_moves_every_pixel_equally_and_fills_with_zeros(max_pixels):
    steps = 2 * max_pixels + 1
    uniform = torch.rand(B, 2, generator=torch.Generator().manual_seed(1))
    result = random_shift(PIXELS, uniform, max_pixels)
    for image, (first, second) in enumerate(uniform.tolist()):
        down, right = int(steps * first) - max_pixels, int(steps * second) - max_pixels
        for row in range(HEIGHT):
            for column in range(WIDTH):
                inside = 0 <= row - down < HEIGHT and 0 <= column - right < WIDTH
                expected_pixels = PIXELS[image, :, row - down, column - right] if inside else torch.zeros(CHANNELS)
                assert torch.equal(result[image, :, row, column], expected_pixels)


def test_shifts_are_uniform_up_to_both_ends():
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 2, 2] = 1
    uniform = torch.from_numpy(uniform_numbers(0, 0, 2500)[:, :2])
    result = random_shift(image.expand(2500, -1, -1, -1), uniform, 2)[:, 0].sum(0)  # where the pixel went
    assert result.sum() == 2500
    assert ((result - 100) ** 2 / 100).sum() < 51.2  # 24 degrees of freedom, p = 0.001


def test_a_flip_mirrors_images_with_the_given_probability():
    uniform = torch.tensor([0.0, 0.29, 0.3, 0.7, 0.99])
    result = random_flip(PIXELS, uniform, 0.3)
    mirrored = torch.from_numpy(PIXELS.numpy()[..., ::-1].copy())
    assert torch.equal(result, torch.cat((mirrored[:2], PIXELS[2:])))


@pytest.mark.parametrize("side", [2, 3])
def test_a_cutout_is_a_square_around_a_random_centre(side):
    uniform = torch.rand(B, 2, generator=torch.Generator().manual_seed(2))
    result = random_cutout(PIXELS + 1, uniform, side)
    for image, (first, second) in enumerate(uniform.tolist()):
        top, left = math.floor(first * HEIGHT) - side // 2, math.floor(second * WIDTH) - side // 2
        expected_pixels = (PIXELS[image] + 1).clone()
        expected_pixels[:, max(0, top) : top + side, max(0, left) : left + side] = 0
        assert torch.equal(result[image], expected_pixels)


@pytest.mark.parametrize(("degrees", "zoom"), [(20.0, 0.0), (0.0, 0.3), (15.0, 0.2)])
def test_rotation_and_zoom_match_scipy_with_bilinear_interpolation(degrees, zoom):
    uniform = torch.rand(B, 2, generator=torch.Generator().manual_seed(3))
    result = random_rotate_and_zoom(PIXELS, uniform, degrees, zoom)
    centre = np.array([(HEIGHT - 1) / 2, (WIDTH - 1) / 2])
    for image, (first, second) in enumerate(uniform.double().tolist()):
        angle, size = math.radians(degrees * (2 * first - 1)), 1 + zoom * (2 * second - 1)
        rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        matrix = rotation / size  # from output (row, column) to input
        for channel in range(CHANNELS):
            expected_pixels = ndimage.affine_transform(
                PIXELS[image, channel].double().numpy(), matrix, centre - matrix @ centre, order=1, mode="grid-constant"
            )
            np.testing.assert_allclose(result[image, channel], expected_pixels, atol=2e-5)


def test_without_options_nothing_changes_and_each_augmentation_has_its_own_random_numbers():
    uniform = torch.from_numpy(uniform_numbers(1, 0, B))
    assert augment(PIXELS, uniform) is PIXELS
    both = augment(PIXELS, uniform, shift=2, cutout=3)
    assert torch.equal(both, random_cutout(random_shift(PIXELS, uniform[:, :2], 2), uniform[:, 5:], 3))
    together = augment(PIXELS, uniform, shift=2, rotate=9.0, zoom=0.1, flip=0.5, cutout=3)
    parts = [
        augment(PIXELS[n : n + 1], uniform[n : n + 1], shift=2, rotate=9.0, zoom=0.1, flip=0.5, cutout=3)
        for n in range(B)
    ]
    torch.testing.assert_close(together, torch.cat(parts))
