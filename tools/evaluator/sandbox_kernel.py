"""Linux system calls by number, for the modules of the sandbox: the C library wraps few of the calls that they need.

Numbers above 423 are the same on every architecture; the others stand as (x86-64, arm64), None where there is no such call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SCHED_CORE = (
    1, 4, 24, 36, 38, 62,
)  # fmt: skip

_OLD: dict[str, tuple[int | None, int | None]] = {
    "timer_create": (222, 107),
    "accept": (43, 202), "accept4": (288, 242), "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171),
    "bind": (49, 200), "bpf": (321, 280), "capset": (126, 91), "chmod": (90, None), "chown": (92, None),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "connect": (42, 203),
    "creat": (85, None), "delete_module": (176, 106), "execve": (59, 221), "execveat": (322, 281), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "fchmod": (91, 52), "fchmodat": (268, 53), "fchown": (93, 55), "fchownat": (260, 54),
    "fcntl": (72, 25), "finit_module": (313, 273), "fork": (57, None), "fremovexattr": (199, 16), "fsetxattr": (190, 7),
    "futimesat": (261, None), "get_robust_list": (274, 100), "getpid": (39, 172), "init_module": (175, 105),
    "inotify_add_watch": (254, 27), "inotify_init": (253, None), "inotify_init1": (294, 26), "ioctl": (16, 29),
    "ioperm": (173, None), "iopl": (172, None), "ioprio_set": (251, 30), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "kill": (62, 129), "lchown": (94, None), "link": (86, None),
    "linkat": (265, 37), "listen": (50, 201), "lookup_dcookie": (212, 18), "lremovexattr": (198, 15),
    "lsetxattr": (189, 6), "migrate_pages": (256, 238), "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None),
    "mknodat": (259, 33), "modify_ldt": (154, None), "mount": (165, 40), "move_pages": (279, 239), "mq_getsetattr": (245, 185),
    "mq_notify": (244, 184), "mq_open": (240, 180), "mq_timedreceive": (243, 183), "mq_timedsend": (242, 182),
    "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186), "msgrcv": (70, 188), "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264), "nfsservctl": (180, 42), "open": (2, None), "open_by_handle_at": (304, 265),
    "openat": (257, 56), "perf_event_open": (298, 241), "pivot_root": (155, 41), "prctl": (157, 167), "prlimit64": (302, 261),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "reboot": (169, 142), "removexattr": (197, 14), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "request_key": (249, 218), "rmdir": (84, None), "rt_sigaction": (13, 134), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "seccomp": (317, 277), "semctl": (66, 191),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "setpgid": (109, 154), "setpriority": (141, 140), "setsid": (112, 157), "settimeofday": (164, 170),
    "setxattr": (188, 5), "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198),
    "socketpair": (53, 199), "swapoff": (168, 225), "swapon": (167, 224), "symlink": (88, None), "symlinkat": (266, 36),
    "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130), "truncate": (76, 45), "umount2": (166, 39),
    "unlink": (87, None), "unlinkat": (263, 35), "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None),
    "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None), "vhangup": (153, 58),
}  # fmt: skip
_NEW = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435,
    "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
    "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446, "process_mrelease": 448,
    "fchmodat2": 452, "statmount": 457, "listmount": 458, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467,
    "file_setattr": 469, "listns": 470,
}  # fmt: skip
NEWEST = 470  # the newest call that these tables were written against; what comes later is unknown here

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # machine -> AUDIT_ARCH_*, as seccomp reports it


def machine() -> str | None:
    """ "x86_64" or "aarch64" for a 64-bit Linux process of that kind, else None."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    name = os.uname().machine
    return name if name in ARCHITECTURES else None


@functools.cache
def numbers(architecture: str) -> dict[str, int]:
    """Name -> number of every call in the tables that the architecture has."""
    column = list(ARCHITECTURES).index(architecture)
    old = {name: pair[column] for name, pair in _OLD.items()}
    return {**{name: number for name, number in old.items() if number is not None}, **_NEW}


def syscall(name: str, *arguments: int) -> int:
    """Make a system call on the calling thread; its result, or the negative errno. Pointers are plain addresses."""
    found = machine()
    number = None if found is None else numbers(found).get(name)
    return raw(number, *arguments) if number is not None else -38  # ENOSYS


def raw(number: int, *arguments: int) -> int:
    """Like `syscall`, by number."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in (*arguments, *[0] * (6 - len(arguments))))))
    return -ctypes.get_errno() if result < 0 else result


def reason(result: int) -> str:
    """Plain words for a negative errno."""
    return os.strerror(-result).lower()
