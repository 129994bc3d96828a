"""Runs a kernel library on random bits, free or confined: python kernel.py free|confined LIBRARY SCRATCH. Prints JSON."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.core.errors import UserError
from tools.evaluator import sandbox
from tools.loader import abi

WHO, LIBRARY, SCRATCH = sys.argv[1:]
HEADS_Q, HEADS_KV, ROWS, THREADS = 4, 2, 300, 3


def bf16(generator: random.Random, heads: int) -> ctypes.Array[ctypes.c_uint16]:
    """[1, heads, ROWS, 128] of numbers between 1/16 and 8, of both signs."""
    words = [generator.randrange(0x3D80, 0x4100) | generator.randrange(2) << 15 for _ in range(heads * ROWS * abi.HEAD_DIM)]
    return (ctypes.c_uint16 * len(words))(*words)


def main() -> None:
    state = sandbox.enter(SCRATCH, [LIBRARY], "cpu") if WHO == "confined" else None
    library = abi.Library(Path(LIBRARY))
    generator = random.Random(1)
    q, k, v = (bf16(generator, heads) for heads in (HEADS_Q, HEADS_KV, HEADS_KV))
    o = (ctypes.c_uint16 * len(q))()
    params = abi.Params()
    params.q, params.k, params.v, params.o = (ctypes.addressof(array) for array in (q, k, v, o))
    params.batch, params.heads_q, params.heads_kv, params.seqlen_q, params.seqlen_kv = 1, HEADS_Q, HEADS_KV, ROWS, ROWS
    for name, heads in (("q", HEADS_Q), ("k", HEADS_KV), ("v", HEADS_KV), ("o", HEADS_Q)):
        row = abi.HEAD_DIM
        setattr(params, f"{name}_stride", (ctypes.c_int64 * 3)(heads * ROWS * row, ROWS * row, row))
    params.num_threads = THREADS
    workspace = ctypes.create_string_buffer(max(1, library.workspace_bytes(abi.PREFILL, params)))
    params.workspace = ctypes.addressof(workspace)
    library.call(abi.PREFILL, params, None)
    threads = len(os.listdir("/proc/self/task"))
    try:
        abi.Library(Path(SCRATCH) / "absent.so")
    except UserError as problem:
        error, trace = str(problem), traceback.format_exc()
    try:
        Path(__file__).read_bytes()
        other = "read"
    except OSError as problem:
        other = type(problem).__name__
    print(
        json.dumps(
            {
                "state": state,
                "output": hashlib.sha256(o).hexdigest(),
                "distinct": len(set(o)),
                "threads": threads,
                "error": error,
                "traceback": trace,
                "other file": other,
            }
        )
    )


main()
