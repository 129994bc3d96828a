"""The five ablations of a run, each by a short scripted run: what the context withholds, what the state machine refuses,
and that reports, records and their checks are those of a run without ablations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ir_tools
import pytest

from tools import ir
from tools.core.errors import UserError
from tools.search.context import context
from tools.search.records import ABLATIONS, RuleError
from tools.search.run import Run
from tools.search.verify import verify

SPEEDS = {"I0002": 1.02, "I0003": 0.9, "I0004": 1.01}  # time in shares of the root's
EVERYTHING = 10**9
HISTORY = ("I0001", "E0001", "L0001", "I0002", "E0002", "FINDING1", "MECHANISM1", "RECONSIDER2", "What failed")
NUMERICS = (
    *(
        "visibility:",
        "row_sum:",
        "c2 = 0x1.0527dcp-3",
        "REQUIREMENT",
        "Numerical requirements",
        "numerical_r",
        "RISK",
        "anchor",
    ),
    *("reduction order", "reduction_order", "conversion and rescale order", "Contract cpu-v1", "Supported inputs are finite"),
)
EVIDENCE = (
    *("| cell |", "decode B1 L128", "prefill B4 S1024", "compiler: kernel", "registers 32", "the best library", "share of T |"),
    *("first failure", "First failure", "scripted processor", "- code against", "(gain"),
)
OPPORTUNITIES = ("O0004", "O0005", "MECHANISM", "Open opportunities", "follow_ups", "follow-up", "merge")
BRANCHES = ("frontier", "archive:", "## Archived", "merge = true", "| merge |", "reactivate", "RECONSIDER2. FINDING2")


class Script:
    """The same search under any ablations: a failing attempt, a slower one that is archived, a promoted one, an open one."""

    def __init__(self, folder: Path, *ablations: str) -> None:
        self.run = ir_tools.new_run(folder, ablations=list(ablations))
        self.scripted = ir_tools.Scripted()
        self.scripted.statuses, self.scripted.speeds = {"I0001": "BIT_MISMATCH", "I0004": "BIT_MISMATCH"}, SPEEDS
        self.agent = ir_tools.Agent(self.run)
        self.audits: list[dict[str, Any]] = []
        with self.scripted.at_work():
            self._audit("I0000")
            if not self.run.state.without("opportunities"):
                for number in (1, 2, 3):
                    fields = {"direction": f"d{number}", "mechanism": f"MECHANISM{number}", "expected_share": 0.1}
                    self.run.propose(ir_tools.opportunity(**fields))
            self._attempt(
                1, "abandon", "I0000", falsified_by={"audit": "E0001", "measurement": "MEASURED1"}, evidence=["E0001"]
            )
            self._attempt(2, "archive", "I0002", reconsider_when="RECONSIDER2")
            self._attempt(3, "continue", "I0003", follow_ups=self._follow_up("I0003"))
            self.act("I0003", 4)

    def act(self, parent: str, number: int, **other: Any) -> None:
        risks = dict.fromkeys(ir_tools.RISKS, f"none: RISK{number}")
        name = None if self.run.state.without("opportunities") else f"O000{number}"
        fields = {"opportunity": name, "parents": [parent], "scope": f"SCOPE{number}", "numerical_risks": risks}
        fields["implementation"] = {"numerical_requirements": f"REQUIREMENT{number}"}
        self.run.act(ir_tools.action(**{**fields, **other}), ir_tools.edited(self.agent.root, f"child {number}"), "cpp")

    def _attempt(self, number: int, word: str, subject: str, **other: Any) -> None:
        self.act("I0000", number)
        self._audit(f"I000{number}")
        fields = {"audit": f"E000{number}", "subject": subject, "interpretation": f"FINDING{number}"}
        self.run.decide(ir_tools.decision(word, **{**fields, **other}))

    def _audit(self, identity: str) -> None:
        self.audits.append(self.run.audit(identity))

    def _follow_up(self, parent: str) -> list[dict[str, Any]]:
        if self.run.state.without("opportunities"):
            return []
        return [ir_tools.opportunity(direction="d4", mechanism="MECHANISM4", applies_to=[parent], evidence=["E0003"])]

    def contexts(self) -> Iterator[str]:
        """What the agent reads with an attempt that waits for its audit, that waits for its decision, and with none open."""
        yield context(self.run, EVERYTHING)
        with self.scripted.at_work():
            self._audit("I0004")
        yield context(self.run, EVERYTHING)
        words = {"audit": "E0004", "evidence": ["E0004"], "falsified_by": {"audit": "E0004", "measurement": "MEASURED4"}}
        self.run.decide(ir_tools.decision("abandon", **words, subject="I0003", interpretation="FINDING4"))
        if not self.run.state.without("opportunities"):
            self.run.propose(
                ir_tools.opportunity(direction="d5", mechanism="MECHANISM5", applies_to=["I0003"], evidence=["E0003"])
            )
        yield context(self.run, EVERYTHING)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, str]:
    script = Script(tmp_path_factory.mktemp("full") / "run")
    return script, "".join(script.contexts())


@pytest.fixture(params=ABLATIONS, scope="module")
def ablated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Script, str, str]:
    script = Script(tmp_path_factory.mktemp(request.param) / "run", request.param)
    return script, "".join(script.contexts()), request.param


KEPT = {
    "history": ("I0003", "E0003", "T 0.9", "| cell |", "visibility:", "SCOPE4", "MECHANISM4", "BIT_MISMATCH"),
    "numerics": ("| cell |", "MECHANISM4", "FINDING1", "RECONSIDER2", "frontier", "namespace numerics"),
    "evidence": ("T 0.9", "BIT_MISMATCH", "FINDING1", "RECONSIDER2", "visibility:", "frontier"),
    "opportunities": ("| cell |", "FINDING1", "SCOPE4", "RECONSIDER2", "visibility:", "frontier"),
    "branches": ("| cell |", "MECHANISM4", "FINDING1", "visibility:", "BIT_MISMATCH"),
}
WITHHELD = {
    "history": HISTORY,
    "numerics": NUMERICS,
    "evidence": EVIDENCE,
    "opportunities": OPPORTUNITIES,
    "branches": BRANCHES,
}


def test_the_context_withholds_what_the_ablation_takes_away_and_nothing_else(
    full: tuple[Script, str], ablated: tuple[Script, str, str]
) -> None:
    _, whole = full
    _, text, ablation = ablated
    for words in WITHHELD[ablation]:
        assert words in whole, f"{words!r} is no test: a run without ablations does not tell it either"
        assert words not in text, f"without {ablation}, the context tells {words!r}"
    for words in KEPT[ablation]:
        assert words in text, f"without {ablation}, the context withholds {words!r} too"


def test_records_reports_and_their_checks_are_those_of_a_run_without_ablations(
    full: tuple[Script, str], ablated: tuple[Script, str, str]
) -> None:
    (whole, _), (script, _, ablation) = full, ablated

    def judged(audit: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in audit.items() if key not in ("created", "report")}

    assert [judged(audit) for audit in script.audits] == [judged(audit) for audit in whole.audits]
    for audit in script.audits:
        stored = script.run.record(audit["id"])
        assert stored == audit and stored["resources"] and (stored["cells"] or stored["failure"])
        assert script.run.report(audit["id"])["correctness"] == whole.run.report(audit["id"])["correctness"]
    assert script.run.manifest["specification_sha256"] == whole.run.manifest["specification_sha256"]
    for name in ("I0001", "A0001"):
        record = script.run.record(name)
        assert "REQUIREMENT1" in json.dumps(record) or "RISK1" in json.dumps(record)
    assert script.run.state.settings["ablations"] == [ablation]
    verify(script.run.folder)


def refused(rule: str, step: Any) -> None:
    with pytest.raises(RuleError) as caught:
        step()
    assert caught.value.rule == rule


def test_without_opportunities_none_is_taken(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", "opportunities")
    run, before = script.run, len(script.run.lines)
    refused("ablation-opportunities", lambda: run.propose(ir_tools.opportunity()))
    list(script.contexts())
    assert "act" in context(run, 400) and "change I0003" in context(run, 400)
    refused("ablation-opportunities", lambda: run.act(ir_tools.action(parents=["I0003"]), script.agent.root + b"//\n", "cpp"))
    with pytest.raises(UserError, match="goes without opportunities"):
        context(run, 4000, opportunity="O0001")
    assert len(run.lines) == before + 2


def test_without_branches_only_the_incumbent_goes_on(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", "branches")
    run = script.run
    with script.scripted.at_work():
        run.audit("I0004")
    words = {"audit": "E0004", "interpretation": "x", "evidence": ["E0004"]}
    follow = ir_tools.opportunity(applies_to=["I0002"], evidence=["E0002"], direction="d6")
    again = {**words, "subject": "I0003", "follow_ups": [follow], "reactivate": ["I0002"], "reconsider_when": "x"}
    refused("ablation-branches", lambda: run.decide(ir_tools.decision("archive", **again)))
    merge = ir_tools.opportunity(applies_to=["I0002", "I0003"], evidence=["E0002"], direction="d7", merge=True)
    refused("ablation-branches", lambda: run.decide(ir_tools.decision("merge", **words, subject="I0003", follow_ups=[merge])))
    follow = ir_tools.opportunity(applies_to=["I0003"], evidence=["E0004"], direction="d8")
    run.decide(ir_tools.decision("continue", **words, subject="I0003", follow_ups=[follow]))
    assert run.state.frontier and "I0000" in run.state.frontier
    for parent in ("I0000", "I0002"):
        fields = ir_tools.action(opportunity="O0005", parents=[parent])
        refused("ablation-branches", lambda fields=fields: run.act(fields, script.agent.root + b"//\n", "cpp"))
        with pytest.raises(UserError, match=f"--parent {parent}: is no parent that an action may have now: I0003"):
            context(run, 4000, parent=parent)
    script.act("I0003", 5)


def test_without_branches_a_slower_child_is_not_continued(tmp_path: Path) -> None:
    agent = ir_tools.started(tmp_path / "run", ablations=["branches"])
    run = agent.run
    child, _ = agent.act()
    agent.audit(child, "PASSED")
    follow = ir_tools.opportunity(applies_to=[child], evidence=["E0001"], direction="next")
    refused("ablation-branches", lambda: run.decide(ir_tools.decision("continue", follow_ups=[follow])))
    assert "one branch: only the incumbent, I0000, is continued" in context(run, 4000)


def test_without_history_earlier_records_cannot_be_asked_for(tmp_path: Path) -> None:
    run = Script(tmp_path / "run", "history").run
    for identity in ("I0001", "I0002"):
        with pytest.raises(UserError, match=f"{identity}: its record is withheld in this run"):
            context(run, 4000, parent=identity)


def test_ablations_add_up(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", *ABLATIONS)
    for text in script.contexts():
        for words in {*HISTORY, *NUMERICS, *EVIDENCE, *OPPORTUNITIES, *BRANCHES} - {"BIT_MISMATCH"}:
            assert words not in text
        assert "T 0.9" in text and "## Source of I0003" in text


def test_the_command_takes_ablations_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert ir.main(["init", "--gpu", "cpu", "--run", str(folder), "--without", "history,evidence"]) == 0
    assert Run.open(folder).state.settings["ablations"] == ["history", "evidence"]
    with pytest.raises(UserError, match="sleep"):
        ir.main(["init", "--gpu", "cpu", "--run", str(tmp_path / "other"), "--without", "sleep"])
