"""Rules of decisions, stops, ablations and of what is given at all, each broken once."""

from __future__ import annotations

from typing import Any

import pytest
from ir_breaking import Make, child_of, refused
from ir_tools import ROOT, action, decision, opportunity

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


@pytest.mark.parametrize("ablations", [["numerics"], []])
def test_risks_are_asked_for_unless_the_run_goes_without_them(make: Make, ablations: list[str]) -> None:
    """Without them the context's template names none, and is taken as it is printed."""
    agent = make(ablations=ablations)
    run, fields = agent.run, action(opportunity=agent.run.propose(opportunity())["id"])
    del fields["numerical_risks"]
    if not ablations:
        with refused("schema", run, "numerical_risks"):
            run.act(fields, child_of(agent), "cpp")
        return
    _, made = run.act(fields, child_of(agent), "cpp")
    assert set(made["numerical_risks"].values()) == {"none: not asked in this run"}


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
