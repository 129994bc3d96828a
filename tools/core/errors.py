"""Errors that a user can act on, and how commands report them.

A command is `sys.exit(run_command(main))`: a UserError becomes one line `error: ...` on stderr and exit code 2,
Ctrl-C becomes one line and exit code 130. Anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """Something outside the program is wrong; the message is one line and names the offending value."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class BuildError(UserError):
    """A source did not become a library. `status` is the evaluator's word for it, `log` what the compiler said."""

    def __init__(self, message: str, status: str = "COMPILE_ERROR", log: str = "") -> None:
        super().__init__(message)
        self.status = status  # COMPILE_ERROR | REFUSED | TIMEOUT
        self.log = log


class KernelError(UserError):
    """A kernel library returned an error code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class CommandParser(argparse.ArgumentParser):
    """A parser whose usage errors are UserErrors: one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def run_command(main: Callable[[], int]) -> int:
    """Run a command's main function and turn user errors and Ctrl-C into one line and an exit code."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "tools").split(".")[0] == "tools":
            raise
        print(f"error: Python package {error.name!r} is not installed: pip install . brings all of them", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has left; nothing more can be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
