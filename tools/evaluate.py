"""Prove or refute a kernel's contract, measure it beside the libraries, and write one JSON report.

    python tools/evaluate.py --gpu cpu --output runs/cpu.json
    python tools/evaluate.py --gpu h200 --output runs/x.json --source candidate.cu --require fa3,flashinfer
    python tools/evaluate.py --gpu cpu --output runs/y.json --cases quick --json
    python tools/evaluate.py --mutation-score
    python tools/evaluate.py --gpu cpu --promotion-trials 20 --output runs/trials.json

A quick run covers fewer cases and times few cells. --only and --no-timing run a part: their status is INCOMPLETE where
nothing failed. The report is written for every outcome of a run and never over an existing file. The process that decides
never loads candidate code. Exit codes: 0 for a complete pass, 1 where the report says otherwise, 2 where nothing could run:
a usage error, a source that is missing or misnamed, a machine that is not the target's (no report, the name stays free),
130 after Ctrl-C (report INCOMPLETE).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.config import target_names
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import show_path


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", metavar="TARGET", help=f"one of: {', '.join(target_names())}")
    parser.add_argument("--config", type=Path, help="a config file in place of the target's own")
    parser.add_argument("--output", type=Path, help="where the report goes; must not exist")
    parser.add_argument("--source", type=Path, help="a candidate in place of the config's source")
    parser.add_argument("--root", type=Path, help="source of the root: no cell may be slower by more than limits.max_slowdown")
    parser.add_argument("--root-report", type=Path, help="a passed report of the root, in place of measuring it again")
    parser.add_argument("--incumbent", type=Path, help="source of the incumbent: decides about promotion")
    parser.add_argument("--cases", choices=("quick", "full"), default="full")
    parser.add_argument("--require", type=_names, default=(), metavar="NAME,...", help="baselines that must be available")
    parser.add_argument(
        "--allow-compat", action="store_true", help="accept another GPU that can run the code; its times are proxies"
    )
    parser.add_argument("--seed", type=int, help="draw the inputs of an earlier run again")
    parser.add_argument("--only", type=_names, default=(), metavar="CHECK,...", help="run only these correctness checks")
    parser.add_argument("--no-timing", action="store_true", help="stop after the correctness checks")
    parser.add_argument("--cold", action="store_true", help="time with cold inputs only: all that a promotion looks at")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON and nothing else")
    parser.add_argument(
        "--mutation-score", action="store_true", help="how many numerical mutants the correctness checks kill, and which"
    )
    parser.add_argument(
        "--promotion-trials",
        type=int,
        metavar="N",
        help="N attempts to promote the incumbent's equal, and N a candidate that is truly faster",
    )
    return parser.parse_args(arguments)


def _summary(report: dict[str, Any], output: Path) -> dict[str, Any]:
    timing, objective, promotion = report["timing"], report["objective"], report["promotion"]
    return {
        "status": report["status"],
        "reason": report["reason"],
        "compatibility": report["compatibility"],
        "report": str(output),
        "seconds": report["run"]["seconds"],
        "T": objective["T"] if objective else None,
        "geomeans": timing["geomeans"] if timing else None,
        "promoted": promotion["promoted"] if promotion else None,
    }


def _interrupt(number: int, frame: Any) -> None:
    """A polite end leaves a report, as Ctrl-C does."""
    raise KeyboardInterrupt


def _mutation_score(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tools.evaluator import mutation, table

    with table.progress(Console(stderr=True, quiet=args.json)) as show:
        return mutation.main_mutation(args.gpu, args.output, args.json, lambda text: show("mutants", text))


def _promotion_trials(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tools.evaluator import table, trials

    if args.promotion_trials < 1:
        raise UserError(f"--promotion-trials {args.promotion_trials} is less than 1")
    with table.progress(Console(stderr=True, quiet=args.json)) as show:
        return trials.main_trials(
            args.gpu,
            args.config,
            args.source,
            args.incumbent,
            args.promotion_trials,
            args.output,
            show,
            as_json=args.json,
        )


def main(arguments: list[str] | None = None) -> int:
    """Parse, evaluate, print."""
    args = _parse(arguments)
    if args.mutation_score:
        return _mutation_score(args)
    if args.output is None:
        raise UserError("name a file for the report (--output)")
    if args.gpu is None and args.config is None:
        raise UserError("name a target (--gpu) or a config file (--config)")
    if args.seed is not None and args.seed < 0:
        raise UserError(f"--seed {args.seed} is negative")
    from rich.console import Console

    from tools.evaluator import judge, table
    from tools.evaluator.options import Options
    from tools.evaluator.report import without_folder

    if args.promotion_trials is not None:
        return _promotion_trials(args)
    signal.signal(signal.SIGTERM, _interrupt)
    options = Options(
        gpu=args.gpu,
        output=args.output,
        source=args.source,
        root=args.root,
        incumbent=args.incumbent,
        root_report=args.root_report,
        config=args.config,
        cases=args.cases,
        require=args.require,
        allow_compat=args.allow_compat,
        seed=args.seed,
        only=args.only,
        timing=not args.no_timing,
        hot=not args.cold,
        command=("evaluate.py", *arguments)
        if arguments is not None
        else (show_path(Path(sys.argv[0])), *map(without_folder, sys.argv[1:])),
    )
    console = Console(stderr=True, quiet=args.json)
    with table.progress(console) as show:
        report = judge.evaluate(options, show)
    if args.json:
        print(json.dumps(_summary(report, args.output)))
    else:
        table.show(Console(width=None if sys.stdout.isatty() else 132), report)
        print(f"report    {show_path(args.output)}")
    if report["status"] != "PASSED":
        print(f"error: {report['status']}: {report['reason']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
