"""The log of a run: JSON lines that name records, each chained to the line before by hash. Appended to, never rewritten.

    lines = read_lines(folder)
    with lock(folder):
        line = append(folder, read_lines(folder), "propose", [opportunity], facts)

A command is one line. Its records are on disk before the line is written, and count only once the line is: a command
that was killed leaves at most records that no line names, or a torn last line, and both are overwritten by the next one.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tools.core.errors import UserError
from tools.core.files import canonical_json, file_lock, read_bytes, sha256_bytes, show_path, write_atomic
from tools.search.records import MANIFEST, record_bytes

NAME = "log.jsonl"
START = "0" * 64
TYPES = ("init", "propose", "act", "audit", "decide", "usage")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")
_KEYS = {"n", "time", "type", "records", "facts", "prev", "hash"}


def lock(folder: Path) -> AbstractContextManager[None]:
    """Hold a run for writing; others wait. Readers need no lock."""
    if not folder.is_dir():
        raise UserError(f"{show_path(folder)}: no such folder")
    return file_lock(folder / "lock")


def record_path(folder: Path, identity: str) -> Path:
    """Where a record lies, the manifest included."""
    return folder / "run.json" if identity == MANIFEST else folder / "records" / f"{identity}.json"


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Every acknowledged line, its chain checked. UserError names the first line that does not hold."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines, and how many bytes of the file they take: what follows was never acknowledged."""
    path = folder / NAME
    if not path.is_file():
        return [], 0
    pieces = read_bytes(path).split(b"\n")
    torn = pieces.pop()  # what follows the last newline: empty, or the start of a line
    lines: list[dict[str, Any]] = []
    end = 0
    for number, piece in enumerate(pieces):
        where = f"{show_path(path)}: line {number + 1}"
        try:
            line = json.loads(piece)
        except ValueError:
            if number == len(pieces) - 1 and not torn:
                break
            raise UserError(f"{where}: not JSON: the log was damaged or edited; restore it from a copy") from None
        _check(line, piece, lines[-1] if lines else None, where)
        lines.append(line)
        end += len(piece) + 1
    return lines, end


def _check(line: Any, piece: bytes, before: dict[str, Any] | None, where: str) -> None:
    """UserError where a line, whose bytes are `piece`, is not what was written after the line before."""
    if not isinstance(line, dict) or not {"n", "hash", "prev"} <= set(line):
        raise UserError(f"{where}: not a line of a run's log")
    way_out = "the log was edited, reordered or cut; restore it from a copy"
    if line["n"] != (before["n"] + 1 if before else 0):
        raise UserError(f"{where}: chain: numbered {line['n']!r}, expected {before['n'] + 1 if before else 0}: {way_out}")
    if line["prev"] != (before["hash"] if before else START):
        raise UserError(f"{where}: chain: does not follow the line before it: {way_out}")
    head, own, tail = piece.rpartition(f'"hash":"{line["hash"]}",'.encode())
    if not own or line["hash"] != sha256_bytes(
        head + tail
    ):  # of the canonical line without its hash, made of the bytes at hand
        raise UserError(f"{where}: chain: its content does not have its hash: {way_out}")
    if line.get("type") not in TYPES or set(line) != _KEYS:
        raise UserError(
            f"{where}: type {line.get('type')!r} was written by a newer version than this one; update this checkout"
        )
    if not _TIME.fullmatch(str(line["time"])) or (before and line["time"] < before["time"]):
        raise UserError(f"{where}: chain: time {line['time']!r} is earlier than that of the line before: {way_out}")


def line_hash(line: dict[str, Any]) -> str:
    """The hash that a line must state: of everything else in it."""
    return sha256_bytes(canonical_json({key: value for key, value in line.items() if key != "hash"}))


def now_text() -> str:
    """UTC with microseconds, as lines state it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


def next_time(lines: list[dict[str, Any]], now: str | None = None) -> str:
    """The time of a next line: now, and never earlier than the last one."""
    now = now or now_text()
    if lines and now < lines[-1]["time"]:
        print(f"warning: the clock stands before the log's last line ({lines[-1]['time']}): that time is used", file=sys.stderr)
        return str(lines[-1]["time"])
    return now


def make_line(
    lines: list[dict[str, Any]], kind: str, records: list[dict[str, Any]], facts: dict[str, Any], time: str
) -> dict[str, Any]:
    """The line that would follow. `records`: in full; the manifest, where there is one, has no id."""
    line: dict[str, Any] = {
        "n": len(lines),
        "time": time,
        "type": kind,
        "records": [{"id": r.get("id", MANIFEST), "sha256": sha256_bytes(record_bytes(r))} for r in records],
        "facts": facts,
        "prev": lines[-1]["hash"] if lines else START,
    }
    line["hash"] = line_hash(line)
    return line


def append(
    folder: Path,
    lines: list[dict[str, Any]],
    kind: str,
    records: list[dict[str, Any]],
    facts: dict[str, Any],
    now: str | None = None,
) -> dict[str, Any]:
    """Write the records, then the line that names them. Call it inside `lock`, with all lines that the log holds."""
    line = make_line(lines, kind, records, facts, now or next_time(lines))
    for record in records:
        write_atomic(record_path(folder, record.get("id", MANIFEST)), record_bytes(record))
    if records:
        _sync(folder / "records")
    _write(folder, line)
    return line


def _write(folder: Path, line: dict[str, Any]) -> None:
    """Put one line behind the last acknowledged one. A line that did not reach the disk whole is taken back."""
    path = folder / NAME
    _, end = _read(folder)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{show_path(path)}: cannot write: {error.strerror or error}") from None
    try:
        os.ftruncate(descriptor, end)
        try:
            data = canonical_json(line) + b"\n"
            if os.pwrite(descriptor, data, end) != len(data):
                raise OSError("the line was written in part")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    except OSError as error:
        raise UserError(
            f"{show_path(path)}: cannot write: {error.strerror or error}; nothing was recorded: run the command again"
        ) from None
    finally:
        os.close(descriptor)
    if end == 0:
        _sync(folder)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
