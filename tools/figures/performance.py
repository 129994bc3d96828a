"""performance: bars of the geometric mean of library time / our time, by group of cells, for each measured machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tools.core.config import Target
from tools.figures.data import FASTEST, NOT_MEASURED, Bar, bars, library_name, unmeasured
from tools.figures.sources import Measured
from tools.figures.style import (
    FASTER,
    FASTER_SOFT,
    INK,
    SLOWER,
    SLOWER_SOFT,
    SOFT,
    Sheet,
    heading_height,
    ratio_text,
)

WIDTH, LEFT, GROUP, LABEL, RIGHT = 560.0, 24.0, 112.0, 106.0, 98.0
ROW, GAP, MACHINE, ABSENT = 19.0, 9.0, 46.0, 30.0
LINES = (
    "Geometric mean of library time / our time over the cells of a group; above 1 ours is faster.",
    "In brackets: cells. Thick bar, bold figure: cold, each call has its own inputs. Thin bar: hot, shared.",
    "A cell's hot time is its cold one where a call's inputs exceed twice the L2 (= in the figures of all cells).",
)


def _groups(measured: Measured) -> list[tuple[str, list[tuple[str, dict[str, Bar]]]]]:
    """Each group's name and, for each library, its bars by mode."""
    found = []
    for (group, cells), each in groupby(bars(measured), key=lambda bar: (bar.group, bar.cells)):
        rows: dict[str, dict[str, Bar]] = {}
        for bar in each:
            rows.setdefault(bar.library, {})[bar.mode] = bar
        found.append((f"{group} ({cells})", list(rows.items())))
    return found


def draw(measured: Sequence[Measured], targets: Sequence[Target]) -> Sheet:
    """Machines one below the other on one scale from 0; targets without evidence are named at the end."""
    blocks = [(entry, _groups(entry)) for entry in measured]
    absent = unmeasured(measured, targets)
    most = max([bar.ratio for entry in measured for bar in bars(entry)] + [1.0])
    plots = sum(MACHINE + sum(GAP + ROW * len(rows) for _, rows in groups) for _, groups in blocks)
    top = heading_height(len(LINES))
    sheet = Sheet(WIDTH, top + plots + ABSENT * len(absent) + 16)
    sheet.heading("Speed beside the libraries", *LINES)
    start, unit = LEFT + GROUP + LABEL, (WIDTH - LEFT - GROUP - LABEL - RIGHT) / most
    y = top
    for entry, groups in blocks:
        _name(sheet, y, entry.target.name, f"{entry.machine} · {entry.kernel} · {entry.name}")
        y += MACHINE
        sheet.text(start + unit, y - 5, "1 = equal", "small", color=SOFT, ha="center")
        above = y
        for group, rows in groups:
            sheet.text(LEFT, y + 11, group, "text", weight="bold")
            for library, modes in rows:
                _row(sheet, y, start, unit, library, modes)
                y += ROW
            y += GAP
        sheet.line((start + unit, start + unit), (above - 1, y - GAP), INK, 0.9)
    for target in absent:
        _name(sheet, y, target.name, NOT_MEASURED)
        y += ABSENT
    return sheet


def _name(sheet: Sheet, y: float, target: str, words: str) -> None:
    sheet.line((LEFT, WIDTH - LEFT), (y + 4, y + 4))
    sheet.text(LEFT, y + 22, target, "head", weight="bold")
    sheet.text(LEFT + 46, y + 22, words, "text", color=SOFT)


def _row(sheet: Sheet, y: float, start: float, unit: float, library: str, modes: dict[str, Bar]) -> None:
    cold, hot = modes["cold"].ratio, modes["hot"].ratio
    weight = "bold" if library == FASTEST else "normal"
    sheet.text(start - 8, y + 11, library_name(library), "text", ha="right", weight=weight)
    sheet.box(start, y + 2, cold * unit, 9, FASTER if cold >= 1 else SLOWER)
    sheet.box(start, y + 12, hot * unit, 4, FASTER_SOFT if hot >= 1 else SLOWER_SOFT)
    end = max(start + max(cold, hot) * unit, start + unit) + 6  # never across the line at 1
    sheet.text(end, y + 11, ratio_text(cold), "text", weight="bold")
    sheet.text(end + 30, y + 11, f"hot {ratio_text(hot)}", "small", color=SOFT)
