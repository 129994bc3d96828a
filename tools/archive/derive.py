"""What archive.json and the targets' validation.json say, made from what lies in an archive.

found = derive(root, targets, items, searches, figures)   # root-relative name -> content
write(root, found)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools.archive.evaluation import full, on_own_device
from tools.archive.evidence import Item
from tools.archive.reading import plain
from tools.archive.searches import Search
from tools.archive.targets import in_archive
from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, file_lock, write_atomic
from tools.search.outcome import machine
from tools.search.schemas import validate

ARCHIVE = "experimental/archive.json"


def validation_name(target: str) -> str:
    """Where the summary of a target's full evaluations lies."""
    return f"experimental/{target}/validation.json"


def derive(
    root: Path, targets: dict[str, Target], items: list[Item], searches: list[Search], figures: list[Any]
) -> dict[str, dict[str, Any]]:
    """Content of every derived file by its name. `figures`: the archive's list of them."""
    found: dict[str, dict[str, Any]] = {
        ARCHIVE: {
            "schema": "areal-tik/archive/1",
            "targets": [_target(root, target, items, searches) for target in targets.values()],
            "runs": [search.entry for search in searches],
            "evidence": [item.entry() for item in items],
            "figures": figures,
        }
    }
    for target in targets.values():
        if reports := _evaluations(target, items):
            found[validation_name(target.name)] = {
                "schema": "areal-tik/validation/1",
                "target": target.name,
                "contract": target.config["contract"]["name"],
                "contract_sha256": target.sections["contract"],
                "evaluations": [_evaluation(root, target, item) for item in reports],
            }
    return found


def _evaluations(target: Target, items: list[Item]) -> list[Item]:
    """Full evaluations that passed on the target's own device."""
    own = [item for item in items if item.target == target.name and item.kind == "evaluation" and item.record]
    return [item for item in own if item.record and full(item.record) and on_own_device(item.record, target)]


def _target(root: Path, target: Target, items: list[Item], searches: list[Search]) -> dict[str, Any]:
    own = [item for item in items if item.target == target.name]
    compatible = [item for item in own if item.kind == "compatibility" and item.record and full(item.record)]
    status = "measured" if _evaluations(target, items) else "compatibility" if compatible else "not measured"
    runs = [search for search in searches if search.entry["target"] == target.name]
    return {
        "name": target.name,
        "status": status,
        "config": f"experimental/{target.name}/config.yaml",
        "source": in_archive(root, target, target.config["kernel"]["source"]),
        "source_sha256": target.config["kernel"]["sha256"],
        "contract": target.config["contract"]["name"],
        "contract_sha256": target.sections["contract"],
        "attempts": {"qualified": sum(run.qualified for run in runs), "failed": sum(run.failed for run in runs)},
        "evidence": [item.path for item in own],
    }


def _evaluation(root: Path, target: Target, item: Item) -> dict[str, Any]:
    """One full evaluation: what was compared, on what, and of which source."""
    assert item.record is not None
    report, candidate = item.record, item.record["builds"]["candidate"]
    environment = report["environment"]
    return {
        "report": item.path,
        "sha256": item.sha256,
        "version": report["version"],
        "started": report["run"]["started"],
        "environment": {
            "machine": machine(report),
            "platform": environment.get("platform"),
            "python": environment.get("python"),
            "packages": environment.get("packages", {}),
        },
        "source": candidate["source"],
        "source_sha256": candidate["source_sha256"],
        # The source and every header: arithmetic lives in headers too.
        "selected": sorted(candidate["files"].values()) == sorted(target.kernel_files().values()),
        "words": report["correctness"]["words"],
        "differing": report["correctness"]["differing"],
        "checks": [
            {key: check[key] for key in ("name", "cases", "words", "differing")} for check in report["correctness"]["checks"]
        ],
    }


def kind_of(name: str) -> str:
    """The schema of a derived file."""
    return "archive" if name == ARCHIVE else "validation"


def write(root: Path, found: dict[str, dict[str, Any]]) -> list[str]:
    """Write what is not there yet as it should be, each file in one step; returns their names.

    UserError, and nothing written, where one of them would not fit its schema or lies behind a link.
    """
    texts = {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in found.items()}
    for name, content in found.items():
        validate(kind_of(name), content, name)
        if os.path.lexists(root / name):
            plain(root, name)
    changed = []
    with file_lock(REPO_ROOT / ".cache" / "archive.lock"):
        for name, text in texts.items():
            path = root / name
            if not path.exists() or path.read_bytes() != text.encode():
                write_atomic(path, text)
                changed.append(name)
    return changed


def refuse_stray(root: Path, targets: dict[str, Target], found: dict[str, dict[str, Any]]) -> None:
    """UserError for a validation.json that nothing could have been made into."""
    for path in sorted((root / "experimental").glob("*/validation.json")):
        name = path.relative_to(root).as_posix()
        if name not in found:
            known = path.parent.name in targets
            why = "no full evaluation of that target passed on its own device" if known else "its folder is no target"
            raise UserError(f"{name}: {why}: delete it")
