"""cells_<target>: every cell against each library and against the fastest, cold and hot, the ratio in each field."""

from __future__ import annotations

from collections.abc import Sequence

from tools.core.config import Target
from tools.figures.data import FASTEST, MODES, NOT_MEASURED, library_name, library_order
from tools.figures.sources import Measured, Mode
from tools.figures.style import SOFT, Sheet, heading_height, ratio_colours, ratio_text

LEFT, LABEL, FIELD, ROW, GAP = 24.0, 104.0, 46.0, 16.0, 10.0  # GAP: between libraries
TITLES = {"prefill": "Prefill", "update": "Policy update", "decode": "Decode"}
LINES = (
    "Library time / our time, medians, by batch and keys.",
    "Blue: ours is faster. Orange: the library is.",
    "=  hot is as cold, not run apart: one call's inputs exceed twice the L2.",
)
NARROWEST = 480.0


def _columns(measured: Sequence[Measured], kind: str) -> list[tuple[Measured, str]]:
    """(report, library) of every pair of columns of a kind of cell."""
    found = []
    for entry in measured:
        names = {name for cell, modes in entry.cells if cell.kind == kind for mode in modes.values() for name in mode.libraries}
        wanted = [FASTEST, *names] if len(names) > 1 else list(names)
        found += [(entry, name) for name in library_order(wanted)]
    return found


def _pair_width() -> float:
    return 2 * FIELD + GAP


def draw(target: Target, measured: Sequence[Measured]) -> Sheet:
    """One block a kind of cell, a row a cell, for each library a cold and a hot column."""
    title = f"{target.name}: every cell"
    if not measured:
        sheet = Sheet(NARROWEST, heading_height(1) + 16)
        sheet.heading(title, f"{NOT_MEASURED}: there is no evaluation on this target's own hardware.")
        return sheet
    columns = {kind: found for kind in TITLES if (found := _columns(measured, kind))}
    rows = {kind: [cell for cell, _ in measured[0].cells if cell.kind == kind] for kind in columns}
    lines = (*(f"{entry.machine} · {entry.kernel} · {entry.name}" for entry in measured), *LINES)
    top = heading_height(len(lines))
    head = 54.0 if len(measured) > 1 else 42.0
    width = max(NARROWEST, 2 * LEFT + LABEL + _pair_width() * max(len(found) for found in columns.values()) - GAP)
    sheet = Sheet(width, top + 40 + sum(head + ROW * len(cells) + 14 for cells in rows.values()))
    sheet.heading(title, *lines)
    _key(sheet, top - 4)
    y = top + 28
    for kind, pairs in columns.items():
        sheet.text(LEFT, y + head - 20, TITLES[kind], "head", weight="bold")
        for place, (entry, library) in enumerate(pairs):
            x = LEFT + LABEL + place * _pair_width()
            if len(measured) > 1:
                sheet.text(x + FIELD, y + head - 32, entry.machine, "small", color=SOFT, ha="center")
            weight = "bold" if library == FASTEST else "normal"
            sheet.text(x + FIELD, y + head - 20, library_name(library), "small", ha="center", weight=weight)
            for index, mode in enumerate(MODES):
                sheet.text(x + (index + 0.5) * FIELD, y + head - 6, mode, "small", color=SOFT, ha="center")
        y += head
        for cell in rows[kind]:
            sheet.text(LEFT, y + 11.5, f"batch {cell.batch}", "small")
            sheet.text(LEFT + LABEL - 12, y + 11.5, f"{cell.keys:,}", "small", ha="right")
            for place, (entry, library) in enumerate(pairs):
                modes = next(modes for found, modes in entry.cells if found == cell)
                _fields(sheet, LEFT + LABEL + place * _pair_width(), y, modes, library)
            y += ROW
        y += 14
    return sheet


def _fields(sheet: Sheet, x: float, y: float, modes: dict[str, Mode], library: str) -> None:
    for index, name in enumerate(MODES):
        mode, left = modes[name], x + index * FIELD
        key = mode.fastest() if library == FASTEST else library
        if key not in mode.libraries:
            sheet.text(left + FIELD / 2, y + 11.5, "-", "small", color=SOFT, ha="center")
            continue
        ratio = mode.ratio(key)
        field, ink = ratio_colours(ratio)
        sheet.box(left + 0.5, y + 0.5, FIELD - 1, ROW - 1, field)
        words = "=" if mode.same_as else ratio_text(ratio)
        sheet.text(left + FIELD / 2, y + 11.5, words, "small", color=ink, ha="center")


def _key(sheet: Sheet, y: float) -> None:
    """The colours, from slower to faster, with the ratios that they stand for."""
    steps = (0.35, 0.5, 0.7, 0.85, 1.0, 1.18, 1.41, 2.0, 2.83)
    for index, ratio in enumerate(steps):
        field, ink = ratio_colours(ratio)
        sheet.box(LEFT + LABEL + 34 * index, y, 33, 15, field)
        sheet.text(LEFT + LABEL + 34 * index + 16.5, y + 11, ratio_text(ratio), "small", color=ink, ha="center")
    sheet.text(LEFT, y + 11, "Colours", "small", color=SOFT)
