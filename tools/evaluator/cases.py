"""What a correctness check works with: the workers, the memory, fresh inputs, and the tally of words compared.

A check is a function of a Context, registered with the kinds of fault that it is there to find. Inside it, every case
is `with ctx.case(label)`; `ctx.run` calls the candidate (and, beside every check, the witness with the same call), and
`ctx.equal` compares raw words. Nothing stops at the first difference: a check reports how much differs and where.

What the candidate returned is copied into the judge's own memory while its worker stands still; the witness and the
library write into closed memory. So no expected value is ever within the candidate's reach.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.evaluator import inputs, oracle
from tools.evaluator.arena import Arena
from tools.evaluator.compare import poison_, snapshot, unchanged, unwritten, words_differ
from tools.evaluator.grids import Cell, Grid
from tools.evaluator.guards import ALL, Guards
from tools.evaluator.inputs import Draw
from tools.evaluator.localise import FirstDivergence, Result
from tools.evaluator.parts import part_of
from tools.evaluator.runner import Call, Runner

GUARD_BYTES = 256
GUARD_BYTE = 0x5C
MAX_FAILURES = 5  # recorded a check; the counts cover all


@dataclass
class Tally:
    """One check's outcome."""

    name: str
    faults: tuple[str, ...]
    cases: int = 0
    words: int = 0
    differing: int = 0
    failed: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    inaccuracies: int = 0  # failures that are no difference of bits
    seconds: float = 0.0
    skipped: str | None = None
    slowest: tuple[float, str] = (0.0, "")

    def fail(self, case: str, what: str, **details: Any) -> None:
        self.failed += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append({"case": case, "what": what, **details})

    def record(self) -> dict[str, Any]:
        status = "failed" if self.failed else "skipped" if self.skipped else "passed"
        return {
            "name": self.name,
            "status": status,
            "reason": self.skipped,
            "faults": list(self.faults),
            "cases": self.cases,
            "words": self.words,
            "differing": self.differing,
            "failed": self.failed,
            "failures": self.failures,
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
            "slowest": list(self.slowest),
        }


@dataclass(frozen=True)
class Check:
    name: str
    faults: tuple[str, ...]
    run: Callable[[Context], None]
    needs: tuple[str, ...] = ()  # "cuda", "library"


CHECKS: dict[str, Check] = {}


def check(*faults: str, needs: tuple[str, ...] = ()) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Register a check under its function's name."""

    def register(function: Callable[[Context], None]) -> Callable[[Context], None]:
        CHECKS[function.__name__] = Check(function.__name__, faults, function, needs)
        return function

    return register


class Context:
    """Everything a check may use. `library` is the worker whose full-sequence bits must equal ours, if any."""

    def __init__(
        self,
        *,
        arena: Arena,
        candidate: Runner,
        witness: Runner | None,
        seed: int,
        grid: Grid,
        tile: int,
        cells: list[Cell],
        heads: tuple[int, int],
        limits: dict[str, Any],
        library: Runner | None = None,
        library_layout: str = "bhsd",
        references: dict[str, tuple[Runner, str]] | None = None,
        progress: Callable[[str], None] | None = None,
        guards: Guards = ALL,
        diverged: FirstDivergence | None = None,
    ) -> None:
        self.guards = guards
        self._diverged, self._results = diverged, list[Result]()  # of the case at hand
        self.arena, self.candidate, self.witness, self.library = arena, candidate, witness, library
        self.library_layout, self.references = library_layout, references or {}
        self.seed, self.grid, self.tile, self.cells, self.cell_heads, self.limits = seed, grid, tile, cells, heads, limits
        self.device = arena.device
        self.tally = Tally("", ())  # of the check that runs
        self.tallies: list[Tally] = []  # of all checks so far
        self.witnessed = Tally("witness", ("any entry point off the contract, in every case of every check",))
        self.untouched = Tally("untouched", ("inputs written", "bytes around an output written", "outputs left unwritten"))
        self.label = ""
        self.draw = Draw(seed, "", self.device)
        self._progress = progress or (lambda text: None)

    # ------------------------------------------------------------ cases

    @contextlib.contextmanager
    def case(self, label: str) -> Iterator[Draw]:
        """One case: its own generator, its own memory."""
        self.label = label
        self.tally.cases += 1
        self._progress(f"{self.tally.name}: {label}")
        start = time.monotonic()
        self._results.clear()
        with self.arena.scope():
            self.draw = Draw(self.seed, f"{self.tally.name}:{label}", self.device)
            yield self.draw
        self.tally.slowest = max(self.tally.slowest, (round(time.monotonic() - start, 3), label))

    def perform(self, item: Check) -> Tally:
        """Run one check."""
        self.tally = Tally(item.name, item.faults)
        self.tallies.append(self.tally)
        start = time.monotonic()
        if "cuda" in item.needs and self.device != "cuda":
            self.tally.skipped = "needs a CUDA device"
        elif "library" in item.needs and self.library is None:
            self.tally.skipped = "no library with this contract here"
        else:
            self.tally.skipped = "it was not finished"
            try:
                item.run(self)
                self.tally.skipped = None
            finally:
                self.tally.seconds = time.monotonic() - start
        return self.tally

    # ------------------------------------------------------------ tensors

    def tensor(self, *shape: int, order: tuple[int, ...] | None = None) -> Any:
        return self.arena.empty(shape, "bf16", order=order)

    def ints(self, values: list[int]) -> Any:
        tensor = self.arena.empty((len(values),), "i32")
        tensor.copy_(torch.tensor(values, dtype=torch.int32))
        return tensor

    def qkv(
        self,
        batch: int,
        rows: int,
        keys: int,
        heads: tuple[int, int] | None = None,
        kind: str = "normal",
        layout: str = "bhsd",
    ) -> tuple[Any, Any, Any]:
        """Fresh q [B,Hq,rows,128] and k, v [B,Hkv,keys,128] in one of the two storage orders."""
        heads_q, heads_kv = heads or self.grid.heads
        order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
        q = self.tensor(batch, heads_q, rows, 128, order=order)
        k, v = (self.tensor(batch, heads_kv, keys, 128, order=order) for _ in range(2))
        inputs.KINDS[kind](self.draw, q, k, v)
        return q, k, v

    def copied(self, tensor: Any, *, order: tuple[int, ...] | None = None, skew: int = 0) -> Any:
        """A copy in memory of its own."""
        return self.arena.empty(tuple(tensor.shape), "bf16", order=order, skew=skew).copy_(tensor)

    # ------------------------------------------------------------ calls

    def call(
        self,
        entry: str,
        q: Any,
        k: Any,
        v: Any,
        *,
        lse: bool = True,
        out: Any = None,
        closed: bool = False,
        **options: Any,
    ) -> Call:
        """A call with a poisoned output and LSE, each between guard bytes. closed: not for the candidate."""
        fresh = out is None
        closed = closed and self.guards.on("closed")
        if fresh:
            out = self.arena.empty(tuple(q.shape), "bf16", pad=GUARD_BYTES, closed=closed)
        shape = (q.shape[1], q.shape[0]) if entry == "packed" else tuple(q.shape[:3])
        lse_out = self.arena.empty(shape, "f32", pad=GUARD_BYTES, closed=closed) if lse else None
        call = Call(entry, q, k, v, out, lse_out, **options)
        for tensor in (out, lse_out):
            if tensor is not None and self.guards.on("poison"):
                poison_(tensor)
        call.extra["guards"] = [g for t in ((out if fresh else None), lse_out) if t is not None for g in self._guards(t)]
        for guard in call.extra["guards"]:
            guard.fill_(GUARD_BYTE)
        return call

    def _guards(self, tensor: Any) -> list[Any]:
        """The guard bytes before and after a densely stored tensor of the arena."""
        size = tensor.numel() * tensor.element_size()
        flat = tensor.flatten().view(torch.uint8)  # a view: the tensor is dense in its own order
        start = flat.storage_offset()
        return [flat.as_strided((GUARD_BYTES,), (1,), place) for place in (start - GUARD_BYTES, start + size)]

    def run(
        self,
        entry: str,
        q: Any,
        k: Any,
        v: Any,
        *,
        lse: bool = True,
        stream: str = "side",
        out: Any = None,
        finite: bool = True,
        witness: bool = True,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Run one call on the candidate and return (o, lse), in the judge's own memory.

        finite: the output must be finite too. witness: compare with the witness. The rest goes to the call.
        """
        call = self.call(entry, q, k, v, lse=lse, out=out, **options)
        before = [snapshot(t) for t in call.inputs()]
        self.candidate.run([call], stream=stream)
        self.inspect(call, before, finite=finite)
        result = self.taken(call)
        if witness:
            self.compare_with_witness(call, result)
        return result

    def taken(self, call: Call) -> tuple[Any, Any]:
        """A call's output and LSE, copied out of the memory that its worker can still write to."""
        result = call.o, call.lse
        if self.guards.on("pause"):
            result = call.o.clone(), None if call.lse is None else call.lse.clone()
        if self._diverged is not None:
            self._results.append((call, *result))
        return result

    def inspect(self, call: Call, before: list[Any], *, finite: bool = True) -> None:
        """Outputs written, finite; inputs and guards untouched."""
        self.untouched.cases += 1
        missing = unwritten(call.o) + (unwritten(call.lse) if call.lse is not None else 0)
        if missing and finite:
            self.untouched.fail(
                self.label, f"{call.entry}: {missing} words of the output were not written", check=self.tally.name
            )
            self.untouched.differing += missing
        elif finite and not math.isfinite(float(call.o.sum(dtype=torch.float32))):
            self.tally.fail(self.label, f"{call.entry}: the output is not finite")
        if self.guards.on("closed") and not all(map(unchanged, call.inputs(), before)):
            self.untouched.fail(self.label, f"{call.entry}: an input was written", check=self.tally.name)
        for guard in call.extra["guards"]:
            self.untouched.words += GUARD_BYTES // 2
            if not bool((guard == GUARD_BYTE).all()):
                self.untouched.fail(self.label, f"{call.entry}: bytes outside the output were written", check=self.tally.name)

    # ------------------------------------------------------------ verdicts

    def equal(self, got: Any, expected: Any, what: str, tally: Tally | None = None) -> bool:
        """Compare raw words; both tensors or neither may be None."""
        tally = tally or self.tally
        if got is None or expected is None:
            return True
        difference = words_differ(got, expected)
        tally.words += difference.words
        tally.differing += difference.differing
        if difference.differing:
            extra: dict[str, Any] = {"check": self.tally.name} if tally is not self.tally else {}
            if self._diverged is not None and (record := self._diverged(self._results, got, expected, what)) is not None:
                extra["divergence"] = record
            tally.fail(
                self.label, what, words=difference.words, differing=difference.differing, first=difference.first, **extra
            )
        return not difference.differing

    def both_equal(self, got: tuple[Any, Any], expected: tuple[Any, Any], what: str) -> None:
        """Compare outputs and LSE."""
        self.equal(got[0], expected[0], what)
        self.equal(got[1], expected[1], what + ", LSE")

    def accurate(self, accuracy: oracle.Accuracy, bound: float, what: str) -> None:
        if not accuracy.within(bound):
            self.tally.inaccuracies += 1
            self.tally.fail(
                self.label, f"{what}: RMS error {accuracy.rms:.5f} above {bound:.5f} (worst row {accuracy.worst:.5f})"
            )

    def compare_with_witness(self, call: Call, result: tuple[Any, Any]) -> None:
        """The same call, or a part of it that fits the budget, on the witness."""
        if self.witness is None or not self.guards.on("witness"):
            return
        part, take = part_of(call, self.draw.python, self.grid.witness_flop, self._closed_call)
        self.witness.run([part])
        self.witnessed.cases += 1
        self.equal(take(result[0]), part.o, f"{call.entry} against the witness", self.witnessed)
        if call.lse is not None:
            self.equal(take(result[1]), part.lse, f"{call.entry} against the witness, LSE", self.witnessed)

    def _closed_call(self, *args: Any, **options: Any) -> Call:
        return self.call(*args, closed=True, **options)
