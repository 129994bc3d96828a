"""What a report establishes: the fields of an audit record, computed from the report's samples and not taken from its words.

    fields = audit_fields(report, target.config, incumbent="I0003", is_root=False)

T, shares, admissibility, gain and the verdict against noise are computed again with the evaluator's own functions. Where
they differ from what the report says, it is refused: it was not written by this evaluator, or was edited. The root has no
root beside it: its T is measured against its own latencies, so that all T of a run are shares of the root's.
"""

from __future__ import annotations

import math
from typing import Any

from tools.core.errors import UserError
from tools.evaluator import grids, promotion, report
from tools.evaluator import objective as weights
from tools.evaluator.statistics import median, median_interval

LOG_CHARACTERS = 2000  # of a compiler's or worker's words that an audit record keeps; the report has more
_SEALED = {"passed": True, "failed": False}


def audit_fields(found: dict[str, Any], config: dict[str, Any], incumbent: str | None, *, is_root: bool) -> dict[str, Any]:
    """Status, figures and evidence of a report. `config`: the run's; `incumbent`: the id of what it was compared with.

    UserError where the report's own figures do not follow from its samples.
    """
    fields: dict[str, Any] = {
        "status": found["status"],
        "verified": found["status"] == "PASSED",
        "complete": False,
        "admissible": None,
        "promoted": False,
        **dict.fromkeys(("T", "T_root", "T_incumbent", "gain", "gain_interval")),
        "incumbent": incumbent,
        "cells": [],
        "failure": None if found["status"] == "PASSED" else failure(found),
        "dispatch": _of_candidate(found["dispatch"]),
        "resources": found["builds"].get("candidate", {}).get("resources", []),
        "counters": found["counters"],
        "environment": {"machine": machine(found)},
        "seconds": found["run"]["seconds"],
    }
    if found["timing"] is not None:
        fields.update(_figures(found, config, is_root))
    return fields


def machine(found: dict[str, Any]) -> str:
    """The kind of machine that a report's times belong to: the GPU, or the processor and its cores."""
    environment = found["environment"]
    if isinstance(environment.get("gpu"), dict):
        return str(environment["gpu"]["name"])
    return f"{environment.get('processor', 'unknown processor')}, {environment.get('cores', '?')} cores"


def failure(found: dict[str, Any]) -> dict[str, Any]:
    """The first failing case of a report that did not pass, or the stage at which it ended, and why."""
    failed = [check for check in (found["correctness"] or {"checks": []})["checks"] if check["failures"]]
    if failed:
        named = str(found["reason"]).split(":")[0]
        check = next((check for check in failed if check["name"] == named), failed[0])
        return {"check": check["name"], **check["failures"][0], "failed_checks": [check["name"] for check in failed]}
    stages = list(found["run"]["stages"])
    said: dict[str, Any] = {"stage": stages[-1] if stages else "start", "what": found["reason"]}
    if log := found["logs"].get("build") or found["logs"].get("candidate"):
        said["log"] = log[:LOG_CHARACTERS]
    return said


def _of_candidate(dispatch: dict[str, Any] | None) -> dict[str, Any] | None:
    """The candidate's kernels by cell; those of others are in the report."""
    if not dispatch:
        return None
    return {cell: racers["candidate"]["kernels"] for cell, racers in dispatch.items() if "candidate" in racers}


# ---------------------------------------------------------------- figures


def _figures(found: dict[str, Any], config: dict[str, Any], is_root: bool) -> dict[str, Any]:
    """T and all that follows from the timed cells."""
    max_slowdown = float(config["limits"]["max_slowdown"])
    sessions = [found["timing"]["cells"], *found["timing"].get("again", [])]
    for session in sessions:
        _check_medians(session)
    if problems := report.recompute(found):
        raise UserError(f"the report's figures are not those of its samples: {problems[0]}")
    cells = sessions[0]
    root = _latencies(cells, "candidate" if is_root else "root")
    summary = weights.summary(config["objective"], cells, root)
    if not is_root and not _same(summary, found["objective"]):
        raise UserError(f"the report's T is {found['objective']['T']}, its samples give {summary['T']}")
    fields: dict[str, Any] = {
        "complete": [cell["name"] for cell in cells] == [cell.name for cell in grids.cells(config["workloads"])],
        "T": summary["T"],
        "T_root": summary["T"] if is_root else summary["others"].get("root"),
        "T_incumbent": summary["others"].get("incumbent"),
        "cells": [_cell(cell, share) for cell, share in zip(cells, summary["cells"], strict=True)],
        "admissible": True,
    }
    if not is_root and root is not None:
        fields["admissible"] = not weights.admissible(cells, root, max_slowdown, sessions[1:])
    if not is_root and found["promotion"] is not None:
        fields.update(_verdict(found, sessions, summary, root, max_slowdown))
    return fields


def _verdict(
    found: dict[str, Any],
    sessions: list[promotion.Session],
    summary: dict[str, Any],
    root: dict[str, float] | None,
    max_slowdown: float,
) -> dict[str, Any]:
    """Gain and promotion, from the sessions' samples. What happened in the sealed cases is the evaluator's word."""
    said = found["promotion"]
    comparison = None
    if said["comparison"] is not None:
        w = {cell["name"]: cell["weight"] for cell in summary["cells"]}
        comparison = promotion.again(sessions, w, said["comparison"])
    again = promotion.record(
        sessions, comparison, root, max_slowdown, said["blockers"], _SEALED.get(said.get("sealed", "not run"))
    )
    for key in ("admissible", "promoted"):
        if again[key] != said[key]:
            raise UserError(f"the report's promotion.{key} is {said[key]}, its samples give {again[key]}: {again['reason']}")
    if comparison is None:
        return {"promoted": again["promoted"]}
    clock = min(comparison["clocks"].values(), key=lambda one: one["interval"][0])  # the one that says less
    return {"promoted": again["promoted"], "gain": clock["gain"], "gain_interval": clock["interval"]}


def _check_medians(cells: list[dict[str, Any]]) -> None:
    """Medians are recomputed where a figure is stated; of the later sessions too, which `recompute` does not read."""
    for cell in cells:
        for name, record in cell["modes"]["cold"].get("kernels", {}).items():
            if not math.isclose(median(record["samples_us"]), record["median_us"], rel_tol=1e-3, abs_tol=1e-3):
                raise UserError(f"{cell['name']}, {name}: the median of the samples is not {record['median_us']}")


def _latencies(cells: list[dict[str, Any]], racer: str) -> dict[str, float] | None:
    """Each cell's cold latency under a kernel that ran in the same session; None where it did not."""
    found = {cell["name"]: taken for cell in cells if (taken := weights.cold(cell, racer)) is not None}
    return found or None


def _same(summary: dict[str, Any], said: dict[str, Any]) -> bool:
    totals = [(summary["T"], said["T"]), *((summary["others"].get(name), said["others"].get(name)) for name in said["others"])]
    return all(a is not None and math.isclose(a, b, rel_tol=1e-9) for a, b in totals)


def _cell(cell: dict[str, Any], share: dict[str, Any]) -> dict[str, Any]:
    """One cell of the audit record: cold times in microseconds a call."""
    mode = cell["modes"]["cold"]
    samples = mode["kernels"]["candidate"]["samples_us"]
    best = weights.best_baseline(mode)
    beside = {name: median(record["samples_us"]) for name, record in mode["kernels"].items()}
    return {
        "name": cell["name"],
        "phase": cell["phase"],
        "us": round(median(samples), 4),
        "interval_us": [round(end, 4) for end in median_interval(samples)],
        "root_us": _rounded(beside.get("root")),
        "incumbent_us": _rounded(beside.get("incumbent")),
        "best_baseline_us": _rounded(best[2] if best else None),
        "best_baseline": best[0] if best else None,
        "floor_us": _rounded(mode.get("floor_us")),
        "share": round(share["share"], 6),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
