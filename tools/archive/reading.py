"""Reading an archive: plain files inside the root, strict JSON, and the first place at which two values differ."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from tools.core.errors import UserError
from tools.core.files import read_bytes

CLOSE = 1e-9  # relative: versions of Python round long sums differently, and no sample is known better than that


def plain(root: Path, name: str) -> Path:
    """The file of a root-relative name; UserError where it is missing, linked, or lies outside."""
    path = root / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{name}: leads out of the archive")
    if path.resolve() != root.resolve() / name:
        raise UserError(f"{name}: is a link, or lies behind one: the archive holds plain files only")
    if not path.is_file():
        raise UserError(f"{name}: is missing")
    return path


def files_below(root: Path, folder: str) -> list[str]:
    """Root-relative names of all files below a folder, hidden ones too, sorted. UserError for a link or a device."""
    found: list[str] = []
    if (root / folder).is_symlink():
        raise UserError(f"{folder}: is a link: the archive holds plain files only")
    if not (root / folder).is_dir():
        return found
    with os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                found += files_below(root, name)
            elif entry.is_file(follow_symlinks=False):
                found.append(name)
            else:
                raise UserError(f"{name}: is a link or no file: the archive holds plain files only")
    return sorted(found)


def read_json(root: Path, name: str) -> Any:
    """A JSON file without NaN, infinities and repeated keys; UserError naming file and what is wrong."""

    def no_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number of JSON")

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
        return found

    try:
        return json.loads(read_bytes(plain(root, name)), parse_constant=no_constant, object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{name}: not JSON: {problem}") from None


def difference(stated: Any, found: Any, where: str = "") -> str | None:
    """The first place at which a stated value is not what was found, as a sentence; None where they agree.

    Floats agree when they are equal but for rounding. Entries of a list are known by their path or name.
    """
    if isinstance(stated, dict) and isinstance(found, dict):
        for key in [*found, *(key for key in stated if key not in found)]:
            here = f"{where}.{key}" if where else str(key)
            if key not in stated:
                return f"{here} is missing"
            if key not in found:
                return f"{here} is there and belongs to nothing"
            if problem := difference(stated[key], found[key], here):
                return problem
        return None
    if isinstance(stated, list) and isinstance(found, list):
        names, wanted = _names(stated, where), _names(found, where)
        if missing := [name for name in wanted if name not in names]:
            return f"{missing[0]} is missing"
        if extra := [name for name in names if name not in wanted]:
            return f"{extra[0]} is there and belongs to nothing"
        if len(set(names)) != len(names):
            return f"{next(name for name in names if names.count(name) > 1)} stands twice"
        if names != wanted:
            return f"{next(a for a, b in zip(names, wanted, strict=True) if a != b)} is out of its place"
        pairs = zip(stated, found, wanted, strict=True)
        return next((problem for a, b, name in pairs if (problem := difference(a, b, name))), None)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (stated, found))
    same = (
        math.isclose(stated, found, rel_tol=CLOSE, abs_tol=1e-12)
        if numbers
        else type(stated) is type(found) and stated == found
    )
    return None if same else f"{where} is {stated!r}, what it is made from gives {found!r}"


def _names(entries: list[Any], where: str) -> list[str]:
    """What to call each entry of a list."""
    keys = [
        next((entry[key] for key in ("path", "report", "name") if isinstance(entry, dict) and key in entry), number)
        for number, entry in enumerate(entries)
    ]
    return [f"{where}[{key}]" for key in keys]
