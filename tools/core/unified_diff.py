"""Unified diffs, read exactly: every hunk has the lines that its header counts, and nothing else stands between them.

    edits = parse(text, "some.patch")     # file -> its hunks
    new = apply(old, edits["kernel.cpp"], "some.patch")

A line ends at a line feed and nowhere else, so a carriage return is part of its line; a last line without a line feed
is marked as diff and git mark it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.core.errors import UserError

NO_NEWLINE = "\\ No newline at end of file\n"
_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_SIDES = {" ": (0, 1), "-": (0,), "+": (1,)}  # a row's sign -> the sides that have the line


@dataclass(frozen=True)
class Hunk:
    """Lines `old` of a file, the first of them line `start` (from 1), become `new`. Without old lines: after `start`."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def place(self) -> int:
        """Index of the first line that goes."""
        return self.start - 1 if self.old else self.start


def split_lines(text: str) -> list[str]:
    """The lines with their line feeds; joined they are the text again."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def parse(text: str, where: str) -> dict[str, tuple[Hunk, ...]]:
    """The hunks of a diff by file (without its a/ and b/). UserError names `where` and the first line that does not fit."""
    edits: dict[str, list[Hunk]] = {}
    file = None
    lines = split_lines(text)
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ b/"):
            file = lines[at + 1][len("+++ b/") :].strip()
            edits.setdefault(file, [])
            at += 2
        elif (header := _HEADER.match(line)) and file is not None:
            hunk, at = _hunk(lines, at, header, where)
            edits[file].append(hunk)
        else:
            raise UserError(f"{where}: line {at + 1}: {line.rstrip()[:60]!r} does not belong to a unified diff")
    if not edits or not all(edits.values()):
        raise UserError(f"{where}: no change to any file")
    return {name: tuple(hunks) for name, hunks in edits.items()}


def _hunk(lines: list[str], at: int, header: re.Match[str], where: str) -> tuple[Hunk, int]:
    """The hunk whose header stands at `at`, and where the next thing begins."""
    wanted = [int(header[2] or 1), int(header[4] or 1)]
    sides: tuple[list[str], list[str]] = ([], [])
    stated, at = at + 1, at + 1
    while [len(side) for side in sides] != wanted:
        row = lines[at] if at < len(lines) else ""
        if not (given := _SIDES.get(row[:1])) or any(len(sides[side]) == wanted[side] for side in given):
            raise UserError(f"{where}: line {at + 1}: the hunk of line {stated} does not have the lines that its header counts")
        at += 1
        content = row[1:]
        if at < len(lines) and lines[at].rstrip("\n") == NO_NEWLINE.rstrip("\n"):
            content = content.removesuffix("\n")
            at += 1
        for side in given:
            sides[side].append(content)
    if sides[0] == sides[1]:
        raise UserError(f"{where}: line {stated}: a hunk that changes nothing")
    return Hunk(int(header[1]), tuple(sides[0]), tuple(sides[1])), at


def apply(old: str, hunks: Sequence[Hunk], where: str) -> str:
    """The text after the hunks, each of which must fit exactly at its stated place; UserError names the first that does not."""
    lines, result, done = split_lines(old), list[str](), 0
    for hunk in hunks:
        end = hunk.place + len(hunk.old)
        if hunk.place < done or end > len(lines) or tuple(lines[hunk.place : end]) != hunk.old:
            raise UserError(f"{where}: does not apply: its old lines do not stand at line {hunk.start}")
        result += [*lines[done : hunk.place], *hunk.new]
        done = end
    result += lines[done:]
    if any(not line.endswith("\n") for line in result[:-1]):
        raise UserError(f"{where}: does not apply: a line without its line feed would stand inside the file")
    return "".join(result)
