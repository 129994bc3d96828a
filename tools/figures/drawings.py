"""The project's drawings, which show no data: the mark, what agreeing bits save, and how a search keeps its books.

`plot.py` writes them to assets/ as SVG and PDF, and as PNG for what takes no vectors.
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.patches import FancyBboxPatch

from tools.figures.style import EVEN, FASTER, FASTER_SOFT, INK, SIZE, SLOWER, SLOWER_SOFT, SOFT, Sheet

Point = tuple[float, float]
BITS = "101101"
WORKFLOW = ("Policy update of PPO and GRPO", "The ratio needs the old policy's probabilities in the trainer's own bits.")
SEARCH = (
    "A search and its books",
    "The agent thinks; tools/ir.py writes the records, derives the state and refuses what the rules forbid.",
)
LOST = "A's probabilities differ in bits from B's for equal weights, and are thrown away"
SAVED = "decode and the trainer's forward give the same bits: one forward pass less in each step"
STOP = "until the limit of attempts, or κ attempts without a promotion"


def drawings() -> Iterator[tuple[str, Sheet]]:
    """(name, drawing) of each."""
    yield "logo", logo()
    yield "workflow", workflow()
    yield "search", search()


def logo() -> Sheet:
    """Two rows of the same bits, and the name."""
    sheet = Sheet(430, 104)
    for row, colour in enumerate((FASTER, INK)):
        for column, bit in enumerate(BITS):
            x, y = 22.0 + 17 * column, 24.0 + 33 * row
            sheet.box(x, y, 13, 22, colour if bit == "1" else EVEN)
    for column in range(len(BITS)):
        x = 28.5 + 17 * column
        sheet.line((x, x), (47.5, 55.5), SOFT, 1.4)
    sheet.canvas.text(142, 60, "AReaL-TIK", fontsize=36, weight="bold", color=INK, va="baseline")
    sheet.text(144, 80, "attention kernels that agree bit for bit", "head", color=SOFT)
    return sheet


def workflow() -> Sheet:
    """What a trainer does with and without agreeing bits."""
    sheet = Sheet(720, 282)
    y = sheet.heading(*WORKFLOW) + 12.0
    sheet.text(24, y + 12, "usual", "head", weight="bold")
    _node(sheet, (96, y), (126, 56), ("rollout", "decode kernel A"), EVEN)
    _node(sheet, (262, y), (150, 56), ("forward pass", "again, with kernel B"), SLOWER_SOFT)
    _node(sheet, (452, y), (120, 56), ("ratio", "π / π_old"), EVEN)
    _node(sheet, (612, y), (84, 56), ("update",), EVEN)
    for start, end in ((222, 262), (412, 452), (572, 612)):
        _arrow(sheet, (start, y + 28), (end, y + 28))
    sheet.text(242, y + 22, "tokens", "small", color=SOFT, ha="center")
    sheet.text(432, y + 22, "π_old", "small", color=SOFT, ha="center")
    sheet.text(96, y + 74, LOST, "small", color=SLOWER)
    y += 108
    sheet.line((24, 696), (y - 12, y - 12))
    sheet.text(24, y + 12, "here", "head", weight="bold")
    _node(sheet, (96, y), (126, 56), ("rollout", "unified decode"), FASTER_SOFT)
    _node(sheet, (452, y), (120, 56), ("ratio", "π / π_old"), EVEN)
    _node(sheet, (612, y), (84, 56), ("update",), EVEN)
    _arrow(sheet, (222, y + 28), (452, y + 28))
    _arrow(sheet, (572, y + 28), (612, y + 28))
    sheet.text(337, y + 22, "tokens and π_old", "small", color=SOFT, ha="center")
    sheet.text(96, y + 74, SAVED, "small", color=FASTER)
    return sheet


def search() -> Sheet:
    """The five records, the loop that they make, and where they are kept."""
    sheet = Sheet(720, 272)
    y = sheet.heading(*SEARCH) + 14
    records = (
        ("opportunity", "parent, evidence,", "what would refute it"),
        ("action", "decode, full", "sequences, joint"),
        ("implementation", "source and", "its hash"),
        ("audit", "bits, error, time,", "promotion"),
        ("lineage", "continue, merge,", "archive, abandon"),
    )
    width, gap = 116.0, 23.0
    for index, words in enumerate(records):
        x = 24 + index * (width + gap)
        _node(sheet, (x, y), (width, 70), words, FASTER_SOFT if words[0] == "audit" else EVEN)
        if index:
            _arrow(sheet, (x - gap, y + 35), (x, y + 35))
    last, below = 24 + 4 * (width + gap) + width / 2, y + 92
    for x, start, end in ((last, y + 70, below), (24 + width / 2, below, y + 72)):
        _arrow(sheet, (x, start), (x, end)) if x < last else sheet.line((x, x), (start, end), INK, 1.1)
    sheet.line((24 + width / 2, last), (below, below), INK, 1.1)
    sheet.text(360, below - 6, STOP, "small", color=SOFT, ha="center")
    audit = 24 + 3 * (width + gap)
    _node(sheet, (audit - 30, below + 24), (width + 60, 54), ("evaluator", "judge and confined workers"), FASTER_SOFT)
    _arrow(sheet, (audit + width / 2 + 30, below + 24), (audit + width / 2 + 30, y + 72))
    _node(sheet, (24, below + 24), (340, 54), ("log.jsonl", "hash chain; incumbent, frontier and limits follow from it"), EVEN)
    return sheet


def _node(sheet: Sheet, at: Point, size: Point, words: tuple[str, ...], colour: str) -> None:
    """A rounded box; its first line is bold."""
    (x, y), (width, height) = at, size
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=5", facecolor=colour, linewidth=0)
    sheet.canvas.add_patch(shape)
    lines = 14.0
    first = y + height / 2 + SIZE["text"] * 0.36 - lines * (len(words) - 1) / 2
    for index, line in enumerate(words):
        bold = {"weight": "bold"} if index == 0 else {"color": INK}
        sheet.text(x + width / 2, first + lines * index, line, "head" if index == 0 else "small", ha="center", **bold)


def _arrow(sheet: Sheet, start: Point, end: Point) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.1, "shrinkA": 2, "shrinkB": 2, "mutation_scale": 9}
    sheet.canvas.annotate("", xy=end, xytext=start, arrowprops=style)
