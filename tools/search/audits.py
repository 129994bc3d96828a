"""The record of an audit: an evaluation, run here or taken as a report, and what of it the run keeps.

An evaluation writes reports/<implementation>.json, which becomes reports/<audit>.json with the log's line. So the report of
an audit that was killed after its evaluation is found, and taken by the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.core.errors import UserError
from tools.core.files import file_lock, read_bytes, sha256_bytes, show_path
from tools.evaluator import report as reports
from tools.search import rules
from tools.search.records import ROOT

if TYPE_CHECKING:
    from tools.search.run import Run

Record = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A report that was checked: its bytes, its content, the fields of the audit that follow from it."""

    data: bytes
    fields: Record
    case: bytes | None  # the reproducer of its first difference


def waiting(run: Run) -> str:
    """The implementation that waits for an audit; UserError where none does."""
    if not run.state.qualified:
        return ROOT
    unaudited = run.state.unaudited()
    if not unaudited:
        raise UserError("nothing waits for an audit; name an implementation (--implementation), or act")
    return unaudited[0]


@contextlib.contextmanager
def evaluation(run: Run, identity: str, report: Path | None, show: Callable[[str], None]) -> Iterator[Found]:
    """A checked report of an implementation: the one at `report`, else of an evaluation made now. One at a time in a run,
    since evaluations disturb each other's times."""
    if report is not None:
        yield _checked(run, identity, report)
        return
    from tools.search import bridge

    with file_lock(run.folder / "reports" / ".lock"):
        run.refresh()
        rules.check_auditable(run.state, run.state.next_id("E"), identity)
        output = run.folder / "reports" / f"{identity}.json"
        if output.is_file() and not _usable(run, identity, output, show):
            _remove(output)
        if not output.is_file():
            bridge.evaluate(run, identity, output, show)
        yield _checked(run, identity, output)
        _remove(output)


def _usable(run: Run, identity: str, output: Path, show: Callable[[str], None]) -> bool:
    """Whether the report of an evaluation that was not recorded can be taken."""
    try:
        _checked(run, identity, output)
    except UserError as problem:
        show(f"an earlier evaluation cannot be taken and is made again: {problem}")
        return False
    show(f"taking the report of an earlier evaluation: {show_path(output)}")
    return True


def _remove(output: Path) -> None:
    for path in (output, reports.case_path(output)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _checked(run: Run, identity: str, path: Path) -> Found:
    """The report in a file, if it is one of this implementation, made as this run demands."""
    from tools.search import bridge

    content = reports.read(path)
    bridge.check_report(run, identity, content)
    case = reports.case_path(path)
    return Found(
        read_bytes(path), bridge.audit_from_report(run, identity, content), read_bytes(case) if case.is_file() else None
    )


def build(run: Run, identity: str, found: Found, job: str | None, time: str) -> tuple[list[Record], dict[Path, bytes]]:
    """The audit's record, and the files to keep beside it."""
    name = run.state.next_id("E")
    audit = {
        **{"schema": "areal-tik/audit/1", "id": name, "created": time[:19] + "+00:00"},
        **found.fields,
        "implementation": identity,
        "action": run.state.implementations[identity].action,
        "report": {"sha256": sha256_bytes(found.data), "bytes": len(found.data)},
        "job": job,
    }
    path = run.folder / "reports" / f"{name}.json"
    kept = {path: found.data}
    if found.case is not None:
        kept[reports.case_path(path)] = found.case
    return [audit], kept
