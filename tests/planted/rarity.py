"""How rare the planted faults are: the share of uniformly drawn calls of the fuzzer's own case space in which each fires.

    python tests/planted/rarity.py [N]

Uniform: entry point, sequences 1 .. 64, KV heads, ratio 1 .. 16, keys 1 .. 1100, rows, lengths 1 .. keys, with or without a
capacity up to twice the keys, the order of every tensor's dimensions, 0 to 9 entries of padding in each, rows 0 to 256
elements wider, kinds of scores and of values. `workspace` is counted over consecutive calls.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.core.config import load_target
from tools.evaluator.inputs import KINDS
from tools.fuzzer import stage
from tools.fuzzer.case import Drawn, Scene
from tools.fuzzer.generator import GROUPS, KV_HEADS, LIMITS
from tools.loader import abi
from tools.loader.build import build

FAULTS = ("tail", "batch", "lengths", "stride", "subnormal", "workspace")
SOURCE = Path(__file__).with_name("planted.cpp")
MAGIC = 0x1EAF50F7


def plant(folder: Path, fault: str) -> Path:
    """Source of a candidate that is the honest library with one planted fault."""
    path = folder / f"{fault}.cpp"
    honest = build(load_target("cpu")).library
    path.write_text(f'#define HONEST "{honest}"\n#define PLANT {fault}\n' + SOURCE.read_text())
    return path


def conditions(folder: Path, fault: str) -> Any:
    """planted_fires() of a built fault: f(entry, params) -> bool."""
    function = ctypes.CDLL(str(build(load_target("cpu"), plant(folder, fault)).library)).planted_fires
    function.argtypes = (ctypes.c_int, ctypes.POINTER(abi.Params))
    return lambda entry, params: bool(function(entry, ctypes.byref(params)))


@dataclass
class Drawing:
    """One uniformly drawn call. keep: memory that params points to."""

    entry: str
    params: abi.Params
    kinds: tuple[str, str]
    keys: int
    total: int
    keep: Any


def strides(rng: random.Random, sizes: tuple[int, int, int]) -> Any:
    """(batch, head, row) strides of a uniformly drawn layout."""
    order = rng.sample(range(3), 3)
    step, stride = 128 + 8 * rng.randrange(33), [0, 0, 0]
    for dim in reversed(order):
        stride[dim] = step
        step *= sizes[dim] + rng.randrange(10)
    return (ctypes.c_int64 * 3)(*stride)


def draw(rng: random.Random) -> Drawing:
    entry = rng.choice(("prefill", "packed", "extend", "decode"))
    batch, heads_kv, group = rng.randint(1, LIMITS["cpu"].parts), rng.choice(KV_HEADS), rng.choice(GROUPS)
    keys = rng.randint(1, LIMITS["cpu"].keys)
    params, keep, total = abi.Params(), None, batch * keys
    params.batch, params.heads_q, params.heads_kv = batch, group * heads_kv, heads_kv
    params.seqlen_q = params.seqlen_kv = keys
    if entry == "decode":
        params.seqlen_q = 1
    if entry == "extend":
        params.seqlen_q = rng.randint(1, keys)
    if entry == "packed":
        offsets = [0]
        for _ in range(batch):
            offsets.append(offsets[-1] + rng.randint(1, keys))
        keep, total = (ctypes.c_int32 * len(offsets))(*offsets), offsets[-1]
        params.cu_seqlens = ctypes.addressof(keep)
    first = keys
    if entry in ("extend", "decode") and rng.random() < 0.5:
        keep = (ctypes.c_int32 * batch)(*(rng.randint(1, keys) for _ in range(batch)))
        params.lengths, params.seqlen_kv, first = ctypes.addressof(keep), rng.randint(keys, 2 * keys), keep[0]
    sizes = (batch, heads_kv, keys)
    params.q_stride = strides(rng, (batch, group * heads_kv, params.seqlen_q))
    params.k_stride, params.v_stride = strides(rng, sizes), strides(rng, sizes)
    return Drawing(entry, params, (rng.choice(list(KINDS)), rng.choice(list(KINDS))), first, total, keep)


def measure(folder: Path, count: int, seed: int = 1) -> dict[str, int]:
    """Times that each fault fires in `count` uniformly drawn calls."""
    from tools.evaluator.arena import Arena

    rng, fired = random.Random(seed), Counter(dict.fromkeys(FAULTS, 0))
    check = {fault: conditions(folder, fault) for fault in FAULTS}
    code = {"prefill": abi.PREFILL, "packed": abi.PREFILL, "extend": abi.EXTEND, "decode": abi.DECODE}
    left = (ctypes.c_int64 * 4)()
    arena = Arena("cpu", 1 << 28)
    for number in range(count):
        call = draw(rng)
        call.params.workspace = ctypes.addressof(left)
        for fault in FAULTS:
            if check[fault](code[call.entry], call.params) and (
                fault != "subnormal" or flushes(arena, call, check[fault], number)
            ):
                fired[fault] += 1
        left[:] = (MAGIC, call.entry == "packed", call.params.batch, call.total)
    return dict(fired)


def flushes(arena: Any, call: Drawing, check: Any, number: int) -> bool:
    """Whether values of the drawn kinds meet the condition in the first sequence, with a subnormal output."""
    if call.kinds[1] not in ("tiny_v", "subnormal_v"):
        return False
    scene = Scene(1, call.params.heads_q, call.params.heads_kv, call.keys, Drawn(1, f"rarity {number}", *call.kinds))
    with arena.scope():
        values = stage.fill(arena, scene)
        params = abi.Params()
        params.batch, params.heads_q, params.heads_kv, params.seqlen_q, params.seqlen_kv = (
            1,
            scene.heads_q,
            scene.heads_kv,
            1,
            call.keys,
        )
        last = values.q[:, :, -1:]
        params.q, params.k = last.data_ptr(), values.k.data_ptr()
        params.q_stride, params.k_stride = (
            (ctypes.c_int64 * 3)(*last.stride()[:3]),
            (ctypes.c_int64 * 3)(*values.k.stride()[:3]),
        )
        return bool(check(abi.DECODE, params))


if __name__ == "__main__":
    import tempfile

    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    with tempfile.TemporaryDirectory() as name:
        for fault, times in measure(Path(name), draws).items():
            print(f"{fault:<10} fires in {times} of {draws} uniformly drawn calls ({times / draws:.1e})")
