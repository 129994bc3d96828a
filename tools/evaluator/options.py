"""What one evaluation is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.core.config import Target
from tools.evaluator.grids import Grid


@dataclass(frozen=True)
class Options:
    """One run, as the command line states it."""

    gpu: str | None
    output: Path
    source: Path | None = None
    root: Path | None = None
    incumbent: Path | None = None
    root_report: Path | None = None
    config: Path | None = None
    cases: str = "full"
    require: tuple[str, ...] = ()
    allow_compat: bool = False
    seed: int | None = None
    only: tuple[str, ...] = ()
    timing: bool = True
    hot: bool = True  # time with shared inputs too
    command: tuple[str, ...] = ()
    # Only from Python, for tests: a target and a grid in place of the packaged ones, and guards that are switched off.
    target: Target | None = None
    grid: Grid | None = None
    guards_off: frozenset[str] = frozenset()
    cached: bool = False  # the candidate may come from the cache
    observed: bool = True  # dispatch and counters after timing
