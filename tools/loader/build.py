"""Turn a source into a kernel library: declared files only, one ninja file, cached by content.

    built = build(load_target("cpu"))
    built.library, built.resources, built.cached

The declared files are checked against their hashes and copied into the build's own folder, so what was hashed is what
is compiled; afterwards the dependency files of compiler and assembler may name only them and headers of the system, of
CUDA, and of the header libraries that the config lists. A candidate source takes the place of the config's source,
wherever it lies. Nothing is ever loaded here, and no GPU is needed.

The source is compiled to an object first, which is kept: what it asks of other libraries can be read from it, and not
from the linked library, which holds CUDA's runtime as well (tools/evaluator/static.py).

The cache ($AREAL_TIK_CACHE, or .cache/kernels in the repository) holds one folder for each key; see cache.py. A key
covers contents, flags, compilers, torch's version and, for -march=native, the processor. Builds of one key wait for each
other. With `fresh` a build uses a private folder of its own and trusts nothing that was built before.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.core import files
from tools.core.config import Target
from tools.core.errors import BuildError, UserError
from tools.core.files import REPO_ROOT, show_path
from tools.loader import cache, ninja, ptxas, sources, toolchain
from tools.loader.cache import LIBRARY, OBJECT
from tools.loader.ninja import Step

DRIVER_CALLS = Path(__file__).with_name("driver_calls.cpp")  # linked into every CUDA library
SUFFIXES = {"nvcc": (".cu",), "c++": (".cpp", ".cc", ".cxx")}
_MISSING = re.compile(
    r"fatal error: (?:'([^']+)' file not found|([^:\n]+): No such file)|could not open source file \"([^\"]+)\""
)
_ERROR = re.compile(r"^.*(?:\berror\b|\bfatal\b|undefined reference).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Built:
    """A built library and all that identifies it."""

    library: Path
    object: Path  # the candidate's own part of the library, before linking
    source: Path
    source_sha256: str
    files: dict[str, str]  # every declared file, root-relative -> SHA-256; the candidate under the config's source name
    headers: dict[str, str]  # every other header that was read -> SHA-256
    preprocessed_sha256: str
    library_sha256: str
    object_sha256: str
    key: str
    command: list[str]
    link: list[str]
    toolchain: dict[str, str]
    log: str
    resources: list[dict[str, Any]]  # one a CUDA kernel: kernel, registers, shared_bytes, spill_*_bytes, stack_bytes
    notes: list[str]
    seconds: float
    cached: bool


def check_source(target: Target, source: Path) -> None:
    """UserError for a candidate that is missing, cannot be read, is no plain file, or is not called as the compiler expects."""
    cache.read_regular(source.absolute())
    _check_suffix(target, source.absolute())


def _check_suffix(target: Target, path: Path) -> None:
    compiler = target.config["build"]["compiler"]
    if path.suffix not in SUFFIXES[compiler]:
        raise UserError(f"{show_path(path)}: a source for {compiler} ends in {' or '.join(SUFFIXES[compiler])}")


def build(
    target: Target, source: Path | None = None, *, role: str = "kernel", verbose: bool = False, fresh: bool | Path = False
) -> Built:
    """Build (or find in the cache) the config's source of a role, or a candidate in its place.

    fresh: build anew and trust no cache entry, in a new private folder under the cache, or in the one given (new or
    empty). The caller removes it; nothing else ever reads it.

    Raises UserError for a missing compiler, a changed or missing file, a source that is a symbolic link; BuildError (with
    status and log) for a source that does not compile, takes too long, or reads a file that it does not declare, and for
    a cache entry that does not match its manifest.
    """
    contents = {_place(name): data for name, data in target.verified_files(role, without_source=source is not None).items()}
    configured = next(iter(target.kernel_files(role)))
    source_name = _place(configured)
    path = target.root / configured
    if source is not None:
        path = source.absolute()
        contents[source_name] = cache.read_regular(path)
    _check_suffix(target, path)
    digests = {name: files.sha256_bytes(data) for name, data in contents.items()}
    for name, data in contents.items():
        if word := sources.undeclared_read(data):
            raise _hidden_read(path if name == source_name else target.root / name, word)
    plan = _plan(target, source_name, list(contents))
    identity = {
        "files": digests, "source": source_name, "commands": {name: step.command for name, step in plan.steps.items()},
        "linked": [files.sha256_file(DRIVER_CALLS)], "toolchain": plan.tools.identity, "torch": _package("torch"),
        "cpu": toolchain.cpu_identity() if "-march=native" in plan.steps[OBJECT].command else "",
    }  # fmt: skip
    key = cache.key_of(identity)
    notes = [f"{name} is set and is not passed to the compiler" for name in toolchain.clean_environment()[1]]
    top = files.make_folder(cache.cache_folder())

    def make(folder: Path) -> dict[str, Any]:
        started = time.monotonic()
        facts = _compile(folder, top / f"{key}.log", target, path, source_name, contents, plan)
        return {**facts, "seconds": time.monotonic() - started, "key": key, "identity": identity}

    cached = None
    if fresh:
        entry = _private_folder(top / "fresh" if fresh is True else Path(fresh).absolute(), inside=fresh is True)
        try:
            facts = make(entry)
        except BaseException:
            if fresh is True:
                shutil.rmtree(entry, ignore_errors=True)
            raise
        for name in (LIBRARY, OBJECT):
            (entry / name).chmod(0o444)
    else:
        entry = top / key
        cache.refuse_links(top / "locks", top / "locks" / key)
        with files.file_lock(top / "locks" / key):
            cached = cache.read_entry(entry, identity)
            facts = cached or _new_entry(entry, make)
    built = Built(
        library=entry / LIBRARY, object=entry / OBJECT, source=path, source_sha256=digests[source_name], files=digests,
        notes=notes, cached=cached is not None, command=plan.steps[OBJECT].command, link=plan.steps[LIBRARY].command,
        toolchain=plan.tools.identity, **{name: facts[name] for name in _RECORDED},
    )  # fmt: skip
    if verbose:
        print_built(built)
    return built


_RECORDED = ("headers", "preprocessed_sha256", "library_sha256", "object_sha256", "key", "log", "resources", "seconds")


def unchanged(built: Built) -> None:
    """BuildError (REFUSED) where a built file is no longer what the build produced; asked before every load."""
    for path, digest in ((built.library, built.library_sha256), (built.object, built.object_sha256)):
        if (actual := files.sha256_bytes(cache.read_regular(path))) != digest:
            raise BuildError(f"{show_path(path)}: has changed since it was built (sha256 {actual[:12]}...)", "REFUSED")


def _place(name: str) -> str:
    """Where a declared file lies inside the build's folder: as below the root or the repository."""
    return Path(name).relative_to(REPO_ROOT).as_posix() if Path(name).is_absolute() else name


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


@dataclass(frozen=True)
class _Plan:
    """The toolchain and every step, by output; paths are relative to the build's folder."""

    tools: toolchain.Toolchain
    steps: dict[str, Step]


def _plan(target: Target, source: str, names: list[str]) -> _Plan:
    """How a target's source becomes an object and the object a library."""
    section, contract = target.config["build"], target.config["contract"]
    if flag := toolchain.refused_flag(section["flags"]):
        raise target.error("build.flags", f"{flag} is refused: rounding belongs to the contract (contract.flags)")
    folders = sorted({str(Path("src", name).parent) for name in names})
    common = [f"-std={section['standard']}", *section["flags"], *contract["flags"]]
    flags = [*common, *(f"-I{name}" for name in folders)]
    cuda = section["compiler"] == "nvcc"
    tools = toolchain.nvcc_toolchain() if cuda else toolchain.cxx_toolchain()
    if "cutlass" in section["headers"]:
        cutlass = toolchain.find_cutlass()
        flags += [f"-I{cutlass}", "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1"]  # see driver_calls.cpp
        identity = {**tools.identity, "cutlass": files.sha256_file(cutlass / "cutlass" / "version.h")}
        tools = dataclasses.replace(tools, identity=identity, include_roots=(*tools.include_roots, cutlass))
    program, unit = list(tools.command), str(Path("src", source))
    listing = ["-Xassembler", "--MD=kernel.as.d"] if tools.gnu else []
    if not cuda:
        compile_flags = [*flags, "-fPIC", *listing, "-MD", "-MF", "kernel.d", "-c"]
        link = [*program, *common, "-shared", OBJECT, "-o", LIBRARY]
        return _Plan(tools, {
            "unit.i": Step([*program, *flags, "-E", "-P", "-MD", "-MF", "unit.d", unit, "-o", "unit.i"]),
            OBJECT: Step([*program, *compile_flags, unit, "-o", OBJECT]),
            LIBRARY: Step(link, (OBJECT,)),
        })  # fmt: skip
    for arch in section["arch"]:
        flags += ["-gencode", f"arch={arch}"]
    host = [word for flag in ("-fPIC", *listing) for word in ("-Xcompiler", flag)]
    # Device code stays uncompressed, so that it can be read from the object.
    compile_flags = [*flags, *host, "--no-compress", "--ptxas-options=-v", "-MD", "-MF", "kernel.d", "-c"]
    link = [*program, *common, "-Xcompiler", "-fPIC", "-shared", "-cudart", "static", "--no-device-link"]
    return _Plan(tools, {
        "unit.i": Step([*program, *flags, "-E", "-Xcompiler", "-P", unit, "-o", "unit.i"]),
        OBJECT: Step([*program, *compile_flags, unit, "-o", OBJECT]),
        "driver_calls.o": Step([*program, "-O2", "-Xcompiler", "-fPIC", "-c", DRIVER_CALLS.name, "-o", "driver_calls.o"]),
        LIBRARY: Step([*link, OBJECT, "driver_calls.o", "-o", LIBRARY], (OBJECT, "driver_calls.o")),
    })  # fmt: skip


def _private_folder(path: Path, *, inside: bool) -> Path:
    """A new folder that only this user may enter: inside a path, or the path itself."""
    if inside:
        return Path(tempfile.mkdtemp(prefix="build-", dir=files.make_folder(path)))
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise UserError(f"{show_path(path)}: a fresh build needs a new or empty folder")
    files.make_folder(path).chmod(0o700)
    return path


def _new_entry(entry: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Build in a folder beside a cache entry and move the whole into place. The caller holds the key's lock."""
    work = entry.with_name(f"{entry.name}.build")
    cache.refuse_links(work)
    shutil.rmtree(work, ignore_errors=True)
    try:
        facts = make(files.make_folder(work))
        cache.write_manifest(work, facts)
        shutil.rmtree(entry, ignore_errors=True)
        os.rename(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return facts


def _compile(
    work: Path, kept: Path, target: Target, path: Path, source_name: str, contents: dict[str, bytes], plan: _Plan
) -> dict[str, Any]:
    """Run all steps in an empty folder, which then holds the library and its object alone. A failure's log is kept."""
    for name, data in contents.items():
        files.write_new(work / "src" / name, data)
    files.write_new(work / DRIVER_CALLS.name, files.read_bytes(DRIVER_CALLS))
    timeout = float(target.config["limits"]["build_timeout_s"])
    environment = {**toolchain.clean_environment()[0], "TMPDIR": str(files.make_folder(work / "tmp"))}
    failed = ninja.run(work, plan.steps, timeout, environment)
    log = ninja.read_log(work, (OBJECT, LIBRARY)).replace(f"src/{source_name}", show_path(path)).replace("src/", "")
    if failed is not None:
        _check_headers(work, plan.tools, contents, path, None)  # first, since a compiler's errors may quote such a file
        files.write_atomic(kept, log)
        raise _failure(failed, log, kept, path, timeout)
    unit, library, compiled = (files.read_bytes(work / name) for name in ("unit.i", LIBRARY, OBJECT))
    if word := sources.undeclared_read(unit):
        raise _hidden_read(path, word, log)
    headers = _check_headers(work, plan.tools, contents, path, log)
    for item in work.iterdir():
        if item.name not in (LIBRARY, OBJECT):
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    return {
        "headers": headers, "preprocessed_sha256": files.sha256_bytes(unit), "library_sha256": files.sha256_bytes(library),
        "object_sha256": files.sha256_bytes(compiled), "log": log, "resources": ptxas.resources(log),
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


def _hidden_read(path: Path, word: str, log: str = "") -> BuildError:
    reason = "it asks about a file" if word.startswith("__has") else "it reads a file"
    return BuildError(f"{show_path(path)}: {word} is refused: {reason} that nobody declares", "REFUSED", log)


def _check_headers(
    work: Path, tools: toolchain.Toolchain, contents: dict[str, bytes], path: Path, log: str | None
) -> dict[str, str]:
    """Hashes of all files that the build read beside declared ones; BuildError for one from anywhere else.

    log: of a finished build, whose lists must all be there; None after a failure, where those that are there are read.
    """
    headers: dict[str, str] = {}
    declared = {os.path.normpath(work / "src" / name) for name in contents}
    roots = [*tools.include_roots, *(root.resolve() for root in tools.include_roots)]
    lists = ["kernel.d", "kernel.as.d"] if tools.gnu else ["kernel.d"]
    if log is None:  # C++ has the preprocessor's list then, CUDA may have the compiler's
        lists = [name for name in ("unit.d", "kernel.d") if (work / name).is_file()]
    named = [name for listed in lists for name in ninja.dependencies(work / listed)
             if listed != "kernel.as.d" or _read_by_assembler(work, name)]  # fmt: skip
    for name in named:
        file = os.path.normpath(work / name)
        if file in declared:
            continue
        if not any(Path(file).is_relative_to(root) for root in roots):
            raise _undeclared(path, file, log or "")
        headers[file] = files.sha256_file(Path(file))
    return headers


def _read_by_assembler(work: Path, name: str) -> bool:
    """Whether a name in the assembler's list is a file that it read, beside the compiler's own output.

    The list also holds names that the assembly only mentions (.file); those are relative, and no file here has them.
    """
    file = Path(os.path.normpath(work / name))
    return not file.is_relative_to(work / "tmp") and (file.exists() or not file.is_relative_to(work))


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
