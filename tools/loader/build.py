"""Turn a source into a kernel library: declared files only, one ninja file, cached by content.

    built = build(load_target("cpu"))
    built.library, built.resources, built.cached

The declared files are checked against their hashes and copied into the build's own folder, so what was hashed is what
is compiled; afterwards the compiler's dependency file may name only them and headers of the system, of CUDA, and of
the header libraries that the config lists. A candidate source takes the place of the config's source, wherever it lies.
Nothing is ever loaded here, and no GPU is needed.

The cache ($AREAL_TIK_CACHE, or .cache/kernels in the repository) holds one folder for each key. A key covers contents,
flags, compilers, torch's version and, for -march=native, the processor. A cached library is used only if its own hash
and those of all headers it read are as recorded; else it is built again. Builds of one key wait for each other.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.core import files
from tools.core.config import Target
from tools.core.errors import BuildError, UserError
from tools.core.files import REPO_ROOT, show_path
from tools.loader import ninja, ptxas, toolchain

FORMAT = 1  # of the cache; part of every key
SUFFIXES = {"nvcc": (".cu",), "c++": (".cpp", ".cc", ".cxx")}
_MISSING = re.compile(
    r"fatal error: (?:'([^']+)' file not found|([^:\n]+): No such file)|could not open source file \"([^\"]+)\""
)
_ERROR = re.compile(r"^.*(?:\berror\b|\bfatal\b|undefined reference).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Built:
    """A built library and all that identifies it."""

    library: Path
    source: Path
    source_sha256: str
    files: dict[str, str]  # every declared file, root-relative -> SHA-256; the candidate under the config's source name
    headers: dict[str, str]  # every other header that was read -> SHA-256
    preprocessed_sha256: str
    library_sha256: str
    key: str
    command: list[str]
    toolchain: dict[str, str]
    log: str
    resources: list[dict[str, Any]]  # one a CUDA kernel: kernel, registers, shared_bytes, spill_*_bytes, stack_bytes
    notes: list[str]
    seconds: float
    cached: bool


def cache_folder() -> Path:
    """Where built libraries are kept."""
    return Path(os.environ.get("AREAL_TIK_CACHE") or REPO_ROOT / ".cache" / "kernels").absolute()


def build(target: Target, source: Path | None = None, *, role: str = "kernel", verbose: bool = False) -> Built:
    """Build (or find in the cache) the config's source of a role, or a candidate in its place.

    Raises UserError for a missing compiler, a changed or missing file; BuildError (with status and log) for a source
    that does not compile, takes too long, or reads a file that it does not declare.
    """
    contents = {_place(name): data for name, data in target.verified_files(role, without_source=source is not None).items()}
    configured = next(iter(target.kernel_files(role)))
    source_name = _place(configured)
    path = target.root / configured
    if source is not None:
        path = source.absolute()
        contents[source_name] = files.read_bytes(path)
    compiler = target.config["build"]["compiler"]
    if path.suffix not in SUFFIXES[compiler]:
        raise UserError(f"{show_path(path)}: a source for {compiler} ends in {' or '.join(SUFFIXES[compiler])}")
    digests = {name: files.sha256_bytes(data) for name, data in contents.items()}
    tools, command, preprocess = _commands(target, source_name, list(contents))
    identity = {
        "format": FORMAT, "files": digests, "source": source_name, "command": command, "toolchain": tools.identity,
        "torch": _package("torch"), "cpu": toolchain.cpu_identity() if "-march=native" in command else "",
    }  # fmt: skip
    key = files.sha256_json(identity)[:32]
    cache = files.make_folder(cache_folder())
    notes = [f"{name} is set and is not passed to the compiler" for name in toolchain.clean_environment()[1]]
    entry = cache / key
    with files.file_lock(cache / "locks" / key):
        cached = _read_entry(entry)
        if cached is None:
            started = time.monotonic()
            facts = _build_entry(entry, target, path, source_name, contents, tools, command, preprocess)
            facts |= {"seconds": time.monotonic() - started, "key": key, "command": command, "toolchain": tools.identity}
            files.write_atomic(entry / "manifest.json", json.dumps(facts, indent=1, sort_keys=True))
        facts = cached or facts
    built = Built(
        library=entry / "kernel.so", source=path, source_sha256=digests[source_name], files=digests, notes=notes,
        cached=cached is not None, **{name: facts[name] for name in _RECORDED},
    )  # fmt: skip
    if verbose:
        print_built(built)
    return built


def _place(name: str) -> str:
    """Where a declared file lies inside the build's folder: as below the root or the repository."""
    return Path(name).relative_to(REPO_ROOT).as_posix() if Path(name).is_absolute() else name


_RECORDED = ("headers", "preprocessed_sha256", "library_sha256", "key", "command", "toolchain", "log", "resources", "seconds")


def print_built(built: Built) -> None:
    """What a person wants to know of a build: where it is, how it came to be, what each CUDA kernel uses."""
    print(f"{show_path(built.source)}  sha256 {built.source_sha256[:16]}")
    print(f"library   {show_path(built.library)}  ({'cached' if built.cached else f'built in {built.seconds:.1f} s'})")
    print(f"compiler  {built.toolchain['compiler']}")
    print(f"command   {shlex.join(built.command)}")
    for note in built.notes:
        print(f"note      {note}")
    if built.resources:
        print(f"{'registers':>9} {'shared B':>9} {'spill B':>8} {'stack B':>8}  kernel")
    for use in built.resources:
        spills = use["spill_store_bytes"] + use["spill_load_bytes"]
        name = f"{use['kernel']} [{use['arch']}]"
        print(f"{use['registers']:>9} {use['shared_bytes']:>9} {spills:>8} {use['stack_bytes']:>8}  {name}")


def _commands(target: Target, source: str, names: list[str]) -> tuple[toolchain.Toolchain, list[str], list[str]]:
    """The toolchain, the compile command and the preprocess command; paths relative to the build's folder."""
    section, contract = target.config["build"], target.config["contract"]
    if flag := toolchain.refused_flag(section["flags"]):
        raise target.error("build.flags", f"{flag} is refused: rounding belongs to the contract (contract.flags)")
    folders = sorted({str(Path("src", name).parent) for name in names})
    flags = [f"-std={section['standard']}", *section["flags"], *contract["flags"], *(f"-I{name}" for name in folders)]
    cuda = section["compiler"] == "nvcc"
    tools = toolchain.nvcc_toolchain() if cuda else toolchain.cxx_toolchain()
    if "cutlass" in section["headers"]:
        cutlass = toolchain.find_cutlass()
        flags.append(f"-I{cutlass}")
        identity = {**tools.identity, "cutlass": files.sha256_file(cutlass / "cutlass" / "version.h")}
        tools = dataclasses.replace(tools, identity=identity, include_roots=(*tools.include_roots, cutlass))
    unit = str(Path("src", source))
    if cuda:
        for arch in section["arch"]:
            flags += ["-gencode", f"arch={arch}"]
        shared = ["-Xcompiler", "-fPIC", "-shared", "-cudart", "static", "--ptxas-options=-v"]
        preprocess = [*tools.command, *flags, "-E", "-Xcompiler", "-P", unit, "-o", "unit.i"]
    else:
        shared = ["-fPIC", "-shared"]
        preprocess = [*tools.command, *flags, "-E", "-P", unit, "-o", "unit.i"]
    return tools, [*tools.command, *flags, *shared, "-MD", "-MF", "kernel.d", unit, "-o", "kernel.so"], preprocess


def _read_entry(entry: Path) -> dict[str, Any] | None:
    """A cache entry's manifest, if the library and every header it read are as recorded."""
    try:
        facts = json.loads((entry / "manifest.json").read_bytes())
        recorded = {str(entry / "kernel.so"): facts["library_sha256"], **facts["headers"]}
        intact = all(files.sha256_bytes(Path(name).read_bytes()) == digest for name, digest in recorded.items())
        return facts if intact and all(name in facts for name in _RECORDED) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build_entry(
    entry: Path, target: Target, path: Path, source_name: str, contents: dict[str, bytes], tools: toolchain.Toolchain,
    command: list[str], preprocess: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Build in a folder of its own and move the result into place. The caller holds the key's lock."""
    work = entry.with_name(f"{entry.name}.build")
    shutil.rmtree(work, ignore_errors=True)
    try:
        for name, data in contents.items():
            files.write_new(work / "src" / name, data)
        timeout = float(target.config["limits"]["build_timeout_s"])
        failed = ninja.run(work, {"unit.i": preprocess, "kernel.so": command}, timeout, toolchain.clean_environment()[0])
        log = ninja.read_log(work).replace(f"src/{source_name}", show_path(path)).replace("src/", "")
        if failed is not None:
            kept = entry.with_suffix(".log")
            files.write_atomic(kept, log)
            raise _failure(failed, log, kept, path, timeout)
        headers = _check_headers(work, tools, contents, path, log)
        library = files.read_bytes(work / "kernel.so")
        unit = files.read_bytes(work / "unit.i")
        if b"incbin" in re.sub(rb'"\s*"', b"", unit):
            raise BuildError(f"{show_path(path)}: incbin is refused: it reads a file that nobody declares", "REFUSED", log)
        shutil.rmtree(work / "src")
        for name in ("unit.i", "unit.i.log", "kernel.d", "build.ninja", ".ninja_log"):
            (work / name).unlink(missing_ok=True)
        shutil.rmtree(entry, ignore_errors=True)
        os.rename(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {
        "headers": headers, "preprocessed_sha256": files.sha256_bytes(unit), "library_sha256": files.sha256_bytes(library),
        "log": log, "resources": ptxas.resources(log),
    }  # fmt: skip


def _failure(failed: str, log: str, kept: Path, path: Path, timeout: float) -> BuildError:
    """The error of a failed build: what was refused, or the compiler's first error line."""
    if failed == "timeout":
        return BuildError(f"{show_path(path)}: the compiler took more than {timeout:g} s", "TIMEOUT", log)
    if missing := _MISSING.search(log):
        name = next(group for group in missing.groups() if group)
        return _undeclared(path, name, log)
    first = _ERROR.search(log)
    words = first.group(0) if first else next((line for line in log.splitlines() if line.strip()), failed)
    return BuildError(f"{show_path(path)}: does not compile: {words.strip()[:300]} (log: {show_path(kept)})", log=log)


def _undeclared(path: Path, name: str, log: str) -> BuildError:
    return BuildError(f"{show_path(path)}: includes {name}, which the config does not declare (kernel.files)", "REFUSED", log)


def _check_headers(work: Path, tools: toolchain.Toolchain, contents: dict[str, bytes], path: Path, log: str) -> dict[str, str]:
    """Hashes of all headers that the build read beside declared files; BuildError for one from anywhere else."""
    headers: dict[str, str] = {}
    declared = {os.path.normpath(work / "src" / name) for name in contents}
    roots = [*tools.include_roots, *(root.resolve() for root in tools.include_roots)]
    for name in ninja.dependencies(work / "kernel.d"):
        file = os.path.normpath(work / name)
        if file in declared:
            continue
        if not any(Path(file).is_relative_to(root) for root in roots):
            raise _undeclared(path, file, log)
        headers[file] = files.sha256_file(Path(file))
    return headers


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
