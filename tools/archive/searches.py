"""Published searches: experimental/<target>/search/<name>/, each verified from its root's source and log on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tools.archive.reading import files_below, plain
from tools.core.errors import UserError
from tools.search import packed
from tools.search.publish import PAGE, entry
from tools.search.records import ROOT
from tools.search.run import Run
from tools.search.verify import verify


@dataclass(frozen=True)
class Search:
    """A published run: how the archive lists it, and how its attempts ended."""

    entry: dict[str, Any]
    qualified: int
    failed: int
    checked: dict[str, Any]  # what `verify` counted


def files(root: Path) -> list[str]:
    """Root-relative names of all files of published searches; UserError for a link."""
    folders = sorted(path for path in (root / "experimental").glob("*/search"))
    return [name for folder in folders for name in files_below(root, folder.relative_to(root).as_posix())]


def folders(root: Path) -> list[str]:
    """Root-relative names of the folders of published searches. UserError for a file that belongs to none."""
    found: list[str] = []
    for name in files(root):
        parts = PurePosixPath(name).parts
        folder, inside = "/".join(parts[:4]), parts[4:]
        if inside != (packed.NAME,) and not (len(inside) == 2 and inside[0] == PAGE):
            raise UserError(f"{name}: belongs to no published search: there is {packed.NAME} and the folder {PAGE} in each")
        found += [folder] if folder not in found else []
    return found


def read(root: Path, name: str) -> Search:
    """Verify a published search: chain, records, state, sources, reports, promotions and figures. UserError names it."""
    folder = root / name
    plain(root, f"{name}/{packed.NAME}")
    plain(root, f"{name}/{PAGE}/report.html")
    with packed.opened(folder) as unpacked:
        try:
            checked = verify(unpacked, figures=True)
        except UserError as problem:
            raise UserError(f"{name}: {str(problem).replace(f'{unpacked}/', '')}") from None
        if checked["notes"]:
            raise UserError(f"{name}: {checked['notes'][0].replace(f'{unpacked}/', '')}")
        run = Run.open(unpacked)
    state = run.state
    if state.target != PurePosixPath(name).parts[1]:
        raise UserError(f"{name}: is a search of target {state.target!r}")
    counting = [state.audits[audit] for subject, audit in state.audit_of.items() if subject != ROOT]
    qualified = sum(bool(audit.verified and audit.admissible) for audit in counting)
    return Search(entry(run, folder, root), qualified, len(counting) - qualified, checked)
