"""Show what aligned kernels change: equal log-probabilities, the PPO ratio at the first minibatch, the time of a step.

    python tools/demo_ratio.py                                    # a small Qwen3 model on the CPU
    python tools/demo_ratio.py --family mixtral --sequences 32 --prompt 128 --response 128

A small model with random weights answers random prompts; tokens are sampled once, with the unified operators. Then both sides,
unified and transformers' own forward, compute the log-probabilities of these tokens twice: decoding with a cache, as a rollout
does, and in one pass, as a trainer does. A step is forward, backward and AdamW, with and without the old-log-probability pass;
the standard side's backward multiplies in bf16, ours in fp32, so compare steps within a column. Times of small models on a CPU
say nothing about a GPU. Exit codes: 0, 2 (one line says why), 130.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.errors import CommandParser, UserError, run_command

SIDES = ("unified", "standard")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", metavar="TARGET", default="cpu", help="the target whose operators run (default cpu)")
    parser.add_argument("--family", default="qwen3", help="qwen2, qwen3 (default), qwen3_moe or mixtral")
    parser.add_argument("--sequences", type=int, default=8, help="in the batch (default 8)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (default 64)")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each kind (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default 0)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    args = parser.parse_args(arguments)
    for name in ("sequences", "prompt", "response", "layers", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} is less than 1")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print."""
    args = _parse(arguments)
    from tools.aligned.demo import measure
    from tools.aligned.operators import operators_config

    operators_config(args.gpu)
    if args.gpu != "cpu":
        raise UserError(f"target {args.gpu}: models run on the CPU target only so far")
    found = measure(
        args.family, sequences=args.sequences, prompt=args.prompt, response=args.response, repeats=args.repeats,
        seed=args.seed, num_hidden_layers=args.layers,
    )  # fmt: skip
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{args.family}, {args.layers} layers, {args.sequences} sequences of {args.prompt} + {args.response} tokens")
    rows: list[tuple[str, Callable[[dict[str, float]], str]]] = [
        ("log-probabilities", lambda s: f"{s['tokens']}"),
        ("of equal bits, decode and trainer", lambda s: f"{s['equal']} ({100 * s['equal'] / s['tokens']:.1f} %)"),
        ("ratio, smallest", lambda s: f"{s['ratio_min']:.6f}"),
        ("ratio, largest", lambda s: f"{s['ratio_max']:.6f}"),
        ("ratio, RMS distance from 1", lambda s: f"{s['ratio_std']:.2e}"),
        ("step with the old-log-probability pass", lambda s: f"{1000 * s['step_with_old_pass_s']:.1f} ms"),
        ("step without it", lambda s: f"{1000 * s['step_s']:.1f} ms"),
    ]
    print(f"{'':40}{SIDES[0]:>20}{SIDES[1]:>20}")
    for title, shown in rows:
        print(f"{title:40}{shown(found[SIDES[0]]):>20}{shown(found[SIDES[1]]):>20}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
