"""The state machine against a straightforward model (tests/ir_model.py), at random steps of which about half are refused."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from ir_model import ROOT, Model

from tools.search.records import RuleError
from tools.search.state import State

Facts = dict[str, Any]
SEEDS = st.integers(0, 2**32 - 1)
DIRECTIONS = ("tiles", "loads", "sums", "order")
STATUSES = ("PASSED", "PASSED", "PASSED", "BIT_MISMATCH", "REFUSED", "INCOMPLETE")
STEPS = 10_000
RULES = (
    *("root-first", "stopped", "unknown-record", "unverified-parent", "merge-parents", "abandoned-direction"),
    *("root-opportunities", "open-attempt", "unknown-opportunity", "consumed-opportunity", "parent-not-listed"),
    *("parent-not-retained", "archived-parent", "duplicate-source", "audited-already", "incomplete-report"),
    *("promotion-not-granted", "decided-already", "superseded-audit", "subject", "continue", "merge", "archive", "abandon"),
    *("follow-ups", "reactivate", "duplicate-opportunity", "usage", "ablation-opportunities", "ablation-branches"),
)
taken: Counter[str] = Counter()


def some(draw: random.Random, likely: Any, other: Any = ()) -> Any:
    """Mostly one of what is likely to be accepted, at times any other."""
    likely, other = list(likely), list(other)
    pool = likely if likely and (draw.random() < 0.85 or not other) else other or likely
    return draw.choice(pool) if pool else None


class Search(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sources = 1
        self.tried = 0

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        draw = random.Random(seed)
        chosen = {
            "kappa_max": draw.choice((3, 10, 40)),
            "max_audits": draw.choice((None, None, None, 5)),
            "max_tokens": draw.choice((None, None, None, 60)),
            "max_seconds": None,
            "parallel": draw.choice((1, 1, 2)),
            "abandon_after": draw.choice((1, 2)),
            "ablations": draw.choice(([], [], [], [], ["branches"], ["opportunities"])),
        }
        self.model, self.state = Model(chosen), State()
        source = {"sha256": f"{0:064x}", "bytes": 1, "suffix": "cpp"}
        root = {"id": ROOT, "source": source, "parents": [], "action": None}
        self.step("init", {"name": "x", "target": "cpu", "contract": "c", "settings": chosen, "implementations": [root]}, True)
        if draw.random() < 0.9:
            self.step("audit", {"audits": [self.an_audit(draw, ROOT, "PASSED")]})
        for _ in range(0 if chosen["ablations"] == ["opportunities"] else 2):
            self.step("propose", {"opportunities": [self.an_opportunity(draw, self.state.next_id("O"))]})

    def step(self, kind: str, facts: Facts, allowed: bool | None = None) -> None:
        """Offer a step to both; they must agree, and a refusal leaves no trace."""
        taken["steps"] += 1
        self.tried += 1
        allowed = self.model.allowed(kind, facts) if allowed is None else allowed
        line = {
            "n": self.state.lines,
            "time": f"2026-01-01T00:00:00.{self.state.lines:06d}+00:00",
            "type": kind,
            "facts": facts,
        }
        before = copy.deepcopy(self.state) if not allowed else None
        try:
            self.state.apply(copy.deepcopy(line))
        except RuleError as refusal:
            assert not allowed, f"refused what the model allows: {refusal} {line}"
            assert before == self.state
            taken[refusal.rule] += 1
        else:
            assert allowed, f"took what the model refuses: {line}"
            self.model.take(kind, facts)
            taken[f"took {kind}"] += 1

    def drawn(self, seed: int) -> random.Random:
        """Choices of one step: another at every step, also where hypothesis tries the same seed again."""
        return random.Random(f"{seed} {self.tried}")

    # ------------------------------------------------------------ steps

    @rule(seed=SEEDS)
    def forward(self, seed: int) -> None:
        """What the search waits for, so that walks get far."""
        stage = self.state.stage
        if stage == "initialization":
            self.propose(seed) if self.state.qualified else self.audit(seed)
        elif stage == "action":
            self.act(seed)
        elif stage in ("audit", "lineage"):
            self.audit(seed) if stage == "audit" else self.decide(seed)

    @rule(seed=SEEDS)
    def onward(self, seed: int) -> None:
        self.forward(seed)

    def an_opportunity(self, draw: random.Random, identity: str, about: str | None = None) -> Facts:
        verified = [name for name in self.state.implementations if self.state.verified(name)]
        first = about if about and draw.random() < 0.8 else some(draw, verified, self.state.implementations)
        merge = draw.random() < 0.25
        second = [some(draw, verified, self.state.implementations)] if merge or draw.random() < 0.2 else []
        return {
            **{"id": identity, "direction": draw.choice(DIRECTIONS), "workloads": ["decode"], "merge": merge, "origin": None},
            **{"evidence": [some(draw, list(self.state.audits)[-2:], ["E0099"])], "expected_share": None},
            "applies_to": list(dict.fromkeys(name for name in (first, *second) if name)),
        }

    def an_audit(self, draw: random.Random, name: str, status: str) -> Facts:
        passed = status == "PASSED"
        promoted = name != ROOT and draw.random() < (0.35 if passed else 0.03)
        wrong = draw.random() < 0.1
        known = self.state.implementations.get(name)
        return {
            **{"id": self.state.next_id("E"), "implementation": name, "action": known.action if known else None},
            **{"status": status, "verified": passed, "complete": passed and not wrong, "admissible": passed or None},
            **{"promoted": promoted, "T": 0.9 if passed else None, "T_root": 1.0, "T_incumbent": 0.8 if wrong else 1.0},
            **{"gain": None, "incumbent": some(draw, [self.state.incumbent], [ROOT, None]), "seconds": 1.0},
        }

    @rule(seed=SEEDS)
    def propose(self, seed: int) -> None:
        draw = self.drawn(seed)
        self.step("propose", {"opportunities": [self.an_opportunity(draw, self.state.next_id("O"))]})

    @rule(seed=SEEDS)
    def act(self, seed: int) -> None:
        draw, state = self.drawn(seed), self.state
        if len(state.open_attempts) >= state.settings["parallel"] and draw.random() < 0.8:
            return
        name = some(draw, state.pending, [*state.opportunities, None, "O0099"])
        if state.without("opportunities"):
            name = some(draw, [None], ["O0001"])
        known = state.opportunities.get(name)
        held = [o for o in state.implementations if state.retained(o)]
        parents = list(known.applies_to) if known and (known.merge or draw.random() < 0.1) else []
        if not parents or draw.random() < 0.1:
            wanted = [o for o in held if known is None or o in known.applies_to or state.without("branches")]
            parents = [some(draw, wanted, state.implementations)]
        child, action, source = state.next_id("I"), state.next_id("A"), f"{self.sources:064x}"
        self.sources += 1
        if draw.random() < 0.08:
            source = f"{0:064x}"
        made = {"id": child, "source": {"sha256": source, "bytes": 1, "suffix": "cpp"}, "parents": parents, "action": action}
        edit = {"id": action, "opportunity": name, "parents": parents, "child": child, "form": "joint"}
        self.step("act", {"implementations": [made], "actions": [edit]})

    @rule(seed=SEEDS)
    def audit(self, seed: int) -> None:
        draw, state = self.drawn(seed), self.state
        waiting = state.unaudited() if state.qualified else [ROOT]
        again = [state.audits[name] for name in state.undecided() if state.audits[name].status == "REFUSED"]
        if again and draw.random() < 0.5:
            waiting = [audit.implementation for audit in again]
        if not waiting and draw.random() < 0.8:
            return
        name = some(draw, waiting or state.implementations, [*state.implementations, "I0099"])
        self.step("audit", {"audits": [self.an_audit(draw, name, draw.choice(STATUSES))]})

    @rule(seed=SEEDS)
    def decide(self, seed: int) -> None:
        draw, state = self.drawn(seed), self.state
        if not state.undecided() and draw.random() < 0.8:
            return
        replaced = [audit.id for audit in state.audits.values() if audit.replaced_by]
        name = some(draw, state.undecided(), [*state.audits, *replaced, *replaced, "E0099"])
        known = state.audits.get(name)
        implementation = known.implementation if known else ROOT
        parents = state.implementations[implementation].parents
        subject = some(draw, [implementation] if known is None or known.verified else parents, state.implementations)
        made, follow = [], []
        for _ in range(draw.choice((0, 1, 1, 2))):
            identity = f"O{int(state.next_id('O')[1:]) + len(made):04d}"
            if draw.random() < 0.6 and not state.without("opportunities"):
                made.append(self.an_opportunity(draw, identity, subject))
                follow.append(identity)
            elif found := some(draw, state.pending, state.opportunities):
                follow.append(found)
        grounds = {"audit": some(draw, [name], state.audits), "measurement": "m"}
        record = {
            **{"id": state.next_id("L"), "audit": name, "subject": subject, "follow_ups": list(dict.fromkeys(follow))},
            **{"decision": draw.choice(("continue", "continue", "archive", "archive", "merge", "abandon"))},
            "reactivate": [draw.choice(state.archive)] if state.archive and draw.random() < 0.3 else [],
            "evidence": [some(draw, state.audits)] if state.audits and draw.random() < 0.8 else [],
            "falsified_by": grounds if state.audits and draw.random() < 0.3 else None,
            "reconsider_when": "later" if draw.random() < 0.9 else None,
        }
        facts: Facts = {"decisions": [record]}
        self.step("decide", {**facts, "opportunities": made} if made else facts)

    @rule(seed=SEEDS)
    def use(self, seed: int) -> None:
        if seed % 4 == 0:
            counts = {"input_tokens": seed % 3, "output_tokens": 1, "cached_tokens": None, "source": "c"}
            self.step("usage", {**counts, "step": "s" if seed % 8 else None})

    # ------------------------------------------------------------ what must hold

    @invariant()
    def agree(self) -> None:
        state, model = self.state, self.model
        assert (state.incumbent, state.kappa, state.audited) == (model.incumbent, model.kappa, model.audited)
        assert (set(state.frontier), set(state.archive)) == (model.frontier(), model.archive())
        assert (set(state.pending), state.open_attempts) == (model.pending(), model.open())
        assert len(state.frontier) == len(set(state.frontier)) and not set(state.frontier) & set(state.archive)
        assert all(state.verified(name) for name in (*state.frontier, *state.archive))
        assert set(state.implementations) == set(model.all("implementations"))  # failed vertices stay
        assert bool(state.stop_reason and not state.stop_reason.startswith("no-opp")) == model.final_stop()
        assert state.stage in ("initialization", "action", "audit", "lineage", "stopped")


def missing() -> list[str]:
    """Kinds that were not taken often, and rules that were not broken yet."""
    kinds = ("init", "propose", "act", "audit", "decide", "usage")
    return [kind for kind in kinds if taken[f"took {kind}"] < 100] + [name for name in RULES if not taken[name]]


def test_the_state_is_the_models() -> None:
    """At least 10,000 steps; every kind is taken, and every rule that a step can break is broken."""
    taken.clear()
    for _ in range(10):
        run_state_machine_as_test(
            Search,
            settings=settings(
                max_examples=100,
                stateful_step_count=100,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if taken["steps"] >= STEPS and not missing():
            break
    assert taken["steps"] >= STEPS and not missing(), (missing(), taken)
