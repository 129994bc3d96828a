"""Run compiler commands through ninja, with a time limit that kills every process it started."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.core import files
from tools.core.errors import UserError

MAX_FILE_BYTES = 1 << 30  # a source of one line can ask for an object of any size


@dataclass(frozen=True)
class Step:
    """One command of a build, and the outputs of other steps that it needs."""

    command: list[str]
    inputs: tuple[str, ...] = ()


def find_ninja() -> str:
    """The ninja of the installed package, or the one on PATH."""
    with contextlib.suppress(ImportError):
        import ninja

        if program := shutil.which("ninja", path=ninja.BIN_DIR):
            return program
    if program := shutil.which("ninja"):
        return program
    raise UserError("no ninja: pip install ninja")


def run(folder: Path, steps: dict[str, Step], timeout: float, environment: dict[str, str]) -> str | None:
    """Run one step for each output in a folder; None, or `timeout`, or a sentence for a failure.

    Each command's words go to `<output>.log`. The console pool keeps commands in ninja's own process group, so that
    one signal reaches all of them.
    """
    lines = ["ninja_required_version = 1.5"]
    for output, step in steps.items():
        text = f"{shlex.join(step.command)} > {shlex.quote(output)}.log 2>&1".replace("$", "$$")
        lines += [f"rule make_{output}", f"  command = {text}", "  pool = console"]
        lines.append(f"build {output}: make_{output} {' '.join(step.inputs)}".rstrip())
    files.write_new(folder / "build.ninja", "\n".join(lines) + "\n")
    try:
        process = subprocess.Popen(
            [find_ninja(), "-C", str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"ninja does not run: {error}") from None
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if code == 0 else f"ninja ended with exit code {code}"


def read_log(folder: Path, outputs: tuple[str, ...]) -> str:
    """What the compiler said while it made some outputs; where only the preprocessor ran, what that said."""
    found = [folder / f"{name}.log" for name in outputs if (folder / f"{name}.log").is_file()]
    if not found and (folder / "unit.i.log").is_file():
        found = [folder / "unit.i.log"]
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found)


def dependencies(path: Path) -> list[str]:
    """The files named by a compiler's or an assembler's dependency file (make syntax), without the output."""
    text = files.read_bytes(path).decode("utf-8", "replace").replace("\\\n", " ")
    _, _, listed = text.partition(": ")
    names = re.findall(r"(?:[^\s\\]|\\.)+", listed)
    return [re.sub(r"\\(.)", r"\1", name).replace("$$", "$") for name in names]
