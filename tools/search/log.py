"""The log of a run: JSON lines that name records, each chained to the line before by hash. Appended to, never rewritten.

    log = Log(folder)
    with lock(folder):
        log.refresh()
        log.append(log.line("propose", [opportunity], facts, log.next_time()), [opportunity])

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
from tools.core.files import canonical_json, file_lock, sha256_bytes, show_path, write_atomic
from tools.search.records import MANIFEST, record_bytes

NAME = "log.jsonl"
START = "0" * 64
TYPES = ("init", "propose", "act", "audit", "decide", "usage")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")
_KEYS = {"n", "time", "type", "records", "facts", "prev", "hash"}
_HASH_BYTES = len('"hash":"",') + 64
Line = dict[str, Any]


def lock(folder: Path) -> AbstractContextManager[None]:
    """Hold a run for writing; others wait. Readers need no lock."""
    if not folder.is_dir():
        raise UserError(f"{show_path(folder)}: no such folder")
    return file_lock(folder / "lock")


def record_path(folder: Path, identity: str) -> Path:
    """Where a record lies, the manifest included."""
    return folder / "run.json" if identity == MANIFEST else folder / "records" / f"{identity}.json"


class Log:
    """The acknowledged lines of a run's log, as far as `refresh` has read, and the one way to add another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self.lines: list[Line] = []
        self._end = 0  # bytes that `lines` take; what follows was written since, or never acknowledged

    def refresh(self) -> list[Line]:
        """Read what was appended since, check its chain, and return it. UserError names the first line that does not hold."""
        try:
            with open(self.path, "rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(self._end)
                data = stream.read()
        except FileNotFoundError:
            size, data = 0, b""
        except OSError as error:
            raise UserError(f"{show_path(self.path)}: cannot read: {error.strerror or error}") from None
        if size < self._end:
            raise UserError(f"{show_path(self.path)}: was cut while it was read: restore it from a copy")
        first = len(self.lines)
        pieces = data.split(b"\n")
        torn = pieces.pop()  # what follows the last newline: nothing, or the start of a line
        before = self.lines[-1] if self.lines else None
        for number, (piece, line) in enumerate(zip(pieces, _parsed(pieces), strict=True)):
            if line is None and number == len(pieces) - 1 and not torn:
                break  # a torn line
            if problem := _problem(line, piece, before):
                raise UserError(f"{show_path(self.path)}: line {len(self.lines) + 1}: {problem}")
            self.lines.append(line)
            self._end += len(piece) + 1
            before = line
        return self.lines[first:]

    def next_time(self, now: str | None = None) -> str:
        """The time of a next line: now, and never earlier than the last one's."""
        now = now or now_text()
        if self.lines and now < self.lines[-1]["time"]:
            last = str(self.lines[-1]["time"])
            print(f"warning: the clock stands before the log's last line ({last}): that time is used", file=sys.stderr)
            return last
        return now

    def line(self, kind: str, records: list[dict[str, Any]], facts: dict[str, Any], time: str) -> Line:
        """The line that would follow. `records`: in full; the manifest is the one without an id."""
        line: Line = {
            "n": len(self.lines),
            "time": time,
            "type": kind,
            "records": [{"id": r.get("id", MANIFEST), "sha256": sha256_bytes(record_bytes(r))} for r in records],
            "facts": facts,
            "prev": self.lines[-1]["hash"] if self.lines else START,
        }
        line["hash"] = sha256_bytes(canonical_json(line))
        return line

    def append(self, line: Line, records: list[dict[str, Any]]) -> None:
        """Write the records, then the line that names them. Only inside `lock`, after `refresh`."""
        for record in records:
            write_atomic(record_path(self.folder, record.get("id", MANIFEST)), record_bytes(record))
        if records:
            _sync(self.folder / "records")
        data = canonical_json(line) + b"\n"
        try:
            self._write(data)
        except OSError as error:
            raise UserError(
                f"{show_path(self.path)}: cannot write: {error.strerror or error}; nothing was recorded: run the command again"
            ) from None
        if self._end == 0:
            _sync(self.folder)
        self._end += len(data)
        self.lines.append(line)

    def _write(self, data: bytes) -> None:
        """Put a line behind the last acknowledged one, over what a killed command left; take it back if it is not whole."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, self._end)
            try:
                if os.pwrite(descriptor, data, self._end) != len(data):
                    raise OSError("the disk took a part of the line only")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._end)
                raise
        finally:
            os.close(descriptor)


def read_lines(folder: Path) -> list[Line]:
    """Every acknowledged line of a run's log, its chain checked."""
    return Log(folder).refresh()


def _parsed(pieces: list[bytes]) -> list[Any]:
    """The JSON of each line; None for one that is not JSON. All at once is quicker where all are."""
    try:
        found: list[Any] = json.loads(b"[" + b",".join(pieces) + b"]")
        if len(found) == len(pieces):
            return found
    except ValueError:
        pass
    return [_parsed_alone(piece) for piece in pieces]


def _parsed_alone(piece: bytes) -> Any:
    try:
        return json.loads(piece)
    except ValueError:
        return None


def _problem(line: Any, piece: bytes, before: Line | None) -> str | None:
    """Why a line, whose bytes are `piece`, is not what was written after the line before; None where it is."""
    way_out = "the log was damaged, edited, reordered or cut; restore it from a copy"
    if not isinstance(line, dict) or not isinstance(line.get("hash"), str) or not {"n", "prev"} <= line.keys():
        return f"chain: not a line of a run's log: {way_out}"
    number, link = (before["n"] + 1, before["hash"]) if before else (0, START)
    if line["n"] != number:
        return f"chain: numbered {line['n']!r}, expected {number}: {way_out}"
    if line["prev"] != link:
        return f"chain: does not follow the line before it: {way_out}"
    at = piece.rfind(b'"hash":"')  # nothing behind it in a canonical line can hold these bytes
    end = at + _HASH_BYTES
    if line["hash"] != sha256_bytes(piece[:at] + piece[end:]) or piece[at:end] != b'"hash":"%b",' % line["hash"].encode():
        return f"chain: its content does not have its hash: {way_out}"
    if line.get("type") not in TYPES or line.keys() != _KEYS:
        return f"type {line.get('type')!r} was written by a newer version than this one; update this checkout"
    if not _TIME.fullmatch(str(line["time"])) or (before and line["time"] < before["time"]):
        return f"chain: time {line['time']!r} is earlier than that of the line before: {way_out}"
    return None


def now_text() -> str:
    """UTC with microseconds, as lines state it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
