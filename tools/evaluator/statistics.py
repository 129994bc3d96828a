"""Medians, their confidence intervals, and geometric means. No numpy, no surprises: each works on a list of floats."""

from __future__ import annotations

import math
from functools import cache


def median(values: list[float]) -> float:
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else 0.5 * (ordered[half - 1] + ordered[half])


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order-statistic interval of the median: the k-th smallest and k-th largest of n values.

    It covers the median with probability 1 - 2 P(Binomial(n, 1/2) < k), whatever the distribution; k is the largest
    that reaches `confidence`. With too few values for that, the whole range.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2**n
        if 1.0 - 2.0 * below < confidence:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def paired(first: list[float], second: list[float]) -> list[float]:
    """ln(first / second) pass by pass, so that what slows the whole machine for a while cancels; one of the two may have
    had more passes at the end. Values are positive."""
    return [math.log(a / b) for a, b in zip(first, second, strict=False)]


def binomial_bound(successes: int, trials: int, confidence: float = 0.975) -> float:
    """The largest rate at which so few successes are still likely (Clopper and Pearson's upper bound)."""
    if successes >= trials:
        return 1.0
    low, high = successes / trials, 1.0
    for _ in range(60):
        rate = 0.5 * (low + high)
        at_most = sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(successes + 1))
        low, high = (rate, high) if at_most > 1 - confidence else (low, rate)
    return high


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Student's quantile for an odd number of degrees of freedom and a probability from 1/2 on.

    With tan a = t / sqrt(f) the distribution is 1/2 + (a + sin a (cos a + 2/3 cos^3 a + (2 4)/(3 5) cos^5 a + ...)) / pi,
    the last power being f - 2 (Abramowitz and Stegun, 26.7.3).
    """
    if freedom % 2 == 0:
        raise ValueError(f"{freedom} degrees of freedom are not an odd number")
    low, high = 0.0, 0.5 * math.pi
    for _ in range(60):
        angle = 0.5 * (low + high)
        cosine = math.cos(angle)
        term, terms = cosine, 0.0
        for power in range(1, freedom - 1, 2):
            terms += term
            term *= (power + 1) / (power + 2) * cosine * cosine
        below = 0.5 + (angle + math.sin(angle) * terms) / math.pi
        low, high = (angle, high) if below < probability else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def in_parts(values: list[float], count: int) -> list[list[float]]:
    """Consecutive parts of equal size. ValueError where there is no such split."""
    size, rest = divmod(len(values), count) if count else (0, 1)
    if rest or not size:
        raise ValueError(f"{len(values)} values have no {count} equal parts")
    return [values[start : start + size] for start in range(0, len(values), size)]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
