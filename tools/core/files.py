"""Atomic files, content hashes and locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.core.errors import UserError

REPO_ROOT = Path(__file__).resolve().parents[2]


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    return sha256_bytes(read_bytes(path))


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value's canonical form."""
    return sha256_bytes(canonical_json(value))


def show_path(path: Path) -> str:
    """A path as messages print it: relative to the repository where it lies inside, else absolute."""
    try:
        return path.absolute().relative_to(REPO_ROOT).as_posix()
    except ValueError:
        return str(path)


def read_bytes(path: Path) -> bytes:
    """A file's content; UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{show_path(path)}: cannot read: {error.strerror or error}") from None


def make_folder(path: Path) -> Path:
    """Create a folder and its parents; UserError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{show_path(path)}: cannot create the folder: {error.strerror or error}") from None
    return path


def write_new(path: Path, data: bytes | str) -> None:
    """Write a file that must not exist yet: all of it or nothing, also when two writers race.

    The content goes to a temporary name in the same folder and is linked to the final name, which fails where the
    name is taken.
    """
    _write(path, data, replace=False)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace a file's content in one step. Only for files that this project owns (caches, configs it updates)."""
    _write(path, data, replace=True)


def _write(path: Path, data: bytes | str, *, replace: bool) -> None:
    raw = data.encode("utf-8") if isinstance(data, str) else data
    make_folder(path.parent)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UserError(f"{show_path(path.parent)}: cannot write there: {error.strerror or error}") from None
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        mode = path.stat().st_mode & 0o777 if replace and path.exists() else 0o644
        os.chmod(name, mode)
        if replace:
            os.replace(name, path)
        else:
            os.link(name, path)
    except FileExistsError:
        raise UserError(f"{show_path(path)}: exists already and is never overwritten") from None
    except OSError as error:
        raise UserError(f"{show_path(path)}: cannot write: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file (created where missing); other processes and threads wait."""
    make_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{show_path(path)}: cannot lock: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
