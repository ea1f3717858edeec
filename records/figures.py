"""Figures: means, spreads and Student's t-tests, for whatever numbers a log may hold."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from records.terminal import UserError

SIGNIFICANCE = 0.01
CONFIDENCE = 0.95


def mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values) if values else math.nan
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the largest number
        return math.nan


def spread(values: Sequence[float]) -> float:
    """The standard deviation of the runs around their own mean; nan for a single run."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    try:
        return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
    except (OverflowError, ValueError):
        return math.nan


def p_below(losses: Sequence[float], target: float) -> float | None:
    """How likely such losses were if the true mean were at the target or above: Student's one-sided t-test.

    None where the test has no meaning: fewer than two runs, no spread, or a loss that is no number.
    """
    noise = spread(losses) / math.sqrt(len(losses)) if losses else math.nan
    if not noise > 0 or not math.isfinite(noise):
        return None
    return student("stdtr", len(losses) - 1, (mean(losses) - target) / noise)


def half_interval(differences: Sequence[float]) -> float:
    """Half the width of the interval that holds the true mean difference with 95 % confidence (paired t)."""
    quantile = student("stdtrit", len(differences) - 1, (1 + CONFIDENCE) / 2)
    return quantile * spread(differences) / math.sqrt(len(differences))


class Welch(NamedTuple):
    """The difference of two means, its 95 % interval, and how likely one so large were if there were none."""

    difference: float
    low: float
    high: float
    p: float

    @property
    def shown(self) -> bool:
        """Does the interval leave zero out?"""
        return self.low > 0 or self.high < 0


def welch(a: Sequence[float], b: Sequence[float]) -> Welch | None:
    """Welch's test of mean(b) - mean(a), for spreads that need not be equal; None where it has no meaning."""
    if len(a) < 2 or len(b) < 2:
        return None
    noise_a, noise_b = spread(a) / math.sqrt(len(a)), spread(b) / math.sqrt(len(b))
    noise = math.hypot(noise_a, noise_b)
    difference = mean(b) - mean(a)
    if not noise > 0 or not math.isfinite(noise) or not math.isfinite(difference):
        return None
    freedom = 1 / ((noise_a / noise) ** 4 / (len(a) - 1) + (noise_b / noise) ** 4 / (len(b) - 1))
    half = student("stdtrit", freedom, (1 + CONFIDENCE) / 2) * noise
    p = 2 * student("stdtr", freedom, -abs(difference) / noise)
    return Welch(difference, difference - half, difference + half, p)


def student(function: str, *arguments: float) -> float:
    """scipy's Student distribution, imported here: most commands need no statistics, and special loads quickly."""
    try:
        from scipy import special
    except ImportError:
        raise UserError("the t-test needs scipy: pip install -r requirements-dev.txt") from None
    return float(getattr(special, function)(*arguments))


def have_scipy() -> bool:
    try:
        student("stdtr", 1, 0)
    except UserError:
        return False
    return True


def show_p(p: float) -> str:
    return f"= {p:.4f}" if p >= 0.00005 else "< 0.0001"


def with_spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    if not values:
        return "-"
    noise = f" ± {show_number(spread(values), digits)}" if len(values) > 1 else ""
    return show_number(mean(values), digits) + noise + unit


def show_number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1e9 else f"{value:.4g}"
