"""The targets of an archive: experimental/*/config.yaml, with the files that each config selects."""

from __future__ import annotations

import os
from pathlib import Path

from tools.archive.reading import plain
from tools.core.config import ROLES, Target, load_target
from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_bytes


def load(root: Path) -> dict[str, Target]:
    """Every target by name, its config checked. UserError where there is none, or one is not called as its folder."""
    found: dict[str, Target] = {}
    for path in sorted((root / "experimental").glob("*/config.yaml")):
        plain(root, path.relative_to(root).as_posix())
        target = load_target(config=path)
        if target.name != path.parent.name:
            raise UserError(f"{path.relative_to(root).as_posix()}: target.name: {target.name!r} is not that of its folder")
        found[target.name] = target
    if not found:
        raise UserError("experimental/*/config.yaml: there is no target")
    return found


def variant(target: Target, workloads: str | None) -> Target:
    """The config in a target's folder whose workloads have that hash; the target's own where none has."""
    if target.sections["workloads"] != workloads:
        for path in sorted(target.path.parent.glob("*.yaml")):
            other = load_target(config=path)
            if other.name == target.name and other.sections["workloads"] == workloads:
                return other
    return target


def in_archive(root: Path, target: Target, name: str) -> str:
    """A path as a target's config has it, relative to the archive's root. UserError where it lies outside."""
    found = os.path.relpath(target.root.resolve() / name, root.resolve())
    if found.startswith(".."):
        raise UserError(f"{target.name}: kernel: {name} leads out of the archive")
    return Path(found).as_posix()


def check_files(root: Path, targets: dict[str, Target]) -> int:
    """Sources and headers have the hashes that the configs state; returns how many were read."""
    count = 0
    for target in targets.values():
        for role in ROLES:
            for name, digest in target.kernel_files(role).items():
                path = in_archive(root, target, name)
                actual = sha256_bytes(read_bytes(plain(root, path)))
                if actual != digest:
                    raise UserError(
                        f"{path}: has sha256 {actual[:12]}..., target {target.name} states {digest[:12]}... for its {role}"
                    )
                count += 1
    return count
