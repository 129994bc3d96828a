"""HTML text and numbers for a run's page. Records are untrusted text: everything that enters a page passes `esc`."""

from __future__ import annotations

import html
import math
from typing import Any

MISSING = "\N{EN DASH}"  # stands for a figure that does not exist
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


class Markup(str):
    """Text that is HTML already; `esc` and the functions here leave it alone."""


def esc(value: Any) -> Markup:
    """A value as HTML text, safe inside an element and inside a quoted attribute; a Markup stays as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape("" if value is None else str(value), quote=True))


def join(parts: Any, between: str = "") -> Markup:
    """The parts, escaped where they are not Markup, one after the other."""
    return Markup(between.join(esc(part) for part in parts))


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` stands for class, `data_x` for data-x; an attribute of None or False is left out."""
    text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{esc(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{text}>{join(children)}</{name}>")


def facts(pairs: list[tuple[str, Any]]) -> Markup:
    """A list of terms and values; pairs without a value (None, an empty text) are left out."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "", [], {})]
    return tag("dl", *rows, class_="facts") if rows else Markup("")


def code_list(values: Any) -> Markup | None:
    """Ids or short names, each set as code; None where there are none."""
    return join([tag("code", value) for value in values], ", ") if values else None


def anchor(identity: str, text: Any = None) -> Markup:
    """A link to the record of an implementation on the same page."""
    return tag("a", text or identity, href=f"#{identity}", class_="id")


def badge(status: str) -> Markup:
    """A status as a word with its mark; the word carries the meaning, the colour only helps."""
    return tag("span", status, class_=f"badge s-{slug(status)}")


def slug(text: str) -> str:
    """A text as a name of a CSS class."""
    return "".join(char if char.isascii() and char.isalnum() else "-" for char in text.lower())


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def fixed(value: Any, digits: int = 4) -> str:
    """A number with that many significant digits."""
    found = number(value)
    return MISSING if found is None else f"{found:.{digits}g}" if abs(found) < 1e6 else f"{found:,.0f}"


def microseconds(value: Any) -> str:
    """A time in microseconds, with as many decimals as a reader can use."""
    found = number(value)
    if found is None:
        return MISSING
    return f"{found:,.2f}" if found < 100 else f"{found:,.1f}" if found < 10000 else f"{found:,.0f}"


def times(value: Any) -> str:
    """A ratio of two times with two decimals and a multiplication sign."""
    found = number(value)
    return MISSING if found is None else f"{found:.2f}{TIMES}" if found < 100 else f"{found:.0f}{TIMES}"


def percent(value: Any, signed: bool = False) -> str:
    """A share or a change: 0.031 is 3.1 %. A true minus sign is set."""
    found = number(value)
    if found is None:
        return MISSING
    digits = f"{abs(100 * found):.1f}"
    sign = "" if float(digits) == 0 else MINUS if found < 0 else "+" if signed else ""
    return f"{sign}{digits} %"


def count(value: Any) -> str:
    """A whole number with groups of three; 'unavailable' where nobody knows it."""
    found = number(value)
    return "unavailable" if found is None else f"{found:,.0f}"


def duration(seconds: Any) -> str:
    """Seconds as a person says them: 41 s, 12 min, 3.4 h."""
    found = number(seconds)
    if found is None:
        return MISSING
    return f"{found:.0f} s" if found < 120 else f"{found / 60:.0f} min" if found < 7200 else f"{found / 3600:.1f} h"


def ratio(over: Any, under: Any) -> float | None:
    """over / under where both are positive numbers, else None."""
    top, bottom = number(over), number(under)
    return top / bottom if top is not None and bottom is not None and top > 0 and bottom > 0 else None
