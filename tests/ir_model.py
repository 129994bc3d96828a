"""A straightforward model of a search: the accepted steps, and every question answered from all of them anew.

Written from the rules as they are stated, not from tools/search: no state is kept but the list of steps.
"""

from __future__ import annotations

from typing import Any

Facts = dict[str, Any]
ROOT = "I0000"


class Model:
    """`allowed` says whether a step may be taken; `take` takes it."""

    def __init__(self, settings: Facts) -> None:
        self.settings = settings
        self.steps: list[tuple[str, Facts]] = []

    # ------------------------------------------------------------ what happened

    def all(self, group: str) -> dict[str, Facts]:
        """Records of a group by id, with the step that made them as `at`."""
        return {item["id"]: {**item, "at": at} for at, (_, facts) in enumerate(self.steps) for item in facts.get(group, [])}

    def without(self, name: str) -> bool:
        return name in self.settings["ablations"]

    def counted(self) -> dict[str, Facts]:
        """Implementation -> its latest audit."""
        return {audit["implementation"]: audit for audit in self.all("audits").values()}

    def verified(self, name: str) -> bool:
        return name in self.counted() and self.counted()[name]["status"] == "PASSED"

    def decided(self) -> dict[str, Facts]:
        """Audit -> the decision about it."""
        return {item["audit"]: item for item in self.all("decisions").values()}

    def direction(self, action: str) -> str:
        opportunity = self.all("actions")[action]["opportunity"]
        return str(self.all("opportunities")[opportunity]["direction"]) if opportunity else action

    # ------------------------------------------------------------ the state equations

    def history(self) -> list[tuple[str, int, int]]:
        """(incumbent, kappa, audited) after each audit from the one that qualified the root."""
        found: list[tuple[str, int, int]] = []
        seen: set[str] = set()
        for audit in self.all("audits").values():
            name = audit["implementation"]
            if name == ROOT:
                if audit["status"] == "PASSED" and audit["complete"] and audit["admissible"]:
                    found.append((ROOT, 0, 0))
                continue
            incumbent, kappa, audited = found[-1]
            first = name not in seen
            seen.add(name)
            if audit["promoted"] and audit["incumbent"] == incumbent:
                found.append((name, 0, audited + first))
            else:
                found.append((incumbent, kappa + first, audited + first))
        return found

    @property
    def qualified(self) -> bool:
        return bool(self.history())

    @property
    def incumbent(self) -> str | None:
        return self.history()[-1][0] if self.qualified else None

    @property
    def kappa(self) -> int:
        return self.history()[-1][1] if self.qualified else 0

    @property
    def audited(self) -> int:
        return self.history()[-1][2] if self.qualified else 0

    @property
    def tokens(self) -> int:
        return sum(facts["input_tokens"] + facts["output_tokens"] for kind, facts in self.steps if kind == "usage")

    def place(self, name: str) -> str | None:
        """frontier, archive or neither: where the last step that moved an implementation has put it."""
        where = None
        for _, facts in self.steps:
            for audit in facts.get("audits", []):
                if name == ROOT == audit["implementation"] and audit["status"] == "PASSED" and audit["complete"]:
                    where = "frontier" if audit["admissible"] else where
            for action in facts.get("actions", []):
                if name in action["parents"] and where == "archive":
                    where = "frontier"
            for decision in facts.get("decisions", []):
                if decision["subject"] == name and decision["decision"] in ("continue", "merge"):
                    where = "frontier"
                if decision["subject"] == name and decision["decision"] == "archive":
                    where = "archive"
                if name in decision["reactivate"] and where == "archive":
                    where = "frontier"
        return where

    def frontier(self) -> set[str]:
        return {name for name in self.all("implementations") if self.place(name) == "frontier"}

    def archive(self) -> set[str]:
        return {name for name in self.all("implementations") if self.place(name) == "archive"}

    def archived_at(self, name: str) -> int:
        return max(
            item["at"] for item in self.all("decisions").values() if item["subject"] == name and item["decision"] == "archive"
        )

    def abandoned_at(self, direction: str) -> int | None:
        audits = self.all("audits")
        found = [
            item["at"]
            for item in self.all("decisions").values()
            if item["decision"] == "abandon" and self.direction(audits[item["audit"]]["action"]) == direction
        ]
        return max(found, default=None)

    def pending(self) -> set[str]:
        """Opportunities that no action took up and that were not there when their direction was abandoned."""
        used = {action["opportunity"] for action in self.all("actions").values()}
        found = set()
        for name, item in self.all("opportunities").items():
            abandoned = self.abandoned_at(item["direction"])
            if name not in used and (abandoned is None or abandoned < item["at"]):
                found.add(name)
        return found

    def open(self) -> list[str]:
        """Actions whose child has no decided audit."""
        decided = {self.all("audits")[audit]["action"] for audit in self.decided()}
        return [name for name in self.all("actions") if name not in decided]

    def final_stop(self) -> bool:
        settings = self.settings
        return self.qualified and (
            self.kappa >= settings["kappa_max"]
            or (settings["max_audits"] is not None and self.audited >= settings["max_audits"])
            or (settings["max_tokens"] is not None and self.tokens >= settings["max_tokens"])
        )

    def ancestors(self, name: str) -> set[str]:
        parents = set(self.all("implementations")[name]["parents"])
        return parents.union(*(self.ancestors(parent) for parent in parents)) if parents else set()

    def says(self, item: Facts) -> Any:
        return item["direction"], item["merge"], *(set(item[key]) for key in ("workloads", "evidence", "applies_to"))

    # ------------------------------------------------------------ what may follow

    def allowed(self, kind: str, facts: Facts) -> bool:
        if kind == "usage":
            reports = [facts for kind, facts in self.steps if kind == "usage"]
            return facts["step"] is None or reports[-1:] != [facts]
        if kind == "audit":
            return self.may_audit(facts["audits"][0])
        if not self.qualified:
            return False
        if kind == "propose":
            return not self.final_stop() and self.may_propose(facts["opportunities"][0])
        if kind == "act":
            return not self.final_stop() and self.may_act(facts["actions"][0], facts["implementations"][0])
        return self.may_decide(facts["decisions"][0], facts.get("opportunities", []))

    def may_propose(self, item: Facts) -> bool:
        audits = self.all("audits")
        if self.without("opportunities") or not all(name in audits for name in item["evidence"]):
            return False
        if not all(self.verified(name) for name in item["applies_to"]):
            return False
        known = self.all("opportunities")
        if any(self.says(known[name]) == self.says(item) for name in self.pending()):
            return False
        abandoned = self.abandoned_at(item["direction"])
        if abandoned is not None and max(audits[name]["at"] for name in item["evidence"]) <= abandoned:
            return False
        if not item["merge"]:
            return True
        names = item["applies_to"]
        one_branch = any(a in self.ancestors(b) for a in names for b in names)
        return len(names) >= 2 and not one_branch and not self.without("branches")

    def may_act(self, action: Facts, child: Facts) -> bool:
        parents, known = action["parents"], self.all("opportunities")
        if len(self.open()) >= self.settings["parallel"]:
            return False
        if child["source"]["sha256"] in {item["source"]["sha256"] for item in self.all("implementations").values()}:
            return False
        if self.without("opportunities") != (action["opportunity"] is None):
            return False
        taken = None if action["opportunity"] is None else known.get(action["opportunity"])
        if taken is not None and taken["id"] not in self.pending():
            return False
        if action["opportunity"] is not None and taken is None:
            return False
        merge = taken is not None and taken["merge"]
        if merge and taken is not None and set(parents) != set(taken["applies_to"]):
            return False
        if not merge and len(parents) != 1:
            return False
        return all(self.may_be_parent(name, taken) for name in parents)

    def may_be_parent(self, name: str, taken: Facts | None) -> bool:
        if not self.verified(name):
            return False
        if self.without("branches") and name != self.incumbent:
            return False
        if not self.without("branches"):
            if taken is not None and name not in taken["applies_to"]:
                return False
            if self.place(name) is None:
                return False
        old = self.place(name) == "archive" and taken is not None and taken["at"] <= self.archived_at(name)
        return not old

    def may_audit(self, audit: Facts) -> bool:
        name, counted = audit["implementation"], self.counted()
        if name not in self.all("implementations") or audit["status"] == "INCOMPLETE":
            return False
        if name == ROOT:
            return not self.qualified and not audit["promoted"]
        if name in counted:
            repeatable = counted[name]["status"] in ("REFUSED", "TIMEOUT") and counted[name]["id"] not in self.decided()
            if not repeatable:
                return False
        if not audit["promoted"]:
            return True
        granted = audit["status"] == "PASSED" and audit["complete"] and audit["admissible"] and audit["incumbent"] is not None
        return bool(granted and audit["T"] < audit["T_incumbent"])

    def may_decide(self, decision: Facts, made: list[Facts]) -> bool:
        audit = self.all("audits").get(decision["audit"])
        if audit is None or audit["action"] is None or audit["id"] in self.decided():
            return False
        if self.counted()[audit["implementation"]]["id"] != audit["id"]:
            return False
        if not all(self.may_propose(item) for item in made):
            return False
        fresh = {item["id"] for item in made}
        if not fresh <= set(decision["follow_ups"]) or not set(decision["follow_ups"]) <= self.pending() | fresh:
            return False
        follow = [*made, *(self.all("opportunities")[name] for name in decision["follow_ups"] if name not in fresh)]
        passed, child = audit["status"] == "PASSED", audit["implementation"]
        parents, word, subject = self.all("implementations")[child]["parents"], decision["decision"], decision["subject"]
        candidates = [child] if passed else [child, *parents] if word == "abandon" else parents
        if subject not in candidates:
            return False
        if not self.fits(decision, audit, follow):
            return False
        applies = {name for item in follow for name in item["applies_to"]}
        return all(
            not self.without("branches")
            and self.place(name) == "archive"
            and (name in applies or self.without("opportunities"))
            for name in decision["reactivate"]
        )

    def fits(self, decision: Facts, audit: Facts, follow: list[Facts]) -> bool:
        """What each of the four decisions asks for."""
        word, subject = decision["decision"], decision["subject"]
        if word == "archive":
            return bool(decision["reconsider_when"])
        if word == "abandon":
            direction = self.direction(audit["action"])
            of_it = [item for item in self.counted().values() if item["action"] and self.direction(item["action"]) == direction]
            failed = [item for item in of_it if item["status"] != "PASSED"]
            if decision["falsified_by"] is not None:
                every = self.all("audits").get(decision["falsified_by"]["audit"])
                grounds = bool(every and every["action"] and self.direction(every["action"]) == direction)
            else:
                grounds = len(failed) >= self.settings["abandon_after"] and bool(decision["evidence"])
            return grounds and all(item["direction"] != direction for item in follow)
        if self.without("branches") and (word == "merge" or subject != self.incumbent):
            return False
        if word == "continue":
            return self.without("opportunities") or any(subject in item["applies_to"] for item in follow)
        return any(item["merge"] and subject in item["applies_to"] for item in follow)

    def take(self, kind: str, facts: Facts) -> None:
        self.steps.append((kind, facts))
