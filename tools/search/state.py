"""The state of a search, derived from its log: graph, frontier, archive, opportunities, incumbent, kappa, stage.

    state = State()
    for line in log.read_lines(folder):
        state.apply(line)

Pure: no files, no clock. `apply` checks every rule (tools/search/rules.py) before it changes anything and raises
RuleError, so a state that refused a line is the state it was.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from tools.search import rules
from tools.search.records import FIRST, ROOT, make_id
from tools.search.vertices import Action, Audit, Best, Decision, Implementation, Opportunity, meaning

_HELD_IN = {"O": "opportunities", "I": "implementations", "A": "actions", "E": "audits", "L": "decisions"}


@dataclass
class State:
    """Everything that is known after some lines of the log."""

    settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    target: str = ""
    contract: str = ""
    incumbent: str | None = None
    kappa: int = 0
    frontier: list[str] = field(default_factory=list)
    archive: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    opportunities: dict[str, Opportunity] = field(default_factory=dict)
    implementations: dict[str, Implementation] = field(default_factory=dict)
    actions: dict[str, Action] = field(default_factory=dict)
    audits: dict[str, Audit] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    edges: list[tuple[str, str, str]] = field(default_factory=list)  # parent, child, action
    open_attempts: list[str] = field(default_factory=list)  # actions that are not yet decided
    audited: int = 0
    tokens: int | None = None  # input and output, as far as recorded
    tokens_unavailable: str | None = None  # why some usage is not in `tokens`
    best: list[Best] = field(default_factory=list)
    lines: int = 0
    started: str = ""
    time: str = ""  # of the last line
    archived_at: dict[str, int] = field(default_factory=dict)  # implementation -> line
    abandoned: dict[str, int] = field(default_factory=dict)  # direction -> line
    failed: dict[str, list[str]] = field(default_factory=dict)  # direction -> unverified audits
    audit_of: dict[str, str] = field(default_factory=dict)  # implementation -> its audit that counts
    decision_of: dict[str, str] = field(default_factory=dict)  # audit -> decision
    said: dict[tuple[Any, ...], str] = field(default_factory=dict)  # what an opportunity says -> the last that says it
    last_usage: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # SHA-256 -> implementation

    # ------------------------------------------------------------ questions

    def without(self, ablation: str) -> bool:
        """Whether the run's settings take something away."""
        return ablation in self.settings.get("ablations", ())

    def next_id(self, letter: str) -> str:
        """The id that the next record of a kind gets."""
        return make_id(letter, self.next_number(letter))

    def next_number(self, letter: str) -> int:
        """The number in that id."""
        return FIRST[letter] + len(getattr(self, _HELD_IN[letter]))

    def verified(self, identity: str) -> bool:
        """Whether an implementation passed every check."""
        audit = self.audit_of.get(identity)
        return audit is not None and self.audits[audit].verified

    def retained(self, identity: str) -> bool:
        """Whether an implementation may be a parent: on the frontier or archived. Without branches only the incumbent is."""
        if self.without("branches"):
            return identity == self.incumbent
        return identity in self.frontier or identity in self.archive

    @property
    def qualified(self) -> bool:
        """Whether the root has an audit that lets the search start."""
        return self.incumbent is not None

    def undecided(self) -> list[str]:
        """Audits of offspring that wait for a decision."""
        children = [self.actions[action].child for action in self.open_attempts]
        return [self.audit_of[child] for child in children if child in self.audit_of]

    def unaudited(self) -> list[str]:
        """Offspring that wait for an audit."""
        children = [self.actions[action].child for action in self.open_attempts]
        return [child for child in children if child not in self.audit_of]

    def failures(self, direction: str) -> list[str]:
        """Unverified audits of one direction."""
        return list(self.failed.get(direction, ()))

    def descends(self, identity: str, ancestor: str) -> bool:
        """Whether an implementation is, or was derived from, another."""
        seen, wanted = set(), [identity]
        while wanted:
            here = wanted.pop()
            if here == ancestor:
                return True
            if here not in seen:
                seen.add(here)
                wanted.extend(self.implementations[here].parents)
        return False

    def vertex_status(self, identity: str) -> str:
        """One word; `root` is a root not yet qualified, `verified` a child not yet decided about."""
        if identity == self.incumbent:
            return "incumbent"
        if identity not in self.audit_of:
            return "root" if identity == ROOT else "unaudited"
        if not self.verified(identity):
            return "failed"
        if identity in self.frontier:
            return "frontier"
        if identity in self.archive:
            return "archived"
        decided = self.decision_of.get(self.audit_of[identity])
        return "abandoned" if decided and self.decisions[decided].decision == "abandon" else "verified"

    def seconds(self, now: str | None = None) -> float:
        """Wall-clock time since the run was made, at the last line or at `now`."""
        if not self.started:
            return 0.0
        first, last = (datetime.datetime.fromisoformat(text) for text in (self.started, max(now or self.time, self.time)))
        return (last - first).total_seconds()

    def stop_at(self, now: str | None = None) -> str | None:
        """Why the search takes no further attempt, or None. Only `no-opportunity` can be lifted, by a proposal."""
        settings = self.settings
        if not self.qualified:
            return None
        if self.kappa >= settings["kappa_max"]:
            return f"kappa: {self.kappa} audits in a row without improvement (kappa_max {settings['kappa_max']})"
        if settings["max_audits"] is not None and self.audited >= settings["max_audits"]:
            return f"audits: {self.audited} of {settings['max_audits']} are made"
        if settings["max_tokens"] is not None and self.tokens is not None and self.tokens >= settings["max_tokens"]:
            return f"tokens: {self.tokens} of {settings['max_tokens']} are used"
        if settings["max_seconds"] is not None and self.seconds(now) >= settings["max_seconds"]:
            return f"seconds: {self.seconds(now):.0f} of {settings['max_seconds']} have passed"
        if self.opportunities and not self.pending and not self.open_attempts:
            return "no-opportunity: none is pending and no attempt is open; a proposal takes the search up again"
        return None

    @property
    def stop_reason(self) -> str | None:
        """Why the search takes no further attempt, judged at the last line's time."""
        return self.stop_at()

    @property
    def stage(self) -> str:
        """initialization | action | audit | lineage | stopped: what the search waits for."""
        if not self.qualified:
            return "initialization"
        if self.undecided():
            return "lineage"
        if self.unaudited():
            return "audit"
        if self.stop_reason:
            return "stopped"
        return "action" if self.opportunities or self.without("opportunities") else "initialization"

    @property
    def speedup(self) -> float:
        """Of the incumbent over the root, as the promotions measured it."""
        return self.best[-1].speedup if self.best else 1.0

    # ------------------------------------------------------------ steps

    def apply(self, line: dict[str, Any]) -> None:
        """Take one line of the log. RuleError where a rule refuses it; the state is then as before."""
        rules.check(self, line)
        self.replay(line)

    def replay(self, line: dict[str, Any]) -> None:
        """Take a line that was checked when it was written; `verify` checks it once more."""
        facts, n = line["facts"], line["n"]
        self.lines, self.time = n + 1, line["time"]
        if line["type"] == "init":
            self.started = line["time"]
            self.name, self.target, self.contract = facts["name"], facts["target"], facts["contract"]
            self.settings = facts["settings"]
        if line["type"] == "usage":
            self._use(facts)
        for found in facts.get("opportunities", ()):
            self.opportunities[found["id"]] = Opportunity(**found, n=n)
            self.pending.append(found["id"])
            self.said[meaning(found)] = found["id"]
        for found in facts.get("implementations", ()):
            self.implementations[found["id"]] = Implementation(**found, n=n)
            self.sources[found["source"]["sha256"]] = found["id"]
        for found in facts.get("actions", ()):
            self._act(found, n)
        for found in facts.get("audits", ()):
            self._audit(Audit(**found, n=n))
        for found in facts.get("decisions", ()):
            self._decide(found, n)

    def _use(self, usage: dict[str, Any]) -> None:
        self.last_usage = usage
        if "unavailable" in usage:
            self.tokens_unavailable = usage["unavailable"]
        else:
            self.tokens = (self.tokens or 0) + usage["input_tokens"] + usage["output_tokens"]

    def _act(self, found: dict[str, Any], n: int) -> None:
        opportunity = self.opportunities.get(found["opportunity"])
        direction = opportunity.direction if opportunity else found["id"]
        self.actions[found["id"]] = Action(**found, direction=direction, n=n)
        if opportunity:
            opportunity.used_by = found["id"]
            self.pending.remove(opportunity.id)
        for parent in found["parents"]:
            self.edges.append((parent, found["child"], found["id"]))
            self._reactivate(parent)
        self.open_attempts.append(found["id"])

    def _reactivate(self, identity: str) -> None:
        if identity in self.archive:
            self.archive.remove(identity)
            self.frontier.append(identity)

    def _audit(self, audit: Audit) -> None:
        before = self.audit_of.get(audit.implementation)
        self.audits[audit.id] = audit
        self.audit_of[audit.implementation] = audit.id
        if before:
            self.audits[before].replaced_by = audit.id
        if audit.implementation == ROOT:
            if audit.verified and audit.complete and audit.admissible is not False:
                self.incumbent = ROOT
                self.frontier.append(ROOT)
                self.best.append(Best(0, self.tokens, 1.0))
            return
        assert audit.action is not None
        failed = self.failed.setdefault(self.actions[audit.action].direction, [])
        if before in failed:
            failed.remove(before)
        if not audit.verified:
            failed.append(audit.id)
        if not before:
            self.audited += 1
        speedup = self.speedup
        if audit.promoted and audit.incumbent == self.incumbent:
            audit.accepted = True
            self.incumbent, self.kappa = audit.implementation, 0
            speedup *= audit.speedup
        else:
            audit.note = "stale-incumbent" if audit.promoted else None
            self.kappa += 0 if before else 1
        self.best.append(Best(self.audited, self.tokens, speedup))

    def _decide(self, found: dict[str, Any], n: int) -> None:
        audit = self.audits[found["audit"]]
        assert audit.action is not None
        action = self.actions[audit.action]
        decision = Decision(**found, direction=action.direction, n=n)
        self.decisions[decision.id] = decision
        self.decision_of[audit.id] = decision.id
        self.open_attempts.remove(action.id)
        subject = decision.subject
        if decision.decision in ("continue", "merge") and subject not in self.frontier:
            self._reactivate(subject)
            if subject not in self.frontier:
                self.frontier.append(subject)
        elif decision.decision == "archive":
            if subject in self.frontier:
                self.frontier.remove(subject)
            if subject not in self.archive:
                self.archive.append(subject)
            self.archived_at[subject] = n
        elif decision.decision == "abandon":
            self.abandoned[action.direction] = n
            self._withdraw(action.direction, decision.id)
        for identity in decision.reactivate:
            self._reactivate(identity)

    def _withdraw(self, direction: str, decision: str) -> None:
        """What is pending of an abandoned direction is pending no longer."""
        for identity in [name for name in self.pending if self.opportunities[name].direction == direction]:
            self.opportunities[identity].used_by = decision
            self.pending.remove(identity)
