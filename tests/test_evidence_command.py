"""An owner's report becomes evidence: it is listed, drawn or left out with a reason, and all that is published still holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from archive_tools import Quick, copied, restored
from ir_tools import unsynced

from tools import plot
from tools.archive.verify import Verification
from tools.core.config import load_target
from tools.core.errors import UserError
from tools.core.files import sha256_json
from tools.evaluator import report as reports
from tools.evidence import take
from tools.figures import sources

REPORTS = "experimental/figures/reports.json"
NAME = "a100-20261201T120000Z.json"


def owners_report(repo: Path, to: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """What an owner of an A100 would get: the portable kernel's report of another GPU, made into one of target a100."""
    text = (repo / "experimental/evidence/h200-portable.json").read_text()
    report, target = json.loads(text.replace('"fa3"', '"fa2"')), load_target("a100")
    report["target"].update(
        name="a100",
        sections=dict(target.sections),
        gpu_names=target.config["target"]["gpu_names"],
        contract=target.config["contract"]["name"],
    )
    for role, built in report["builds"].items():
        built["files"] = dict(target.kernel_files("witness" if role == "witness" else "kernel"))
        built["source"], built["source_sha256"] = next(iter(built["files"].items()))
    report["environment"]["gpu"]["name"] = target.config["target"]["gpu_names"][0]
    change(report)
    environment = {key: value for key, value in report["environment"].items() if key != "gpu_state_after"}
    report["hashes"]["environment"] = sha256_json(environment)
    report["hashes"]["report"] = reports.own_hash(report)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(report))
    return to


@pytest.fixture(scope="module")
def whole(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with unsynced(), Quick():
        yield copied(repo, tmp_path_factory.mktemp("published"))


@pytest.fixture
def root(whole: Path) -> Iterator[Path]:
    with restored(whole):
        yield whole


def verified(root: Path) -> None:
    for _, part in Verification(root).parts():
        part()


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- taken


def test_the_first_report_of_a_target_is_drawn_and_the_next_is_not(repo: Path, root: Path, tmp_path: Path) -> None:
    if why := plot.other_matplotlib():
        pytest.skip(why)
    said = take(root, owners_report(repo, tmp_path / NAME))
    verified(root)
    assert sources.listing(root / REPORTS)[0][-1] == NAME
    entry = next(
        one for one in json.loads((root / "experimental/archive.json").read_text())["targets"] if one["name"] == "a100"
    )
    assert entry["status"] == "measured" and f"experimental/evidence/{NAME}" in entry["evidence"]
    assert json.loads((root / "experimental/a100/validation.json").read_text())["evaluations"][0]["selected"]
    assert f"taken     experimental/evidence/{NAME}: drawn" in said and any("cells_a100.svg" in line for line in said)
    assert any("README.md says that a100 is not measured" in line for line in said)
    assert b"<!-- not measured" not in (root / "experimental/figures/cells_a100.svg").read_bytes()
    take(root, owners_report(repo, tmp_path / "again.json", lambda r: r["notes"].append("the next day")))
    assert sources.listing(root / REPORTS)[1]["again.json"] == f"measured again: {NAME} is drawn"
    with pytest.raises(UserError, match=r"again\.json: is there already"):
        take(root, tmp_path / "again.json")


def test_without_the_drawing_matplotlib_it_is_listed_and_not_drawn(
    repo: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "other_matplotlib", lambda: "matplotlib is not installed")
    take(root, owners_report(repo, tmp_path / NAME))
    verified(root)
    assert "not drawn yet" in sources.listing(root / REPORTS)[1][NAME]


# ---------------------------------------------------------------- not taken


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(status="BIT_MISMATCH", timing=None), "status: BIT_MISMATCH"),
        (lambda r: r.update(compatibility=True), "compatibility: a run on another GPU"),
        (lambda r: r["run"].update(cases="quick"), "not a full evaluation"),
        (lambda r: r["environment"]["gpu"].update(name="NVIDIA A30"), "'NVIDIA A30' is none of this target's"),
        (lambda r: r["builds"]["candidate"]["files"].update(extra="0" * 64), "is not the kernel that a100 packages"),
        (lambda r: r["timing"]["cells"][0]["modes"]["cold"]["kernels"]["candidate"].update(median_us=1e6), "median_us is"),
    ],
)  # fmt: skip
def test_an_unfit_report_is_named_and_changes_nothing(
    repo: Path, root: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    before = contents(root)
    with pytest.raises(UserError, match=words) as caught:
        take(root, owners_report(repo, tmp_path / NAME, change))
    assert NAME in str(caught.value) and contents(root) == before


# ---------------------------------------------------------------- make gpu-check


PYTHON = """#!/bin/sh
# An interpreter of a machine with an A100: only what needs the GPU is played.
echo "$*" >> calls.txt
case "$1 $2" in
  "tools/load_kernel.py "*) exit 0 ;;
  "tools/evaluate.py "*) shift 4; mkdir -p "$(dirname "$1")"; cp owners.json "$1"; exit {status} ;;
  "-m pytest") exit 0 ;;
esac
exec {python} "$@"
"""


@pytest.fixture(scope="module")
def checkout(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the whole repository, with a report that an A100 gave."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=repo, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (repo / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repo / name, folder / name)
    owners_report(repo, folder / "owners.json")
    return folder


def gpu_check(checkout: Path, status: int) -> subprocess.CompletedProcess[str]:
    python = checkout / "python.sh"
    python.write_text(PYTHON.format(python=sys.executable, status=status))
    python.chmod(0o755)
    (checkout / "calls.txt").unlink(missing_ok=True)
    return subprocess.run(
        ["make", "gpu-check", "GPU=a100", f"GPU_PYTHON={python}"],
        cwd=checkout, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "MAKEFLAGS": ""},
    )  # fmt: skip


def test_a_gpu_check_that_fails_leaves_what_is_published_alone(checkout: Path) -> None:
    before = contents(checkout / "experimental")
    done = gpu_check(checkout, status=1)
    assert done.returncode != 0 and contents(checkout / "experimental") == before
    assert len(list((checkout / "runs").glob("a100-*.json"))) == 1  # the report, to be looked at and sent
    shutil.rmtree(checkout / "runs")


def test_a_gpu_check_leaves_an_archive_that_holds(checkout: Path) -> None:
    """Build, full evaluation, GPU tests, evidence; then the command that checks all that is published."""
    done = gpu_check(checkout, status=0)
    assert done.returncode == 0, done.stderr
    calls = (checkout / "calls.txt").read_text().splitlines()
    (report,) = [path.relative_to(checkout).as_posix() for path in (checkout / "runs").glob("a100-*.json")]
    assert calls == [
        "tools/load_kernel.py --gpu a100 --verbose",
        f"tools/evaluate.py --gpu a100 --output {report}",
        "-m pytest -m gpu --gpu a100",
        f"tools/evidence.py {report}",
    ]
    assert (checkout / "experimental/evidence" / Path(report).name).is_file() and "holds     all" in done.stdout
    found = subprocess.run(
        [sys.executable, "tools/verify_archive.py"], cwd=checkout, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    if plot.other_matplotlib() is None:
        drawn = subprocess.run(
            [sys.executable, "tools/plot.py", "--check"], cwd=checkout, capture_output=True, text=True, check=False
        )
        assert drawn.returncode == 0, drawn.stdout + drawn.stderr
