"""published_reference: what another implementation publishes of itself, beside ours in the same cells.

Its figures come from published_reference.csv and were measured elsewhere, on other machines and by another method: each
is its own ratio to its own fastest library, and only the ratios of one source compare.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from tools.figures.data import NOT_MEASURED, Published
from tools.figures.sources import Measured
from tools.figures.style import FASTER, FASTER_SOFT, HAIR, INK, PAPER, SIZE, SLOWER, SOFT, Sheet, heading_height

WIDTH, LEFT, LABEL, GAP, ROW, HEAD = 620.0, 24.0, 118.0, 16.0, 16.0, 44.0
LINES = (
    "Time of the fastest library measured beside an implementation / the implementation's time; above 1 it is faster.",
    "The other's figures were published elsewhere, from other machines and by another method:",
    "read them as context, not as a race. Only the figures of one source compare.",
    "Where no light dot shows, hot is as cold.",
)
TICKS = (0.25, 0.5, 1.0, 2.0)


def draw(lines: Sequence[Published], measured: Sequence[Measured]) -> Sheet:
    """A column for each GPU that the file names, a row for each cell."""
    gpus = list(dict.fromkeys(line.gpu for line in lines))
    cells = list(dict.fromkeys(line.cell for line in lines))
    theirs = {(line.gpu, line.cell): line.ratio for line in lines}
    ours = {gpu: _ours(gpu, measured) for gpu in gpus}
    gpus.sort(key=lambda gpu: not ours[gpu])  # where there is something to see beside it first
    ratios = [*theirs.values(), *(ratio for found in ours.values() for pair in found.values() for ratio in pair)]
    limits = min([*ratios, TICKS[0]]) / 1.15, max([*ratios, TICKS[-1]]) * 1.15
    top = heading_height(len(LINES)) + 34
    sheet = Sheet(WIDTH, top + HEAD + ROW * len(cells) + 44)
    sheet.heading("Beside a published implementation", *LINES)
    _key(sheet, top - 22)
    width = (WIDTH - 2 * LEFT - LABEL - GAP * (len(gpus) - 1)) / len(gpus)
    for index, cell in enumerate(cells):
        sheet.text(LEFT, top + HEAD + ROW * index + 11.5, cell, "small")
    for place, gpu in enumerate(gpus):
        x = LEFT + LABEL + place * (width + GAP)
        machines = [entry.machine for entry in measured if entry.target.name == gpu.lower()]
        state = f"ours: {', '.join(machines) or NOT_MEASURED}"
        sheet.text(x, top + 18, gpu, "head", weight="bold")
        sheet.text(x, top + 33, state, "small", color=SOFT)
        axes = sheet.axes(x, top + HEAD, width, ROW * len(cells))
        _column(axes, cells, {cell: theirs.get((gpu, cell)) for cell in cells}, ours[gpu], limits)
    return sheet


def _ours(gpu: str, measured: Sequence[Measured]) -> dict[str, tuple[float, float]]:
    """Cell -> our (cold, hot) ratio to the fastest library, of the target with this GPU's name."""
    found: dict[str, tuple[float, float]] = {}
    for entry in measured:
        if entry.target.name != gpu.lower():
            continue
        for cell, modes in entry.cells:
            pair = [mode.ratio(best) for mode in (modes["cold"], modes["hot"]) if (best := mode.fastest())]
            if len(pair) == 2:
                found[cell.name] = pair[0], pair[1]
    return found


def _column(
    axes: Axes,
    cells: Sequence[str],
    theirs: dict[str, float | None],
    ours: dict[str, tuple[float, float]],
    limits: tuple[float, float],
) -> None:
    axes.set(xscale="log", xlim=limits, ylim=(len(cells) - 0.5, -0.5), yticks=[])
    axes.minorticks_off()
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    for tick in TICKS:
        axes.axvline(tick, color=INK if tick == 1 else HAIR, linewidth=0.9 if tick == 1 else 0.6, zorder=1)
    for row, cell in enumerate(cells):
        axes.axhline(row, color=HAIR, linewidth=0.4, zorder=0)
        if (ratio := theirs[cell]) is not None:
            axes.plot(ratio, row, "D", markersize=5.5, markerfacecolor="none", markeredgecolor=SLOWER, zorder=5)
        if cell in ours:
            axes.plot(ours[cell][1], row, "o", markersize=5, color=FASTER_SOFT, zorder=3)
            axes.plot(ours[cell][0], row, "o", markersize=5, color=FASTER, zorder=4)
    axes.set_xlabel("ratio", fontsize=SIZE["small"], color=SOFT)


def _key(sheet: Sheet, y: float) -> None:
    marks = (
        ("D", PAPER, SLOWER, "published elsewhere, other machine and method", 0.0),
        ("o", FASTER, FASTER, "ours, cold", 292.0),
        ("o", FASTER_SOFT, FASTER_SOFT, "ours, hot", 384.0),
    )
    for marker, face, edge, words, place in marks:
        sheet.canvas.plot(LEFT + 4 + place, y + 7, marker, markersize=5.5, markerfacecolor=face, markeredgecolor=edge)
        sheet.text(LEFT + 14 + place, y + 10.5, words)
