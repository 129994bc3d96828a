"""What stands between a candidate and a verdict that it did not earn: one name a guard, so that a test can switch one off.

Every exploit in tests/exploits must succeed with its guard off and be refused with all on. Nothing on a command line
turns a guard off; a report says which were, and such a report promotes nothing and is no evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES: dict[str, str] = {
    "imports": "the candidate's object refers to nothing beyond what a kernel needs",
    "sandbox": "the worker has no network, no files, no other processes",
    "closed": "outputs of everything else lie in memory that the candidate's worker never maps",
    "pause": "workers are stopped outside their turn, and results are copied out before they run on",
    "poison": "outputs and workspaces are overwritten before every call and pass",
    "witness": "calls and timed outputs are compared with the witness",
    "verify": "outputs of every timed pass are verified",
    "fresh": "inputs change before every timed pass",
    "cold": "every timed call of a pass has its own inputs",
    "order": "the inputs of timed calls lie in a secret order",
    "clock": "the worker's times agree with the judge's clock",
    "floor": "no time is below what operations and bytes allow",
    "quiet": "the device is idle when it is another's turn",
    "files": "evaluator, configs and sources are the same on disk before and after",
    "hidden": "secret shapes from the contract's whole domain",
    "seed": "the seed is drawn after the candidate is loaded",
    "noise": "a promotion needs a gain beyond noise in two sessions or more of fresh processes",
    "sealed": "sealed cases decide about promotion",
}


@dataclass(frozen=True)
class Guards:
    """Which guards are on. `off` names those that are not; ValueError for a name that is no guard."""

    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := self.off - NAMES.keys():
            raise ValueError(f"no guard {sorted(unknown)[0]!r}")

    def on(self, name: str) -> bool:
        assert name in NAMES, name
        return name not in self.off


ALL = Guards()
