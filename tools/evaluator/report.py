"""The report: one JSON file a run, checked against its schema, written once and never over another file.

It is written for every outcome: a run that failed, was refused or was interrupted leaves its evidence too. Timing
exists only under PASSED. Every figure in it can be computed again from the samples it holds (`recompute`).
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, make_folder, read_bytes, sha256_json, show_path, write_new
from tools.evaluator import objective
from tools.evaluator.integrity import evaluator_hashes
from tools.evaluator.statistics import geometric_mean, median

VERSION = 2
SCHEMA = REPO_ROOT / "experimental" / "schemas" / "report.schema.json"


def case_path(path: Path) -> Path:
    """Where the reproducer of a report's first difference goes."""
    return path.with_name(f"{path.stem}.case.json")


def check_output(path: Path) -> None:
    """Before any work: the path, and that of a reproducer, must be free and the folder writable."""
    for taken in (path, case_path(path)):
        if taken.exists() or taken.is_symlink():
            raise UserError(f"{show_path(taken)}: exists already and is never overwritten")
    make_folder(path.parent)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as problem:
        raise UserError(f"{show_path(path.parent)}: cannot write there: {problem.strerror or problem}") from None


def new(target: Any, run: dict[str, Any]) -> dict[str, Any]:
    """An empty report: INCOMPLETE until something is known."""
    deciding = evaluator_hashes()
    return {
        "version": VERSION,
        "status": "INCOMPLETE",
        "reason": "the run did not finish",
        "compatibility": False,
        "run": {
            "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "judge_seconds": 0.0,
            "stages": {},
            **run,
        },
        "target": {
            "name": target.name,
            "sections": dict(target.sections),
            "gpu_names": target.config["target"].get("gpu_names", []),
            "contract": target.config["contract"]["name"],
        },
        "hashes": {
            "evaluator": sha256_json(deciding),
            "evaluator_files": deciding,
            "environment": "",
            "report": "",
        },
        "builds": {},
        "confinement": {},
        "environment": {},
        "notes": [],
        "correctness": None,
        "baselines": {},
        "timing": None,
        "objective": None,
        "promotion": None,
        "dispatch": None,
        "counters": None,
        "logs": {},
    }


def without_folder(word: str) -> str:
    """A program's name without the folder that this machine keeps it in."""
    return word.rsplit("/", 1)[1] if word.startswith("/") and " " not in word and "\n" not in word else word


def build_record(built: Any) -> dict[str, Any]:
    return {
        "source": show_path(built.source),
        "source_sha256": built.source_sha256,
        "files": dict(built.files),
        "preprocessed_sha256": built.preprocessed_sha256,
        "object_sha256": built.object_sha256,
        "library_sha256": built.library_sha256,
        "command": [without_folder(word) for word in built.command],
        "link": [without_folder(word) for word in built.link],
        "toolchain": {key: without_folder(str(value)) for key, value in built.toolchain.items()},
        "resources": list(built.resources),
        "seconds": round(built.seconds, 3),
        "cached": built.cached,
        "log": built.log[-4000:],
    }


def finite(value: Any) -> Any:
    """JSON knows no infinity: such numbers are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@functools.cache
def _validator() -> Any:
    import jsonschema

    schema = json.loads(read_bytes(SCHEMA))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def validate(report: dict[str, Any]) -> None:
    """Raise UserError with the path of the first thing that is wrong."""
    problem = next(iter(sorted(_validator().iter_errors(report), key=lambda e: [str(p) for p in e.absolute_path])), None)
    if problem is not None:
        where = ".".join(map(str, problem.absolute_path)) or "the report"
        raise UserError(f"report: {where}: {problem.message[:200]}")
    if (report["timing"] is not None) and report["status"] != "PASSED":
        raise UserError(f"report: timing: exists under status {report['status']}")
    if report["version"] == VERSION and report["hashes"]["report"] != own_hash(report):
        raise UserError(f"report: hashes.report: the content is not what was written (it hashes to {own_hash(report)[:12]}...)")


def own_hash(report: dict[str, Any]) -> str:
    """SHA-256 of a report's canonical JSON without this hash: finds accidents and single edits, not a rewritten whole.

    UserError where a number is not finite: JSON knows none, and `finite` writes them as text.
    """
    try:
        return sha256_json({**report, "hashes": {**report["hashes"], "report": ""}})
    except ValueError as problem:
        raise UserError(f"report: {problem}") from None


def write(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Validate and write; returns what was written."""
    if report["status"] != "PASSED":
        for key in ("timing", "objective", "promotion"):
            report[key] = None
    report = finite(report)
    report["hashes"]["report"] = own_hash(report)
    validate(report)
    write_new(path, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return report


def read(path: Path) -> dict[str, Any]:
    """A report that was written by `write`; UserError where it is none."""
    try:
        report = json.loads(read_bytes(path))
    except ValueError as problem:
        raise UserError(f"{show_path(path)}: not JSON: {problem}") from None
    if not isinstance(report, dict):
        raise UserError(f"{show_path(path)}: not a report")
    try:
        validate(report)
    except UserError as problem:
        raise UserError(f"{show_path(path)}: {problem}") from None
    return report


def root(path: Path, target: Any, source_sha256: str) -> dict[str, Any]:
    """A passed report of the same target, contract and workloads whose candidate was this source; UserError otherwise."""
    report = read(path)
    if report["status"] != "PASSED" or report["compatibility"] or report["timing"] is None:
        raise UserError(f"{show_path(path)}: status {report['status']}: only a pass on the target's own device can be a root")
    if off := report["run"].get("guards_off"):
        raise UserError(f"{show_path(path)}: run.guards_off: {off[0]} was off")
    for section in ("target", "contract", "workloads"):
        if report["target"]["sections"].get(section) != target.sections[section]:
            raise UserError(f"{show_path(path)}: target.sections.{section}: another {section} than this target's")
    found = report["builds"]["candidate"]["source_sha256"]
    if found != source_sha256:
        raise UserError(
            f"{show_path(path)}: builds.candidate.source_sha256: a report of another source ({found[:12]}..., "
            f"the root is {source_sha256[:12]}...)"
        )
    return report


def refuse_other_machine(report: dict[str, Any], environment: dict[str, Any]) -> None:
    """UserError where a root report's times come from another kind of machine."""
    for key in ("processor", "cores", "gpu"):
        then, now = report["environment"].get(key), environment.get(key)
        if isinstance(then, dict) and isinstance(now, dict):
            then, now = then.get("name"), now.get("name")
        if then != now:
            raise UserError(f"the root report's environment.{key} is {then!r}, this machine's {now!r}: measure the root here")


def latencies(report: dict[str, Any]) -> dict[str, float]:
    """Cell -> cold median of the candidate of a report with timing."""
    return {
        cell["name"]: found for cell in report["timing"]["cells"] if (found := objective.cold(cell, "candidate")) is not None
    }


# ---------------------------------------------------------------- figures


def add_ratios(cells: list[dict[str, Any]]) -> None:
    """For each cell and mode: the best baseline, and baseline latency / ours for every one of them."""
    for cell in cells:
        for mode in cell["modes"].values():
            if mode.get("same_as"):
                continue
            own = mode["kernels"]["candidate"]["median_us"]
            best = objective.best_baseline(mode)
            mode["best"] = (
                None if best is None else {"name": best[0], "route": best[1], "median_us": best[2], "ratio": best[2] / own}
            )
            mode["ratios"] = {name: record["median_us"] / own for name, record in mode["baselines"].items()}


def geomeans(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the ratios by mode and phase: against the best baseline and against each."""
    found: dict[str, Any] = {}
    for mode in ("cold", "hot"):
        if any(mode not in cell["modes"] for cell in cells):  # not asked for
            continue
        extend = ("extend",) if any(cell["kind"] == "extend" for cell in cells) else ()
        for phase in ("full", "decode", "prefill", "update", *extend):
            ratios: dict[str, list[float]] = {}
            for cell in cells:
                if phase not in (cell["phase"], cell["kind"]):
                    continue
                record = cell["modes"][mode]
                if record.get("same_as"):
                    record = cell["modes"][record["same_as"]]
                if record["best"] is not None:
                    ratios.setdefault("best", []).append(record["best"]["ratio"])
                for name, ratio in record["ratios"].items():
                    ratios.setdefault(name, []).append(ratio)
            found.setdefault(mode, {})[phase] = {
                name: {"ratio": geometric_mean(values), "cells": len(values)} for name, values in ratios.items()
            }
    return found


def _alike(one: Any, other: Any) -> bool:
    """Equal but for the last digits of floats: another machine's logarithms round otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def recompute(report: dict[str, Any]) -> list[str]:
    """Differences between the figures of a report and what its samples give; empty where all agree."""
    problems: list[str] = []
    timing = report["timing"]
    if timing is None:
        return problems
    for cell in timing["cells"]:
        for name, mode in cell["modes"].items():
            for racer, record in [*mode.get("kernels", {}).items(), *mode.get("baselines", {}).items()]:
                if not math.isclose(median(record["samples_us"]), record["median_us"], rel_tol=1e-3, abs_tol=1e-3):
                    problems.append(f"{cell['name']} {name} {racer}: the median of the samples is not {record['median_us']}")
    cells = json.loads(json.dumps(timing["cells"]))
    add_ratios(cells)
    for got, want in zip(timing["cells"], cells, strict=True):
        if got != want:
            problems.append(f"{got['name']}: the ratios are not those of its medians")
    if not _alike(geomeans(cells), timing["geomeans"]):
        problems.append("the geometric means are not those of the cells")
    return problems
