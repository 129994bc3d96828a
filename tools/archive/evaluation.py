"""Whether a report of evaluate.py is what its samples and its target say. Every figure is computed again.

    samples = check("experimental/evidence/x.json", report, load_target("h200"))   # UserError: what does not hold

Medians, intervals, ratios, geometric means, T, shares and promotion follow from `samples_us` and `pass_us`, with the
evaluator's own functions. Reports keep samples to 4 decimals of a microsecond and medians in full, so a median is that of
its samples to half of the last decimal.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from tools.archive.reading import difference
from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import sha256_json
from tools.evaluator import grids, objective, promotion, report
from tools.evaluator.statistics import median, median_interval

ROUNDED_US = 0.51e-4  # half of the last decimal of a sample, and the float's own rounding
CELL = ("name", "phase", "kind", "batch", "rows", "keys")
JUDGED_BY = ("contract", "workloads", "objective")  # sections of a config that a report's figures hang on
_SEALED = {"passed": True, "failed": False, "not run": None}

Report = dict[str, Any]


def full(found: Report) -> bool:
    """Whether a report is a whole evaluation that passed: all cases, all checks, all guards, and timed."""
    run = found["run"]
    whole = run["cases"] == "full" and run["timed"] and not run["only"] and not run.get("guards_off")
    return bool(whole and found["status"] == "PASSED" and found["timing"] is not None)


def on_own_device(found: Report, target: Target) -> bool:
    """Whether the machine of a report is one that the target is for."""
    section = target.config["target"]
    if section["device"] == "cpu":
        return not found["compatibility"]
    gpu = found["environment"].get("gpu")
    return not found["compatibility"] and isinstance(gpu, dict) and gpu.get("name") in section["gpu_names"]


def check(name: str, found: Report, target: Target) -> int:
    """UserError with the first thing of a report that does not hold; returns how many samples it was computed from."""
    try:
        report.validate(found)  # the schema, timing only under PASSED, and the report's own hash where it has one
        _check_hashes(found)
        _check_target(found, target)
        _check_words(found)
        return _check_timing(found, target) if found["timing"] is not None else 0
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ZeroDivisionError,
    ) as problem:  # of a form that the schema lets pass
        raise UserError(f"{name}: no report of evaluate.py: {type(problem).__name__}: {problem}") from None


def _check_hashes(found: Report) -> None:
    hashes = found["hashes"]
    if sha256_json(hashes["evaluator_files"]) != hashes["evaluator"]:
        raise UserError("hashes.evaluator is not that of evaluator_files")
    before = {key: value for key, value in found["environment"].items() if key != "gpu_state_after"}  # added at the end
    if found["environment"] and sha256_json(before) != hashes["environment"]:
        raise UserError("hashes.environment is not that of the environment")
    for role, built in found["builds"].items():
        if built["files"].get(built["source"]) not in (None, built["source_sha256"]):
            raise UserError(f"builds.{role}.source_sha256 is not the hash that builds.{role}.files states of {built['source']}")


def _check_target(found: Report, target: Target) -> None:
    for section in JUDGED_BY:
        if found["target"]["sections"].get(section) != target.sections[section]:
            raise UserError(f"target.sections.{section}: another {section} than that of target {target.name} now")
    if found["target"]["contract"] != target.config["contract"]["name"]:
        raise UserError(f"target.contract is {found['target']['contract']!r}, not {target.config['contract']['name']!r}")
    if full(found) and not found["compatibility"] and not on_own_device(found, target):
        raise UserError(f"compatibility is false, and environment.gpu is no GPU of target {target.name}")


def _check_words(found: Report) -> None:
    """The sums over checks; a passed report has none that failed."""
    stated = found["correctness"]
    if stated is None:
        return
    for key in ("words", "differing"):
        if (summed := sum(entry[key] for entry in stated["checks"])) != stated[key]:
            raise UserError(f"correctness.{key} is {stated[key]}, its checks sum to {summed}")
    names = [entry["name"] for entry in stated["checks"]]
    if len(set(names)) != len(names):
        raise UserError(f"correctness.checks: {next(name for name in names if names.count(name) > 1)} stands twice")
    for entry in stated["checks"]:
        if found["status"] == "PASSED" and (entry["status"] == "failed" or entry["failed"] or entry["differing"]):
            raise UserError(f"status is PASSED, and check {entry['name']} failed")


# ---------------------------------------------------------------- times


def _check_timing(found: Report, target: Target) -> int:
    sessions = [found["timing"]["cells"], *found["timing"].get("again", [])]
    if found["timing"].get("second"):
        sessions.append(found["timing"]["second"])
    samples = 0
    for session in sessions:
        _check_cells(session, target)
        for cell in session:
            samples += _check_cell(cell)
        _check_derived(session, first=session is sessions[0])
    _agree(found["timing"]["geomeans"], report.geomeans(sessions[0]), "timing.geomeans")
    _check_objective(found, target, sessions)
    return samples


def _check_cells(cells: list[dict[str, Any]], target: Target) -> None:
    """Every cell of the workloads once, in its place, and none besides."""
    wanted = grids.cells(target.config["workloads"])
    names = [cell["name"] for cell in cells]
    for cell in wanted:
        if cell.name not in names:
            raise UserError(f"timing: cell {cell.name!r} of the workloads is missing")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"timing: cell {name!r} stands twice")
        if name not in {cell.name for cell in wanted}:
            raise UserError(f"timing: cell {name!r} is none of the workloads")
    for stated, cell in zip(cells, wanted, strict=True):
        for key in CELL:
            if stated[key] != getattr(cell, key):
                raise UserError(f"timing: cell {stated['name']!r}: {key} is {stated[key]!r}, expected {getattr(cell, key)!r}")


def _racers(cell: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(where, mode, measured) of everything that was timed in a cell."""
    for name, mode in cell["modes"].items():
        for racer, record in [*mode.get("kernels", {}).items(), *mode.get("baselines", {}).items()]:
            yield f"{cell['name']} {name} {racer}", mode, record


def _check_cell(cell: dict[str, Any]) -> int:
    """Medians and intervals of a cell are those of its samples; none is below what the machine could do."""
    count = 0
    for mode in cell["modes"].values():
        timed = "candidate" in mode.get("kernels", {})
        if timed == (mode["same_as"] is not None) or mode["same_as"] not in (None, "cold"):
            raise UserError(f"{cell['name']}: a mode has either its own times or those of another")
    for where, mode, record in _racers(cell):
        samples = record["samples_us"]
        if not all(math.isfinite(value) and value > 0 for value in [*samples, record["median_us"]]):
            raise UserError(f"{where}: a sample is no positive number")
        middle, (low, high) = median(samples), median_interval(samples)
        if abs(middle - record["median_us"]) > ROUNDED_US:
            raise UserError(f"{where}: median_us is {record['median_us']}, its samples give {middle}")
        stated = record["interval_us"]
        if abs(low - stated[0]) > ROUNDED_US or abs(high - stated[1]) > ROUNDED_US:
            raise UserError(f"{where}: interval_us is {stated}, its samples give {[low, high]}")
        if record["median_us"] < mode["floor_us"]:
            raise UserError(f"{where}: median_us is {record['median_us']}, below its floor of {mode['floor_us']}")
        count += len(samples)
    return count


def _check_derived(cells: list[dict[str, Any]], *, first: bool) -> None:
    """The fastest library and the ratios of every cell."""
    again = copy.deepcopy(cells)
    report.add_ratios(again)
    for stated, cell in zip(cells, again, strict=True):
        for mode in cell["modes"]:
            for key in ("best", "ratios"):
                # The evaluator states them for the first session; another may have them and need not.
                if key in cell["modes"][mode] and (first or key in stated["modes"][mode]):
                    _agree(stated["modes"][mode].get(key), cell["modes"][mode][key], f"{stated['name']} {mode} {key}")


def _check_objective(found: Report, target: Target, sessions: list[list[dict[str, Any]]]) -> None:
    """T, its weights and shares, and what was promoted."""
    stated = found["objective"]
    if stated is None:
        raise UserError("objective is missing: a report with times has one")
    # A root is timed beside the candidate, or its latencies come from its own report and stand here as references.
    root = {entry["name"]: entry["reference_us"] for entry in stated["cells"] if entry["reference"] == "root"}
    root |= {cell["name"]: taken for cell in sessions[0] if (taken := objective.cold(cell, "root")) is not None}
    summary = objective.summary(target.config["objective"], sessions[0], root or None)
    _agree(stated, summary, "objective")
    said = found["promotion"]
    if said is None:
        return
    weights = {cell["name"]: cell["weight"] for cell in summary["cells"]}
    comparison = promotion.again(sessions, weights, said["comparison"]) if said["comparison"] is not None else None
    limit = float(target.config["limits"]["max_slowdown"])
    sealed = _SEALED[said.get("sealed", "not run")]  # what happened there is the evaluator's word: nothing of it is kept
    again = promotion.record(sessions, comparison, root or None, limit, said["blockers"], sealed)
    for key in ("admissible", "promoted"):
        _agree(said[key], again[key], f"promotion.{key}")
    if comparison is not None:
        _agree(said["comparison"]["clocks"], comparison["clocks"], "promotion.comparison.clocks")


def _agree(stated: Any, found: Any, where: str) -> None:
    if problem := difference(stated, found, where):
        raise UserError(problem)
