"""Refresh the SHA-256 entries of config files after a source has changed, leaving every other byte as it was."""

from __future__ import annotations

from pathlib import Path

import yaml

from tools.core import files
from tools.core.config import Target
from tools.core.files import show_path


def update_hashes(target: Target) -> list[str]:
    """Rewrite the hashes of kernel and kernel.witness in every file of the target's chain; returns what changed.

    An entry whose file does not exist is left alone (and reported), so that configs can be written before sources.
    """
    report: list[str] = []
    for path in target.merged.chain:
        text = path.read_text(encoding="utf-8")
        edits: list[tuple[int, int, str]] = []
        for node, file, where in _entries(yaml.compose(text, Loader=yaml.SafeLoader), path):
            if not file.is_file():
                report.append(f"{show_path(path)}: {where}: no file {show_path(file)}")
                continue
            digest = files.sha256_file(file)
            if node.value != digest:
                edits.append((node.start_mark.index, node.end_mark.index, f'"{digest}"'))
                report.append(f"{show_path(path)}: {where}: {digest[:12]}... ({show_path(file)})")
        for start, end, replacement in sorted(edits, reverse=True):
            text = text[:start] + replacement + text[end:]
        if edits:
            files.write_atomic(path, text)
    return report


def _entries(root: yaml.Node | None, path: Path) -> list[tuple[yaml.ScalarNode, Path, str]]:
    """Every hash of a config file as (its node, the file it is of, its dotted path)."""
    found: list[tuple[yaml.ScalarNode, Path, str]] = []
    kernel = _child(root, "kernel")
    for unit, where in ((kernel, "kernel"), (_child(kernel, "witness"), "kernel.witness")):
        source, digest = _child(unit, "source"), _child(unit, "sha256")
        if isinstance(source, yaml.ScalarNode) and isinstance(digest, yaml.ScalarNode):
            found.append((digest, path.parent / source.value, f"{where}.sha256"))
        others = _child(unit, "files")
        if isinstance(others, yaml.MappingNode):
            for name, value in others.value:
                found.append((value, path.parent / name.value, f"{where}.files.{name.value}"))
    return found


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key:
                return value  # type: ignore[no-any-return]
    return None
