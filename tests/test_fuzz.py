"""The bit fuzzer: its cases, its search on honest and planted kernels, its shrinker, its command."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import firing, rarity

from tools.core.config import load_target
from tools.core.errors import UserError
from tools.evaluator.guards import Guards
from tools.fuzzer import case as cases
from tools.fuzzer import relations, report, session, stage
from tools.fuzzer.case import Backend, CallSpec, Case, Drawn, Layout, Scene
from tools.fuzzer.generator import Batch
from tools.fuzzer.search import Search

# ---------------------------------------------------------------- cases on disk


def a_case(**changes: Any) -> Case:
    scene = Scene(3, 4, 2, 130, Drawn(5, "a", "jumps", "tiny_v"))
    second = CallSpec("decode", ((1, 65), (2, 1)), capacity=200, heads=(1, 1), k=Layout((2, 0, 1), (0, 1, 2), 8, 48), lse=True)
    values: dict[str, Any] = {
        "target": "cpu", "backend": Backend("library", "cpu", "x.cpp", "0" * 64), "scenes": (scene,),
        "first": CallSpec("prefill", ((0, 130), (1, 130), (2, 130)), lse=True), "second": second, "output": "lse",
        "before": (CallSpec("extend", ((2, 128),), rows=7, num_threads=3),), "observed": {"relation": "prefill/decode"},
    }  # fmt: skip
    return Case(**{**values, **changes})


def given_scene() -> Scene:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, s, 128, generator=generator).bfloat16() for h, s in ((2, 3), (1, 70), (1, 70)))
    return Scene.given(q, k, v, [70, 9])


@pytest.mark.parametrize("case", [
    a_case(),
    a_case(second=None, output="o"),
    a_case(scenes=(given_scene(),), before=(), output="o", first=CallSpec("extend", ((0, 70),), rows=3),
           second=CallSpec("decode", ((0, 69), (1, 8)), capacity=70)),
])  # fmt: skip
def test_case_round_trip(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    cases.write(path, case)
    assert cases.read(path) == case
    with pytest.raises(UserError, match="exists already"):
        cases.write(path, case)


@pytest.mark.parametrize(("change", "words"), [
    ({"version": 2}, "version"),
    ({"extra": 1}, "extra"),
    ({"first": {"entry": "decode", "parts": [[9, 3]]}}, r"first: part \[9, 3\]"),
    ({"first": {"entry": "prefill", "parts": [[0, 3], [1, 4]]}}, "first: a dense prefill takes parts of one length"),
    ({"first": {"entry": "sideways", "parts": [[0, 3]]}}, "first.entry: 'sideways'"),
    ({"second": {"entry": "decode", "parts": [[0, 9]], "capacity": 8, "lse": True}}, "second: capacity 8 is less than 9"),
    ({"second": {"entry": "decode", "parts": [[0, 9]]}}, "output: lse is compared"),
    ({"second": {"entry": "decode", "parts": [[0, 9]], "scene": 1}}, "second: no scene 1"),
    ({"second": {"entry": "decode", "parts": [[0, 9]], "k": {"skew": 8}}}, "second: k: layout"),
])  # fmt: skip
def test_a_file_that_is_no_case_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**cases.to_json(a_case()), **change}))
    with pytest.raises(UserError, match=words) as caught:
        cases.read(path)
    assert "\n" not in str(caught.value) and "case.json" in str(caught.value)


def test_given_words_must_fit_their_shape(tmp_path: Path) -> None:
    record = cases.to_json(
        a_case(scenes=(given_scene(),), before=(), output="o", first=CallSpec("extend", ((0, 70),), rows=3), second=None)
    )
    record["scenes"][0]["keys"] = 71
    with pytest.raises(UserError, match=r"given\.k: 35840 bytes, its shape needs 36352"):
        cases.from_json(record)
    record["scenes"][0]["inputs"]["given"]["q"] = "no base64!"
    with pytest.raises(UserError, match="scenes"):
        cases.from_json(record)


# ---------------------------------------------------------------- searching

TARGET = load_target("cpu")
UNCONFINED = Guards(frozenset({"sandbox", "imports", "pause"}))  # the planted kernels load the honest library


@contextlib.contextmanager
def hunting(tmp_path: Path, fault: str | None, seed: int = 1, timeout_s: float = 60.0) -> Iterator[Search]:
    """A search on the packaged kernel, or on one with a planted fault."""
    source = None if fault is None else str(rarity.plant(tmp_path, fault))
    with session.opened(TARGET, source, witness=fault is None, timeout_s=timeout_s, guards=UNCONFINED) as bench:
        yield Search(bench, seed, witness=fault is None, shrink_s=60.0)


def forever() -> float:
    return time.monotonic() + 1000


def test_honest_kernel_agrees(tmp_path: Path) -> None:
    with hunting(tmp_path, None) as search:
        search.run(forever(), cases=60)
    counts = search.counts
    assert not search.findings and not counts.differing_pairs and not counts.failed_batches
    assert counts.cases >= 60 and counts.pairs > 10 * counts.cases and counts.words > 1e6
    for relation in ("prefill/decode", "prefill/extend", "prefill/packed", "prefill/prefill"):
        assert counts.relations[relation] > 20, relation
    for feature in ("batch", "lengths", "strides", "addresses", "views", "heads", "threads", "again"):
        assert counts.features[feature] > 5, feature


# The smallest case of each fault: sequences of the second call, its entry point, keys of the failing row, heads.
SMALLEST = {
    "tail": ("extend", 1, 97, (1, 1)),
    "batch": ("decode", 37, 1, (12, 2)),
    "lengths": ("decode", 1, 23, (1, 1)),  # half of a capacity of 40, and up to 3 more
    "stride": ("prefill", 1, 1, None),
    "subnormal": ("decode", 1, 129, (1, 1)),
    "workspace": ("extend", 1, 5, (1, 1)),
}


@pytest.mark.parametrize("fault", SMALLEST)
def test_planted_fault_is_found_and_shrunk(fault: str, tmp_path: Path) -> None:
    """Batches that cannot meet the fault (tests/planted/firing.py) are drawn and not run: they would take minutes."""
    with hunting(tmp_path, fault) as search:
        for _ in range(6000):
            batch = search.generator.batch()
            if firing.in_batch(fault, batch) is not None:
                search.step(batch)
            if search.findings:
                break
    (found,) = list(search.findings.values())[:1]
    entry, sequences, keys, heads = SMALLEST[fault]
    case, calls = found.case, [call for call in found.case.calls if call.entry == entry]
    assert case.observed["fails"] == [5, 5] and case.observed["differing"] >= 1
    assert min(abs(len(call.parts) - sequences) for call in calls) == 0, report.show_finding(found)
    assert min(n for call in calls for _, n in call.parts) <= keys, report.show_finding(found)
    if heads:
        assert (case.scenes[0].heads_q, case.scenes[0].heads_kv) == heads, report.show_finding(found)
    assert len(case.before) == (1 if fault == "workspace" else 0)
    words = {"batch": "batch", "stride": "strides", "workspace": "history", "lengths": "lengths"}.get(fault, "")
    assert words in found.relation
    path = tmp_path / "case.json"
    cases.write(path, case)
    assert session.replay(path, None, str(tmp_path / f"{fault}.cpp"), True, False, UNCONFINED) == 1
    assert session.replay(path, None, "experimental/cpu/kernels/unified_attn.cpp", True, False) == 0


def test_planted_faults_are_rare(tmp_path: Path) -> None:
    fired = rarity.measure(tmp_path, 4000)
    assert set(fired) == set(rarity.FAULTS) and all(times <= 4 for times in fired.values()), fired


@pytest.mark.parametrize(("fault", "what", "heads"), [("crash", "dies", 3), ("hang", "hangs", 5)])
def test_a_kernel_that_fails_is_a_finding(fault: str, what: str, heads: int, tmp_path: Path) -> None:
    """The fuzzer survives it, names the call, and goes on with a new worker."""
    with hunting(tmp_path, fault, timeout_s=3.0) as search:
        scene = Scene(1, heads, 1, 40, Drawn(1, "a"))
        whole, one = CallSpec("prefill", ((0, 40),)), CallSpec("decode", ((0, 33),))
        search.step(Batch((scene,), (whole, one), ((0, 1),)))
        (found,) = search.findings.values()
        assert found.relation == f"{what}: decode" and found.case.second is None and found.case.first.entry == "decode"
        assert found.case.scenes[0].heads_q == heads
        if fault == "crash":
            assert "signal" in found.case.observed["message"] and found.case.first.parts == ((0, 1),)
        scene = Scene(1, 1, 1, 40, Drawn(1, "a"))
        search.step(Batch((scene,), (whole, one), ((0, 1),)))
        assert search.counts.pairs == 1 and not search.counts.differing_pairs


# ---------------------------------------------------------------- comparing, drawing, naming


def test_common_rows_are_those_of_the_scene() -> None:
    """Against the definition, row by row, for random pairs of calls."""
    made = firing.generator(3)
    for _ in range(30):
        batch = made.batch()
        for i, j in batch.pairs:
            first, second = batch.calls[i], batch.calls[j]
            kv = batch.scenes[first.scene].heads_kv
            common = stage.common_rows(first, second, kv)
            rows = {(b, p) for b, n in first.parts for p in first.rows_of((b, n)) if p >= 0}
            expected = sorted((b, p) for b, n in second.parts for p in second.rows_of((b, n)) if (b, p) in rows)
            got = [] if common is None else sorted(zip(common.sequences.tolist(), common.positions.tolist(), strict=True))
            overlap = set(range(*_span(first, kv))) & set(range(*_span(second, kv)))
            if len({b for b, _ in first.parts}) == len(first.parts):
                assert got == (expected if overlap else [])
            else:
                assert set(got) <= set(expected) and bool(got) == bool(expected and overlap)
            if common is not None:
                for side, call in enumerate((first, second)):
                    for part, row, b, p in zip(
                        common.parts[side], common.rows[side], common.sequences, common.positions, strict=True
                    ):
                        assert call.parts[part][0] == b and call.rows_of(call.parts[part])[row] == p


def _span(call: CallSpec, kv: int) -> tuple[int, int]:
    first, count = call.heads or (0, kv)
    return first, first + count


def test_drawn_calls_are_legal_and_repeatable() -> None:
    first, second = firing.generator(5), firing.generator(5)
    for _ in range(60):
        batch = first.batch()
        assert batch == second.batch()
        for call in batch.calls:
            assert cases.why_not(batch.scenes[call.scene], call) is None, call
    assert firing.generator(6).batch() != firing.generator(5).batch()


def test_relations_have_names() -> None:
    plain, one = CallSpec("prefill", ((0, 65),)), CallSpec("decode", ((0, 65),))
    named = {
        "prefill/decode": (plain, one),
        "decode: batch": (one, CallSpec("decode", ((0, 65), (0, 65)))),
        "decode: lengths": (one, CallSpec("decode", ((0, 65),), capacity=70)),
        "decode: strides": (one, CallSpec("decode", ((0, 65),), k=Layout(columns=8))),
        "decode: addresses": (one, CallSpec("decode", ((0, 65),), k=Layout(skew=16))),
        "decode: graph": (one, CallSpec("decode", ((0, 65),), graph=True)),
        "prefill: length": (plain, CallSpec("prefill", ((0, 9),))),
        "decode/witness": (one, CallSpec("decode", ((0, 65),), on="witness")),
        "decode: again": (one, one),
    }
    for name, (first, second) in named.items():
        scene = Scene(1, 1, 1, 70, Drawn(1, "a"))
        assert relations.name(Case("cpu", Backend("library", "cpu"), (scene,), first, second)) == name


# ---------------------------------------------------------------- the command


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tools/fuzz.py", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "name a target"),
    (["--gpu", "cpu", "--minutes", "0"], "--minutes 0.0 is not a time above 0"),
    (["--gpu", "cpu", "--minutes", "nan"], "--minutes nan"),
    (["--gpu", "cpu", "--seed", "-1"], "--seed -1 is negative"),
    (["--gpu", "cpu", "--cases", "0"], "--cases 0 is less than 1"),
    (["--gpu", "toaster"], "unknown target 'toaster'"),
    (["--gpu", "cpu", "--backend", "nothing.cpp"], "--backend nothing.cpp: neither a library"),
    (["--gpu", "cpu", "--backend", "fa3", "--minutes", "0.1"], "--backend fa3: not available here"),
    (["--gpu", "cpu", "--output", "tools"], "tools exists already"),
    (["--replay", "no/such/case.json"], "no/such/case.json: cannot read"),
    (["--replay", "pyproject.toml"], "pyproject.toml: not JSON"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    done = fuzz(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


def test_command_finds_that_torch_decodes_otherwise(tmp_path: Path) -> None:
    """A library on which nobody planted anything: its decode and its prefill round differently."""
    folder = tmp_path / "found"
    done = fuzz(
        "--gpu",
        "cpu",
        "--backend",
        "torch",
        "--minutes",
        "5",
        "--stop-at",
        "1",
        "--seed",
        "3",
        "--output",
        str(folder),
        "--json",
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert json.loads((folder / "summary.json").read_text()) == result
    assert result["findings"] and result["pairs"] and result["left_out"] and not result["interrupted"]
    case = cases.read(folder / "case-1.json")
    assert case.backend.name == "sdpa_cpu" and "torch" in str(case.backend.version)
    again = fuzz("--replay", str(folder / "case-1.json"))
    assert again.returncode == 1 and "verdict   differs" in again.stdout


def test_command_on_the_honest_kernel() -> None:
    done = fuzz("--gpu", "cpu", "--minutes", "5", "--cases", "4", "--seed", "1")
    assert done.returncode == 0 and "verdict   all agree" in done.stdout, done.stderr


def test_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    process = subprocess.Popen(
        [sys.executable, "tools/fuzz.py", "--gpu", "cpu", "--minutes", "5", "--output", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().startswith("backend")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "error: interrupted\n"
    assert json.loads((folder / "summary.json").read_text())["interrupted"]
