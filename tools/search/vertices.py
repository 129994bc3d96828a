"""What a state holds of each record: the log's facts, and what later lines made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Opportunity:
    id: str
    direction: str
    workloads: list[str]
    evidence: list[str]
    applies_to: list[str]
    merge: bool
    expected_share: float | None
    origin: str | None
    n: int  # the log line that made it
    used_by: str | None = None  # the action that took it up, or the decision that withdrew it

    @property
    def pending(self) -> bool:
        """Whether an action may still take it up."""
        return self.used_by is None


def meaning(facts: dict[str, Any]) -> tuple[Any, ...]:
    """What two opportunities share that say the same: a command that was run twice makes such ones."""
    lists = (tuple(sorted(facts[key])) for key in ("workloads", "evidence", "applies_to"))
    return facts["direction"], facts["merge"], *lists


@dataclass
class Implementation:
    id: str
    source: dict[str, Any]  # sha256, bytes, suffix
    parents: list[str]
    action: str | None
    n: int


@dataclass
class Action:
    id: str
    opportunity: str | None
    parents: list[str]
    child: str
    form: str
    direction: str  # of its opportunity; its own id where it has none
    n: int


@dataclass
class Audit:
    id: str
    implementation: str
    action: str | None
    status: str
    verified: bool
    complete: bool
    admissible: bool | None
    promoted: bool  # what the evaluator granted, against the incumbent named below
    T: float | None
    T_root: float | None
    T_incumbent: float | None
    gain: float | None
    incumbent: str | None
    seconds: float
    n: int
    accepted: bool = False  # it became the incumbent here
    note: str | None = None  # stale-incumbent, where it was granted against another than the incumbent of then
    replaced_by: str | None = None  # a second audit of the same implementation

    @property
    def speedup(self) -> float:
        """Over the incumbent that it was compared with: from the comparison's gain, else from T of the same run."""
        if self.gain is not None:
            return 1 / (1 - self.gain)
        return self.T_incumbent / self.T if self.T and self.T_incumbent else 1.0


@dataclass
class Decision:
    id: str
    audit: str
    subject: str
    decision: str
    follow_ups: list[str]
    reactivate: list[str]
    evidence: list[str]
    falsified_by: dict[str, str] | None
    reconsider_when: str | None
    direction: str
    n: int


@dataclass(frozen=True)
class Best:
    """A point of the progress curve: speedup of the incumbent over the root after some audits."""

    audited: int
    tokens: int | None
    speedup: float  # product over promotions of 1 / (1 - gain)

    def __iter__(self) -> Any:
        return iter((self.audited, self.tokens, self.speedup))
