"""The sections of the context that hold an audit's figures: latency of each cell, compiler resources, dispatch, counters."""

from __future__ import annotations

from typing import Any

from tools.search.budget import Section
from tools.search.context_next import Focus
from tools.search.context_parts import outcome
from tools.search.context_text import figure, flat, percent, ratio, row, table
from tools.search.context_view import Record, View


def latency_section(view: View, now: Focus) -> Section:
    """Every cell of the subject's audit, the largest share of T first; ratios above 1: the subject is faster."""
    section = Section("Latency", unit="cells")
    audit = view.audit_of(now.subject) if now.subject else None
    if audit is None:
        return section
    section.hint = f"{view.folder}/records/{audit['id']}.json"
    section.title = f"Latency of {now.subject} ({audit['id']})"
    section.add(f"{outcome(audit)}\n", 91)
    cells = sorted(audit["cells"], key=lambda cell: -(cell["share"] or 0.0))
    if not cells:
        return section
    section.add("\n".join(_phase(cells, phase) for phase in ("full", "decode") if _of(cells, phase)) + "\n", 90)
    limit = float(view.config["limits"]["max_slowdown"])
    head = ["cell", "us", "+-", "root/us", "incumbent/us", "library/us", "library", "floor", "share of T"]
    first, *rest = [_cell(cell, limit) for cell in cells]
    section.add(f"{table(head, 'lrrrrrlrr')}\n{first}", 87)
    section.add_rows(rest, 86, 56)
    return section


def _of(cells: list[Record], phase: str) -> list[Record]:
    return [cell for cell in cells if cell["phase"] == phase]


def _phase(cells: list[Record], phase: str) -> str:
    """One line for a phase: its share of T and its range of ratios."""
    own = _of(cells, phase)
    share = sum(cell["share"] or 0.0 for cell in own)
    text = f"- {phase}: {len(own)} cells, {percent(share)} of T"
    for key, name in (("root_us", "the root"), ("best_baseline_us", "the best library")):
        ratios = sorted(cell[key] / cell["us"] for cell in own if cell[key])
        if ratios:
            text += f"; {ratios[0]:.2f}x to {ratios[-1]:.2f}x the speed of {name}"
    return text


def _cell(cell: Record, limit: float) -> str:
    low, high = cell["interval_us"]
    root = ratio(cell["root_us"], cell["us"])
    if cell["root_us"] and cell["us"] > limit * cell["root_us"]:
        root += " over the limit"
    return row(
        [
            cell["name"],
            figure(cell["us"]),
            f"{50 * (high - low) / cell['us']:.1f} %",
            root,
            ratio(cell["incumbent_us"], cell["us"]),
            ratio(cell["best_baseline_us"], cell["us"]),
            cell["best_baseline"] or "-",
            percent(cell["floor_us"] / cell["us"]) if cell["floor_us"] else "-",
            percent(cell["share"]),
        ]
    )


def machine_section(view: View, now: Focus) -> Section:
    """What the compiler and the profiler say of the subject."""
    section = Section("Compiler, dispatch and counters", unit="rows")
    audit = view.audit_of(now.subject) if now.subject else None
    if audit is None:
        return section
    section.title += f" of {now.subject} ({audit['id']})"
    section.hint = f"{view.folder}/records/{audit['id']}.json"
    section.add_rows([f"- compiler: {flat(item)}" for item in audit["resources"] if flat(item)], 77, 64)
    section.add_rows([f"- counters: {text}" for text in _items(audit["counters"])], 74, 40)
    section.add_rows([f"- dispatch: {text}" for text in _items(audit["dispatch"])], 69, 35)
    if machine := flat(audit["environment"]):
        section.add(f"- machine: {machine}", 34)
    return section


def _items(value: Any) -> list[str]:
    """One text for each thing in a value: list items apart, a mapping's entries apart."""
    if not isinstance(value, dict):
        return [flat(value)] if flat(value) else []
    texts = []
    for name, item in value.items():
        if isinstance(item, list) and any(isinstance(entry, dict) for entry in item):
            texts += [f"{name}: {flat(entry)}" for entry in item if flat(entry)]
        elif flat(item):
            texts.append(f"{name}: {flat(item)}")
    return texts
