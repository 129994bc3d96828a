"""The parts of a verification, in the order in which they run; each raises UserError with the first thing that fails.

for name, part in Verification(root).parts():
    counts = part()     # {"files": 21}: what was checked
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools import tables
from tools.archive import derive, evidence, figures, searches
from tools.archive import targets as packaged
from tools.archive.reading import difference, files_below, plain, read_json
from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_file
from tools.search.schemas import validate

Counts = dict[str, int]


class Verification:
    """One archive. The parts build on each other: each reads what those before it found to hold."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stated: dict[str, Any] = {}  # archive.json
        self.targets: dict[str, Target] = {}
        self.items: list[evidence.Item] = []
        self.searches: list[searches.Search] = []

    def parts(self) -> Iterator[tuple[str, Callable[[], Counts]]]:
        yield "files", self.check_files
        yield "targets", self.check_targets
        yield "evidence", self.check_evidence
        yield "searches", self.check_searches
        yield "archive", self.check_archive
        yield "figures", self.check_figures
        yield "documents", self.check_documents

    def check_files(self) -> Counts:
        """archive.json fits its schema, and lists what lies there: nothing more, nothing less, with these hashes."""
        self.stated = self._read(derive.ARCHIVE)
        listed = {entry["path"]: entry["sha256"] for entry in self.stated["evidence"]}
        if len(listed) != len(self.stated["evidence"]):
            raise UserError(f"{derive.ARCHIVE}: a file of evidence stands twice")
        _same_names(files_below(self.root, evidence.EVIDENCE), list(listed))
        of_runs: dict[str, str] = {}
        for run in self.stated["runs"]:
            if "files" not in run:
                raise UserError(
                    f"{derive.ARCHIVE}: runs[{run['path']}]: files is missing: python tools/verify_archive.py --update"
                )
            of_runs |= {f"{run['path']}/{name}": digest for name, digest in run["files"].items()}
        _same_names(searches.files(self.root), list(of_runs))
        drawn = {figure["path"]: figure["sha256"] for figure in self.stated["figures"]}
        _same_names(files_below(self.root, figures.FIGURES) if (self.root / figures.FIGURES).is_dir() else [], list(drawn))
        for figure in self.stated["figures"]:
            for name in figure["evidence"]:
                plain(self.root, name)
        for name, digest in {**listed, **of_runs, **drawn}.items():
            if (actual := sha256_file(plain(self.root, name))) != digest:
                raise UserError(f"{name}: has sha256 {actual[:12]}..., {derive.ARCHIVE} states {digest[:12]}...")
        return {"evidence": len(listed), "of searches": len(of_runs), "figures": len(drawn)}

    def check_targets(self) -> Counts:
        """Every config fits its schema, and its sources and headers have their hashes."""
        self.targets = packaged.load(self.root)
        return {"targets": len(self.targets), "sources and headers": packaged.check_files(self.root, self.targets)}

    def check_evidence(self) -> Counts:
        """Every report and record holds in itself; every figure of a report follows from its samples."""
        names = files_below(self.root, evidence.EVIDENCE)
        self.items = [evidence.read(self.root, name, self.targets) for name in names]
        reports = [item for item in self.items if item.kind in ("evaluation", "compatibility")]
        return {
            "reports": len(reports),
            "samples": sum(item.counted for item in reports),
            "other records": len(self.items) - len(reports),
        }

    def check_searches(self) -> Counts:
        """Every published run, from its root's source and log on."""
        self.searches = [searches.read(self.root, name) for name in searches.folders(self.root)]
        for search in self.searches:
            if search.entry["target"] not in self.targets:
                raise UserError(f"{search.entry['path']}: target {search.entry['target']!r} is not in this archive")
        sums = {key: sum(search.checked[key] for search in self.searches) for key in ("lines", "records", "reports")}
        return {"runs": len(self.searches), **sums}

    def check_figures(self) -> Counts:
        """The data of every figure follows from the evidence."""
        return {"data files": figures.check(self.root, self.targets)}

    def check_archive(self) -> Counts:
        """archive.json and every validation.json say what follows from all that."""
        found = self.derived()
        derive.refuse_stray(self.root, self.targets, found)
        for name, content in found.items():
            if problem := difference(self._read(name), content):
                raise UserError(f"{name}: {problem}")
        return {"derived files": len(found), "targets": len(self.targets)}

    def check_documents(self) -> Counts:
        """Every table of the documents is made from its evidence."""
        if stale := tables.stale(self.root):
            raise UserError(f"{stale[0]}: this table is not what its evidence gives: python tools/tables.py")
        texts = [read_bytes(self.root / name).decode() for name in tables.DOCUMENTS]
        return {"documents": len(texts), "tables": sum(len(tables.TABLE.findall(text)) for text in texts)}

    def derived(self) -> dict[str, dict[str, Any]]:
        """What the derived files should say, by name."""
        return derive.derive(self.root, self.targets, self.items, self.searches, figures.entries(self.root))

    def _read(self, name: str) -> dict[str, Any]:
        content = read_json(self.root, name)
        validate(derive.kind_of(name), content, name)
        return dict(content)


def update(root: Path) -> list[str]:
    """Make the derived files from what lies there; returns the names of those that changed.

    All that is not derived must hold: UserError, and nothing written, where it does not.
    """
    checked = Verification(root)
    if (root / derive.ARCHIVE).exists():
        checked.stated = checked._read(derive.ARCHIVE)
    checked.check_targets()
    checked.check_evidence()
    checked.check_searches()
    found = checked.derived()
    derive.refuse_stray(root, checked.targets, found)
    return derive.write(root, found)


def _same_names(there: list[str], listed: list[str]) -> None:
    if extra := sorted(set(there) - set(listed)):
        raise UserError(f"{extra[0]}: lies there, and {derive.ARCHIVE} does not list it: is it new? verify_archive.py --update")
    if missing := sorted(set(listed) - set(there)):
        raise UserError(f"{missing[0]}: is missing, and {derive.ARCHIVE} lists it")
