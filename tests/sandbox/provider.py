"""torch's attention in a process that was confined after torch had started its threads: python provider.py SCRATCH."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tools.evaluator import sandbox

SCRATCH = sys.argv[1]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(4)
    q, k, v = (torch.randn(1, 4, 256, 128) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    before = attention(q, k, v, is_causal=True)
    threads = len(os.listdir("/proc/self/task"))
    state = sandbox.enter(SCRATCH, sandbox.importable("torch"), "cpu")
    after = attention(q, k, v, is_causal=True)
    try:
        torch.ones(2) + torch.ones(3)
        error = ""
    except RuntimeError as problem:
        error = str(problem)
    from torch.utils import bundled_inputs  # a late import still works

    try:
        Path(__file__).read_bytes()
        other = "read"
    except OSError as problem:
        other = type(problem).__name__
    print(
        json.dumps(
            {
                "state": state,
                "same": torch.equal(before, after),
                "threads before": threads,
                "error": error,
                "shown": repr(after[0, 0, 0, :2]) != "",
                "other file": other,
                "imported": bundled_inputs.__name__,
            }
        )
    )


main()
