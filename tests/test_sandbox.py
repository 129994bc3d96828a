"""The sandbox: every attempt below succeeds in a free process and is refused in a confined one, from any thread of it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.core.config import load_target
from tools.evaluator import sandbox, sandbox_filter, sandbox_kernel, sandbox_threads
from tools.loader.build import build

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sandbox_kernel.machine() is None, reason="the sandbox is for Linux on x86-64 and arm64"
)
PROGRAM = Path(__file__).parent / "sandbox" / "attempts.py"
REPO = Path(__file__).parents[1]
ATTEMPTS = {
    "writes": (
        "create overwrite truncate_path remove rename_in rename_out make_folder symbolic_link hard_link hard_link_in fifo "
        "change_mode change_times make_in_dev_shm make_in_tmp write_own_proc through_symbolic_link"
    ),
    "reads": (
        "read_file list_folder read_by_symbolic_link read_by_proc_root read_standard_library read_repository "
        "read_parent_command read_parent_memory"
    ),
    "network": "internet_socket unix_socket netlink_socket socket_pair io_uring",
    "processes": "fork spawn new_session new_group new_namespace",
    "other processes": (
        "alarm_clock signal_other signal_group signal_thread_of_other queue_signal trace_other read_other_memory open_other "
        "take_descriptor "
        "limit_other pin_other schedule_other slow_other own_by_other pdeathsig fault_handler watch_files"
    ),
    "persistent state": "shared_memory semaphores message_queue posix_queue keyring",
    "privileges": "mount hostname",
}
CALM = "write_scratch rename_scratch folder_in_scratch read_readable threads signal_itself pin_itself memory random null"
ENVIRONMENTAL = {"io_uring", "keyring", "posix_queue", "mount", "hostname", "fault_handler", "new_namespace", "trace_other",
                 "read_other_memory", "read_parent_memory", "take_descriptor", "netlink_socket"}  # fmt: skip
NEEDS_LANDLOCK = {"writes", "reads"}


def run(*arguments: str, program: Path = PROGRAM, timeout: float = 120) -> Any:
    """The JSON that a program prints on its last line."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, timeout=timeout, cwd=REPO, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def victim() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, victim: int) -> dict[str, dict[str, Any]]:
    """Who attempted -> attempt -> "done" or the error's name."""
    found = {}
    for who in ("free", "main", "older", "older_blocked"):
        folder = tmp_path_factory.mktemp(who)
        found[who] = run(who, str(folder), str(victim))
        found[who]["outside"] = {path.name: path.read_text() for path in (folder / "outside").iterdir() if path.is_file()}
    return found


@pytest.mark.parametrize("who", ["main", "older", "older_blocked"])
@pytest.mark.parametrize(("measure", "attempt"), [(m, a) for m, names in ATTEMPTS.items() for a in names.split()])
def test_attempt_is_refused(results: dict[str, dict[str, Any]], who: str, measure: str, attempt: str) -> None:
    state = results[who]["state"][measure]
    if state != "enforced":
        pytest.skip(f"{measure}: {state}")
    free = results["free"][attempt]
    if free != "done" and attempt in ENVIRONMENTAL:
        pytest.skip(f"cannot be shown here: without the sandbox it ends in {free}")
    assert free == "done"
    assert results[who][attempt] in ("EPERM", "EACCES", "EXDEV")


@pytest.mark.parametrize("who", ["free", "main", "older"])
@pytest.mark.parametrize("attempt", CALM.split())
def test_harmless_call_still_works(results: dict[str, dict[str, Any]], who: str, attempt: str) -> None:
    assert results[who][attempt] == "done"


def test_everything_is_enforced_where_the_kernel_can(results: dict[str, dict[str, Any]]) -> None:
    from tools.evaluator import sandbox_files

    if sandbox_files.abi() < 3:
        pytest.skip("the kernel offers no full Landlock")
    assert results["main"]["state"] == dict.fromkeys(sandbox.MEASURES, "enforced")


@pytest.mark.parametrize("who", ["main", "older", "older_blocked"])
def test_nothing_is_left_behind(results: dict[str, dict[str, Any]], who: str) -> None:
    names = {"kept", "truncated", "removed", "renamed", "moved", "mode", "linked"}
    if results[who]["state"]["writes"] == "enforced":
        assert results[who]["outside"] == dict.fromkeys(names, "secret")
    assert results["free"]["outside"] != dict.fromkeys(names, "secret")


def test_every_thread_is_without_privileges(results: dict[str, dict[str, Any]]) -> None:
    threads = results["older_blocked"]["threads status"]
    assert len(threads) >= 2
    for thread in threads:
        assert (int(thread["CapEff"], 16), int(thread["CapPrm"], 16)) == (0, 0)
        assert (thread["NoNewPrivs"], thread["Seccomp"]) == ("1", "2")
    free = results["free"]["threads status"]
    assert all(thread["NoNewPrivs"] == "0" for thread in free)
    assert results["main"]["core limit"] == [0, 0]
    assert results["main"]["signal at the parent's death"] == signal.SIGUSR1


@pytest.mark.parametrize("call", ["exec", "int80", "x32"])
def test_other_ways_into_the_kernel(tmp_path: Path, victim: int, call: str) -> None:
    if call == "int80" and sandbox_kernel.machine() != "x86_64":
        pytest.skip("x86-64 only")
    free, confined = (run(who, str(tmp_path), str(victim), call)[call] for who in ("free", "main"))
    assert free in ("done", "ENOSYS")  # x32 is rarely compiled in
    assert confined == "EPERM"


# ---------------------------------------------------------------- where the kernel offers less


def test_without_landlock_nothing_is_written_at_all(tmp_path: Path, victim: int) -> None:
    found = run("no_landlock", str(tmp_path), str(victim))
    assert found["state"]["writes"] == "enforced"
    assert found["state"]["reads"] == "not enforced: the kernel offers no Landlock"
    for attempt in ATTEMPTS["writes"].split():
        assert found[attempt] == "EPERM", attempt
    assert found["write_scratch"] == "EPERM"
    assert found["read_file"] == "done"


def test_without_landlock_a_cuda_worker_is_not_confined(tmp_path: Path, victim: int) -> None:
    found = run("no_landlock_cuda", str(tmp_path), str(victim))
    assert found["state"]["writes"] == "not enforced: the kernel offers no Landlock; existing files can be opened for writing"
    assert (found["overwrite"], found["create"], found["remove"]) == ("done", "EPERM", "EPERM")
    assert found["state"]["persistent state"].startswith("not enforced")


def test_a_missing_filter_is_said(tmp_path: Path, victim: int) -> None:
    found = run("no_filter", str(tmp_path), str(victim))["state"]
    for measure in ("network", "processes", "other processes", "persistent state", "writes"):
        assert found[measure] == "not enforced: test", measure


def test_enforced_is_measured_not_claimed(tmp_path: Path, victim: int) -> None:
    """Installing reports success and does nothing: the attempts find out."""
    found = run("liar", str(tmp_path), str(victim))["state"]
    for measure in ("network", "processes", "other processes", "persistent state"):
        assert found[measure] == "not enforced: an attempt was not refused", measure


def test_a_thread_that_cannot_be_reached_is_said(tmp_path: Path, victim: int) -> None:
    found = run("unreachable", str(tmp_path), str(victim))["state"]
    assert found["reads"] == "not enforced: 1 older threads did not take the signal within 0.2 s"
    assert found["privileges"].startswith("not enforced: 1 older threads")
    assert found["writes"] == "enforced"  # the filter holds for all threads, and opens nothing for writing


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sandbox.enter("/nowhere", [], "cpu") == dict.fromkeys(sandbox.MEASURES, "not enforced: no sandbox on darwin")
    assert set(sandbox.harden_judge().values()) == {"not enforced: not on darwin"}
    assert sandbox.kill_strays(set()) == []


# ---------------------------------------------------------------- the filter by itself


def decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Run a filter as the kernel would; the value that it returns."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *(a & (2**64 - 1) for a in (*arguments, *[0] * (6 - len(arguments)))))
    code = list(struct.iter_unpack("=HBBI", program))
    at, accumulator = 0, 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x06:
            return int(value)
        else:
            hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            at += yes if hit else no


ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PID = 4321
CASES = [
    ("ptrace", (), EPERM), ("kill", (PID, 9), ALLOW), ("kill", (PID + 1, 9), EPERM), ("kill", (0, 9), EPERM),
    ("kill", (-1, 9), EPERM), ("tgkill", (PID, 7, 9), ALLOW), ("tgkill", (1, 1, 9), EPERM), ("sched_setaffinity", (0,), ALLOW),
    ("sched_setaffinity", (PID,), ALLOW), ("sched_setaffinity", (1,), EPERM), ("clone", (0x3D0F00,), ALLOW),
    ("clone", (0x11,), EPERM), ("clone", (0x10000000 | 0x10F00,), EPERM), ("clone", (0x4111,), EPERM), ("clone3", (), ENOSYS),
    ("prctl", (1, 9), EPERM), ("prctl", (15,), ALLOW), ("fcntl", (3, 8, 1), EPERM), ("fcntl", (3, 3), ALLOW),
    ("ioctl", (3, 0x8901), EPERM), ("ioctl", (3, 0x5401), ALLOW), ("setpriority", (0, 0, 5), ALLOW),
    ("setpriority", (0, 1, 5), EPERM), ("setpriority", (1, 0, 5), EPERM), ("socket", (1, 1), EPERM), ("socket", (2, 1), EPERM),
    ("openat", (0, 0, 0o101), ALLOW), ("getpid", (), ALLOW), ("connect", (), EPERM), ("execve", (), EPERM),
]  # fmt: skip


@pytest.mark.parametrize("architecture", list(sandbox_kernel.ARCHITECTURES))
def test_filter_decides(architecture: str) -> None:
    arch, numbers = sandbox_kernel.ARCHITECTURES[architecture], sandbox_kernel.numbers(architecture)
    program = sandbox_filter.program(PID, architecture)
    for name, arguments, wanted in CASES:
        assert decide(program, arch, numbers[name], *arguments) == wanted, (name, arguments)
    for name in {call for names in sandbox_filter.REFUSED.values() for call in names.split()} & set(numbers):
        assert decide(program, arch, numbers[name]) == EPERM, name
    assert decide(program, 0x40000003, numbers["getpid"]) == EPERM  # a 32-bit call
    assert decide(program, arch, sandbox_kernel.NEWEST + 1) == ENOSYS
    if architecture == "x86_64":
        assert decide(program, arch, 0x40000000 | numbers["getpid"]) == EPERM
    unix = sandbox_filter.program(PID, architecture, unix_sockets=True)
    assert [decide(unix, arch, numbers["socket"], family) for family in (1, 2, 10, 16)] == [ALLOW, EPERM, EPERM, EPERM]
    for files, flags in (("frozen", (1, 2, 0o100, 0o1000, 0o20200000)), ("devices", (0o100, 0o1000, 0o20200000))):
        strict = sandbox_filter.program(PID, architecture, files=files)
        assert {decide(strict, arch, numbers["openat"], 0, 0, flag) for flag in flags} == {EPERM}
        assert decide(strict, arch, numbers["openat"], 0, 0, 0o2000000) == ALLOW
        assert decide(strict, arch, numbers["openat"], 0, 0, 2) == (EPERM if files == "frozen" else ALLOW)
        assert decide(strict, arch, numbers["unlinkat"]) == EPERM
        assert decide(strict, arch, numbers["openat2"]) == ENOSYS


def test_every_named_call_has_a_number() -> None:
    rules = sandbox_filter.rules(PID, unix_sockets=False, files="frozen")
    known = set(sandbox_kernel.numbers("x86_64")) | set(sandbox_kernel.numbers("aarch64"))
    assert set(rules) <= known


@pytest.mark.parametrize(
    ("architecture", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_are_those_of_the_headers(architecture: str, header: str) -> None:
    if not os.path.exists(header):
        pytest.skip(f"{header} is not installed")
    listed = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    ours = sandbox_kernel.numbers(architecture)
    shared = {name: number for name, number in ours.items() if name in listed}
    assert len(shared) > 90
    assert shared == {name: int(listed[name]) for name in shared}


# ---------------------------------------------------------------- what runs inside


def test_kernel_library_gives_the_same_bits_inside(tmp_path: Path) -> None:
    library = str(build(load_target("cpu")).library)
    program = PROGRAM.with_name("kernel.py")
    free, confined = (run(who, library, str(tmp_path), program=program) for who in ("free", "confined"))
    assert free["output"] == confined["output"]
    assert confined["distinct"] > 1000
    assert confined["threads"] == free["threads"] >= 3
    assert confined["error"] == free["error"] and "not a kernel library" in confined["error"]
    assert confined["traceback"].startswith("Traceback") and free["other file"] == "read"
    assert confined["other file"] == "PermissionError" or confined["state"]["reads"] != "enforced"


def test_torch_runs_inside(tmp_path: Path) -> None:
    found = run(str(tmp_path), program=PROGRAM.with_name("provider.py"))
    assert found["same"] is True and found["shown"] is True
    assert found["threads before"] > 1
    assert "must match" in found["error"]
    assert found["imported"] == "torch.utils.bundled_inputs"
    assert found["other file"] == "PermissionError" or found["state"]["reads"] != "enforced"


def check_worker(target: str, readable_error: str) -> None:
    """A worker of the evaluator does its work confined, and reports errors."""
    from tools.evaluator.arena import Arena
    from tools.evaluator.runner import Call, Runner, WorkerFailure

    loaded = load_target(target)
    arena = Arena(loaded.config["target"]["device"], 1 << 24)
    runner = Runner("candidate", arena, 60.0)
    try:
        runner.hello()
        state = runner.load_library(str(build(loaded).library))
        assert set(state) == set(sandbox.MEASURES)
        print(target, json.dumps(state))  # pytest -s shows it
        assert state["network"] == state["processes"] == state["other processes"] == "enforced"
        q, o = arena.empty((1, 4, 300, 128)), arena.empty((1, 4, 300, 128))
        k, v, odd = arena.empty((1, 2, 300, 128)), arena.empty((1, 2, 300, 128)), arena.empty((1, 3, 300, 128))
        for tensor in (q, k, v, odd):
            tensor.normal_()
        o.fill_(float("nan"))
        runner.run([Call("prefill", q, k, v, o)])
        assert not o.isnan().any()
        graph = runner.capture([Call("prefill", q, k, v, o)])
        o.fill_(float("nan"))
        runner.replay_all(graph)
        assert not o.isnan().any()
        later = arena.empty((1, 4, 1 << 15, 128))  # a chunk that is mapped by a worker already confined
        runner.run([Call("extend", q, k, v, later[:, :, :300])])
        with pytest.raises(WorkerFailure, match=readable_error):
            runner.run([Call("prefill", q, odd, odd, o)])
    finally:
        runner.close()
    assert not runner.alive()


def test_worker_is_confined() -> None:
    check_worker("cpu", "heads_q must be")


@pytest.mark.gpu
def test_cuda_worker_is_confined(gpu: str) -> None:
    check_worker(gpu, "unified_prefill: ")


def test_too_many_calls_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_kernel, "machine", lambda: "x86_64")
    monkeypatch.setattr(sandbox_threads, "others", lambda: {1})
    with pytest.raises(ValueError, match="65 calls, at most 64"):
        sandbox_threads.run_on_others([(39,)] * 65)


def test_older_threads_of_another_architecture_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_kernel, "machine", lambda: "aarch64")
    monkeypatch.setattr(sandbox_threads, "others", lambda: {1, 2})
    assert sandbox_threads.run_on_others([]) == "2 older threads cannot be reached on this architecture"


# ---------------------------------------------------------------- the judge


def test_judge_is_closed_to_its_workers() -> None:
    found = run("dumpable", program=PROGRAM.with_name("judge.py"))
    assert found["before"] == "done"
    assert found["after"] in ("EACCES", "EPERM")
    assert found["state"] == {"closed to other processes": "enforced", "adopts orphans": "enforced"}


@pytest.fixture(scope="module")
def strays() -> dict[str, Any]:
    return run("strays", program=PROGRAM.with_name("judge.py"))  # type: ignore[no-any-return]


def test_strays_are_killed(strays: dict[str, Any]) -> None:
    assert strays["alive before"] == strays["strays"] and len(strays["strays"]) == 3
    assert strays["killed"] == strays["strays"]
    assert strays["alive after"] == []


def test_other_children_live(strays: dict[str, Any]) -> None:
    assert strays["kept alive"] == strays["kept"]
    assert set(strays["kept"]) == {"before", "plain", "own session", "known worker"}


def test_nothing_is_killed_without_hardening() -> None:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True, env={})
    try:
        script = "from tools.evaluator import sandbox; print(sandbox.kill_strays(set()))"
        assert (
            subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True).stdout
            == "[]\n"
        )
        time.sleep(0.05)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
