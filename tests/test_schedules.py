"""Schedules with the values published for the record."""

import pytest

from train_gpt import lr_factor, muon_momentum, window_in_blocks

STEPS = 1390


def window(step: int) -> int:
    return window_in_blocks(step / STEPS, 128, 1856)


def factor(step: int) -> float:
    return lr_factor(step / STEPS, 0.4)


def test_the_window_grows_as_in_the_record():
    assert [window(step) for step in (0, 100, 300, STEPS // 2, STEPS - 1, STEPS)] == [1, 1, 3, 7, 14, 14]
    changes = [step for step in range(1, STEPS) if window(step) != window(step - 1)]
    assert changes[:3] == [103, 206, 309] and [window(step) for step in changes[:3]] == [2, 3, 4]
    assert [window(step) for step in range(STEPS)] == sorted(window(step) for step in range(STEPS))


def test_the_learning_rates_cool_down_over_the_last_40_percent():
    assert next(step for step in range(STEPS) if factor(step) < 1) == 835
    assert factor(0) == factor(STEPS // 2) == 1
    assert factor(STEPS - 1) == pytest.approx(0.00179856, rel=1e-5)
    assert factor(STEPS) == 0


def test_the_momentum_grows_over_300_steps():
    momentum = [muon_momentum(step, 300, 0.85, 0.95) for step in range(STEPS)]
    assert momentum[0] == 0.85 and momentum[100] == pytest.approx(0.883333, abs=1e-6)
    assert momentum[300] == momentum[-1] == pytest.approx(0.95)


def test_no_cooldown_and_no_momentum_warmup_are_possible():
    assert lr_factor(0.99, 0) == 1 and muon_momentum(0, 0, 0.85, 0.95) == pytest.approx(0.95)
