"""Whether an edit changed what an entry point executes: compared in compiled code, entry point by entry point.

    before, after = fingerprints(target, parent), fingerprints(target, child)
    same(before["decode"], after["decode"])

For each of prefill, extend and decode the source is compiled once more as if it were the only function that anybody
calls. Then constants reach the shared code (`if (entry == DECODE)` in a common function is no part of prefill), and what
remains is exactly what that entry point can execute: host code, its constants and tables, and on a GPU the machine code
of every kernel that it can launch. Equal code means that it does the same. Unequal code can also come from a compiler that
allots registers otherwise, so host code is compiled in two ways, and one that agrees is enough. Where neither does, the
claim is refused and the action is joint, never the other way round.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.core.config import Target
from tools.core.errors import BuildError, UserError
from tools.core.files import REPO_ROOT, read_bytes, sha256_json, write_atomic, write_new
from tools.loader import cache, toolchain
from tools.loader.build import Built, build
from tools.loader.cubin import device_code, plain
from tools.loader.elf import Elf
from tools.search.assembly import Undecided, Unit

__all__ = ["ENTRIES", "Undecided", "fingerprints", "same"]

FORMAT = 5  # of a fingerprint; part of its key
ENTRIES = ("prefill", "extend", "decode")
ALONE = 'extern "C" __attribute__((externally_visible)) decltype({name}) {name};\n'
# Ways to compile host code: the second keeps fewer traces of what was simplified on the way. Functions that are not inlined
# are not looked through for what they do: one that only prefetches would count as doing nothing, and vanish.
WAYS = (("-fno-early-inlining",), ("-Os",))
OPAQUE = ("-fno-ipa-pure-const", "-fno-ipa-modref")
_REGISTRATION = re.compile(r"(_ZL\d+)?__sti____cudaRegisterAllv?")


def same(before: list[str], after: list[str]) -> bool:
    """Whether two fingerprints of an entry point show the same code."""
    return any(one == other for one, other in zip(before, after, strict=True))


def fingerprints(target: Target, source: bytes) -> dict[str, list[str]]:
    """Entry point -> hashes of all that it can execute, one for each way to compile it.

    BuildError where the source does not compile; Undecided where that cannot be told: no GCC, no CUDA compiler, or
    inline assembly that defines symbols. A target's headers are part of what is compiled.
    """
    with tempfile.TemporaryDirectory(prefix="areal-tik-code-") as name:
        folder = Path(name)
        path = folder / f"source{target.source().suffix}"
        write_new(path, source)
        try:
            built = build(target, path)
        except BuildError:
            raise
        except UserError as problem:
            raise Undecided(str(problem)) from None
        if "Free Software" not in (built.toolchain.get("host_version") or built.toolchain["version"]):
            raise Undecided("it needs GCC, whose whole-program mode leaves one entry point at a time")
        known = cache.cache_folder() / "entry-code" / f"{sha256_json([FORMAT, built.key])}.json"
        if not known.exists():
            write_atomic(known, json.dumps(_compute(target, built, folder)))
        found: dict[str, list[str]] = json.loads(read_bytes(known))
        return found


def _compute(target: Target, built: Built, folder: Path) -> dict[str, list[str]]:
    """Compile the host code of every entry point by itself, and add the device code that it launches."""
    cuda = target.config["target"]["device"] == "cuda"
    timeout = float(target.config["limits"]["build_timeout_s"])
    run = functools.partial(_run, folder=folder, timeout=timeout)
    start, flags = _flags(target, built, folder)
    program = built.toolchain["host"].split() if cuda else start
    if cuda:
        # PTX in place of machine code: the host's part does not depend on it, and it takes seconds
        ptx = [f"arch={arch},code={arch}" if (arch := _arch(word)) else word for word in flags]
        run([*start, *ptx, "--cuda", "source.cu", "-o", "unit.ii"])
        flags = [word for word in flags if word.startswith(("-std=", "-O"))]
    else:
        run([*start, *flags, "-E", "-P", next(folder.glob("source.*")).name, "-o", "unit.ii"])
    unit = (folder / "unit.ii").read_text(encoding="utf-8", errors="surrogateescape")
    kernels = _kernels(built) if cuda else {}
    found: dict[str, list[str]] = {}
    for entry in ENTRIES:
        name = f"unified_{entry}"
        (folder / "alone.ii").write_text(f"{unit}\n{ALONE.format(name=name)}", encoding="utf-8", errors="surrogateescape")
        for way in WAYS:
            alone = [*way, *OPAQUE, "-fPIC", "-fwhole-program", "-fno-section-anchors", "-g0", "-S", "-x", "c++-cpp-output"]
            run([*program, *flags, *alone, "alone.ii", "-o", "alone.s"])
            code = Unit((folder / "alone.s").read_text(encoding="utf-8", errors="replace"))
            # What runs at load time runs before every entry point; not the list of kernels, which names those of others too.
            starts = (start for start in code.initialisers if not _REGISTRATION.fullmatch(start))
            digest, functions = code.reached(name, *starts)
            found.setdefault(entry, []).append(sha256_json([digest, _launched(functions, kernels) if cuda else []]))
    return found


def _arch(word: str) -> str | None:
    """The virtual architecture of one -gencode word."""
    found = re.match(r"arch=(compute_\w+),", word)
    return found[1] if found else None


def _flags(target: Target, built: Built, folder: Path) -> tuple[list[str], list[str]]:
    """The build's compiler and its own flags, with the folders of a copy of the declared headers."""
    start = next(at for at, word in enumerate(built.command) if word.startswith("-std="))
    end = max(at for at, word in enumerate(built.command) if word == "-fPIC")
    words = built.command[start : end - 1 if built.command[end - 1] == "-Xcompiler" else end]
    for name, data in target.verified_files(without_source=True).items():
        place = Path(name).relative_to(REPO_ROOT) if Path(name).is_absolute() else name
        write_new(folder / "src" / place, data)
    return built.command[:start], [f"-I{folder / word[2:]}" if word.startswith("-Isrc") else word for word in words]


def _kernels(built: Built) -> dict[str, list[str]]:
    """Name of a kernel -> the hash of its machine code for each architecture."""
    if not (shutil.which("cu++filt") or shutil.which("c++filt")):
        raise Undecided("it needs cu++filt or c++filt, to find the kernels that an entry point launches")
    found: dict[str, list[str]] = {}
    for kernel in device_code(Elf(cache.read_regular(built.object), built.object.name)).kernels:
        found.setdefault(kernel.name, []).append(f"{kernel.arch} {kernel.sha256}")
    return found


def _launched(functions: list[str], kernels: dict[str, list[str]]) -> list[list[str]]:
    """The machine code of the kernels whose host functions are reached, in the order in which they are."""
    names = [plain(name) for name in toolchain.demangle(functions)]
    found = [sorted(kernels[name]) for name in names if name in kernels]
    if not found:
        raise Undecided("an entry point launches no kernel that could be found")
    return found


def _run(command: Sequence[str], *, folder: Path, timeout: float) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=timeout,
            stdin=subprocess.DEVNULL, env=toolchain.clean_environment()[0], check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise Undecided(f"{command[0]} does not run: {type(problem).__name__}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise Undecided(f"it does not compile with one entry point at a time: {first}")
