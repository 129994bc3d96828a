"""Reading YAML files that extend one another, with the file that stated each value.

Knows nothing of what a config means, except that `kernel` and `kernel.witness` name files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.core import files
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, show_path

Path_ = tuple[str, ...]
MAX_DEPTH = 8  # files in one chain of `extends`


@dataclass(frozen=True)
class Merged:
    """The resolved value of a chain of files, and the file that stated each part of it."""

    value: dict[str, Any]
    origins: dict[Path_, Path]
    chain: tuple[Path, ...]  # the file itself first, then what it extends
    root: Path  # what its paths of files are relative to

    def origin(self, where: Path_) -> Path:
        """The file that stated the value at a path, or the nearest mapping around it."""
        for length in range(len(where), 0, -1):
            if where[:length] in self.origins:
                return self.origins[where[:length]]
        return self.chain[0]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key instead of keeping the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(f"line {line}: key {key!r} is not text")
            if key in seen:
                raise UserError(f"line {line}: key {key!r} is stated twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """One YAML file, which must hold a mapping."""
    data = files.read_bytes(path)
    try:
        value = yaml.load(data, Loader=_Loader)
    except UserError as error:
        raise UserError(f"{show_path(path)}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise UserError(f"{show_path(path)}:{line} not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{show_path(path)}: the file: {value!r} is not a mapping")
    return value


def read_merged(path: Path) -> Merged:
    """A file with everything it extends.

    Paths of files become relative to the root: the repository, or for a config elsewhere the folder that holds it and
    what it extends. Such a config may also name files of the repository; those become absolute.
    """
    chain: list[Path] = []
    layers: list[dict[str, Any]] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in {known.resolve() for known in chain}:
            raise UserError(f"{show_path(path)}: extends: {show_path(current)} extends itself")
        if len(chain) == MAX_DEPTH:
            raise UserError(f"{show_path(path)}: extends: a chain of more than {MAX_DEPTH} files")
        layer = read_yaml(current)
        chain.append(current)
        layers.append(layer)
        parent = layer.pop("extends", None)
        if parent is not None and not isinstance(parent, str):
            raise UserError(f"{show_path(current)}: extends: {parent!r} is not text")
        if parent is not None and not (current.parent / parent).is_file():
            raise UserError(f"{show_path(current)}: extends: no file {parent}")
        current = Path(os.path.normpath(current.parent / parent)) if parent is not None else None
    value: dict[str, Any] = {}
    origins: dict[Path_, Path] = {}
    outside = [str(file.parent) for file in chain if not file.is_relative_to(REPO_ROOT)]
    root = REPO_ROOT if path.is_relative_to(REPO_ROOT) else Path(os.path.commonpath(outside))
    for file, layer in zip(reversed(chain), reversed(layers), strict=True):
        _rebase_paths(layer, file, root)
        _merge(value, layer, (), file, origins)
    return Merged(value, origins, tuple(chain), root)


def _merge(base: dict[str, Any], layer: dict[str, Any], where: Path_, file: Path, origins: dict[Path_, Path]) -> None:
    """Merge a layer over a base in place: mappings merge, anything else replaces, null removes."""
    for key, item in layer.items():
        here = (*where, key)
        if item is None and key in base:
            del base[key]
        elif isinstance(item, dict):
            if not isinstance(base.get(key), dict):
                base[key] = {}
                origins[here] = file
            _merge(base[key], item, here, file, origins)
        else:
            base[key] = item
            origins[here] = file


def _rebase_paths(layer: dict[str, Any], file: Path, root: Path) -> None:
    """Rewrite the paths of kernel and kernel.witness (source, keys of files) from file-relative to root-relative."""
    kernel = layer.get("kernel")
    units = [("kernel", kernel)]
    if isinstance(kernel, dict):
        units.append(("kernel.witness", kernel.get("witness")))
    for where, unit in units:
        if not isinstance(unit, dict):
            continue
        if isinstance(unit.get("source"), str):
            unit["source"] = _rebase(unit["source"], file, root, f"{where}.source")
        if isinstance(unit.get("files"), dict):
            unit["files"] = {_rebase(name, file, root, f"{where}.files"): digest for name, digest in unit["files"].items()}


def _rebase(name: str, file: Path, root: Path, where: str) -> str:
    path = Path(os.path.normpath(file.parent / name))
    if path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    if path.is_relative_to(REPO_ROOT):
        return path.as_posix()
    raise UserError(f"{show_path(file)}: {where}: {name!r} lies outside {root}")
