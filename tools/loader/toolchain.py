"""Compilers: where they are, what identifies them, which headers they may read, which flags are refused."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.core import files
from tools.core.errors import UserError

# Variables through which an environment would add flags or headers to a build. They are removed for every compiler.
CLEANED = (
    "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "CCC_OVERRIDE_OPTIONS", "SUNPRO_DEPENDENCIES",
    "DEPENDENCIES_OUTPUT", "NINJA_STATUS", "MAKEFLAGS",
)  # fmt: skip

# Flags that move rounding, and flags that read more flags from a file.
_ROUNDING = re.compile(
    r"-Ofast|-ffast-math|-f(no-)?(unsafe-math-optimizations|associative-math|reciprocal-math|finite-math-only|"
    r"signed-zeros|rounding-math|single-precision-constant|cx-limited-range|fast-math)|-ffp-(contract|model|eval-method)\b.*|"
    r"-fexcess-precision\b.*|-mfpmath\b.*|-m(no-)?recip\b.*|-mdaz-ftz|--?use_fast_math|--?(ftz|fmad|prec-div|prec-sqrt)\b.*"
)
_RESPONSE = re.compile(r"@.*|--?options-file\b.*|-optf\b.*|-f(no-)?plugin\b.*|-specs\b.*|--?compiler-bindir\b.*|-ccbin\b.*")


@dataclass(frozen=True)
class Toolchain:
    """A compiler with everything that identifies it and the folders of headers that belong to it."""

    command: tuple[str, ...]  # program, and fixed arguments where $CXX has some
    identity: dict[str, str]  # all that may change what it produces
    include_roots: tuple[Path, ...]

    @property
    def gnu(self) -> bool:
        """Whether the host compiler is GCC, whose assembler can list what it reads."""
        text = self.identity.get("host_version") or self.identity["version"]
        return "Free Software Foundation" in text and "clang" not in text


def refused_flag(flags: list[str]) -> str | None:
    """The first flag that moves rounding or hides other flags, also inside -Xcompiler and -Xptxas lists."""
    for flag in flags:
        for part in re.split(r"[,\s]|(?<=^-Xcompiler)=|(?<=^-Xptxas)=|(?<=^--compiler-options)=", flag):
            if _ROUNDING.fullmatch(part) or _RESPONSE.fullmatch(part):
                return flag
    return None


def clean_environment() -> tuple[dict[str, str], list[str]]:
    """The environment for compilers, and the names of variables that were set and are not passed on."""
    environment = {key: value for key, value in os.environ.items() if key not in CLEANED}
    environment["LC_ALL"] = "C"
    return environment, [key for key in CLEANED if os.environ.get(key)]


def find_cxx() -> tuple[str, ...]:
    """$CXX, c++, g++ or clang++."""
    if stated := os.environ.get("CXX"):
        command = shlex.split(stated)
        program = shutil.which(command[0]) if command else None
        if program is None:
            raise UserError(f"CXX={stated!r} names no program")
        if flag := refused_flag(command[1:]):
            raise UserError(f"CXX={stated!r}: {flag} is refused: it moves rounding")
        return (program, *command[1:])
    for name in ("c++", "g++", "clang++"):
        if program := shutil.which(name):
            return (program,)
    raise UserError("no C++ compiler: set CXX, or install c++, g++ or clang++")


def find_nvcc() -> str:
    """nvcc of CUDA_HOME, of PATH, or of /usr/local/cuda."""
    if home := os.environ.get("CUDA_HOME"):
        if program := shutil.which(str(Path(home) / "bin" / "nvcc")):
            return program
        raise UserError(f"CUDA_HOME={home!r} has no bin/nvcc")
    program = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if program is None:
        raise UserError("no CUDA compiler: set CUDA_HOME, or put nvcc on PATH, or install it under /usr/local/cuda")
    return program


def find_cutlass() -> Path:
    """The include folder of CUTLASS: CUTLASS_INCLUDE_DIR, or the installed nvidia-cutlass package."""
    if stated := os.environ.get("CUTLASS_INCLUDE_DIR"):
        folder = Path(stated)
        if not (folder / "cutlass" / "cutlass.h").is_file():
            raise UserError(f"CUTLASS_INCLUDE_DIR={stated!r} has no cutlass/cutlass.h")
        return folder.resolve()
    import importlib.metadata

    try:
        listed = importlib.metadata.files("nvidia-cutlass") or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    for entry in listed:
        if entry.as_posix().endswith("include/cutlass/cutlass.h"):
            return Path(str(entry.locate())).resolve().parents[1]
    raise UserError("the source needs CUTLASS headers: set CUTLASS_INCLUDE_DIR, or pip install nvidia-cutlass")


def cxx_toolchain() -> Toolchain:
    """The system C++ compiler."""
    command = find_cxx()
    return Toolchain(command, {"compiler": " ".join(command), **_version(command)}, _system_roots(command))


def nvcc_toolchain() -> Toolchain:
    """nvcc and the host compiler that it is told to use."""
    nvcc = find_nvcc()
    host = (os.environ["NVCC_CCBIN"],) if os.environ.get("NVCC_CCBIN") else find_cxx()[:1]
    top = Path(nvcc).resolve().parents[1]
    dry = _output((nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull))
    roots = [top / "include", top / "targets"]
    variables: dict[str, str] = {}
    for name, value in re.findall(r"^#\$ (\w+)=(.*)$", dry, re.MULTILINE):
        variables[name] = value
    for folder in re.findall(r'"(?:-I)?(/[^"]+)"', variables.get("INCLUDES", "") + variables.get("SYSTEM_INCLUDES", "")):
        roots.append(Path(os.path.normpath(folder)))
    identity = {"compiler": nvcc, **_version((nvcc,)), "host": host[0]}
    identity.update({f"host_{key}": value for key, value in _version(host).items()})
    return Toolchain((nvcc, "-ccbin", host[0]), identity, (*roots, *_system_roots(host)))


@functools.cache
def _version(command: tuple[str, ...]) -> dict[str, str]:
    """A compiler's own words on its version, and its file's size and time (a replaced program gets a new identity)."""
    text = _output((*command, "--version"))
    stat = Path(command[0]).resolve().stat()
    return {"version": text.strip(), "program": f"{stat.st_size}:{stat.st_mtime_ns}", "libc": "-".join(platform.libc_ver())}


@functools.cache
def _system_roots(command: tuple[str, ...]) -> tuple[Path, ...]:
    """The folders that a C++ compiler searches for <...> includes by itself."""
    text = _output((*command, "-E", "-v", "-x", "c++", os.devnull))
    listed = re.search(r"#include <\.\.\.> search starts here:\n(.*?)\nEnd of search list", text, re.DOTALL)
    lines = listed.group(1).splitlines() if listed else []
    return tuple(Path(os.path.normpath(line.strip().removesuffix(" (framework directory)"))) for line in lines)


def _output(command: tuple[str, ...]) -> str:
    """Both output streams of a short compiler call; an empty text where it cannot run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60,
            stdin=subprocess.DEVNULL, env=clean_environment()[0], check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]}: does not run: {error}") from None
    return done.stdout


@functools.cache
def cpu_identity() -> str:
    """What -march=native depends on: the processor's model and feature flags, as a hash."""
    facts = {platform.machine(), platform.processor()}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part", "CPU implementer"):
                facts.add(line)
    except OSError:
        facts.add(" ".join(platform.uname()))
    return files.sha256_json(sorted(facts))


def demangle(names: list[str]) -> list[str]:
    """C++ names as written in the source, where cu++filt or c++filt is installed."""
    program = shutil.which("cu++filt") or shutil.which("c++filt")
    if not names or program is None:
        return names
    try:
        done = subprocess.run([program], input="\n".join(names), capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeError):
        return names
    lines = done.stdout.splitlines()
    return lines if done.returncode == 0 and len(lines) == len(names) else names
