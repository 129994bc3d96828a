"""Negative controls: every correctness check must catch the fault that it is there for, and let the honest kernel pass.

The faults are variants of tests/controls/perturb.cpp, real libraries in real workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import evaluator_tools
import pytest

from tools.evaluator.cases import CHECKS
from tools.evaluator.runner import WorkerFailure

# The fault, the check that must catch it, and in which tally it must show.
CONTROLS = [
    ("decode_tail", "every_length", "every_length"),
    ("partial_tile", "tails", "tails"),
    ("single_query", "extend", "extend"),
    ("verify_step", "extend", "extend"),
    ("swapped_heads", "head_ratios", "head_ratios"),
    ("ratio_sixteen", "head_ratios", "head_ratios"),
    ("batch_of_three", "batch", "batch"),
    ("longest_neighbour", "neighbours", "neighbours"),
    ("bucket_of_eight", "padding", "padding"),
    ("packed_single", "packed", "packed"),
    ("packed_shift", "packed", "packed"),
    ("leak_behind", "capacity", "capacity"),
    ("lengths_ignored", "capacity", "capacity"),
    ("contiguous_heads", "strides", "strides"),
    ("misaligned", "addresses", "addresses"),
    ("wrapped_offset", "wide_index", "wide_index"),
    ("three_threads", "order", "order"),
    ("workspace_read", "workspace", "workspace"),
    ("workspace_left", "workspace", "workspace"),
    ("noise", "repeat", "repeat"),
    ("frozen_lengths", "graph", "graph"),
    ("first_key_ignored", "sensitivity", "sensitivity"),
    ("cached_by_address", "sensitivity", "sensitivity"),
    ("flushed", "values", "values"),
    ("zero_sign", "values", "values"),
    ("halved", "accuracy", "accuracy"),
    ("coarse", "accuracy", "accuracy"),
    ("base_two", "lse", "lse"),
    ("lse_of_decode", "lse", "lse"),
    ("nan_spreads", "nonfinite", "nonfinite"),
    ("size_256", "cells", "cells"),
    ("odd_kv_heads", "hidden", "hidden"),
    ("every_output", "cells", "witness"),
    ("writes_before", "addresses", "untouched"),
    ("writes_input", "addresses", "untouched"),
    ("last_row_unwritten", "tails", "untouched"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[evaluator_tools.Bench]:
    made = evaluator_tools.Bench(tmp_path_factory.mktemp("controls"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def honest(bench: evaluator_tools.Bench) -> Iterator[object]:
    with bench.running("honest") as runner:
        yield runner


@pytest.mark.parametrize(("fault", "check", "shown"), CONTROLS)
def test_fault_is_caught(bench: evaluator_tools.Bench, fault: str, check: str, shown: str) -> None:
    with bench.running(fault) as runner:
        tallies = bench.perform(check, runner)
    assert tallies[shown].failed, f"{check} let {fault} pass"
    if fault in ("halved", "coarse", "base_two"):
        assert tallies[shown].inaccuracies == tallies[shown].failed, "an inaccuracy was taken for a difference of bits"


@pytest.mark.parametrize("check", [name for name, item in CHECKS.items() if not item.needs])
def test_honest_library_passes(bench: evaluator_tools.Bench, honest: object, check: str) -> None:
    for tally in bench.perform(check, honest).values():  # type: ignore[arg-type]
        assert not tally.failed, tally.failures


def test_a_worker_that_runs_outside_its_turn_is_found(bench: evaluator_tools.Bench) -> None:
    """Stopped, its thread that never ends takes no time; woken by whatever means, the kernel's count of its time tells."""
    with bench.running("burns") as runner:
        assert not bench.perform("addresses", runner)["addresses"].failed
        time.sleep(0.1)
        runner.ping()
        os.killpg(runner.pid, signal.SIGCONT)
        time.sleep(0.1)
        with pytest.raises(WorkerFailure, match="ran outside its turn"):
            runner.ping()


def test_every_check_has_a_control() -> None:
    assert {check for _, check, _ in CONTROLS} | {"library"} == set(CHECKS)


def test_library_check(bench: evaluator_tools.Bench, honest: object) -> None:
    """The comparison with a library, with kernel libraries of equal and of other bits in its place."""
    honest_library = bench.start("library", bench.honest)
    tallies = bench.perform("library", honest, library=honest_library)  # type: ignore[arg-type]
    honest_library.close()
    assert not tallies["library"].failed, tallies["library"].failures
    assert tallies["library"].notes["three_tiles"] >= tallies["library"].notes["shapes"] // 2
    for fault in ("every_output", "packed_single", "partial_tile", "base_two"):
        with bench.running(fault, "library") as other:
            assert bench.perform("library", honest, library=other)["library"].failed, fault  # type: ignore[arg-type]


def test_without_a_library_the_check_is_skipped(bench: evaluator_tools.Bench, honest: object) -> None:
    assert bench.perform("library", honest)["library"].record()["status"] == "skipped"  # type: ignore[arg-type]
