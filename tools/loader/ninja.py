"""Run compiler commands through ninja, with a time limit that kills every process it started."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from tools.core import files
from tools.core.errors import UserError


def find_ninja() -> str:
    """The ninja of the installed package, or the one on PATH."""
    with contextlib.suppress(ImportError):
        import ninja

        if program := shutil.which("ninja", path=ninja.BIN_DIR):
            return program
    if program := shutil.which("ninja"):
        return program
    raise UserError("no ninja: pip install ninja")


def run(folder: Path, commands: dict[str, list[str]], timeout: float, environment: dict[str, str]) -> str | None:
    """Run one command for each output in a folder; None, or `timeout`, or a sentence for a failure.

    Each command's words go to `<output>.log`. The console pool keeps commands in ninja's own process group, so that
    one signal reaches all of them.
    """
    lines = ["ninja_required_version = 1.5"]
    for output, command in commands.items():
        text = f"{shlex.join(command)} > {shlex.quote(output)}.log 2>&1".replace("$", "$$")
        lines += [f"rule make_{output}", f"  command = {text}", "  pool = console", f"build {output}: make_{output}"]
    files.write_new(folder / "build.ninja", "\n".join(lines) + "\n")
    try:
        process = subprocess.Popen(
            [find_ninja(), "-C", str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"ninja does not run: {error}") from None
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if code == 0 else f"ninja ended with exit code {code}"


def read_log(folder: Path) -> str:
    """What the compiler said; where only the preprocessor ran, what that said."""
    for name in ("kernel.so.log", "unit.i.log"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8", errors="replace")
    return ""


def dependencies(path: Path) -> list[str]:
    """The files named by a compiler's dependency file (make syntax), without the output."""
    text = files.read_bytes(path).decode("utf-8", "replace").replace("\\\n", " ")
    _, _, listed = text.partition(": ")
    names = re.findall(r"(?:[^\s\\]|\\.)+", listed)
    return [re.sub(r"\\(.)", r"\1", name).replace("$$", "$") for name in names]
