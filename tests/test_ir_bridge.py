"""Between a run and the evaluator: which reports are taken, what they establish, and which code an edit changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ir_tools import scripted_report

from tools.core.config import load_target
from tools.core.errors import UserError
from tools.evaluator import report as reports
from tools.search import bridge, outcome
from tools.search.records import ROOT, RuleError
from tools.search.run import Run

Report = dict[str, Any]


def sealed(report: Report) -> Report:
    """With the hash that its content has: what somebody who edits a report would do."""
    report["hashes"]["report"] = reports.own_hash(report)
    return report


def child_report(run: Run, **other: Any) -> Report:
    return sealed(scripted_report(run, "I0001", **{"speeds": {"I0001": 0.9}, **other}))


# ---------------------------------------------------------------- which reports are taken


def test_an_honest_report_is_taken(run: Run) -> None:
    bridge.check_report(run, "I0001", child_report(run))
    bridge.check_report(run, "I0001", child_report(run, status="BIT_MISMATCH"))


EDITS: dict[str, tuple[Callable[[Report], Any], str]] = {
    "another source": (lambda r: _rebuild(r, "candidate"), "a report of another source"),
    "another root": (lambda r: _rebuild(r, "root"), "root is not I0000"),
    "another incumbent": (lambda r: _rebuild(r, "incumbent"), "incumbent is no implementation of this run"),
    "no root beside it": (lambda r: r["builds"].pop("root"), "root and incumbent were not measured in the same run"),
    "another contract": (lambda r: r["target"]["sections"].update(contract="0" * 64), "section contract is not"),
    "other workloads": (lambda r: r["target"]["sections"].update(workloads="0" * 64), "section workloads is not"),
    "other limits": (lambda r: r["target"]["sections"].update(limits="0" * 64), "section limits is not"),
    "another target": (lambda r: r["target"].update(name="h200"), "a report of target h200"),
    "another evaluator": (
        lambda r: r["hashes"]["evaluator_files"].update({"tools/evaluate.py": "0" * 64}),
        "another evaluator",
    ),
    "an evaluator's hash by hand": (lambda r: r["hashes"].update(evaluator="0" * 64), "another evaluator"),
    "another header": (lambda r: r["builds"]["root"]["files"].update({"pool.h": "0" * 64}), "root was built from other files"),
    "another machine": (lambda r: r["environment"].update(processor="a faster one"), "measured on a faster one, 8 cores"),
    "no machine": (lambda r: r.update(environment={}), "measured on unknown processor"),
    "fewer cores": (lambda r: r["environment"].update(cores=2), "2 cores, the root on scripted processor, 8 cores"),
    "a given seed": (lambda r: r["run"].update(seed_given=True), "the seed was given"),
    "guards off": (lambda r: r["run"].update(guards_off=["noise"]), r"guards were off \(noise\)"),
    "quick cases": (lambda r: r["run"].update(cases="quick"), "the cases were quick"),
    "a part": (lambda r: r["run"].update(only=["lse"]), "only a part was asked for"),
    "a compatibility run": (lambda r: r.update(compatibility=True), "a compatibility run"),
    "an old report": (lambda r: r.update(version=1), "a report of version 1"),
}


def _rebuild(report: Report, role: str) -> None:
    build = report["builds"][role]
    build["files"] = {name: "f" * 64 if digest == build["source_sha256"] else digest for name, digest in build["files"].items()}
    build["source_sha256"] = "f" * 64


@pytest.mark.parametrize("name", EDITS)
def test_a_report_of_anything_else_is_refused(run: Run, name: str) -> None:
    edit, words = EDITS[name]
    report = child_report(run)
    edit(report)
    with pytest.raises(RuleError, match=words) as caught:
        bridge.check_report(run, "I0001", sealed(report))
    assert (caught.value.record, caught.value.rule) == ("I0001", "audit-target")


def test_a_report_that_was_edited_is_refused(run: Run) -> None:
    report = child_report(run)
    report["notes"].append("faster")
    with pytest.raises(UserError, match="the content is not what was written"):
        bridge.check_report(run, "I0001", report)


def test_an_interrupted_evaluation_is_no_audit(run: Run) -> None:
    report = child_report(run, status="INCOMPLETE")
    with pytest.raises(RuleError, match="the evaluation did not end"):
        bridge.check_report(run, "I0001", report)


def test_a_source_that_does_not_build_is_known_by_its_name(run: Run) -> None:
    """Its report holds no build; the file that was evaluated is named after its content."""
    report = child_report(run, status="COMPILE_ERROR")
    report["builds"].clear()
    report["run"]["command"] = ["evaluate.py", "--source", str(run.source_path("I0001"))]
    bridge.check_report(run, "I0001", sealed(report))
    report["run"]["command"][-1] = str(run.source_path(ROOT))
    with pytest.raises(RuleError, match="a report of another source"):
        bridge.check_report(run, "I0001", sealed(report))


# ---------------------------------------------------------------- what a report establishes


def fields(run: Run, report: Report, identity: str = "I0001") -> dict[str, Any]:
    with mock.patch.object(bridge, "code_identity", lambda *_: {"decode": "changed"}):
        return bridge.audit_from_report(run, identity, report)


def test_figures_follow_from_the_samples(run: Run) -> None:
    found = fields(run, child_report(run))
    assert found["verified"] and found["complete"] and found["admissible"] and found["promoted"]
    assert found["T"] == pytest.approx(0.9, rel=0.01) and found["T_root"] == pytest.approx(1.0, rel=0.01)
    assert found["gain"] == pytest.approx(0.1, abs=0.01) and found["gain_interval"][0] < found["gain"]
    assert found["incumbent"] == ROOT and found["code"] == {"decode": "changed"} and found["failure"] is None
    assert sum(cell["share"] for cell in found["cells"]) == pytest.approx(1.0, abs=1e-3)
    assert all(cell["us"] < cell["root_us"] and cell["best_baseline"] == "sdpa_cpu" for cell in found["cells"])


def test_the_root_is_its_own_reference(run: Run) -> None:
    found = fields(run, sealed(scripted_report(run, ROOT)), ROOT)
    assert found["T"] == found["T_root"] == pytest.approx(1.0)
    assert found["admissible"] and found["complete"] and not found["promoted"]
    assert found["incumbent"] is None and found["code"] == {}


def test_a_real_report_gives_its_own_figures(repo: Path) -> None:
    """Of the packaged CPU kernel: what stands in the record is what stands in the report, recomputed."""
    report = reports.read(repo / "experimental" / "evidence" / "cpu-avx2.json")
    found = outcome.audit_fields(report, load_target("cpu").config, None, is_root=True)
    assert found["complete"] and found["T"] == pytest.approx(1.0) and found["environment"] == {"machine": "AMD EPYC, 2 cores"}
    for cell, said in zip(found["cells"], report["timing"]["cells"], strict=True):
        kernel = said["modes"]["cold"]["kernels"]["candidate"]
        assert cell["us"] == pytest.approx(kernel["median_us"]) and cell["interval_us"] == pytest.approx(kernel["interval_us"])


def test_a_slower_child_is_neither_admissible_nor_promoted(run: Run) -> None:
    found = fields(run, child_report(run, speeds={"I0001": 1.2}))
    assert found["verified"] and found["admissible"] is False and not found["promoted"]


def test_a_failure_names_its_first_case(run: Run) -> None:
    found = fields(run, child_report(run, status="BIT_MISMATCH"))
    assert not found["verified"] and found["T"] is None and found["cells"] == []
    assert found["failure"]["check"] == "decode" and found["failure"]["case"] == "decode B1 L128"


def test_a_failed_build_keeps_the_compilers_words(run: Run) -> None:
    report = child_report(run, status="COMPILE_ERROR")
    report["correctness"], report["run"]["stages"] = None, {"machine": 0.1, "build": 1.0}
    report["logs"]["build"] = "error: expected ';'"
    found = fields(run, sealed(report))
    assert found["failure"] == {"stage": "build", "what": "scripted: COMPILE_ERROR", "log": "error: expected ';'"}
    assert found["code"] == {}


def _faster(report: Report) -> None:
    """Every sample of the candidate's first session a tenth shorter; the verdict is left as it was."""
    for cell in report["timing"]["cells"]:
        record = cell["modes"]["cold"]["kernels"]["candidate"]
        for key in ("samples_us", "interval_us", "pass_us"):
            record[key] = [0.9 * value for value in record[key]]
        record["median_us"] *= 0.9
    reports.add_ratios(report["timing"]["cells"])
    report["timing"]["geomeans"] = reports.geomeans(report["timing"]["cells"])


FORGED: dict[str, tuple[Callable[[Report], Any], str]] = {
    "a median": (
        lambda r: r["timing"]["cells"][0]["modes"]["cold"]["kernels"]["candidate"].update(median_us=1.0),
        "the median of the samples is not 1.0",
    ),
    "a median of the second session": (
        lambda r: r["timing"]["again"][0][1]["modes"]["cold"]["kernels"]["incumbent"].update(median_us=1.0),
        "the median of the samples is not 1.0",
    ),
    "T": (lambda r: r["objective"].update(T=0.5), "T is 0.5, its samples give"),
    "the root's T": (lambda r: r["objective"]["others"].update(root=2.0), "the report's T is"),
    "a promotion": (lambda r: r["promotion"].update(promoted=True), "promotion.promoted is True, its samples give False"),
    "admission": (lambda r: r["promotion"].update(admissible=False), "promotion.admissible is False, its samples give True"),
    "samples": (_faster, "the report's T is"),
    "a ratio": (
        lambda r: r["timing"]["cells"][0]["modes"]["cold"]["ratios"].update(sdpa_cpu=9.0),
        "the ratios are not those of its medians",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_figures_that_do_not_follow_are_refused(run: Run, name: str) -> None:
    edit, words = FORGED[name]
    report = child_report(run, speeds={})
    assert not fields(run, copy.deepcopy(report))["promoted"]
    edit(report)
    with pytest.raises(RuleError, match=words) as caught:
        fields(run, sealed(report))
    assert caught.value.rule == "audit-target"


def test_a_report_that_lacks_a_cell_is_not_complete(run: Run) -> None:
    config = bridge.frozen_config(run)
    config["workloads"]["decode"]["batch"].append(32)
    with mock.patch.object(bridge, "frozen_config", lambda run: config):
        assert not fields(run, child_report(run))["complete"]


# ---------------------------------------------------------------- starting the evaluator


STUB = """
import sys, json
print("correctness", file=sys.stderr)
words = sys.argv[1:]
json.dump(words, open("{called}", "w"))
if {write}:
    open(words[words.index("--output") + 1], "w").write(open("{report}").read())
else:
    print("error: no baseline 'x'", file=sys.stderr)
sys.exit(1)
"""


def evaluate(run: Run, folder: Path, report: Report, *, write: bool = True) -> tuple[Report, list[str], list[str]]:
    """bridge.evaluate with a stand-in for tools/evaluate.py: its report, what it showed, and how it was called."""
    made, stub, called = folder / "made.json", folder / "stub.py", folder / "called.json"
    reports.write(made, report)
    stub.write_text(STUB.format(report=str(made), called=str(called), write=write))
    shown: list[str] = []
    with mock.patch.object(bridge, "EVALUATE", stub):
        found = bridge.evaluate(run, "I0001", folder / "out.json", shown.append)
    return found, shown, json.loads(called.read_text())


def test_the_evaluator_is_started_as_a_user_would(run: Run, tmp_path: Path) -> None:
    found, shown, words = evaluate(run, tmp_path, child_report(run))
    assert shown == ["correctness"] and found["status"] == "PASSED"
    source, root = run.source_path("I0001"), run.source_path(ROOT)
    assert words == ["--gpu", "cpu", "--source", str(source), "--cold", "--root", str(root), "--incumbent", str(root),
                     "--output", str(tmp_path / "out.json")]  # fmt: skip


def test_an_output_is_never_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("mine")
    with pytest.raises(UserError, match="never overwritten"):
        evaluate(run, tmp_path, child_report(run))
    assert (tmp_path / "out.json").read_text() == "mine"


def test_an_evaluator_without_a_report_says_why(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="I0001: the evaluator wrote no report: no baseline 'x'"):
        evaluate(run, tmp_path, child_report(run), write=False)


def test_the_evaluators_error_line_is_not_shown_twice(run: Run, tmp_path: Path) -> None:
    """A line `error:` in an audit's output means that nothing was recorded; the outcome is said by the audit."""
    shown: list[str] = []
    with pytest.raises(UserError, match="no baseline"), mock.patch.object(bridge, "EVALUATE", tmp_path / "stub.py"):
        (tmp_path / "stub.py").write_text(STUB.format(report="", called=str(tmp_path / "called"), write=False))
        bridge.evaluate(run, "I0001", tmp_path / "out.json", shown.append)
    assert shown == ["correctness"]


def test_a_report_of_something_else_is_refused_after_an_evaluation_too(run: Run, tmp_path: Path) -> None:
    report = child_report(run)
    report["environment"]["cores"] = 1
    with pytest.raises(RuleError, match="measured on"):
        evaluate(run, tmp_path, report)


def test_an_edited_source_is_named(run: Run) -> None:
    path = run.source_path("I0001")
    path.write_bytes(path.read_bytes() + b"// more\n")
    with pytest.raises(RuleError, match=r"I0001: source: .* was edited"):
        bridge.source_path(run, "I0001")


def test_a_source_is_written_where_it_is_kept_as_a_patch(run: Run) -> None:
    path, data = run.source_path("I0001"), run.source("I0001")
    path.unlink()
    assert bridge.source_path(run, "I0001") == path and path.read_bytes() == data


# ---------------------------------------------------------------- what a run froze


@pytest.mark.parametrize("section", bridge.FROZEN)
def test_a_section_that_changed_ends_the_run(run: Run, section: str) -> None:
    assert bridge.check_frozen(run).name == "cpu"
    target = run.target()
    target.sections[section] = "0" * 64
    with (
        mock.patch.object(run, "target", lambda: target),
        pytest.raises(RuleError, match=f"the config's section {section} has changed since the run was made"),
    ):
        bridge.check_frozen(run)


def test_an_edited_config_is_named(run: Run) -> None:
    path = run.folder / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"max_slowdown": 1.1', '"max_slowdown": 2.1'))
    with pytest.raises(UserError, match=r"config.json: section limits is not what the run froze"):
        bridge.check_report(run, "I0001", child_report(run))
    path.write_text(text[:200])
    with pytest.raises(UserError, match=r"config.json: was cut or edited"):
        bridge.check_frozen(run)


@pytest.mark.parametrize("where", ["kernel.files", "kernel.witness"])
def test_a_header_or_witness_that_changed_ends_the_run(run: Run, where: str) -> None:
    target = run.target()
    unit = target.config["kernel"] if where == "kernel.files" else target.config["kernel"]["witness"]
    name = next(iter(unit["files"]))
    unit["files"][name] = "0" * 64
    with mock.patch.object(run, "target", lambda: target), pytest.raises(RuleError, match=f"{where} has changed"):
        bridge.check_frozen(run)


def test_another_evaluator_ends_the_run(run: Run) -> None:
    changed = mock.patch.object(bridge, "evaluator_hashes", lambda: {"tools/evaluate.py": "0" * 64})
    with changed, pytest.raises(RuleError, match=r"this checkout's evaluator .* is not the one that the run froze"):
        bridge.check_frozen(run)
