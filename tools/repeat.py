"""Repeat nine calls many times, alone and beside what keeps the memory busy, and compare every word with the first.

    python tools/repeat.py --gpu h200 --calls 1000 --output runs/repeats.json
    python tools/repeat.py --config experimental/h200/debug.yaml       # with random delays at every barrier

A result that moves between calls is a race. Inputs are drawn on the CPU from the seed, so that the hashes of outputs and
log-sum-exps, which the record states, can be compared between builds, and between machines with the same GPU. Copies of whole
arrays, and gathers of single words, run on a stream of their own without a pause: copies fill the memory's bandwidth, gathers
the load pipes of the multiprocessors, which a decode kernel's CTAs share with them. How much copies moved meanwhile is stated.
Exit codes: 0 every word the same, 1 not, 2 usage.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tools.core.config import load_target, target_names
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import write_new
from tools.evaluator import environment
from tools.evaluator.report import finite, without_folder
from tools.loader.abi import HEAD_DIM
from tools.loader.interface import Kernel, load_kernel

HEADS = 32
COPY_BYTES, GATHERED = 1 << 30, 1 << 24
MODES = ("alone", "beside_copies", "beside_gathers")


@dataclass(frozen=True)
class Cell:
    """One call: `rows` queries of `keys` keys in each of `batch` sequences, with HEADS query heads and `kv_heads` KV heads."""

    entry: str
    batch: int
    rows: int
    keys: int
    kv_heads: int = 8

    @property
    def name(self) -> str:
        few = "" if self.kv_heads == 8 else f" heads {HEADS}/{self.kv_heads}"
        return f"{self.entry} B{self.batch} {self.rows}x{self.keys}{few}"


CELLS = (
    Cell("prefill", 1, 1024, 1024),
    Cell("prefill", 4, 1000, 1000),
    Cell("prefill", 1, 4096, 4096),
    Cell("extend", 1, 128, 8192),
    Cell("decode", 1, 1, 8192),
    Cell("decode", 1, 1, 20000),
    Cell("decode", 8, 1, 1024),
    Cell("decode", 16, 1, 2048),
    Cell("decode", 8, 1, 2048, kv_heads=2),
)


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", metavar="TARGET", help=f"one of: {', '.join(target_names())}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config in place of the target's own")
    parser.add_argument(
        "--calls", type=int, default=1000, metavar="N", help="of each cell, alone and again beside copies and beside gathers"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record here")
    options = parser.parse_args(arguments)
    if options.calls < 2:
        raise UserError(f"--calls {options.calls}: at least two calls can be compared")
    if options.output is not None and options.output.exists():
        raise UserError(f"--output {options.output}: exists already")
    target = load_target(options.gpu, options.config)
    if target.config["target"]["device"] != "cuda":
        raise UserError(f"target {target.name}: a CUDA target is needed, for copies on a stream of their own")
    kernel = load_kernel(options.gpu, config=options.config)
    draw = torch.Generator().manual_seed(options.seed)
    cells = [_repeat(kernel, cell, options.calls, draw) for cell in CELLS]
    same = not any(cell[mode]["differing_words"] for cell in cells for mode in MODES)
    record = {
        "kind": "repeats",
        "gpu": target.name,
        "source_sha256": target.config["kernel"]["sha256"],
        "command": ["tools/repeat.py", *map(without_folder, sys.argv[1:] if arguments is None else arguments)],
        "seed": options.seed,
        "environment": environment.record("cuda"),
        "same": same,
        "cells": cells,
    }
    if options.output is not None:
        write_new(options.output, (json.dumps(finite(record), indent=1) + "\n").encode())
    return 0 if same else 1


def _repeat(kernel: Kernel, cell: Cell, calls: int, draw: torch.Generator) -> dict[str, Any]:
    def drawn(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(cell.batch, heads, rows, HEAD_DIM, generator=draw).to(torch.bfloat16).cuda()

    q, k, v = drawn(HEADS, cell.rows), drawn(cell.kv_heads, cell.keys), drawn(cell.kv_heads, cell.keys)
    entry = getattr(kernel, f"unified_{cell.entry}")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = entry(q, k, v, HEADS, cell.kv_heads, return_lse=True)
        return o.view(torch.int16), lse.view(torch.int32)

    first = call()
    torch.cuda.synchronize()
    words = hashlib.sha256()
    for tensor in first:
        words.update(tensor.contiguous().cpu().numpy().tobytes())
    found: dict[str, Any] = {
        "name": cell.name,
        "calls": calls,
        "words": sum(x.numel() for x in first),
        "sha256": words.hexdigest(),
    }
    for mode in MODES:
        found[mode] = _compare(call, first, calls, mode)
        print(f"{cell.name}: {calls} calls {mode.replace('_', ' ')}: {found[mode]['differing_words']} words differ", flush=True)
    return found


def _compare(call: Any, first: tuple[torch.Tensor, torch.Tensor], calls: int, mode: str) -> dict[str, Any]:
    """How many words of all calls differ from the first's, and how fast the copies beside them went."""
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    source = torch.zeros(COPY_BYTES if mode != "alone" else 0, dtype=torch.uint8, device="cuda").view(torch.int32)
    target = torch.empty_like(source)
    places = torch.randint(0, source.numel(), (GATHERED,), device="cuda") if mode == "beside_gathers" else None
    copied = 0
    torch.cuda.synchronize()
    begin.record(side)
    for _ in range(calls):
        with torch.cuda.stream(side):  # each takes longer than a call, so that they outlast the calls
            if places is not None:
                torch.index_select(source, 0, places)
            elif mode == "beside_copies":
                target.copy_(source, non_blocking=True)
                copied += 2 * COPY_BYTES  # read and written
        for again, before in zip(call(), first, strict=True):
            differing += (again != before).sum()
    end.record(side)
    torch.cuda.synchronize()
    seconds = begin.elapsed_time(end) / 1000
    return {"differing_words": int(differing), "copied_gbps": round(copied / seconds / 1e9, 1) if copied else None}


if __name__ == "__main__":
    sys.exit(run_command(main))
