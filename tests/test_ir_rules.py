"""Every rule across records is broken once: the message names record, rule and way out, and nothing is written."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ir_tools import ROOT, Agent, Scripted, action, decision, edited, new_run, opportunity, started, unsynced
from tools.core.errors import UserError
from tools.search import bridge
from tools.search.records import RuleError
from tools.search.run import Run

Make = Callable[..., Agent]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run before and one after its root's audit: tests take copies."""
    folder = tmp_path_factory.mktemp("templates")
    with unsynced():
        started(folder / "started")
        new_run(folder / "new")
    return {"started": folder / "started", "new": folder / "new"}


@pytest.fixture
def make(templates: dict[str, Path], tmp_path: Path) -> Iterator[Make]:
    """make(template, ablations...): an agent on a copy of a run. Nothing is synced."""

    def copied(template: str = "started", **settings: Any) -> Agent:
        if settings:
            return started(tmp_path / "run", **settings)
        shutil.copytree(templates[template], tmp_path / "run")
        return Agent(Run.open(tmp_path / "run"))

    with unsynced():
        yield copied


@contextlib.contextmanager
def refused(rule: str, run: Run, way_out: str = "") -> Iterator[None]:
    """A RuleError of this rule, one line of record, rule and way out; log and state are as before."""
    before = (run.folder / "log.jsonl").read_bytes()
    with pytest.raises(RuleError, match=way_out or None) as caught:
        yield
    assert caught.value.rule == rule, str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.record}: {rule}: ") and "\n" not in str(caught.value)
    assert (run.folder / "log.jsonl").read_bytes() == before
    assert Run.open(run.folder).state == run.state


def child_of(agent: Agent, parent: str = ROOT) -> bytes:
    return edited(agent.run.source(parent), agent.note())


# ---------------------------------------------------------------- the root


def test_nothing_comes_before_the_roots_audit(make: Make) -> None:
    agent = make("new")
    with refused("root-first", agent.run, "audit I0000 first"):
        agent.run.propose(opportunity(evidence=["E0000"]))
    with refused("root-first", agent.run):
        agent.run.act(action(), child_of(agent), "cpp")
    assert agent.run.state.stage == "initialization" and agent.run.state.vertex_status(ROOT) == "root"


def test_a_root_that_fails_is_audited_again(make: Make) -> None:
    agent = make("new")
    agent.audit(ROOT, "TIMEOUT")
    assert not agent.run.state.qualified and agent.run.state.vertex_status(ROOT) == "failed"
    with refused("root-first", agent.run):
        agent.run.propose(opportunity())
    agent.audit(ROOT)
    state = agent.run.state
    assert (state.incumbent, state.frontier, state.archive, state.kappa) == (ROOT, [ROOT], [], 0)
    assert state.audits["E0000"].replaced_by == "E0001" and state.audited == 0
    with refused("audited-already", agent.run):
        agent.audit(ROOT)


def test_the_first_act_needs_an_opportunity(make: Make) -> None:
    agent = make()
    with refused("root-opportunities", agent.run, "propose"):
        agent.run.act(action(), child_of(agent), "cpp")


# ---------------------------------------------------------------- opportunities


def test_what_an_opportunity_names_exists_and_is_verified(make: Make) -> None:
    agent = make()
    run = agent.run
    with refused("unknown-record", run):
        run.propose(opportunity(evidence=["E0009"]))
    with refused("unknown-record", run):
        run.propose(opportunity(applies_to=["I0009"]))
    with refused("unknown-record", run):
        run.propose(opportunity(origin="L0001"))
    child, _ = agent.act()
    with refused("unverified-parent", run, child):
        run.propose(opportunity(applies_to=[child]))
    agent.audit(child, "BIT_MISMATCH")
    with refused("unverified-parent", run, child):
        run.propose(opportunity(applies_to=[child]))
    run.propose(opportunity(evidence=["E0001"]))  # a failed audit is evidence


def test_what_is_pending_is_not_said_again(make: Make) -> None:
    agent = make()
    agent.run.propose(opportunity(workloads=["decode", "prefill"]))
    with refused("duplicate-opportunity", agent.run, "O0001 is pending"):
        agent.run.propose(opportunity(workloads=["prefill", "decode"], mechanism="The same in other words."))
    child, _ = agent.act()
    agent.audit(child)
    agent.run.decide(decision("archive"))


def test_a_merge_names_branches(make: Make) -> None:
    agent = make()
    run = agent.run
    with refused("merge-parents", run, "at least two"):
        run.propose(opportunity(merge=True))
    for number in (1, 2):
        child, _ = agent.act([ROOT])
        audit = agent.audit(child)["id"]
        follow = opportunity(direction=f"next-{number}", applies_to=[child])
        run.decide(decision("continue", audit=audit, subject=child, follow_ups=[follow]))
    with refused("merge-parents", run, "descends"):
        run.propose(opportunity(merge=True, applies_to=[ROOT, "I0001"]))
    merge = run.propose(opportunity(merge=True, applies_to=["I0001", "I0002"]))["id"]
    with refused("merge-parents", run, "name all"):
        run.act(action(opportunity=merge, parents=["I0001"]), child_of(agent), "cpp")
    single = run.propose(opportunity(applies_to=["I0001", "I0002"]))["id"]
    with refused("merge-parents", run, "merge: true"):
        run.act(action(opportunity=single, parents=["I0001", "I0002"]), child_of(agent), "cpp")
    child = run.act(action(opportunity=merge, parents=["I0002", "I0001"]), child_of(agent, "I0002"), "cpp")[0]
    assert run.state.edges[-2:] == [("I0002", child["id"], "A0003"), ("I0001", child["id"], "A0003")]
    assert run.source(child["id"]).startswith(run.source("I0002")[:1000])


def test_an_abandoned_direction_needs_new_evidence(make: Make) -> None:
    agent = make()
    run = agent.run
    child, direction = agent.act(direction="wrong-way")
    run.propose(opportunity(direction="wrong-way"))
    agent.audit(child, "BIT_MISMATCH")
    falsified = {"audit": "E0001", "measurement": "subnormals are lost"}
    run.decide(decision("abandon", subject=ROOT, falsified_by=falsified))
    assert run.state.pending == [] and run.state.opportunities["O0002"].used_by == "L0001"
    with refused("consumed-opportunity", run, "withdrawn by L0001"):
        run.act(action(opportunity="O0002"), child_of(agent), "cpp")
    with refused("abandoned-direction", run, "cite an audit made since"):
        run.propose(opportunity(direction=direction, evidence=["E0001"]))
    other, _ = agent.act([ROOT], direction="another-way")
    agent.audit(other)
    run.propose(opportunity(direction=direction, evidence=["E0002"]))


# ---------------------------------------------------------------- actions


def test_opportunities_are_used_once(make: Make) -> None:
    agent = make()
    run = agent.run
    child, _ = agent.act()
    agent.audit(child)
    run.decide(decision("archive"))
    with refused("consumed-opportunity", run, "taken up by A0001"):
        run.act(action(), child_of(agent), "cpp")
    with refused("unknown-opportunity", run, "pending: none"):
        run.act(action(opportunity="O0099"), child_of(agent), "cpp")
    with refused("unknown-opportunity", run):
        run.act(action(opportunity=None), child_of(agent), "cpp")


def test_parents_are_verified_listed_and_retained(make: Make) -> None:
    agent = make()
    run = agent.run
    run.propose(opportunity())
    with refused("unknown-record", run):
        run.act(action(parents=["I0044"]), child_of(agent), "cpp")
    failed, _ = agent.act([ROOT])
    agent.audit(failed, "RUNTIME_ERROR")
    follow = opportunity(direction="again", evidence=["E0001"])
    run.decide(decision("continue", subject=ROOT, follow_ups=[follow]))
    with refused("unverified-parent", run, "I0001"):
        run.act(action(opportunity="O0003", parents=[failed]), child_of(agent), "cpp")
    passed, _ = agent.act([ROOT])
    agent.audit(passed)
    run.decide(decision("archive", audit="E0002", subject=passed))
    with refused("parent-not-listed", run, "applies to I0000"):
        run.act(action(parents=[passed]), child_of(agent), "cpp")


def test_a_child_is_no_parent_before_its_decision(make: Make) -> None:
    agent = make(parallel=2)
    run = agent.run
    child, _ = agent.act()
    agent.audit(child)
    run.propose(opportunity(applies_to=[child], direction="next"))
    assert run.state.vertex_status(child) == "verified"
    with refused("parent-not-retained", run, "decide about it"):
        run.act(action(opportunity="O0002", parents=[child]), child_of(agent), "cpp")


def test_an_archived_parent_needs_something_new(make: Make) -> None:
    agent = make()
    run = agent.run
    child, _ = agent.act()
    agent.audit(child)
    early = run.propose(opportunity(applies_to=[child], direction="early"))["id"]
    run.decide(decision("archive"))
    assert run.state.archive == [child] and run.state.vertex_status(child) == "archived"
    with refused("archived-parent", run, "reactivate"):
        run.act(action(opportunity=early, parents=[child]), child_of(agent), "cpp")
    later = run.propose(opportunity(applies_to=[child], direction="later"))["id"]
    run.act(action(opportunity=later, parents=[child]), child_of(agent, child), "cpp")
    assert run.state.archive == [] and child in run.state.frontier


def test_one_source_is_one_implementation(make: Make) -> None:
    agent = make()
    run = agent.run
    run.propose(opportunity())
    with refused("duplicate-source", run, ROOT):
        run.act(action(), run.source(ROOT), "cpp")


def test_one_attempt_is_open_at_a_time(make: Make) -> None:
    agent = make()
    run = agent.run
    child, _ = agent.act()
    run.propose(opportunity())
    with refused("open-attempt", run, "audit it first"):
        run.act(action(opportunity="O0002"), child_of(agent), "cpp")
    agent.audit(child)
    with refused("open-attempt", run, "decide about its audit first"):
        run.act(action(opportunity="O0002"), child_of(agent), "cpp")


def test_a_form_is_held_against_compiled_code(make: Make) -> None:
    agent, scripted = make(), Scripted()
    agent.run.propose(opportunity())
    with scripted.at_work():
        with refused("form", agent.run, "joint"):
            agent.run.act(action(form="decode_only"), child_of(agent), "cpp")
        scripted.code = {"prefill": "identical", "extend": "identical", "decode": "changed"}
        agent.run.act(action(form="decode_only"), child_of(agent), "cpp")


# ---------------------------------------------------------------- audits


def test_an_audit_is_repeated_only_where_the_machine_may_be_at_fault(make: Make) -> None:
    agent = make()
    run = agent.run
    child, _ = agent.act()
    agent.audit(child, "REFUSED")
    assert (run.state.kappa, run.state.audited) == (1, 1)
    agent.audit(child, gain=0.1)
    state = run.state
    assert (state.kappa, state.audited, state.incumbent) == (0, 1, child) and state.audits["E0001"].replaced_by == "E0002"
    with refused("superseded-audit", run, "E0002"):
        run.decide(decision("archive"))
    with refused("audited-already", run, "decide about it"):
        agent.audit(child)
    run.decide(decision("archive", audit="E0002"))
    with refused("audited-already", run, "L0001 decided"):
        agent.audit(child)


def test_a_promotion_needs_all_that_the_evaluator_grants(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.ir_tools as tools

    agent = make()
    run = agent.run
    child, _ = agent.act()
    honest = tools.audit_fields
    for wrong in (
        {"T": 2.0},
        {"complete": False},
        {"admissible": None},
        {"incumbent": None},
        {"gain": 1.5},
        {"T_incumbent": None},
    ):
        monkeypatch.setattr(tools, "audit_fields", lambda *given, wrong=wrong: {**honest(*given), **wrong})
        with refused("promotion-not-granted", run):
            agent.audit(child, gain=0.1)
    monkeypatch.setattr(tools, "audit_fields", lambda *given: {**honest(*given), "promoted": True})
    with refused("promotion-not-granted", run):
        agent.audit(child, "BIT_MISMATCH")
    monkeypatch.setattr(tools, "audit_fields", lambda *given: {**honest(*given), "verified": False})
    with refused("links", run):
        agent.audit(child)


def test_a_promotion_against_another_incumbent_is_evidence_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.ir_tools as tools

    agent = make(parallel=2)
    run = agent.run
    first, _ = agent.act([ROOT])
    second, _ = agent.act([ROOT])
    agent.audit(first, gain=0.1)
    honest = tools.audit_fields
    monkeypatch.setattr(tools, "audit_fields", lambda *given: {**honest(*given), "incumbent": ROOT})
    agent.audit(second, gain=0.2)
    audit = run.state.audits["E0002"]
    assert (audit.note, audit.accepted) == ("stale-incumbent", False)
    assert (run.state.incumbent, run.state.kappa, run.state.audited) == (first, 1, 2)


def test_an_audit_is_of_its_implementation(make: Make) -> None:
    agent = make()
    with refused("unknown-record", agent.run):
        agent.audit("I0009")
    with pytest.raises(UserError, match="nothing waits"):
        agent.run.audit()


def test_reports_of_something_else_are_refused(make: Make, tmp_path: Path) -> None:
    agent, scripted = make("new"), Scripted()
    run = agent.run
    with scripted.at_work():
        run.audit()
        run.propose(opportunity())
        child = run.act(action(), child_of(agent), "cpp")[0]["id"]
        report = scripted.write(run, ROOT, tmp_path / "root.json")
        with refused("audit-target", run, "another source"):
            run.audit(child, report)
        found = json.loads(scripted.write(run, child, tmp_path / "child.json").read_text())
        for number, (section, key, value, rule, words) in enumerate(
            [
                ("hashes", "evaluator", "0" * 64, "audit-target", "another evaluator"),
                ("target", "sections", {**found["target"]["sections"], "contract": "0" * 64}, "audit-target", "contract"),
                ("target", "name", "h200", "audit-target", "h200"),
                ("environment", "processor", "another", "audit-target", "another"),
                ("run", "seed_given", True, "audit-target", "seed"),
                ("run", "guards_off", ["clock"], "audit-target", "clock"),
                ("run", "cases", "quick", "audit-target", "quick"),
            ]
        ):
            wrong = json.loads(json.dumps(found))
            wrong[section][key] = value
            path = rewritten(wrong, tmp_path / f"wrong{number}.json")
            with refused(rule, run, words):
                run.audit(child, path)
        unfinished = {**found, "status": "INCOMPLETE", "reason": "interrupted"}
        unfinished.update(dict.fromkeys(("timing", "objective", "promotion")))
        with refused("incomplete-report", run, "interrupted"):
            run.audit(child, rewritten(unfinished, tmp_path / "unfinished.json"))
        run.audit(child, tmp_path / "child.json")


def rewritten(report: dict[str, Any], path: Path) -> Path:
    """A report with its own hash made anew: what a forger would do."""
    from tools.evaluator.report import own_hash

    report["hashes"]["report"] = own_hash(report)
    path.write_text(json.dumps(report))
    return path


def test_a_changed_evaluator_is_no_judge(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make()
    child, _ = agent.act()
    monkeypatch.setattr(bridge, "evaluator_hashes", lambda: {"tools/evaluate.py": "0" * 64})
    with refused("audit-target", agent.run, "evaluator"):
        agent.run.audit(child)


# ---------------------------------------------------------------- decisions


def test_what_is_decided_about(make: Make) -> None:
    agent = make()
    run = agent.run
    with refused("unknown-record", run):
        run.decide(decision("archive", audit="E0077"))
    with refused("decided-already", run, "needs no decision"):
        run.decide(decision("archive", audit="E0000", subject=ROOT))
    child, _ = agent.act()
    agent.audit(child)
    with refused("subject", run, child):
        run.decide(decision("archive", subject=ROOT))
    with refused("unknown-record", run, "evidence"):
        run.decide(decision("archive", evidence=["E0044"]))
    run.decide(decision("archive"))
    with refused("decided-already", run, "L0001"):
        run.decide(decision("archive"))


def test_a_failed_child_sends_the_search_back_to_its_parent(make: Make) -> None:
    agent = make()
    run = agent.run
    child, _ = agent.act()
    agent.audit(child, "INACCURATE")
    follow = opportunity(direction="again", evidence=["E0001"])
    with refused("subject", run, "its parent"):
        run.decide(decision("continue", subject=child, follow_ups=[follow]))
    with refused("subject", run):
        run.decide(decision("archive", subject=child))
    run.decide(decision("continue", subject=ROOT, follow_ups=[follow]))
    assert run.state.frontier == [ROOT] and child in run.state.implementations
    assert run.state.vertex_status(child) == "failed"


def test_follow_ups_and_what_each_decision_needs(make: Make) -> None:
    agent = make()
    run = agent.run
    child, _ = agent.act()
    agent.audit(child)
    with refused("continue", run, "archive it"):
        run.decide(decision("continue"))
    with refused("continue", run):
        run.decide(decision("continue", follow_ups=[opportunity(direction="of-the-root")]))
    with refused("follow-ups", run, "not pending"):
        run.decide(decision("continue", follow_ups=["O0001"]))
    with refused("merge", run, "merge: true"):
        run.decide(decision("merge", follow_ups=[opportunity(applies_to=[child])]))
    with refused("archive", run, "reconsider_when"):
        run.decide(decision("archive", reconsider_when=None))
    with refused("reactivate", run, "is not archived"):
        run.decide(decision("archive", reactivate=[ROOT]))
    with refused("links", run):
        state = run.state
        line = {**run.lines[-1], "n": state.lines, "type": "decide", "facts": {}}
        state.apply(line)
    pending = run.propose(opportunity(applies_to=[child], direction="waits"))["id"]
    run.decide(decision("continue", follow_ups=[pending]))
    assert child in run.state.frontier and run.state.pending == [pending]


def test_merge_and_reactivation(make: Make) -> None:
    agent = make()
    run = agent.run
    first, _ = agent.act([ROOT])
    agent.audit(first)
    run.decide(decision("archive"))
    second, _ = agent.act([ROOT])
    agent.audit(second, gain=0.1)
    merge = opportunity(direction="both", applies_to=[first, second], merge=True, evidence=["E0001", "E0002"])
    with refused("reactivate", run, "no follow-up applies"):
        follow = opportunity(direction="other", applies_to=[second])
        run.decide(decision("continue", audit="E0002", subject=second, follow_ups=[follow], reactivate=[first]))
    made = run.decide(decision("merge", audit="E0002", subject=second, follow_ups=[merge], reactivate=[first]))
    assert run.state.frontier == [ROOT, second, first] and run.state.archive == []
    assert made[1]["origin"] == made[0]["id"] == "L0002"
    child, _ = run.act(action(opportunity=made[1]["id"], parents=[second, first]), child_of(agent, second), "cpp")
    assert run.state.vertex_status(child["id"]) == "unaudited" and run.state.stage == "audit"


def test_abandoning_takes_failures_or_a_falsification(make: Make) -> None:
    agent = make()
    run = agent.run
    for number in (1, 2):
        child, _ = agent.act([ROOT], direction="skip-rescale")
        agent.audit(child, "BIT_MISMATCH")
        audit = f"E000{number}"
        if number == 1:
            with refused("abandon", run, "1 unverified audits of the 2"):
                run.decide(decision("abandon", audit=audit, subject=ROOT, evidence=[audit]))
            with refused("abandon", run, "no audit of the direction"):
                wrong = {"audit": "E0000", "measurement": "something"}
                run.decide(decision("abandon", audit=audit, subject=ROOT, evidence=[audit], falsified_by=wrong))
            follow = opportunity(direction="skip-rescale", evidence=[audit], workloads=["prefill"])
            run.decide(decision("continue", audit=audit, subject=ROOT, follow_ups=[follow]))
    with refused("abandon", run, "evidence is empty"):
        run.decide(decision("abandon", audit="E0002", subject=ROOT))
    follow = opportunity(direction="skip-rescale", evidence=["E0002"])
    with refused("abandon", run, "abandoned here"):
        run.decide(decision("abandon", audit="E0002", subject=ROOT, evidence=["E0002"], follow_ups=[follow]))
    run.decide(decision("abandon", audit="E0002", subject=ROOT, evidence=["E0001", "E0002"]))
    assert run.state.pending == [] and run.state.abandoned["skip-rescale"] == run.state.lines - 1
    assert (run.state.stage, run.state.stop_reason.split(":")[0]) == ("stopped", "no-opportunity")  # type: ignore[union-attr]
    run.propose(opportunity(direction="something-else"))
    assert run.state.stage == "action"


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("settings", "word"), [({"kappa_max": 1}, "kappa"), ({"max_audits": 1}, "audits"), ({"max_tokens": 10}, "tokens")]
)
def test_a_stop_names_its_reason_and_is_final(make: Make, settings: dict[str, int], word: str) -> None:
    agent = make(**settings)
    run = agent.run
    child, _ = agent.act()
    run.usage({"input_tokens": 8, "output_tokens": 2, "cached_tokens": None, "source": "counter", "step": None})
    agent.audit(child)
    follow = opportunity(applies_to=[child], direction="next")
    run.decide(decision("continue", follow_ups=[follow]))  # what was open is finished
    assert run.state.stage == "stopped" and str(run.state.stop_reason).startswith(word)
    with refused("stopped", run, word):
        run.act(action(opportunity="O0002", parents=[child]), child_of(agent, child), "cpp")
    with refused("stopped", run, word):
        run.propose(opportunity())


def test_time_stops_a_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.search import log

    agent = make(max_seconds=3600)
    agent.run.propose(opportunity())
    monkeypatch.setattr(log, "now_text", lambda: "2999-01-01T00:00:00.000000+00:00")
    with refused("stopped", agent.run, "seconds"):
        agent.run.act(action(), child_of(agent), "cpp")


def test_promotion_resets_kappa_and_multiplies_gains(make: Make) -> None:
    agent = make()
    run = agent.run
    for number, gain in enumerate((None, 0.2, None, 0.5), 1):
        child, _ = agent.act()
        agent.audit(child, gain=gain)
        run.decide(decision("archive", audit=f"E000{number}", subject=child) | {"follow_ups": []})
        run.propose(opportunity(direction=f"d{number}", applies_to=[ROOT]))
    assert [point.audited for point in run.state.best] == [0, 1, 2, 3, 4]
    assert run.state.speedup == pytest.approx(1 / 0.8 / 0.5) and run.state.kappa == 0
    assert run.state.incumbent == "I0004" and run.state.vertex_status("I0004") == "incumbent"


# ---------------------------------------------------------------- ablations


def test_a_run_without_opportunities_acts_without(make: Make) -> None:
    agent = make(ablations=["opportunities"])
    run = agent.run
    assert run.state.stage == "action"
    with refused("ablation-opportunities", run):
        run.propose(opportunity())
    with refused("ablation-opportunities", run):
        run.act(action(), child_of(agent), "cpp")
    child, _ = agent.act()
    agent.audit(child, "BIT_MISMATCH")
    with refused("ablation-opportunities", run):
        run.decide(decision("continue", subject=ROOT, follow_ups=[opportunity()]))
    run.decide(decision("continue", subject=ROOT))
    assert run.state.stop_reason is None


def test_a_run_without_branches_goes_on_from_the_incumbent(make: Make) -> None:
    agent = make(ablations=["branches"])
    run = agent.run
    child, _ = agent.act()
    agent.audit(child)
    follow = opportunity(direction="next", applies_to=[child])
    with refused("ablation-branches", run, "archive or abandon"):
        run.decide(decision("continue", follow_ups=[follow]))
    with refused("ablation-branches", run):
        run.decide(decision("merge", follow_ups=[follow]))
    run.decide(decision("archive"))
    run.propose(follow)
    with refused("ablation-branches", run, "I0000"):
        run.act(action(opportunity="O0002", parents=[child]), child_of(agent, child), "cpp")
    second, _ = agent.act()
    agent.audit(second, gain=0.1)
    with refused("ablation-branches", run, "reactivated"):
        run.decide(decision("archive", audit="E0002", subject=second, reactivate=[child]))
    run.decide(decision("archive", audit="E0002", subject=second))
    with refused("ablation-branches", run, "merged"):
        run.propose(opportunity(merge=True, applies_to=[child, second]))
    run.propose(opportunity())
    run.act(action(opportunity="O0004", parents=[second]), child_of(agent, second), "cpp")  # listed for the root


# ---------------------------------------------------------------- form of what is given


def test_fields_of_the_tool_are_not_stated(make: Make) -> None:
    agent = make()
    for fields in ({"id": "O0001"}, {"created": "now"}, {"schema": "areal-tik/opportunity/1"}):
        with refused("schema", agent.run, "leave it out"):
            agent.run.propose(opportunity(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"direction": "Wide Tiles"}, "direction"),
        ({"mechanism": ""}, "mechanism: is empty"),
        ({"workloads": []}, "workloads: is empty"),
        ({"evidence": ["I0000"]}, "evidence.0"),
        ({"applies_to": [ROOT, ROOT]}, "applies_to"),
        ({"expected_share": 2}, "expected_share"),
        ({"expected_share": float("nan")}, "expected_share"),
        ({"merge": "yes"}, "merge: 'yes' is not of type boolean"),
        ({"another": 1}, "unknown: another"),
    ],
)
def test_a_schema_names_the_field(make: Make, fields: dict[str, Any], words: str) -> None:
    agent = make()
    with refused("schema", agent.run, words):
        agent.run.propose(opportunity(**fields))


def test_usage_is_counts_or_a_reason(make: Make) -> None:
    run = make().run
    counts = {"input_tokens": 10, "output_tokens": 5, "cached_tokens": 4, "source": "counter", "step": "I0001"}
    for wrong in ({"input_tokens": -1}, {"output_tokens": 1.5}, {"cached_tokens": 11}):
        with refused("usage", run):
            run.usage({**counts, **wrong})
    with refused("usage", run):
        run.usage({"unavailable": ""})
    run.usage(counts)
    with refused("usage", run, "recorded already"):  # the command was run again
        run.usage(counts)
    run.usage({"unavailable": "the environment shows none"})
    run.usage(counts)
    assert run.state.tokens == 30 and run.state.tokens_unavailable == "the environment shows none"
