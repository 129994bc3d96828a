"""What verify and reading find: records, logs, sources and reports that are not what was written; schemas and their quick test."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
from ir_tools import ROOT, Scripted, new_run, opportunity, started, unsynced

from tools.core.errors import UserError
from tools.core.files import canonical_json, sha256_bytes
from tools.search import log, quick
from tools.search.records import record_bytes
from tools.search.run import Run
from tools.search.schemas import schema
from tools.search.verify import verify

KINDS = ("opportunity", "implementation", "action", "audit", "lineage", "run")


def rechained(folder: Path, change: Callable[[list[Any]], None]) -> None:
    """Change the log's lines and chain them anew: what a forger would do."""
    lines = log.read_lines(folder)
    change(lines)
    before = log.START
    for line in lines:
        line["prev"] = before
        line["hash"] = before = sha256_bytes(canonical_json({key: value for key, value in line.items() if key != "hash"}))
    (folder / "log.jsonl").write_bytes(b"".join(canonical_json(line) + b"\n" for line in lines))


def rewritten(folder: Path, identity: str, **fields: Any) -> None:
    """Change a record, its hash and facts in the log, and the chain."""
    path = log.record_path(folder, identity)
    record = {**json.loads(path.read_bytes()), **fields}
    path.write_bytes(record_bytes(record))

    def change(lines: list[Any]) -> None:
        for line in lines:
            for named in line["records"]:
                if named["id"] == identity:
                    named["sha256"] = sha256_bytes(record_bytes(record))

    rechained(folder, change)


def test_a_truncated_or_edited_record_is_named(copy: Path) -> None:
    path = copy / "records" / "A0002.json"
    content = path.read_bytes()
    for data, words in (
        (content[:-40], "not JSON"),
        (content.replace(b"joint", b"decode_only"), "does not have the hash"),
        (content.replace(b"action/1", b"action/2"), "newer version"),
        (None, "is missing"),
    ):
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(UserError, match=words) as caught:
            verify(copy)
        assert "A0002.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines.insert(3, lines.pop(4)), "line 4: chain: numbered 4, expected 3"),
        (lambda lines: lines.pop(2), "line 3: chain"),
        (lambda lines: lines[2].update(time="2020-01-01T00:00:00.000000+00:00"), "line 3: chain: its content"),
        (lambda lines: lines[5]["facts"].update(x=1), "line 6: chain: its content"),
        (lambda lines: lines[4].update(prev="0" * 64), "line 5: chain: does not follow"),
    ],
)
def test_an_edited_or_reordered_log_is_named(copy: Path, change: Callable[[list[Any]], None], words: str) -> None:
    lines = log.read_lines(copy)
    change(lines)
    (copy / "log.jsonl").write_bytes(b"".join(canonical_json(line) + b"\n" for line in lines))
    with pytest.raises(UserError, match=words):
        Run.open(copy)


def test_a_line_of_garbage_in_the_middle_is_no_torn_line(copy: Path) -> None:
    content = (copy / "log.jsonl").read_bytes().split(b"\n")
    content[3] = content[3][:50]
    (copy / "log.jsonl").write_bytes(b"\n".join(content))
    with pytest.raises(UserError, match="line 4: chain"):
        Run.open(copy)


def test_a_log_that_was_chained_anew_is_held_against_its_records(copy: Path) -> None:
    with pytest.raises(UserError, match="facts are not those of its records"):
        rechained(copy, lambda lines: lines[4]["facts"]["audits"][0].update(T=0.5))
        verify(copy)


def test_rules_are_checked_again(finished: Path, tmp_path: Path) -> None:
    def twice(lines: list[Any]) -> None:
        lines[2]["records"] = lines[3]["records"]

    def promoted(lines: list[Any]) -> None:
        lines[4]["facts"]["audits"][0].update(promoted=True, status="BIT_MISMATCH", verified=False)

    shutil.copytree(finished, tmp_path / "twice")
    rechained(tmp_path / "twice", twice)
    with pytest.raises(UserError, match=r"facts|duplicate-id"):
        verify(tmp_path / "twice")
    shutil.copytree(finished, tmp_path / "promoted")
    rewritten(tmp_path / "promoted", "E0001", promoted=True, status="BIT_MISMATCH", verified=False)
    rechained(tmp_path / "promoted", promoted)
    with pytest.raises(UserError, match="promotion-not-granted"):
        verify(tmp_path / "promoted")


def test_sources_reports_and_frozen_files_are_held_against_their_hashes(copy: Path) -> None:
    run = Run.open(copy)
    source, report = run.source_path("I0003"), copy / "reports" / "E0002.json"
    for path, words in (
        (source, "rebuilt from the patches"),
        (report, "not the report that E0002"),
        (copy / "config.json", "section"),
        (copy / "prompts" / "action.md", "prompt"),
        (run.source_path(ROOT), "source of I0000"),
    ):
        content = path.read_bytes()
        path.write_bytes(content.replace(b"a", b"b", 20))
        with pytest.raises(UserError, match=words):
            verify(copy)
        path.write_bytes(content)
    source.unlink()  # rebuilt from the patches
    assert sha256_bytes(run.source("I0003")) == run.state.implementations["I0003"].source["sha256"]
    verify(copy)
    patch = json.loads((copy / "records" / "A0002.json").read_bytes())["patch"]
    rewritten(copy, "A0002", patch=patch.replace("+// end of", "+// End of"))
    with pytest.raises(UserError, match="A0002: patch"):
        verify(copy)


def test_figures_are_those_of_the_reports_samples(tmp_path: Path) -> None:
    run, scripted = new_run(tmp_path / "run"), Scripted()
    with unsynced(), scripted.at_work():
        run.audit()
        verify(run.folder, figures=True)
        honest = json.loads((run.folder / "records" / "E0000.json").read_bytes())

        def lower(lines: list[Any]) -> None:
            lines[1]["facts"]["audits"][0]["T"] = 0.5

        rewritten(run.folder, "E0000", T=0.5)
        rechained(run.folder, lower)
        verify(run.folder)  # all hashes agree
        with pytest.raises(UserError, match=f"E0000: T is 0.5, its report gives {honest['T']}"):
            verify(run.folder, figures=True)


def test_another_version_is_refused(copy: Path, tmp_path: Path) -> None:
    rechained(copy, lambda lines: lines[-1].update(type="teleport"))
    with pytest.raises(UserError, match="'teleport' was written by a newer version"):
        Run.open(copy)
    rechained_run = tmp_path / "other"
    started(rechained_run)
    path = rechained_run / "run.json"
    path.write_bytes(path.read_bytes().replace(b"areal-tik/run/1", b"areal-tik/run/2"))
    with pytest.raises(UserError, match="areal-tik/run/2 was written by a newer version"):
        Run.open(rechained_run)


def test_a_clock_that_goes_back_warns_once(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.open(copy)
    last = run.lines[-1]["time"]
    with mock.patch.object(log, "now_text", lambda: "2020-01-01T00:00:00.000000+00:00"):
        run.propose(opportunity(direction="earlier"))
    assert run.lines[-1]["time"] == last and Run.open(copy).state == run.state
    said = capsys.readouterr().err
    assert said.count("warning:") == 1 and last in said


def test_what_no_line_names_is_told(copy: Path) -> None:
    (copy / "records" / "O0999.json").write_text("{}")
    (note,) = verify(copy)["notes"]
    assert "O0999.json" in note


# ---------------------------------------------------------------- schemas


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_hold_their_examples(kind: str) -> None:
    found = schema(kind)
    jsonschema.Draft202012Validator.check_schema(found)
    described = [name for name, part in found["properties"].items() if "description" in part]
    assert found["description"] and len(described) >= 3
    for example in found["examples"]:
        jsonschema.Draft202012Validator(found).validate(example)
        assert quick.compiled(found)(example), "the quick test knows every keyword of the schema"


def test_quick_is_never_kinder_than_jsonschema() -> None:
    """Examples with one thing changed: what is quickly accepted is valid, and most of what is valid is quickly accepted."""
    draw = random.Random(1)
    odd: list[Any] = [None, True, 0, -1, 1.5, "", "I0001", "x", [], ["x"], ["a", "a"], [1], {}, {"a": 1}, 10**30, "0" * 64]
    counts = {"accepted": 0, "refused": 0}
    for kind in KINDS:
        found = schema(kind)
        accepts, judge = quick.compiled(found), jsonschema.Draft202012Validator(found)
        for _ in range(400):
            record = json.loads(json.dumps(found["examples"][0]))
            place: Any = record
            while True:
                key: Any = draw.choice(list(place) if isinstance(place, dict) else list(range(len(place))) or [None])
                inner = place[key] if key is not None else None
                if key is None or not isinstance(inner, dict | list) or not inner or draw.random() < 0.4:
                    break
                place = inner
            if draw.random() < 0.15 and isinstance(place, dict):
                place["unknown"] = 1
            elif draw.random() < 0.15 and isinstance(place, dict):
                del place[key]
            elif key is not None:
                place[key] = draw.choice(odd)
            valid = judge.is_valid(record)
            assert accepts(record) == valid, (kind, record)
            counts["accepted" if valid else "refused"] += 1
    assert min(counts.values()) > 100, counts
