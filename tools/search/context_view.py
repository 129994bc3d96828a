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
from dataclasses import dataclass
from typing import Any

from tools.core.errors import UserError
from tools.core.files import read_bytes, show_path

Record = dict[str, Any]

_DETAILS: dict[str, Any] = {  # of an audit, what remains of its evidence under the ablation `evidence`
    **{"cells": [], "failure": None, "dispatch": None, "resources": [], "counters": None, "code": {}, "environment": {}},
    **{"gain_interval": None, "admissible": None},
}
_RISKS = ("numerical_risks", "numerical_requirements")


@dataclass(frozen=True)
class Attempt:
    """One action with what came of it."""

    action: Record
    child: Record
    opportunity: Record | None
    audit: Record | None  # the last one: it replaces those before it
    decision: Record | None

    @property
    def direction(self) -> str:
        """The mechanism's name; an action without an opportunity is a direction of its own."""
        return str((self.opportunity or self.action)["direction" if self.opportunity else "id"])

    @property
    def failed(self) -> bool:
        return self.audit is not None and not self.audit["verified"]


class View:
    """A run (tools.search.run.Run) as its agent may see it."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.state = run.state
        self.settings: Record = run.manifest["settings"]
        self.withheld = frozenset(self.settings["ablations"])
        self.folder = show_path(run.folder)
        self._records: dict[str, Record] = {
            record["id"]: self._permitted(kind, record)
            for kind in ("opportunity", "implementation", "action", "audit", "lineage")
            for record in run.records(kind)
        }

    def _permitted(self, kind: str, record: Record) -> Record:
        if "numerics" in self.withheld:
            record = {key: value for key, value in record.items() if key not in _RISKS}
        if "evidence" in self.withheld and kind == "audit":
            record = {**record, **_DETAILS}
        return record

    # ------------------------------------------------------------------------------------------------------- records
    def known(self, identity: str) -> bool:
        """Whether there is such a record and it may be shown."""
        return identity in self._records and (self.shown is None or identity in self.shown)

    def record(self, identity: str) -> Record:
        """A record, less what is withheld; UserError where there is none that may be shown."""
        if not self.known(identity):
            withheld = identity in self._records
            why = "its record is withheld in this run (--without history)" if withheld else "there is no such record"
            raise UserError(f"{identity}: {why}; `python tools/ir.py status --run {self.folder}` names those that can be used")
        return self._records[identity]

    def audit_of(self, implementation: str) -> Record | None:
        """The audit that counts for an implementation, or None."""
        identity = self.state.audit_of.get(implementation)
        return self._records[identity] if identity and self.known(identity) else None

    @functools.cached_property
    def shown(self) -> frozenset[str] | None:
        """Records that may be shown under the ablation `history` (opportunities aside); None: all."""
        if "history" not in self.withheld:
            return None
        names = {self.run.manifest["root"] if self.incumbent is None else self.incumbent}
        names |= {attempt.child["id"] for attempt in self._all_attempts if attempt.decision is None}
        audits = {audit for name, audit in self.state.audit_of.items() if name in names}
        actions = {action.id for action in self.state.actions.values() if action.child in names}
        return frozenset(names | audits | actions | set(self.state.opportunities))

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

    def parents_for(self, opportunity: Record) -> list[str]:
        """What may take an opportunity up now: one of these, or for a merge all of them; [] where nothing may."""
        if "branches" in self.withheld:
            return [] if opportunity["merge"] else self.parents
        made, since = self.state.opportunities[opportunity["id"]].n, self.state.archived_at
        usable = [name for name in self.parents if name in opportunity["applies_to"]]
        usable += [name for name in self.archive if name in opportunity["applies_to"] and made > since[name]]
        return usable if not opportunity["merge"] or set(usable) == set(opportunity["applies_to"]) else []

    @functools.cached_property
    def pending(self) -> list[Record]:
        """Pending opportunities that can be taken up now: most share of T first, then the oldest."""
        if "opportunities" in self.withheld:
            return []
        age = self.state.opportunities
        records = [self._records[name] for name in self.state.pending]
        records = [record for record in records if self.parents_for(record)]
        return sorted(records, key=lambda record: (-(record["expected_share"] or 0.0), age[record["id"]].n))

    @functools.cached_property
    def waiting(self) -> list[str]:
        """Pending opportunities that nothing can take up now."""
        if self.withheld & {"opportunities", "branches", "history"}:
            return []
        taken = {record["id"] for record in self.pending}
        return [name for name in self.state.pending if name not in taken]

    @functools.cached_property
    def _all_attempts(self) -> list[Attempt]:
        attempts = []
        for action in self.state.actions.values():
            audit = self.state.audit_of.get(action.child, "")
            attempts.append(
                Attempt(
                    action=self._records[action.id],
                    child=self._records[action.child],
                    opportunity=self._records.get(action.opportunity or ""),
                    audit=self._records.get(audit),
                    decision=self._records.get(self.state.decision_of.get(audit, "")),
                )
            )
        return attempts

    @functools.cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts that are decided and may be shown, oldest first."""
        return [a for a in self._all_attempts if a.decision is not None] if self.shown is None else []

    @functools.cached_property
    def open_attempt(self) -> Attempt | None:
        """The attempt that the next step is about: it waits for a decision, else for an audit."""
        waiting = [attempt for attempt in self._all_attempts if attempt.decision is None]
        return min(waiting, key=lambda attempt: attempt.audit is None, default=None)

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
