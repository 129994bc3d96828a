"""The objective T, each cell's share of it, and whether a candidate is admissible.

T = sum of w_c x latency_c over the cells' cold medians, in microseconds. Weights:

    phase_balanced   w_c = 0.5 / (cells of the phase x reference_c): full-sequence and decode carry one half each, and
                     T is 1 where every cell is as fast as its reference (the root, else the best baseline, else itself)
    token_counts     w_c = tokens of the phase / (cells of the phase x tokens of the cell)
    frequencies      w_c as given; every measured cell needs one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tools.core.errors import UserError
from tools.evaluator.statistics import geometric_mean, in_parts, median, median_interval, paired

PHASES = ("full", "decode")


def cold(cell: dict[str, Any], racer: str) -> float | None:
    """A cell's cold median of a kernel, microseconds."""
    found = cell["modes"]["cold"]["kernels"].get(racer)
    return None if found is None else float(found["median_us"])


def best_baseline(mode: dict[str, Any]) -> tuple[str, str | None, float] | None:
    """(provider, route, microseconds) of the fastest baseline of a cell's mode."""
    found = [(record["median_us"], name, record["route"]) for name, record in mode.get("baselines", {}).items()]
    if not found:
        return None
    taken, name, route = min(found)
    return name, route, taken


def references(cells: list[dict[str, Any]], root: dict[str, float] | None) -> dict[str, tuple[float, str]]:
    """Each cell's reference latency and where it comes from."""
    found: dict[str, tuple[float, str]] = {}
    for cell in cells:
        best = best_baseline(cell["modes"]["cold"])
        own = cold(cell, "candidate")
        if root is not None and cell["name"] in root:
            found[cell["name"]] = (root[cell["name"]], "root")
        elif best is not None:
            found[cell["name"]] = (best[2], best[0])
        else:
            assert own is not None
            found[cell["name"]] = (own, "itself")
    return found


def weights(
    objective: dict[str, Any], cells: list[dict[str, Any]], reference: dict[str, tuple[float, str]]
) -> dict[str, float]:
    """w_c of every cell. UserError where the config gives a cell no weight."""
    kind = objective["kind"]
    count = {phase: sum(cell["phase"] == phase for cell in cells) for phase in PHASES}
    share = 1.0 / sum(1 for phase in PHASES if count[phase])
    found = {}
    for cell in cells:
        name, phase = cell["name"], cell["phase"]
        if kind == "phase_balanced":
            found[name] = share / (count[phase] * reference[name][0])
        elif kind == "token_counts":
            found[name] = objective[phase] / (count[phase] * cell["batch"] * cell["rows"])
        elif name in objective["cells"]:
            found[name] = float(objective["cells"][name])
        else:
            raise UserError(f"objective.cells: no weight for {name!r}")
    return found


def total(cells: list[dict[str, Any]], w: dict[str, float], racer: str) -> float | None:
    latencies = [(w[cell["name"]], cold(cell, racer)) for cell in cells]
    if any(taken is None for _, taken in latencies):
        return None
    return sum(weight * taken for weight, taken in latencies if taken is not None)


def summary(objective: dict[str, Any], cells: list[dict[str, Any]], root: dict[str, float] | None) -> dict[str, Any]:
    """T of every kernel measured, the weights, and each cell's share of the candidate's T."""
    reference = references(cells, root)
    w = weights(objective, cells, reference)
    candidate = total(cells, w, "candidate")
    assert candidate is not None
    return {
        "kind": objective["kind"],
        "T": candidate,
        "others": {racer: value for racer in ("root", "incumbent") if (value := total(cells, w, racer)) is not None},
        "cells": [
            {
                "name": cell["name"],
                "weight": w[cell["name"]],
                "reference_us": reference[cell["name"]][0],
                "reference": reference[cell["name"]][1],
                "share": w[cell["name"]] * (cold(cell, "candidate") or 0.0) / candidate,
            }
            for cell in cells
        ],
    }


# ---------------------------------------------------------------- admission


def pass_times(record: dict[str, Any], clock: str) -> list[float]:
    """Microseconds a call of every pass of a kernel. Samples stand in order of passes, equally many in each."""
    passes: list[float] = record["pass_us"]
    if clock == "judge":
        return passes
    return [median(part) for part in in_parts(record["samples_us"], len(passes))]


def _slowdown(cell: dict[str, Any], root: dict[str, float]) -> tuple[float, float, float] | None:
    """(ratio, low, high) of a cell's latency to the root's; None where one of them has none.

    Where the root ran beside the candidate, the median over passes of candidate / root, with its interval. A root from a
    report has no passes: then the ratio of the medians, and the candidate's own interval.
    """
    kernels, base = cell["modes"]["cold"]["kernels"], root.get(cell["name"])
    if "candidate" not in kernels or base is None:
        return None
    own = kernels["candidate"]
    if "root" in kernels:
        ratios = paired(pass_times(own, "worker"), pass_times(kernels["root"], "worker"))
        low, high = median_interval(ratios)
        return math.exp(median(ratios)), math.exp(low), math.exp(high)
    low, high = own["interval_us"]
    return own["median_us"] / base, low / base, high / base


def too_slow(cells: list[dict[str, Any]], root: dict[str, float], max_slowdown: float) -> bool:
    """Whether a cell's whole interval lies above the limit: no other measurement will help."""
    return any((slowdown := _slowdown(cell, root)) is not None and slowdown[1] > max_slowdown for cell in cells)


def admissible(
    cells: list[dict[str, Any]],
    root: dict[str, float],
    max_slowdown: float,
    again: Sequence[list[dict[str, Any]]] = (),
) -> list[str]:
    """Cells in which the candidate is slower than the root by more than the limit, each as a sentence.

    again: later sessions of the same cells. Where the limit lies inside the first session's interval, the geometric mean
    of all sessions decides.
    """
    found = []
    for number, cell in enumerate(cells):
        slowdown = _slowdown(cell, root)
        if slowdown is None or slowdown[0] <= max_slowdown:
            continue
        ratio, low, high = slowdown
        text = f"interval {low:.3f} to {high:.3f}"
        later = [one[0] for session in again if (one := _slowdown(session[number], root)) is not None]
        if low <= max_slowdown and later:
            ratio, text = geometric_mean([ratio, *later]), f"mean of {1 + len(later)} sessions"
        if ratio > max_slowdown:
            found.append(f"{cell['name']}: {ratio:.3f} of the root's time ({text}), limit {max_slowdown}")
    return found


def doubtful(cells: list[dict[str, Any]], root: dict[str, float], max_slowdown: float) -> list[str]:
    """Cells in which the limit lies inside the first session's interval, each as a sentence."""
    found = []
    for cell in cells:
        slowdown = _slowdown(cell, root)
        if slowdown is not None and slowdown[1] <= max_slowdown < slowdown[2]:
            low, high = slowdown[1:]
            found.append(f"{cell['name']}: the ratio to the root lies between {low:.3f} and {high:.3f}, limit {max_slowdown}")
    return found
