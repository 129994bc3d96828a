"""Which kernels really ran: names, launches, grids, registers and shares of GPU time, one call of each cell.

Observed after all timing, since a profiler changes what it watches. Nothing here decides: what cannot be read is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.grids import Cell
from tools.evaluator.inputs import Draw
from tools.evaluator.passes import Racer
from tools.evaluator.runner import Call, Runner, WorkerFailure
from tools.evaluator.timing import Timer

BUDGET_S = 25.0


def observe(
    timer: Timer,
    arena: Arena,
    cells: list[Cell],
    racers: list[Racer],
    measured: list[dict[str, Any]],
    progress: Callable[[str], None],
    fresh: Callable[[str], Runner],
) -> dict[str, Any]:
    """cell -> racer -> {"route", "kernels", "note"}, the smallest and largest cells of each kind first; {} on the CPU.

    racers: without those that run what another one runs, which would show the same. fresh: starts a worker of a kernel
    library that may be profiled: one that is confined cannot load a profiler any more.
    """
    if arena.device == "cpu":
        return {}
    ends = [
        group[at]
        for kind in dict.fromkeys(c.kind for c in cells)
        for group in [[c for c in cells if c.kind == kind]]
        for at in (0, -1)
    ]
    records = {cell["name"]: cell["modes"]["cold"] for cell in measured}
    found: dict[str, Any] = {}
    racers = [_profiled(racer, fresh) for racer in racers]
    start = time.monotonic()
    for cell in dict.fromkeys([*ends, *cells]):
        if time.monotonic() - start > BUDGET_S:
            break
        progress(cell.name)
        for racer in racers:
            record = records[cell.name]["kernels" if racer.fixed else "baselines"].get(racer.name)
            if record is None or not racer.runner.alive() or (cell not in ends and racer.name != "candidate"):
                continue
            with arena.scope():
                found.setdefault(cell.name, {})[racer.name] = {
                    "route": record["route"],
                    **_profile(timer, cell, racer, record["route"]),
                }
    return found


def _profiled(racer: Racer, fresh: Callable[[str], Runner]) -> Racer:
    """The racer in a worker that can be profiled; as it is, where there is none."""
    if not racer.fixed:
        return racer
    try:
        return replace(racer, runner=fresh(racer.name))
    except WorkerFailure:
        return racer


def _profile(timer: Timer, cell: Cell, racer: Racer, route: str | None) -> dict[str, Any]:
    try:
        draw, closed = Draw(1, f"dispatch:{cell.name}", timer.device), racer.runner.trusted
        sets = timer.sets(cell, 1, draw, racer.layout, closed=closed)
        calls = [Call(cell.entry, *sets[0], timer.outputs(cell, 1, closed=closed)[0])]
        graph = racer.runner.capture(calls, route=route)
        racer.runner.replay_all(graph)
        seen = racer.runner.profile(graph)
        racer.runner.drop(graph)
    except WorkerFailure as problem:
        return {"kernels": [], "note": f"unavailable: {problem.message}"}
    return {"kernels": seen.get("kernels", []), "note": seen.get("note", "")}
