"""What the judge does for itself: stay closed to other processes, and end what escaped from a worker's process group.

A process whose parent has died comes back to the judge, its nearest subreaper, whatever session it has moved to. Children
that the judge started itself must live, also those that other code of the same process started. What tells them apart:
a stray is in another session than the judge, is not known, was not there before, and lacks the judge's mark, a random
word in the environment that all children inherit except workers. A process cannot join the judge's session from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping

from tools.evaluator import sandbox_kernel as kernel

MARK = "AREAL_TIK_JUDGE_MARK"
CONFIRM_S = 0.02  # a child of ours that is between fork and exec looks like a stray for less time than this
MAX_ROUNDS = 100
REAP_S = 2.0

_children_before: set[int] = set()


def harden_judge() -> dict[str, str]:
    """Close this process to others of the same user and make it the parent of orphans; measure -> outcome. Repeatable."""
    measures = {"closed to other processes": (kernel.PR_SET_DUMPABLE, 0), "adopts orphans": (kernel.PR_SET_CHILD_SUBREAPER, 1)}
    if sys.platform != "linux":
        return dict.fromkeys(measures, f"not enforced: not on {sys.platform}")
    if MARK not in os.environ or not _children_before:
        _children_before.update({os.getpid(), *_children()})
        os.environ[MARK] = secrets.token_hex(16)
    libc = ctypes.CDLL(None, use_errno=True)
    state = {}
    for measure, (option, value) in measures.items():
        failed = libc.prctl(option, value, 0, 0, 0) != 0
        state[measure] = f"not enforced: {os.strerror(ctypes.get_errno()).lower()}" if failed else "enforced"
    return state


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a worker: without the judge's mark, so that nothing that a worker starts can carry it."""
    return {name: value for name, value in environment.items() if name != MARK}


def kill_strays(known: set[int]) -> list[int]:
    """End processes that workers left behind; their numbers. `known`: every process that the judge wants to keep.

    Does nothing before harden_judge. Call it when a worker has ended and been waited for.
    """
    if sys.platform != "linux" or MARK not in os.environ or not _children_before:
        return []
    killed: list[int] = []
    for _ in range(MAX_ROUNDS):  # the children of a stray come back to the judge, too
        seen = _strays(known)
        if seen:
            time.sleep(CONFIRM_S)
            seen &= _strays(known)
        if not seen:
            break
        for pid, _ in seen:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid, _ in seen:
            _reap(pid)
        killed += sorted(pid for pid, _ in seen)
    return killed


def _reap(pid: int) -> None:
    deadline = time.monotonic() + REAP_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.001)


def _strays(known: set[int]) -> set[tuple[int, int]]:
    """(number, start time) of living children that are strays."""
    own = os.getsid(0)
    mark = f"{MARK}={os.environ[MARK]}".encode()
    return {
        (pid, start)
        for pid, (session, start) in _children().items()
        if session != own and pid not in known and pid not in _children_before and mark not in _environment(pid)
    }


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _children() -> dict[int, tuple[int, int]]:
    """Living children of this process -> (session, start time in clock ticks since boot)."""
    own = os.getpid()
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # after the name in brackets: state, parent, group, session, ..., start time as the twentieth
                fields = file.read().rpartition(b")")[2].split()
                if int(fields[1]) == own and fields[0] not in (b"Z", b"X"):
                    found[int(name)] = (int(fields[3]), int(fields[19]))
    return found
