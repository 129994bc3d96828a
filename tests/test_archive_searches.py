"""Forged published searches are caught, although every hash that stands in the way was mended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archive_tools import (
    RUN,
    Quick,
    audits,
    faster,
    forge_audit_report,
    forge_records,
    relisted,
    repack,
)

# ---------------------------------------------------------------- published runs


def refused(files: dict[str, bytes]) -> Any:
    """The last admissible audit that was not promoted."""
    return next(a for a in reversed(audits(files)) if a["admissible"] and not a["promoted"] and a["incumbent"] is not None)


def rewritten(path: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        assert old in files[path]
        files[path] = files[path].replace(old, new, 1)

    return change


def forged_promotion(files: dict[str, bytes]) -> None:
    forge_records(files, {refused(files)["id"]: lambda record: record.update(promoted=True)})


def promoted_in_the_report_too(files: dict[str, bytes]) -> None:
    def change(report: Any) -> None:
        report["promotion"].update(promoted=True, sealed="passed", blockers=[], reason="T is 9 % lower")

    forge_audit_report(files, refused(files)["id"], change, lambda record: record.update(promoted=True))


def inadmissible_promotion(files: dict[str, bytes]) -> None:
    forge_records(files, {"E0006": lambda record: record.update(promoted=True)})


def a_gain(files: dict[str, bytes]) -> None:
    """Of the last promotion."""
    last = next(audit for audit in reversed(audits(files)) if audit["promoted"])
    forge_records(files, {last["id"]: lambda record: record.update(gain=0.5)})


def no_promotion(files: dict[str, bytes]) -> None:
    last = next(audit for audit in reversed(audits(files)) if audit["promoted"])
    forge_records(files, {last["id"]: lambda record: record.update(promoted=False)})


def better_times(files: dict[str, bytes]) -> None:
    """The candidate's samples of one cell, medians left, record and all hashes mended."""
    forge_audit_report(files, refused(files)["id"], faster)


def better_T(files: dict[str, bytes]) -> None:
    forge_records(files, {refused(files)["id"]: lambda record: record.update(T=0.5)})


def a_report_less(files: dict[str, bytes]) -> None:
    del files["reports/E0003.json"]


def lines_swapped(files: dict[str, bytes]) -> None:
    lines = files["log.jsonl"].splitlines(keepends=True)
    lines[4], lines[5] = lines[5], lines[4]
    files["log.jsonl"] = b"".join(lines)


def a_record_more(files: dict[str, bytes]) -> None:
    files["records/O0999.json"] = files["records/O0001.json"]


RUNS = [
    ("a record", rewritten("records/A0001.json", b"joint", b"decode_only"), "A0001"),
    ("a line of the log", rewritten("log.jsonl", b'"promoted":false', b'"promoted":true'), "log.jsonl: line"),
    ("lines out of order", lines_swapped, "log.jsonl: line"),
    ("a report", rewritten("reports/E0003.json", b'"PASSED"', b'"REFUSED"'), "E0003"),
    ("a missing report", a_report_less, "E0003"),
    ("a record that no line names", a_record_more, "O0999"),
    ("a prompt", rewritten("prompts/action.md", b"e", b"a"), "prompts/action.md"),
    ("the config", rewritten("config.json", b"1.1", b"9.1"), "config.json"),
    ("a promotion", forged_promotion, "promoted is True"),
    ("a promotion, also in its report", promoted_in_the_report_too, "promotion.promoted is True"),
    ("a promotion of what is too slow", inadmissible_promotion, "promotion-not-granted"),
    ("a promotion taken away", no_promotion, "promoted is False"),
    ("a gain", a_gain, "gain is 0.5"),
    ("times", better_times, "median"),
    ("T", better_T, "T is 0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in RUNS], ids=[row[0] for row in RUNS])
def test_a_forged_search_is_caught(
    verifier: Quick, archive: Path, change: Callable[[dict[str, bytes]], None], words: str
) -> None:
    verifier.catches(archive, lambda root: repack(root, change), RUN, words)


def flipped(root: Path) -> None:
    data = bytearray((root / RUN / "run.xz").read_bytes())
    data[len(data) // 2] ^= 1
    (root / RUN / "run.xz").write_bytes(data)


@pytest.mark.parametrize(("mend", "words"), [(False, "has sha256"), (True, "damaged")])
def test_a_flipped_bit_of_a_search_is_caught(verifier: Quick, archive: Path, mend: bool, words: str) -> None:
    verifier.catches(archive, lambda root: (flipped(root), relisted(root) if mend else None), f"{RUN}/run.xz", words)
