"""When the fuzzer's stream of calls first meets each planted fault, without running a kernel.

    python tests/planted/firing.py SEED ...

The conditions of planted.cpp on the calls as the generator states them; `subnormal` needs values too, so its condition here
is only necessary: kinds of values and scores that can meet it. Divide calls by the search's calls per second to get times.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fuzzer.bench import LIBRARY
from tools.fuzzer.case import DIM, PLAIN, CallSpec, Layout, Scene
from tools.fuzzer.generator import Batch, Generator

RISING = ("rising", "underflow")  # scores whose last key is the largest


def row_stride(layout: Layout, sizes: tuple[int, int, int]) -> int:
    step, stride = DIM + layout.columns, [0, 0, 0]
    for dim in reversed(layout.order):
        stride[dim] = step
        step *= sizes[dim] + layout.pad[dim]
    return stride[2]


def fires(fault: str, scene: Scene, call: CallSpec, before: CallSpec | None) -> bool:
    """Whether a call meets a fault's condition; before: the candidate's call that ran just ahead of it."""
    group = scene.heads_q // scene.heads_kv
    heads_kv = call.heads[1] if call.heads else scene.heads_kv
    n, count = call.parts[0][1], len(call.parts)
    if fault == "tail":
        return call.entry == "extend" and n % 128 == 97 and call.rows % 32 == 9 and call.rows <= n
    if fault == "batch":
        return call.entry == "decode" and (count, heads_kv * group, heads_kv) == (37, 12, 2)
    if fault == "lengths":
        room = call.capacity
        return call.entry == "decode" and room is not None and room % 64 == 40 and 0 <= call.parts[-1][1] - room // 2 < 4
    if fault == "stride":
        if call.entry != "prefill" or call.view:
            return False
        q, k, v = (
            row_stride(layout, (count, h, n))
            for layout, h in ((call.q, heads_kv * group), (call.k, heads_kv), (call.v, heads_kv))
        )
        return k % 256 == 88 and v % 256 == 40 and q % 64 == 0
    if fault == "subnormal":
        kinds = scene.inputs
        return (
            call.entry == "decode"
            and n % 128 == 1
            and n > 1
            and kinds.values in ("tiny_v", "subnormal_v")
            and kinds.scores in RISING
        )
    if call.entry != "extend" or call.rows % 16 != 5 or call.rows > n or before is None or before.entry != "packed":
        return False
    keys = call.capacity or max(m for _, m in call.parts)
    return len(before.parts) % 8 == 3 and sum(m for _, m in before.parts) >= 8 * count * keys


def in_batch(fault: str, batch: Batch) -> int | None:
    """Index of the first call of a batch that meets a fault's condition, or None."""
    calls = [(i, call) for i, call in enumerate(batch.calls) if call.on == "candidate"]
    ahead: dict[int, CallSpec | None] = {calls[0][0]: None}
    for (_, a), (j, b) in itertools.pairwise(calls):
        same = (a.graph, a.stream, a.route) == (b.graph, b.stream, b.route)
        ahead[j] = a if same else None
    return next((i for i, call in calls if fires(fault, batch.scenes[call.scene], call, ahead[i])), None)


def generator(seed: int) -> Generator:
    return Generator(LIBRARY, lambda entry: PLAIN, "cpu", seed, witness=True)


def main(seeds: list[int], limit: int = 400_000) -> None:
    for seed in seeds:
        made, calls, found = generator(seed), 0, dict[str, int]()
        while calls < limit and len(found) < 6:
            batch = made.batch()
            for fault in ("tail", "batch", "lengths", "stride", "subnormal", "workspace"):
                if fault not in found and (index := in_batch(fault, batch)) is not None:
                    found[fault] = calls + index + 1
            calls += len(batch.calls)
        print(f"seed {seed}: calls until the first that fires: {found}", flush=True)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1, 2, 3])
