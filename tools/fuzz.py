"""Search for two calls that should agree bit for bit and do not; shrink what is found and save it.

    python tools/fuzz.py --gpu cpu --minutes 1                       # the packaged kernel
    python tools/fuzz.py --gpu cpu --backend my_kernel.cpp --minutes 10 --output runs/fuzz
    python tools/fuzz.py --gpu h200 --backend fa3 --minutes 1        # a library that is installed
    python tools/fuzz.py --replay runs/fuzz/case-1.json

Calls of every entry point over the same rows must agree, whatever the batch, neighbours, lengths, packing, strides,
addresses, threads, multiprocessors, streams, graphs, leftovers in the workspace, and calls before. No oracle is needed:
what is wrong in all calls alike is found only through the witness (kernels of this repository; --no-witness leaves it
out). --seed repeats a search as far as the clock allows. Exit codes: 0 all agree, 1 a disagreement (also in a replay),
2 usage, 130 after Ctrl-C (what was found until then is printed and saved).
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.config import target_names
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import show_path

BACKENDS = ("fa3", "fa2", "flashinfer", "torch", "cudnn")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", metavar="TARGET", help=f"one of: {', '.join(target_names())}")
    parser.add_argument(
        "--backend", metavar="NAME|SOURCE", help=f"{', '.join(BACKENDS)}, or a kernel source; default: the target's kernel"
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to search (default 1)")
    parser.add_argument("--cases", type=int, help="stop after so many scenes")
    parser.add_argument("--stop-at", type=int, metavar="N", help="stop after N kinds of disagreement")
    parser.add_argument("--seed", type=int, help="of all that is drawn; a fresh one otherwise")
    parser.add_argument("--output", type=Path, help="a new folder for summary.json and the cases")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")
    parser.add_argument("--no-witness", action="store_true", help="compare no call with the target's witness")
    parser.add_argument("--allow-compat", action="store_true", help="accept another GPU that can run the code")
    parser.add_argument("--replay", type=Path, metavar="CASE", help="run a saved case again and say whether it still disagrees")
    args = parser.parse_args(arguments)
    if args.replay is None and args.gpu is None:
        raise UserError("name a target (--gpu) or a saved case (--replay)")
    if not (math.isfinite(args.minutes) and args.minutes > 0):
        raise UserError(f"--minutes {args.minutes} is not a time above 0")
    for name in ("cases", "stop_at"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if args.seed is not None and args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative")
    return args


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Parse, search or replay, print."""
    began = time.monotonic()
    args = _parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    from tools.fuzzer import session  # torch comes with what it imports later, while the worker starts

    if args.replay is not None:
        return session.replay(args.replay, args.gpu, args.backend, args.json, args.allow_compat)
    options = session.Options(
        gpu=args.gpu, backend=args.backend, seconds=60.0 * args.minutes, cases=args.cases, stop_at=args.stop_at,
        seed=secrets.randbits(40) if args.seed is None else args.seed, output=args.output, quiet=args.json,
        witness=not args.no_witness, allow_compat=args.allow_compat, began=began,
    )  # fmt: skip
    result = session.search(options)
    if args.json:
        print(json.dumps(result))
    if result["interrupted"]:
        raise KeyboardInterrupt
    if args.output is not None and not args.json:
        print(f"written   {show_path(args.output)}")
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
