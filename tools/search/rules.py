"""The rules across records: what may follow on a state. `check` looks at one log line and raises RuleError, or lets it pass.

Rules of a proposal:     root-first, stopped, unknown-record, unverified-parent, merge-parents, abandoned-direction,
                         duplicate-opportunity
of an action:            root-first, root-opportunities, stopped, open-attempt, unknown-opportunity, consumed-opportunity,
                         unverified-parent, merge-parents, parent-not-listed, parent-not-retained, archived-parent,
                         duplicate-source
of an audit:             root-first, audited-already, incomplete-report, promotion-not-granted
of a decision:           in tools/search/decisions.py
of all:                  first-line, duplicate-id, links; ablation-opportunities and ablation-branches in runs without these
What needs sources, reports or a compiler is checked where records are made: form, audit-target, schema (tools/search/run.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.search import decisions
from tools.search.facts import GROUPS
from tools.search.records import FIRST, LETTERS, ROOT, RuleError, make_id
from tools.search.vertices import meaning

if TYPE_CHECKING:
    from tools.search.state import State

Facts = dict[str, Any]
REPEATABLE = ("REFUSED", "TIMEOUT")  # outcomes that may be the machine's fault
STEPS: dict[str, dict[str, int | None]] = {  # kind of line -> how many records of which kinds it names (None: any number)
    "init": {"implementation": 1},
    "propose": {"opportunity": 1},
    "act": {"implementation": 1, "action": 1},
    "audit": {"audit": 1},
    "decide": {"lineage": 1, "opportunity": None},
    "usage": {},
}
_STRANGE = {kind: {group for record, group in GROUPS.items() if record not in STEPS[kind]} for kind in STEPS}


def check(state: State, line: dict[str, Any]) -> None:
    """RuleError where a line may not follow on a state."""
    kind, facts = line["type"], line["facts"]
    if (kind == "init") != (state.lines == 0):
        raise RuleError(
            f"line {line['n']}", "first-line", "a log begins with its only init line: make a new run with ir.py init"
        )
    _check_ids(state, kind, facts, f"line {line['n']}")
    if kind == "propose":
        opportunity = facts["opportunities"][0]
        _refuse_stopped(state, opportunity["id"], line["time"])
        check_opportunity(state, opportunity)
    elif kind == "act":
        _check_action(state, facts["actions"][0], facts["implementations"][0], line["time"])
    elif kind == "audit":
        _check_audit(state, facts["audits"][0])
    elif kind == "decide":
        decision, follow_ups = facts["decisions"][0], facts.get("opportunities", [])
        for opportunity in follow_ups:
            check_opportunity(state, opportunity, decision["id"])
        decisions.check(state, decision, follow_ups)
    elif kind == "usage":
        _check_usage(state, facts, f"line {line['n']}")


def _check_ids(state: State, kind: str, facts: Facts, where: str) -> None:
    """The right number of records of each kind, each with the next free id."""
    if not _STRANGE[kind].isdisjoint(facts):
        raise RuleError(where, "links", f"a step '{kind}' names no {', '.join(_STRANGE[kind] & facts.keys())}")
    for record, wanted in STEPS[kind].items():
        found = facts.get(GROUPS[record], [])
        if wanted is not None and len(found) != wanted:
            raise RuleError(where, "links", f"a step '{kind}' names {wanted} {GROUPS[record]}, not {len(found)}")
        letter = LETTERS[record]
        free = state.next_number(letter)
        for number, item in enumerate(found, free):
            if item["id"] != make_id(letter, number):
                taken = FIRST[letter] <= int(item["id"][1:]) < number
                problem = "is taken" if taken else "is out of order"
                raise RuleError(item["id"], "duplicate-id", f"{problem}; the next one is {make_id(letter, number)}")


def _refuse_unqualified(state: State, record: str) -> None:
    if not state.qualified:
        raise RuleError(record, "root-first", "the root is not yet verified, complete and admissible: audit I0000 first")


def _refuse_stopped(state: State, record: str, time: str) -> None:
    reason = state.stop_at(time)
    if reason and not reason.startswith("no-opportunity"):
        raise RuleError(
            record,
            "stopped",
            f"the search has stopped ({reason}): finish what is open, or go on in a new run from the incumbent",
        )


# ---------------------------------------------------------------- opportunities


def check_opportunity(state: State, found: Facts, origin: str | None = None) -> None:
    """RuleError where an opportunity may not be recorded. `origin`: the decision of the same line."""
    record = found["id"]
    _refuse_unqualified(state, record)
    if state.without("opportunities"):
        raise RuleError(record, "ablation-opportunities", "this run keeps no opportunities: act without one")
    for audit in found["evidence"]:
        if audit not in state.audits:
            raise RuleError(record, "unknown-record", f"evidence {audit} is no audit of this run; ir.py status lists them")
    for identity in found["applies_to"]:
        if identity not in state.implementations:
            raise RuleError(record, "unknown-record", f"applies_to {identity} is no implementation of this run")
        if not state.verified(identity):
            raise RuleError(
                record, "unverified-parent", f"{identity} is not verified: name its verified parent, or audit it first"
            )
    if found["origin"] not in (None, origin) and found["origin"] not in state.decisions:
        raise RuleError(record, "unknown-record", f"origin {found['origin']} is no decision of this run")
    if found["merge"]:
        _check_merge(state, record, found["applies_to"])
    twin = state.said.get(meaning(found))
    if twin and state.opportunities[twin].pending:
        raise RuleError(record, "duplicate-opportunity", f"{twin} is pending and says the same: take that, or say what differs")
    since = state.abandoned.get(found["direction"])
    if since is not None and all(state.audits[audit].n <= since for audit in found["evidence"]):
        raise RuleError(
            record, "abandoned-direction", f"{found['direction']} was abandoned: cite an audit made since, or take another one"
        )


def _check_merge(state: State, record: str, parents: list[str]) -> None:
    if state.without("branches"):
        raise RuleError(record, "ablation-branches", "this run has one branch: nothing can be merged")
    if len(parents) < 2:
        raise RuleError(record, "merge-parents", "a merge names at least two implementations in applies_to")
    for one in parents:
        for other in parents:
            if one != other and state.descends(one, other):
                raise RuleError(
                    record, "merge-parents", f"{one} descends from {other}: they lie on one branch; continue from {one}"
                )


# ---------------------------------------------------------------- actions


def _check_action(state: State, action: Facts, child: Facts, time: str) -> None:
    record = action["id"]
    _refuse_unqualified(state, record)
    _refuse_stopped(state, record, time)
    if action["child"] != child["id"] or child["action"] != record or child["parents"] != action["parents"]:
        raise RuleError(record, "links", f"the action and {child['id']} do not name each other and the same parents")
    if not state.opportunities and not state.without("opportunities"):
        raise RuleError(record, "root-opportunities", "no opportunity is recorded yet: propose what the root's audit suggests")
    if len(state.open_attempts) >= state.settings["parallel"]:
        waiting = state.actions[state.open_attempts[0]]
        step = "decide about its audit" if waiting.child in state.audit_of else "audit it"
        raise RuleError(record, "open-attempt", f"{waiting.child} of {waiting.id} is not finished: {step} first")
    _check_parents(state, action)
    if twin := state.sources.get(child["source"]["sha256"]):
        raise RuleError(record, "duplicate-source", f"the source is that of {twin}: change it, or use what {twin} showed")


def _check_parents(state: State, action: Facts) -> None:
    record, parents = action["id"], action["parents"]
    for parent in parents:
        if parent not in state.implementations:
            raise RuleError(record, "unknown-record", f"parent {parent} is no implementation of this run")
        if not state.verified(parent):
            raise RuleError(record, "unverified-parent", f"{parent} is not verified: start from one that is on the frontier")
    opportunity = _taken_opportunity(state, action)
    if opportunity is not None and opportunity.merge:
        if set(parents) != set(opportunity.applies_to):
            raise RuleError(
                record, "merge-parents", f"{opportunity.id} merges {', '.join(opportunity.applies_to)}: name all as parents"
            )
    elif len(parents) != 1:
        raise RuleError(record, "merge-parents", "several parents need an opportunity with merge: true; name one parent")
    if state.without("branches") and parents != [state.incumbent]:
        raise RuleError(record, "ablation-branches", f"this run has one branch: the parent is the incumbent {state.incumbent}")
    for parent in parents:
        listed = opportunity is None or state.without("branches") or parent in opportunity.applies_to
        if opportunity is not None and not listed:
            raise RuleError(
                record,
                "parent-not-listed",
                f"{opportunity.id} applies to {', '.join(opportunity.applies_to)}, not to {parent}: take one of those, "
                f"or propose an opportunity for {parent}",
            )
        if not state.retained(parent):
            raise RuleError(
                record,
                "parent-not-retained",
                f"{parent} is neither on the frontier nor archived: decide about it, or take another",
            )
        if parent in state.archive and opportunity is not None and opportunity.n <= state.archived_at[parent]:
            raise RuleError(
                record,
                "archived-parent",
                f"{parent} was archived after {opportunity.id} was made: propose what is new, or reactivate it in a decision",
            )


def _taken_opportunity(state: State, action: Facts) -> Any:
    """The pending opportunity that an action takes up; None in a run without them."""
    record, name = action["id"], action["opportunity"]
    if state.without("opportunities"):
        if name is not None:
            raise RuleError(record, "ablation-opportunities", "this run keeps no opportunities: leave opportunity null")
        return None
    found = state.opportunities.get(name)
    if found is None:
        pending = ", ".join(state.pending) or "none"
        raise RuleError(record, "unknown-opportunity", f"{name} is no opportunity of this run; pending: {pending}")
    if not found.pending:
        how = "withdrawn" if str(found.used_by).startswith("L") else "taken up"
        raise RuleError(
            record, "consumed-opportunity", f"{name} was {how} by {found.used_by}: propose another try as a new opportunity"
        )
    return found


# ---------------------------------------------------------------- audits


def check_auditable(state: State, record: str, identity: str) -> None:
    """RuleError where an implementation may not be audited now, whatever comes out."""
    if identity not in state.implementations:
        raise RuleError(record, "unknown-record", f"{identity} is no implementation of this run")
    if identity != ROOT:
        _refuse_unqualified(state, record)
    _refuse_repetition(state, record, identity)


def _check_audit(state: State, audit: Facts) -> None:
    record, identity = audit["id"], audit["implementation"]
    check_auditable(state, record, identity)
    if audit["action"] != state.implementations[identity].action:
        raise RuleError(record, "links", f"{identity} was made by {state.implementations[identity].action}")
    if audit["status"] == "INCOMPLETE":
        raise RuleError(record, "incomplete-report", f"the evaluation of {identity} did not finish: run the audit again")
    if audit["verified"] != (audit["status"] == "PASSED"):
        raise RuleError(record, "links", f"verified and status {audit['status']} do not agree")
    _check_promotion(audit)


def _refuse_repetition(state: State, record: str, identity: str) -> None:
    before = state.audit_of.get(identity)
    if identity == ROOT:
        if state.qualified:
            raise RuleError(record, "audited-already", f"the root has its audit {before}: propose, or act")
        return
    if before is None:
        return
    if before in state.decision_of:
        raise RuleError(
            record, "audited-already", f"{identity} has its audit {before}, and {state.decision_of[before]} decided"
        )
    if state.audits[before].status not in REPEATABLE:
        raise RuleError(
            record, "audited-already", f"{identity} has its audit {before} ({state.audits[before].status}): decide about it"
        )


def _check_promotion(audit: Facts) -> None:
    """A promotion needs everything that the evaluator must have granted."""
    if not audit["promoted"]:
        return
    missing = [key for key in ("verified", "complete", "admissible", "incumbent") if not audit[key]]
    if audit["implementation"] == ROOT or missing:
        reason = f"without {', '.join(missing)}" if missing else "of the root"
        raise RuleError(audit["id"], "promotion-not-granted", f"a promotion {reason}: audit with the incumbent as the rival")
    own, rival = audit["T"], audit["T_incumbent"]
    # T is of the first session alone; the gain, where there is one, of all of them.
    if own is None or rival is None or (audit["gain"] is None and not own < rival):
        raise RuleError(audit["id"], "promotion-not-granted", f"T {own} is not below the incumbent's {rival} of the same run")
    if audit["gain"] is not None and not 0 < audit["gain"] < 1:
        raise RuleError(audit["id"], "promotion-not-granted", f"gain {audit['gain']} is none")


# ---------------------------------------------------------------- usage


def _check_usage(state: State, usage: Facts, record: str) -> None:
    """Whole numbers of tokens, or the reason why there are none; not the very report before it once more."""
    if "unavailable" in usage:
        if set(usage) != {"unavailable"} or not usage["unavailable"]:
            raise RuleError(record, "usage", "where counts are unavailable, state the reason and nothing else")
        return
    counts = [usage["input_tokens"], usage["output_tokens"], usage["cached_tokens"] or 0]
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
        raise RuleError(record, "usage", f"{counts} are not all whole numbers from 0")
    if counts[2] > counts[0]:
        raise RuleError(record, "usage", f"cached tokens ({counts[2]}) are a part of the input tokens ({counts[0]})")
    if usage["step"] is not None and usage == state.last_usage:
        raise RuleError(record, "usage", f"the last report says the same of {usage['step']}: it is recorded already")
