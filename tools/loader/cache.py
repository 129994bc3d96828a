"""The cache of built libraries: one folder a key, holding the library, its object and a manifest.

An entry is complete or absent: it is made elsewhere and renamed into place. One that does not match what its manifest
and its key say, or that holds a symbolic link, was changed by somebody else; it is refused by name and never built
again silently. Headers lie outside the cache and may change: then the entry is out of date, and is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from tools.core import files
from tools.core.errors import BuildError, UserError
from tools.core.files import REPO_ROOT, show_path

FORMAT = 2  # of an entry; part of every key
LIBRARY, OBJECT, MANIFEST = "kernel.so", "kernel.o", "manifest.json"


def cache_folder() -> Path:
    """Where built libraries are kept."""
    return Path(os.environ.get("AREAL_TIK_CACHE") or REPO_ROOT / ".cache" / "kernels").absolute()


def key_of(identity: dict[str, Any]) -> str:
    """The name of the entry for everything that decides what a build produces."""
    return files.sha256_json({"format": FORMAT, **identity})[:32]


def read_regular(path: Path) -> bytes:
    """A file's content; UserError for a symbolic link, a folder, a pipe or a device, which could change under us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UserError(f"{show_path(path)}: is a symbolic link (to {os.readlink(path)}); name the file itself") from None
        raise UserError(f"{show_path(path)}: cannot read: {error.strerror or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{show_path(path)}: cannot read: not a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


def refuse_links(*paths: Path) -> None:
    """BuildError where one of the cache's own files or folders is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise _refused(path, f"is a symbolic link (to {os.readlink(path)})", path)


def read_entry(entry: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What an entry's manifest states; None where there is no entry, or where a header that it read has changed.

    BuildError (REFUSED) names the first file that does not match.
    """
    if not os.path.lexists(entry):
        return None
    refuse_links(entry, *(entry / name for name in (MANIFEST, LIBRARY, OBJECT)))
    manifest = entry / MANIFEST
    try:
        facts: dict[str, Any] = json.loads(_read(manifest, entry))
        seal = facts.pop("seal")
        if seal != files.sha256_json(facts):
            raise _refused(manifest, "has been changed: its content does not match its own hash", entry)
        if facts["identity"] != identity or facts["key"] != entry.name:
            raise _refused(manifest, "belongs to another build: it does not match its key", entry)
        digests = {LIBRARY: facts["library_sha256"], OBJECT: facts["object_sha256"]}
        headers = dict(facts["headers"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _refused(manifest, "is no manifest", entry) from None
    for name, digest in digests.items():
        if (actual := files.sha256_bytes(_read(entry / name, entry))) != digest:
            raise _refused(entry / name, f"has sha256 {actual[:12]}..., its manifest states {str(digest)[:12]}...", entry)
    with contextlib.suppress(OSError):
        if all(files.sha256_bytes(Path(name).read_bytes()) == digest for name, digest in headers.items()):
            return facts
    return None


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest of a folder that is about to become an entry."""
    sealed = {**facts, "seal": files.sha256_json(facts)}
    files.write_new(folder / MANIFEST, json.dumps(sealed, indent=1, sort_keys=True))


def _read(path: Path, entry: Path) -> bytes:
    try:
        return read_regular(path)
    except UserError as error:
        raise _refused(path, str(error).partition(": ")[2], entry) from None


def _refused(path: Path, what: str, entry: Path) -> BuildError:
    return BuildError(f"{show_path(path)}: {what}: the build cache is refused; delete {show_path(entry)}", "REFUSED")
