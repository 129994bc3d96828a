"""The search: batches of calls until the time is up; every disagreement is confirmed, shrunk and told apart from others.

A hit is first repeated as a pair of its own. Where the pair alone agrees, the calls that ran ahead of it come along
(leftovers in a workspace, state kept in the process); where even a fresh process with all of them agrees, the hit is
recorded as seen once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.fuzzer import relations
from tools.fuzzer.bench import Bench, Failed
from tools.fuzzer.case import CallSpec, Case
from tools.fuzzer.generator import Batch, Generator
from tools.fuzzer.shrink import Shrinker
from tools.fuzzer.stage import Comparison
from tools.fuzzer.trial import AGREES, DIFFERS, Outcome, attempt

replace = dataclasses.replace
ALWAYS = 0.05  # a plain call that disagrees more often than this is compared with its own kind from then on
GIVE_UP = 5  # calls of one entry point that die, hang or are refused
REPEATS = 5  # runs of a shrunk case, to say how often it fails
GRACE_S = 5.0  # past the end of a search, to finish what was found in it
SHRINK_S = {"cpu": 15.0, "cuda": 10.0}


@dataclass
class Finding:
    """One kind of disagreement: its smallest case, and how often it was met."""

    case: Case
    relation: str
    seconds: float  # from the start of the search to the hit
    cases: int  # scenes drawn until then
    met: int = 1


@dataclass
class Counts:
    """What was tried. cases: scenes. relations: pairs by entry points; features: pairs whose second call has them."""

    cases: int = 0
    calls: int = 0
    pairs: int = 0
    words: int = 0
    differing_pairs: int = 0
    failed_batches: int = 0
    relations: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)  # what a library would not do, by entry point


class Search:
    """One search on one bench. `tell` is called with every new finding, `hint` with the first hit of its kind at once."""

    def __init__(
        self,
        bench: Bench,
        seed: int,
        *,
        witness: bool,
        tell: Callable[[Finding], None] | None = None,
        hint: Callable[[str], None] | None = None,
        shrink_s: float | None = None,
    ) -> None:
        self._bench, self._tell = bench, tell or (lambda finding: None)
        self._hint = hint or (lambda text: None)
        self.generator = Generator(bench.abilities, bench.natural, bench.device, seed, witness=witness)
        self._shrinker = Shrinker(bench, SHRINK_S[bench.device] if shrink_s is None else shrink_s)
        self.counts = Counts()
        self.findings: dict[tuple[str, str], Finding] = {}
        self._hits: Counter[str] = Counter()
        self._hits_of: Counter[str] = Counter()  # differing pairs by the second call's entry point
        self._pairs_of: Counter[str] = Counter()
        self._ruled: set[str] = set()  # kinds of pairs that differ as a rule
        self._failures: Counter[str] = Counter()
        self.started = time.monotonic()
        self._until = math.inf

    def run(self, deadline: float, *, cases: int | None = None, stop_at: int | None = None) -> None:
        """Search until `deadline` (time.monotonic), or `cases` scenes, or `stop_at` findings."""
        self._until = deadline + GRACE_S
        while time.monotonic() < deadline and self.generator.entries:
            if cases is not None and self.counts.cases >= cases:
                return
            if stop_at is not None and len(self.findings) >= stop_at:
                return
            self.step(self.generator.batch())

    def step(self, batch: Batch) -> None:
        """Run one batch and look into what it shows."""
        try:
            bad = self._compare(batch)
        except Failed as problem:
            self.counts.failed_batches += 1
            self._isolate(batch, problem)
            return
        for i, j in bad:
            if time.monotonic() < self._until:
                self._investigate(batch, i, j)

    def _compare(self, batch: Batch) -> list[tuple[int, int]]:
        """Run a batch; the pairs that differ."""
        counts = self.counts
        with self._bench.placed(batch.scenes, list(batch.calls)) as (_, placed):
            self._bench.run(placed)
            made = [(i, j, Comparison(placed[i], placed[j], batch.scenes[placed[i].spec.scene])) for i, j in batch.pairs]
            made = [(i, j, comparison) for i, j, comparison in made if comparison.common is not None]
            flags = [comparison.flag() for _, _, comparison in made]
            if flags and not isinstance(flags[0], bool):
                import torch

                flags = torch.stack(flags).tolist()
        counts.cases += len(batch.scenes)
        counts.calls += len(batch.calls)
        bad = []
        for (i, j, comparison), flag in zip(made, flags, strict=True):
            counts.pairs += 1
            counts.words += comparison.words()
            kind = raw_relation(batch.calls[i], batch.calls[j])
            counts.relations[kind] += 1
            counts.features.update(features(batch.calls[i], batch.calls[j]))
            self._pairs_of[kind] += 1
            if flag:
                counts.differing_pairs += 1
                self._hits_of[kind] += 1
                bad.append((i, j))
        return bad

    # ------------------------------------------------------------ disagreements

    def _investigate(self, batch: Batch, i: int, j: int) -> None:
        """Confirm, shrink and file one pair that differed. A kind met often is looked into ever more rarely."""
        first, second = batch.calls[i], batch.calls[j]
        kind = raw_relation(first, second)
        self._hits[kind] += 1
        hits, met = self._hits[kind], self._now()
        if hits == 1:
            self._hint(f"{kind} differ after {met[0]:.1f} s, {met[1]} scenes; shrinking")
        if (kind in self._ruled and hits > 1) or (hits > 4 and hits & (hits - 1)):
            return
        self._always(kind, first, second)
        confirmed = self._confirm(batch, i, j)
        if confirmed is None:
            case = self._case(batch, first, second, batch.calls[:j])
            self._file(case, Outcome(DIFFERS), met, fails=0)
            return
        self._file(*self._shrinker.shrink(*confirmed, self._until), met)

    def _now(self) -> tuple[float, int]:
        """Seconds and scenes since the start."""
        return time.monotonic() - self.started, self.counts.cases

    def _always(self, kind: str, first: CallSpec, second: CallSpec) -> None:
        """An entry point that disagrees with prefill as a rule is compared with itself from then on."""
        generator, often = self.generator, self._hits_of[kind] > ALWAYS * max(20, self._pairs_of[kind])
        entries = {first.entry, second.entry}
        if often and first.on == second.on:
            self._ruled.add(kind)
            generator.split |= entries - {"prefill"} or entries

    def _case(
        self, batch: Batch, first: CallSpec, second: CallSpec | None, before: tuple[CallSpec, ...], output: str = "o"
    ) -> Case:
        return Case(self._bench.target.name, self._bench.backend, batch.scenes, first, second, output, before)

    def _confirm(self, batch: Batch, i: int, j: int) -> tuple[Case, Outcome] | None:
        """The pair alone, then with what ran ahead of either, then that in a fresh process."""
        first, second = batch.calls[i], batch.calls[j]
        outputs = ("o", "lse") if first.lse and second.lse else ("o",)
        candidates = [self._case(batch, first, second, (), output) for output in outputs]
        candidates += [self._case(batch, first, second, batch.calls[:j], output) for output in outputs]
        candidates += [self._case(batch, second, first, batch.calls[:i], output) for output in outputs]
        for fresh in (False, True):
            for case in candidates:
                if fresh:
                    self._bench.renew()
                outcome = attempt(self._bench, case)
                if outcome.what == DIFFERS:
                    return case, outcome
        return None

    # ------------------------------------------------------------ calls that fail

    def _isolate(self, batch: Batch, problem: Failed) -> None:
        """Find the call of a batch that dies, hangs or is refused, and file it."""
        bench = self._bench
        for call in batch.calls:
            if call.on != problem.on:
                continue
            case = self._case(batch, call, None, ())
            outcome = attempt(bench, case)
            if outcome.what != AGREES:
                self._failed(case, outcome)
                return
        last = max(i for i, call in enumerate(batch.calls) if call.on == problem.on)
        case = self._case(batch, batch.calls[last], None, batch.calls[:last])
        outcome = attempt(bench, case)
        if outcome.what == AGREES:
            outcome = Outcome(problem.kind, message=problem.message)
        self._failed(case, outcome)

    def _failed(self, case: Case, outcome: Outcome) -> None:
        entry, bench = case.first.entry, self._bench
        if outcome.what == "refuses" and not bench.abilities.own:
            self.counts.refused.setdefault(entry, outcome.message)  # a library may say what it does not do
        else:
            key = f"{outcome.what}: {entry}"
            known = next((f for f in self.findings.values() if f.relation == key), None)
            if known is not None:
                known.met += 1
            else:
                shrinker = Shrinker(bench, 2.5 * bench.timeout_s) if outcome.what == "hangs" else self._shrinker
                self._file(*shrinker.shrink(case, outcome, self._until), self._now())
        self._failures[entry] += 1
        if self._failures[entry] >= GIVE_UP and entry in self.generator.entries:
            self.generator.entries.remove(entry)
            self.generator.split |= set(self.generator.entries) if entry == "prefill" else set()

    # ------------------------------------------------------------ filing

    def _file(self, case: Case, outcome: Outcome, met: tuple[float, int], fails: int | None = None) -> None:
        """Record a shrunk case under its relation, unless it is known."""
        if fails is None and outcome.what != "hangs":
            again = [attempt(self._bench, case).what == outcome.what for _ in range(REPEATS)]
            fails = sum(again)
        observed = outcome.observed()
        if fails is not None:
            observed["fails"] = [fails, REPEATS]
        case = replace(case, observed=observed)
        observed["relation"] = relation = relations.name(case) if fails != 0 else "not repeatable: " + case.first.entry
        key = (relation, case.output)
        if key in self.findings:
            self.findings[key].met += 1
            return
        finding = Finding(case, relation, *met)
        self.findings[key] = finding
        self._tell(finding)


def raw_relation(first: CallSpec, second: CallSpec) -> str:
    """Entry points of a pair, in a fixed order, and whether the witness is one of the two."""
    entries = sorted((first.entry, second.entry), key=("prefill", "packed", "extend", "decode").index)
    return "/".join(entries) + ("/witness" if first.on != second.on else "")


def features(first: CallSpec, second: CallSpec) -> list[str]:
    """What is special in either call of a pair."""
    found: set[str] = set()
    for call in (first, second):
        layouts = (call.q, call.k, call.v, call.o)
        flags = (
            ("batch", len(call.parts) > 1), ("lengths", call.capacity is not None), ("views", call.view),
            ("strides", any(layout.columns or any(layout.pad) for layout in layouts)),
            ("addresses", any(layout.skew for layout in layouts)), ("heads", call.heads is not None),
            ("threads", call.num_threads > 1), ("multiprocessors", call.num_sms > 0),
            ("stream", call.stream != "side"), ("graph", call.graph),
        )  # fmt: skip
        found.update(name for name, flag in flags if flag)
    if first == second:
        found.add("again")
    return sorted(found)
