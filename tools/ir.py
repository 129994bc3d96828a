"""Keep the books of a search: records, log, state, and what is made of them.

    python tools/ir.py init --gpu cpu --run runs/trial        a new run
    python tools/ir.py status --run runs/trial                what it waits for, and the next command
    python tools/ir.py context --run runs/trial --budget 16000
    python tools/ir.py audit --run runs/trial                 measures what waits for it: first the root
    python tools/ir.py propose --run runs/trial --file opportunity.json
    python tools/ir.py act --run runs/trial --file action.json --source child.cpp
    python tools/ir.py decide --run runs/trial --file decision.json
    python tools/ir.py verify --run runs/trial

Each command that writes is one line of the log, or none: killed at any moment, it is simply run again. State is derived
from the log and never written. What a rule refuses is one line, `error: RECORD: RULE: what is wrong; the way out`, and
exit code 2. A file may be `-` for standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import read_bytes, show_path
from tools.search import packed
from tools.search.run import Run
from tools.search.summary import summary, text

COMMANDS = {
    "init": "make a run: freeze the target's config, prompts, evaluator and root",
    "status": "what the run waits for, from its log alone",
    "context": "what an agent needs for the next step, within a budget of tokens",
    "propose": "record an opportunity",
    "act": "record an action and the implementation that it makes",
    "audit": "evaluate an implementation and record what comes out",
    "decide": "record a lineage decision, with its follow-ups",
    "usage": "record tokens used since the last report, or why they are unavailable",
    "verify": "check log, records, facts, rules, sources and reports",
    "report": "write the run's page and its figures",
    "export-job": "write a folder that another machine evaluates with one command",
    "import-report": "record the report that came back from a job",
    "publish": "write a compact, verified copy of the run beside its target",
}


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _tokens(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens")
    return int(text)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def parser() -> CommandParser:
    """The command line."""
    found = CommandParser(
        prog="ir.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    of = {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, text in COMMANDS.items()
    }
    for command in of.values():
        command.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="the run's folder")
        command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _init_arguments(of["init"])
    of["context"].add_argument("--budget", type=_count, required=True, metavar="N", help="tokens, by a cautious estimate")
    of["context"].add_argument("--parent", metavar="ID", help="the implementation that the next action starts from")
    of["context"].add_argument("--opportunity", metavar="ID", help="the opportunity that it takes up")
    for name, what in (("propose", "opportunity"), ("act", "action"), ("decide", "lineage")):
        of[name].add_argument(
            "--file",
            type=Path,
            required=True,
            help=f"JSON, as experimental/schemas/{what}.schema.json, less what the tool gives",
        )
    of["act"].add_argument("--source", type=Path, required=True, help="the complete source of the child")
    of["audit"].add_argument("--implementation", metavar="ID", help="default: the one that waits")
    of["audit"].add_argument("--report", type=Path, help="a report of tools/evaluate.py, in place of an evaluation now")
    usage = of["usage"]
    usage.add_argument("--input-tokens", type=_tokens, help="since the last report, cached ones included")
    usage.add_argument("--output-tokens", type=_tokens)
    usage.add_argument("--cached-tokens", type=_tokens, help="the part of the input that came from a cache")
    usage.add_argument("--source", help="where the counts come from")
    usage.add_argument("--step", help="what they were spent on, such as an id")
    usage.add_argument("--unavailable", metavar="REASON", help="why there are no counts")
    of["verify"].add_argument(
        "--figures", action="store_true", help="also compute every audit's figures again, from its report's samples"
    )
    of["report"].add_argument("--output", type=Path, metavar="FOLDER", help="default: report/ in the run's folder")
    of["export-job"].add_argument("--implementation", metavar="ID", help="default: the one that waits")
    of["import-report"].add_argument("--report", type=Path, required=True, help="report.json of the job's folder")
    of["publish"].add_argument("--name", help="default: the run's name")
    return found


def _init_arguments(init: argparse.ArgumentParser) -> None:
    init.add_argument("--gpu", metavar="TARGET", help="a folder of experimental/ that holds a config.yaml, such as cpu or h200")
    init.add_argument("--config", type=Path, help="a config file in place of the target's own")
    init.add_argument("--source", type=Path, help="the root, in place of the config's source; it must pass")
    init.add_argument("--name", help="default: the folder's name")
    init.add_argument(
        "--kappa-max",
        type=_count,
        default=20,
        metavar="N",
        help="audits in a row without improvement that end it (20; up to 50 is usual)",
    )
    init.add_argument("--max-audits", type=_count, metavar="N", help="audited offspring that end it")
    init.add_argument("--max-tokens", type=_count, metavar="N", help="reported tokens that end it")
    init.add_argument("--max-seconds", type=_count, metavar="N", help="time since it was made that ends it")
    init.add_argument("--parallel", type=_count, default=1, metavar="N", help="attempts that may be open at a time (1)")
    init.add_argument(
        "--abandon-after", type=_count, default=2, metavar="N", help="unverified audits that allow to abandon a direction (2)"
    )
    init.add_argument(
        "--without",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="ablations: history, numerics, evidence, opportunities, branches",
    )


def _read_json(path: Path) -> Any:
    """The JSON of a file, or of standard input; a key that stands twice is refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            raise UserError(f"{show_path(path)}: {next(key for key in names if names.count(key) > 1)!r} stands twice")
        return found

    data = sys.stdin.buffer.read() if str(path) == "-" else read_bytes(path)
    try:
        return json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{show_path(path)}: not JSON: {problem}") from None


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[Run]:
    """A run to read: one that goes on, or a published one."""
    with packed.opened(folder) as plain:
        yield Run.open(plain)


def _writing(folder: Path) -> Run:
    """A run to add to."""
    if packed.is_published(folder):
        raise UserError(f"{show_path(folder)}: is a published run, to which nothing is added")
    return Run.open(folder)


# ---------------------------------------------------------------- commands: each returns what it has to say, as (text, JSON)

Said = tuple[str, Any]


def _init(args: argparse.Namespace) -> Said:
    from tools.search.create import create

    settings = {
        **{"kappa_max": args.kappa_max, "max_audits": args.max_audits, "max_tokens": args.max_tokens},
        **{"max_seconds": args.max_seconds, "parallel": args.parallel, "abandon_after": args.abandon_after},
        "ablations": args.without,
    }
    run = create(args.run, args.gpu, args.config, args.source, settings, args.name)
    return _after(run, f"made      {show_path(args.run)}")


def _after(run: Run, said: str, **more: Any) -> Said:
    """What was done, and what comes next."""
    found = summary(run)
    return f"{said}\nnext      {found['next']}", {**more, "status": found}


def _status(args: argparse.Namespace) -> Said:
    with _reading(args.run) as run:
        found = summary(run, args.run if packed.is_published(args.run) else None)
    return text(found), found


def _context(args: argparse.Namespace) -> Said:
    from tools.search.context import context

    with _reading(args.run) as run:
        found = context(run, args.budget, args.parent, args.opportunity)
    return found.rstrip("\n"), {"budget": args.budget, "context": found}


def _propose(args: argparse.Namespace) -> Said:
    run = _writing(args.run)
    made = run.propose(_read_json(args.file))
    return _after(run, f"recorded  {made['id']} {made['direction']}", recorded=[made])


def _act(args: argparse.Namespace) -> Said:
    run = _writing(args.run)
    child, action = run.act(_read_json(args.file), read_bytes(args.source), args.source.suffix.lstrip("."))
    return _after(run, f"recorded  {action['id']}, which made {child['id']}", recorded=[action, child])


def _audit(args: argparse.Namespace) -> Said:
    run = _writing(args.run)
    audit = run.audit(args.implementation, args.report, show=lambda line: print(line, file=sys.stderr))
    return _audited(run, audit)


def _audited(run: Run, audit: dict[str, Any]) -> Said:
    known = run.state.audits[audit["id"]]
    outcome = "the incumbent" if known.accepted else known.note or ("not promoted" if audit["action"] else "the root")
    measured = f", T {audit['T']:.5g}" if audit["T"] is not None else ""
    why = f": {_why(audit['failure'])}" if audit["failure"] else ""
    said = f"recorded  {audit['id']} of {audit['implementation']}: {audit['status']}{measured}, {outcome}{why}"
    return _after(run, said, recorded=[audit], accepted=known.accepted, note=known.note)


def _why(failure: dict[str, Any]) -> str:
    """A failure in a line: what the evaluator said, or the case that failed."""
    return str(failure.get("what") or f"{failure.get('check')}: {failure.get('case')}").splitlines()[0][:200]


def _decide(args: argparse.Namespace) -> Said:
    run = _writing(args.run)
    decision, *made = run.decide(_read_json(args.file))
    follow = "".join(f", {item['id']} {item['direction']}" for item in made)
    return _after(
        run, f"recorded  {decision['id']}: {decision['decision']} {decision['subject']}{follow}", recorded=[decision, *made]
    )


def _usage(args: argparse.Namespace) -> Said:
    counts = {key: getattr(args, key) for key in ("input_tokens", "output_tokens", "cached_tokens", "source", "step")}
    if args.unavailable is not None:
        if any(value is not None for value in counts.values()):
            raise UserError("--unavailable stands alone: state counts, or why there are none")
        fields: dict[str, Any] = {"unavailable": args.unavailable}
    elif args.input_tokens is None or args.output_tokens is None or not args.source:
        raise UserError("state --input-tokens, --output-tokens and --source, or --unavailable with the reason")
    else:
        fields = counts
    run = _writing(args.run)
    run.usage(fields)
    return _after(run, "recorded  usage", recorded=[fields])


def _verify(args: argparse.Namespace) -> Said:
    from tools.search.verify import verify

    with packed.opened(args.run) as plain:
        found = {**verify(plain, args.figures), "run": show_path(args.run)}
    counts = ", ".join(f"{found[key]} {key}" for key in ("lines", "records", "sources", "reports"))
    return "\n".join([f"verified  {found['run']}: {counts}", *(f"note      {note}" for note in found["notes"])]), found


def _report(args: argparse.Namespace) -> Said:
    from tools.search.page import write_report

    if args.output is None and packed.is_published(args.run):
        raise UserError(f"{show_path(args.run)}: is a published run and has its page: name another folder (--output)")
    with _reading(args.run) as run:
        paths = [show_path(path) for path in write_report(run, args.output or args.run / "report")]
    return "\n".join(f"wrote     {path}" for path in paths), {"wrote": paths}


def _export_job(args: argparse.Namespace) -> Said:
    from tools.search import audits, jobs

    run = _writing(args.run)
    folder = jobs.export(run, args.implementation or audits.waiting(run))
    there = f"PYTHON=/path/to/python sh {folder.name}/run.sh /path/to/checkout"
    said = f"wrote     {show_path(folder)}\nnext      copy it to the machine with the GPU; there: {there}"
    return said, {"wrote": show_path(folder)}


def _import_report(args: argparse.Namespace) -> Said:
    from tools.search import jobs

    run = _writing(args.run)
    return _audited(run, jobs.import_report(run, args.report))


def _publish(args: argparse.Namespace) -> Said:
    from tools.search.publish import publish

    folder = publish(_writing(args.run), args.name)
    return f"wrote     {show_path(folder)}", {"wrote": show_path(folder)}


_DO = {
    "init": _init, "status": _status, "context": _context, "propose": _propose, "act": _act, "audit": _audit,
    "decide": _decide, "usage": _usage, "verify": _verify, "report": _report, "export-job": _export_job,
    "import-report": _import_report, "publish": _publish,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Parse, do, print."""
    args = parser().parse_args(arguments)
    said, found = _DO[args.command](args)
    print(json.dumps(found, ensure_ascii=False) if args.json else said)
    return 0


if __name__ == "__main__":
    gc.disable()  # a long log is a hundred thousand small objects, none of them garbage; looking takes a fifth of the time
    sys.exit(run_command(main))
