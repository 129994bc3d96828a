"""Audits that are measured elsewhere: what a job holds, what of it may not change, and how its report comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ir_tools import Scripted, action, edited, new_run, opportunity, scripted_report

from tools.core.config import load_target
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, sha256_bytes, sha256_json
from tools.evaluator import integrity
from tools.evaluator import report as reports
from tools.search import bridge, jobs, schemas
from tools.search.records import ROOT, RuleError
from tools.search.run import Run


def come_back(run: Run, folder: Path, scripted: Scripted) -> dict[str, Any]:
    """The report of a job as another machine would write it, imported."""
    reports.write(folder / "report.json", scripted_report(run, "I0001", speeds={"I0001": 0.9}))
    with scripted.at_work():
        return jobs.import_report(run, folder / "report.json")


def test_a_job_holds_all_that_it_needs(run: Run) -> None:
    folder = jobs.export(run, "I0001")
    job = jobs.read_job(folder)
    assert folder == run.folder / "jobs" / "J-I0001" and job["id"] == "J-I0001"
    assert (job["implementation"], job["incumbent"]) == ("I0001", ROOT)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*job["files"], "job.json"}
    for word in job["command"]:
        assert word.startswith("--") or word in job["files"] or word == "report.json"
    target = load_target(config=folder / "config.yaml")
    assert all(target.sections[section] == run.manifest["target"]["sections"][section] for section in bridge.FROZEN)
    integrity.refuse_weaker(target)
    for role in ("kernel", "witness"):
        assert len(target.verified_files(role)) == len(run.target().kernel_files(role))
        assert all((folder / name).is_file() for name in target.kernel_files(role))


def test_a_job_of_the_root_compares_with_nothing(tmp_path: Path) -> None:
    job = jobs.read_job(jobs.export(new_run(tmp_path / "run"), ROOT))
    assert job["incumbent"] is None and "--root" not in job["command"] and "--incumbent" not in job["command"]


def test_what_cannot_be_audited_is_not_exported(run: Run) -> None:
    for identity in ("I0009", ROOT):
        with pytest.raises(RuleError):
            jobs.export(run, identity)
    assert list((run.folder / "jobs").iterdir()) == []


@pytest.mark.parametrize("kind", ["job", "archive"])
def test_the_schemas_examples_are_valid(kind: str) -> None:
    (example,) = json.loads((schemas.FOLDER / f"{kind}.schema.json").read_text())["examples"]
    schemas.validate(kind, example, "the example")
    with pytest.raises(RuleError, match="unknown: more"):
        schemas.validate(kind, {**example, "more": 1}, "the example")


def test_every_export_is_a_folder_of_its_own(run: Run) -> None:
    assert [jobs.export(run, "I0001").name for _ in range(3)] == ["J-I0001", "J-I0001-2", "J-I0001-3"]


def test_its_report_becomes_an_audit(run: Run, scripted: Scripted) -> None:
    folder = jobs.export(run, "I0001")
    audit = come_back(run, folder, scripted)
    assert audit["job"] == "J-I0001" and audit["promoted"] and run.state.incumbent == "I0001"
    assert run.report(audit["id"])["status"] == "PASSED"
    with scripted.at_work(), pytest.raises(RuleError):  # it counts once
        jobs.import_report(run, folder / "report.json")
    assert run.state.audited == 1


def test_a_copy_of_the_folder_is_as_good(run: Run, scripted: Scripted, tmp_path: Path) -> None:
    copy = shutil.copytree(jobs.export(run, "I0001"), tmp_path / "from another machine")
    assert come_back(run, copy, scripted)["job"] == "J-I0001"


@pytest.mark.parametrize(
    "name", ["config.yaml", "run.sh", "sources/*", "experimental/cpu/kernels/pool.h", "experimental/cpu/kernels/witness.cpp"]
)
def test_an_edited_file_is_refused(run: Run, scripted: Scripted, name: str) -> None:
    folder = jobs.export(run, "I0001")
    path = next(folder.glob(name))
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(RuleError, match=rf"J-I0001: job-edited: .*{path.name} is not what was exported"):
        come_back(run, folder, scripted)
    with pytest.raises(RuleError, match="job-edited"):
        jobs.measure(folder)


def test_an_edited_job_is_refused(run: Run, scripted: Scripted) -> None:
    folder = jobs.export(run, "I0001")
    path = folder / "job.json"
    text = path.read_text()
    path.write_text(text.replace('"--incumbent"', '"--root-report"'))
    with pytest.raises(RuleError, match=r"job.json does not have its own hash"):
        come_back(run, folder, scripted)
    path.write_text(text[:100])
    with pytest.raises(UserError, match="it was cut or edited; export the job again"):
        jobs.read_job(folder)
    path.write_text(text.replace("areal-tik/job/1", "areal-tik/job/2"))
    with pytest.raises(RuleError, match="written by a newer version"):
        jobs.read_job(folder)


def test_a_file_outside_the_folder_is_refused(run: Run) -> None:
    folder = jobs.export(run, "I0001")
    path = folder / "job.json"
    job = json.loads(path.read_text())
    job["files"]["../../run.json"] = sha256_bytes((run.folder / "run.json").read_bytes())
    job["seal"] = sha256_json({key: value for key, value in job.items() if key != "seal"})
    path.write_text(json.dumps(job))
    with pytest.raises(RuleError, match="job-edited"):
        jobs.read_job(folder)


def test_a_job_of_another_run_is_refused(run: Run, scripted: Scripted, tmp_path: Path) -> None:
    folder = jobs.export(run, "I0001")
    reports.write(folder / "report.json", scripted_report(run, "I0001"))
    other = new_run(tmp_path / "other")
    with pytest.raises(RuleError, match=r"J-I0001: audit-target: a job of another run \(run, cpu\)"):
        jobs.import_report(other, folder / "report.json")
    with scripted.at_work():
        other.audit(ROOT)
        other.propose(opportunity())
        other.act(action(), edited(other.source(ROOT), "another child"), "cpp")
    with pytest.raises(RuleError, match="its source is not that of I0001"):
        jobs.import_report(other, folder / "report.json")


def test_a_report_of_another_source_is_refused(run: Run, scripted: Scripted) -> None:
    folder = jobs.export(run, "I0001")
    report = scripted_report(run, "I0001")
    report["builds"]["candidate"] = report["builds"]["root"]
    reports.write(folder / "report.json", report)
    with scripted.at_work(), pytest.raises(RuleError, match="a report of another source"):
        jobs.import_report(run, folder / "report.json")
    assert not run.state.audits.get("E0001")


def test_a_job_without_a_report_says_what_writes_it(run: Run) -> None:
    folder = jobs.export(run, "I0001")
    with pytest.raises(UserError, match=r"report.json: no such file: run.sh in the job's folder writes it"):
        jobs.import_report(run, folder / "report.json")


# ---------------------------------------------------------------- measuring it there


def test_another_version_there_is_refused(run: Run) -> None:
    folder = jobs.export(run, "I0001")
    with (
        mock.patch.object(jobs, "evaluator_hashes", lambda: {"tools/evaluate.py": "0" * 64}),
        pytest.raises(RuleError, match=r"J-I0001: audit-target: the evaluator in .* check out the version that the run uses"),
    ):
        jobs.measure(folder)


def test_measuring_starts_the_evaluator_of_that_checkout(run: Run, tmp_path: Path) -> None:
    folder = jobs.export(run, "I0001")
    stub, called = tmp_path / "stub.py", tmp_path / "called.json"
    stub.write_text(f"import json, sys\njson.dump(sys.argv[1:], open({str(called)!r}, 'w'))\nsys.exit(1)\n")
    with mock.patch.object(bridge, "EVALUATE", stub):
        assert jobs.measure(folder) == 1
    words = json.loads(called.read_text())
    assert words[:2] == ["--config", str(folder / "config.yaml")] and words[-1] == str(folder / "report.json")
    named = [Path(word) for word in words if not word.startswith("--")]
    assert all(path.is_absolute() for path in named) and all(path.is_file() for path in named[:-1])


def test_run_sh_is_one_command(run: Run) -> None:
    """It finds its own folder and the checkout's command, which refuses an edited job with one line and exit code 2."""
    folder = jobs.export(run, "I0001")
    (folder / "config.yaml").write_text("{}")
    done = subprocess.run(
        ["sh", str(folder / "run.sh"), str(REPO_ROOT)], cwd="/", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 2 and "job-edited" in done.stderr and done.stderr.count("\n") == 1
    done = subprocess.run(["sh", str(folder / "run.sh")], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "name a checkout" in done.stderr
