"""roofline_<target>: achieved TFLOP/s over arithmetic intensity, ours and the fastest library, under the target's peaks.

Operations and bytes are the evaluator's own counts (tools/evaluator/grids.py): two products of every visible pair of
query and key, and each input and output once. Cold times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import ScaledTranslation

from tools.core.config import Target
from tools.evaluator.grids import Cell
from tools.figures.data import NOT_MEASURED
from tools.figures.sources import Measured, Time
from tools.figures.style import FASTER, HAIR, INK, PAPER, SIZE, SLOWER, SOFT, Sheet, heading_height

WIDTH, LEFT, PLOT, AXIS = 560.0, 58.0, 300.0, 40.0
KINDS = {"prefill": "o", "update": "s", "decode": "D"}
OURS: dict[str, Any] = {"markersize": 4.2, "color": FASTER}
LIBRARY: dict[str, Any] = {"markersize": 6.4, "markerfacecolor": "none", "markeredgecolor": SLOWER, "markeredgewidth": 1.1}
BEHIND: dict[str, Any] = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}  # no line of the grid runs through words
GREY: dict[str, Any] = {"markersize": 5.0, "color": SOFT}


def point(cell: Cell, time: Time, heads: tuple[int, int]) -> tuple[float, float]:
    """(operations a byte, TFLOP/s) of a cell that takes this time; heads: query and KV."""
    moved = cell.input_bytes(*heads) + cell.output_bytes(heads[0])
    return cell.flop(heads[0]) / moved, cell.flop(heads[0]) / time.us / 1e6


def draw(target: Target, measured: Sequence[Measured]) -> Sheet:
    """A plot for each machine of the target; the roof alone where nothing was measured."""
    section = target.config["target"]
    tflops, bandwidth = float(section["peak_tflops"]), float(section["peak_bandwidth_gbps"])
    lines = [f"Roof: {tflops:,g} TFLOP/s and {bandwidth:,g} GB/s, the target's peaks in its config."]
    if section["device"] == "cpu":
        lines.append("They are bounds above any processor's, not this one's: distances to the roof say little.")
    lines.append("Cold, medians. Cells of one intensity hide each other: decode is set apart by batch, 1 at the left.")
    top = heading_height(len(lines)) + 28
    machines: Sequence[Measured | None] = measured or [None]
    sheet = Sheet(WIDTH, top + len(machines) * (24 + PLOT + AXIS) + 8)
    sheet.heading(f"{target.name}: distance to the machine's limits", *lines)
    _key(sheet, top - 24)
    for index, entry in enumerate(machines):
        y = top + index * (24 + PLOT + AXIS)
        if entry is not None:
            sheet.text(24, y + 12, f"{entry.machine} · {entry.kernel} · {entry.name}", weight="bold")
        axes = sheet.axes(LEFT, y + 24, WIDTH - LEFT - 24, PLOT)
        _roof(axes, tflops, bandwidth, target, entry)
        if entry is None:
            axes.text(0.5, 0.4, NOT_MEASURED, transform=axes.transAxes, ha="center", fontsize=SIZE["title"], color=SOFT,
                      bbox=BEHIND)  # fmt: skip
    return sheet


def _roof(axes: Axes, tflops: float, bandwidth: float, target: Target, entry: Measured | None) -> None:
    heads = target.config["workloads"]["heads_q"], target.config["workloads"]["heads_kv"]
    kinds: dict[str, list[tuple[int, tuple[float, float], tuple[float, float] | None]]] = {}
    for cell, modes in entry.cells if entry else []:
        best = modes["cold"].fastest()
        theirs = None if not best else point(cell, modes["cold"].libraries[best], heads)
        kinds.setdefault(cell.kind, []).append((cell.batch, point(cell, modes["cold"].ours, heads), theirs))
    every = [place for found in kinds.values() for _, *pair in found for place in pair if place is not None]
    batches = sorted({batch for batch, *_ in kinds.get("decode", [])})
    ridge = tflops * 1e3 / bandwidth
    low = min([x for x, _ in every] or [ridge / 30]) / 3
    low, high = min(low, ridge / 4), max([x for x, _ in every] or [ridge * 10]) * 2
    bottom = min([y for _, y in every] + [tflops / 1000]) / 2
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, tflops * 2.2))
    axes.grid(True, color=HAIR, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("operations a byte", fontsize=SIZE["small"], color=SOFT)
    axes.set_ylabel("TFLOP/s", fontsize=SIZE["small"], color=SOFT)
    axes.plot([low, ridge, high], [low * bandwidth / 1e3, tflops, tflops], color=INK, linewidth=1.4)
    axes.text(high / 1.1, tflops * 1.17, f"{tflops:,g} TFLOP/s", ha="right", fontsize=SIZE["small"], color=INK, bbox=BEHIND)
    _along_the_slope(axes, (low * ridge) ** 0.5, bandwidth)
    for kind, found in kinds.items():
        for batch, (x, y), theirs in found:
            aside = 13.0 * (batches.index(batch) - (len(batches) - 1) / 2) if kind == "decode" else 0.0
            moved = axes.transData + ScaledTranslation(aside / 72, 0, axes.figure.dpi_scale_trans)
            if theirs is not None:
                axes.plot([x, x], [y, theirs[1]], color=SOFT, linewidth=0.7, zorder=2, transform=moved)
                axes.plot(*theirs, KINDS[kind], **LIBRARY, zorder=3, transform=moved)
            axes.plot(x, y, KINDS[kind], **OURS, zorder=4, transform=moved)


def _along_the_slope(axes: Axes, x: float, bandwidth: float) -> None:
    """The bandwidth, written along the roof's slope above the point at x."""
    (left, right), (bottom, top), box = axes.get_xlim(), axes.get_ylim(), axes.get_position()
    width, height = axes.figure.get_figure(root=True).get_size_inches()
    across, up = box.width * width / math.log(right / left), box.height * height / math.log(top / bottom)
    axes.annotate(
        f"{bandwidth:,g} GB/s", (x, x * bandwidth / 1e3), (-5, 8), textcoords="offset points", ha="center", va="center",
        rotation=math.degrees(math.atan2(up, across)), rotation_mode="anchor", fontsize=SIZE["small"], color=INK, bbox=BEHIND,
    )  # fmt: skip


def _key(sheet: Sheet, y: float) -> None:
    place = 28.0
    for words, marker, look in (
        ("ours", "o", OURS),
        ("fastest library", "o", LIBRARY),
        ("prefill", KINDS["prefill"], GREY),
        ("policy update", KINDS["update"], GREY),
        ("decode", KINDS["decode"], GREY),
    ):
        sheet.canvas.plot(place, y, marker, **look)
        sheet.text(place + 9, y + 3.5, words)
        place += 38 + 5.3 * len(words)
