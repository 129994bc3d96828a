"""How long the fuzzer takes to find each planted fault, on the CPU.

    python tests/planted/run.py --seed 1 2 --minutes 10

A line a fault and seed: when its first disagreement was seen, before it is shrunk, and after how many calls. Exit code 0
where every fault was found in time for every seed, else 1. The search is that of `tools/fuzz.py --gpu cpu --backend SOURCE
--no-witness`; the planted kernels load the honest library, so it runs without the guards that forbid that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planted import rarity

from tools.core.config import load_target
from tools.evaluator import environment
from tools.evaluator.guards import Guards
from tools.fuzzer import session
from tools.fuzzer.search import Search

UNCONFINED = Guards(frozenset({"sandbox", "imports", "pause"}))


def hunt(folder: Path, fault: str, seed: int, seconds: float) -> tuple[float | None, int]:
    """(Seconds until the first disagreement, None where time ran out; calls until then)."""
    source = str(rarity.plant(folder, fault))
    with session.opened(load_target("cpu"), source, witness=False, timeout_s=60.0, guards=UNCONFINED) as bench:
        search, start = Search(bench, seed, witness=False, shrink_s=0.0), time.monotonic()
        while not search.findings and time.monotonic() < start + seconds:
            search.step(search.generator.batch())
        return (time.monotonic() - start if search.findings else None), search.counts.calls


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    environment.keep_still()
    found_all = True
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seed:
            for fault in rarity.FAULTS:
                seconds, calls = hunt(Path(folder), fault, seed, 60.0 * options.minutes)
                found_all &= seconds is not None
                said = "not found" if seconds is None else f"found after {seconds:.1f} s"
                print(f"seed {seed}  {fault:<10} {said}, {calls} calls", flush=True)
    return 0 if found_all else 1


if __name__ == "__main__":
    sys.exit(main())
