"""What the pictures of a run are made of: its steps in order, each with all of its records, and the path of the incumbent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tools.search.page_html import number, ratio

Record = dict[str, Any]


@dataclass
class Step:
    """One implementation of a run: the root (number 0) or the child of an action (1, 2, ... in the order of acting)."""

    number: int
    implementation: Record
    action: Record | None
    opportunity: Record | None
    status: str  # the state's word for the implementation
    audits: list[Record] = field(default_factory=list)  # oldest first; the last one counts
    decisions: list[Record] = field(default_factory=list)
    promoted: bool = False  # it took the incumbent's place; never true for the root
    best: float | None = None  # S after this step's audit: the product of promoted gains
    tokens: float | None = None  # used up to this step's audit; None where unknown

    @property
    def id(self) -> str:
        return str(self.implementation["id"])

    @property
    def parents(self) -> list[str]:
        return [str(parent) for parent in self.implementation.get("parents") or []]

    @property
    def audit(self) -> Record | None:
        return self.audits[-1] if self.audits else None

    @property
    def verified(self) -> bool:
        return bool(self.audit and self.audit.get("verified"))

    @property
    def speedup(self) -> float | None:
        """T of the root over T of this implementation, both of one evaluation; None where it was not timed."""
        if self.number == 0 or self.audit is None:
            return 1.0 if self.verified else None
        return ratio(self.audit.get("T_root"), self.audit.get("T")) if self.verified else None

    @property
    def decision(self) -> str:
        return " + ".join(str(record["decision"]) for record in self.decisions)


@dataclass
class Story:
    """A run, told in steps."""

    manifest: Record
    state: Any  # tools.search.state.State
    steps: list[Step]
    incumbent_path: list[str]  # implementations from the root to the incumbent

    @property
    def root(self) -> Step | None:
        return next((step for step in self.steps if step.number == 0), None)

    @property
    def attempts(self) -> list[Step]:
        return [step for step in self.steps if step.number > 0]

    @property
    def tokens(self) -> float | None:
        """Tokens that the search used; None where some use was not recorded, since a part would flatter it."""
        return None if self.state.tokens_unavailable else number(self.state.tokens)

    @property
    def efficiency(self) -> float | None:
        """Speed-up over one for each million tokens, (S - 1) / (N / 10^6); None where N is unknown or 0."""
        return (self.state.speedup - 1) / (self.tokens / 1e6) if self.tokens else None

    def step(self, identity: str | None) -> Step | None:
        return next((step for step in self.steps if step.id == identity), None)


def tell(run: Any) -> Story:
    """Read all records of a run (tools.search.run.Run) and put them in the order in which things happened."""
    opportunities = {record["id"]: record for record in run.records("opportunity")}
    actions = {record["child"]: record for record in run.records("action")}
    audits, decisions = defaultdict(list), defaultdict(list)
    for record in run.records("audit"):
        audits[record["implementation"]].append(record)
    by_audit = {record["id"]: record["implementation"] for records in audits.values() for record in records}
    for record in run.records("lineage"):
        decisions[by_audit[record["audit"]]].append(record)
    steps = []
    for place, record in enumerate(run.records("implementation")):
        action = actions.get(record["id"])
        step = Step(
            number=place,
            implementation=record,
            action=action,
            opportunity=opportunities.get(action["opportunity"]) if action and action.get("opportunity") else None,
            status=str(run.state.vertex_status(record["id"])),
            audits=audits[record["id"]],
            decisions=decisions[record["id"]],
        )
        steps.append(step)
    _measure(steps, run.state)
    return Story(run.manifest, run.state, steps, _path(steps, run.state.incumbent))


def _measure(steps: list[Step], state: Any) -> None:
    """Give each audited step the search's best gain and its tokens at that time, and mark the promoted ones."""
    best = {point.audited: point for point in state.best}
    in_order = sorted((step for step in steps if step.audits), key=lambda step: int(step.audits[0]["id"][1:]))
    for audited, step in enumerate(in_order):  # the root is number 0: it counts as no offspring
        if audited in best:
            step.tokens, step.best = number(best[audited].tokens), best[audited].speedup
        step.promoted = any(state.audits[audit["id"]].accepted for audit in step.audits)


def _path(steps: list[Step], incumbent: str | None) -> list[str]:
    """Implementations from the root to the incumbent, by first parents."""
    parents = {step.id: step.parents for step in steps}
    path: list[str] = []
    while incumbent in parents and incumbent not in path:
        path.append(incumbent)
        incumbent = parents[incumbent][0] if parents[incumbent] else None
    return path[::-1]
