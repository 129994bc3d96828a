"""The seccomp filter of a worker: which system calls it may still make, as a BPF program assembled here.

Refused calls fail with EPERM and the process lives on. The rest is allowed, except calls that are newer than the tables
of sandbox_kernel.py, which do not exist for a worker (ENOSYS). A filter sees the registers of a call, never the memory
behind a pointer: it knows flags and process numbers, but no path. Paths are for sandbox_files.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from tools.evaluator import sandbox_kernel as kernel

Code = list[tuple[int, int, int, int]]  # (operation, jump if true, jump if false, value), jumps in instructions

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]. The low half of an argument is enough: every
# argument looked at here is an int or an unsigned int to the kernel.
NUMBER_AT, ARCH_AT, ARGS_AT = 0, 4, 16
X32_BIT = 0x40000000  # the x32 calls of x86-64 have numbers of their own from here on
MODE_FILTER, TSYNC, SPEC_ALLOW = 1, 1, 4  # SPEC_ALLOW: no slower branches for a process that is timed

CLONE_THREAD = 0x10000
CLONE_NEW = 0x7E020000  # every CLONE_NEW* flag that clone takes
O_WRITES = 0o1 | 0o2  # O_WRONLY, O_RDWR
O_CHANGES = 0o100 | 0o1000 | 0o20000000  # O_CREAT, O_TRUNC, O_TMPFILE
OWNER_COMMANDS = (8, 10, 15, 1024, 1026)  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
OWNER_REQUESTS = (0x8901, 0x8902, 0x5412, 0x541C)  # ioctl: FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
PROCESS_NUMBER, PROCESS_ITSELF = 0, 0  # setpriority's PRIO_PROCESS; "the caller" where a process number is asked for

REFUSED = {
    "network": "socket socketpair connect bind listen accept accept4 io_uring_setup io_uring_enter io_uring_register",
    "processes": "fork vfork execve execveat setsid setpgid",
    "other processes": "ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd pidfd_send_signal kcmp tkill "
    "timer_create process_madvise process_mrelease perf_event_open bpf userfaultfd ioprio_set lookup_dcookie inotify_init "
    "inotify_init1 inotify_add_watch fanotify_init fanotify_mark",
    "memory and queues shared by name": "shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv msgctl "
    "mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr add_key request_key keyctl",
    "mounts and namespaces": "mount umount2 pivot_root chroot unshare setns open_tree open_tree_attr move_mount fsopen "
    "fsconfig fsmount fspick mount_setattr statmount listmount listns name_to_handle_at open_by_handle_at",
    "a file's owner, mode, times and attributes": "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime "
    "utimes futimesat utimensat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr "
    "removexattrat file_setattr mknod mknodat truncate",
    "the machine": "acct swapon swapoff reboot sethostname setdomainname iopl ioperm init_module finit_module "
    "delete_module kexec_load kexec_file_load quotactl quotactl_fd nfsservctl settimeofday adjtimex clock_adjtime "
    "clock_settime syslog vhangup modify_ldt",
}
# Where Landlock is missing: every call that changes a folder or a file by its path.
CHANGES_BY_PATH = "creat unlink unlinkat rmdir mkdir mkdirat link linkat symlink symlinkat rename renameat renameat2"
TO_ITSELF = (
    "kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo prlimit64 sched_setaffinity sched_setscheduler sched_setparam "
    "sched_setattr get_robust_list migrate_pages move_pages"
)  # calls whose first argument is a process number


def load(offset: int) -> Code:
    return [(0x20, 0, 0, offset)]  # BPF_LD | BPF_W | BPF_ABS


def equal(value: int, yes: int, no: int) -> Code:
    return [(0x15, yes, no, value)]  # BPF_JMP | BPF_JEQ | BPF_K


def at_least(value: int, yes: int, no: int) -> Code:
    return [(0x35, yes, no, value)]  # BPF_JMP | BPF_JGE | BPF_K


def any_bit(mask: int, yes: int, no: int) -> Code:
    return [(0x45, yes, no, mask)]  # BPF_JMP | BPF_JSET | BPF_K


def fail(code: int) -> Code:
    return [(0x06, 0, 0, 0x00050000 | code)]  # BPF_RET | BPF_K, SECCOMP_RET_ERRNO


ALLOW: Code = [(0x06, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_ALLOW
REFUSE: Code = fail(errno.EPERM)


def argument(number: int) -> Code:
    return load(ARGS_AT + 8 * number)


def only(number: int, values: tuple[int, ...]) -> Code:
    """Allow a call where one argument has one of these values."""
    tests = [equal(value & 0xFFFFFFFF, len(values) - at, 0)[0] for at, value in enumerate(values)]
    return argument(number) + tests + REFUSE + ALLOW


def unless(number: int, values: tuple[int, ...]) -> Code:
    """Allow a call where one argument has none of these values."""
    tests = [equal(value, len(values) - at, 0)[0] for at, value in enumerate(values)]
    return argument(number) + tests + ALLOW + REFUSE


def unless_bits(number: int, mask: int) -> Code:
    return argument(number) + any_bit(mask, 1, 0) + ALLOW + REFUSE


def rules(pid: int, *, unix_sockets: bool, files: str | None) -> dict[str, Code]:
    """Call -> what to do about it. files: None, "frozen" (no file is opened for writing) or "devices" (none is made)."""
    found = {name: REFUSE for names in REFUSED.values() for name in names.split()}
    found |= {name: only(0, (PROCESS_ITSELF, pid)) for name in TO_ITSELF.split()}
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        found[name] = only(0, (pid,))  # 0 is the whole process group here
    found["clone"] = (
        argument(0) + any_bit(CLONE_THREAD, 1, 0) + REFUSE + any_bit(CLONE_NEW, 1, 0) + ALLOW + REFUSE
    )  # a thread, never a process
    found["clone3"] = fail(errno.ENOSYS)  # its flags lie in memory; the C library then takes clone
    found["setpriority"] = argument(0) + equal(PROCESS_NUMBER, 1, 0) + REFUSE + only(1, (PROCESS_ITSELF, pid))
    found["prctl"] = unless(0, (kernel.PR_SET_PDEATHSIG, kernel.PR_SCHED_CORE))
    found["fcntl"], found["ioctl"] = unless(1, OWNER_COMMANDS), unless(1, OWNER_REQUESTS)
    if unix_sockets:
        found["socket"] = found["socketpair"] = only(0, (1,))  # AF_UNIX
        found |= dict.fromkeys(("connect", "bind", "listen", "accept", "accept4"), ALLOW)
    if files is not None:
        mask = O_CHANGES | (O_WRITES if files == "frozen" else 0)
        found |= dict.fromkeys(CHANGES_BY_PATH.split(), REFUSE)
        found |= {"open": unless_bits(1, mask), "openat": unless_bits(2, mask), "openat2": fail(errno.ENOSYS)}
    return found


def program(pid: int, architecture: str, *, unix_sockets: bool = False, files: str | None = None) -> bytes:
    """The filter for a process of this number, as an array of struct sock_filter."""
    numbers = kernel.numbers(architecture)
    code = load(ARCH_AT) + equal(kernel.ARCHITECTURES[architecture], 1, 0) + REFUSE  # 32-bit calls have other numbers
    code += load(NUMBER_AT)
    if architecture == "x86_64":
        code += at_least(X32_BIT, 0, 1) + REFUSE
    code += at_least(kernel.NEWEST + 1, 0, 1) + fail(errno.ENOSYS)
    for name, body in rules(pid, unix_sockets=unix_sockets, files=files).items():
        if name in numbers:  # arm64 has no fork, open and so on
            code += equal(numbers[name], 0, len(body)) + body
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code + ALLOW)


def install(code: bytes) -> str:
    """Bind all threads of this process to a program, for good. Sets no_new_privs on them too. "" or what went wrong."""
    text = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(text)))
    for flags in (TSYNC | SPEC_ALLOW, TSYNC):
        result = kernel.syscall("seccomp", MODE_FILTER, flags, ctypes.addressof(head))
        if result == 0:
            return ""
        if result > 0:  # the number of a thread that has a filter of its own
            return f"thread {result} has another filter"
    return f"seccomp: {kernel.reason(result)}"


def own_program(*, unix_sockets: bool, files: str | None) -> bytes | None:
    """The filter for this process; None on an architecture without a table."""
    found = kernel.machine()
    return None if found is None else program(os.getpid(), found, unix_sockets=unix_sockets, files=files)
