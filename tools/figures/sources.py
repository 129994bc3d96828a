"""Which reports the figures show, and what makes one fit to be shown.

The rule stands in one place, `experimental/figures/reports.json`: `drawn` names the reports of `experimental/evidence/`
that are drawn, `left_out` those that could be and are not, with the reason. A report can be drawn when it is a full,
PASSED, timed evaluation of a target on its own hardware with every guard on, and has all cells of the target's
workloads. One that is drawn and cannot be is refused, and so is one that could be and is named nowhere, so that no
evidence is forgotten or chosen in silence. A target and machine have one report.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_bytes, show_path
from tools.evaluator import grids
from tools.evaluator import report as reports
from tools.evaluator.statistics import median, median_interval


@dataclass(frozen=True)
class Time:
    """The median of one kernel's samples in a cell, microseconds a call, with its 95 % interval."""

    us: float
    low: float
    high: float
    calls: int  # in each sample
    route: str | None


@dataclass(frozen=True)
class Mode:
    """A cell's times, cold or hot. `same_as` names the mode whose times these are, where this one was not run apart."""

    same_as: str | None
    ours: Time
    libraries: dict[str, Time]

    def ratio(self, library: str) -> float:
        """The library's time / ours: above 1 ours is faster."""
        return self.libraries[library].us / self.ours.us

    def fastest(self) -> str:
        """The fastest library, the first by name of equals; empty where none was measured."""
        return min(self.libraries, key=lambda name: (self.libraries[name].us, name), default="")


@dataclass(frozen=True)
class Measured:
    """One report that is drawn."""

    target: Target
    name: str  # of the report's file
    sha256: str  # of its bytes
    machine: str
    kernel: str  # the source's file name
    cells: list[tuple[grids.Cell, dict[str, Mode]]]


def listing(path: Path) -> tuple[list[str], dict[str, str]]:
    """(drawn, left out with the reason) of a reports.json."""
    content = _json(path)
    drawn, left_out = (content.get("drawn"), content.get("left_out")) if isinstance(content, dict) else (None, None)
    if not isinstance(drawn, list) or not isinstance(left_out, dict):
        raise UserError(f"{show_path(path)}: drawn: a list, and left_out: a mapping of reports to reasons, stand here")
    for name in [*drawn, *left_out]:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{show_path(path)}: {name!r} is no file name")
        if [*drawn, *left_out].count(name) > 1:
            raise UserError(f"{show_path(path)}: {name} is named twice")
    return drawn, left_out


def read(evidence: Path, path: Path, targets: Sequence[Target]) -> list[Measured]:
    """All reports that are drawn, in the order of reports.json. UserError for the first that does not fit."""
    drawn, left_out = listing(path)
    for name in [*drawn, *left_out]:
        if not (evidence / name).is_file():
            raise UserError(f"{show_path(path)}: {name}: no such report in {show_path(evidence)}")
    known = {target.name: target for target in targets}
    for file in sorted(evidence.glob("*.json")):
        if file.name not in drawn and file.name not in left_out and _could_be_drawn(file, known):
            raise UserError(
                f"{show_path(file)}: a full pass that {show_path(path)} does not name: draw it or leave it out there"
            )
    found = [measured(evidence / name, known) for name in drawn]
    seen: dict[tuple[str, str], str] = {}
    for entry in found:
        other = seen.setdefault((entry.target.name, entry.machine), entry.name)
        if other != entry.name:
            raise UserError(f"{show_path(path)}: {other} and {entry.name} are of one target and machine: draw one of them")
    return found


def _json(path: Path) -> Any:
    def refuse(word: str) -> NoReturn:
        raise UserError(f"{show_path(path)}: {word} is no number that a measurement gives")

    try:
        return json.loads(read_bytes(path), parse_constant=refuse)
    except ValueError as problem:
        raise UserError(f"{show_path(path)}: not JSON: {problem}") from None


def problem(report: dict[str, Any], known: dict[str, Target]) -> str | None:
    """Why a valid report cannot be drawn, or None."""
    run, environment = report["run"], report["environment"]
    if report["status"] != "PASSED":
        return f"status: {report['status']}: only a pass is drawn"
    if report["compatibility"]:
        return "compatibility: a run on another GPU than the target's: its times are proxies"
    if report["target"]["name"] not in known:
        return f"target.name: {report['target']['name']!r} is none of {', '.join(known)}"
    if run["cases"] != "full" or run["only"] or not run["timed"] or report["timing"] is None:
        return "run: not a full evaluation with times"
    if off := run.get("guards_off"):
        return f"run.guards_off: {off[0]} was off"
    section = known[report["target"]["name"]].config["target"]
    gpu = (environment.get("gpu") or {}).get("name")
    if section["device"] == "cuda" and gpu not in section["gpu_names"]:
        return f"environment.gpu.name: {gpu!r} is none of this target's: {', '.join(section['gpu_names'])}"
    return None


def _could_be_drawn(path: Path, known: dict[str, Target]) -> bool:
    """Whether a file of the evidence is a report without a problem; other records lie there too."""
    content = _json(path)
    if not isinstance(content, dict) or not {"status", "timing", "target"} <= set(content):
        return False
    reports.validate(content)
    return problem(content, known) is None


def measured(path: Path, known: dict[str, Target]) -> Measured:
    report, where = _json(path), show_path(path)
    if not isinstance(report, dict):
        raise UserError(f"{where}: not a report")
    try:
        reports.validate(report)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if why := problem(report, known):
        raise UserError(f"{where}: {why}")
    target = known[report["target"]["name"]]
    if report["target"]["sections"].get("workloads") != target.sections["workloads"]:
        raise UserError(f"{where}: target.sections.workloads: not the workloads of {show_path(target.path)}")
    recorded = {cell["name"]: cell for cell in report["timing"]["cells"]}
    if len(recorded) != len(report["timing"]["cells"]):
        raise UserError(f"{where}: timing.cells: a cell stands there twice")
    cells = []
    for cell in grids.cells(target.config["workloads"]):
        record = recorded.pop(cell.name, None)
        if record is None:
            raise UserError(f"{where}: timing.cells: no cell {cell.name!r}")
        if any(record[key] != getattr(cell, key) for key in ("phase", "kind", "batch", "rows", "keys")):
            raise UserError(f"{where}: {cell.name}: phase, kind, batch, rows or keys are not the workload's")
        cells.append((cell, _modes(record, f"{where}: {cell.name}")))
    if recorded:
        raise UserError(f"{where}: timing.cells: {next(iter(recorded))!r} is no cell of the workloads")
    kernel = Path(report["builds"]["candidate"]["source"]).name
    return Measured(target, path.name, sha256_bytes(read_bytes(path)), machine(report), kernel, cells)


def _modes(record: dict[str, Any], where: str) -> dict[str, Mode]:
    found: dict[str, Mode] = {}
    for name in ("cold", "hot"):
        mode = record["modes"].get(name)
        if mode is None:
            raise UserError(f"{where}: no {name} times")
        same_as = mode["same_as"]
        if same_as is not None and same_as not in found:
            raise UserError(f"{where}: {name}: same_as {same_as!r} has no times")
        if same_as is not None:
            found[name] = Mode(same_as, found[same_as].ours, found[same_as].libraries)
            continue
        if "candidate" not in mode.get("kernels", {}):
            raise UserError(f"{where}: {name}: no times of the candidate")
        ours = _time(mode["kernels"]["candidate"], f"{where}: {name}: candidate")
        libraries = {key: _time(entry, f"{where}: {name}: {key}") for key, entry in sorted(mode["baselines"].items())}
        found[name] = Mode(None, ours, libraries)
    return found


def _time(entry: dict[str, Any], where: str) -> Time:
    """From the raw samples; UserError where the report's own median is another."""
    samples = entry["samples_us"]
    us, (low, high) = median(samples), median_interval(samples)
    if not math.isclose(us, entry["median_us"], rel_tol=1e-3, abs_tol=1e-3):
        raise UserError(f"{where}: the median of the samples is {us}, not {entry['median_us']}")
    return Time(us, low, high, entry["calls_per_sample"], entry["route"])


def machine(report: dict[str, Any]) -> str:
    """The machine of a report in words: the GPU, else the processor and its cores."""
    environment = report["environment"]
    if environment.get("gpu"):
        return str(environment["gpu"]["name"])
    processor = re.sub(r"\((?:R|TM)\)|\bProcessor\b", "", str(environment["processor"]))
    return f"{' '.join(processor.split())}, {environment['cores']} cores"
