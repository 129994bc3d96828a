"""How the context writes values: one line a thing, few digits, no hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_HASH = re.compile(r"^[0-9a-f]{32,}$")
SUMMARY_CHARS = 240


def one_line(text: str) -> str:
    """Text without line ends: a record's prose cannot open a heading or a table of its own."""
    return " ".join(text.split())


def summary(text: str, chars: int = SUMMARY_CHARS) -> str:
    """The beginning of a text in whole words, marked where something follows."""
    line = one_line(text)
    return line if len(line) <= chars else line[:chars].rsplit(" ", 1)[0] + " [...]"


def figure(value: float | None, digits: int = 4) -> str:
    """A number with a few significant digits; "-" for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def ratio(over: float | None, under: float | None) -> str:
    """over / under as "1.23x", "-" where one is missing."""
    return f"{over / under:.2f}x" if over and under else "-"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def flat(value: Any) -> str:
    """Any JSON value in one line: names and values, without empty ones and without hashes."""
    if isinstance(value, dict):
        parts = [f"{key} {text}" for key, item in value.items() if (text := flat(item))]
        return ", ".join(parts)
    if isinstance(value, list) and value:
        parts = [text for item in value if (text := flat(item))]
        mark = "; " if any(isinstance(item, dict) for item in value) else " " if isinstance(value[0], str) else "/"
        return mark.join(parts)
    if value is None or value is False or value in ("", []):
        return ""
    if isinstance(value, bool):
        return "yes"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else figure(value)
    text = one_line(str(value))
    return "" if _HASH.match(text) else text


def table(head: Iterable[str], align: str) -> str:
    """The two head lines of a Markdown table; align: one l or r a column."""
    marks = {"l": "---", "r": "---:"}
    return row(head) + "\n" + row(marks[letter] for letter in align)


def row(values: Iterable[str]) -> str:
    return "| " + " | ".join(value.replace("|", "/") for value in values) + " |"


def fenced(text: str, language: str) -> str:
    """A block of code that no line inside can end."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def names(values: Iterable[str], limit: int = 12) -> str:
    """Ids separated by commas, the last ones where there are many."""
    found = list(values)
    if not found:
        return "none"
    left = len(found) - limit
    return (f"{left} earlier ones, " if left > 0 else "") + ", ".join(found[-limit:])
