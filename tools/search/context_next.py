"""The first thing the context says: the stage, the command to run now, what to write into its file, the rules that bite."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from tools.core.errors import UserError
from tools.search.acts import RISKS
from tools.search.budget import Section
from tools.search.context_text import names, one_line
from tools.search.context_view import Attempt, Record, View
from tools.search.log import now_text


@dataclass(frozen=True)
class Focus:
    """What the step at hand is about."""

    step: str  # audit-root | propose | act | audit | decide | stopped
    stop: str | None  # why the search takes no further attempt
    parent: str | None  # the implementation to start from, or that the open attempt started from
    opportunity: Record | None
    attempt: Attempt | None  # the open one

    @property
    def subject(self) -> str | None:
        """The implementation whose figures matter most: a measured child that is to be decided on, else the parent."""
        if self.step == "decide" and self.attempt and not self.attempt.failed:
            return str(self.attempt.id)
        return self.parent


def focus(view: View, parent: str | None, opportunity: str | None) -> Focus:
    """The step that the state asks for; `parent` and `opportunity` choose where it leaves a choice.

    UserError where a chosen one does not exist or cannot be used.
    """
    chosen = _chosen_opportunity(view, opportunity)
    if parent is not None and parent not in {*view.parents, *view.archive}:
        view.record(parent)
        raise UserError(f"--parent {parent}: is no parent that an action may have now: {names([*view.parents, *view.archive])}")
    attempt, stop = view.open_attempt, view.state.stop_at(now_text())
    if view.incumbent is None:
        step = "audit-root"
    elif attempt is not None:
        step = "decide" if attempt.audited else "audit"
    elif stop and not stop.startswith("no-opportunity"):  # that one is lifted by a proposal
        step = "stopped"
    elif "opportunities" in view.withheld or view.pending:
        step = "act"
    else:
        step = "propose"
    if attempt is not None and parent is None and chosen is None:
        return Focus(step, stop, str(attempt.action["parents"][0]), attempt.opportunity, attempt)
    if step == "act" and chosen is None:
        found = next((name for name in view.pending if parent is None or parent in view.parents_for(name)), None)
        chosen = view.read(found) if found else None
    if parent is None and chosen is not None:
        parent = next(iter(view.parents_for(chosen["id"])), None)
    return Focus(step, stop, parent or view.incumbent or str(view.run.manifest["root"]), chosen, attempt)


def _chosen_opportunity(view: View, identity: str | None) -> Record | None:
    if identity is None:
        return None
    if "opportunities" in view.withheld:
        raise UserError(f"--opportunity {identity}: this run goes without opportunities")
    record = view.record(identity)
    if identity not in view.state.pending:
        raise UserError(f"--opportunity {identity}: is not pending (consumed or withdrawn); pending: {names(view.pending)}")
    return record


def next_section(view: View, now: Focus) -> Section:
    """Stage and command at any budget; then the rules, then what the command's file holds."""
    section = Section("Next step", hint="python tools/ir.py <command> --help", unit="parts")
    command, meaning = _command(view, now)
    stage = "stopped" if now.step == "stopped" else view.state.stage
    text = f"Run {one_line(str(view.run.manifest['name']))}, stage {stage}: {meaning}\n`{command}`"
    section.add(text, 1000, always=True)
    if rules := _rules(view, now):
        section.add("Rules that bite now:\n" + "\n".join(f"- {rule}" for rule in rules), 100)
    if body := _body(view, now):
        lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in body.items())
        section.add(f"The file holds (fill in):\n```json\n{{\n{lines}\n}}\n```", 88)
    return section


def _command(view: View, now: Focus) -> tuple[str, str]:
    """The command and, in a few words, what it is for."""
    call, run = "python tools/ir.py", f"--run {shlex.quote(view.folder)}"

    def draft(name: str) -> str:
        return shlex.quote(f"{view.folder}/work/{name}")

    suffix = view.record(now.parent)["source"]["suffix"] if now.parent else "cpp"
    if now.step == "stopped":
        return f"{call} report {run}", f"{now.stop}. Make the report; the incumbent is {view.incumbent}."
    if now.step == "audit-root":
        return f"{call} audit {run}", "measure the root; it must be verified, complete and admissible before the search starts."
    if now.step == "propose":
        why = "no pending opportunity has a retained parent" if view.waiting else "no opportunity is pending"
        why += ": write one from the evidence."
        return f"{call} propose {run} --file {draft('opportunity.json')}", why
    if now.step == "act":
        about = f"take {now.opportunity['id']} from {now.parent}" if now.opportunity else f"change {now.parent}"
        files = f"--file {draft('action.json')} --source {draft(f'child.{suffix}')}"
        return f"{call} act {run} {files}", f"{about}: one change, the whole source."
    assert now.attempt is not None
    child = now.attempt.id
    if now.step == "audit":
        return f"{call} audit {run} --implementation {child}", f"measure {child} ({now.attempt.action['id']})."
    audit = f"{now.attempt.audit['id']} of {child} ({now.attempt.audit['status']})"
    return f"{call} decide {run} --file {draft('decision.json')}", f"decide what follows from {audit}."


def _rules(view: View, now: Focus) -> list[str]:
    """Those rules of the state machine that the step may run into, with the ids they are about."""
    if now.step == "propose":
        return [
            f"applies_to: verified implementations, retained: {names([*view.parents, *view.archive])}",
            "evidence: audits, failed ones too; an abandoned direction needs new evidence",
        ]
    if now.step == "act":
        return _rules_to_act(view, now)
    if now.step == "audit":
        return [
            "one audit an implementation; a second one only after REFUSED or TIMEOUT",
            "the evaluator measures: run nothing else on the machine meanwhile",
        ]
    if now.step == "decide":
        return _rules_to_decide(view, now)
    return []


def _rules_to_act(view: View, now: Focus) -> list[str]:
    rules = []
    if now.opportunity and now.opportunity["merge"]:
        rules.append(f"{now.opportunity['id']} is a merge: parents are {', '.join(now.opportunity['applies_to'])}, all of them")
    elif view.withheld & {"branches", "history"}:
        rules.append(f"the parent is the incumbent, {view.incumbent}")
    else:
        usable = view.parents_for(now.opportunity["id"]) if now.opportunity else view.parents
        rules.append(f"one parent, of {names(usable)}")
    rules.append("form: decode_only leaves the code of prefill and extend as it is, full_sequence_only that of decode")
    renewed = (
        "dispatch or shared_regions" if "numerics" in view.withheld else "dispatch, shared_regions or numerical_requirements"
    )
    rules.append(f"implementation: what the child changes of its parent's {renewed}")
    rules.append("a source that the run has seen already is refused; an opportunity is used once")
    return rules


def _rules_to_decide(view: View, now: Focus) -> list[str]:
    assert now.attempt is not None
    attempt, audit, after = now.attempt, now.attempt.audit, int(view.settings["abandon_after"])
    child, parents = attempt.id, ", ".join(attempt.action["parents"])
    direction = [a for a in [*view.attempts, attempt] if a.direction == attempt.direction and a.failed]
    counted = f" ({len(direction)} so far)" if "history" not in view.withheld else ""
    rules = []
    if audit["status"] in ("REFUSED", "TIMEOUT"):
        rules.append(f"after {audit['status']} the same source may be audited once more before the decision")
    if audit["verified"]:
        rules.append(f"subject: {child}")
    else:
        rules.append(f"{child} is not verified: the subject is a parent of it ({parents}), unless the direction is abandoned")
    if "branches" in view.withheld:
        rules.append(f"one branch: only the incumbent, {view.incumbent}, is continued")
    if "opportunities" not in view.withheld:
        rules.append(
            "continue needs a follow-up that applies to the subject: the id of a pending opportunity, or a new one's body"
        )
        if "branches" not in view.withheld:
            rules.append("merge needs a follow-up with merge = true that names the subject and one of another branch")
    rules.append("archive needs reconsider_when: what would bring it back")
    needed = f"{after} unverified audits of {attempt.direction}{counted}"
    rules.append(f"abandon needs {needed}, or falsified_by with an audit of that direction")
    return rules


def _body(view: View, now: Focus) -> dict[str, Any]:
    """What the command's file holds: names and what is already known."""
    parents = now.opportunity["applies_to"] if now.opportunity and now.opportunity["merge"] else [now.parent]
    if now.step == "propose":
        audit = view.audit_of(now.parent) if now.parent else None
        return {
            **{"direction": "a-slug", "mechanism": "", "workloads": ["decode"], "evidence": [audit["id"]] if audit else []},
            **{"applies_to": parents, "merge": False, "expected_share": None},
        }
    if now.step == "act":
        body = {
            **{"opportunity": now.opportunity["id"] if now.opportunity else None, "parents": parents},
            **{"form": "full_sequence_only | decode_only | joint", "workloads": [], "variants": [], "scope": "", "regions": []},
            **{"expected_effect": "", "numerical_risks": dict.fromkeys(RISKS, ""), "contradicted_by": ""},
            **{"implementation": {}},
        }
        if "numerics" in view.withheld:
            del body["numerical_risks"]
        return body
    if now.step == "decide":
        assert now.attempt is not None
        verified, audit = now.attempt.audit["verified"], now.attempt.audit["id"]
        body = {
            **{"audit": audit, "subject": now.attempt.id if verified else now.attempt.action["parents"][0]},
            **{"decision": "continue | merge | archive | abandon", "interpretation": "", "follow_ups": [], "reactivate": []},
            **{"evidence": [audit], "falsified_by": None, "reconsider_when": None},
        }
        if view.withheld & {"branches", "opportunities"}:  # a merge is an opportunity first
            body.update(decision="continue | archive | abandon")
        for ablation, key in (("branches", "reactivate"), ("opportunities", "follow_ups")):
            if ablation in view.withheld:
                del body[key]
        return body
    return {}
