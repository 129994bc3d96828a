"""The record of one attempt as HTML: opportunity, action, patch, what was predicted and measured, failure and decision."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any

from tools.search.page_data import Record, Step
from tools.search.page_html import (
    Markup,
    anchor,
    badge,
    code_list,
    count,
    duration,
    esc,
    facts,
    fixed,
    join,
    number,
    percent,
    ratio,
    tag,
    times,
)

RISKS = {
    "reduction_order": "Reduction order",
    "scaling_and_masking": "Scaling and masking",
    "instructions_constants_subnormals": "Instructions, constants, subnormals",
    "conversion_and_rescale_order": "Conversions and order of rescaling",
}
_PHASES = {"prefill": "full", "decode": "decode"}  # entry point -> phase of the cells that it serves
_DIFF = {"+": "ins", "-": "del", "@": "b"}


@dataclass(frozen=True)
class Room:
    """How many characters a page shows of a patch, of a block of data and of a text; a note says what is left out."""

    patch: int
    data: int
    text: int


ROOMS = (Room(24_000, 8000, 4000), Room(6000, 2000, 2500), Room(2000, 600, 1500), Room(1000, 300, 600), Room(400, 150, 200))
LIMIT = 2_000_000  # characters of all attempts on a page, about; a page that is published takes less


def attempts(steps: list[Step], limit: int = LIMIT) -> Markup:
    """The records of all steps, with the most room for each that keeps all of them near `limit` characters."""
    steps = _without_inherited(steps)
    sample = steps[:: max(1, len(steps) // 16)]
    for room in ROOMS:
        if sum(len(attempt(step, room)) for step in sample) * len(steps) <= limit * len(sample):
            break
    return tag("div", *(attempt(step, room) for step in steps), class_="attempts")


def _without_inherited(steps: list[Step]) -> list[Step]:
    """Steps whose implementations state only what their first parent does not state in the same words."""
    known = {step.id: step.implementation for step in steps}
    told = []
    for step in steps:
        parent = known.get(step.parents[0], {}) if step.parents else {}
        same = [key for key in ("dispatch", "numerical_requirements") if step.implementation.get(key) == parent.get(key)]
        told.append(replace(step, implementation={**step.implementation, **dict.fromkeys(same, f"as {parent.get('id')}'s")}))
    return told


def attempt(step: Step, room: Room) -> Markup:
    """One step as a <details>; closed it is one line."""
    patch = str((step.action or {}).get("patch") or "")
    records = ("implementation", "action", "opportunity", "audits", "decisions")
    step = replace(step, **{name: _trimmed(getattr(step, name), room.text) for name in records})
    opportunity = step.opportunity or {}
    title = tag(
        "summary",
        tag("span", step.number, class_="no"),
        tag("span", step.id, class_="id"),
        tag("span", opportunity.get("direction") or ("root" if step.number == 0 else "no opportunity"), class_="name"),
        badge(step.status),
        tag("span", outcome(step), class_="outcome"),
        tag("span", step.decision, class_="decision"),
    )
    parts = [_opportunity(opportunity), _action(step), _comparison(step), _patch(step, patch, room.patch)]
    parts += [_audit(audit, room.data, audit is step.audit and step.action is not None) for audit in step.audits]
    parts += [_decision(record) for record in step.decisions]
    return tag("details", title, tag("div", *parts, class_="body"), id=step.id, class_="attempt", data_status=step.status)


def outcome(step: Step) -> str:
    """What came out of a step, in a few words."""
    audit = step.audit
    if audit is None:
        return "not evaluated"
    if not step.verified:
        return str(audit.get("status"))
    if step.number == 0:
        return f"T = {fixed(audit.get('T'))}"
    ending = ", promoted" if step.promoted else "" if audit.get("admissible") is not False else ", not admissible"
    return f"{times(step.speedup)} the root{ending}"


def _section(title: str, *children: Any, class_: str | None = None) -> Markup:
    return tag("section", tag("h4", title), *children, class_=class_)


def _opportunity(record: Record) -> Markup:
    if not record:
        return Markup("")
    return _section(
        f"Opportunity {record['id']}",
        _text(record.get("mechanism")),
        facts(
            [
                ("Direction", code_list([record["direction"]])),
                ("Workloads", code_list(record.get("workloads"))),
                ("Evidence", code_list(record.get("evidence"))),
                ("Applies to", _links(record.get("applies_to"))),
                ("Merge", "yes" if record.get("merge") else None),
                ("Proposed by", code_list([record["origin"]]) if record.get("origin") else None),
            ]
        ),
    )


def _action(step: Step) -> Markup:
    action, implementation = step.action, step.implementation
    numerics = ("Numerical requirements", _text(implementation.get("numerical_requirements")))
    dispatch = ("Dispatch", _text(implementation.get("dispatch")))
    source = ("Source", tag("code", implementation.get("source", {}).get("sha256", "")[:16]))
    if action is None:
        return _section(f"Implementation {step.id}", facts([dispatch, numerics, source]))
    risks = action.get("numerical_risks") or {}
    known = [(RISKS.get(key, key), _text(risks[key])) for key in [*RISKS, *sorted(set(risks) - set(RISKS))] if key in risks]
    return _section(
        f"Action {action['id']}",
        facts(
            [
                ("From", _links(action.get("parents"))),
                ("Form", str(action.get("form", "")).replace("_", " ")),
                ("Scope", _text(action.get("scope"))),
                ("Workloads", code_list(action.get("workloads"))),
                ("Variants", _listed(action.get("variants"))),
                ("Regions", _listed(action.get("regions"))),
                dispatch,
                numerics,
                source,
            ]
        ),
        tag("h5", "Numerical risks") if known else "",
        facts(known),
    )


def _comparison(step: Step) -> Markup:
    """What the action promised beside what its last audit measured."""
    action, audit = step.action, step.audit
    if action is None:
        return Markup("")
    share = number((step.opportunity or {}).get("expected_share"))
    predicted = facts(
        [
            ("Expected effect", _text(action.get("expected_effect"))),
            ("Share of T within reach", None if share is None else percent(share)),
            ("Would be contradicted by", _text(action.get("contradicted_by"))),
        ]
    )
    measured = tag("p", "Not evaluated yet.") if audit is None else facts(_measured(step, action, audit))
    columns = tag("div", tag("h5", "Predicted"), predicted), tag("div", tag("h5", "Measured"), measured)
    return _section("Prediction and measurement", tag("div", *columns, class_="pair"))


def _measured(step: Step, action: Record, audit: Record) -> list[tuple[str, Any]]:
    if not step.verified:
        return [("Outcome", badge(str(audit.get("status")))), ("First failure", _failure(audit.get("failure")))]
    interval = audit.get("gain_interval")
    reach = f" (interval {percent(interval[0])} to {percent(interval[1])})" if interval else ""
    gain = None if number(audit.get("gain")) is None else f"{percent(audit['gain'])} lower{reach}"
    targeted, others = _by_target(action, audit)
    falsified = [record["falsified_by"] for record in step.decisions if record.get("falsified_by")]
    return [
        ("T", f"{fixed(audit.get('T'))}; root {fixed(audit.get('T_root'))}, incumbent {fixed(audit.get('T_incumbent'))}"),
        ("Compared with", anchor(audit["incumbent"]) if audit.get("incumbent") else None),
        ("T against the incumbent", gain),
        ("Targeted cells", targeted),
        ("Other cells", others),
        (
            "Admissible",
            None if audit.get("admissible") is None else "yes" if audit["admissible"] else "no: a cell exceeds its limit",
        ),
        ("Promoted", "yes" if step.promoted else "no"),
        ("Contradicted", join([f"{item['audit']}: {item['measurement']}" for item in falsified], "; ") or None),
    ]


def _by_target(action: Record, audit: Record) -> tuple[str | None, str | None]:
    """Speed against the incumbent of the same evaluation: the cells that the action names, and the others."""
    named = set(action.get("workloads") or ())
    phases = {_PHASES.get(name) for name in named}
    groups: dict[bool, list[float]] = {True: [], False: []}
    for cell in audit.get("cells") or ():
        found = ratio(cell.get("incumbent_us"), cell.get("us"))
        if found is not None:
            groups[cell["name"] in named or cell.get("phase") in phases].append(found)

    def show(values: list[float]) -> str | None:
        if not values:
            return None
        return f"{times(median(values))} the incumbent (median of {len(values)}; {times(min(values))} to {times(max(values))})"

    return show(groups[True]), show(groups[False])


def _patch(step: Step, patch: str, limit: int) -> Markup:
    if not patch:
        return Markup("")
    shown, cut = patch, 0
    if len(patch) > limit:
        shown = patch[: patch.rfind("\n", 0, limit) + 1] or patch[:limit]
        cut = len(patch.splitlines()) - len(shown.splitlines())
    lines = patch.splitlines()
    added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
    removed = sum(line.startswith("-") and not line.startswith("---") for line in lines)
    note = (
        tag("p", f"{cut} more lines are left out here; the record {step.action['id']} holds all.", class_="note")
        if cut and step.action
        else ""
    )
    title = tag("summary", "Patch ", tag("span", f"{added} added, {removed} removed lines", class_="muted"))
    block = tag("pre", tag("code", _coloured(shown.splitlines())), tabindex="0")
    return tag("details", title, block, note, class_="patch")


def _coloured(lines: Iterable[str]) -> Markup:
    """A diff with one element for each run of lines of a kind; the signs stay, so that colour is not needed."""
    parts = []
    for kind, group in groupby(lines, key=lambda line: "" if line.startswith(("+++", "---")) else line[:1]):
        text = "\n".join(group) + "\n"
        parts.append(tag(_DIFF[kind], text) if kind in _DIFF else esc(text))
    return join(parts)


def _audit(audit: Record, limit: int, compared: bool) -> Markup:
    """An audit's own facts; what stands in the comparison already is not said again."""
    code = audit.get("code") or {}
    environment = audit.get("environment") or {}
    details = [
        (title, audit.get(key))
        for title, key in (("Compiler", "resources"), ("Dispatch", "dispatch"), ("Counters", "counters"))
    ]
    return _section(
        f"Audit {audit['id']}",
        facts(
            [
                ("Status", badge(str(audit.get("status")))),
                ("First failure", None if compared else _failure(audit.get("failure"))),
                ("Code against the parent", ", ".join(f"{name} {word}" for name, word in code.items())),
                ("Took", duration(audit.get("seconds"))),
                ("Machine", environment.get("machine")),
                ("Job", audit.get("job")),
                ("Report", tag("code", (audit.get("report") or {}).get("sha256", "")[:16])),
                ("T", None if compared or number(audit.get("T")) is None else fixed(audit["T"])),
            ]
        ),
        *(tag("details", tag("summary", title), _json(value, limit), class_="patch") for title, value in details if value),
    )


def _failure(failure: Any) -> Markup | None:
    return _json(failure) if failure else None


def _json(value: Any, limit: int | None = None) -> Markup:
    """Data as text: one line for each member of a list or an object."""
    if isinstance(value, dict):
        text = "\n".join(f"{key}: {_compact(item)}" for key, item in value.items())
    else:
        text = "\n".join(_compact(item) for item in value) if isinstance(value, list) else str(value)
    return tag("pre", _shorten(text, limit or len(text)), tabindex="0", class_="data")


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _decision(record: Record) -> Markup:
    falsified = record.get("falsified_by")
    return _section(
        f"Decision {record['id']}: {record['decision']} {record['subject']}",
        _text(record.get("interpretation")),
        facts(
            [
                ("Follow-ups", code_list(record.get("follow_ups"))),
                ("Reactivates", _links(record.get("reactivate"))),
                ("Evidence", code_list(record.get("evidence"))),
                ("Falsified by", f"{falsified['audit']}: {falsified['measurement']}" if falsified else None),
                ("Reconsider when", _text(record.get("reconsider_when"))),
            ]
        ),
        class_="decided",
    )


def _text(value: Any) -> Markup:
    return tag("p", value) if value else Markup("")


def _trimmed(value: Any, limit: int) -> Any:
    """A record with every text in it shortened, but for its cells, which the page's tables show."""
    if isinstance(value, str):
        return _shorten(value, limit)
    if isinstance(value, dict):
        return {key: item if key == "cells" else _trimmed(item, limit) for key, item in value.items()}
    return [_trimmed(item, limit) for item in value] if isinstance(value, list) else value


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({count(len(text) - limit)} more characters in the record)"


def _listed(values: Any) -> Markup | None:
    return tag("ul", *(tag("li", value) for value in values)) if values else None


def _links(values: Any) -> Markup | None:
    return join([anchor(str(value)) for value in values], ", ") if values else None
