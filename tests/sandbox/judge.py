"""What the judge does for itself: python judge.py dumpable|strays. Prints JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.evaluator import sandbox

NAP = ["sleep", "600"]
# A worker that forks twice, moves the grandchild to a session of its own, prints its number and ends; FAKE: it also empties
# its environment, and has a child of its own.
WORKER = """
import os, sys
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        if "FAKE" in os.environ:
            child = os.fork()
            if child == 0:
                os.setsid()
                os.execve("/bin/sleep", ["sleep", "600"], {})
            os.write(write, b"%d %d" % (os.getpid(), child))
            os.execve("/bin/sleep", ["sleep", "600"], {"AREAL_TIK_JUDGE_MARK": "guess"})
        os.write(write, b"%d" % os.getpid())
        os.execv("/bin/sleep", ["sleep", "600"])
    os._exit(0)
os.wait()
print(os.read(read, 100).decode())
"""
READER = """
import sys, errno
from tools.evaluator import sandbox
sandbox._privilege_calls()
try:
    open(f"/proc/{sys.argv[1]}/mem", "rb").close()
    print("done")
except OSError as problem:
    print(errno.errorcode[problem.errno])
"""


def read_me() -> str:
    """What a process of the same user without privileges meets when it opens this one's memory."""
    command = [sys.executable, "-c", READER, str(os.getpid())]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def dumpable() -> dict[str, Any]:
    sandbox._privilege_calls()  # like a judge of an ordinary user: privileges alone would close it already
    return {"before": read_me(), "state": sandbox.harden_judge(), "after": read_me()}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def settled(pid: int) -> bool:
    """Whether the process sleeps in its last program, as a child of this one."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[1] == str(os.getpid()) and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def strays() -> dict[str, Any]:
    children = {"before": subprocess.Popen(NAP, start_new_session=True, env={})}
    sandbox.harden_judge()
    children["plain"] = subprocess.Popen(NAP, env={})
    children["own session"] = subprocess.Popen(NAP, start_new_session=True)
    bare = sandbox.worker_environment(os.environ)
    children["known worker"] = subprocess.Popen(NAP, start_new_session=True, env=bare)
    known = {children["known worker"].pid}
    left: list[int] = []
    for environment in (bare, {**bare, "FAKE": "1"}):
        command = [sys.executable, "-c", WORKER]
        done = subprocess.run(command, env=environment, start_new_session=True, capture_output=True, text=True, check=False)
        left += map(int, done.stdout.split())
    first = left[:2]  # the third is still the child of the second
    deadline = time.monotonic() + 10
    while not all(map(settled, first)) and time.monotonic() < deadline:
        time.sleep(0.01)
    before = [pid for pid in left if alive(pid)]
    killed = sandbox.kill_strays(known)
    found = {
        "strays": sorted(left),
        "alive before": sorted(before),
        "killed": sorted(killed),
        "alive after": [pid for pid in left if alive(pid)],
        "kept": sorted(children),
        "kept alive": sorted(name for name, child in children.items() if child.poll() is None),
        "again": sandbox.kill_strays(known),
    }
    for child in children.values():
        child.kill()
        child.wait()
    return found


print(json.dumps({"dumpable": dumpable, "strays": strays}[sys.argv[1]]()))
