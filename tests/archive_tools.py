"""A copy of the archive to tamper with, and the hashes that a tamperer mends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.archive import evidence, searches, targets
from tools.archive.verify import Verification
from tools.core.errors import UserError
from tools.core.files import canonical_json, sha256_bytes, sha256_file
from tools.evaluator import report
from tools.search import facts, log, packed
from tools.search.records import kind_of, record_bytes
from tools.tables import DOCUMENTS

REPO = Path(__file__).resolve().parents[1]
ARCHIVE, EVIDENCE, RUN = "experimental/archive.json", "experimental/evidence", "experimental/cpu/search/cpu-trial"
V2, V1, GPU = (f"{EVIDENCE}/{name}.json" for name in ("cpu-avx2", "cpu-avx512", "h200-hopper"))
COMPATIBILITY = f"{EVIDENCE}/a100-on-h200-compatibility.json"
Change = Callable[[Any], Any]
Tamper = Callable[[Path], Any]


def copied(root: Path, to: Path) -> Path:
    """What verify_archive.py reads of a repository."""
    shutil.copytree(root / "experimental", to / "experimental", symlinks=True)
    for name in DOCUMENTS:
        shutil.copyfile(root / name, to / name)
    return to


@contextlib.contextmanager
def restored(root: Path) -> Iterator[Path]:
    """A folder to tamper with; it is as it was afterwards. Sooner done than a copy a test."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    folders = {path for path in root.rglob("*") if path.is_dir()}
    yield root
    for path in sorted(root.rglob("*"), reverse=True):  # what a folder holds comes before it
        if path.is_symlink() or (path.is_file() and path not in before):
            path.unlink()
        elif path.is_dir() and path not in folders:
            path.rmdir()
    for path, data in before.items():
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def put(root: Path, name: str, content: Any) -> None:
    """Write JSON as the evaluator does; NaN too."""
    (root / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def edit(root: Path, name: str, change: Change) -> None:
    """Change a JSON file in place and mend nothing."""
    content = json.loads((root / name).read_bytes())
    change(content)
    put(root, name, content)


def relisted(root: Path) -> None:
    """Mend the hashes that archive.json states: of evidence, and of the files of searches."""

    def mend(archive: Any) -> None:
        for entry in archive["evidence"]:
            entry["sha256"] = sha256_file(root / entry["path"])
        for run in archive["runs"]:
            run["files"] = {name: sha256_file(root / run["path"] / name) for name in run["files"]}
            run["bytes"] = sum((root / run["path"] / name).stat().st_size for name in run["files"])

    edit(root, ARCHIVE, mend)


def forge_report(root: Path, name: str, change: Change) -> None:
    """Change a report and mend all its hashes: its own, and the one in archive.json."""

    def forged(found: Any) -> None:
        change(found)
        if "report" in found["hashes"]:
            found["hashes"]["report"] = _own_hash(found)

    edit(root, name, forged)
    relisted(root)


def _own_hash(found: Any) -> str:
    try:
        return report.own_hash(found)
    except UserError:  # NaN has no canonical form
        return "0" * 64


def cell(found: Any, number: int = 0) -> Any:
    """A cell of a report."""
    return found["timing"]["cells"][number]


def cold(found: Any, number: int = 0) -> Any:
    """What was timed in it with cold inputs."""
    return cell(found, number)["modes"]["cold"]


def ours(found: Any) -> Any:
    """The candidate's cold times of the first cell."""
    return cold(found)["kernels"]["candidate"]


def faster(found: Any) -> None:
    """All its samples a tenth lower, the median left as it was."""
    ours(found)["samples_us"] = [round(0.9 * sample, 4) for sample in ours(found)["samples_us"]]


# ---------------------------------------------------------------- published runs


def repack(root: Path, change: Callable[[dict[str, bytes]], None], run: str = RUN) -> None:
    """Change files inside a published run, and mend the outer hash."""
    path = root / run / packed.NAME
    files = packed.unpack(path.read_bytes())
    change(files)
    head = {"format": packed.FORMAT, "files": {name: data.decode() for name, data in files.items()}, "emptied": [], "lists": []}
    path.write_bytes(lzma.compress(canonical_json(head) + b"\n", preset=0))  # larger than packed.pack makes it, and sooner done
    relisted(root)


def forge_records(files: dict[str, bytes], changes: dict[str, Change]) -> None:
    """Change records of a run, and mend their hashes, the log's facts and its chain: what a careful forger would do."""
    manifest = json.loads(files["run.json"])
    for identity, change in changes.items():
        record = json.loads(files[f"records/{identity}.json"])
        change(record)
        files[f"records/{identity}.json"] = record_bytes(record)
    lines = [json.loads(line) for line in files["log.jsonl"].splitlines()]
    before = log.START
    for line in lines:
        named = [reference["id"] for reference in line["records"] if f"records/{reference['id']}.json" in files]
        for reference in line["records"]:
            if reference["id"] in changes:
                reference["sha256"] = sha256_bytes(files[f"records/{reference['id']}.json"])
        if any(identity in changes for identity in named):
            records = [json.loads(files[f"records/{identity}.json"]) for identity in named]
            line["facts"] = facts.of_line(line["type"], manifest, records)
        line["prev"] = before
        line["hash"] = before = sha256_bytes(canonical_json({key: value for key, value in line.items() if key != "hash"}))
    files["log.jsonl"] = b"".join(canonical_json(line) + b"\n" for line in lines)


def forge_audit_report(files: dict[str, bytes], audit: str, change: Change, record: Change = lambda _: None) -> None:
    """Change the report of an audit with all hashes that hang on it, and fields of its record."""
    found = json.loads(files[f"reports/{audit}.json"])
    change(found)
    found["hashes"]["report"] = report.own_hash(found)
    data = (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()
    files[f"reports/{audit}.json"] = data

    def mend(content: Any) -> None:
        content["report"].update(sha256=sha256_bytes(data), bytes=len(data))
        record(content)

    forge_records(files, {audit: mend})


def audits(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """The audit records of a run, in order."""
    names = sorted(name for name in files if name.startswith("records/") and kind_of(Path(name).stem) == "audit")
    return [json.loads(files[name]) for name in names]


# ---------------------------------------------------------------- verifying


class Quick:
    """Verifies copies, and reads a file or a search that it saw before, byte for byte and with the same targets, only once."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}
        self._read = {module: module.read for module in (evidence, searches)}
        self._load = targets.load

    def __enter__(self) -> Quick:
        evidence.read, searches.read, targets.load = self._evidence, self._search, self._targets  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for module, read in self._read.items():
            module.read = read  # type: ignore[attr-defined]
        targets.load = self._load

    def _targets(self, root: Path) -> dict[str, Any]:
        files = [(str(path), sha256_file(path)) for path in sorted((root / "experimental").rglob("*.yaml"))]
        found: dict[str, Any] = self._once(files, lambda: self._load(root))
        return found

    def _evidence(self, root: Path, name: str, known: dict[str, Any]) -> Any:
        sections = [(target.name, target.sections) for target in known.values()]
        return self._once([name, sha256_file(root / name), sections], lambda: self._read[evidence](root, name, known))

    def _search(self, root: Path, name: str) -> Any:
        files = [
            (str(path.relative_to(root)), sha256_file(path)) for path in sorted((root / name).rglob("*")) if path.is_file()
        ]
        return self._once(files, lambda: self._read[searches](root, name))

    def _once(self, key: Any, read: Callable[[], Any]) -> Any:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        if digest not in self._seen:
            self._seen[digest] = read()  # a refusal is raised, and not kept
        return self._seen[digest]

    def problem(self, root: Path) -> str | None:
        """The first thing that does not hold."""
        try:
            with self:
                for _, part in Verification(root).parts():
                    part()
        except UserError as found:
            return str(found)
        return None

    def catches(self, root: Path, tamper: Tamper, *words: str) -> None:
        """Fails where nobody notices, or the message has not all of the words."""
        tamper(root)
        problem = self.problem(root)
        assert problem is not None, "nobody noticed"
        assert all(word in problem for word in words), problem
