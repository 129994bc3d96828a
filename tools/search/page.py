"""One HTML page of a run, and its lineage and progress as SVG files.

    write_report(Run.open(folder), folder / "report")

The page needs no network, loads nothing, and works without JavaScript; a policy in its head lets nothing run but its own
small script. Existing files of the same names are replaced: they follow from the records.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from tools.core.files import write_atomic
from tools.search import curve, graph, page_cells
from tools.search.page_attempt import LIMIT, attempts, outcome
from tools.search.page_data import Story, tell
from tools.search.page_html import Markup, anchor, badge, code_list, count, duration, esc, facts, fixed, join, tag, times
from tools.search.style import page_style, svg_file

ABLATIONS = {
    "history": "earlier attempts were withheld: only the incumbent and its latest audit were shown",
    "numerics": "the numerical requirements between entry points were withheld (the evaluator checked them all the same)",
    "evidence": "only outcomes and T were shown: no cells, dispatch, compiler or profiler evidence",
    "opportunities": "no opportunity records: actions were proposed from the rest of the state",
    "branches": "every action started from the incumbent: no other branch was continued, reactivated or merged",
}


def write_report(run: Any, folder: Path, limit: int = LIMIT) -> list[Path]:
    """Write report.html, lineage.svg and progress.svg of a run (tools.search.run.Run); return their paths.

    limit: about how many characters the attempts' records may take on the page; patches and texts are shortened to it.
    """
    story = tell(run)
    files = {"report.html": page(story, limit), "lineage.svg": lineage_svg(story), "progress.svg": progress_svg(story)}
    for name, text in files.items():
        write_atomic(folder / name, text)
    return [folder / name for name in files]


def lineage_svg(story: Story) -> str:
    """The lineage graph as a file of its own."""
    body, width, height = graph.draw(story, links=False)
    used = [status for status in graph.STATUSES if status in {step.status for step in story.steps}]
    row, reach = graph.legend_row([(status, status) for status in used], 16, height + 12)
    return svg_file(join([body, row]), max(width, reach), height + 32, graph.summary(story))


def progress_svg(story: Story) -> str:
    """Both progress charts side by side as a file of their own; one where tokens are unknown."""
    charts = [chart for chart in (curve.by_steps(story), curve.by_tokens(story)) if chart]
    body = join(tag("g", chart, transform=f"translate({curve.WIDTH * index:.0f} 0)") for index, chart in enumerate(charts))
    row, _ = graph.legend_row(curve.MARKS, 16, curve.HEIGHT + 8)
    title = esc(f"Progress of {story.manifest['name']}")
    return svg_file(join([body, row]), curve.WIDTH * len(charts), curve.HEIGHT + 28, title)


def page(story: Story, limit: int = LIMIT) -> str:
    """The whole page as text."""
    style = page_style()
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    title = esc(f"{story.manifest['name']}: search on {story.manifest['target']['name']}")
    sections = [
        ("lineage", "Lineage", _lineage(story)),
        ("progress", "Progress", _progress(story)),
        ("cells", "Cells", _cells(story)),
        ("attempts", "Attempts", attempts(story.steps, limit)),
        ("settings", "Settings", _settings(story)),
    ]
    links = tag("nav", *(tag("a", name, href=f"#{key}") for key, name, _ in sections), aria_label="Sections")
    body = [tag("section", tag("h2", name), content, id=key) for key, name, content in sections]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>"
        f"{tag('a', 'Skip to the attempts', href='#attempts', class_='skip')}"
        f"{tag('header', _header(story), links)}\n{tag('main', *body)}\n"
        f"<script>{script}</script></body></html>\n"
    )


def _digest(text: str) -> str:
    """A text's hash as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"


def _header(story: Story) -> Markup:
    state, manifest = story.state, story.manifest
    incumbent = story.step(state.incumbent)
    settings = manifest["settings"]
    used = [step for step in story.attempts if step.audits]
    efficiency = story.efficiency
    figures = [
        ("Speed-up", times(state.speedup), "product of the promoted gains"),
        (
            "Incumbent",
            anchor(incumbent.id) if incumbent else "none",
            f"T = {fixed(incumbent.audit['T'])}" if incumbent and incumbent.audit else "",
        ),
        (
            "Attempts",
            len(story.attempts),
            f"{sum(s.verified for s in used)} verified, {sum(s.promoted for s in used)} promoted",
        ),
        (
            "Without gain",
            f"{state.kappa} of {settings['kappa_max']}",
            "kappa: attempts in a row; the search stops at the limit",
        ),
        ("Tokens", count(story.tokens), _tokens_note(state)),
        ("Efficiency", "unavailable" if efficiency is None else f"{efficiency:.3g}", "(speed-up - 1) for each million tokens"),
    ]
    tiles = [tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note")) for name, value, note in figures]
    where = f"Stopped: {state.stop_reason}" if state.stop_reason else f"Next: {state.stage}"
    return join(
        [
            tag("p", "Optimization run", class_="kicker"),
            tag("h1", manifest["name"]),
            tag("p", f"Target {manifest['target']['name']}, contract {manifest['contract']}. ", tag("b", where), class_="lead"),
            tag("dl", *tiles, class_="tiles"),
        ]
    )


def _tokens_note(state: Any) -> str:
    if state.tokens_unavailable:
        known = f"at least {count(state.tokens)}: " if state.tokens else ""
        return f"{known}{state.tokens_unavailable}"
    return "none recorded" if state.tokens is None else "input and output of the agent's model"


def _lineage(story: Story) -> Markup:
    body, width, height = graph.draw(story, links=True)
    if not body:
        return tag("p", "The run has no implementation yet.", class_="note")
    drawing = tag(
        "svg", body, viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}",
        role="group", aria_label=Markup(graph.summary(story)),
    )  # fmt: skip
    rows = [
        tag(
            "tr",
            tag("th", anchor(step.id), scope="row"),
            tag("td", code_list([step.action["id"]]) if step.action else ""),
            tag("td", join([anchor(parent) for parent in step.parents], ", ")),
            tag("td", (step.opportunity or {}).get("direction", "")),
            tag("td", badge(step.status)),
            tag("td", outcome(step)),
            tag(
                "td",
                *(tag("p", tag("b", record["decision"]), f" {record['interpretation']}") for record in step.decisions),
                class_="wide",
            ),
        )
        for step in story.steps
    ]
    head = [tag("th", name, scope="col") for name in ("step", "action", "from", "direction", "status", "outcome", "decision")]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    held = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="The lineage as a table")
    return join(
        [
            tag("p", "One column a step. A vertex leads to its record.", class_="note"),
            tag("div", drawing, class_="scroll graph", tabindex="0", role="region", aria_label="Lineage graph"),
            tag("p", "", class_="told", id="told", aria_live="polite"),
            graph.legend(story),
            tag("details", tag("summary", "The same as a table, with decisions"), held, class_="more"),
        ]
    )


def _progress(story: Story) -> Markup:
    tokens = curve.by_tokens(story)
    charts = [_figure(curve.by_steps(story), "Speed-up over the root, over steps")]
    if tokens is not None:
        charts.append(_figure(tokens, "Speed-up over the root, over tokens"))
    missing = tag("p", "Over tokens: unavailable, since the run does not know the tokens of every step.", class_="note")
    rows = [
        tag(
            "tr",
            tag("th", anchor(step.id), scope="row"),
            *(tag("td", text, class_="n") for text in (
                step.number, fixed((step.audit or {}).get("T")), fixed((step.audit or {}).get("T_root")), times(step.speedup),
                times(step.best), count(step.tokens),
            )),
        )
        for step in story.steps
        if step.audits
    ]  # fmt: skip
    head = [
        tag("th", name, scope="col", class_="n")
        for name in ("", "step", "T", "T of the root", "root / it", "best so far", "tokens")
    ]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
    held = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Progress as a table")
    parts = [tag("div", *charts, class_="charts"), "" if tokens is not None else missing, curve.legend()]
    return join([*parts, tag("details", tag("summary", "The same as a table"), held, class_="more")])


def _figure(chart: Markup, label: str) -> Markup:
    size = f"0 0 {curve.WIDTH:.0f} {curve.HEIGHT:.0f}"
    return tag("figure", tag("svg", chart, viewBox=size, role="group", aria_label=label))


def _cells(story: Story) -> Markup:
    return join(
        [
            tag("h3", "The incumbent beside the root and the baselines"),
            page_cells.incumbent_table(story),
            tag("h3", "Attempts beside the root"),
            page_cells.heat_map(story),
        ]
    )


def _settings(story: Story) -> Markup:
    manifest, settings = story.manifest, story.manifest["settings"]
    taken = settings.get("ablations") or []
    ablations = [tag("li", tag("b", name), f": {ABLATIONS.get(name, '')}") for name in taken]
    limits = [(key, settings.get(key)) for key in ("max_audits", "max_tokens")]
    return join(
        [
            facts(
                [
                    ("Created", manifest.get("created")),
                    ("Target's config", manifest["target"].get("config") or "packaged"),
                    ("Stops after attempts without gain", settings["kappa_max"]),
                    *(
                        (name.replace("max_", "At most ").replace("audits", "audited attempts"), count(value))
                        for name, value in limits
                        if value
                    ),
                    ("At most", duration(settings["max_seconds"]) if settings.get("max_seconds") else None),
                    ("Lasted", duration(story.state.seconds())),
                    ("Open attempts at a time", settings.get("parallel")),
                    ("A direction may be abandoned after", f"{settings.get('abandon_after')} attempts that did not verify"),
                    ("Frontier", join([anchor(i) for i in story.state.frontier], ", ")),
                    ("Archive", join([anchor(i) for i in story.state.archive], ", ")),
                    ("Pending opportunities", code_list(story.state.pending)),
                    ("Specification", tag("code", str(manifest.get("specification_sha256"))[:16])),
                    ("Evaluator", tag("code", str(manifest.get("evaluator", {}).get("sha256"))[:16])),
                ]
            ),
            tag("h3", "Ablations"),
            tag("ul", *ablations) if ablations else tag("p", "None: nothing was withheld from the agent.", class_="note"),
            tag(
                "details",
                tag("summary", "The manifest"),
                tag("pre", json.dumps(manifest, indent=1), tabindex="0"),
                class_="more",
            ),
        ]
    )
