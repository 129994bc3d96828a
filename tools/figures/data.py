"""The figures' data: what each bar and each field shows, and the two CSV files that hold it. No drawing here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import read_bytes, show_path
from tools.evaluator.statistics import geometric_mean
from tools.figures.sources import Measured

MODES = ("cold", "hot")
FASTEST = "fastest"  # the fastest library of each cell, among all that were measured there
STATISTIC = "geometric mean of library time / our time"
NOT_MEASURED = "not measured"

# Groups of cells that a bar stands for: (name, kind of cell, batch or None for all batch sizes).
GROUPS = (
    ("prefill, batch 1", "prefill", 1),
    ("prefill", "prefill", None),
    ("policy update", "update", None),
    ("decode", "decode", None),
)

LIBRARIES = {
    FASTEST: "fastest library",
    "fa3": "FlashAttention-3",
    "fa2": "FlashAttention-2",
    "flashinfer": "FlashInfer",
    "cudnn": "cuDNN",
    "sdpa_flash": "torch",
    "sdpa_cpu": "torch",
}


def library_name(key: str) -> str:
    """A library as figures name it."""
    return LIBRARIES.get(key, key)


def library_order(keys: Iterable[str]) -> list[str]:
    """Libraries in the order in which figures show them."""
    known = list(LIBRARIES)
    return sorted(keys, key=lambda key: (known.index(key) if key in known else len(known), key))


@dataclass(frozen=True)
class Bar:
    """One bar: the geometric mean of a library's time / ours over a group of cells, in one mode."""

    group: str
    cells: int
    mode: str
    library: str
    ratio: float


def bars(measured: Measured) -> list[Bar]:
    """All bars of a report. A library has bars where it was measured in every cell of the group, cold and hot: a mean over
    fewer cells is another figure. FASTEST has bars where there are two libraries or more, else it would repeat the one."""
    found = []
    for group, kind, batch in GROUPS:
        cells = [modes for cell, modes in measured.cells if cell.kind == kind and batch in (None, cell.batch)]
        seen = [set(modes[mode].libraries) for modes in cells for mode in MODES]
        if not cells or not all(seen):
            continue
        names = set.intersection(*seen)
        if len(set.union(*seen)) > 1:
            names.add(FASTEST)
        for mode in MODES:
            for name in library_order(names):
                ratios = [modes[mode].ratio(modes[mode].fastest() if name == FASTEST else name) for modes in cells]
                found.append(Bar(group, len(cells), mode, name, geometric_mean(ratios)))
    return found


def _number(value: float) -> str:
    return f"{value:.6g}" if value < 1e6 else f"{value:.1f}"


def _csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue()


def bars_csv(measured: Sequence[Measured], targets: Sequence[Target]) -> str:
    """attention_performance.csv: a line a bar, and one for each target that was not measured."""
    header = ("target", "status", "machine", "kernel", "group", "cells", "mode", "library", "statistic", "ratio",
              "report", "report_sha256")  # fmt: skip
    lines: list[Sequence[object]] = []
    for entry in measured:
        for bar in bars(entry):
            lines.append((entry.target.name, "measured", entry.machine, entry.kernel, bar.group, bar.cells, bar.mode,
                          bar.library, STATISTIC, _number(bar.ratio), entry.name, entry.sha256))  # fmt: skip
    lines += [(target.name, NOT_MEASURED, *[""] * (len(header) - 2)) for target in unmeasured(measured, targets)]
    return _csv(header, lines)


def cells_csv(measured: Sequence[Measured]) -> str:
    """attention_performance_cells.csv: a line a cell, mode and library; times in microseconds a call, 95 % intervals."""
    header = ("target", "machine", "kernel", "cell", "kind", "batch", "rows", "keys", "mode", "same_as", "library",
              "route", "is_fastest", "our_us", "our_low_us", "our_high_us", "our_calls_per_sample", "library_us",
              "library_low_us", "library_high_us", "library_calls_per_sample", "ratio", "report", "report_sha256")  # fmt: skip
    lines: list[Sequence[object]] = []
    for entry in measured:
        for cell, modes in entry.cells:
            for name in MODES:
                mode, ours = modes[name], modes[name].ours
                for library in library_order(mode.libraries):
                    theirs = mode.libraries[library]
                    lines.append((
                        entry.target.name, entry.machine, entry.kernel, cell.name, cell.kind, cell.batch, cell.rows,
                        cell.keys, name, mode.same_as or "", library, theirs.route or "", int(library == mode.fastest()),
                        *map(_number, (ours.us, ours.low, ours.high)), ours.calls,
                        *map(_number, (theirs.us, theirs.low, theirs.high)), theirs.calls,
                        _number(mode.ratio(library)), entry.name, entry.sha256,
                    ))  # fmt: skip
    return _csv(header, lines)


def unmeasured(measured: Sequence[Measured], targets: Sequence[Target]) -> list[Target]:
    """Targets without a report that is drawn."""
    return [target for target in targets if all(entry.target.name != target.name for entry in measured)]


@dataclass(frozen=True)
class Published:
    """One line of the published implementation's own figures."""

    gpu: str
    cell: str  # as the workloads of this project name it
    ratio: float  # its baseline's time / its own


def published(path: Path) -> list[Published]:
    """published_reference.csv; UserError names the first line that is not as it should be."""
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    if not lines or not lines[0].startswith("#"):
        raise UserError(f"{show_path(path)}: line 1: no comment that says what this is")
    found = []
    for number, row in enumerate(csv.DictReader(lines[1:]), start=3):
        try:
            batch, length = int(row["batch"]), int(row["length"])
            ours, theirs, ratio = (float(row[key]) for key in ("candidate_ms", "baseline_ms", "ratio"))
            letter = {"prefill": "S", "decode": "L"}[row["entrypoint"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{show_path(path)}: line {number}: {error}") from None
        if not (0 < ours < 1e6 and 0 < theirs < 1e6 and abs(theirs / ours - ratio) <= 1e-6 * ratio):
            raise UserError(f"{show_path(path)}: line {number}: ratio {ratio} is not baseline_ms / candidate_ms")
        found.append(Published(row["gpu"], f"{row['entrypoint']} B{batch} {letter}{length}", ratio))
    return found
