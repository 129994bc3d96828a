"""The packaged archive verifies, and verify_archive.py writes what is derived and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from archive_tools import ARCHIVE, EVIDENCE, RUN, Quick, copied, edit, forge_report, restored
from ir_tools import unsynced

from tools.archive import evidence, reading, targets
from tools.archive.verify import update
from tools.core.errors import UserError, run_command
from tools.core.files import sha256_bytes
from tools.search import packed
from tools.search.schemas import validate
from tools.verify_archive import main

DERIVED = (ARCHIVE, "experimental/cpu/validation.json", "experimental/h200/validation.json")


@pytest.fixture(scope="module")
def whole(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with unsynced(), Quick():
        yield copied(repo, tmp_path_factory.mktemp("archive"))


@pytest.fixture
def root(whole: Path) -> Iterator[Path]:
    with restored(whole):
        yield whole


def command(*arguments: str) -> int:
    return run_command(lambda: main(list(arguments)))


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- the packaged archive


def test_the_packaged_archive_holds(repo: Path) -> None:
    """In one process without torch, in less than 20 seconds, and each part checks something."""
    script = (
        "import sys; from tools.verify_archive import main; code = main(['--json']); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=repo, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["holds"], found["problem"]
    assert done.stderr.strip() == "False"
    assert found["seconds"] < 20
    counts = {part["part"]: part["counts"] for part in found["parts"]}
    assert list(counts) == ["files", "targets", "evidence", "searches", "archive", "figures", "documents"]
    assert counts["evidence"]["samples"] > 10_000 and counts["searches"]["reports"] >= 8
    assert counts["documents"]["tables"] >= 6 and counts["archive"]["derived files"] >= 3


def test_what_is_derived_is_up_to_date(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root)
    assert command("--root", str(root), "--update") == 0
    assert "nothing to write" in capsys.readouterr().out
    assert contents(root) == before


def test_a_verification_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(root)
    assert command("--root", str(root)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "files",
        "targets",
        "evidence",
        "searches",
        "archive",
        "figures",
        "documents",
        "holds",
    ]
    edit(root, ARCHIVE, lambda archive: archive["targets"][0].update(status="measured"))
    before[root / ARCHIVE] = (root / ARCHIVE).read_bytes()
    assert command("--root", str(root)) == 1
    said = capsys.readouterr()
    assert said.err == (f"error: {ARCHIVE}: targets[a100].status is 'measured', what it is made from gives 'compatibility'\n")
    assert "holds" not in said.out
    assert contents(root) == before


def test_a_problem_in_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / f"{EVIDENCE}/cpu-avx2.json").unlink()
    assert command("--root", str(root), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["holds"] and found["parts"] == []
    assert found["problem"]["part"] == "files" and f"{EVIDENCE}/cpu-avx2.json: is missing" in found["problem"]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--root", "/nowhere"], "--root /nowhere: there is no folder experimental"),
        (["--rot", "x"], "--rot"),
        (["x"], "unrecognized arguments: x"),
        (["--update", "--json"], "--json: goes with a verification"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""


# ---------------------------------------------------------------- --update


def test_update_makes_all_of_it_again(root: Path) -> None:
    """From evidence and searches alone: byte for byte what is packaged."""
    before = contents(root)
    for name in DERIVED:
        (root / name).unlink()
    assert sorted(update(root)) == sorted(DERIVED)
    assert contents(root) == before


def judged(root: Path) -> list[str]:
    """The reports that the H200's validation names."""
    reports = json.loads((root / "experimental/h200/validation.json").read_bytes())["evaluations"]
    return [entry["report"][len(EVIDENCE) + 1 :] for entry in reports]


def test_update_takes_up_new_evidence(root: Path) -> None:
    before = judged(root)
    shutil.copyfile(root / EVIDENCE / "h200-hopper.json", root / EVIDENCE / "h200-again.json")
    edit(root, "experimental/figures/reports.json", lambda found: found["left_out"].update({"h200-again.json": "a copy"}))
    assert command("--root", str(root)) == 1
    assert sorted(update(root)) == [ARCHIVE, "experimental/h200/validation.json"]
    assert command("--root", str(root)) == 0
    assert "h200-hopper.json" in before and judged(root) == sorted([*before, "h200-again.json"])


def test_a_kernel_with_another_header_is_another_kernel(root: Path) -> None:
    """Arithmetic lives in headers: evidence of the source with other headers is of no selected kernel."""
    header = root / "experimental/common/hopper_tiles.cuh"
    with restored(root):
        before = sha256_bytes(header.read_bytes())
        header.write_bytes(header.read_bytes() + b"// another\n")
        for config in root.glob("experimental/*/config.yaml"):
            config.write_text(config.read_text().replace(before, sha256_bytes(header.read_bytes())))
        update(root)
        reports = json.loads((root / "experimental/h200/validation.json").read_bytes())["evaluations"]
        assert not any(entry["selected"] for entry in reports)


def test_a_report_that_is_no_full_pass_measures_nothing(root: Path) -> None:
    """Quick, cut down, on another device, or failed: listed, and no status follows from it."""
    name = f"{EVIDENCE}/a100-on-h200-compatibility.json"
    for change in (
        lambda report: report["run"].update(cases="quick"),
        lambda report: report["run"].update(only=["tails"]),
        lambda report: report["run"].update(guards_off=["clock"]),
        lambda report: report.update(status="INCOMPLETE", timing=None, objective=None, promotion=None),
    ):
        with restored(root):
            forge_report(root, name, change)
            update(root)
            status = {target["name"]: target["status"] for target in json.loads((root / ARCHIVE).read_bytes())["targets"]}
            assert status == {"a100": "not measured", "cpu": "measured", "h20": "not measured", "h200": "measured"}


def test_promotions_of_a_report_are_computed_again(root: Path) -> None:
    """The report of a search's last promotion, as evidence: root, incumbent and twin beside the candidate, two sessions."""
    name = f"{EVIDENCE}/promoted.json"
    data = packed.unpack((root / RUN / packed.NAME).read_bytes())["reports/E0007.json"]
    assert json.loads(data)["promotion"]["promoted"]
    (root / name).write_bytes(data)
    update(root)
    for change, words in (
        (lambda report: report["promotion"].update(promoted=False), "promotion.promoted is False"),
        (lambda report: report["promotion"]["comparison"]["clocks"]["judge"].update(gain=0.5), "clocks.judge.gain is 0.5"),
        (lambda report: report["promotion"]["comparison"].update(rule=3), "by rule 3 are of another version"),
        (lambda report: report["promotion"]["comparison"].update(rule=2), "promotion.comparison.clocks"),
        (lambda report: report["timing"]["again"][0].pop(), "of the workloads is missing"),
        (lambda report: report["objective"]["others"].update(root=9.0), "objective.others.root is 9.0"),
    ):
        (root / name).write_bytes(data)
        forge_report(root, name, change)
        with pytest.raises(UserError, match=words):
            update(root)


def test_another_selected_source_is_said(root: Path) -> None:
    """The evaluations stay, and are no longer of what is selected."""
    config = root / "experimental/cpu/config.yaml"
    source = root / "experimental/cpu/kernels/unified_attn.cpp"
    before = sha256_bytes(source.read_bytes())
    source.write_text(source.read_text() + "\n")
    config.write_text(config.read_text().replace(before, sha256_bytes(source.read_bytes())))
    update(root)
    evaluations = json.loads((root / "experimental/cpu/validation.json").read_bytes())["evaluations"]
    assert [entry["selected"] for entry in evaluations] == [False, False]
    assert {entry["source_sha256"] for entry in evaluations} == {before}


def test_update_refuses_what_does_not_hold(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written, so a broken report never gets a hash."""
    forge_report(root, f"{EVIDENCE}/cpu-avx2.json", lambda report: report["objective"].update(T=0.1))
    before = contents(root)
    assert command("--root", str(root), "--update") == 2
    assert "cpu-avx2.json: objective.T is 0.1" in capsys.readouterr().err
    assert contents(root) == before


def test_update_deletes_nothing(root: Path) -> None:
    """A validation.json whose evidence has gone is named."""
    for name in ("cpu-avx2", "cpu-avx512"):
        (root / EVIDENCE / f"{name}.json").unlink()
    with pytest.raises(UserError, match=r"experimental/cpu/validation.json: no full evaluation .*: delete it"):
        update(root)
    (root / "experimental/cpu/validation.json").unlink()
    assert update(root) == [ARCHIVE]


def test_an_archive_without_searches(root: Path) -> None:
    shutil.rmtree((root / RUN).parent)
    assert update(root) == [ARCHIVE]
    cpu = next(target for target in json.loads((root / ARCHIVE).read_bytes())["targets"] if target["name"] == "cpu")
    assert cpu["attempts"] == {"qualified": 0, "failed": 0}


def test_the_schema_of_validations(root: Path) -> None:
    content = json.loads((root / DERIVED[1]).read_bytes())
    validate("validation", content, "v")
    with pytest.raises(UserError, match="more"):
        validate("validation", {**content, "more": 1}, "v")


# ---------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("stated", "found", "words"),
    [
        (1.0, 1.0 + 1e-12, None),
        (1.0, 1.0 + 1e-6, "x is 1.0"),
        (True, 1, "x is True"),
        (1, True, "x is 1"),
        ("1", 1, "x is '1'"),
        (None, 0, "x is None"),
        ({"a": 1}, {"a": 1, "b": 2}, "x.b is missing"),
        ({"a": 1, "b": 2}, {"a": 1}, "x.b is there and belongs to nothing"),
        ([{"name": "a"}], [{"name": "a"}, {"name": "b"}], "x[b] is missing"),
        ([{"name": "b"}, {"name": "a"}], [{"name": "a"}, {"name": "b"}], "x[b] is out of its place"),
        ([{"name": "a"}, {"name": "a"}], [{"name": "a"}], "x[a] stands twice"),
        ([1, 2], [1, 3], "x[1] is 2"),
        ([], {}, "x is []"),
        (float("nan"), 1.0, "x is nan"),
    ],
)
def test_differences(stated: Any, found: Any, words: str | None) -> None:
    problem = reading.difference(stated, found, "x")
    assert problem is None if words is None else problem is not None and words in problem


def test_texts_of_the_fuzzer_are_counted(repo: Path) -> None:
    """Verdicts of searches; planted faults that were found, of which six for each of two seeds."""
    known = targets.load(repo)
    for name, target, counted in (("fuzz-h200.txt", "h200", 3), ("fuzz-planted-cpu.txt", "cpu", 12)):
        item = evidence.read(repo, f"{EVIDENCE}/{name}", known)
        assert (item.kind, item.target, item.counted) == ("fuzz", target, counted), name
