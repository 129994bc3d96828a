"""Running one case: do its two calls agree, does its call fail?"""

from __future__ import annotations

from dataclasses import dataclass

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
