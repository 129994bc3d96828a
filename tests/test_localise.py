"""The localiser of the first divergence, on the CPU target with kernels that have one stage wrong.

All faults stand in one source and are chosen by the worker's environment, so that one build serves every test. Each is
the negative control of one answer: the localiser must name its stage and no other.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evaluator_tools
import pytest
import torch

from tools.evaluator.arena import Arena
from tools.evaluator.cases import CHECKS, Context
from tools.evaluator.compare import raw
from tools.evaluator.inputs import KINDS, Draw
from tools.evaluator.localise import FirstDivergence, Found, Parts, Result, how_far, localise, locate
from tools.evaluator.probes import DIM, RowData, exact_ties, split3
from tools.evaluator.reproducer import Origin, layout_of
from tools.evaluator.runner import Call, Runner
from tools.evaluator.scene import Scene, Stage
from tools.evaluator.shrink import shrink, smaller
from tools.fuzzer import case as cases
from tools.loader.build import Built, build

SOURCE = Path(__file__).resolve().parents[1] / "experimental" / "cpu" / "kernels" / "unified_attn.cpp"
PREAMBLE = """
#include <cstdlib>
namespace {
const int FAULT = std::getenv("FAULT") ? std::atoi(std::getenv("FAULT")) : 0;
inline thread_local int64_t tile_start = 0;
inline int entry_point = 0;
inline int64_t batch_size = 0;
}
"""
BF16 = "(vec)(((uvec)w + 0x7fffu) & 0xffff0000u)"
FUSED, APART = "fma(w, x[c], acc[r][c])", "acc[r][c] + w * x[c]"


@dataclass(frozen=True)
class Fault:
    """Replaces `old` by `new` where FAULT is its number. tile: the first tile, of 64 keys, that shows it."""

    stage: str
    old: str
    new: str
    tile: int | None = None


FAULTS = {
    "score_order": Fault("scores", "q[r * HEAD_DIM + d]", "q[r * HEAD_DIM + HEAD_DIM - 1 - d]", 0),
    "maximum_off": Fault("max", "top = largest_lane(top)", "top = largest_lane(top) + splat(1.0f)", 0),
    "maximum_of_half": Fault("max", "top = larger(s[j], top)", "top = j < PARTS / 2 ? larger(s[j], top) : top", 0),
    "weights_in_bf16": Fault("P", "store(p + j * LANES, w)", f"store(p + j * LANES, {BF16})", 0),
    "weights_of_one_tile": Fault("P", "store(p + j * LANES, w)", f"store(p + j * LANES, tile_start == 128 ? {BF16} : w)", 2),
    "weights_fused": Fault("P", "exp2((s[j] - top) * scale)", "exp2(fma(s[j], scale, -(top * scale)))", 0),
    "sums_joined_in_order": Fault("row sum", "sum[j] = sum[j] + sum[j + step]", "sum[j] = serial(sum, step, j)", 0),
    "sum_unfused": Fault("row sum", "fma(load<vec>(l + j * LANES), alpha, w)", "load<vec>(l + j * LANES) * alpha + w"),
    "rescale_off": Fault(
        "rescale",
        "alpha = exp2((splat(*m) - top) * scale)",
        "alpha = exp2((splat(*m) - top) * scale) * splat(1.0f + 0x1p-23f)",
        1,
    ),
    "product_unfused": Fault("PV", FUSED, APART, 0),
    "product_of_one_tile": Fault("PV", FUSED, f"tile_start == 128 ? {APART} : {FUSED}", 2),
    "reciprocal": Fault("final", "to_bf16(o[d] / sum[0])", "to_bf16(o[d] * (1.0f / sum[0]))"),
    "output_truncated": Fault("final", "to_bf16(o[d] / sum[0])", "cut(o[d] / sum[0])"),
    "lse_in_fp32": Fault(
        "lse", "(float)((double)m * SCALE + ln((double)sum[0]))", "(float)m * (float)SCALE + (float)ln((double)sum[0])"
    ),
    "edge": Fault("keys", "keys - queries + row + 1, 0, keys", "keys - queries + row + (row < 100), 0, keys"),
    "decode_only": Fault("PV", FUSED, f"entry_point == UNIFIED_ATTN_DECODE ? {APART} : {FUSED}"),
    "batch_of_three": Fault("PV", FUSED, f"batch_size == 3 ? {APART} : {FUSED}"),
}
NUMBERS = {name: number for number, name in enumerate(FAULTS, start=1)}
EVERYWHERE = [name for name in FAULTS if name not in ("decode_only", "batch_of_three", "edge")]


def faulty_source() -> str:
    """The packaged kernel with every fault beside the right code."""
    text = SOURCE.read_text().replace('"../../common/attn_abi.h"', '"attn_abi.h"')
    text = text.replace("namespace {\n", PREAMBLE + "namespace {\n", 1)
    helpers = """
inline uint16_t cut(float x) { uint32_t bits; memcpy(&bits, &x, sizeof bits); return (uint16_t)(bits >> 16); }
inline float serial(const float* sum, int step, int j) {
  if (j > 0 || step != SUM_CHAINS / 2) return sum[j];
  float all = sum[0];
  for (int i = 1; i < SUM_CHAINS; i++) all = all + sum[i];
  return all;
}
"""
    text = text.replace("namespace numerics {\n", "namespace numerics {\n" + helpers, 1)
    for old in dict.fromkeys(fault.old for fault in FAULTS.values()):
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the kernel"
        chosen = old
        for name, fault in FAULTS.items():
            if fault.old == old:
                chosen = _choice(NUMBERS[name], fault, chosen)
        text = text.replace(old, chosen)
    text = text.replace(
        "load<vec>(kt + d * KEY_TILE", f"load<vec>(kt + (FAULT == {NUMBERS['score_order']} ? HEAD_DIM - 1 - d : d) * KEY_TILE"
    )
    text = text.replace(
        "    const uint16_t* tile_k = k + tile", "    tile_start = tile;\n    const uint16_t* tile_k = k + tile", 1
    )
    return text.replace("  Problem problem;\n", "  entry_point = entry, batch_size = p->batch;\n  Problem problem;\n", 1)


def _choice(number: int, fault: Fault, otherwise: str) -> str:
    """An expression, an assignment or a call that depends on FAULT."""
    if re.match(r"\w+(\[j\])? = ", fault.old):
        left = fault.old.split(" = ", 1)[0]
        return f"{left} = FAULT == {number} ? {fault.new.split(' = ', 1)[1]} : {otherwise.split(' = ', 1)[1]}"
    if fault.old.startswith("store(p"):
        return f"if (FAULT == {number}) {fault.new}; else {otherwise}"
    if fault.old.startswith("keys - queries"):
        return f"FAULT == {number} ? {fault.new.split(',')[0]} : {otherwise}"
    return f"(FAULT == {number} ? {fault.new} : {otherwise})"


class Lab:
    """A bench with the faulty library, and a call of the candidate compared with the witness."""

    def __init__(self, folder: Path) -> None:
        self.bench = evaluator_tools.Bench(folder)
        path = folder / "faulty.cpp"
        path.write_text(faulty_source())
        self.built: Built = build(self.bench.target, path)
        self.path = path

    def start(self, fault: str | None) -> Runner:
        number = str(NUMBERS[fault]) if fault else "0"
        runner = Runner("candidate", self.bench.arena, 30.0, environment={"FAULT": number})
        runner.hello()
        runner.load_library(str(self.built.library))
        return runner

    def parts(self, start: Callable[[], Runner]) -> Parts:
        origin = Origin("cpu", str(self.path), self.built.source_sha256)
        return Parts(start, self.bench.witness, self.bench.arena, 64, "ascending", origin)

    def call(self, runner: Runner, entry: str, q: Any, k: Any, v: Any) -> Result:
        arena = self.bench.arena
        call = Call(entry, q, k, v, arena.empty(tuple(q.shape)), arena.empty(tuple(q.shape[:3]), "f32"))
        runner.run([call])
        return call, call.o.clone(), call.lse.clone()

    def find(
        self, fault: str | None, entry: str = "prefill", shape: tuple[int, int, int] = (1, 230, 230), **options: Any
    ) -> Found:
        """Localise the first difference from the witness that some kind of inputs shows."""
        batch, rows, keys = shape
        runner = self.start(fault)
        try:
            for seed, kind in itertools.product(range(12), ("normal", "jumps", "rising")):
                with self.bench.arena.scope():
                    q = self.bench.arena.empty((batch, 2, rows, DIM))
                    k, v = (self.bench.arena.empty((batch, 2, keys, DIM)) for _ in range(2))
                    KINDS[kind](Draw(seed, kind, "cpu"), q, k, v)
                    mine = self.call(runner, entry, q, k, v)
                    _, *truth = self.call(self.bench.witness, entry, q, k, v)
                    for got, expected in zip(mine[1:], truth, strict=True):
                        if bool((raw(got) != raw(expected)).any()):
                            return localise(self.parts(lambda: self.start(fault)), [mine], got, expected, kind, **options)
        finally:
            runner.kill()
        raise AssertionError(f"{fault} shows in no kind of inputs")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("localise"))
    yield made
    made.bench.close()


# ---------------------------------------------------------------- stages


@pytest.mark.parametrize("fault", EVERYWHERE)
def test_stage_and_tile_are_named(lab: Lab, fault: str) -> None:
    found = lab.find(fault, budget_s=60.0)
    stage = found.record["stage"]
    assert stage["first"] == FAULTS[fault].stage, found.record
    assert stage["complete"] and not stage["by_elimination"], found.record
    assert found.record["row_alone"] and all(found.record["entry_points"].values())
    if FAULTS[fault].tile is not None:
        assert stage["tile"][0] == 64 * FAULTS[fault].tile, found.record  # type: ignore[operator]
        assert found.record["where"]["key_tile"] == FAULTS[fault].tile


def test_honest_code_of_the_faulty_source_agrees(lab: Lab) -> None:
    """The control: without a fault there is nothing to find, so what the faults show is theirs."""
    with pytest.raises(AssertionError, match="shows in no kind"):
        lab.find(None)


def test_keys_that_take_no_part_are_named(lab: Lab) -> None:
    found = lab.find("edge", budget_s=60.0)
    assert found.record["stage"]["first"] == "keys", found.record
    assert any("take no part" in note for note in found.notes)
    assert found.record["entry_points"] == {"decode": False, "extend": False, "prefill": True, "packed": True}


def test_a_fault_of_decode_alone(lab: Lab) -> None:
    found = lab.find("decode_only", "decode", (4, 1, 230), budget_s=60.0)
    assert found.record["entry_points"] == {"decode": True, "extend": False, "prefill": False, "packed": False}
    assert found.record["stage"]["first"] == "PV" and found.record["surroundings"]["batch"] == 1


def test_a_fault_that_needs_its_surroundings(lab: Lab) -> None:
    found = lab.find("batch_of_three", "extend", (3, 40, 230), budget_s=60.0)
    assert found.record["row_alone"] is False and not any(found.record["entry_points"].values())
    assert any("stands around it" in note for note in found.notes)
    near = found.record["surroundings"]
    assert (near["batch"], near["heads"]) == (3, [1, 1]), "the batch must stay, all else must go"
    assert found.record["stage"]["first"] == "PV"


# ---------------------------------------------------------------- reproducers


def test_reproducer_replays(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replayed it disagrees with the fault and agrees without it."""
    from tools import fuzz

    found = lab.find("product_unfused", shape=(1, 100, 100), budget_s=60.0)
    path = tmp_path / "report.json.case.json"
    assert found.save(path) and found.record["reproducer"]["file"] == path.name
    assert path.stat().st_size < 1 << 20
    assert cases.read(path).second is not None
    for number, code in ((str(NUMBERS["product_unfused"]), 1), ("0", 0)):
        monkeypatch.setitem(os.environ, "FAULT", number)
        assert fuzz.main(["--replay", str(path), "--backend", str(lab.path)]) == code, capsys.readouterr().out


def test_reproducer_is_small(lab: Lab) -> None:
    """A fault of every weight shows with two keys."""
    found = lab.find("weights_in_bf16", budget_s=60.0)
    small = found.record["reproducer"]
    assert small["keys"] <= 4 and small["heads"] == [1, 1] and small["batch"] == 1, small


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_layouts_are_described(order: tuple[int, ...]) -> None:
    """What a Layout says of a slice with padding is what the fuzzer builds from it."""
    from tools.fuzzer.stage import _tensor

    arena = Arena("cpu", 1 << 24)
    wide = arena.empty((2, 3, 9, 136), order=order)[:, 1:, 2:-1, :128]
    made = _tensor(arena, (2, 2, 6), layout_of(wide), False)
    assert made.stride() == wide.stride()


# ---------------------------------------------------------------- nothing changes a verdict


def test_a_worker_that_dies_is_a_note(lab: Lab) -> None:
    runner = lab.start("reciprocal")

    def dying() -> Runner:
        fresh = lab.start("reciprocal")
        fresh.kill()
        return fresh

    with lab.bench.arena.scope():
        q, k, v = (lab.bench.arena.empty((1, 1, 70, DIM)) for _ in range(3))
        KINDS["normal"](Draw(1, "x", "cpu"), q, k, v)
        mine = lab.call(runner, "prefill", q, k, v)
        wrong = mine[1].clone()
        raw(wrong)[0, 0, 69, 5] += 3
        runner.kill()
        found = localise(lab.parts(dying), [mine], wrong, mine[1], "made up")
        assert any("ended early" in note for note in found.notes)
        assert found.record["how_far"]["ulp_histogram"] == {"3 to 4": 1} and found.record["stage"] is None
        assert found.record["where"]["row"] == 69 and not found.save(Path("unused"))


def test_what_does_not_repeat_is_said(lab: Lab) -> None:
    """The difference was in the first run only: the same call made again agrees with the witness."""
    runner = lab.start(None)
    with lab.bench.arena.scope():
        q, k, v = (lab.bench.arena.empty((1, 2, 70, DIM)) for _ in range(3))
        KINDS["normal"](Draw(1, "x", "cpu"), q, k, v)
        before = [t.clone() for t in (q, k, v)]
        mine = lab.call(runner, "prefill", q, k, v)
        expected = mine[1].clone()
        raw(mine[1])[0, 1, 12, 5] ^= 0x8000
        found = localise(lab.parts(lambda: lab.start(None)), [mine], mine[1], expected, "made up")
        assert any("does not repeat" in note for note in found.notes) and found.case is None
        assert found.record["how_far"]["ulp_max"] > 0
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(before, (q, k, v), strict=True)), (
            "the check's inputs were written"
        )
    runner.kill()


def test_the_call_off_contract_is_the_one_replayed(lab: Lab) -> None:
    """Prefill against a wrong decode: the witness says which of the two is off, and that one is looked into."""
    runner = lab.start("decode_only")
    with lab.bench.arena.scope():
        q, k, v = (lab.bench.arena.empty((1, 2, 230, DIM)) for _ in range(3))
        for seed in range(40):
            KINDS["normal"](Draw(seed, "x", "cpu"), q, k, v)
            whole = lab.call(runner, "prefill", q, k, v)
            last = lab.call(runner, "decode", q[:, :, -1:], k, v)
            if not torch.equal(raw(whole[1][:, :, -1:]), raw(last[1])):
                break
        found = localise(lab.parts(lambda: lab.start("decode_only")), [whole, last], whole[1][:, :, -1:], last[1], "both")
    runner.kill()
    assert found.record["off_contract"] == "expected" and found.record["replayed"]["entry"] == "decode"
    assert found.record["where"]["entry"] == "prefill" and found.record["where"]["row"] == 229


# ---------------------------------------------------------------- pieces


def test_histogram_counts_units_of_the_last_place() -> None:
    words = torch.tensor([0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x0000, 0x0001, 0x7FC0, 0x3F80], dtype=torch.int16)
    moved = torch.tensor([0x3F80, 0x3F81, 0x3F7E, 0x3F88, -0x8000, -0x7FFF, 0x3F80, 0x3F85], dtype=torch.int16)
    far = how_far(words.view(torch.bfloat16), moved.view(torch.bfloat16))
    assert far["ulp_histogram"] == {"sign of zero": 1, "1": 1, "2": 2, "5 to 8": 2, "not a number": 1}
    assert (far["words"], far["differing"], far["ulp_max"]) == (8, 7, 8)
    a = torch.tensor([1.0, -1.0])
    b = (a.view(torch.int32) + 100).view(torch.float32)
    assert how_far(a, b)["ulp_histogram"] == {"65 to 128": 2}


def test_a_word_is_found_through_views() -> None:
    call = Call("prefill", None, None, None, None)
    o, lse = torch.zeros(2, 4, 9, 128, dtype=torch.bfloat16), torch.zeros(2, 4, 9)
    view = o[1, :, 3:7].transpose(0, 1)
    found = locate([(call, o, lse)], view, (2, 1, 77))
    assert found is not None and found[1:] == ("o", (1, 1, 5, 77))
    assert locate([(call, o, lse)], lse[1:, 2:, 4:], (0, 1, 3)) == (call, "lse", (1, 3, 7))
    assert locate([(call, o, lse)], o.clone(), (0, 0, 0, 0)) is None


def test_exact_parts_add_up() -> None:
    """Scores and quotients of the probes are exact: their parts are bf16 and sum to the fp32 number in every order."""
    x = torch.randn(500) * torch.logspace(-6, 9, 500)
    parts = split3(x)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        total = torch.zeros_like(x)
        for part in order:
            total = total + parts[..., part].float()
        assert torch.equal(total, x)
    ties = exact_ties(7, 0).float().sum(-1) / 7
    assert bool(((ties.view(torch.int32) & 0xFFFF) == 0x8000).all()), "the quotients must be ties of bf16"


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_tiles_come_in_the_contract_s_order(order: str) -> None:
    q, k, v = torch.randn(DIM).bfloat16(), torch.randn(300, DIM).bfloat16(), torch.randn(300, DIM).bfloat16()
    row = RowData(q, k, v, 128, order, True)
    starts = [tile.start for tile in row.tiles]
    assert starts == ([256, 128, 0] if order == "descending" else [0, 128, 256]) and row.tiles[starts.index(256)].stop == 300
    assert row.quiet < float(row.scores.min()) - 2048


def test_shrinking_keeps_what_shows() -> None:
    """A made-up fault that needs three sequences, both heads of a group and four rows."""
    q, k = torch.zeros(7, 8, 40, DIM), torch.zeros(7, 4, 90, DIM)
    scene = Scene("extend", q, k, k, 4, 5, 30, lengths=(90, 80, 70, 60, 50, 40, 45))
    asked: list[Scene] = []

    def shows(s: Scene) -> bool:
        asked.append(s)
        return s.sequences >= 3 and int(s.q.shape[1]) >= 2 and s.rows >= 4

    small = shrink(scene, smaller, shows, lambda: True)
    assert (small.sequences, small.q.shape[1], small.k.shape[1], small.rows) == (3, 2, 1, 4)
    for s in asked:
        if s.sequences > 1 or s.rows > 1:
            assert s.visible == scene.visible, "the row must keep its keys"
    assert shrink(scene, smaller, lambda s: False, lambda: True) == scene


def test_rows_are_the_callers_words(lab: Lab) -> None:
    """A scene's own row and the witness's answer for it are those of the whole call, packed too."""
    runner = lab.start(None)
    arena = lab.bench.arena
    with arena.scope():
        q, k, v = (arena.empty((90, heads, DIM)) for heads in (4, 2, 2))
        KINDS["normal"](Draw(3, "packed", "cpu"), q[None], k[None], v[None])
        stage = Stage(runner, lab.bench.witness, arena, 60.0)
        scene = Scene("packed", q, k, v, 1, 3, 20, starts=(0, 30, 90))
        assert scene.visible == 21 and stage.answer(scene) == stage.truth(scene)
        assert stage.answer(scene) != stage.answer(Scene("packed", q, k, v, 1, 3, 21, starts=(0, 30, 90)))
    runner.kill()


def test_a_check_s_first_difference_is_looked_into(lab: Lab) -> None:
    """Through a whole check: results of all its calls are known, views and clones alike, and only the first is localised."""
    seen: list[Any] = []

    class Hooked(Context):
        results: list[Result] = []  # noqa: RUF012

        def case(self, label: str) -> Any:
            self.results.clear()
            return super().case(label)

        def taken(self, call: Call) -> tuple[Any, Any]:
            result = super().taken(call)
            self.results.append((call, *result))
            return result

        def equal(self, got: Any, expected: Any, what: str, tally: Any = None) -> bool:
            same = super().equal(got, expected, what, tally)
            if not same:
                seen.append(first(self.results, got, expected, what))
            return same

    first = FirstDivergence(lab.parts(lambda: lab.start("batch_of_three")), 60.0)
    runner = lab.start("batch_of_three")
    bench = lab.bench
    plain = bench.context(runner)
    context = Hooked(
        arena=plain.arena, candidate=runner, witness=bench.witness, seed=7, grid=replace(bench.grid, batches=(3,)), tile=64,
        cells=[], heads=(4, 2), limits=plain.limits,
    )  # fmt: skip
    context.perform(CHECKS["batch"])
    runner.kill()
    assert context.tally.failed and first.found is not None
    assert seen[0] is first.found.record and not any(seen[1:])
    assert first.found.record["stage"]["first"] == "PV" and first.found.record["surroundings"]["batch"] == 3, first.found.record
