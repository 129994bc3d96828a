"""The files of experimental/evidence/: what each is, which target it is of, and whether it holds.

items = [read(root, name, targets) for name in files_below(root, EVIDENCE)]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.archive import evaluation, scores
from tools.archive.reading import plain, read_json
from tools.archive.targets import variant
from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_bytes

EVIDENCE = "experimental/evidence"


@dataclass(frozen=True)
class Item:
    """One file of evidence. `counted`: samples of a report, or mutants, trials, pairs, exploits, calls of another record."""

    path: str
    sha256: str
    kind: str  # evaluation | compatibility | mutation | trials | fuzz | exploits | repeats
    target: str
    counted: int
    record: dict[str, Any] | None = field(repr=False, default=None)

    def entry(self) -> dict[str, Any]:
        """The item as the archive lists it."""
        return {"path": self.path, "sha256": self.sha256, "target": self.target, "kind": self.kind}


def read(root: Path, name: str, targets: dict[str, Target]) -> Item:
    """A file of evidence, checked against itself and its target; UserError names what does not hold."""
    digest = sha256_bytes(read_bytes(plain(root, name)))
    if name.endswith(".txt"):
        text = read_bytes(root / name).decode("utf-8", "replace")
        said = re.search(r"^\$ python (?:tools/fuzz\.py --gpu (\S+)|tests/planted/run\.py)", text, re.M)
        if said is None:
            raise UserError(f"{name}: no output of tools/fuzz.py --gpu TARGET, nor of tests/planted/run.py")
        target = said[1] or "cpu"
        _known(name, target, targets)
        return Item(name, digest, "fuzz", target, len(re.findall(r"^(?:verdict |seed \d+ .* found )", text, re.M)))
    record = read_json(root, name)
    if not isinstance(record, dict):
        raise UserError(f"{name}: no JSON object")
    kind, target = _kind_and_target(name, record)
    own = _known(name, target, targets)
    if kind in ("evaluation", "compatibility"):
        sections = record["target"].get("sections")
        workloads = sections.get("workloads") if isinstance(sections, dict) else None
        counted = evaluation.check(name, record, variant(own, workloads))
    else:
        counted = scores.counted(name, kind, record)
    return Item(name, digest, kind, target, counted, record)


def _kind_and_target(name: str, record: dict[str, Any]) -> tuple[str, str]:
    """What a record is, by its content."""
    try:
        if "status" in record and "timing" in record:
            return ("compatibility" if record["compatibility"] else "evaluation"), record["target"]["name"]
        if record.get("kind") == "mutation score":
            (target,) = {corpus["target"] for corpus in record["corpora"].values()}
            return "mutation", target
        if record.get("kind") in ("exploits", "repeats"):
            return record["kind"], record["gpu"]
        if record.get("format") == "areal-tik fuzz":
            return "fuzz", record["backend"]["name"]
        if "trials" in record:
            return "trials", record["target"]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"{name}: names no target: {type(problem).__name__} {problem}") from None
    raise UserError(f"{name}: no report of evaluate.py, and no record of mutants, trials, fuzzer, exploits or repeats")


def _known(name: str, target: Any, targets: dict[str, Target]) -> Target:
    if not isinstance(target, str) or target not in targets:
        raise UserError(f"{name}: target {target!r} is none of {', '.join(targets)}")
    return targets[target]
