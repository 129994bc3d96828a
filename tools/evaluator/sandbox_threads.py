"""Makes system calls on every thread of this process, also on those that a driver started long ago.

Landlock and capabilities belong to a thread. A thread that was forgotten is a way out, since all threads share memory: one
can be made to run another's code. So each thread is interrupted by a signal whose handler makes the calls. The handler is
machine code, because a thread of a driver may hold any lock when the signal comes, and Python must not run there. The
signal is number 33, which the C library keeps for this very purpose and lets no thread block.

Only x86-64 has the handler; elsewhere a process with more than one thread is told that it is not confined.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Iterator

from tools.evaluator import sandbox_kernel as kernel

SIGNAL = 33
MAX_THREADS = 2048
MAX_CALLS = 64
WAIT_S = 3.0
CALLS_AT = 16  # table: u64 next slot, u64 number of calls, calls of 6 u64 (number, 5 arguments), slots of (thread, outcome)
SLOTS_AT = CALLS_AT + 48 * MAX_CALLS
SA_ONSTACK, SA_RESTORER, SA_RESTART = 0x08000000, 0x04000000, 0x10000000

Call = tuple[int, ...]  # (number, up to five arguments)


def handler(table: int) -> tuple[bytes, int]:
    """x86-64 code of the signal's handler, and the offset of the code that returns from the signal."""
    body = b"".join(
        (
            b"\x49\x8b\x45\x00",  # mov rax, [r13]
            b"\x49\x8b\x7d\x08",  # mov rdi, [r13+8]
            b"\x49\x8b\x75\x10",  # mov rsi, [r13+16]
            b"\x49\x8b\x55\x18",  # mov rdx, [r13+24]
            b"\x4d\x8b\x55\x20",  # mov r10, [r13+32]
            b"\x4d\x8b\x45\x28",  # mov r8, [r13+40]
            b"\x0f\x05",  # syscall
            b"\x48\x09\xc5",  # or rbp, rax: any failure leaves its mark
            b"\x49\x83\xc5\x30",  # add r13, 48
            b"\x49\xff\xcc",  # dec r12
        )
    )
    loop = b"\x4d\x85\xe4" + bytes((0x74, len(body) + 2)) + body + bytes((0xEB, (-(len(body) + 7)) & 0xFF))
    store = b"\x48\xc1\xe0\x04" + b"\x48\x8d\x84\x03" + struct.pack("<i", SLOTS_AT)  # rax = rbx + 16 rax + SLOTS_AT
    store += b"\x48\x89\x68\x08" + b"\x4c\x89\x30"  # mov [rax+8], rbp; mov [rax], r14
    code = b"".join(
        (
            b"\x53\x55\x41\x54\x41\x55\x41\x56",  # push rbx, rbp, r12, r13, r14
            b"\x48\xbb" + struct.pack("<Q", table),  # mov rbx, table
            b"\x4c\x8b\x63\x08",  # mov r12, [rbx+8]: the number of calls
            b"\x4c\x8d\x6b\x10",  # lea r13, [rbx+16]: the first call
            b"\x31\xed",  # xor ebp, ebp
            loop,  # while r12: make a call
            b"\xb8\xba\x00\x00\x00\x0f\x05\x49\x89\xc6",  # gettid; mov r14, rax
            b"\xb8\x01\x00\x00\x00\xf0\x48\x0f\xc1\x03",  # rax = 1; lock xadd [rbx], rax: a slot of its own
            b"\x48\x3d" + struct.pack("<i", MAX_THREADS) + bytes((0x73, len(store))),  # cmp rax, MAX_THREADS; jae
            store,
            b"\x41\x5e\x41\x5d\x41\x5c\x5d\x5b\xc3",  # pop all; ret
        )
    )
    return code + b"\xb8\x0f\x00\x00\x00\x0f\x05", len(code)  # mov eax, rt_sigreturn; syscall


def others() -> set[int]:
    """Numbers of all threads of this process but the calling one."""
    return {int(name) for name in os.listdir("/proc/self/task")} - {kernel.raw(_gettid())}


def _gettid() -> int:
    return {"x86_64": 186, "aarch64": 178}[kernel.machine() or "x86_64"]


def run_on_others(calls: list[Call]) -> str:
    """Make the calls on every other thread; "" when each of them succeeded there, else what did not work."""
    try:
        return _run_on_others(calls) if others() else ""
    except OSError as problem:  # no /proc, or a handler that cannot be set
        return f"older threads: {problem}"


def _run_on_others(calls: list[Call]) -> str:
    if kernel.machine() != "x86_64":
        return f"{len(others())} older threads cannot be reached on this architecture"
    if len(calls) > MAX_CALLS:
        raise ValueError(f"{len(calls)} calls, at most {MAX_CALLS}")
    size = -(-(SLOTS_AT + 16 * MAX_THREADS) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    table = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code, restorer = handler(table)
    memory[:CALLS_AT] = struct.pack("<QQ", 0, len(calls))
    for at, call in enumerate(calls):
        padded = [argument & (2**64 - 1) for argument in (*call, *[0] * (6 - len(call)))]
        struct.pack_into("<6Q", memory, CALLS_AT + 48 * at, *padded)
    memory[size : size + len(code)] = code
    protected = kernel.raw(10, table + size, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)  # mprotect
    if protected < 0:
        return f"memory for the handler: {kernel.reason(protected)}"
    action = struct.pack("<QQQQ", table + size, SA_ONSTACK | SA_RESTORER | SA_RESTART, table + size + restorer, 2**64 - 1)
    before = _set_action(action)
    missed = _interrupt(memory, table)
    if missed:
        return missed  # the handler stays: a late signal must find it
    _set_action(before)
    return ""


def _set_action(action: bytes) -> bytes:
    """Set what SIGNAL does, past the C library, which would refuse; returns what it did before."""
    new, old = ctypes.create_string_buffer(action, 32), ctypes.create_string_buffer(32)
    result = kernel.syscall("rt_sigaction", SIGNAL, ctypes.addressof(new), ctypes.addressof(old), 8)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return old.raw


def _interrupt(memory: mmap.mmap, table: int) -> str:
    """Signal threads until none is left that has not made the calls; threads may come and go meanwhile."""
    sent: set[int] = set()
    deadline = time.monotonic() + WAIT_S
    while True:
        outcomes = dict(_slots(memory))
        waiting = others() - set(outcomes)
        if not waiting:
            failed = [thread for thread, outcome in outcomes.items() if outcome]
            return f"a call failed on {len(failed)} of {len(outcomes)} older threads" if failed else ""
        if time.monotonic() > deadline:
            return f"{len(waiting)} older threads did not take the signal within {WAIT_S:g} s"
        for thread in waiting - sent:
            kernel.syscall("tgkill", os.getpid(), thread, SIGNAL)
        sent |= waiting
        time.sleep(0.001)


def _slots(memory: mmap.mmap) -> Iterator[tuple[int, int]]:
    """(thread, outcome) of every thread that has made the calls; outcome 0 is success."""
    taken = min(struct.unpack_from("<Q", memory, 0)[0], MAX_THREADS)
    for at in range(taken):
        thread, outcome = struct.unpack_from("<Qq", memory, SLOTS_AT + 16 * at)
        if thread:  # written last
            yield thread, outcome
