"""ir.py as it is used: a whole run with scripted reports, messages of bad input, long runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ir_tools import ROOT, Agent, Scripted, action, decision, edited, make_run, opportunity, started, unsynced

from tools.core.errors import UserError
from tools.ir import main
from tools.search.run import Run
from tools.search.verify import verify

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
        found = shell("verify", "--figures")
        assert (found["sources"], found["reports"], found["notes"]) == (8, 8, [])
        for identity in ("I0001", "I0006", "I0007"):
            assert shell.run.state.vertex_status(identity) == "failed"
        assert {path.name for path in map(Path, shell("report")["wrote"])} >= {"report.html"}
        assert "I0005" in shell("context", "--budget", "8000")["context"]
    assert main(["status", "--run", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "stopped (audits: 7 of 7 are made)" in said and "unavailable: none are shown" in said
    assert last["incumbent"] == "I0005"


# ---------------------------------------------------------------- bad input


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_an_audit_without_the_targets_gpu_names_export_job(tmp_path: Path, repo: Path) -> None:
    """One error line, exit code 2, nothing recorded: the machine is no fault of the kernel's."""
    folder = tmp_path / "run"
    assert main(["init", "--gpu", "h200", "--run", str(folder)]) == 0
    before = (folder / "log.jsonl").read_bytes()
    done = subprocess.run(
        [sys.executable, str(repo / "tools" / "ir.py"), "audit", "--run", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and done.stderr.endswith(f"{errors[0]}\n"), done.stderr
    assert "target h200 needs" in errors[0] and f"ir.py export-job --run {folder}" in errors[0]
    assert (folder / "log.jsonl").read_bytes() == before and not list((folder / "reports").glob("*.json"))
    assert not done.stdout


def test_the_hint_of_export_job_is_what_run_sh_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed command, with a checkout in its place, gets past run.sh's own question for one."""
    assert main(["init", "--gpu", "cpu", "--run", str(tmp_path / "run")]) == 0
    assert main(["export-job", "--run", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    hint = re.search(r"PYTHON=\S+ (sh \S+/run\.sh) (\S+)$", said, re.M)
    assert hint and hint[2] == "/path/to/checkout", said
    done = subprocess.run(
        [*hint[1].split(), "/nowhere"], cwd=tmp_path / "run" / "jobs", capture_output=True, text=True, check=False,
        env={"PYTHON": "echo", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("/nowhere/tools/search/jobs.py "), done


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


# ---------------------------------------------------------------- long runs


def test_a_long_run_is_answered_at_once(tmp_path: Path, repo: Path) -> None:
    """300 attempts in these times; 1,000 take 0.2 s and 2.0 s on two cores."""
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
