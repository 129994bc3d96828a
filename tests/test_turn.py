"""Evaluations on one GPU take turns; on the CPU nothing is locked."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tools.core.errors import UserError
from tools.evaluator import turn


def hold(folder: Path, told: Any, until: Any) -> None:
    with turn.take("cuda", lambda: told.put("waits"), folder):
        told.put("has it")
        until.get(timeout=30)


def test_the_second_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    told, until = [[context.Queue(), context.Queue()] for _ in range(2)]
    first, second = (context.Process(target=hold, args=(tmp_path, *queues)) for queues in zip(told, until, strict=True))
    first.start()
    assert told[0].get(timeout=30) == "has it"
    second.start()
    assert told[1].get(timeout=30) == "waits"
    time.sleep(0.2)
    assert told[1].empty()
    first.kill()  # however it ends
    assert told[1].get(timeout=30) == "has it"
    until[1].put("")
    second.join(30)
    assert second.exitcode == 0


def test_on_the_cpu_there_are_no_turns(tmp_path: Path) -> None:
    with turn.take("cpu", lambda: None, tmp_path), turn.take("cpu", lambda: pytest.fail("waited"), tmp_path):
        assert not list(tmp_path.iterdir())


def test_a_lock_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    name = tmp_path / f"areal-tik-gpu-{os.getuid()}.lock"
    name.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="lock cannot be opened"):
        turn.take("cuda", lambda: None, tmp_path)
    name.unlink()
    name.mkdir()
    with pytest.raises(UserError, match="lock cannot be opened"):
        turn.take("cuda", lambda: None, tmp_path)
    name.rmdir()
    os.mkfifo(name)
    with pytest.raises(UserError, match="not a plain file"):
        turn.take("cuda", lambda: None, tmp_path)
