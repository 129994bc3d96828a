"""Confines a worker before it loads what it must not trust, with whatever the kernel offers. Linux; standard library only.

    state = sandbox.enter(scratch, [library], "cpu")   # {"writes": "enforced", "reads": "not enforced: ...", ...}

For good, for all threads of the process. The measures:

writes            no file is written, made, removed, renamed or linked outside `scratch`; owner, mode and times nowhere
reads             files are read below `readable`, and where the C library and the CUDA driver need it, only
network           no socket of any kind can be made, connected or listened on
processes         threads, but no process, no program, no session or process group of its own
other processes   no tracing, signals, limits, priorities, descriptors or memory of another process
persistent state  nothing outlasts the worker but `scratch`: no shared memory by name, queues, keyrings, files
privileges        no_new_privs, no capability, no core dump, limits on file size and (where given) on memory

Each is checked by an attempt before it is called enforced. Where Landlock is missing, `writes` forbids the scratch folder
too, on the CPU; for a CUDA worker it then cannot be enforced, since the driver opens its devices for writing.

Not covered: descriptors and mappings that are open already (the judge's memory, the channel; a memfd that was handed over
for reading can be reopened for writing, so seal it); a file's existence, size and times; folders of the system's libraries
can be read, and libraries that the process holds already can be called; processor time, memory bandwidth, caches and their
timing; the GPU and its driver; errors of the kernel itself. With `unix_sockets`, servers that listen on a path in the file
system can be reached.

Everything that Python still needs must be imported before: afterwards there is no standard library to import from, unless
`importable()` is among the readable paths.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys

from tools.evaluator import sandbox_files, sandbox_filter, sandbox_threads
from tools.evaluator import sandbox_kernel as kernel
from tools.evaluator.sandbox_judge import harden_judge, kill_strays, worker_environment

if sys.platform != "win32":
    import resource

__all__ = ["ENFORCED", "MEASURES", "enter", "harden_judge", "importable", "kill_strays", "worker_environment"]

ENFORCED = "enforced"
MEASURES = ("writes", "reads", "network", "processes", "other processes", "persistent state", "privileges")
FILE_BYTES = 256 << 20
LAST_CAPABILITY = 63
CAPABILITY_V3 = 0x20080522


def enter(
    scratch: str,
    readable: list[str],
    device: str,
    *,
    memory_bytes: int | None = None,
    file_bytes: int | None = FILE_BYTES,
    unix_sockets: bool = False,
) -> dict[str, str]:
    """Confine this process; measure -> "enforced" or "not enforced: reason". Never raises for what is not offered.

    scratch: an existing folder, the only place for files. readable: files and folders; missing ones are skipped.
    device: "cpu" or "cuda", opened before. memory_bytes: limit of private memory (not for CUDA, whose driver reserves
    far more than it uses). file_bytes: limit of one file's size. unix_sockets: allow that family, if a driver needs it.
    """
    if sys.platform != "linux" or kernel.machine() is None:
        where = sys.platform if sys.platform != "linux" else os.uname().machine
        return dict.fromkeys(MEASURES, f"not enforced: no sandbox on {where}")
    limits = _limit(memory_bytes, file_bytes)
    calls, dropped = _privilege_calls()
    confined, ruleset = _confine_files(calls, scratch, readable, device)
    spread = sandbox_threads.run_on_others(calls)
    if ruleset >= 0:
        os.close(ruleset)
    confined = confined or spread
    files = None if not confined else "frozen" if device == "cpu" else "devices"
    code = sandbox_filter.own_program(unix_sockets=unix_sockets, files=files)
    assert code is not None
    filtered = sandbox_filter.install(code)
    return _state(confined, filtered, dropped or spread or limits, files, unix_sockets)


def importable(*packages: str) -> list[str]:
    """Paths of the standard library and of packages that are imported, for a worker that goes on importing from them."""
    found = [os.path.dirname(os.__file__)]  # its lib-dynload holds the compiled modules
    return found + [path for name in packages for path in getattr(sys.modules[name], "__path__", ())]


def _limit(memory_bytes: int | None, file_bytes: int | None) -> str:
    """Lower the limits; "" or the one that could not be set. Where memory runs out, this process is to die first."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    wanted = [(resource.RLIMIT_CORE, 0, "core size"), (resource.RLIMIT_FSIZE, file_bytes, "file size")]
    for which, value, name in [*wanted, (resource.RLIMIT_DATA, memory_bytes, "memory")]:
        if value is None:
            continue
        hard = resource.getrlimit(which)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(which, (limit, limit))
        except (OSError, ValueError) as problem:
            return f"limit of {name}: {problem}"
    return ""


_capability_head = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_V3, 0), 8)
_no_capability = ctypes.create_string_buffer(24)


def _privilege_calls() -> tuple[list[sandbox_threads.Call], str]:
    """Give up privileges on this thread; the calls that did it, to be repeated on the others, and what went wrong."""
    numbers = kernel.numbers(kernel.machine() or "")
    prctl, capset = numbers["prctl"], numbers["capset"]
    calls: list[sandbox_threads.Call] = [(prctl, kernel.PR_SET_NO_NEW_PRIVS, 1)]
    calls += [(prctl, kernel.PR_CAPBSET_DROP, capability) for capability in range(LAST_CAPABILITY + 1)]
    calls.append((capset, ctypes.addressof(_capability_head), ctypes.addressof(_no_capability)))
    outcomes = {call: kernel.raw(*call) for call in calls}
    failed = [reason for call, reason in outcomes.items() if reason < 0 and call[:2] != (prctl, kernel.PR_CAPBSET_DROP)]
    # the bounding set matters to programs that are started; dropping it is itself a privilege, and lists end differently
    return [call for call, outcome in outcomes.items() if outcome >= 0], kernel.reason(failed[0]) if failed else ""


def _confine_files(calls: list[sandbox_threads.Call], scratch: str, readable: list[str], device: str) -> tuple[str, int]:
    """Landlock on this thread, its call appended to `calls`; ("" or what went wrong, the ruleset's descriptor or -1)."""
    version = sandbox_files.abi()
    if version == 0:
        return "the kernel offers no Landlock", -1
    try:
        ruleset = sandbox_files.ruleset(version, scratch, readable, device)
    except OSError as problem:
        return f"Landlock: {problem}", -1
    call = (
        kernel.numbers(kernel.machine() or "")["landlock_restrict_self"],
        ruleset,
        sandbox_files.QUIET if version >= 7 else 0,
    )
    result = kernel.raw(*call)
    if result < 0:
        return f"Landlock: {kernel.reason(result)}", ruleset
    calls.append(call)
    return "", ruleset


def _state(confined: str, filtered: str, privileges: str, files: str | None, unix_sockets: bool) -> dict[str, str]:
    """What holds now, each measure tried once. Arguments are "" for what worked, else the reason."""
    found = dict.fromkeys(MEASURES, filtered)
    found["reads"], found["privileges"] = confined, privileges or _left_privilege()
    if files is None:
        found["writes"] = confined or filtered  # times and owners are the filter's
    elif files == "devices" and not filtered:
        found["writes"] = f"{confined}; existing files can be opened for writing"
    found["persistent state"] = found["writes"]
    if unix_sockets:
        found["network"] = found["network"] or "Unix sockets are allowed"
    for measure, refused in _attempts().items():
        if not found[measure] and not refused:
            found[measure] = "an attempt was not refused"
    return {measure: ENFORCED if not why else f"not enforced: {why}" for measure, why in found.items()}


def _left_privilege() -> str:
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            lines = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    except OSError as problem:
        return str(problem)
    left = int(lines["CapPrm"], 16) | int(lines["CapEff"], 16)
    return f"capabilities {left:x} are left" if left else ""


def _attempts() -> dict[str, bool]:
    """Measure -> whether a harmless attempt is refused; where it is not, the kernel finds fault with its arguments."""
    own = ctypes.create_string_buffer(b"/proc/self/comm")
    root = ctypes.create_string_buffer(b"/")
    here = -100 & (2**64 - 1)  # AT_FDCWD
    calls = {
        "writes": ("openat", here, ctypes.addressof(own), os.O_WRONLY),
        "reads": ("openat", here, ctypes.addressof(root), os.O_RDONLY | os.O_DIRECTORY),
        "network": ("socket", 2, 2, 0),
        "processes": ("execveat", -1, 0, 0, 0, 0),
        "other processes": ("process_vm_readv", os.getppid(), 0, 0, 0, 0, 1),
        "persistent state": ("shmget", 0, 0, 0o1000),
    }
    found = {}
    for measure, (name, *arguments) in calls.items():
        result = kernel.syscall(str(name), *(int(a) for a in arguments))
        found[measure] = result in (-errno.EPERM, -errno.EACCES)
        if result >= 0 and measure in ("writes", "reads", "network"):
            os.close(result)
    return found
