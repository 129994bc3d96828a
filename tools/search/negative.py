"""Negative evidence: what was tried and failed, direction by direction, and what passed but was put aside."""

from __future__ import annotations

from tools.search.budget import Section
from tools.search.context_next import Focus
from tools.search.context_parts import outcome
from tools.search.context_text import flat, names, one_line, summary
from tools.search.context_view import Attempt, View


def negative_section(view: View, now: Focus) -> Section:
    """Directions with failed attempts or that were abandoned: that of the step, then abandoned ones, then the latest."""
    section = Section("What failed", hint=f"{view.folder}/records/ (E*, L*)", unit="directions")
    groups: dict[str, list[Attempt]] = {}
    for attempt in view.attempts:
        if attempt.failed or _abandoned(attempt):
            groups.setdefault(attempt.direction, []).append(attempt)
    direction = str(now.opportunity["direction"]) if now.opportunity else ""

    def rank(name: str) -> tuple[bool, bool, int, str]:
        last = groups[name][-1].child["id"]
        return name == direction, any(map(_abandoned, groups[name])), len(last), last

    order = sorted(groups, key=rank, reverse=True)
    rows = [_direction(name, groups[name]) for name in order]
    if direction in groups:
        section.add(rows.pop(0), 92)
    section.add_rows(rows[:12], 79, 58)
    section.add_rows(rows[12:], 43, 2)
    return section


def _abandoned(attempt: Attempt) -> bool:
    return attempt.decision is not None and attempt.decision["decision"] == "abandon"


def _direction(name: str, attempts: list[Attempt]) -> str:
    """One direction in one line: how often it failed and how, and what that says of its mechanism."""
    failed = [attempt for attempt in attempts if attempt.failed]
    last = attempts[-1]
    abandoned = next((a.decision for a in attempts if a.decision and _abandoned(a)), None)
    counted = ", ".join(f"{a.child['id']} {a.audit['status']}" for a in failed[-4:] if a.audit)
    head = [f"abandoned in {abandoned['id']}"] if abandoned else []
    head += [f"{len(failed)} failed: {'... ' if len(failed) > 4 else ''}{counted}"] if failed else []
    text = f"- **{name}** ({'; '.join(head)})"
    told = [summary(last.opportunity["mechanism"] if last.opportunity else last.action["scope"])]
    if failed and failed[-1].audit and (failure := flat(failed[-1].audit["failure"])):
        told.append(f"First failure: {summary(failure)}")
    decision = abandoned or last.decision
    if decision and decision["falsified_by"]:
        told.append(f"Falsified by {decision['falsified_by']['audit']}: {one_line(decision['falsified_by']['measurement'])}")
    elif failed and not abandoned:
        told.append(f"Would be contradicted by: {summary(last.action['contradicted_by'])}")
    if decision:
        told.append(f"Finding ({decision['id']}): {summary(decision['interpretation'])}")
    return f"{text}: {' '.join(told)}"


def archive_section(view: View) -> Section:
    """Archived implementations, the latest first: what each was, and what would bring it back."""
    section = Section("Archived", hint=f"{view.folder}/records/L*.json", unit="implementations")
    decided = {a.decision["subject"]: a for a in view.attempts if a.decision and a.decision["decision"] == "archive"}
    rows = []
    for name in reversed(view.archive):
        attempt, audit = decided.get(name), view.audit_of(name)
        text = f"- {name}" + (f" {attempt.direction}" if attempt and attempt.child["id"] == name else "")
        if audit:
            text += f": {outcome(audit)}"
        if attempt and attempt.decision:
            text += f". Reconsider when: {one_line(attempt.decision['reconsider_when'] or 'not said')}"
            text += f". {summary(attempt.decision['interpretation'])}"
        taken = [str(record["id"]) for record in view.pending if name in record["applies_to"]]
        rows.append(text + (f" Pending for it: {names(taken)}" if taken else ""))
    section.add_rows(rows[:6], 75, 58)
    section.add_rows(rows[6:], 42, 3)
    return section
