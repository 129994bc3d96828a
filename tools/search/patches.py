"""Exact patches between two complete sources: what an action records, and what a source is rebuilt from.

    patch = make(parent, child, "kernel.cpp")
    assert apply(parent, patch) == child

A patch is an ordinary unified diff of one file. It gives back every byte, carriage returns and a missing last line feed
included; since it stands in a JSON record, a source must be UTF-8.
"""

from __future__ import annotations

import difflib

from tools.core import unified_diff
from tools.core.errors import UserError


def make(old: bytes, new: bytes, name: str) -> str:
    """The unified diff from one source to another. UserError where they are equal, or one of them is not UTF-8."""
    if old == new:
        raise UserError(f"{name}: the child is the parent unchanged: an action needs an edit")
    before, after = (unified_diff.split_lines(_text(data, name)) for data in (old, new))
    rows = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(row if row.endswith("\n") else f"{row}\n{unified_diff.NO_NEWLINE}" for row in rows)


def apply(old: bytes, patch: str, where: str = "patch") -> bytes:
    """The source that a patch makes of another. UserError where it does not fit exactly; `where` names the patch in it."""
    edits = unified_diff.parse(patch, where)
    if len(edits) != 1:
        raise UserError(f"{where}: changes {len(edits)} files; an action edits one source")
    (hunks,) = edits.values()
    return unified_diff.apply(_text(old, where), hunks, where).encode()


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise UserError(f"{name}: line {line}: not UTF-8; a patch in a record holds text: save the source as UTF-8") from None
