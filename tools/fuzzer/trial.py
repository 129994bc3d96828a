"""Running one case: do its two calls agree, does its call fail?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.fuzzer.bench import Bench, Failed
from tools.fuzzer.case import Case
from tools.fuzzer.stage import Comparison, Difference

AGREES, DIFFERS = "agrees", "differs"


@dataclass(frozen=True)
class Outcome:
    """what: "agrees", "differs", or how the calls failed: "dies", "hangs", "refuses"."""

    what: str
    difference: Difference | None = None
    message: str = ""

    def observed(self) -> dict[str, Any]:
        """What a case's file says of it."""
        found: dict[str, Any] = {"what": self.what}
        if self.difference is not None:
            d = self.difference
            found |= {"words": d.words, "differing": d.differing, "first": d.first}
        if self.message:
            found["message"] = self.message
        return found


def attempt(bench: Bench, case: Case) -> Outcome:
    """Run a case's calls once."""
    with bench.placed(case.scenes, list(case.calls)) as (_, placed):
        try:
            bench.run(placed)
        except Failed as problem:
            return Outcome(problem.kind, message=problem.message)
        if case.second is None:
            return Outcome(AGREES)
        found = Comparison(placed[0], placed[-1], case.scenes[case.first.scene]).difference(case.output)
        return Outcome(AGREES if found is None else DIFFERS, found)
