"""Runs of the whole evaluator on the CPU target: what passes, what each kind of failure becomes, what is never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import evaluator_tools
import pytest
import torch

from tools.core.errors import UserError
from tools.core.files import REPO_ROOT
from tools.evaluator import judge, race, report
from tools.evaluator.grids import cells
from tools.evaluator.guards import Guards
from tools.evaluator.options import Options

COMMAND = [sys.executable, str(REPO_ROOT / "tools" / "evaluate.py"), "--gpu", "cpu"]


def quiet(stage: str, text: str) -> None:
    """A progress function that shows nothing."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[evaluator_tools.Bench]:
    made = evaluator_tools.Bench(tmp_path_factory.mktemp("candidates"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a real quick evaluation of the CPU target."""
    return judge.evaluate(Options(gpu="cpu", output=tmp_path_factory.mktemp("quick") / "report.json", cases="quick"), quiet)


def evaluate(folder: Path, **options: Any) -> dict[str, Any]:
    return judge.evaluate(Options(**{"gpu": "cpu", "output": folder / "report.json", "cases": "quick", **options}), quiet)


# ---------------------------------------------------------------- a pass


def test_quick_evaluation_passes(passed: dict[str, Any]) -> None:
    assert passed["status"] == "PASSED", passed["reason"]
    assert passed["reason"] is None and not passed["compatibility"]
    assert {cell["kind"] for cell in passed["timing"]["cells"]} == {"prefill", "update", "decode"}
    for check in passed["correctness"]["checks"]:
        assert check["status"] == "passed" or check["name"] == "library", check
        assert check["cases"] or check["status"] == "skipped"
    assert report.recompute(passed) == []
    assert abs(sum(cell["share"] for cell in passed["objective"]["cells"]) - 1) < 1e-9
    for cell in passed["timing"]["cells"]:
        cold = cell["modes"]["cold"]
        assert cold["unique_bytes"] > 2 * evaluator_tools.load_target("cpu").config["target"]["l2_bytes"]
        assert cold["kernels"]["candidate"]["verified_outputs"] == cold["calls"]
        assert cold["kernels"]["candidate"]["median_us"] > cold["floor_us"]


def test_report_survives_a_round_trip(passed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "copy.json"
    written = report.write(path, json.loads(json.dumps(passed)))
    assert report.read(path) == written == json.loads(json.dumps(passed))
    with pytest.raises(UserError, match="exists already"):
        report.write(path, written)


def test_recompute_finds_a_changed_figure(passed: dict[str, Any]) -> None:
    for change in ("median", "ratio", "geomean"):
        tampered = json.loads(json.dumps(passed))
        mode = tampered["timing"]["cells"][0]["modes"]["cold"]
        if change == "median":
            mode["kernels"]["candidate"]["median_us"] *= 0.9
        elif change == "ratio":
            mode["best"]["ratio"] *= 1.1
        else:
            tampered["timing"]["geomeans"]["cold"]["full"]["best"]["ratio"] *= 1.1
        assert report.recompute(tampered), change


def test_schema_refuses_what_is_no_report(passed: dict[str, Any]) -> None:
    def changed(**values: Any) -> dict[str, Any]:
        return {**json.loads(json.dumps(passed)), **values}

    for bad in (
        changed(status="GOOD"),
        changed(status="BIT_MISMATCH"),  # with timing
        changed(extra=1),
        {key: value for key, value in passed.items() if key != "hashes"},
    ):
        with pytest.raises(UserError):
            report.validate(bad)


def test_root_report_gives_references(passed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "root.json"
    report.write(path, json.loads(json.dumps(passed)))
    target = evaluator_tools.load_target("cpu")
    source = target.config["kernel"]["sha256"]
    found = report.latencies(report.root(path, target, source))
    assert set(found) == {cell["name"] for cell in passed["timing"]["cells"]}
    with pytest.raises(UserError, match="another source"):
        report.root(path, target, "0" * 64)
    for number, (where, value, words) in enumerate(
        [
            (("target", "sections", "contract"), "0" * 64, "another contract"),
            (("run", "guards_off"), ["verify"], "verify was off"),
            (("compatibility",), True, "only a pass"),
        ]
    ):
        other = json.loads(json.dumps(passed))
        inner = other
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value
        report.write(tmp_path / f"{number}.json", other)
        with pytest.raises(UserError, match=words):
            report.root(tmp_path / f"{number}.json", target, source)
    with pytest.raises(UserError, match=r"environment\.processor"):
        report.refuse_other_machine(passed, {**passed["environment"], "processor": "another"})


def test_one_byte_of_a_report_is_noticed(passed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    text = json.dumps(passed, indent=1)
    median = passed["timing"]["cells"][0]["modes"]["cold"]["kernels"]["candidate"]["median_us"]
    assert str(median) in text
    path.write_text(text.replace(f'"median_us": {median}', f'"median_us": {median + 1}', 1))
    with pytest.raises(UserError, match=r"hashes\.report"):
        report.read(path)


# ---------------------------------------------------------------- failures become statuses


@pytest.mark.parametrize(
    ("fault", "only", "status", "words"),
    [
        ("decode_tail", "every_length", "BIT_MISMATCH", "every_length"),
        ("coarse", "accuracy", "BIT_MISMATCH", "witness"),
        ("crash", "tails", "RUNTIME_ERROR", "SIGSEGV"),
        ("early_exit", "tails", "RUNTIME_ERROR", "exited with code 0"),
        ("rubbish", "tails", "RUNTIME_ERROR", "rubbish"),
        ("error_code", "tails", "RUNTIME_ERROR", "a stated error"),
        ("huge_workspace", "tails", "RUNTIME_ERROR", "workspace"),
        ("hang", "tails", "TIMEOUT", "no answer"),
        ("honest", "tails", "INCOMPLETE", "only some checks"),
    ],
)
def test_status(
    bench: evaluator_tools.Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    only: str,
    status: str,
    words: str,
) -> None:
    source = evaluator_tools.perturbed(tmp_path, bench.honest, fault)
    if fault == "hang":
        target = evaluator_tools.load_target("cpu")
        target.config["limits"]["case_timeout_s"] = 3
        monkeypatch.setattr(judge, "load_target", lambda *_: target)
    got = evaluate(tmp_path, source=source, only=(only,), guards_off=evaluator_tools.UNCONFINED)
    assert got["status"] == status, got["reason"]
    assert words in got["reason"]
    assert got["timing"] is None
    assert json.loads((tmp_path / "report.json").read_text()) == got


def test_source_that_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int unified_prefill( {\n")
    got = evaluate(tmp_path, source=source)
    assert got["status"] == "COMPILE_ERROR" and "error" in got["logs"]["build"]


def test_source_that_reads_an_undeclared_file(tmp_path: Path) -> None:
    (tmp_path / "secret.h").write_text("\n")
    source = tmp_path / "reader.cpp"
    source.write_text(f'#include "{tmp_path}/secret.h"\n' + evaluator_tools.load_target("cpu").source().read_text())
    assert evaluate(tmp_path, source=source)["status"] == "REFUSED"


def test_missing_baseline_that_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = evaluator_tools.load_target("cpu")
    target.config["baselines"] = {"full": ["sdpa_cpu", "fa3"], "decode": ["sdpa_cpu", "fa3"], "quick": ["sdpa_cpu", "fa3"]}
    monkeypatch.setattr(judge, "load_target", lambda *_: target)
    got = evaluate(tmp_path, require=("fa3",))
    assert got["status"] == "REFUSED" and "required baseline fa3" in got["reason"]
    assert not got["baselines"]["fa3"]["available"] and got["baselines"]["fa3"]["reason"]


def test_behaving_until_the_checks_are_over(
    bench: evaluator_tools.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "CHECKS", {})
    source = evaluator_tools.perturbed(tmp_path, bench.honest, "late_change")
    got = evaluate(tmp_path, source=source, guards_off=evaluator_tools.UNCONFINED)
    assert got["status"] == "BIT_MISMATCH" and "differs from the witness's" in got["reason"], got["reason"]


def test_time_below_the_floor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = evaluator_tools.load_target("cpu")
    target.config["target"]["peak_tflops"] = 1e-3
    monkeypatch.setattr(judge, "load_target", lambda *_: target)
    monkeypatch.setattr(judge, "CHECKS", {})
    got = evaluate(tmp_path)
    assert got["status"] == "REFUSED" and "below the floor" in got["reason"]


def test_a_against_a_is_not_promoted_and_a_slower_one_is_not_admissible(
    bench: evaluator_tools.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "CHECKS", {})
    honest = evaluator_tools.load_target("cpu").source()
    target = evaluator_tools.load_target("cpu")
    target.config["workloads"]["prefill"] = {"batch": [1], "seqlen": [64]}
    target.config["workloads"]["update"] = {"batch": [1], "prompt": [64], "answer": 16}
    target.config["target"]["l2_bytes"] = 1 << 20
    target.config["limits"]["max_slowdown"] = 3.0  # a busy machine must not decide this test
    monkeypatch.setattr(judge, "load_target", lambda *_: target)
    same = evaluate(tmp_path, root=honest, incumbent=honest)
    assert same["status"] == "PASSED", same["reason"]
    found = same["promotion"]
    assert found["admissible"] and not found["promoted"] and "not the full cases" in found["blockers"], found
    assert found["comparison"]["sessions"] == 1 + len(same["timing"]["again"])
    assert set(same["timing"]["cells"][0]["modes"]["cold"]["kernels"]) == {"candidate", "root", "incumbent", "twin"}
    source = evaluator_tools.perturbed(tmp_path, bench.honest, "slow")
    slow = judge.evaluate(
        Options(
            gpu="cpu",
            output=tmp_path / "slow.json",
            cases="quick",
            source=source,
            root=honest,
            hot=False,
            guards_off=evaluator_tools.UNCONFINED,
        ),
        quiet,
    )
    assert slow["status"] == "PASSED", slow["reason"]
    assert set(slow["timing"]["cells"][0]["modes"]) == {"cold"} == set(slow["timing"]["geomeans"])
    assert not slow["promotion"]["admissible"] and "limit" in slow["promotion"]["problems"][0]
    assert f"guards were off: {', '.join(sorted(evaluator_tools.UNCONFINED))}" in slow["promotion"]["blockers"]


def test_a_promotion_goes_through_the_sealed_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise not looked at and the clock of T turned, an equal candidate reaches the sealed cases, and passes them."""
    monkeypatch.setattr(judge, "CHECKS", {})
    target = evaluator_tools.load_target("cpu")
    target.config["workloads"] = {
        **target.config["workloads"],
        "prefill": {"batch": [1, 2], "seqlen": [48, 96]},
        "update": None,
        "decode": {"batch": [1, 2], "context": [64, 128]},
    }
    target.config["target"]["l2_bytes"] = 1 << 20
    target.config["limits"]["max_slowdown"] = 5.0
    monkeypatch.setattr(judge, "load_target", lambda *_: target)
    better = {"verdict": "better", "why": "said so", "sessions": 1}
    monkeypatch.setattr(race.promotion, "compare", lambda sessions, w, noise=True: better)
    monkeypatch.setattr(judge.Judge, "_blockers", lambda self, root: [])
    honest = target.source()
    got = evaluate(tmp_path, root=honest, incumbent=honest)
    assert got["status"] == "PASSED", got["reason"]
    assert got["promotion"]["sealed"] == "passed" and got["promotion"]["promoted"]
    assert "sealed" not in got["run"]["stages"] and "sealed" not in json.dumps(got["timing"])
    monkeypatch.setattr(race, "sealed_cases", lambda *_: False)
    (tmp_path / "report.json").unlink()
    got = evaluate(tmp_path, root=honest, incumbent=honest)
    assert got["promotion"]["sealed"] == "failed" and got["promotion"]["reason"] == "the sealed cases failed"


def test_a_cell_in_doubt_is_measured_again_with_the_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate of the first session seems 12 % slower than the root in a cell, but not beyond its noise."""

    def session(passes: list[float]) -> list[dict[str, Any]]:
        kernels = {
            name: {"median_us": times[4], "interval_us": [times[0], times[-1]], "samples_us": times, "pass_us": times}
            for name, times in (("candidate", passes), ("root", [100.0] * 9))
        }
        return [{"name": "p", "phase": "full", "modes": {"cold": {"kernels": kernels, "baselines": {}}}}]

    noisy, quick, slow = [100.0, 101.0, 102.0, 112.0, 112.0, 112.0, 113.0, 118.0, 119.0], [101.0] * 9, [112.0] * 9
    verdicts = {1: "unclear", 2: "better"}
    monkeypatch.setattr(
        race.promotion, "compare", lambda found, w, noise=True: {"verdict": verdicts[len(found)], "why": "said so"}
    )
    raced: list[tuple[list[str], int]] = []  # kernels of later sessions, and the sessions' numbers

    def remeasured(passes: list[float], roles: list[str], number: int) -> list[dict[str, Any]]:
        raced.append((roles, number))
        return session(passes)

    for first, second, again, promoted in (
        (noisy, quick, 1, True),
        (noisy, [113.0] * 9, 1, False),
        (slow, quick, 0, False),
        (quick, [113.0] * 9, 1, True),  # not in doubt: no root is measured again
    ):
        made = object.__new__(judge.Judge)
        made.builds = dict.fromkeys(("candidate", "root", "incumbent", "twin"))  # type: ignore[arg-type]
        made.guards, made.limits = Guards(), {"max_slowdown": 1.1}
        made.record = {"objective": {"cells": [{"name": "p", "weight": 1.0}]}, "timing": {"again": []}}
        made._show = quiet
        replaced = {"_blockers": lambda root: [], "_stage": lambda name: nullcontext(), "_sealed": lambda: True}
        for name, function in {**replaced, "_remeasure": partial(remeasured, second)}.items():
            monkeypatch.setattr(made, name, function)
        made._promotion(session(first), {"p": 100.0})
        assert len(made.record["timing"]["again"]) == again
        assert made.record["promotion"]["promoted"] is promoted, made.record["promotion"]["reason"]
        assert made.record["promotion"]["sealed"] == ("passed" if promoted else "not run")
    rivals = ["candidate", "incumbent", "twin"]
    assert raced == [(["candidate", "root", "incumbent", "twin"], 1)] * 2 + [(rivals, 1)]


def test_what_may_promote_nothing() -> None:
    """A run says why it cannot promote, whatever it measures; a root report must know every cell."""
    made = object.__new__(judge.Judge)
    made.guards, made.record = Guards(), {"compatibility": False}
    made.options = Options(gpu="cpu", output=Path("x"))
    made.cells = cells(evaluator_tools.load_target("cpu").config["workloads"])
    root = {cell.name: 1.0 for cell in made.cells}
    assert made._blockers(root) == []
    assert made._blockers(None) == ["no root to be admissible under"]
    del root[made.cells[-1].name]
    assert made._blockers(root) == ["the root lacks cells"]
    made.options = Options(gpu="cpu", output=Path("x"), cases="quick", seed=3)
    made.guards, made.record = Guards(frozenset({"fresh"})), {"compatibility": True}
    assert len(made._blockers(root)) == 5


def test_a_file_that_changes_during_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(evaluator_tools.load_target("cpu").source().read_text())
    monkeypatch.setattr(judge, "CHECKS", {})

    def edit(stage: str, text: str) -> None:
        if stage == "timing":
            source.write_text(source.read_text() + "// longer\n")

    got = judge.evaluate(Options(gpu="cpu", output=tmp_path / "r.json", cases="quick", source=source), edit)
    assert got["status"] == "REFUSED" and "kernel.cpp changed during the run" in got["reason"]
    assert got["timing"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("limits: {accuracy_rms: 0.1}", "limits.accuracy_rms: 0.1 is weaker"),
        ("limits: {max_slowdown: 2.0}", "limits.max_slowdown: 2"),
        ("contract: {steps: {scale: another}}", "contract.steps.scale"),
        ("contract: {name: mine}", "contract.name"),
    ],
)
def test_a_weaker_config_is_refused_before_any_work(tmp_path: Path, repo: Path, change: str, words: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"extends: {os.path.relpath(repo / 'experimental' / 'cpu' / 'config.yaml', tmp_path)}\n{change}\n")
    with pytest.raises(UserError, match=words):
        judge.evaluate(Options(gpu=None, config=config, output=tmp_path / "r.json"), quiet)
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("role", ["source", "root", "incumbent"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.cpp", "missing.cpp: cannot read: No such file"),
        ("folder.cpp", "folder.cpp: cannot read: not a regular file"),
        ("link.cpp", "link.cpp: is a symbolic link"),
        ("kernel.py", r"kernel.py: a source for c\+\+ ends in .cpp"),
    ],
)
def test_a_source_that_cannot_be_taken_leaves_the_reports_name_free(tmp_path: Path, role: str, name: str, words: str) -> None:
    (tmp_path / "folder.cpp").mkdir()
    (tmp_path / "kernel.py").write_text("int x;\n")
    (tmp_path / "link.cpp").symlink_to(tmp_path / "kernel.py")
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path, **{role: tmp_path / name})
    assert not list(tmp_path.glob("report*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_the_targets_gpu_leaves_the_reports_name_free(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target h200 needs a"):
        evaluate(tmp_path, gpu="h200")
    assert not list(tmp_path.glob("report*"))


def test_a_stand_in_for_the_targets_gpu_is_said_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "check_machine", lambda *_, allow_compat: "compatibility only: a stand-in")
    monkeypatch.setattr(judge, "CHECKS", {})
    got = evaluate(tmp_path, timing=False)
    assert got["compatibility"] and "compatibility only: a stand-in" in got["notes"]


# ---------------------------------------------------------------- the command


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_existing_output_is_refused_before_any_work(repo: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("precious")
    got = run("--output", str(path), cwd=repo)
    assert got.returncode == 2 and got.stderr.startswith("error: ") and got.stderr.count("\n") == 1
    assert path.read_text() == "precious"


def test_wrong_usage_is_one_line(repo: Path, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "report.json")]
    blocked = tmp_path / "file"
    blocked.write_text("")
    for arguments in (
        [*output, "--source", str(tmp_path / "missing.cpp")],
        [*output, "--only", "nonsense"],
        [*output, "--require", "nonsense"],
        [*output, "--root-report", str(tmp_path / "none.json")],
        ["--output", str(blocked / "report.json")],
        [*output, "--seed", "-1"],
        [*output, "--seed", "abc"],
        [*output, "--only", ","],
        [*output, "--cases", "some"],
        [*output, "--bogus"],
        [],
    ):
        got = run(*arguments, cwd=repo)
        assert got.returncode == 2, (arguments, got.stderr)
        assert got.stderr.startswith("error: ") and got.stderr.count("\n") == 1, got.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(repo: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert run("--output", str(tmp_path / "report.json"), cwd=repo).returncode == 2


def test_part_of_a_run_is_no_pass(repo: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    got = run("--output", str(path), "--cases", "quick", "--only", "addresses", "--json", cwd=repo)
    assert got.returncode == 1
    assert json.loads(got.stdout)["status"] == "INCOMPLETE" and json.loads(path.read_text())["status"] == "INCOMPLETE"


def test_same_seed_draws_the_same_cases(tmp_path: Path) -> None:
    results, reasons = [], []
    for name in ("a", "b", "c", "d"):  # a run that a busy machine cut short says nothing of seeds
        got = judge.evaluate(Options(gpu="cpu", output=tmp_path / name, cases="quick", only=("accuracy",), seed=5), quiet)
        reasons.append(got["reason"])
        if got["reason"].endswith("those that ran passed"):
            results.append(got["correctness"]["checks"][0]["notes"])
        if len(results) == 2:
            break
    assert len(results) == 2 and results[0] == results[1], (reasons, results)


def test_interrupt_leaves_an_incomplete_report_and_no_worker(repo: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    process = subprocess.Popen(
        [*COMMAND, "--output", str(path)], cwd=repo, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("correctness"):
            break
    time.sleep(0.5)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert workers
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=30) == 130
    assert rest.strip().splitlines()[-1] == "error: interrupted"
    got = report.read(path)
    assert got["status"] == "INCOMPLETE" and got["reason"] == "interrupted"
    assert got["run"]["command"][0] == "tools/evaluate.py"  # not where this checkout lies
    assert got["run"]["command"][-1] == path.name  # nor where the report went
    cut = [check for check in got["correctness"]["checks"] if check["reason"] == "it was not finished"]
    passed = [check for check in got["correctness"]["checks"] if check["status"] == "passed"]
    assert len(passed) < len(judge.CHECKS) and len(cut) <= 1  # none where it came between two checks
    assert all(check["status"] == "skipped" for check in cut)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
