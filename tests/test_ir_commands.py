"""ir.py as it is used: a whole run with scripted reports, messages of bad input, what verify finds, long runs."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest

from tests.ir_tools import ROOT, Agent, Scripted, action, decision, edited, make_run, opportunity, started, unsynced
from tools.core.errors import UserError
from tools.core.files import canonical_json, sha256_bytes
from tools.ir import main
from tools.search import log, quick
from tools.search.records import record_bytes
from tools.search.run import Run
from tools.search.schemas import schema
from tools.search.verify import verify

KINDS = ("opportunity", "implementation", "action", "audit", "lineage", "run")


# ---------------------------------------------------------------- a whole run


class Shell:
    """Runs commands on one folder, and writes the files that they read."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.files = folder.parent

    def __call__(self, command: str, *words: str, file: Any = None, source: bytes | None = None) -> Any:
        """The JSON that a command prints."""
        given = [command, "--run", str(self.folder), "--json", *words]
        if file is not None:
            (self.files / "file.json").write_text(json.dumps(file))
            given += ["--file", str(self.files / "file.json")]
        if source is not None:
            (self.files / "child.cpp").write_bytes(source)
            given += ["--source", str(self.files / "child.cpp")]
        assert main(given) == 0
        return json.loads(self.capsys.readouterr().out)

    @property
    def run(self) -> Run:
        return Run.open(self.folder)


def test_a_run_by_its_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Root, three forms, a failure, a slower child that is continued and whose child is promoted, an archive, a
    reactivation, a merge, an abandonment, kappa reset, and the stop."""
    shell, scripted = Shell(tmp_path / "run", capsys), Scripted()
    scripted.speeds = {"I0002": 1.05, "I0003": 0.9, "I0004": 1.02, "I0005": 0.85}
    scripted.statuses = {"I0001": "BIT_MISMATCH", "I0006": "BIT_MISMATCH", "I0007": "COMPILE_ERROR"}
    with unsynced(), scripted.at_work():
        assert shell("init", "--gpu", "cpu", "--kappa-max", "2")["status"]["stage"] == "initialization"
        assert shell("audit")["status"]["incumbent"] == ROOT

        def attempt(form: str, parents: list[str], taken: str, changed: str = "decode") -> str:
            scripted.code = dict.fromkeys(("prefill", "extend", "decode"), "identical")
            scripted.code.update(dict.fromkeys(changed.split(), "changed"))
            source = edited(shell.run.source(parents[0]), f"{taken} of {parents}")
            made = shell("act", file=action(opportunity=taken, parents=parents, form=form), source=source)["recorded"]
            shell("audit")
            return str(made[1]["id"])

        def decide(word: str, audit: str, subject: str, *follow: Any, **other: Any) -> Any:
            return shell("decide", file=decision(word, audit=audit, subject=subject, follow_ups=list(follow), **other))

        shell("propose", file=opportunity())
        attempt("decode_only", [ROOT], "O0001")  # fails
        again = opportunity(direction="layout", evidence=["E0001"])
        assert decide("continue", "E0001", ROOT, again)["status"]["kappa"] == 1

        attempt("full_sequence_only", [ROOT], "O0002", "prefill extend")  # slower, but useful
        kept = decide(
            "continue", "E0002", "I0002", opportunity(direction="use-layout", evidence=["E0002"], applies_to=["I0002"])
        )
        assert kept["status"]["stop_reason"].startswith("kappa: 2 audits")
        with pytest.raises(UserError, match="stopped"):
            attempt("joint", ["I0002"], "O0003")

    # A run with more patience goes the whole way.
    shutil.rmtree(tmp_path / "run")
    with unsynced(), scripted.at_work():
        shell("init", "--gpu", "cpu", "--kappa-max", "3", "--max-audits", "7")
        shell("audit")
        shell("propose", file=opportunity())
        attempt("decode_only", [ROOT], "O0001")
        decide("continue", "E0001", ROOT, opportunity(direction="layout", evidence=["E0001"]))
        attempt("full_sequence_only", [ROOT], "O0002", "prefill extend")
        decide("continue", "E0002", "I0002", opportunity(direction="use-layout", evidence=["E0002"], applies_to=["I0002"]))
        attempt("joint", ["I0002"], "O0003", "prefill extend decode")
        state = shell.run.state
        assert (state.incumbent, state.kappa) == ("I0003", 0) and state.speedup == pytest.approx(1 / 0.9, rel=0.01)
        decide("continue", "E0003", "I0003", opportunity(direction="hints", evidence=["E0003"], applies_to=["I0003", ROOT]))
        attempt("decode_only", [ROOT], "O0004")
        assert decide("archive", "E0004", "I0004")["status"]["archive"] == ["I0004"]
        merge = opportunity(direction="both", evidence=["E0003", "E0004"], applies_to=["I0003", "I0004"], merge=True)
        shell("propose", file=merge)  # made after I0004 was archived: acting on it brings it back
        attempt("joint", ["I0003", "I0004"], "O0005", "prefill extend decode")
        state = shell.run.state
        assert state.incumbent == "I0005" and state.kappa == 0 and "I0004" in state.frontier
        assert [edge for edge in state.edges if edge[1] == "I0005"] == [
            ("I0003", "I0005", "A0005"),
            ("I0004", "I0005", "A0005"),
        ]
        skip = opportunity(direction="skip", evidence=["E0005"], applies_to=["I0005"])
        decide("continue", "E0005", "I0005", skip)
        attempt("joint", ["I0005"], "O0006")
        decide("continue", "E0006", "I0005", opportunity(direction="skip", evidence=["E0006"], applies_to=["I0005"]))
        attempt("joint", ["I0005"], "O0007")
        last = decide("abandon", "E0007", "I0005", evidence=["E0006", "E0007"])["status"]
        assert last["stop_reason"].startswith("audits: 7 of 7") and last["stage"] == "stopped" and last["kappa"] == 2
        assert shell("usage", "--unavailable", "none are shown")["status"]["tokens"] is None
        found = shell("verify")
        assert (found["sources"], found["reports"], found["notes"]) == (8, 8, [])
        for identity in ("I0001", "I0006", "I0007"):
            assert shell.run.state.vertex_status(identity) == "failed"
        assert {path.name for path in map(Path, shell("report")["wrote"])} >= {"report.html"}
        assert "I0005" in shell("context", "--budget", "8000")["context"]
    assert main(["status", "--run", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "stopped (audits: 7 of 7 are made)" in said and "unavailable: none are shown" in said
    published = json.loads(canonical_json(last))
    assert published["incumbent"] == "I0005"


# ---------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few attempts."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    make_run(folder, 6)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "--run", "nowhere"], "no such folder"),
        (["init", "--gpu", "cpu", "--run", "{run}"], "holds a run already"),
        (["init", "--gpu", "b300", "--run", "{new}"], "unknown target 'b300'"),
        (["init", "--gpu", "cpu", "--run", "{new}", "--without", "luck"], "none of history"),
        (["init", "--gpu", "cpu", "--run", "{new}", "--kappa-max", "0"], "not a whole number from 1"),
        (["init", "--gpu", "cpu", "--run", "{full}"], "is not empty"),
        (["propose", "--run", "{run}", "--file", "{text}"], "not JSON"),
        (["propose", "--run", "{run}", "--file", "{twice}"], "'direction' stands twice"),
        (["propose", "--run", "{run}", "--file", "{list}"], "is not a JSON object"),
        (["act", "--run", "{run}", "--file", "{list}", "--source", "{text}"], "is not a JSON object"),
        (["usage", "--run", "{run}"], "or --unavailable"),
        (["usage", "--run", "{run}", "--unavailable", "x", "--input-tokens", "3"], "stands alone"),
        (["audit", "--run", "{run}", "--implementation", "I0099"], "unknown-record"),
        (["fly", "--run", "{run}"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line(copy: Path, tmp_path: Path, words: list[str], message: str) -> None:
    for name, text in (("text", "no"), ("twice", '{"direction": "a", "direction": "b"}'), ("list", "[1]")):
        (tmp_path / name).write_text(text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    places = {name: tmp_path / name for name in ("text", "twice", "list", "full", "new")}
    given = [word.format(run=copy, **places) for word in words]
    before = (copy / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match=message) as caught:
        main(given)
    assert "\n" not in str(caught.value) and (copy / "log.jsonl").read_bytes() == before


def test_help_and_errors_of_the_program(copy: Path, repo: Path) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(repo / "tools" / "ir.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, input="[]")

    assert "status" in call("--help").stdout
    assert json.loads(call("status", "--run", str(copy), "--json").stdout)["audited"] == 6
    wrong = call("propose", "--run", str(copy), "--file", "-")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1


def test_an_action_may_describe_its_child_anew(tmp_path: Path) -> None:
    with unsynced():
        agent = started(tmp_path / "run")
        run: Run = agent.run
        run.propose(opportunity())
        fields = action(implementation={"dispatch": "two passes"})
        child, _ = run.act(fields, edited(agent.root, "x"), "cpp")
        assert child["dispatch"] == "two passes" and child["shared_regions"] == ["namespace numerics"]
        with pytest.raises(UserError, match="suffix"):
            run.act(action(), edited(agent.root, "y"), "cu")
        with pytest.raises(UserError, match="implementation: an object"):
            run.act(action(implementation={"id": "I0005"}), edited(agent.root, "y"), "cpp")


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


# ---------------------------------------------------------------- long runs


def test_a_long_run_is_answered_at_once(tmp_path: Path, repo: Path) -> None:
    """300 attempts in these times; 1,000 take 0.25 s and 2.7 s on two cores."""
    folder = tmp_path / "run"
    make_run(folder, 300)
    started_at = time.perf_counter()
    subprocess.run(
        [sys.executable, str(repo / "tools" / "ir.py"), "status", "--run", str(folder)], check=True, capture_output=True
    )
    status = time.perf_counter() - started_at
    started_at = time.perf_counter()
    found = verify(folder)
    assert status < 2 and time.perf_counter() - started_at < 10
    assert found["sources"] == 301 and found["records"] > 1500


def test_ten_thousand_records(tmp_path: Path) -> None:
    """Ids grow beyond four digits, and nothing is read twice for a step."""
    with unsynced():
        agent: Agent = started(tmp_path / "run")
        run = agent.run
        for number in range(9_998):
            run.propose(opportunity(direction=f"d{number}"))
        started_at = time.perf_counter()
        run.propose(opportunity(direction="one-more"))
        run.propose(opportunity(direction="last"))
        assert time.perf_counter() - started_at < 1
    again = Run.open(tmp_path / "run")
    assert again.state.next_id("O") == "O10001" and again.state == run.state
    assert verify(tmp_path / "run")["records"] == 10_002
