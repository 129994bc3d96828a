"""Audits that are measured elsewhere: a folder that leaves the run, is measured by one command, and comes back.

    folder = export(run, "I0001")                       # runs/x/jobs/J-I0001
    sh run.sh /path/to/checkout                         # there, in a copy of the folder
    audit = import_report(run, folder / "report.json")  # here: checked, and recorded as an audit

A job holds its sources, its config with every declared file, and the exact command. job.json has the hash of each of them
and of itself: a folder that was edited is refused, there and here. The machine needs a checkout whose evaluator is the
one that the run froze; that is checked there. What the report says is checked here as any report is.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.core.config import ROLES, Target
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import REPO_ROOT, make_folder, read_bytes, sha256_bytes, sha256_json, show_path, write_new
from tools.evaluator.integrity import evaluator_hashes
from tools.search import bridge, rules
from tools.search.records import ROOT, RuleError
from tools.search.schemas import validate

if TYPE_CHECKING:
    from tools.search.run import Run

REPORT, CASE = "report.json", "report.case.json"  # what an evaluation writes
SCRIPT = """#!/bin/sh
# Measures this job and writes report.json here:  sh run.sh /path/to/checkout   (PYTHON: its interpreter, python3 else)
set -eu
job=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "${1:?name a checkout of the version that the run uses}/tools/search/jobs.py" "$job"
"""


# ---------------------------------------------------------------- here: leaving and coming back


def export(run: Run, implementation: str) -> Path:
    """Write a job that measures an implementation beside root and incumbent of now; returns its new folder.

    RuleError where the implementation may not be audited now, or the run's specification has changed.
    """
    rules.check_auditable(run.state, run.state.next_id("E"), implementation)
    target = bridge.check_frozen(run)
    name, folder = _free(run.folder / "jobs", implementation)
    files: dict[str, bytes] = {"run.sh": SCRIPT.encode(), **_declared(target)}
    compared = [ROOT, str(run.state.incumbent)] if implementation != ROOT else []
    for identity in (implementation, *compared):
        files[f"sources/{run.source_path(identity).name}"] = run.source(identity)
    command = bridge.command(run, implementation, Path(REPORT), lambda one: Path("sources", run.source_path(one).name))
    job: dict[str, Any] = {
        "schema": "areal-tik/job/1",
        "id": name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": run.manifest["name"],
        "specification_sha256": run.manifest["specification_sha256"],
        "evaluator_sha256": run.manifest["evaluator"]["sha256"],
        "target": target.name,
        "implementation": implementation,
        "incumbent": compared[1] if compared else None,
        "command": ["--config", "config.yaml", *command[2:]],
        "files": {path: sha256_bytes(data) for path, data in files.items()},
    }
    job["seal"] = sha256_json(job)
    validate("job", job, "job.json")
    for path, data in files.items():
        write_new(folder / path, data)
    write_new(folder / "job.json", json.dumps(job, indent=1, ensure_ascii=False) + "\n")  # last: a job without it is none
    return folder


def _free(jobs: Path, implementation: str) -> tuple[str, Path]:
    """The next name of a job of an implementation, and its new folder."""
    make_folder(jobs)
    number = 1
    while True:
        name = f"J-{implementation}" + (f"-{number}" if number > 1 else "")
        try:
            (jobs / name).mkdir()
            return name, jobs / name
        except FileExistsError:
            number += 1
        except OSError as problem:
            raise UserError(f"{show_path(jobs / name)}: cannot create the folder: {problem.strerror or problem}") from None


def _declared(target: Target) -> dict[str, bytes]:
    """The resolved config as a file of its own, and every file that it declares, by their path in the job."""
    config = json.loads(json.dumps(target.config))
    files: dict[str, bytes] = {}
    for role in ROLES:
        unit = config["kernel"] if role == "kernel" else config["kernel"]["witness"]
        files.update({_place(name): data for name, data in target.verified_files(role).items()})
        unit["source"] = _place(unit["source"])
        unit["files"] = {_place(name): digest for name, digest in unit["files"].items()}
    return {"config.yaml": json.dumps(config, indent=1, ensure_ascii=False).encode(), **files}


def _place(name: str) -> str:
    """Where a declared file lies in the job: as below the config's root, or the repository."""
    return Path(name).relative_to(REPO_ROOT).as_posix() if Path(name).is_absolute() else name


def import_report(run: Run, report: Path) -> dict[str, Any]:
    """Record the report that lies in a job's folder as an audit, and return that.

    RuleError where the job is of another run or was edited, or the report is not of it.
    """
    if not report.is_file():
        raise UserError(f"{show_path(report)}: no such file: run.sh in the job's folder writes it")
    job = read_job(report.parent)
    known = run.state.implementations.get(job["implementation"])
    if job["specification_sha256"] != run.manifest["specification_sha256"] or known is None:
        raise RuleError(job["id"], "audit-target", f"a job of another run ({job['run']}, {job['target']}): import it there")
    if f"sources/{run.source_path(known.id).name}" not in job["command"]:
        raise RuleError(job["id"], "audit-target", f"its source is not that of {known.id}: it is a job of another run")
    return run.audit(known.id, report, job=job["id"])


def read_job(folder: Path) -> dict[str, Any]:
    """The job in a folder, all of whose files are as they were written; RuleError names the first that is not."""
    path = folder / "job.json"
    try:
        job: Any = json.loads(read_bytes(path))
    except ValueError:
        raise UserError(f"{show_path(path)}: not JSON: it was cut or edited; export the job again") from None
    validate("job", job, show_path(path))
    if job["seal"] != sha256_json({key: value for key, value in job.items() if key != "seal"}):
        raise RuleError(job["id"], "job-edited", f"{show_path(path)} does not have its own hash: export the job again")
    for name, digest in job["files"].items():
        place = Path(os.path.normpath(folder / name))
        if not place.is_relative_to(folder) or sha256_bytes(read_bytes(place)) != digest:
            raise RuleError(job["id"], "job-edited", f"{show_path(folder / name)} is not what was exported: export it again")
    return dict(job)


# ---------------------------------------------------------------- there: measuring


def measure(folder: Path) -> int:
    """Run a job's evaluation with this checkout; returns its exit code. The report is never overwritten.

    RuleError where the job was edited, or this checkout's evaluator is another one than the run's.
    """
    folder = folder.absolute()
    job = read_job(folder)
    found = sha256_json(evaluator_hashes())
    if found != job["evaluator_sha256"]:
        raise RuleError(
            job["id"],
            "audit-target",
            f"the evaluator in {REPO_ROOT} ({found[:12]}...) is not the run's ({job['evaluator_sha256'][:12]}...): "
            "check out the version that the run uses",
        )
    words = [str(folder / word) if word in job["files"] or word == REPORT else word for word in job["command"]]
    return subprocess.run([sys.executable, str(bridge.EVALUATE), *words], cwd=REPO_ROOT, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """What run.sh calls."""
    parser = CommandParser(description="Measure an exported job with this checkout.")
    parser.add_argument("folder", type=Path, help="the job's folder, with job.json")
    return measure(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
