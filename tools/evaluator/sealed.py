"""The sealed cases: shapes and values that decide about a promotion and of which only pass or fail is ever told.

Their seed is drawn when they are run and kept nowhere. The candidate's worker is a fresh one whose output is thrown away;
no status, label, place or time of them reaches the report. Correctness: the hidden check with more shapes. Speed: secret
workloads between those of the target's grid, in each of which the candidate may not be slower than the incumbent by more
than the target's limit, on either clock, pass by pass against the incumbent and its twin. Where it seems so, it is timed once
more: noise passes, what was tuned to the published cells alone does not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from tools.evaluator.cases import CHECKS, Context
from tools.evaluator.grids import Cell
from tools.evaluator.objective import pass_times
from tools.evaluator.passes import Mismatch, Racer, Refused
from tools.evaluator.promotion import CLOCKS, RIVALS
from tools.evaluator.runner import WorkerFailure
from tools.evaluator.statistics import median, paired
from tools.evaluator.timing import Timer

CELLS = 2  # of each phase
TRIES = 2  # of a cell that seems too slow
AXES = (("prefill", "full", "seqlen"), ("decode", "decode", "context"))


def secret_cells(workloads: dict[str, Any], chance: random.Random) -> list[Cell]:
    """Workloads within the range of the target's axes and off its grid, none of more work than its middle ones."""
    found: list[Cell] = []
    for kind, phase, axis in AXES:
        axes = workloads.get(kind)
        if not axes:
            continue
        batches, sizes = sorted(axes["batch"]), sorted(axes[axis])
        most = batches[len(batches) // 2] * sizes[len(sizes) // 2]
        while sum(cell.kind == kind for cell in found) < CELLS:
            batch = chance.randint(batches[0], batches[-1])
            size = round(math.exp(chance.uniform(math.log(sizes[0]), math.log(sizes[-1]))))
            if batch * size <= most or len(sizes) == 1:
                rows = size if kind == "prefill" else 1
                found.append(Cell(f"sealed {len(found)}", phase, kind, batch, rows, size))
    return found


def slowdown(record: dict[str, Any]) -> float:
    """How many times the incumbent's time the candidate takes in a cell, on the clock that says more."""
    kernels = record["modes"]["cold"]["kernels"]
    ratios = [
        sum(median(paired(pass_times(kernels["candidate"], clock), pass_times(kernels[rival], clock))) for rival in RIVALS)
        for clock in CLOCKS
    ]
    return math.exp(max(ratios) / len(RIVALS))


def sealed_cases(
    context: Callable[[int], Context],
    timer: Callable[[int], Timer],
    racers: list[Racer],
    workloads: dict[str, Any],
    slowest: float,
) -> bool:
    """Whether all sealed cases pass. context and timer make theirs from a secret seed; slowest: limits.max_slowdown."""
    chance = random.SystemRandom()
    try:
        checked = context(chance.getrandbits(62))
        checked.perform(CHECKS["hidden"])
        if any(tally.failed for tally in (*checked.tallies, checked.witnessed, checked.untouched)):
            return False
        clock = timer(chance.getrandbits(62))
        for cell in secret_cells(workloads, chance):
            if all(slowdown(clock.cell(cell, racers, ("cold",))) > slowest for _ in range(TRIES)):
                return False
    except (WorkerFailure, Refused, Mismatch):
        return False
    return True
