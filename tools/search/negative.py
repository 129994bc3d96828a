"""Negative evidence: what was tried and failed, direction by direction, and what passed but was put aside."""

from __future__ import annotations

import functools

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
        if attempt.failed or attempt.verdict == "abandon":
            groups.setdefault(attempt.direction, []).append(attempt)
    direction = str(now.opportunity["direction"]) if now.opportunity else ""
    latest = {name: place for place, name in enumerate(a.direction for a in view.attempts)}

    def rank(name: str) -> tuple[bool, bool, int]:
        return name == direction, any(attempt.verdict == "abandon" for attempt in groups[name]), latest[name]

    order = sorted(groups, key=rank, reverse=True)
    rows = [functools.partial(_direction, name, groups[name]) for name in order]
    if direction in groups:
        section.add(rows.pop(0), 92)
    section.add_rows(rows[:12], 79, 58)
    section.add_rows(rows[12:], 43, 2)
    return section


def _direction(name: str, attempts: list[Attempt]) -> str:
    """One direction in one line: how often it failed and how, and what that says of its mechanism."""
    failed = [attempt for attempt in attempts if attempt.failed]
    last = next((attempt for attempt in attempts if attempt.verdict == "abandon"), attempts[-1])
    head = [f"abandoned in {last.decision['id']}"] if last.verdict == "abandon" else []
    if failed:
        counted = ", ".join(f"{attempt.id} {attempt.audit['status']}" for attempt in failed[-4:])
        head.append(f"{len(failed)} failed: {'... ' if len(failed) > 4 else ''}{counted}")
    told = [f"{summary(last.opportunity['mechanism'] if last.opportunity else last.action['scope'])}"]
    if failed and (failure := flat(failed[-1].audit["failure"])):
        told.append(f"First failure: {summary(failure)}.")
    if refuted := last.decision["falsified_by"]:
        told.append(f"Falsified by {refuted['audit']}: {one_line(refuted['measurement'])}.")
    elif last.verdict != "abandon":
        told.append(f"Would be contradicted by: {summary(last.action['contradicted_by'])}.")
    told.append(f"Finding ({last.decision['id']}): {summary(last.decision['interpretation'])}")
    return f"- **{name}** ({'; '.join(head)}): {' '.join(told)}"


def archive_section(view: View) -> Section:
    """Archived implementations, the latest first: what each was, and what would bring it back."""
    section = Section("Archived", hint=f"{view.folder}/records/L*.json", unit="implementations")
    decided = {attempt.subject: attempt for attempt in view.attempts if attempt.verdict == "archive"}
    rows = [functools.partial(_archived, view, name, decided.get(name)) for name in reversed(view.archive)]
    section.add_rows(rows[:6], 75, 58)
    section.add_rows(rows[6:], 42, 3)
    return section


def _archived(view: View, name: str, attempt: Attempt | None) -> str:
    audit = view.audit_of(name)
    text = f"- {name}" + (f" {attempt.direction}" if attempt and attempt.id == name else "")
    if audit:
        text += f": {outcome(audit)}"
    if attempt:
        text += f". Reconsider when: {one_line(attempt.decision['reconsider_when'] or 'not said')}"
        text += f". {summary(attempt.decision['interpretation'])}"
    taken = [pending for pending in view.pending if name in view.parents_for(pending)]
    return text + (f" Pending for it: {names(taken)}" if taken else "")
