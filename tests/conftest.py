"""Options and fixtures of all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from archive_fixtures import archive, verifier, whole_archive  # noqa: F401
from ir_fixtures import copy, finished, folder, make, run, scripted  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", metavar="TARGET", help="target of the tests marked gpu; the one whose GPU is here else")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    from tools.evaluator.mutation import default_targets

    config.option.gpu = config.option.gpu or default_targets()[1]
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


# A shell without job control starts what runs in the background with Ctrl-C ignored, and programs inherit that: the tests of
# interrupts send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> str:
    """The target of GPU tests."""
    return str(request.config.getoption("--gpu"))


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parents[1]
