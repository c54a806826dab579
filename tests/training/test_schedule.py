"""Schedules against their closed forms; each a pure function of the step."""

import math
from itertools import pairwise

import pytest

from monoblock.errors import ConfigError
from monoblock.training.schedule import DECAY_CURVES, learning_rate, noam

PEAK, STEPS, WARMUP = 3e-3, 101, 11


def rate(name, step, **options):
    return learning_rate(name, step, **{"peak": PEAK, "steps": STEPS, "warmup": WARMUP} | options)


@pytest.mark.parametrize("step", [1, 17, 3999, 4000, 4001, 100_000])
def test_noam_is_equation_3_of_the_paper(step):
    assert noam(step, 512, 4000) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-15)


def test_noam_rises_to_the_end_of_warm_up_and_falls_after_it():
    rates = [learning_rate("noam", step, peak=1, steps=0, warmup=40, width=64) for step in range(200)]
    assert max(rates) == rates[39] == pytest.approx((64 * 40) ** -0.5)
    assert rates[:40] == sorted(rates[:40])
    assert rates[39:] == sorted(rates[39:], reverse=True)
    assert rates[9] == pytest.approx(rates[39] / 4), "linear"
    assert rates[159] == pytest.approx(rates[39] / 2), "by the inverse root"


def test_for_noam_the_peak_is_a_factor():
    assert rate("noam", 5, peak=2) == 2 * rate("noam", 5, peak=1)


@pytest.mark.parametrize("name", DECAY_CURVES)
def test_warm_up_is_linear_and_ends_at_the_peak(name):
    assert [rate(name, step) for step in range(WARMUP)] == pytest.approx(
        [PEAK * (step + 1) / WARMUP for step in range(WARMUP)]
    )
    assert rate(name, WARMUP) == pytest.approx(PEAK)


@pytest.mark.parametrize("name", DECAY_CURVES)
def test_without_warm_up_the_first_step_has_the_peak(name):
    assert rate(name, 0, warmup=0) == pytest.approx(PEAK)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_rate_ends_at_the_floor_and_stays_there(name, floor):
    assert rate(name, STEPS, floor=floor) == pytest.approx(floor * PEAK, abs=1e-18)
    assert rate(name, STEPS + 50, floor=floor) == pytest.approx(floor * PEAK, abs=1e-18)


def test_cosine_decays_by_half_a_cosine_wave():
    for step in range(WARMUP, STEPS):
        progress = (step - WARMUP) / (STEPS - WARMUP)
        factor = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        assert rate("cosine", step, floor=0.1) == pytest.approx(PEAK * factor)
    assert rate("cosine", (WARMUP + STEPS) // 2) == pytest.approx(PEAK / 2)


def test_linear_is_straight():
    rates = [rate("linear", step) for step in range(WARMUP, STEPS + 1)]
    differences = {round(a - b, 12) for a, b in pairwise(rates)}
    assert differences == {round(PEAK / (STEPS - WARMUP), 12)}


def test_wsd_is_stable_until_the_last_fifth_and_then_straight_down():
    decay_start = WARMUP + int(0.8 * (STEPS - WARMUP))
    assert {rate("wsd", step) for step in range(WARMUP, decay_start)} == {PEAK}
    rates = [rate("wsd", step) for step in range(decay_start, STEPS + 1)]
    expected = [PEAK * (STEPS - step) / (STEPS - decay_start) for step in range(decay_start, STEPS + 1)]
    assert rates == pytest.approx(expected)


def test_constant_is_constant():
    assert {rate("constant", step) for step in range(WARMUP, STEPS)} == {PEAK}


def test_a_warm_up_longer_than_the_run_never_divides_by_zero():
    assert rate("cosine", 10, steps=5, warmup=50) == pytest.approx(PEAK * 11 / 50)
    assert rate("cosine", 60, steps=5, warmup=50) == pytest.approx(0, abs=1e-18)


def test_an_unknown_schedule_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        rate("cosin", 1)
