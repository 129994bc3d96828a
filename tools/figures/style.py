"""How all figures look, and how they become bytes: one width of type, few colours, a background of its own.

The background is part of the picture, so that it reads the same on a light and on a dark page. Glyphs are outlines of
DejaVu Sans, which comes with matplotlib, ids are salted with a constant and dates are left out: the same data and the
same matplotlib give the same bytes on every machine.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

DRAWN_WITH = "3.11.2"  # the matplotlib whose pictures are kept; another may place a curve's points otherwise

PAPER, INK, SOFT, HAIR = "#fbfaf7", "#1d2329", "#5c6670", "#d9d6cf"
FASTER, SLOWER, EVEN = "#1f5fa8", "#b4560e", "#f1eee7"  # blue and orange: told apart by every kind of colour vision
FASTER_SOFT, SLOWER_SOFT = "#a9c5e4", "#edc39d"
SIZE = {"title": 15.0, "head": 11.5, "text": 10.0, "small": 8.8}  # points
SPAN = 1.5  # a ratio of 2 ** SPAN has the full colour

RC: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "svg.hashsalt": "areal-tik",
    "svg.fonttype": "path",
    "pdf.fonttype": 3,
    "pdf.compression": 0,  # the bytes would be those of the machine's zlib
    "text.usetex": False,
    "path.simplify": False,
    "axes.unicode_minus": True,
}
_COLOURS = LinearSegmentedColormap.from_list("ratio", [SLOWER, "#e3a36b", EVEN, "#7ca6d6", FASTER])


def ratio_colours(ratio: float) -> tuple[str, str]:
    """(field, text) for a ratio: orange below 1, blue above, by its logarithm; the text keeps its contrast."""
    place = min(1.0, max(0.0, 0.5 + math.log2(ratio) / (2 * SPAN)))
    field = to_hex(_COLOURS(place))
    return field, max(("#ffffff", INK), key=lambda ink: _contrast(ink, field))


def _contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, 1 to 21, as the Web Content Accessibility Guidelines define it."""
    light = []
    for colour in (first, second):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(light) / min(light)


def ratio_text(ratio: float) -> str:
    """Two decimals below 10, so that 0.99 and 1.01 are told apart."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Draw inside of this: matplotlib's defaults with RC, whatever the user's own matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


class Sheet:
    """A figure in points with its origin at the top left, so that layouts are written in the order they are read."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), facecolor=PAPER)
        self.canvas = self.axes(0, 0, width, height)  # for lines and boxes between the plots
        self.canvas.set(xlim=(0, width), ylim=(height, 0))
        self.canvas.axis("off")

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes whose box starts at x, y."""
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor="none")
        axes.tick_params(length=0, labelsize=SIZE["small"], labelcolor=SOFT, pad=3)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def text(self, x: float, y: float, words: str, size: str = "text", **options: Any) -> None:
        """Words whose baseline is at y; left aligned in ink unless told otherwise."""
        options = {"color": INK, "ha": "left", "va": "baseline", **options}
        self.canvas.text(x, y, words, fontsize=SIZE[size], **options)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self.canvas.add_patch(Rectangle((x, y), width, height, facecolor=colour, linewidth=0))

    def line(self, x: tuple[float, float], y: tuple[float, float], colour: str = HAIR, width: float = 0.8) -> None:
        self.canvas.plot(x, y, color=colour, linewidth=width, solid_capstyle="butt")

    def heading(self, title: str, *lines: str, x: float = 24) -> float:
        """Title and what the figure shows; returns the y below it."""
        self.text(x, 34, title, "title", weight="bold")
        for index, line in enumerate(lines):
            self.text(x, 53 + 14.5 * index, line, "text", color=SOFT)
        return 53 + 14.5 * len(lines)


def heading_height(lines: int) -> float:
    """What `Sheet.heading` returns for so many lines."""
    return 53 + 14.5 * lines


def picture(sheet: Sheet, kind: str) -> bytes:
    """A figure's bytes; kind: svg, pdf, or png (two pixels a point). No date, no program."""
    left_out = {
        "svg": ("Date", "Creator", "Format", "Type"),
        "pdf": ("CreationDate", "ModDate", "Creator", "Producer"),
        "png": ("Software",),
    }
    raw = io.BytesIO()
    sheet.figure.savefig(raw, format=kind, metadata=dict.fromkeys(left_out[kind]), dpi=144)
    return raw.getvalue()
