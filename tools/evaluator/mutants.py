"""The corpus of numerical mutants: small patches of the kernels, and how one becomes a candidate source.

    for mutant in load_corpus()["cpu"]:
        source = candidate_source(load_target("cpu"), mutant)

tests/mutants/index.yaml lists every patch of tests/mutants/<corpus>/ with what it does wrong. A patch is an ordinary
unified diff against the repository's root, and is applied in memory: its old lines must stand in the file exactly once,
near or far from the stated line, else it is refused by name. The loader takes one source as a candidate and reads
declared headers from the repository; so the project's own includes are pasted into the patched source, each once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.core import unified_diff
from tools.core.config import ROLES, Target
from tools.core.configfile import read_yaml
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, read_bytes, sha256_bytes, show_path
from tools.core.unified_diff import Hunk

FOLDER = REPO_ROOT / "tests" / "mutants"

ENTRIES = ("prefill", "packed", "extend", "decode")
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*\n?')


@dataclass(frozen=True)
class Mutant:
    """One patch. `entries` are the entry points that it changes, `subtle` what the index expects of the accuracy gate."""

    name: str
    corpus: str
    fault: str
    kind: str
    entries: tuple[str, ...]
    subtle: bool
    sha256: str  # of the patch
    edits: dict[str, tuple[Hunk, ...]]  # file, relative to the repository -> what changes in it


# ---------------------------------------------------------------- the index


def load_corpus(folder: Path = FOLDER) -> dict[str, list[Mutant]]:
    """Every mutant by corpus, in the index's order. UserError where index and patches do not agree."""
    index = folder / "index.yaml"
    found: dict[str, list[Mutant]] = {}
    for corpus, entries in read_yaml(index).items():
        if not isinstance(entries, dict):
            raise UserError(f"{show_path(index)}: {corpus}: {entries!r} is not a mapping")
        found[corpus] = [_mutant(folder, corpus, name, entry) for name, entry in entries.items()]
        unlisted = {path.stem for path in (folder / corpus).glob("*.patch")} - set(entries)
        if unlisted:
            raise UserError(f"{show_path(index)}: {corpus}: does not list {', '.join(sorted(unlisted))}")
    return found


def _mutant(folder: Path, corpus: str, name: str, entry: Any) -> Mutant:
    where = f"{show_path(folder / 'index.yaml')}: {corpus}.{name}"
    if not isinstance(entry, dict) or set(entry) != {"fault", "kind", "entries", "subtle"}:
        raise UserError(f"{where}: needs fault, kind, entries and subtle, and nothing else")
    entries = ENTRIES if entry["entries"] == "all" else tuple(entry["entries"])
    if not entries or not set(entries) <= set(ENTRIES):
        raise UserError(f"{where}: entries: {entry['entries']!r} is neither all nor a list of {', '.join(ENTRIES)}")
    if not isinstance(entry["subtle"], bool):
        raise UserError(f"{where}: subtle: {entry['subtle']!r} is neither true nor false")
    path = folder / corpus / f"{name}.patch"
    data = read_bytes(path)
    edits = unified_diff.parse(data.decode("utf-8", "replace"), show_path(path))
    return Mutant(name, corpus, str(entry["fault"]), str(entry["kind"]), entries, entry["subtle"], sha256_bytes(data), edits)


# ---------------------------------------------------------------- patches


def apply(contents: dict[str, bytes], mutant: Mutant) -> dict[str, bytes]:
    """File contents (by path) with the mutant's changes; UserError where its old lines are not there, or there twice."""
    changed = dict(contents)
    for name, hunks in mutant.edits.items():
        if name not in contents:
            raise UserError(f"mutant {mutant.name}: {name} is no declared file of this target")
        lines = unified_diff.split_lines(contents[name].decode())
        shift = 0
        for hunk in hunks:
            place = _find(lines, hunk, hunk.place + shift)
            if place is None:
                raise UserError(f"mutant {mutant.name}: its patch does not apply to {name} (hunk at line {hunk.start})")
            lines[place : place + len(hunk.old)] = hunk.new
            shift += len(hunk.new) - len(hunk.old)
        changed[name] = "".join(lines).encode()
    return changed


def _find(lines: list[str], hunk: Hunk, expected: int) -> int | None:
    """Where the old lines stand: at the stated line, or else at the only place there is."""
    size = len(hunk.old)
    places = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == hunk.old]
    if expected in places:
        return expected
    return places[0] if len(places) == 1 else None


# ---------------------------------------------------------------- candidate sources


def role_of(target: Target, mutants: list[Mutant]) -> str:
    """Whose declared files a corpus patches: the kernel's, or where that is another one, the witness's."""
    patched = {name for mutant in mutants for name in mutant.edits}
    for role in ROLES:
        if patched <= set(target.kernel_files(role)):
            return role
    missing = sorted(patched - set(target.kernel_files("witness")))
    raise UserError(f"target {target.name} declares no {missing[0] if missing else patched}, which a mutant patches")


def candidate_source(target: Target, mutant: Mutant | None, role: str = "kernel") -> str:
    """The target's source of a role, patched and in one piece; unpatched for None (the control)."""
    contents = target.verified_files(role)
    source = next(iter(contents))
    if mutant is not None:
        contents = apply(contents, mutant)
    return "".join(_pasted(contents, source, set()))


def _pasted(contents: dict[str, bytes], name: str, seen: set[str]) -> Iterator[str]:
    """The lines of a declared file, with declared includes in place the first time and left out after that."""
    seen.add(name)
    for line in contents[name].decode().splitlines(keepends=True):
        included = _INCLUDE.match(line)
        declared = _resolve(contents, name, included.group(1)) if included else None
        if declared is None:
            if line.strip() != "#pragma once":
                yield line
        elif declared not in seen:
            yield f"// ---- {declared}\n"
            yield from _pasted(contents, declared, seen)
            yield f"// ---- {name}\n"


def _resolve(contents: dict[str, bytes], name: str, include: str) -> str | None:
    """The declared file that a quoted include means: beside the file, or in the folder of any declared file."""
    folders = [os.path.dirname(name), *sorted({os.path.dirname(other) for other in contents})]
    places = [os.path.normpath(os.path.join(folder, include)) for folder in folders]
    return next((place for place in places if place in contents), None)
