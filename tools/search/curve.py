"""Progress of a run as SVG: every timed attempt's speed-up over the root and the best so far, over steps or over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

from tools.search.graph import join_group, mark
from tools.search.page_attempt import outcome
from tools.search.page_data import Step, Story
from tools.search.page_html import Markup, tag, times

WIDTH, HEIGHT = 500.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 52.0, 36.0, 54.0
MARKS = [
    ("incumbent", "promoted"),
    ("verified", "verified, not promoted"),
    ("failed", "did not verify, so not timed"),
    ("root", "the root"),
]
INSET = 12.0  # from the axis to the first step


def by_steps(story: Story) -> Markup:
    """The chart over the steps of the search."""
    return _chart(story, lambda step: float(step.number), "step", "over steps")


def by_tokens(story: Story) -> Markup | None:
    """The chart over the tokens used until each evaluation, in millions; None where the run does not know them."""
    audited = [step for step in story.attempts if step.audits]
    if not story.tokens or any(step.tokens is None for step in audited):
        return None
    return _chart(story, lambda step: (step.tokens or 0.0) / 1e6, "million tokens", "over tokens")


def _chart(story: Story, position: Callable[[Step], float], unit: str, title: str) -> Markup:
    steps = [step for step in story.steps if step.audits]
    values = [step.speedup for step in steps if step.speedup is not None] + [step.best or 1.0 for step in steps] + [1.0]
    low, high, rise = _scale(min(values), max(values))
    last = max([position(step) for step in steps] + [0.0])
    end = last if last > 0 else 1.0
    _, _, run = _scale(0.0, end, whole=unit == "step")

    def x(value: float) -> float:
        return LEFT + INSET + (WIDTH - LEFT - INSET - RIGHT) * value / end

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = [_text(8, 16, f"Speed-up over the root, {title}", "strong")]
    for tick in _ticks(low, high, rise):
        kind = "axis" if abs(tick - 1) < 1e-9 else "grid"
        parts.append(tag("path", class_=kind, d=f"M{LEFT:.0f} {y(tick):.1f}H{WIDTH - RIGHT:.0f}"))
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", "muted", "end"))
    floor = HEIGHT - BOTTOM + 16
    parts.append(tag("path", class_="grid", d=f"M{LEFT:.0f} {floor:.0f}H{WIDTH - RIGHT:.0f}"))
    for tick in _ticks(0.0, end, run):
        parts.append(_text(x(tick), floor + 19, f"{tick:g}", "muted", "middle"))
    parts.append(_text(WIDTH - 8, floor + 34, unit, "muted", "end"))
    parts.append(_best(steps, position, x, y))
    size = 5.5 if len(steps) <= 80 else 3.5
    for step in steps:
        height = floor if step.speedup is None else y(step.speedup)
        shown = (
            "failed" if step.speedup is None else "root" if step.number == 0 else "incumbent" if step.promoted else "verified"
        )
        shape = mark(shown, x(position(step)), height, size + (1.5 if shown != "verified" else 0))
        parts.append(join_group(shown, [tag("title", f"{step.id}: {outcome(step)}"), shape]))
    return Markup("".join(parts))


def _best(
    steps: list[Step], position: Callable[[Step], float], x: Callable[[float], float], y: Callable[[float], float]
) -> Markup:
    """The best so far as a staircase, with its last value at its end."""
    known = [(position(step), step.best) for step in steps if step.best is not None]
    if not known:
        return Markup("")
    path = f"M{x(known[0][0]):.1f} {y(known[0][1]):.1f}"
    path += "".join(f"H{x(at):.1f}V{y(best):.1f}" for at, best in known[1:])
    end, value = known[-1]
    line = tag("path", tag("title", "best so far: the product of the promoted gains"), class_="best", d=path)
    return Markup(line + _text(x(end) + 9, y(value) + 4, times(value), "strong halo"))


def _text(x: float, y: float, text: str, kind: str, where: str | None = None) -> Markup:
    return tag("text", text, class_=kind, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=where)


def _scale(low: float, high: float, whole: bool = False) -> tuple[float, float, float]:
    """A range of round figures around low..high, and the distance of its ticks (1, 2 or 5 times a power of ten)."""
    reach = max(high - low, 0.02)
    rough = reach / 5
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    tick = max(tick, 1.0) if whole else tick
    first, last = math.floor(low / tick + 1e-9), math.ceil(high / tick - 1e-9)
    return first * tick, max(last, first + 1) * tick, tick


def _ticks(low: float, high: float, tick: float) -> list[float]:
    return [round(low + tick * index, 10) for index in range(math.floor((high - low) / tick + 1e-9) + 1)]


def legend() -> Markup:
    """What the marks of the charts mean."""
    items = []
    for status, text in MARKS:
        drawing = tag("svg", join_group(status, [mark(status, 13, 13, 7)]), viewBox="0 0 26 26", aria_hidden="true")
        items.append(tag("li", drawing, text))
    line = tag("svg", tag("path", class_="best", d="M2 13H24"), viewBox="0 0 26 26", aria_hidden="true")
    items.append(tag("li", line, "best so far"))
    return tag("ul", *items, class_="legend")
