"""Fixtures of the tests that tamper with the archive; conftest.py gives them to all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from archive_tools import Quick, copied, restored
from ir_tools import unsynced


@pytest.fixture(scope="session")
def verifier() -> Quick:
    return Quick()


@pytest.fixture(scope="session")
def whole_archive(repo: Path, verifier: Quick, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that holds."""
    root = copied(repo, tmp_path_factory.mktemp("archive"))
    assert verifier.problem(root) is None
    return root


@pytest.fixture
def archive(whole_archive: Path) -> Iterator[Path]:
    """The copy, to tamper with."""
    with unsynced(), restored(whole_archive):
        yield whole_archive
