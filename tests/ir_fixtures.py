"""Fixtures of the tests of ir.py and tools/search; conftest.py gives them to all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ir_breaking import Make, maker, templates
from ir_tools import ROOT, Scripted, action, edited, make_run, new_run, opportunity, unsynced

from tools.search.run import Run


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def run(tmp_path: Path, scripted: Scripted) -> Run:
    """Root audited, one child that waits for its audit."""
    made = new_run(tmp_path / "run")
    with scripted.at_work():
        made.audit(ROOT)
        made.propose(opportunity())
        made.act(action(), edited(made.source(ROOT), "child"), "cpp")
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few attempts."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    make_run(folder, 6)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to break."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that `make` copies."""
    return templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes agents on runs; nothing is synced."""
    with unsynced():
        yield maker(folder, tmp_path / "run")
