"""When a promotion is decided: the looks at the sessions so far, the error that each may make, and when to give up.

Rule 2. Sessions come one after another, and after those of LOOKS the gain is looked at. The candidate is better if on both
clocks the mean gain is at least LEAST_GAIN and the lower end of its interval (Student's, one-sided, at the level of that
look) lies above 0. The first look, after two sessions, is where a machine with little noise is done. The later ones are for
machines where processes differ by as much as the gain: their levels grow with the sessions, as those of a group-sequential
test do (Lan and DeMets, Biometrika 70, 1983), since error that is spent early is error that a late look lacks. Looks share
their sessions, and together they promote at most about 4.5 % of equal candidates (tests/test_promotion.py measures it): the
rate of one attempt, not of a search that tries a hundred.

A session without a gain is no reason to stop where a session's gain moves by more than the gain is. Given up is a candidate
of which, on either clock, a gain of SOUGHT_GAIN lies beyond noise (SURE, one-sided) and whose mean gain is below what as
many sessions more would need at this noise. That can only take promotions away.

Rule 1, by which records without a number were made: every session shows a gain, and three looks at 1.5 % each after two,
three and four sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.core.errors import UserError
from tools.evaluator.statistics import student_quantile

RULE = 2  # of new comparisons
LEAST_GAIN = 0.005  # the judge's clock and the passes' order resolve no less
SOUGHT_GAIN = 0.03  # what is to be found
LOOKS = {2: 0.015} | {n: 0.020 * n / 32 for n in (3, 4, 6, 8, 12, 16, 20, 24, 28, 32)}  # sessions -> level, one-sided
MOST_SESSIONS = max(LOOKS)
SURE_FIRST, SURE = 0.90, 0.99  # after one session, of which little is known, and after more
FIRST_STUDENT = {1: 21.205, 2: 3.896, 3: 3.003, 4: 2.715}  # of rule 1: sessions -> 98.5 % quantile
OF_GAIN = 1.5  # variance of a gain, candidate - mean of two, in units of one process's

Clocks = dict[str, dict[str, Any]]


def freedom(sessions: int) -> int:
    """Degrees of freedom of the spread of processes: a gain and an A/A reading a session, less the mean gain."""
    return 2 * sessions - 1


def error_of_mean(spread: float, sessions: int) -> float:
    """Standard error of the mean gain of T. spread: standard deviation of one process's offset."""
    return spread * math.sqrt(OF_GAIN / sessions)


@dataclass(frozen=True)
class Rule:
    """quantile(sessions): what the interval's half width is in standard errors. verdict(clocks, sessions): (verdict, reason).
    first: as rule 1 had it, the gain is the mean of the sessions' gains, and T of the first session must be lower."""

    quantile: Callable[[int], float]
    verdict: Callable[[Clocks, int], tuple[str, str]]
    first: bool


def rule(number: int) -> Rule:
    """The rule of a comparison by its number. UserError for one that this version does not know."""
    if number not in RULES:
        raise UserError(f"promotions by rule {number} are of another version; this one knows {', '.join(map(str, RULES))}")
    return RULES[number]


# ---------------------------------------------------------------- rule 2


def _quantile(sessions: int) -> float:
    """Of the look after so many sessions, or else of the next one."""
    if sessions > MOST_SESSIONS:
        raise UserError(f"{sessions} sessions: a promotion takes {MOST_SESSIONS} at most")
    look = min(look for look in LOOKS if look >= sessions)
    return student_quantile(1 - LOOKS[look], freedom(sessions))


def _given_up(found: dict[str, Any], sessions: int) -> bool:
    """Whether a gain that is sought lies beyond noise, and as many sessions more would need more than there is."""
    spread, then = found["process_spread"], min(2 * sessions, MOST_SESSIONS)
    sure = student_quantile(SURE if sessions > 1 else SURE_FIRST, freedom(sessions))
    needed = max(LEAST_GAIN, _quantile(then) * error_of_mean(spread, then))
    return bool(found["gain"] < needed and found["gain"] + sure * error_of_mean(spread, sessions) < SOUGHT_GAIN)


def _verdict(clocks: Clocks, sessions: int) -> tuple[str, str]:
    """The clock that says less decides."""
    gain = min(found["gain"] for found in clocks.values())
    text, low, _ = _said(clocks, sessions)
    if sessions in LOOKS and low > 0 and gain >= LEAST_GAIN:
        return "better", text
    for clock, found in clocks.items():
        if _given_up(found, sessions):
            return "not better", f"{text}: a gain of {percent(SOUGHT_GAIN)} is beyond noise on the {clock}'s clock"
    text += f": not beyond noise, or below {percent(LEAST_GAIN)}"
    return ("unclear" if sessions < MOST_SESSIONS else "not better"), text


# ---------------------------------------------------------------- rule 1


def _first_quantile(sessions: int) -> float:
    if sessions not in FIRST_STUDENT:
        raise UserError(f"{sessions} sessions: a promotion by rule 1 takes {max(FIRST_STUDENT)} at most")
    return FIRST_STUDENT[sessions]


def _first_verdict(clocks: Clocks, sessions: int) -> tuple[str, str]:
    """The clock that says less decides."""
    for clock, found in clocks.items():
        for number, gain in enumerate(found["gains"], 1):
            if gain <= 0:
                return "not better", f"measurement {number} shows no gain on the {clock}'s clock ({percent(gain)})"
    gain = min(found["gain"] for found in clocks.values())
    text, low, high = _said(clocks, sessions)
    if sessions > 1 and low > 0 and gain >= LEAST_GAIN:
        return "better", text
    if sessions > 1 and high < LEAST_GAIN:
        return "not better", f"{text}: less than {percent(LEAST_GAIN)} at best"
    text += f": not beyond noise, or below {percent(LEAST_GAIN)}"
    return ("unclear" if sessions < max(FIRST_STUDENT) else "not better"), text


# ---------------------------------------------------------------- both


def _said(clocks: Clocks, sessions: int) -> tuple[str, float, float]:
    """The gain as a sentence, and the interval of the clock that says less."""
    gain = min(found["gain"] for found in clocks.values())
    low, high = min((found["interval"] for found in clocks.values()), key=lambda interval: float(interval[0]))
    return f"T is {percent(gain)} lower in {sessions} measurements, interval {percent(low)} to {percent(high)}", low, high


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


RULES = {1: Rule(_first_quantile, _first_verdict, True), 2: Rule(_quantile, _verdict, False)}
