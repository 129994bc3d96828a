"""What a run shows its agent: all of it, less what the run's ablations take away. Everything `context` says comes from here.

    view = View(run)
    view.attempts, view.pending, view.record("E0001")

The ablations stand in one place, so that no part of the text can forget one:
history       records of the incumbent, its latest audit, and the attempt that is open; no earlier attempt
numerics      no numerical requirements: contract steps, an implementation's requirements, an action's risks, the opening
              comment of a source (the contract's table)
evidence      of an audit: its status, and T
opportunities none
branches      the incumbent is the only parent: no frontier, no archive, no merges
The evaluator and the records know nothing of them.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from tools.core.errors import UserError
from tools.core.files import read_bytes, show_path
from tools.search.records import kind_of

if TYPE_CHECKING:
    from tools.search.run import Run
    from tools.search.vertices import Action

Record = dict[str, Any]

_DETAILS: dict[str, Any] = {  # of an audit, what remains of its evidence under the ablation `evidence`
    **{"cells": [], "failure": None, "dispatch": None, "resources": [], "counters": None, "code": {}, "environment": {}},
    **{"gain_interval": None, "admissible": None},
}
_RISKS = ("numerical_risks", "numerical_requirements")


class Attempt:
    """One action with what came of it. What the log knows is at hand; the records are read when they are asked for."""

    def __init__(self, view: View, action: Action) -> None:
        self._view, self._action = view, action
        self.id = action.child
        self.direction = action.direction  # the mechanism's name; the action's id where it has no opportunity
        audit = view.state.audit_of.get(action.child)
        self._audit = view.state.audits[audit] if audit else None
        self._decision = view.state.decisions.get(view.state.decision_of.get(audit or "", ""))

    @property
    def audited(self) -> bool:
        return self._audit is not None

    @property
    def failed(self) -> bool:
        return self._audit is not None and not self._audit.verified

    @property
    def verdict(self) -> str | None:
        """continue | merge | archive | abandon, None before the decision."""
        return self._decision.decision if self._decision else None

    @property
    def subject(self) -> str | None:
        """What the decision is about."""
        return self._decision.subject if self._decision else None

    @property
    def action(self) -> Record:
        return self._view.read(self._action.id)

    @property
    def opportunity(self) -> Record | None:
        return self._view.read(self._action.opportunity) if self._action.opportunity else None

    @property
    def audit(self) -> Record:
        """Only of an audited attempt."""
        assert self._audit is not None
        return self._view.read(self._audit.id)

    @property
    def decision(self) -> Record:
        """Only of a decided attempt."""
        assert self._decision is not None
        return self._view.read(self._decision.id)


class View:
    """A run (tools.search.run.Run) as its agent may see it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state = run.state
        self.settings: Record = run.manifest["settings"]
        self.withheld = frozenset(self.settings["ablations"])
        self.folder = show_path(run.folder)
        self._records: dict[str, Record] = {}

    def read(self, identity: str) -> Record:
        """A record that is known to exist and to be permitted, less what is withheld of it."""
        if identity not in self._records:
            self._records[identity] = self._permitted(kind_of(identity), self.run.record(identity))
        return self._records[identity]

    def _permitted(self, kind: str, record: Record) -> Record:
        if "numerics" in self.withheld:
            record = {key: value for key, value in record.items() if key not in _RISKS}
        if "evidence" in self.withheld and kind == "audit":
            record = {**record, **_DETAILS}
        return record

    # ------------------------------------------------------------------------------------------------------- records
    def known(self, identity: str) -> bool:
        """Whether there is such a record and it may be shown."""
        found = self.state
        groups = (found.opportunities, found.implementations, found.actions, found.audits, found.decisions)
        return any(identity in group for group in groups) and (self.shown is None or identity in self.shown)

    def record(self, identity: str) -> Record:
        """A record, less what is withheld; UserError where there is none that may be shown."""
        if not self.known(identity):
            why = "its record is withheld in this run (--without history)" if self.shown else "there is no such record"
            raise UserError(f"{identity}: {why}; `python tools/ir.py status --run {self.folder}` names those that can be used")
        return self.read(identity)

    def audit_of(self, implementation: str) -> Record | None:
        """The audit that counts for an implementation, or None."""
        identity = self.state.audit_of.get(implementation)
        return self.read(identity) if identity and self.known(identity) else None

    @functools.cached_property
    def shown(self) -> frozenset[str] | None:
        """Records that may be shown under the ablation `history` (opportunities aside); None: all."""
        if "history" not in self.withheld:
            return None
        waiting = [self.state.actions[name] for name in self.state.open_attempts]
        names = {self.incumbent or str(self.run.manifest["root"]), *(action.child for action in waiting)}
        audits = {self.state.audit_of[name] for name in names if name in self.state.audit_of}
        names.update(parent for action in waiting for parent in action.parents)
        return frozenset({*names, *audits, *(action.id for action in waiting), *self.state.opportunities})

    # ---------------------------------------------------------------------------------------------------------- state
    @property
    def incumbent(self) -> str | None:
        identity = self.state.incumbent
        return None if identity is None else str(identity)

    @functools.cached_property
    def parents(self) -> list[str]:
        """What an action may start from without a reactivation, the incumbent first."""
        if self.withheld & {"branches", "history"}:
            return [self.incumbent] if self.incumbent else []
        return sorted(self.state.frontier, key=lambda name: name != self.incumbent)  # a stable sort

    @functools.cached_property
    def archive(self) -> list[str]:
        return [] if self.withheld & {"branches", "history"} else list(self.state.archive)

    @functools.cached_property
    def _usable_since(self) -> dict[str, int]:
        """Parent -> the log line after which an opportunity must have been made: for an archived one when that was done."""
        return dict.fromkeys(self.parents, -1) | {name: self.state.archived_at[name] for name in self.archive}

    def parents_for(self, opportunity: str) -> list[str]:
        """What may take an opportunity up now: one of these, or for a merge all of them; [] where nothing may."""
        found = self.state.opportunities[opportunity]
        if "branches" in self.withheld:
            return [] if found.merge else self.parents
        since = self._usable_since
        usable = [name for name in found.applies_to if name in since and found.n > since[name]]
        usable.sort(key=lambda name: (name != self.incumbent, since[name]))  # archived ones last
        return usable if not found.merge or set(usable) == set(found.applies_to) else []

    @functools.cached_property
    def pending(self) -> list[str]:
        """Pending opportunities that can be taken up now: most share of T first, then the oldest."""
        if "opportunities" in self.withheld:
            return []
        known = self.state.opportunities
        usable = [name for name in self.state.pending if self.parents_for(name)]
        return sorted(usable, key=lambda name: (-(known[name].expected_share or 0.0), known[name].n))

    @functools.cached_property
    def waiting(self) -> list[str]:
        """Pending opportunities that nothing can take up now."""
        if self.withheld & {"opportunities", "branches", "history"}:
            return []
        return [name for name in self.state.pending if name not in self.pending]

    @functools.cached_property
    def _all_attempts(self) -> list[Attempt]:
        return [Attempt(self, action) for action in self.state.actions.values()]

    @functools.cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts that are decided and may be shown, oldest first."""
        return [attempt for attempt in self._all_attempts if attempt.verdict] if self.shown is None else []

    @functools.cached_property
    def open_attempt(self) -> Attempt | None:
        """The attempt that the next step is about: it waits for a decision, else for an audit."""
        waiting = [attempt for attempt in self._all_attempts if attempt.verdict is None]
        return min(waiting, key=lambda attempt: not attempt.audited, default=None)

    # ----------------------------------------------------------------------------------------------------- the config
    @functools.cached_property
    def config(self) -> Record:
        """The run's frozen config, less the contract's steps where numerics are withheld."""
        path = self.run.folder / "config.json"
        config: Record = json.loads(read_bytes(path))
        if "numerics" in self.withheld:
            config = {**config, "contract": {"name": config["contract"]["name"]}}
        return config

    def source(self, implementation: str) -> str:
        """An implementation's source as text; where it is not UTF-8, what cannot be read is replaced."""
        data: bytes = self.run.source(implementation)
        return data.decode("utf-8", "replace")
