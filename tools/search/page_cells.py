"""Tables of a run's workload cells: the incumbent beside root, baselines and floor, and a heat map of all timed attempts."""

from __future__ import annotations

from typing import Any

from tools.search.page_data import Step, Story
from tools.search.page_html import MISSING, TIMES, Markup, anchor, join, microseconds, number, percent, ratio, tag, times
from tools.search.style import heat_class


def incumbent_table(story: Story) -> Markup:
    """Each cell of the incumbent's last audit: times in microseconds, ratios, share of T."""
    step = story.step(story.state.incumbent)
    cells = (step.audit or {}).get("cells") if step else None
    if step is None or not cells:
        return tag("p", "There is no incumbent with times yet.", class_="note")
    figures = (
        f"{step.id}, us",
        "95 % interval",
        "root, us",
        "root / it",
        "baseline, us",
        "baseline / it",
        "floor, us",
        "share of T",
    )
    head = [tag("th", "cell", scope="col"), *(tag("th", name, scope="col", class_="n") for name in figures)]
    head.append(tag("th", "best baseline", scope="col"))
    rows = []
    for cell in cells:
        us, root, base = cell.get("us"), cell.get("root_us"), cell.get("best_baseline_us")
        if step.number == 0:
            root = us
        rows.append(
            tag(
                "tr",
                tag("th", cell["name"], scope="row"),
                _figure(microseconds(us)),
                _figure(_interval(cell.get("interval_us"))),
                _figure(microseconds(root)),
                _shade(ratio(root, us)),
                _figure(microseconds(base)),
                _shade(ratio(base, us)),
                _figure(microseconds(cell.get("floor_us"))),
                _figure(percent(cell.get("share"))),
                tag("td", cell.get("best_baseline") or MISSING),
            )
        )
    caption = f"Medians in microseconds a call. Ratios above 1{TIMES}, in blue: {step.id} is faster."
    return _table(head, rows, caption, "Cells of the incumbent")


def heat_map(story: Story) -> Markup:
    """Cells by timed attempts: how many times as fast as the root, in figures and colour."""
    timed = [step for step in story.attempts if step.verified and (step.audit or {}).get("cells")]
    if not timed:
        return tag("p", "No attempt has times yet.", class_="note")
    columns = [(step, {cell["name"]: cell for cell in (step.audit or {})["cells"]}) for step in timed]
    names = list(dict.fromkeys(name for _, cells in columns for name in cells))
    head = [tag("th", "cell", scope="col")]
    for step, _ in columns:
        head.append(tag("th", anchor(step.id), _note(step, story), scope="col"))
    whole = [tag("th", "T, all cells", scope="row"), *(_shade(step.speedup, short=True) for step in timed)]
    rows = [tag("tr", *whole, class_="whole")]
    for name in names:
        fields = [tag("th", name, scope="row")]
        for _, cells in columns:
            cell = cells.get(name, {})
            fields.append(_shade(ratio(cell.get("root_us"), cell.get("us")), short=True))
        rows.append(tag("tr", *fields))
    caption = "Time of the root divided by the attempt's time in the same evaluation: above 1 the attempt is faster (blue)."
    return _table(head, rows, caption, "Speed-up over the root, cells by attempts", "heat")


def _note(step: Step, story: Story) -> Markup:
    """What is special about a column, as words under its id."""
    if step.id == story.state.incumbent:
        return tag("small", "incumbent")
    if step.promoted:
        return tag("small", "promoted")
    if (step.audit or {}).get("admissible") is False:
        return tag("small", "a cell too slow")
    return Markup("")


def _interval(value: Any) -> str:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return MISSING
    return f"{microseconds(value[0])} to {microseconds(value[1])}"


def _figure(text: str) -> Markup:
    return tag("td", text, class_="n")


def _shade(value: float | None, short: bool = False) -> Markup:
    found = number(value)
    if found is None:
        return tag("td", MISSING, class_="n")
    return tag("td", f"{found:.2f}" if short else times(found), class_=f"n {heat_class(found)}")


def _table(head: list[Markup], rows: list[Markup], caption: str, name: str, kind: str | None = None) -> Markup:
    """A table in a container of its own that scrolls sideways and can take the keyboard's focus."""
    table = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", join(rows)), class_=kind)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=name)
