"""What tests of rules share: copies of runs, and the check that a refusal names its rule and leaves no trace."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ir_tools import ROOT, Agent, edited, new_run, started, unsynced

from tools.search.records import RuleError
from tools.search.run import Run

Make = Callable[..., Agent]


def templates(folder: Path) -> Path:
    """A run before and one after its root's audit, of which tests take copies."""
    with unsynced():
        started(folder / "started")
        new_run(folder / "new")
    return folder


def maker(templates: Path, folder: Path) -> Make:
    """make(template, settings...): an agent on a copy of a run, or on a new one with these settings."""

    def make(template: str = "started", **settings: Any) -> Agent:
        if settings:
            return started(folder, **settings)
        shutil.copytree(templates / template, folder)
        return Agent(Run.open(folder))

    return make


@contextlib.contextmanager
def refused(rule: str, run: Run, way_out: str = "") -> Iterator[None]:
    """A RuleError of this rule, one line of record, rule and way out; log and state are as before."""
    before = (run.folder / "log.jsonl").read_bytes()
    with pytest.raises(RuleError, match=way_out or None) as caught:
        yield
    assert caught.value.rule == rule, str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.record}: {rule}: ") and "\n" not in str(caught.value)
    assert (run.folder / "log.jsonl").read_bytes() == before
    assert Run.open(run.folder).state == run.state


def child_of(agent: Agent, parent: str = ROOT) -> bytes:
    return edited(agent.run.source(parent), agent.note())
