"""The rules of a lineage decision.

unknown-record, decided-already, superseded-audit, subject, continue, merge, archive, abandon, follow-ups, reactivate,
ablation-branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.search.records import RuleError

if TYPE_CHECKING:
    from tools.search.state import State
    from tools.search.vertices import Opportunity

Facts = dict[str, Any]


def check(state: State, decision: Facts, made: list[Facts]) -> None:
    """RuleError where a decision may not be recorded. `made`: the opportunities of the same line, checked already."""
    record = decision["id"]
    audit = _undecided(state, decision)
    for identity in decision["evidence"]:
        if identity not in state.audits:
            raise RuleError(record, "unknown-record", f"evidence {identity} is no audit of this run")
    follow_ups = _follow_ups(state, decision, made)
    direction = state.actions[audit.action].direction
    _check_subject(state, decision, audit)
    if decision["decision"] == "abandon":
        _check_abandon(state, decision, direction, follow_ups)
    else:
        _check_branch(state, decision, follow_ups)
    for identity in decision["reactivate"]:
        if state.without("branches"):
            raise RuleError(record, "ablation-branches", f"this run has one branch: {identity} cannot be reactivated")
        if identity not in state.archive:
            raise RuleError(record, "reactivate", f"{identity} is not archived; archived: {', '.join(state.archive) or 'none'}")
        if not _applies(state, follow_ups, identity):
            raise RuleError(record, "reactivate", f"no follow-up applies to {identity}: add one that does")


def _undecided(state: State, decision: Facts) -> Any:
    record, name = decision["id"], decision["audit"]
    audit = state.audits.get(name)
    if audit is None:
        raise RuleError(record, "unknown-record", f"{name} is no audit of this run")
    if audit.action is None:
        raise RuleError(record, "decided-already", f"{name} is the root's audit: it needs no decision; propose, or act")
    if name in state.decision_of:
        raise RuleError(record, "decided-already", f"{state.decision_of[name]} decided about {name}")
    if audit.replaced_by:
        raise RuleError(record, "superseded-audit", f"{name} was repeated: decide about {audit.replaced_by}")
    return audit


def _follow_ups(state: State, decision: Facts, made: list[Facts]) -> list[Opportunity | Facts]:
    """The opportunities that a decision names, from this line or still pending."""
    record = decision["id"]
    new = {item["id"]: item for item in made}
    for identity in new:
        if identity not in decision["follow_ups"]:
            raise RuleError(record, "follow-ups", f"{identity} is made in this step and is not among follow_ups")
    found: list[Opportunity | Facts] = []
    for identity in decision["follow_ups"]:
        if identity not in new and identity not in state.pending:
            raise RuleError(
                record,
                "follow-ups",
                f"{identity} is not pending: name one of {', '.join(state.pending) or 'none'}, or write it out",
            )
        found.append(new[identity] if identity in new else state.opportunities[identity])
    return found


def _value(item: Opportunity | Facts, key: str) -> Any:
    return item[key] if isinstance(item, dict) else getattr(item, key)


def _applies(state: State, follow_ups: list[Opportunity | Facts], identity: str) -> bool:
    """Whether a follow-up applies to an implementation; a run without opportunities asks for none."""
    return state.without("opportunities") or any(identity in _value(item, "applies_to") for item in follow_ups)


def _check_subject(state: State, decision: Facts, audit: Any) -> None:
    record, subject = decision["id"], decision["subject"]
    parents = state.actions[audit.action].parents
    if audit.verified or decision["decision"] == "abandon":
        allowed = [audit.implementation, *([] if audit.verified else parents)]
    else:
        allowed = parents
        if subject == audit.implementation:
            raise RuleError(
                record, "subject", f"{subject} is not verified: the subject is its parent ({', '.join(parents)}), or abandon"
            )
    if subject not in allowed:
        raise RuleError(record, "subject", f"{subject} is not what {audit.id} is about: {', '.join(allowed)}")


def _check_branch(state: State, decision: Facts, follow_ups: list[Opportunity | Facts]) -> None:
    """Continue, merge and archive."""
    record, subject, word = decision["id"], decision["subject"], decision["decision"]
    if word == "archive":
        if not decision["reconsider_when"]:
            raise RuleError(record, "archive", "reconsider_when is missing: say what would bring it back")
        return
    if state.without("branches") and (word == "merge" or subject != state.incumbent):
        raise RuleError(
            record,
            "ablation-branches",
            f"this run has one branch: only {state.incumbent} goes on; archive or abandon {subject}",
        )
    if word == "continue" and not _applies(state, follow_ups, subject):
        raise RuleError(record, "continue", f"no follow-up applies to {subject}: add one that does, or archive it")
    if word == "merge" and not any(_value(o, "merge") and subject in _value(o, "applies_to") for o in follow_ups):
        raise RuleError(record, "merge", f"no follow-up merges {subject} with another branch: add one with merge: true")


def _check_abandon(state: State, decision: Facts, direction: str, follow_ups: list[Opportunity | Facts]) -> None:
    """Repeated failures of the direction, or evidence that falsifies it; and nothing of it follows."""
    record = decision["id"]
    if decision["falsified_by"] is not None:
        name = decision["falsified_by"]["audit"]
        found = state.audits.get(name)
        if found is None or found.action is None or state.actions[found.action].direction != direction:
            raise RuleError(record, "abandon", f"falsified_by names {name}, which is no audit of the direction {direction}")
    elif len(failed := state.failures(direction)) < (needed := state.settings["abandon_after"]):
        raise RuleError(
            record,
            "abandon",
            f"{direction} has {len(failed)} unverified audits of the {needed} that abandoning takes: try again, "
            "or state in falsified_by which measurement refutes it",
        )
    elif not decision["evidence"]:
        raise RuleError(record, "abandon", f"evidence is empty: name the audits that it rests on ({', '.join(failed)})")
    for item in follow_ups:
        if _value(item, "direction") == direction:
            raise RuleError(record, "abandon", f"{_value(item, 'id')} follows the direction {direction} that is abandoned here")
