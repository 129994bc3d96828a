"""Whether a run is what its log says: chain, records, facts, rules, sources, reports.

    found = verify(Path("runs/x"))   # counts; UserError names the first thing that does not hold
    verify(Path("runs/x"), figures=True)   # also computes every audit's figures again, from its report's samples

The chain finds accidents, and any edit that does not rewrite everything after it; it is no signature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_bytes, sha256_json, show_path
from tools.search import facts, log, patches
from tools.search.create import JUDGED_BY
from tools.search.records import MANIFEST, ROOT, RuleError, kind_of
from tools.search.run import Run
from tools.search.schemas import validate
from tools.search.state import State

Record = dict[str, Any]


def verify(folder: Path, figures: bool = False) -> dict[str, Any]:
    """Check a run from its first line on. Returns how much was checked, and notes on what no line names.

    figures: read every report, and compute from its samples what the audit says of it (some 30 ms each).
    """
    run = Run.open(folder)  # the chain, the rules, the manifest's hash
    records = _records(run)
    config = _frozen_config(run)
    sources = _check_sources(run, records)
    reports = 0
    for identity in run.ids("audit"):
        _check_report(run, records[identity])
        if figures:
            _check_figures(run, records[identity], config)
        reports += 1
    return {
        "run": show_path(folder),
        "lines": len(run.lines),
        "records": len(records),
        "sources": sources,
        "reports": reports,
        "stage": run.state.stage,
        "notes": _unnamed(run),
    }


def _records(run: Run) -> dict[str, Record]:
    """Every record by id: its schema, its hash, and the facts that its line states of it."""
    records: dict[str, Record] = {}
    state = State()
    for line in run.lines:
        named: list[Record] = []
        for reference in line["records"]:
            identity = reference["id"]
            if identity in records or (identity == MANIFEST and line["n"] > 0):
                raise RuleError(identity, "duplicate-id", f"line {line['n'] + 1} of the log names it a second time")
            if identity == MANIFEST:
                validate("run", run.manifest, "run.json")
                continue
            record = run.record(identity)
            validate(kind_of(identity), record, identity)
            if record["id"] != identity:
                raise RuleError(identity, "links", f"its file holds {record['id']}")
            records[identity] = record
            named.append(record)
        stated, where = line["facts"], f"{show_path(run.folder / log.NAME)}: line {line['n'] + 1}"
        if line["type"] != "usage" and stated != facts.of_line(line["type"], run.manifest, named):
            raise UserError(f"{where}: its facts are not those of its records: the log was edited; restore it from a copy")
        state.apply(line)
    if state != run.state:
        raise UserError(f"{show_path(run.folder)}: the state is not that of its log")
    return records


def _frozen_config(run: Run) -> Record:
    """The run's config, after it and the prompts were held against the manifest."""
    path = run.folder / "config.json"
    try:
        config: Record = json.loads(read_bytes(path))
    except ValueError as problem:
        raise UserError(f"{show_path(path)}: not JSON: {problem}") from None
    manifest = run.manifest
    for section, digest in manifest["target"]["sections"].items():
        if sha256_json(config.get(section)) != digest:
            raise UserError(f"{show_path(path)}: section {section} is not what the manifest froze: restore it from a copy")
    judged = {section: manifest["target"]["sections"][section] for section in JUDGED_BY}
    if sha256_json({**judged, "evaluator": manifest["evaluator"]["sha256"]}) != manifest["specification_sha256"]:
        raise UserError(f"{show_path(run.folder / 'run.json')}: specification_sha256 is not that of its sections and evaluator")
    for name, digest in manifest["prompts"].items():
        prompt = run.folder / "prompts" / f"{name}.md"
        if sha256_bytes(read_bytes(prompt)) != digest:
            raise UserError(f"{show_path(prompt)}: is not the prompt that the manifest froze: restore it from a copy")
    return config


def _check_sources(run: Run, records: dict[str, Record]) -> int:
    """Every source, rebuilt from the root's by the patches, and the copy of it where there is one. Returns how many."""
    rebuilt: dict[str, bytes] = {ROOT: run.source(ROOT)}
    for identity in run.ids("implementation"):
        record = records[identity]
        if identity != ROOT:
            action = records[record["action"]]
            rebuilt[identity] = patches.apply(rebuilt[record["parents"][0]], action["patch"], f"{action['id']}: patch")
        data, source = rebuilt[identity], record["source"]
        if sha256_bytes(data) != source["sha256"] or len(data) != source["bytes"]:
            raise UserError(
                f"{record['action'] or ROOT}: patch: does not give the source of {identity}: restore it from a copy"
            )
        copy = run.source_path(identity)
        if copy.is_file() and read_bytes(copy) != data:
            raise UserError(f"{show_path(copy)}: was edited; delete it: it is rebuilt from the patches")
    return len(rebuilt)


def _check_report(run: Run, record: Record) -> None:
    """The report of an audit, byte for byte."""
    data = run.report_bytes(record["id"])
    if len(data) != record["report"]["bytes"]:
        raise UserError(f"{record['id']}: report.bytes is {record['report']['bytes']}, the report has {len(data)}")


def _check_figures(run: Run, record: Record, config: Record) -> None:
    """What an audit says of its report follows from the report's samples."""
    from tools.evaluator import report as reports
    from tools.search import bridge, outcome

    identity, report = record["id"], run.report(record["id"])
    source = run.state.implementations[record["implementation"]].source["sha256"]
    try:
        reports.validate(report)
        rival = bridge.compared_with(run, report)
        found = outcome.audit_fields(report, config, rival, is_root=record["implementation"] == ROOT)
    except UserError as problem:
        raise UserError(f"{identity}: its report does not hold: {problem}") from None
    if bridge.candidate_hash(report) != source:
        raise RuleError(identity, "audit-target", f"its report is of another source than {record['implementation']}")
    if wrong := [key for key, value in found.items() if record[key] != value]:
        raise UserError(f"{identity}: {wrong[0]} is {record[wrong[0]]!r}, its report gives {found[wrong[0]]!r}")


def _unnamed(run: Run) -> list[str]:
    """Records on disk that the log does not name: of a command that was killed before it was acknowledged."""
    named = {reference["id"] for line in run.lines for reference in line["records"]}
    found = sorted(path for path in (run.folder / "records").glob("*.json") if path.stem not in named)
    return [f"{show_path(path)}: no line names it: its command did not end; the next one writes over it" for path in found]
