"""Rules of root, opportunities, actions and audits, each broken once: the message names record, rule and way out, and
nothing is written. Those of decisions, stops and ablations: test_ir_decisions.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ir_tools
import pytest
from ir_breaking import Make, child_of, refused
from ir_tools import ROOT, Scripted, action, decision, opportunity

from tools.core.errors import UserError
from tools.search import bridge

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
    agent = make()
    run = agent.run
    child, _ = agent.act()
    honest = ir_tools.audit_fields
    for wrong in (
        {"T": 2.0, "gain": None},
        {"T": None},
        {"complete": False},
        {"admissible": None},
        {"incumbent": None},
        {"gain": 1.5},
        {"gain": -0.01},
        {"T_incumbent": None},
    ):
        monkeypatch.setattr(ir_tools, "audit_fields", lambda *given, wrong=wrong: {**honest(*given), **wrong})
        with refused("promotion-not-granted", run):
            agent.audit(child, gain=0.1)
    monkeypatch.setattr(ir_tools, "audit_fields", lambda *given: {**honest(*given), "promoted": True})
    with refused("promotion-not-granted", run):
        agent.audit(child, "BIT_MISMATCH")
    monkeypatch.setattr(ir_tools, "audit_fields", lambda *given: {**honest(*given), "verified": False})
    with refused("links", run):
        agent.audit(child)
    monkeypatch.setattr(ir_tools, "audit_fields", lambda *given: {**honest(*given), "T": 2.0})
    agent.audit(child, gain=0.1)  # T is of the first session, the gain of all
    assert run.state.incumbent == child


def test_a_promotion_against_another_incumbent_is_evidence_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = make(parallel=2)
    run = agent.run
    first, _ = agent.act([ROOT])
    second, _ = agent.act([ROOT])
    agent.audit(first, gain=0.1)
    honest = ir_tools.audit_fields
    monkeypatch.setattr(ir_tools, "audit_fields", lambda *given: {**honest(*given), "incumbent": ROOT})
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
