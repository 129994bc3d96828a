"""The lineage graph of a run as SVG: one column a step, left to right; one row a branch; the incumbent's path straight.

Placing. A *chain* is a vertex with those of its descendants that go on straight to the right: along the incumbent's path,
else the verified child with the most descendants. A chain lies in one row. All other children of a vertex hang on a line
that leaves it once and runs to the last of them. Chains and such lines take the row nearest to their parent that is free
over their columns, so an edge never runs through a vertex; curves stay in the gaps between columns.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tools.search.page_data import Step, Story
from tools.search.page_html import Markup, esc, join, percent, slug, tag, times

DENSE = 60  # more steps than this are drawn closer together
ROW, LINE_ROW = 58.0, 18.0  # heights of a row with vertices, and of one that holds lines only
RADIUS = 9.0
MARGIN = 30.0
STATUSES = {
    "root": "not evaluated yet",
    "incumbent": "the best implementation so far",
    "frontier": "kept for further work",
    "verified": "verified, not decided yet",
    "archived": "kept for later, no immediate follow-up",
    "failed": "did not verify",
    "abandoned": "its direction was given up",
    "unaudited": "not evaluated yet",
}


@dataclass
class Layout:
    """Row and column of every vertex, and of the lines between them."""

    place: dict[str, tuple[int, int]] = field(default_factory=dict)  # column, row
    line: dict[tuple[str, str], int] = field(default_factory=dict)  # edge -> row of its horizontal part
    taken: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def free_row(self, near: int, first: int, last: int) -> int:
        """Reserve columns first..last in the free row nearest to `near`, below before above."""
        for offset in range(1, 2 * len(self.taken) + 4):
            row = near + (offset // 2 if offset % 2 == 0 else -(offset // 2))
            if not any(first <= end and start <= last for start, end in self.taken[row]):
                break
        self.taken[row].append((first, last))
        return row


def place(steps: list[Step], path: list[str]) -> Layout:
    """Rows for all steps (see above). Steps come in order, so that parents stand before their children."""
    layout = Layout()
    column = {step.id: at for at, step in enumerate(steps)}
    children: dict[str, list[str]] = defaultdict(list)
    for step in steps:
        for parent in step.parents[:1]:
            children[parent].append(step.id)
    size = {step.id: 1 for step in steps}
    for step in reversed(steps):
        for parent in step.parents[:1]:
            size[parent] += size[step.id]
    verified = {step.id for step in steps if step.verified}

    def chain(head: str) -> list[str]:
        found = [head]
        while True:
            onward = [child for child in children[found[-1]] if child in path]
            onward = onward or [child for child in children[found[-1]] if child in verified]
            if not onward:
                return found
            found.append(max(onward, key=lambda child: (size[child], column[child])))

    def settle(head: str, near: int, first: int) -> int:
        members = chain(head)
        row = layout.free_row(near, first, column[members[-1]])
        for member in members:
            layout.place[member] = (column[member], row)
        return row

    for step in steps:
        if step.id not in layout.place:  # a root; every other vertex is placed by its first parent
            settle(step.id, 0, column[step.id])
        at, row = layout.place[step.id]
        waiting = [child for child in children[step.id] if child not in layout.place]
        if waiting:
            *others, final = waiting
            shared = settle(final, row, at + 1)
            layout.line.update({(step.id, child): shared for child in waiting})
            for child in others:
                settle(child, shared, column[child])
    for merge in steps:
        for parent in merge.parents[1:]:
            first, last = column[parent] + 1, column[merge.id] - 1
            near = layout.place[parent][1]
            layout.line[parent, merge.id] = layout.free_row(near, first, last) if first <= last else near
    return layout


def draw(story: Story, links: bool) -> tuple[Markup, float, float]:
    """The graph as SVG elements, its width and height. With `links` a vertex leads to its record on the same page."""
    steps = story.steps
    if not steps:
        return Markup(""), 0.0, 0.0
    layout = place(steps, story.incumbent_path)
    wide = 88.0 if len(steps) <= DENSE else 54.0
    y = _rows(layout)

    def x(column: float) -> float:
        return MARGIN + wide * column

    on_path = set(zip(story.incumbent_path, story.incumbent_path[1:], strict=False))
    edges, vertices = [], []
    for step in steps:
        here = layout.place[step.id]
        for index, parent in enumerate(step.parents):
            from_column, from_row = layout.place[parent]
            level = layout.line.get((parent, step.id), from_row)
            shape = _edge(x(from_column), y[from_row], y[level], x(here[0]), y[here[1]], wide)
            kind = "edge path" if (parent, step.id) in on_path else "edge other" if index else "edge"
            edges.append((kind == "edge path", tag("path", class_=kind, d=shape)))
        vertices.append(_vertex(step, x(here[0]), y[here[1]], wide, links))
    edges.sort(key=lambda item: item[0])  # the emphasised path lies on top
    body = Markup("".join(text for _, text in edges) + "".join(vertices))
    return body, x(len(steps) - 1) + MARGIN + 12, max(y.values()) + MARGIN + 16


def _rows(layout: Layout) -> dict[int, float]:
    """Height of every row that is used."""
    with_vertices = {row for _, row in layout.place.values()}
    heights: dict[int, float] = {}
    for row in sorted(with_vertices | set(layout.line.values())):
        step = ROW if row in with_vertices else LINE_ROW
        heights[row] = heights[max(heights)] + step if heights else MARGIN
    return heights


def _edge(x0: float, y0: float, level: float, x1: float, y1: float, wide: float) -> str:
    """A line from a vertex right to another: out of its row within one column, along `level`, into the child's row."""
    bend = wide * 0.62
    text = f"M{x0:.0f} {y0:.0f}"
    if level != y0:
        middle = x0 + bend / 2
        text += f"C{middle:.0f} {y0:.0f} {middle:.0f} {level:.0f} {x0 + bend:.0f} {level:.0f}"
    if level != y1:
        start = max(x1 - bend, x0 + bend) if level != y0 else x1 - bend
        middle = (start + x1) / 2
        text += f"H{start:.0f}C{middle:.0f} {level:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    else:
        text += f"H{x1:.0f}"
    return text


def _vertex(step: Step, x: float, y: float, wide: float, links: bool) -> Markup:
    drawn = [tag("title", describe(step)), mark(step.status, x, y)]
    if step.promoted:
        drawn.insert(1, tag("circle", class_="ring", cx=f"{x:.0f}", cy=f"{y:.0f}", r=f"{RADIUS + 5:.0f}"))
    below = y + RADIUS + 15
    drawn.append(tag("text", step.id, class_="mono small halo", x=f"{x:.0f}", y=f"{below:.0f}", text_anchor="middle"))
    if step.action is None:
        drawn.append(tag("text", "root", class_="small muted halo", x=f"{x:.0f}", y=f"{below + 12:.0f}", text_anchor="middle"))
    else:
        at = (x - RADIUS - 7, y - 5, "end") if wide > 60 else (x, below + 11, "middle")
        where = {"x": f"{at[0]:.0f}", "y": f"{at[1]:.0f}", "text_anchor": at[2]}
        drawn.append(tag("text", step.action["id"], class_="mono small muted halo", **where))
    inner = join_group(step.status, drawn)
    if not links:
        return inner
    reach = tag("circle", cx=f"{x:.0f}", cy=f"{y + 6:.0f}", r="22", fill="transparent")  # easy to hit with a finger
    return tag("a", reach, inner, href=f"#{step.id}")


def join_group(status: str, drawn: list[Markup]) -> Markup:
    """Elements of one vertex, in the colours of its status."""
    return tag("g", *drawn, class_=f"m-{slug(status)}")


def mark(status: str, x: float, y: float, r: float = RADIUS) -> Markup:
    """The shape of a status, centred; unknown ones are a small circle."""
    if status == "incumbent":
        points = []
        for corner, (dx, dy) in enumerate(_STAR):
            reach = r * (1.35 if corner % 2 == 0 else 0.62)
            points.append(f"{x + reach * dx:.1f},{y + reach * dy:.1f}")
        return tag("polygon", class_="mark", points=" ".join(points))
    arm = r - 3
    paths = {
        "root": f"M{x:.1f} {y - r:.1f}l{r} {r}l{-r} {r}l{-r} {-r}Z",
        "archived": f"M{x - r + 1:.1f} {y - r + 1:.1f}h{2 * r - 2}v{2 * r - 2}h{2 - 2 * r}Z",
        "abandoned": f"M{x - r:.1f} {y - r + 2:.1f}h{2 * r}l{-r} {2 * r - 3}Z",
        "failed": f"M{x - arm:.1f} {y - arm:.1f}l{2 * arm} {2 * arm}M{x + arm:.1f} {y - arm:.1f}l{-2 * arm} {2 * arm}",
    }
    if status not in paths:
        return tag("circle", class_="mark", cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{r - 1:.1f}")
    ground = (
        tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{r:.1f}", fill="var(--surface)") if status == "failed" else Markup("")
    )
    return Markup(ground + tag("path", class_="mark", d=paths[status]))


_STAR = [
    (0.0, -1.0), (0.588, -0.809), (0.951, -0.309), (0.951, 0.309), (0.588, 0.809),
    (0.0, 1.0), (-0.588, 0.809), (-0.951, 0.309), (-0.951, -0.309), (-0.588, -0.809),
]  # fmt: skip


def describe(step: Step) -> str:
    """One step in words: what a pointer or a screen reader is told of a vertex."""
    audit = step.audit or {}
    parts = [f"{step.id}: {step.status}"]
    if step.action is not None:
        parts.append(f"{step.action['id']} from {', '.join(step.parents)} ({step.action['form'].replace('_', ' ')})")
    if step.opportunity is not None:
        parts.append(str(step.opportunity["direction"]))
    if step.audits and not step.verified:
        parts.append(str(audit.get("status")))
    if step.speedup is not None and step.number:
        parts.append(f"{times(step.speedup)} the root's speed")
    if step.promoted:
        parts.append(f"promoted, T {percent(audit.get('gain'))} lower")
    if step.decision:
        parts.append(f"decided: {step.decision}")
    return "; ".join(parts)


def legend(story: Story) -> Markup:
    """The statuses that occur in the run, each with its shape and what it means."""
    used = {step.status for step in story.steps}
    items = []
    for status in [*STATUSES, *sorted(used - set(STATUSES))]:
        if status in used:
            drawing = tag("svg", join_group(status, [mark(status, 13, 13)]), viewBox="0 0 26 26", aria_hidden="true")
            items.append(tag("li", drawing, tag("b", status), f" {STATUSES.get(status, '')}"))
    ring = tag("circle", class_="ring", cx="13", cy="13", r="11")
    items.append(tag("li", tag("svg", ring, viewBox="0 0 26 26", aria_hidden="true"), tag("b", "ring"), " was promoted"))
    dashed = tag("path", class_="edge other", d="M1 13H25")
    items.append(
        tag("li", tag("svg", dashed, viewBox="0 0 26 26", aria_hidden="true"), tag("b", "dashed"), " other parent of a merge")
    )
    thick = tag("path", class_="edge path", d="M1 13H25")
    items.append(
        tag("li", tag("svg", thick, viewBox="0 0 26 26", aria_hidden="true"), tag("b", "thick"), " the incumbent's path")
    )
    return tag("ul", *items, class_="legend")


def legend_row(items: list[tuple[str, str]], x: float, y: float) -> tuple[Markup, float]:
    """A legend inside a drawing, one row from (x, y) on: marks of statuses with a text each; and where it ends."""
    parts = []
    for status, text in items:
        parts.append(join_group(status, [mark(status, x, y, 6)]))
        parts.append(tag("text", text, class_="muted", x=f"{x + 13:.0f}", y=f"{y + 4:.0f}"))
        x += 40 + 6.6 * len(text)
    return join(parts), x


def summary(story: Story) -> str:
    """The graph in one sentence, for readers who cannot see it."""
    path = " to ".join(story.incumbent_path) or "none"
    return f"Lineage graph of {len(story.steps)} implementations; path of the incumbent: {esc(path)}"
