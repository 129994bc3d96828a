"""Landlock rules of a worker: which files it may read and write. Paths that are not named here are out of reach.

A rule holds for a file or a folder with all that lies below it, by the place where the file really is: a symbolic link
gives no access to what it points at. Descriptors that are open already keep what they were opened for. Looking a file up
(stat) is not covered by Landlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import struct

from tools.evaluator import sandbox_kernel as kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV = (
    1 << bit for bit in range(6, 16)
)
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # what a rule on a plain file may name
READ = READ_FILE | READ_DIR
CHANGE = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE  # no links, pipes, sockets or devices
DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEV
TCP = 0b11  # binding and connecting
SCOPES = 0b11  # abstract Unix sockets and signals stay inside the sandbox
QUIET = 1  # LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF: refusals do not fill the machine's audit log
VERSION, PATH_BENEATH = 1, 1

RUNTIME = (
    "/etc/ld.so.cache", "/etc/ld.so.preload", "/lib64", "/usr/lib64", "/usr/lib/locale", "/usr/share/locale",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
CUDA_RUNTIME = (
    "/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/proc/sys/vm", "/sys", "/etc/nvidia", "/usr/share/nvidia",
    "/usr/local/nvidia", "/usr/local/cuda/compat",
)  # fmt: skip


def abi() -> int:
    """The kernel's Landlock version; 0 where it offers none."""
    return max(0, kernel.syscall("landlock_create_ruleset", 0, 0, VERSION))


def handled(version: int) -> int:
    """Every kind of access that a version can refuse."""
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    return (1 << bits) - 1


def runtime(device: str) -> list[str]:
    """What the C library, C++ programs and the CUDA driver read while they run."""
    found = [*RUNTIME, *glob.glob("/usr/lib/*-linux-gnu*"), *glob.glob("/lib/*-linux-gnu*")]
    for path in ("/etc/ld.so.conf", *glob.glob("/etc/ld.so.conf.d/*.conf")):  # further folders of the system's libraries
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as conf:
            found += [line.strip() for line in conf if line.startswith("/") and line.strip() != "/"]
    if not glob.glob("/usr/lib/*-linux-gnu*"):  # a system without folders for each architecture
        found += ["/lib", "/usr/lib"]
    if device == "cuda":
        found += CUDA_RUNTIME
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
        found += [os.path.dirname(path) for path in mapped]
    return found


def ruleset(version: int, scratch: str, readable: list[str], device: str) -> int:
    """Descriptor of a ruleset for this process. OSError where the kernel does not make one."""
    mask = handled(version)
    attributes = struct.pack("=QQQ", mask, TCP if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    buffer = ctypes.create_string_buffer(attributes, 24)
    made = kernel.syscall("landlock_create_ruleset", ctypes.addressof(buffer), size, 0)
    if made < 0:
        raise OSError(-made, os.strerror(-made))
    for path in [*runtime(device), *readable]:
        _allow(made, path, READ, mask)
    _allow(made, "/dev/null", DEVICE | TRUNCATE, mask)
    if device == "cuda":
        for path in glob.glob("/dev/nvidia*"):
            _allow(made, path, DEVICE | READ_DIR, mask)
    _allow(made, scratch, READ | CHANGE, mask)
    # Stays open: while somebody holds the folder, the kernel cannot drop it from its cache, and this rule with it.
    own = os.open(f"/proc/{os.getpid()}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _add(made, own, READ & mask)
    return made


def _allow(ruleset_fd: int, path: str, access: int, mask: int) -> None:
    """Paths that do not exist need no rule."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            _add(ruleset_fd, fd, access & mask & (-1 if os.path.isdir(path) else ON_FILES))
        finally:
            os.close(fd)


def _add(ruleset_fd: int, fd: int, access: int) -> None:
    rule = ctypes.create_string_buffer(struct.pack("=Qi", access, fd), 12)
    result = kernel.syscall("landlock_add_rule", ruleset_fd, PATH_BENEATH, ctypes.addressof(rule), 0)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
