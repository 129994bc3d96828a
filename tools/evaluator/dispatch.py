"""Which kernels really ran: names, launches, grids, registers and shares of GPU time, one call of each cell.

Observed after all timing, since a profiler changes what it watches. Nothing here decides: what cannot be read is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.grids import Cell
from tools.evaluator.inputs import Draw
from tools.evaluator.passes import Racer
from tools.evaluator.runner import Call, Runner, WorkerFailure
from tools.evaluator.timing import Timer

BUDGET_S = 25.0
BATCH_BYTES = 8 << 30  # of tensors in one session

Timed = tuple[Cell, dict[str, Any]]  # a cell, and what was measured of one racer in it


def observe(
    timer: Timer,
    arena: Arena,
    cells: list[Cell],
    racers: list[Racer],
    measured: list[dict[str, Any]],
    progress: Callable[[str], None],
    fresh: Callable[[str], Runner],
) -> dict[str, Any]:
    """cell -> racer -> {"route", "kernels", "note"}; {} on the CPU. Of a library the smallest and largest cells of each kind.

    racers: the candidate and the libraries. fresh: starts a worker of the candidate that may be profiled: one that is
    confined cannot load a profiler any more.
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
    start = time.monotonic()
    for racer in (_profiled(racer, fresh) for racer in racers):
        wanted = [
            (cell, record)
            for cell in dict.fromkeys([*ends, *cells])
            if (record := records[cell.name]["kernels" if racer.fixed else "baselines"].get(racer.name)) is not None
            and (racer.fixed or cell in ends)
        ]
        for batch in _batches(wanted, timer.heads):
            if time.monotonic() - start > BUDGET_S or not racer.runner.alive():
                break
            progress(f"{racer.name}: {batch[0][0].name}")
            with arena.scope():
                for (cell, record), seen in zip(batch, _profile(timer, batch, racer), strict=True):
                    found.setdefault(cell.name, {})[racer.name] = {"route": record["route"], **seen}
    return found


def _batches(wanted: list[Timed], heads: tuple[int, int]) -> Iterator[list[Timed]]:
    """Cells whose tensors lie side by side in a session of the profiler."""
    batch: list[Timed] = []
    room = BATCH_BYTES
    for cell, record in wanted:
        size = cell.input_bytes(*heads) + cell.output_bytes(heads[0])
        if batch and size > room:
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append((cell, record))
        room -= size
    if batch:
        yield batch


def _profiled(racer: Racer, fresh: Callable[[str], Runner]) -> Racer:
    """The racer in a worker that can be profiled; as it is, where there is none."""
    if not racer.fixed:
        return racer
    try:
        return replace(racer, runner=fresh(racer.name))
    except WorkerFailure:
        return racer


def _profile(timer: Timer, batch: list[Timed], racer: Racer) -> list[dict[str, Any]]:
    """{"kernels", "note"} of one call of each cell."""
    graphs: list[int] = []
    try:
        for cell, record in batch:
            draw, closed = Draw(1, f"dispatch:{cell.name}", timer.device), racer.runner.trusted
            sets = timer.sets(cell, 1, draw, racer.layout, closed=closed)
            calls = [Call(cell.entry, *sets[0], timer.outputs(cell, 1, closed=closed)[0])]
            graphs.append(racer.runner.capture(calls, route=record["route"]))
            racer.runner.replay_all(graphs[-1])
        seen = racer.runner.profile(graphs)
        for graph in graphs:
            racer.runner.drop(graph)
    except WorkerFailure as problem:
        return [{"kernels": [], "note": f"unavailable: {problem.message}"} for _ in batch]
    return [{"kernels": one.get("kernels", []), "note": one.get("note", "")} for one in seen]
