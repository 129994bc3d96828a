"""Whether a candidate may take the incumbent's place: measured against noise, on two clocks, in several fresh sessions.

A *session* is one list of cell records, timed with the candidate, the incumbent and the incumbent's *twin* (a second
process with the very same library) in fresh processes whose passes are interleaved. Of every pass there are two times:
the worker's (median of its samples) and the judge's own, which no candidate can forge. On each clock:

    gain of a cell     1 - r, ln r = mean over incumbent and twin of the median over passes of ln(candidate / it)
    A/A of a cell      median over passes of ln(twin / incumbent): how far equal libraries lie apart
    gain, A/A of T     sums over cells, weighted with the cell's share of the incumbent's T

One process's own offset (where its memory lies, which cores it got) does not show within a session. It is estimated from
the A/A readings and from how the gain moves between sessions, in three ways of which the largest counts: for T as a whole;
cell by cell, so that a cell with a wide A/A widens the interval; from the gain's moves alone, for a candidate less steady
than the incumbent.

Over sessions a cell's ln r is averaged, and the gain of T is the sum of the cells' gains from those means: 1 - r of equal
kernels lies below 0 in the mean, by half the variance of ln r, which is 1 % where processes differ by 12 % in a cell.
Whether the gain is beyond noise, or another session is to be measured, is decided by looks.py. The sum of the sessions' T
must be lower too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tools.evaluator.looks import OF_GAIN, RULE, Rule, freedom, rule
from tools.evaluator.objective import admissible, doubtful, pass_times, total
from tools.evaluator.statistics import median, paired

Session = list[dict[str, Any]]
CLOCKS = ("worker", "judge")
RIVALS = ("incumbent", "twin")
TINY_US = 1e-3  # a worker may claim zeros; its median is refused elsewhere
OF_AA = 2.0  # variance of an A/A reading, one process - another, in units of one process's


@dataclass(frozen=True)
class Reading:
    """One session on one clock: gain and A/A of every cell, the cells' shares of the incumbent's T, and their sums."""

    gains: list[float]
    apart: list[float]
    shares: list[float]

    @property
    def gain(self) -> float:
        return sum(share * gain for share, gain in zip(self.shares, self.gains, strict=True))

    @property
    def aa(self) -> float:
        return sum(share * apart for share, apart in zip(self.shares, self.apart, strict=True))


def even(cell: dict[str, Any]) -> bool:
    """Whether all passes of a cell have equally many calls. What a pass costs the judge is part of its clock: a candidate
    whose passes are longer than the incumbent's would seem faster."""
    kernels = cell["modes"]["cold"]["kernels"]
    return len({kernels[racer]["calls_per_sample"] for racer in ("candidate", *RIVALS)}) == 1


def read(session: Session, w: dict[str, float], clock: str) -> Reading:
    """Gains and A/A of one session. Against each rival by itself: equal processes then give 0 however skewed the noise."""
    gains, between, parts = [], [], []
    for cell in session:
        kernels = cell["modes"]["cold"]["kernels"]
        times = [pass_times(kernels[racer], clock) for racer in ("candidate", *RIVALS)]
        candidate, incumbent, twin = ([max(taken, TINY_US) for taken in passes] for passes in times)
        gains.append(1 - math.exp(0.5 * (median(paired(candidate, incumbent)) + median(paired(candidate, twin)))))
        between.append(median(paired(twin, incumbent)))
        parts.append(w[cell["name"]] * 0.5 * (median(times[1]) + median(times[2])))
    return Reading(gains, between, [part / sum(parts) for part in parts])


def _moved(gains: list[float]) -> float:
    """Sum of the squared moves of a gain between sessions, in variances of one process."""
    mean = sum(gains) / len(gains)
    return sum((gain - mean) ** 2 for gain in gains) / OF_GAIN


def _process_variance(gains: list[float], apart: list[float]) -> float:
    """Variance of one process's offset, from a gain and an A/A reading of each session."""
    return (_moved(gains) + sum(value**2 for value in apart) / OF_AA) / freedom(len(gains))


def _on_clock(readings: list[Reading], by: Rule) -> dict[str, Any]:
    """Mean gain, its interval, and the spread of one process, from all sessions on one clock."""
    count = len(readings)
    gains, aa = [r.gain for r in readings], [r.aa for r in readings]
    share = [sum(part) / count for part in zip(*(r.shares for r in readings), strict=True)]
    cells = [_process_variance([r.gains[i] for r in readings], [r.apart[i] for r in readings]) for i in range(len(share))]
    by_cells = sum(part**2 * variance for part, variance in zip(share, cells, strict=True))
    spread = math.sqrt(max(_process_variance(gains, aa), by_cells, _moved(gains) / max(1, count - 1)))
    kept = [math.exp(sum(math.log(1 - r.gains[i]) for r in readings) / count) for i in range(len(share))]
    gain = sum(gains) / count if by.first else sum(part * (1 - ratio) for part, ratio in zip(share, kept, strict=True))
    reach = by.quantile(count) * spread * math.sqrt(OF_GAIN / count)  # to the bit as rule 1 had it
    return {
        "gain": gain,
        "interval": [gain - reach, gain + reach],
        "gains": gains,
        "aa": aa,
        "process_spread": spread,
        "cell_spreads": [math.sqrt(variance) for variance in cells],
    }


def weigh(readings: dict[str, list[Reading]], by: Rule) -> tuple[dict[str, dict[str, Any]], str, str]:
    """What the sessions so far say on each clock, and (verdict, reason). readings: clock -> a reading of each session."""
    clocks = {clock: _on_clock(readings[clock], by) for clock in CLOCKS}
    return clocks, *by.verdict(clocks, len(readings[CLOCKS[0]]))


def compare(sessions: list[Session], w: dict[str, float], *, noise: bool = True, number: int = RULE) -> dict[str, Any]:
    """Candidate against incumbent. `verdict`: better, not better, or unclear (another session may decide).

    noise=False takes any lower T for a gain: only to show what that would promote. number: of the rule.
    """
    by = rule(number)
    readings = {clock: [read(session, w, clock) for session in sessions] for clock in CLOCKS}
    clocks, verdict, why = weigh(readings, by)
    counted = sessions[:1] if by.first else sessions
    own, rivals = (sum(total(session, w, racer) or 0.0 for session in counted) for racer in ("candidate", "incumbent"))
    lower = own < rivals
    uneven = [cell["name"] for session in sessions for cell in session if not even(cell)]
    if uneven:
        verdict, why = "not better", f"{uneven[0]}: passes of different lengths are not compared"
    elif not lower and (by.first or not noise or verdict == "better"):
        verdict, why = "not better", "T is not below the incumbent's"
    elif not noise:
        verdict, why = "better", "T is below the incumbent's; noise was not looked at"
    judged = readings["judge"]
    spreads = clocks["judge"]["cell_spreads"]
    cells = [
        {
            "name": cell["name"],
            "share": sum(r.shares[i] for r in judged) / len(judged),
            "gain": sum(r.gains[i] for r in judged) / len(judged),
            "aa": [r.apart[i] for r in judged],
            "process_spread": spreads[i],
        }
        for i, cell in enumerate(sessions[0])
    ]
    for found in clocks.values():
        del found["cell_spreads"]
    return {"rule": number, "sessions": len(sessions), "clocks": clocks, "cells": cells, "verdict": verdict, "why": why}


def again(sessions: list[Session], w: dict[str, float], stated: dict[str, Any]) -> dict[str, Any]:
    """The comparison of a record once more, by the rule that it was made under."""
    return compare(sessions, w, number=stated.get("rule", 1))


def decide(
    problems: list[str], comparison: dict[str, Any] | None, blockers: list[str], sealed: bool | None
) -> tuple[bool, str]:
    """(promoted, reason). Of the sealed cases the reason says only that they failed, never which or how."""
    if blockers:
        return False, f"not a run that promotes: {'; '.join(blockers)}"
    if problems:
        return False, f"not admissible: {problems[0]}" + (f" and {len(problems) - 1} cells more" if len(problems) > 1 else "")
    if comparison is None:
        return False, "no incumbent to compare with"
    if comparison["verdict"] != "better":
        return False, comparison["why"]
    if sealed is None:
        return False, "the sealed cases were not run"
    if not sealed:
        return False, "the sealed cases failed"
    return True, comparison["why"]


def record(
    sessions: list[Session],
    comparison: dict[str, Any] | None,
    root: dict[str, float] | None,
    max_slowdown: float,
    blockers: list[str],
    sealed: bool | None,
) -> dict[str, Any]:
    """The report's `promotion`. root: each cell's latency under the root, microseconds."""
    problems = admissible(sessions[0], root, max_slowdown, sessions[1:]) if root is not None else []
    promoted, reason = decide(problems, comparison, blockers, sealed)
    return {
        "admissible": not problems,
        "problems": problems,
        "doubtful": doubtful(sessions[0], root, max_slowdown) if root is not None else [],
        "blockers": blockers,
        "sealed": {True: "passed", False: "failed", None: "not run"}[sealed],
        "comparison": comparison,
        "promoted": promoted,
        "reason": reason,
    }
