"""ShardedLongShort's schedules with the published values; test_normuon_yarn.py has those of the record after it."""

import math

import pytest
from helpers import load_record

script = load_record("ShardedLongShort")
lr_factor, muon_momentum, window_in_blocks = script.lr_factor, script.muon_momentum, script.window_in_blocks

STEPS = 1695


def window(step: int) -> int:
    return window_in_blocks(step / STEPS, 128, 1856)


def factor(step: int) -> float:
    return lr_factor(step / STEPS, 0.45, 0.1)


def test_the_window_grows_as_in_the_record():
    assert [window(step) for step in (0, 100, 300, STEPS // 2, STEPS - 1, STEPS)] == [1, 1, 3, 7, 14, 14]
    changes = [step for step in range(1, STEPS) if window(step) != window(step - 1)]
    assert changes[:3] == [126, 252, 377] and [window(step) for step in changes[:3]] == [2, 3, 4]
    assert [window(step) for step in range(STEPS)] == sorted(window(step) for step in range(STEPS))


def test_the_window_is_the_published_next_multiple_of_128_above_1728_times_the_progress():
    """Where that is a whole number of blocks itself, at step 1130 alone, ours is already one block wider."""
    published = [max(1, math.ceil(1728 * step / STEPS / 128)) for step in range(STEPS + 1)]
    assert [step for step in range(STEPS + 1) if window(step) != published[step]] == [1130]


def test_the_learning_rates_cool_down_to_a_tenth_over_the_last_45_percent():
    assert next(step for step in range(STEPS) if factor(step) < 1) == 933
    assert factor(0) == factor(STEPS // 2) == 1
    assert factor(STEPS - 1) == pytest.approx(0.1 + 0.9 / (0.45 * STEPS), rel=1e-9)
    assert factor(STEPS) == pytest.approx(0.1)
    assert lr_factor(0.75, 0.5, 0.2) == pytest.approx(0.6)  # half of the way from 1 to 0.2


def test_the_momentum_grows_over_300_steps():
    momentum = [muon_momentum(step, 300, 0.85, 0.95) for step in range(STEPS)]
    assert momentum[0] == 0.85 and momentum[100] == pytest.approx(0.883333, abs=1e-6)
    assert momentum[300] == momentum[-1] == pytest.approx(0.95)


def test_no_cooldown_and_no_momentum_warmup_are_possible():
    assert lr_factor(0.99, 0, 0.1) == 1 and muon_momentum(0, 0, 0.85, 0.95) == pytest.approx(0.95)
