"""Write the tables of the documentation from recorded evidence.

    python tools/tables.py            # rewrite every table in README.md and experimental/README.md
    python tools/tables.py --check    # say which table differs from its evidence; exit 1

A table stands between `<!-- table: KIND PATH... -->` and `<!-- end of table -->`. From a report of evaluate.py: `grid`
(each cell's time and its ratio to the fastest library), `peers` (to each library, a row a cell), `checks` (what was
compared, in words), `summary` (geometric means); medians are taken from the raw samples again. From several records, a row
each: `mutants` (evaluate.py --mutation-score), `exploits` (tests/exploits/run.py), `trials` (evaluate.py
--promotion-trials), `searches` (folders of published runs of ir.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import REPO_ROOT, read_bytes, show_path
from tools.evaluator.statistics import geometric_mean, median

DOCUMENTS = ("README.md", "experimental/README.md")
TABLE = re.compile(r"(<!-- table: (\w+) (\S+(?: \S+)*) -->\n)(.*?)(<!-- end of table -->)", re.S)
KINDS = {"prefill": "Prefill", "update": "Policy update (prompt + 128 tokens)", "decode": "Decode"}


def _cells(report: dict[str, Any], mode: str) -> list[tuple[dict[str, Any], float, dict[str, float]]]:
    """(cell, our median, each library's median), microseconds a call; cells that were timed in `mode`."""
    found = []
    for cell in report["timing"]["cells"]:
        timed = cell["modes"][mode]
        if timed["same_as"] is None:
            libraries = {name: median(entry["samples_us"]) for name, entry in timed["baselines"].items()}
            found.append((cell, median(timed["kernels"]["candidate"]["samples_us"]), libraries))
    return found


def _time(us: float) -> str:
    return f"{us:,.0f} µs" if us >= 100 else f"{us:.1f} µs"


def grid(report: dict[str, Any]) -> list[str]:
    """One matrix a kind of cell: batch sizes down, lengths across."""
    lines: list[str] = []
    for kind, title in KINDS.items():
        cells = [entry for entry in _cells(report, "cold") if entry[0]["kind"] == kind]
        lengths = sorted({cell["keys"] for cell, _, _ in cells})
        lines += [f"| {title} | " + " | ".join(f"{n:,}" for n in lengths) + " |", "| --- |" + " ---: |" * len(lengths)]
        for batch in sorted({cell["batch"] for cell, _, _ in cells}):
            row = {cell["keys"]: (ours, libraries) for cell, ours, libraries in cells if cell["batch"] == batch}
            texts = []
            for length in lengths:
                ours, libraries = row[length]
                texts.append(f"{_time(ours)} ({min(libraries.values()) / ours:.2f}x)" if libraries else _time(ours))
            lines.append(f"| batch {batch} | " + " | ".join(texts) + " |")
        lines.append("")
    return lines[:-1]


def summary(report: dict[str, Any]) -> list[str]:
    """Geometric means of library time / our time, cold."""
    lines = ["| | fastest library | each library |", "| --- | ---: | --- |"]
    for phase, title in (("full", "full sequences"), ("decode", "decode")):
        cells = [entry for entry in _cells(report, "cold") if entry[0]["phase"] == phase]
        best = geometric_mean([min(libraries.values()) / ours for _, ours, libraries in cells if libraries])
        names = sorted({name for _, _, libraries in cells for name in libraries})
        each = (
            f"{name} {geometric_mean([libraries[name] / ours for _, ours, libraries in cells if name in libraries]):.2f}x"
            for name in names
        )
        count = f"{len(cells)} cell{'s' * (len(cells) > 1)}"
        lines.append(f"| {title}, {count} | {best:.2f}x | {', '.join(each)} |")
    return lines


def peers(report: dict[str, Any]) -> list[str]:
    """A row for each cell: our time, and each library's as a multiple of it, cold."""
    cells = _cells(report, "cold")
    names = sorted({name for _, _, libraries in cells for name in libraries})
    lines = ["| cell | ours | " + " | ".join(names) + " |", "| --- | ---: |" + " ---: |" * len(names)]
    for cell, ours, libraries in cells:
        ratios = (f"{libraries[name] / ours:.2f}x" if name in libraries else "" for name in names)
        lines.append(f"| {cell['name']} | {_time(ours)} | " + " | ".join(ratios) + " |")
    return lines


def checks(report: dict[str, Any]) -> list[str]:
    """What was compared."""
    lines = ["| check | cases | words compared | words that differ |", "| --- | ---: | ---: | ---: |"]
    for entry in report["correctness"]["checks"]:
        lines.append(f"| {entry['name']} | {entry['cases']:,} | {entry['words']:,} | {entry['differing']:,} |")
    return lines


def mutants(record: dict[str, Any]) -> list[str]:
    """One corpus of numerical mutants a line, survivors named."""
    lines = []
    for corpus in record["corpora"].values():
        found = corpus["mutants"]
        killed = [mutant for mutant in found if mutant["status"] == "killed"]
        left = [mutant["name"] for mutant in found if mutant["status"] != "killed"]
        subtle, only = (sum(bool(mutant[key]) for mutant in found) for key in ("subtle", "witness_only"))
        lines.append(
            f"| {corpus['target']} | {len(killed)} of {len(found)} | {subtle} | {only} | {', '.join(left) or 'none'} |"
        )
    return lines


def exploits(record: dict[str, Any]) -> list[str]:
    """One corpus of exploits a line."""
    found = record["exploits"]
    stopped = sum(exploit["refused"] for exploit in found)
    guarded = [exploit for exploit in found if exploit["guard"]]
    succeed = sum(bool(exploit["succeeds_without_guard"]) for exploit in guarded)
    passed = sum(exploit["control"] == "PASSED" for exploit in found)
    return [f"| {record['gpu']} | {stopped} of {len(found)} | {succeed} of {len(guarded)} | {passed} of {len(found)} |"]


def trials(record: dict[str, Any]) -> list[str]:
    """One line a kind of trial."""
    lines = []
    for kind, every in record["trials"].items():
        low, high = record["summary"][kind]["rate_interval"]
        name = {
            "equal": "the incumbent's equal",
            "planted": "truly 3 % faster",
            "given": "faster than the incumbent given",
        }.get(kind, kind)
        promoted = sum(trial["promoted"] for trial in every)
        lines.append(f"| {record['target']} | {name} | {promoted} of {len(every)} | {100 * low:.0f} to {100 * high:.0f} % |")
    return lines


def searches(folder: Path) -> list[str]:
    """One line of a published run; its speed is the product of its promotions' gains."""
    from tools.search import packed
    from tools.search.run import Run

    with packed.opened(folder) as plain:
        state = Run.open(plain).state
    promoted = sum(audit.accepted for audit in state.audits.values())
    place = f"[{state.name}]({folder.relative_to(folder.parents[2]).as_posix()}/report/report.html)"  # from experimental/
    tokens = "not shown to the agent" if state.tokens is None else f"{state.tokens:,}"
    return [f"| {place} | {state.target} | {state.audited} | {promoted} | {state.speedup:.2f}x | {tokens} |"]


HEADS = {
    "searches": "run | target | audited attempts | promotions | speed of the last, root = 1 | tokens",
    "mutants": "target | mutants killed | pass the fp64 gate alone | seen by the witness only | survivors",
    "exploits": "target | exploits stopped | succeed with their guard off | honest controls passed",
    "trials": "target | candidate | promoted | 95 % interval",
}
RECORDS: dict[str, Callable[[Any], list[str]]] = {
    "mutants": mutants,
    "exploits": exploits,
    "trials": trials,
    "searches": searches,
}
RENDER: dict[str, Callable[[dict[str, Any]], list[str]]] = {"grid": grid, "summary": summary, "peers": peers, "checks": checks}


def rendered(text: str, where: str, root: Path = REPO_ROOT) -> str:
    """A document's text with all its tables written anew. Raises UserError for a kind or report that is not there."""

    def table(match: re.Match[str]) -> str:
        kind, paths = match[2], match[3].split()
        if kind not in (*RENDER, *RECORDS):
            raise UserError(f"{where}: table kind {kind!r} is none of {', '.join((*RENDER, *RECORDS))}")
        records: list[Any] = []
        for path in paths:
            if kind == "searches":
                records.append(root / path)
                continue
            try:
                records.append(json.loads((root / path).read_text()))
            except (OSError, ValueError) as problem:
                raise UserError(f"{where}: table from {path}: {problem}") from None
        if kind in RECORDS:
            head = f"| {HEADS[kind]} |"
            lines = [head, "| --- " * (head.count("|") - 1) + "|"]
            lines += [line for record in records for line in RECORDS[kind](record)]
            return match[1] + "\n".join(lines) + "\n" + match[5]
        (report, *more), (path, *_) = records, paths
        if more:
            raise UserError(f"{where}: a table {kind!r} takes one report, not {len(records)}")
        if report.get("status") != "PASSED":
            raise UserError(f"{where}: {path} has status {report.get('status')!r}; only a passed report makes a table")
        if report.get("compatibility"):
            raise UserError(f"{where}: {path} is a compatibility run: its times are proxies and enter no table")
        return match[1] + "\n".join(RENDER[kind](report)) + "\n" + match[5]

    if text.count("<!-- table: ") != len(TABLE.findall(text)):
        raise UserError(f"{where}: a table without its end: <!-- end of table --> stands below each")
    return TABLE.sub(table, text)


def stale(root: Path) -> list[str]:
    """Every table of the documents below `root` that is not its evidence, as "DOCUMENT: KIND PATH..."."""
    found = []
    for name in DOCUMENTS:
        try:
            text = read_bytes(root / name).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name}: not UTF-8") from None
        fresh = rendered(text, name, root)
        pairs = zip(TABLE.finditer(text), TABLE.finditer(fresh), strict=True)
        found += [f"{name}: {old[2]} {old[3]}" for old, new in pairs if old[0] != new[0]]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table differs")
    options = parser.parse_args(arguments)
    stale = 0
    for path in (REPO_ROOT / name for name in DOCUMENTS):
        if not path.exists():
            continue
        text = path.read_text()
        fresh = rendered(text, show_path(path))
        if fresh != text:
            stale += 1
            print(f"{show_path(path)}: {'differs from its evidence' if options.check else 'tables written'}")
            if not options.check:
                path.write_text(fresh)
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(run_command(main))
