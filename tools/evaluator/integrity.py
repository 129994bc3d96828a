"""What must be the same on disk at the end of a run as at its start, and what may not be weaker than what is packaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.core.config import Target, load_target, target_names
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, sha256_file, show_path

DECIDING = ("tools/core", "tools/evaluator", "tools/fuzzer", "tools/loader")
SCHEMAS = ("case", "config", "report")
LIMITS_THAT_REFUSE = ("max_slowdown", "accuracy_ratio", "accuracy_rms")  # a larger value lets more pass


def evaluator_files() -> list[Path]:
    """Every file of this repository that decides."""
    found = [path for folder in DECIDING for path in sorted((REPO_ROOT / folder).rglob("*.py"))]
    schemas = [REPO_ROOT / "experimental" / "schemas" / f"{name}.schema.json" for name in SCHEMAS]
    return [REPO_ROOT / "tools" / "evaluate.py", *found, *schemas]


def evaluator_hashes() -> dict[str, str]:
    """SHA-256 of every file that decides."""
    return {path.relative_to(REPO_ROOT).as_posix(): sha256_file(path) for path in evaluator_files()}


class Disk:
    """The hashes of some files, taken when it is made."""

    def __init__(self, paths: list[Path]) -> None:
        self._before = {path: sha256_file(path) for path in paths}

    def add(self, paths: list[Path]) -> None:
        for path in paths:
            self._before.setdefault(path, sha256_file(path))

    def changed(self) -> str | None:
        """The first file that is not what it was, as a sentence."""
        for path, before in self._before.items():
            try:
                after = sha256_file(path)
            except UserError:
                return f"{show_path(path)} went away during the run"
            if after != before:
                return f"{show_path(path)} changed during the run (sha256 {before[:12]}..., now {after[:12]}...)"
        return None


def refuse_weaker(target: Target) -> None:
    """UserError naming what a config weakens: a packaged contract under its own name, or a packaged target's limits."""
    for name in target_names():
        packaged = load_target(name)
        if packaged.path == target.path:
            return
    for name in target_names():
        packaged = load_target(name)
        same_contract = packaged.config["contract"]["name"] == target.config["contract"]["name"]
        if same_contract and packaged.sections["contract"] != target.sections["contract"]:
            key = _first_difference(packaged.config["contract"], target.config["contract"])
            raise target.error(f"contract.{key}", f"is not that of the packaged contract {packaged.config['contract']['name']}")
        if not same_contract and packaged.name != target.name:
            continue
        if packaged.name == target.name and not same_contract:
            raise target.error("contract.name", f"{target.config['contract']['name']!r} is not the contract of {target.name}")
        for key in LIMITS_THAT_REFUSE:
            stated, most = target.config["limits"][key], packaged.config["limits"][key]
            if stated > most:
                raise target.error(f"limits.{key}", f"{stated} is weaker than the packaged {most}")
        if same_contract and packaged.name == target.name and _witness(packaged) != _witness(target):
            raise target.error("kernel.witness", f"is not the packaged witness of {target.name}")


def _witness(target: Target) -> list[str]:
    return sorted(target.kernel_files("witness").values())


def _first_difference(packaged: dict[str, Any], stated: dict[str, Any]) -> str:
    for key in dict.fromkeys([*packaged, *stated]):
        if packaged.get(key) != stated.get(key):
            if isinstance(packaged.get(key), dict) and isinstance(stated.get(key), dict):
                return f"{key}.{_first_difference(packaged[key], stated[key])}"
            return key
    return ""
