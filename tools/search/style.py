"""Colours of a run's pictures: one palette for light and one for dark, told apart also by colour-blind readers.

The status colours follow the palette of Okabe and Ito, made darker for a light ground. No colour stands alone: a status
has a shape and a word too, a figure in the heat map its number.
"""

from __future__ import annotations

from pathlib import Path

LIGHT = {
    "ground": "#fafaf8",
    "surface": "#ffffff",
    "raised": "#f2f3f1",
    "ink": "#1d2024",
    "muted": "#5b626b",
    "line": "#dcdfe2",
    "edge": "#969da5",
    "accent": "#0a5c99",
    "incumbent": "#0a67ad",
    "frontier": "#00795a",
    "verified": "#3d6f8f",
    "archived": "#8a6100",
    "failed": "#b94700",
    "abandoned": "#8f4079",
    "root": "#3b4148",
    "unaudited": "#767d85",
    "added": "#e3f3ea",
    "added-ink": "#0c5236",
    "removed": "#fbeae2",
    "removed-ink": "#8a3008",
}
DARK = {
    "ground": "#121417",
    "surface": "#191c20",
    "raised": "#22262b",
    "ink": "#e4e6e8",
    "muted": "#9ba3ab",
    "line": "#333940",
    "edge": "#69727b",
    "accent": "#78b9ee",
    "incumbent": "#66b5f2",
    "frontier": "#3cc79d",
    "verified": "#9cc3dc",
    "archived": "#e3ae3f",
    "failed": "#ff9457",
    "abandoned": "#dc97c4",
    "root": "#c6ccd2",
    "unaudited": "#88919a",
    "added": "#14301f",
    "added-ink": "#9fdcb9",
    "removed": "#3a2015",
    "removed-ink": "#ffba95",
}
# The heat map: classes from much slower to much faster, the least ratio of each, and its colours (orange to blue).
HEAT = [
    ("h0", 0.0, "#f0a76b", "#8f4710"),
    ("h1", 0.91, "#f7cfa8", "#643614"),
    ("h2", 0.97, "#fbe9d6", "#3d2a1a"),
    ("h3", 0.99, "#f4f4f2", "#22262b"),
    ("h4", 1.01, "#e2edf6", "#1b2e3f"),
    ("h5", 1.03, "#c5ddf0", "#1d4261"),
    ("h6", 1.10, "#9cc6e6", "#205a88"),
    ("h7", 1.25, "#6fabd9", "#24699f"),
]
_SVG = """text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
.muted{fill:var(--muted)}.small{font-size:10.5px}.strong{font-weight:600}.mono{font-family:ui-monospace,Menlo,Consolas,monospace}
.grid{stroke:var(--line);stroke-width:1;fill:none}.axis{stroke:var(--muted);stroke-width:1;fill:none}
.edge{stroke:var(--edge);stroke-width:1.4;fill:none}.edge.other{stroke-dasharray:5 3}
.edge.path{stroke:var(--incumbent);stroke-width:3.5}
.best{stroke:var(--incumbent);stroke-width:2.4;fill:none;stroke-linejoin:round}
.halo{paint-order:stroke;stroke:var(--surface);stroke-width:4px;stroke-linejoin:round}
.mark{stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round;fill:var(--surface)}
.ring{fill:none;stroke:var(--incumbent);stroke-width:1.6}"""
# Filled: kept for more work. Hollow: not (yet) kept.
_FILLED = ("incumbent", "frontier", "root")
_HOLLOW = ("verified", "archived", "failed", "abandoned", "unaudited")


def variables() -> str:
    """The palette as CSS variables, light by default, dark where the reader's system asks for it."""
    light = {**LIGHT, **{name: colour for name, _, colour, _ in HEAT}}
    dark = {**DARK, **{name: colour for name, _, _, colour in HEAT}}
    text = [f":root{{color-scheme:light dark;{_assign(light)}}}"]
    text.append(f"@media (prefers-color-scheme:dark){{:root{{{_assign(dark)}}}}}")
    return "\n".join(text)


def svg_style() -> str:
    """CSS of the drawings; needs `variables`."""
    rules = [_SVG]
    rules += [f".m-{name} .mark{{stroke:var(--{name});fill:var(--{name})}}" for name in _FILLED]
    rules += [f".m-{name} .mark{{stroke:var(--{name})}}" for name in _HOLLOW]
    rules.append(".m-failed .mark,.m-abandoned .mark{stroke-width:2.4}.m-unaudited .mark{stroke-dasharray:3 2}")
    return "\n".join(rules)


def page_style() -> str:
    """CSS of the page, drawings included."""
    heat = "\n".join(f".{name}{{background:var(--{name})}}" for name, *_ in HEAT)
    badges = "\n".join(f".s-{name}{{color:var(--{name})}}" for name in (*_FILLED, *_HOLLOW))
    own = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return "\n".join([variables(), svg_style(), own, heat, badges])


def svg_file(body: str, width: float, height: float, title: str) -> str:
    """A drawing as a file of its own: carries its style, light and dark, and a ground. `title` is escaped already."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img"><title>{title}</title><style>{variables()}\n{svg_style()}</style>'
        f'<rect width="100%" height="100%" fill="var(--surface)"/>{body}</svg>\n'
    )


def heat_class(value: float) -> str:
    """Class of a heat map's field: how many times as fast as the reference."""
    return [name for name, least, *_ in HEAT if value >= least][-1]


def _assign(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
