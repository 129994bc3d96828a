"""A run on another GPU than the target's: refused unless it is asked for, marked everywhere, and part of no result."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_tools import COMPATIBILITY, GPU, V2
from ir_tools import Scripted, scripted_report
from rich.console import Console

from tools import evaluate, plot, predict, tables
from tools.archive.verify import Verification
from tools.core.config import load_target, target_names
from tools.core.errors import UserError
from tools.evaluator import judge, promotion, table
from tools.evaluator import report as reports
from tools.evaluator.grids import cells
from tools.evaluator.guards import Guards
from tools.evaluator.options import Options
from tools.figures import sources
from tools.model.calibrate import calibrated
from tools.search import jobs
from tools.search.records import RuleError
from tools.search.run import Run

TARGETS = [load_target(name) for name in target_names()]
PROXY, OTHER = "h20", "NVIDIA H200"  # a target, and another GPU that can run its code


@pytest.fixture(scope="module")
def proxy(repo: Path) -> Any:
    """The report of a whole run on another GPU."""
    return json.loads((repo / COMPATIBILITY).read_bytes())


# ---------------------------------------------------------------- the run


@pytest.fixture
def other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine seems to have OTHER; a run ends once it knows its machine, and compiles nothing."""

    def stop(device: str) -> Any:
        raise judge.Stop("INCOMPLETE", "the machine was accepted")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: OTHER)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(judge.environment, "record", stop)
    monkeypatch.setattr(judge.Judge, "_build", lambda self: pytest.fail("compiled"))


@pytest.mark.usefixtures("other_gpu")
def test_another_gpu_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    """Nothing is left behind either: the report's name is free for the right machine."""
    output = tmp_path / "r.json"
    with pytest.raises(UserError, match=f"this GPU is '{OTHER}', target {PROXY} is 'NVIDIA H20'"):
        evaluate.main(["--gpu", PROXY, "--output", str(output), "--json"])
    assert not output.exists()


@pytest.mark.usefixtures("other_gpu")
def test_it_runs_when_it_is_asked_for_and_the_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "r.json"
    evaluate.main(["--gpu", PROXY, "--output", str(output), "--json", "--allow-compat"])
    assert json.loads(capsys.readouterr().out)["compatibility"] is True
    found = reports.read(output)
    assert (found["reason"], found["compatibility"]) == ("the machine was accepted", True)
    assert found["notes"][0].startswith(f"compatibility only: this GPU is '{OTHER}'")
    assert "nothing of the target's bits or speed" in found["notes"][1]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_its_times_are_called_proxies(repo: Path, elsewhere: bool) -> None:
    made = object.__new__(judge.Judge)
    made.target, made.root_report, made.builds = load_target("cpu"), None, {}
    made.record = {"compatibility": elsewhere, "notes": []}
    made._verdict(json.loads((repo / V2).read_bytes())["timing"]["cells"])
    assert made.record["status"] == "PASSED"
    assert made.record["notes"] == (["times of a compatibility run are proxies and enter no result"] if elsewhere else [])


def test_what_people_see_is_marked(repo: Path) -> None:
    found = json.loads((repo / GPU).read_bytes())
    for marked in (True, False):
        found["compatibility"] = marked
        screen = Console(record=True, width=200, file=io.StringIO())
        table.show(screen, found)
        assert ("PASSED (compatibility run: its times are proxies)" in screen.export_text()) == marked
        assert evaluate._summary(found, Path("x"))["compatibility"] is marked


# ---------------------------------------------------------------- promotion


def test_it_promotes_nothing_whatever_it_measures() -> None:
    """Nothing else stands in the way, and the comparison says better."""
    made = object.__new__(judge.Judge)
    made.options, made.guards = Options(gpu="cpu", output=Path("x")), Guards()
    made.cells = cells(load_target("cpu").config["workloads"])
    root = {cell.name: 1.0 for cell in made.cells}
    better = {"verdict": "better", "why": "faster"}
    for elsewhere in (False, True):
        made.record = {"compatibility": elsewhere}
        blockers = made._blockers(root)
        assert blockers == (["a compatibility run"] if elsewhere else [])
        assert promotion.decide([], better, blockers, True)[0] is not elsewhere


def test_it_is_no_root(proxy: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    reports.write(path, copy.deepcopy(proxy))
    target = load_target(proxy["target"]["name"])
    with pytest.raises(UserError, match="only a pass on the target's own device can be a root"):
        reports.root(path, target, proxy["builds"]["candidate"]["source_sha256"])


def test_it_is_no_audit(run: Run, scripted: Scripted) -> None:
    """As the report of an exported job; the same report of the target's own machine is taken."""
    for elsewhere in (True, False):
        folder = jobs.export(run, "I0001")
        found = scripted_report(run, "I0001", speeds={"I0001": 0.9})
        found["compatibility"] = elsewhere
        reports.write(folder / "report.json", found)
        with scripted.at_work():
            if elsewhere:
                with pytest.raises(RuleError, match="a compatibility run: its times are proxies") as caught:
                    jobs.import_report(run, folder / "report.json")
                assert caught.value.rule == "audit-target" and run.state.audited == 0
            else:
                assert jobs.import_report(run, folder / "report.json")["promoted"]


# ---------------------------------------------------------------- what is published


def test_it_makes_no_table(proxy: Any, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(proxy))
    for kind in tables.RENDER:
        with pytest.raises(UserError, match=r"r\.json is a compatibility run: its times are proxies and enter no table"):
            tables.rendered(f"<!-- table: {kind} r.json -->\n<!-- end of table -->\n", "x.md", tmp_path)
    for name in tables.DOCUMENTS:
        assert COMPATIBILITY not in [
            path for found in tables.TABLE.findall((repo / name).read_text()) for path in found[2].split()
        ]


def test_it_is_not_drawn_and_calibrates_nothing(proxy: Any, tmp_path: Path) -> None:
    known = {target.name: target for target in TARGETS}
    assert "compatibility" in str(sources.problem(proxy, known))
    listing = tmp_path / "reports.json"
    listing.write_text(json.dumps({"drawn": [Path(COMPATIBILITY).name], "left_out": {}}))
    with pytest.raises(UserError, match="compatibility"):
        calibrated(load_target(proxy["target"]["name"]), TARGETS, predict.EVIDENCE, listing)
    lines = list(csv.DictReader((plot.FIGURES / "attention_performance.csv").read_text().splitlines()))
    assert [line["status"] for line in lines if line["target"] == proxy["target"]["name"]] == ["not measured"]


def test_it_is_no_validation_of_its_target(proxy: Any, repo: Path) -> None:
    checked = Verification(repo)
    checked.check_targets()
    checked.check_evidence()
    name = proxy["target"]["name"]
    assert name in {item.target for item in checked.items if item.kind == "compatibility"}
    found = checked.derived()
    (entry,) = (target for target in found["experimental/archive.json"]["targets"] if target["name"] == name)
    assert entry["status"] == "compatibility" and f"experimental/{name}/validation.json" not in found
