"""What can be asked of tools/repeat.py without a GPU: usage, and the cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import repeat
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
    assert len({cell.name for cell in repeat.CELLS}) == len(repeat.CELLS) == 8
    assert {cell.entry for cell in repeat.CELLS} == {"prefill", "extend", "decode"}
