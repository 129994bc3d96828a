"""Attempts of a hostile program, in one process: python attempts.py WHO FOLDER VICTIM [EXTRA...].

WHO: "free" (no sandbox), "main" (the thread that enters it), "older" and "older_blocked" (a thread that was there before,
the second with every signal blocked), or a crippled sandbox. Prints JSON: attempt -> "done" or the error's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.evaluator import sandbox, sandbox_files, sandbox_filter, sandbox_kernel, sandbox_threads

WHO, FOLDER, VICTIM, EXTRA = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
SCRATCH, OUTSIDE, READABLE = FOLDER / "scratch", FOLDER / "outside", FOLDER / "readable"


with open(f"/proc/{VICTIM}/maps") as maps:
    VICTIM_CODE = int(maps.readline().split("-")[0], 16)


def raw(name: str, *arguments: int) -> int:
    result = sandbox_kernel.syscall(name, *arguments)
    if result < 0:
        raise OSError(-result, name)
    return result


def text(path: Path | str) -> Any:
    return ctypes.create_string_buffer(os.fsencode(path))


def prepare() -> None:
    for folder in (SCRATCH, OUTSIDE, READABLE):
        folder.mkdir(exist_ok=True)
    for name in ("kept", "truncated", "removed", "renamed", "moved", "mode", "linked"):
        (OUTSIDE / name).write_text("secret")
    (READABLE / "file").write_text("public")
    (SCRATCH / "leaving").write_text("x")
    for name, target in (("link", OUTSIDE / "kept"), ("write_link", OUTSIDE / "through")):
        (SCRATCH / name).unlink(missing_ok=True)
        (SCRATCH / name).symlink_to(target)


def close(fd: int) -> None:
    os.close(fd)


def in_child(action: Callable[[], Any]) -> None:
    """Attempts that change the process happen in a child where there can be one; a refused fork is not their refusal."""
    try:
        pid = os.fork()
    except PermissionError:
        action()
        return
    if pid == 0:
        try:
            action()
        except OSError as problem:
            os._exit(problem.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, "in the child")


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def shared_memory() -> None:
    made = raw("shmget", 0, 4096, 0o1600)
    raw("shmctl", made, 0, 0)


def semaphores() -> None:
    raw("semctl", raw("semget", 0, 1, 0o1600), 0, 0, 0)


def posix_queue() -> None:
    name = text("areal-tik-test")
    os.close(raw("mq_open", ctypes.addressof(name), os.O_CREAT | os.O_RDWR, 0o600, 0))
    raw("mq_unlink", ctypes.addressof(name))


def keyring() -> None:
    kind, name, value = text("user"), text("areal-tik-test"), text("x")
    raw("add_key", ctypes.addressof(kind), ctypes.addressof(name), ctypes.addressof(value), 1, -1)  # the thread's own keyring


def trace() -> None:
    raw("ptrace", 0x4206, VICTIM, 0, 0)  # PTRACE_SEIZE: does not stop it, and ends with this process


def take_descriptor() -> None:
    close(raw("pidfd_getfd", raw("pidfd_open", VICTIM, 0), 0, 0))


def read_memory() -> None:
    buffer = ctypes.create_string_buffer(8)
    here, there = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8), (ctypes.c_size_t * 2)(VICTIM_CODE, 8)
    raw("process_vm_readv", VICTIM, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)


def own_by_other() -> None:
    read, write = os.pipe()
    try:
        fcntl.fcntl(read, fcntl.F_SETOWN, VICTIM)
    finally:
        os.close(read), os.close(write)


def message_queue() -> None:
    raw("msgctl", raw("msgget", 0, 0o1600), 0, 0)


def io_uring() -> None:
    parameters = ctypes.create_string_buffer(120)
    close(raw("io_uring_setup", 1, ctypes.addressof(parameters)))


def new_socket(family: int) -> None:
    socket.socket(family, socket.SOCK_DGRAM).close()


def int80() -> None:
    """getpid of the 32-bit interface."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page[:8] = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if result < 0:
        raise OSError(-result, "int 0x80")


def x32() -> None:
    result = sandbox_kernel.raw(0x40000000 | 39)
    if result < 0:
        raise OSError(-result, "x32")


def spawn_thread() -> None:
    seen: list[int] = []
    threads = [threading.Thread(target=seen.append, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [0, 1, 2, 3]


def rename_scratch() -> None:
    (SCRATCH / "a").write_text("x")
    (SCRATCH / "a").rename(SCRATCH / "b")
    (SCRATCH / "b").unlink()


def folder_in_scratch() -> None:
    (SCRATCH / "d").mkdir()
    (SCRATCH / "d" / "f").write_text("x")
    (SCRATCH / "d" / "f").rename(SCRATCH / "f")
    (SCRATCH / "f").unlink()
    (SCRATCH / "d").rmdir()


def null() -> None:
    with open("/dev/null", "w") as file:
        file.write("x")


def elsewhere(folder: str) -> None:
    path = Path(folder) / f"areal-tik-sandbox-test-{os.getpid()}"
    path.write_text("x")
    path.unlink()


def truncate_path() -> None:
    os.truncate(OUTSIDE / "truncated", 1)


def parent_memory() -> None:
    os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY))


def signal_itself() -> None:
    os.kill(os.getpid(), 0)
    signal.pthread_kill(threading.get_ident(), 0)


def mounts() -> None:
    raw("unshare", 0x20000)
    root = text("/")
    raw("mount", 0, ctypes.addressof(root), 0, 0x4000 | 0x40000, 0)  # MS_REC | MS_PRIVATE


def hostname() -> None:
    name = os.uname().nodename.encode()
    buffer = ctypes.create_string_buffer(name)
    raw("sethostname", ctypes.addressof(buffer), len(name))


def alarm_clock() -> None:
    """A timer whose signal would wake a stopped process."""
    number = ctypes.c_int()
    raw("timer_create", 1, 0, ctypes.addressof(number))  # CLOCK_MONOTONIC


ATTEMPTS: dict[str, Callable[[], Any]] = {
    "alarm_clock": alarm_clock,
    "create": lambda: (OUTSIDE / "new").write_text("x"),
    "overwrite": lambda: (OUTSIDE / "kept").open("r+").close(),
    "truncate_path": truncate_path,
    "remove": lambda: (OUTSIDE / "removed").unlink(),
    "rename_in": lambda: (OUTSIDE / "moved").rename(SCRATCH / "moved"),
    "rename_out": lambda: os.rename(SCRATCH / "leaving", OUTSIDE / "out"),
    "make_folder": lambda: (OUTSIDE / "folder").mkdir(),
    "symbolic_link": lambda: (SCRATCH / "new_link").symlink_to("/"),
    "hard_link": lambda: os.link(READABLE / "file", OUTSIDE / "hard"),
    "hard_link_in": lambda: os.link(OUTSIDE / "linked", SCRATCH / "hard"),
    "fifo": lambda: os.mkfifo(SCRATCH / "fifo"),
    "change_mode": lambda: os.chmod(OUTSIDE / "mode", 0o640),
    "change_times": lambda: os.utime(OUTSIDE / "mode", (1, 1)),
    "make_in_dev_shm": lambda: elsewhere("/dev/shm"),
    "make_in_tmp": lambda: elsewhere("/tmp"),
    "write_own_proc": lambda: open("/proc/self/comm", "w").close(),
    "through_symbolic_link": lambda: (SCRATCH / "write_link").write_text("x"),
    "read_file": lambda: (OUTSIDE / "kept").read_text(),
    "list_folder": lambda: os.listdir(OUTSIDE),
    "read_by_symbolic_link": lambda: (SCRATCH / "link").read_text(),
    "read_by_proc_root": lambda: Path(f"/proc/self/root{OUTSIDE}/kept").read_text(),
    "read_standard_library": lambda: Path(os.__file__).read_bytes(),
    "read_repository": lambda: Path(__file__).read_bytes(),
    "read_parent_command": lambda: Path(f"/proc/{os.getppid()}/cmdline").read_bytes(),
    "read_parent_memory": parent_memory,
    "internet_socket": lambda: new_socket(socket.AF_INET),
    "unix_socket": lambda: new_socket(socket.AF_UNIX),
    "netlink_socket": lambda: new_socket(socket.AF_NETLINK),
    "socket_pair": lambda: [end.close() for end in socket.socketpair()],
    "io_uring": io_uring,
    "fork": fork,
    "spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    "new_session": lambda: in_child(os.setsid),
    "new_group": lambda: in_child(lambda: os.setpgid(0, 0)),
    "new_namespace": lambda: in_child(lambda: raw("unshare", 0x10000000)),
    "signal_other": lambda: os.kill(VICTIM, 0),
    "signal_group": lambda: os.killpg(VICTIM, 0),
    "signal_thread_of_other": lambda: raw("tgkill", VICTIM, VICTIM, 0),
    "queue_signal": lambda: raw("rt_sigqueueinfo", VICTIM, 0, ctypes.addressof(SIGINFO)),
    "trace_other": trace,
    "read_other_memory": read_memory,
    "open_other": lambda: close(raw("pidfd_open", VICTIM, 0)),
    "take_descriptor": take_descriptor,
    "limit_other": lambda: resource.prlimit(VICTIM, resource.RLIMIT_CORE),
    "pin_other": lambda: os.sched_setaffinity(VICTIM, os.sched_getaffinity(VICTIM)),
    "schedule_other": lambda: os.sched_setscheduler(VICTIM, os.SCHED_OTHER, os.sched_param(0)),
    "slow_other": lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, os.getpriority(os.PRIO_PROCESS, VICTIM)),
    "own_by_other": own_by_other,
    "pdeathsig": lambda: raw("prctl", 1, 0),
    "fault_handler": lambda: close(raw("userfaultfd", 1)),
    "watch_files": lambda: close(raw("inotify_init1", 0)),
    "shared_memory": shared_memory,
    "semaphores": semaphores,
    "message_queue": message_queue,
    "posix_queue": posix_queue,
    "keyring": keyring,
    "mount": lambda: in_child(mounts),
    "hostname": hostname,
    "write_scratch": lambda: (SCRATCH / "mine").write_text("x"),
    "rename_scratch": rename_scratch,
    "folder_in_scratch": folder_in_scratch,
    "read_readable": lambda: (READABLE / "file").read_text(),
    "threads": spawn_thread,
    "signal_itself": signal_itself,
    "pin_itself": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "memory": lambda: os.ftruncate(os.memfd_create("own"), 1 << 20),
    "random": lambda: [os.urandom(8), Path("/dev/urandom").open("rb").close()],
    "null": null,
}
ALONE: dict[str, Callable[[], Any]] = {
    "exec": lambda: os.execv("/bin/echo", ["echo", '{"exec": "done"}']),
    "int80": int80,
    "x32": x32,
}
SIGINFO = ctypes.create_string_buffer(128)
ctypes.c_int.from_buffer(SIGINFO, 8).value = -1  # SI_QUEUE


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except OSError as problem:
        return errno.errorcode.get(problem.errno or 0, str(problem))
    return "done"


def cripple() -> str:
    """Take something away from the sandbox; the device to enter it for."""
    if WHO.startswith("no_landlock"):
        sandbox_files.abi = lambda: 0
    elif WHO == "no_filter":
        sandbox_filter.install = lambda code: "test"
    elif WHO == "liar":
        sandbox_filter.install = lambda code: ""
    elif WHO == "unreachable":
        sandbox_threads.WAIT_S = 0.2
        sandbox_threads.handler = lambda table: (b"\xc3" + b"\xb8\x0f\x00\x00\x00\x0f\x05", 1)  # returns at once
    return "cuda" if WHO == "no_landlock_cuda" else "cpu"


def statuses() -> list[dict[str, str]]:
    """What the kernel says of each thread; one may be ending just now."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
            found.append(dict(line.split(":\t", 1) for line in lines if ":\t" in line))
    return found


def main() -> None:
    prepare()
    found: dict[str, Any] = {}
    go, done = threading.Event(), threading.Event()

    def act() -> None:
        found.update({name: attempt(action) for name, action in ATTEMPTS.items()})

    def older(event: threading.Event, action: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            if WHO == "older_blocked":
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            event.wait()
            action()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    actor = older(go, act) if WHO.startswith("older") else None
    if actor or WHO == "unreachable":
        older(done, lambda: None)
    device = cripple()
    raw("prctl", 1, signal.SIGUSR1)  # the worker's PR_SET_PDEATHSIG must stay
    if WHO != "free":
        found["state"] = sandbox.enter(str(SCRATCH), [str(READABLE), str(READABLE / "missing")], device)
    go.set()
    if EXTRA:
        found[EXTRA[0]] = attempt(ALONE[EXTRA[0]])
    elif actor:
        actor.join()
    else:
        act()
    found["threads status"] = statuses()
    asked = ctypes.c_int()
    raw("prctl", 2, ctypes.addressof(asked))
    found["signal at the parent's death"] = asked.value
    found["core limit"] = list(resource.getrlimit(resource.RLIMIT_CORE))
    print(json.dumps(found), flush=True)
    os._exit(0)


main()
