"""The sections of the context that describe the run and the step: state, objective, numerics, opportunities, attempt, source.

Worths (see budget.Block): 90 and above is needed to act at all, 60 to 90 helps to act well, below 60 is background.
"""

from __future__ import annotations

import functools
from typing import Any

from tools.search import regions
from tools.search.budget import Section
from tools.search.context_next import Focus
from tools.search.context_text import fenced, figure, flat, names, one_line, percent, ratio, summary
from tools.search.context_view import Attempt, Record, View
from tools.search.log import now_text


def state_section(view: View) -> Section:
    """Incumbent, kappa, branches and what the run has used."""
    state, settings = view.state, view.settings
    section = Section("State", hint=f"python tools/ir.py status --run {view.folder}")
    if view.incumbent is None:
        incumbent = "none: the root has no audit that starts the search"
    else:
        audit = view.audit_of(view.incumbent)
        time = figure(audit["T"] if audit else None)
        incumbent = f"{view.incumbent}, T {time}, {state.speedup:.3f}x the root's speed over all promotions"
    section.add(f"- incumbent: {incumbent}", 96)
    section.add(f"- kappa {state.kappa} of {settings['kappa_max']} (audits since the last promotion; the run stops there)", 95)
    if not view.withheld & {"branches", "history"}:
        section.add(f"- frontier: {names(_with_time(view, name) for name in view.parents)}", 92)
        section.add(f"- archive: {names(view.archive)}", 70)
    section.add(f"- used: {_used(view)}", 80)
    if view.waiting:
        section.add(f"- pending, but none of their parents is retained now: {names(view.waiting)}", 60)
    if view.incumbent is None and (audit := view.audit_of(str(view.run.manifest["root"]))):
        section.add(f"- the root, so far: {'; '.join(filter(None, [outcome(audit), flat(audit['failure'])]))}", 94)
    return section


def _with_time(view: View, name: str) -> str:
    audit = view.audit_of(name)
    return f"{name} ({ratio(audit['T_root'], audit['T'])})" if audit else name


def _used(view: View) -> str:
    """Audits, tokens and time against their limits."""
    state, settings = view.state, view.settings

    def of(limit: int | None) -> str:
        return f" of {limit:,}" if limit is not None else ""

    tokens = "tokens not reported" if state.tokens is None else f"{state.tokens:,}{of(settings['max_tokens'])} tokens"
    if state.tokens_unavailable:
        tokens += f" (in part unavailable: {summary(state.tokens_unavailable)})"
    parts = [f"{state.audited}{of(settings['max_audits'])} audits", tokens]
    if settings["max_seconds"] is not None:
        parts.append(f"{state.seconds(now_text()):,.0f}{of(settings['max_seconds'])} s")
    return ", ".join(parts)


def objective_section(view: View) -> Section:
    """What counts, and what no candidate may exceed."""
    config, limits = view.config, view.config["limits"]
    section = Section("Objective and limits", hint=f"{view.folder}/config.json")
    about = view.run.manifest
    section.add(
        f"- target {about['target']['name']}, contract {about['contract']}: T = weighted sum of cold latencies "
        f"({config['objective']['kind']}), lower is better; promoted: verified, complete, admissible and beyond noise",
        84,
    )
    section.add(f"- admissible: every cell at most {limits['max_slowdown']:.2f} times its latency under the root", 83)
    section.add(f"- limits: {flat(limits)}", 45)
    section.add(f"- workloads: {flat(config['workloads'])}", 55)
    section.add(f"- build: {flat(config['build'])}", 50)
    section.add(f"- other files of the kernel, which no action changes: {', '.join(config['kernel']['files'])}", 54)
    return section


def numerics_section(view: View, now: Focus) -> Section:
    """The contract's table and what the parent's record requires."""
    section = Section("Numerical requirements", hint=f"{view.folder}/config.json, contract", unit="parts")
    if "numerics" in view.withheld:
        return section
    contract = view.config["contract"]
    parent = view.record(now.parent) if now.parent else {}
    steps = [f"{name}: {one_line(str(text))}" for name, text in contract.get("steps", {}).items()]
    for line in map(one_line, parent.get("numerical_requirements", "").splitlines()):
        if line and line not in steps:  # a root's requirements repeat the contract's table
            section.add(f"- {now.parent}: {line}", 86)
    if shared := parent.get("shared_regions"):
        section.add(f"- shared by the entry points (an edit there is joint): {one_line(', '.join(shared))}", 86)
    rest = {key: value for key, value in contract.items() if key != "steps"}
    section.add("\n- ".join([f"- contract: {flat(rest)}", *steps]), 78)
    return section


def opportunities_section(view: View, now: Focus) -> Section:
    """Pending opportunities: the one at hand, then by the share of T that they can move, then the oldest."""
    section = Section("Open opportunities", hint=f"{view.folder}/records/O*.json", unit="opportunities")
    chosen = [now.opportunity["id"]] if now.opportunity and now.opportunity["id"] in view.state.pending else []
    order = chosen + [name for name in view.pending if name not in chosen]
    section.add_rows([functools.partial(_opportunity, view, name) for name in order], 90, 52)
    return section


def _opportunity(view: View, name: str) -> str:
    record = view.read(name)
    share = f"{percent(record['expected_share'])} of T" if record["expected_share"] is not None else "share unknown"
    evidence = [name for name in record["evidence"] if view.known(name)]
    merge = ("merge of all of " if record["merge"] else "applies to ") + names(view.parents_for(name))
    origin = f", follows from {record['origin']}" if record["origin"] and view.known(record["origin"]) else ""
    return (
        f"- **{record['id']} {record['direction']}** ({share}; {', '.join(record['workloads'])}; {merge}; "
        f"evidence {names(evidence)}{origin}): {one_line(record['mechanism'])}"
    )


def attempt_section(view: View, now: Focus) -> Section:
    """The attempt that is open: what was said before it, what the evaluator found, and the edit."""
    section = Section("The open attempt", hint=f"{view.folder}/records/", unit="parts", independent=True)
    if now.attempt is None:
        return section
    action, audit = now.attempt.action, now.attempt.audit if now.attempt.audited else None
    made = f"{action['id']}: {', '.join(action['parents'])} -> {action['child']}, {action['form']}"
    taken = f", {action['opportunity']} {now.attempt.direction}" if now.attempt.opportunity else ""
    section.add(f"- {made}{taken}; workloads {', '.join(action['workloads'])}; scope: {one_line(action['scope'])}", 94)
    section.add(f"- expected: {one_line(action['expected_effect'])}", 93)
    section.add(f"- contradicted by: {one_line(action['contradicted_by'])}", 93)
    if opportunity := now.attempt.opportunity:
        section.add(f"- mechanism: {one_line(opportunity['mechanism'])}", 82)
    if audit:
        section.add(f"- {outcome(audit)}", 98)
        if failure := flat(audit["failure"]):
            section.add(f"- first failure: {failure}", 97)
        if code := flat(audit["code"]):
            section.add(f"- code against {action['parents'][0]}: {code}", 75)
        for note in ("root", "incumbent"):
            if audit["cells"] and not any(cell[f"{note}_us"] for cell in audit["cells"]):
                section.add(f"- the {note} was not measured beside it", 74)
    for name, text in action.get("numerical_risks", {}).items():
        section.add(f"- risk, {name.replace('_', ' ')}: {one_line(text)}", 73)
    section.add(fenced(action["patch"].rstrip("\n"), "diff"), 85)
    return section


def merge_section(view: View, now: Focus) -> Section:
    """For a merge: what the parents besides the first changed, each against its own first parent."""
    section = Section("What the other parents changed", hint=f"{view.folder}/records/A*.json", unit="parts", independent=True)
    if now.step != "act" or now.opportunity is None or not now.opportunity["merge"]:
        return section
    for name in now.opportunity["applies_to"]:
        action = view.record(name)["action"]
        if name == now.parent or action is None:
            continue
        edit, audit = view.record(action), view.audit_of(name)
        told = f"; {outcome(audit)}" if audit else ""
        section.add(f"- {name} ({action}, {edit['form']}, from {edit['parents'][0]}): {one_line(edit['scope'])}{told}", 89)
        section.add(fenced(edit["patch"].rstrip("\n"), "diff"), 79)
    return section


def outcome(audit: Record) -> str:
    """What an audit established, in one line."""
    text = f"{audit['id']}: {audit['status']}"
    if audit["T"] is None:
        return text
    text += f", T {figure(audit['T'])}, {ratio(audit['T_root'], audit['T'])} the root's speed"
    if audit["incumbent"] and audit["T_incumbent"]:
        text += f", {ratio(audit['T_incumbent'], audit['T'])} that of {audit['incumbent']}"
    if audit["gain_interval"]:
        low, high = audit["gain_interval"]
        text += f" (gain {percent(audit['gain'])}, {percent(low)} to {percent(high)})"
    verdicts = [("promoted" if audit["promoted"] else "not promoted") if audit["action"] else ""]
    verdicts += ["not admissible" if audit["admissible"] is False else "", "" if audit["complete"] else "not complete"]
    return "; ".join([text, *(verdict for verdict in verdicts if verdict)])


def source_section(view: View, now: Focus) -> Section:
    """The parent's source: an outline, the declared regions, those that the step is about, then the rest, in file order."""
    section = Section("", unit="regions", independent=True)
    if now.parent is None:
        return section
    record = view.record(now.parent)
    text = view.source(now.parent)
    found = regions.scan(text)
    section.title = f"Source of {now.parent} ({text.count(chr(10))} lines)"
    section.hint = f"{view.folder}/sources/{record['source']['sha256'][:12]}*"
    section.add(f"Regions:\n{regions.outline(found)}", 76, place=-1)
    if "numerics" in view.withheld:  # the contract's table stands there
        found = [region for region in found if region.kind != "opening"]
    about, words = _about(view, now)
    for rank, (region, order) in enumerate(regions.ranked(found, record["shared_regions"], about, words)):
        what = region.kind if region.name == "between" else f"{region.kind} {region.name}"
        lines = f"Lines {region.first} to {region.last}" if region.last > region.first else f"Line {region.first}"
        worth = {0: 68.0, 1: 67.0, 2: 63.0, 3: 48.0, 4: 44.0}[order] - rank / 1000
        section.add(f"{lines}, {what}:\n{fenced(region.text, record['source']['suffix'])}", worth, place=region.first)
    return section


def _about(view: View, now: Focus) -> tuple[list[str], str]:
    """Entry points that the step is about, and prose that may name functions."""
    told: list[dict[str, Any]] = [record for record in (now.opportunity, now.attempt.action if now.attempt else None) if record]
    entries: set[str] = set()
    for record in told:
        for workload in record["workloads"]:
            entries |= {entry for entry in ("prefill", "extend", "decode") if entry in workload.lower()}
            entries |= {"extend"} if workload.lower().startswith("update") else set()
    prose = [str(record.get(key, "")) for record in told for key in ("mechanism", "scope", "regions", "direction")]
    return sorted(entries), "\n".join(prose)


def steps_section(view: View) -> Section:
    """What the last attempts were decided on, newest first."""
    section = Section("Last decisions", hint=f"{view.folder}/records/L*.json", unit="decisions")
    rows = [functools.partial(_step, attempt) for attempt in reversed(view.attempts)]
    section.add_rows(rows[:5], 81, 73)
    section.add_rows(rows[5:], 50, 1)
    return section


def _step(attempt: Attempt) -> str:
    decision = f"{attempt.verdict} {attempt.subject} ({attempt.decision['id']})"
    told = summary(attempt.decision["interpretation"])
    return f"- {attempt.id} {attempt.direction}: {outcome(attempt.audit)} | {decision}: {told}"
