"""A compact copy of a run beside its target: experimental/<target>/search/<name>/, listed in experimental/archive.json.

    folder = publish(Run.open(Path("runs/x")))

The copy is one compressed file (packed.py) and the run's page. The file holds what verification needs and no more:
manifest, log, records, prompts, config, every report, and the root's source, from which all others are rebuilt by the
actions' patches. It is verified before it gets its name. A published run is never overwritten or added to, and nothing of
the original is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tools.core.config import EXPERIMENTAL
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, file_lock, make_folder, read_bytes, sha256_file, show_path, write_atomic, write_new
from tools.evaluator.report import case_path
from tools.search import log, packed
from tools.search.records import ROOT
from tools.search.run import Run
from tools.search.schemas import validate
from tools.search.verify import verify

ARCHIVE = "archive.json"
PAGE, PAGE_BYTES = "report", 500_000  # folder of the run's page and pictures; what the page should not exceed by much
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def publish(run: Run, name: str | None = None, experimental: Path = EXPERIMENTAL) -> Path:
    """Write and verify the compact copy, and list it; returns its folder. UserError where the name is taken or odd."""
    from tools.search.page import write_report

    name = name or str(run.manifest["name"])
    if not _NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: letters, digits, '.', '_' and '-' name a published run")
    parent = make_folder(experimental / run.state.target / "search")
    folder = parent / name
    _refuse_taken(folder)
    listed = experimental / ARCHIVE
    _read_archive(listed)
    work = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    try:
        with log.lock(run.folder):
            run.refresh()
            verify(run.folder)
            write_new(work / packed.NAME, packed.pack(_content(run)))
        with packed.opened(work) as plain:
            verify(plain, figures=True)
            write_report(Run.open(plain), work / PAGE, limit=PAGE_BYTES)
        work.chmod(0o755)
        _refuse_taken(folder)
        os.rename(work, folder)
        _list(listed, entry(run, folder, experimental.parent))
    except OSError as problem:
        raise UserError(f"{show_path(folder)}: cannot be written: {problem.strerror or problem}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _refuse_taken(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{show_path(folder)}: exists already and is never overwritten: publish under another --name")


def _content(run: Run) -> dict[str, bytes]:
    """Every file that verification needs, by its path in the run."""
    names = [log.record_path(run.folder, named["id"]) for line in run.lines for named in line["records"]]
    names += [run.folder / "prompts" / f"{prompt}.md" for prompt in run.manifest["prompts"]]
    names += [run.folder / "config.json", run.folder / log.NAME, run.source_path(ROOT)]
    files = {path.relative_to(run.folder).as_posix(): read_bytes(path) for path in names}
    for audit in run.ids("audit"):
        files[f"reports/{audit}.json"] = run.report_bytes(audit)
        case = case_path(run.folder / "reports" / f"{audit}.json")
        if case.is_file():
            files[f"reports/{case.name}"] = read_bytes(case)
    return files


# ---------------------------------------------------------------- the list of what is published


def entry(run: Run, folder: Path, top: Path) -> dict[str, Any]:
    """A published run as the archive lists it, its path relative to `top`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "path": folder.relative_to(top).as_posix(),
        "name": run.manifest["name"],
        "target": run.state.target,
        "contract": run.state.contract,
        "attempts": run.state.audited,
        "log": run.lines[-1]["hash"],
        "bytes": sum(path.stat().st_size for path in files),
        "files": {path.relative_to(folder).as_posix(): sha256_file(path) for path in files},
    }


def _read_archive(path: Path) -> dict[str, Any]:
    """The list of what is published; an empty one where there is none yet. UserError where it is damaged."""
    if not path.is_file():
        return {"schema": "areal-tik/archive/1", "runs": [], "evidence": [], "figures": []}
    try:
        archive: Any = json.loads(read_bytes(path))
    except ValueError as problem:
        raise UserError(f"{show_path(path)}: not JSON: {problem}") from None
    validate("archive", archive, show_path(path))
    return dict(archive)


def _list(path: Path, listed: dict[str, Any]) -> None:
    """Add a run to the list, or renew the entry of a folder that was deleted since."""
    with file_lock(REPO_ROOT / ".cache" / "archive.lock"):
        archive = _read_archive(path)
        archive["runs"] = [run for run in archive["runs"] if run["path"] != listed["path"]] + [listed]
        archive["runs"].sort(key=lambda run: str(run["path"]))
        validate("archive", archive, show_path(path))
        write_atomic(path, json.dumps(archive, indent=1, ensure_ascii=False) + "\n")
