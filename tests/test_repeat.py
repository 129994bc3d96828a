"""What can be asked of tools/repeat.py without a GPU: usage, the cells, and how a record is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import repeat
from tools.archive import scores
from tools.core.errors import UserError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "cpu"], "target cpu: a CUDA target is needed"),
        (["--gpu", "h200", "--calls", "1"], "--calls 1: at least two"),
        (["--gpu", "h201"], "h201"),
        ([], "--gpu"),
    ],
)
def test_bad_usage_is_one_line(options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        repeat.main(options)
    assert "\n" not in str(caught.value)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(UserError, match=r"kept.json: exists already"):
        repeat.main(["--gpu", "h200", "--output", str(tmp_path / "kept.json")])


def test_cells_have_names_of_their_own() -> None:
    assert len({cell.name for cell in repeat.CELLS}) == len(repeat.CELLS) == 9
    assert {cell.entry for cell in repeat.CELLS} == {"prefill", "extend", "decode"}


def record_of(calls: list[int], same: bool = True) -> dict[str, Any]:
    """A record of repeat.py in which no word moved: a cell for each number of calls."""
    none = {"differing_words": 0, "copied_gbps": None}
    return {"same": same, "cells": [{"calls": number, **{mode: dict(none) for mode in repeat.MODES}} for number in calls]}


def test_calls_of_every_mode_are_counted() -> None:
    assert repeat.MODES == ("alone", "beside_copies", "beside_gathers")
    assert scores.counted("r.json", "repeats", record_of([10, 4])) == 3 * 10 + 3 * 4


@pytest.mark.parametrize("mode", repeat.MODES)
def test_a_record_says_whether_a_word_moved(mode: str) -> None:
    moved, still = record_of([10, 4]), record_of([10, 4], same=False)
    moved["cells"][1][mode]["differing_words"] = 1
    for record, stated in ((moved, "True"), (still, "False")):
        with pytest.raises(UserError, match=rf"r.json: same is {stated}"):
            scores.counted("r.json", "repeats", record)
    assert scores.counted("r.json", "repeats", {**moved, "same": False}) == 42


@pytest.mark.parametrize("mode", repeat.MODES)
def test_a_record_without_a_mode_is_none(mode: str) -> None:
    record = record_of([10])
    del record["cells"][0][mode]
    with pytest.raises(UserError, match=rf"r.json: no record of kind repeats: KeyError: '{mode}'"):
        scores.counted("r.json", "repeats", record)
