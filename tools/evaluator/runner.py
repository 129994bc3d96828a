"""The judge's handle on one worker process: start it, command it, and turn whatever goes wrong into a status.

A worker runs in its own session, so that Ctrl-C reaches the judge alone and the whole group can be killed. What it
prints goes to a log of which the last 64 KiB are kept. Outside its turn, from its reply to the next request, a worker is
stopped (SIGSTOP): what it answered with is all that it did, and it takes no time from others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tools.core.files import REPO_ROOT
from tools.evaluator import sandbox
from tools.evaluator.arena import Arena
from tools.evaluator.guards import ALL, Guards
from tools.evaluator.protocol import Channel, ChannelClosed, ChannelGarbage, ChannelTimeout

LOG_BYTES = 64 << 10
LONGEST_MS = 1e9  # of anything that a worker times
MAX_WORKSPACE_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}  # of all that a worker asks for
PRIVATE_BYTES = 8 << 30  # of a confined CPU worker's own memory
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S, STOP_SOON_S = 10.0, 0.5e-3
AWAKE_S = 0.02  # of processor time that a stopped worker may seem to use: a virtual machine booked 3 ms after the stop
TENSORS = ("q", "k", "v", "o", "lse", "lengths", "cu_seqlens")  # of a call
POISONS = (0xFF, 0x7F, 0xA5)  # bytes written over workspaces; 0xFF.. and 0x7F.. read as NaN in every float format


_live: set[int] = set()


def live_workers() -> set[int]:
    """Process ids of all workers of this process that were not ended."""
    return set(_live)


class WorkerFailure(Exception):
    """A worker that died, hung, answered rubbish or refused. `status` is the report's word for it."""

    def __init__(self, status: str, worker: str, message: str) -> None:
        super().__init__(f"{worker}: {message}")
        self.status, self.worker, self.message = status, worker, message


class Stop(Exception):
    """Ends a run with a status of the report."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Call:
    """One attention call. q [B,Hq,Sq,128], k/v [B,Hkv,Skv,128], any strides; packed: [total,H,128]."""

    entry: str  # prefill | packed | extend | decode
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any = None
    lengths: Any = None
    cu_seqlens: Any = None
    max_seqlen: int = 0
    num_sms: int = 0
    num_threads: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    refs: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # of its tensors, once asked for

    def inputs(self) -> tuple[Any, ...]:
        """Everything that a call reads; None where it has no such input."""
        return self.q, self.k, self.v, self.lengths, self.cu_seqlens


class Runner:
    """One worker. `name` is its role in the report (candidate, witness, root, incumbent, or a provider's name).

    trusted: it may map closed chunks. waited_s: how long the judge waited for its replies and its end. multiprocessors: of
    every call that does not say how many to use; 0 for the device's.
    """

    def __init__(
        self,
        name: str,
        arena: Arena,
        timeout_s: float,
        *,
        environment: dict[str, str] | None = None,
        trusted: bool | None = None,
        guards: Guards = ALL,
    ) -> None:
        self.name = name
        self.trusted = name != "candidate" if trusted is None else trusted
        self.waited_s = 0.0
        self.multiprocessors = 0
        self._guards = guards
        self._arena, self._timeout_s = arena, timeout_s
        self._opened: set[int] = set()
        self._next = 0
        self._graphs = 0
        self._passes: dict[int, int] = {}
        self._log = bytearray()
        self._poisoned = 0
        self._workspace: Any = None
        self._workspace_left = MAX_WORKSPACE_BYTES[arena.device]
        self.poison_workspace = True
        self._stopped, self._processor_s = False, 0.0
        self._scratch = tempfile.TemporaryDirectory(prefix="areal-tik-")
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "tools.evaluator.worker",
            "--socket",
            str(theirs.fileno()),
            "--device",
            arena.device,
        ]
        self._process = subprocess.Popen(
            command,
            cwd=REPO_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=sandbox.worker_environment({**os.environ, "TMPDIR": self._scratch.name, **(environment or {})}),
        )
        _live.add(self._process.pid)
        theirs.close()
        self._channel = Channel(ours)
        threading.Thread(target=self._drain, daemon=True).start()

    # ------------------------------------------------------------ plumbing

    def _drain(self) -> None:
        assert self._process.stdout is not None
        while part := os.read(self._process.stdout.fileno(), 1 << 16):
            self._log += part
            del self._log[:-LOG_BYTES]

    def log(self) -> str:
        return self._log.decode("utf-8", "replace")

    @property
    def pid(self) -> int:
        """Of the worker, and of its process group."""
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def strike(self) -> None:
        """Begin to end the worker and everything it started; `kill` waits for the end. A GPU's memory takes a second to
        give back, so that many workers are struck first and waited for together."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the worker and everything it started."""
        self.strike()
        start = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done from here
            self._process.wait(timeout=10)
        self.waited_s += time.monotonic() - start
        _live.discard(self._process.pid)
        with contextlib.suppress(OSError):
            self._scratch.cleanup()

    def _stop(self) -> None:
        """Stop every thread of the worker, and wait until it stands still."""
        pid, start = self._process.pid, time.monotonic()
        soon, deadline = start + STOP_SOON_S, start + STOP_TIMEOUT_S
        with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
            os.killpg(pid, signal.SIGSTOP)
            while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if (now := time.monotonic()) > deadline:
                    raise self._fail("TIMEOUT", f"does not stop within {STOP_TIMEOUT_S:g} s")
                # Most stand still at once, and the shortest sleep takes several times as long.
                time.sleep(20e-6) if now > soon else os.sched_yield()
            self._stopped = True
            self._processor_s = self._processor_time()

    def _processor_time(self) -> float:
        """Processor seconds that the worker has used, as the kernel counts them."""
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self._process.pid << 3) | 2)  # its CPUCLOCK_SCHED clock
        return 0.0

    def _resume(self) -> None:
        if self._stopped:
            self._stopped = False
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ask the worker to leave; kill it where it does not."""
        try:
            if self.alive():
                self.request("quit", timeout_s=5)
                self._resume()  # it was stopped when its answer came
                self._process.wait(timeout=5)
        except (WorkerFailure, subprocess.TimeoutExpired):
            pass
        self.kill()
        self._channel.close()

    def _fail(self, status: str, message: str) -> WorkerFailure:
        self.kill()
        lines = [line for line in self.log().splitlines() if line.strip()]
        return WorkerFailure(status, self.name, message + (f"; last line printed: {lines[-1][:300]}" if lines else ""))

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"died from signal {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def post(self, cmd: str, descriptors: tuple[int, ...] = (), **arguments: Any) -> None:
        """Send a request without waiting; `settle` takes the reply."""
        self._next += 1
        if self._channel.early():
            raise self._fail("RUNTIME_ERROR", f"rubbish: it answered before {cmd} was asked")
        if self._stopped and self._processor_time() > self._processor_s + AWAKE_S:
            raise self._fail("RUNTIME_ERROR", f"ran outside its turn, before {cmd}")
        self._resume()
        try:
            self._channel.send({"id": self._next, "cmd": cmd, **arguments}, self._timeout_s, descriptors)
        except ChannelClosed:
            raise self._fail("RUNTIME_ERROR", f"{self._death()} before {cmd}") from None
        except ChannelTimeout as problem:
            raise self._fail("TIMEOUT", f"{cmd}: {problem}") from None

    def settle(self, cmd: str, timeout_s: float | None = None) -> dict[str, Any]:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        try:
            reply = self._channel.receive(timeout)
        except ChannelTimeout:
            raise self._fail("TIMEOUT", f"no answer to {cmd} within {timeout:g} s") from None
        except ChannelClosed:
            raise self._fail("RUNTIME_ERROR", f"{self._death()} during {cmd}") from None
        except ChannelGarbage as problem:
            raise self._fail("RUNTIME_ERROR", f"rubbish in reply to {cmd}: {problem}") from None
        finally:
            self.waited_s += time.monotonic() - start
        if self._guards.on("pause"):
            self._stop()
        if reply.get("id") != self._next or not isinstance(reply.get("ok"), bool):
            raise self._fail("RUNTIME_ERROR", f"rubbish in reply to {cmd}: {str(reply)[:120]}")
        return reply

    def request(
        self, cmd: str, *, timeout_s: float | None = None, descriptors: tuple[int, ...] = (), **arguments: Any
    ) -> dict[str, Any]:
        """Send a command and return its reply. Raises WorkerFailure."""
        self.post(cmd, descriptors, **arguments)
        reply = self.settle(cmd, timeout_s)
        if not reply["ok"] and "workspace" not in reply:
            text = str(reply.get("error"))[:2000].encode("utf-8", "replace").decode()
            raise WorkerFailure("RUNTIME_ERROR", self.name, f"{cmd}: {text}")
        return reply

    # ------------------------------------------------------------ starting

    def hello(self) -> None:
        self.request("hello", timeout_s=START_TIMEOUT_S)

    def load_library(self, path: str) -> dict[str, str]:
        """Confine the worker and load a kernel library into it; returns how far the confinement goes (sandbox.py)."""
        confine = self._guards.on("sandbox")
        state: dict[str, str] = {}
        if confine:  # answered before anything of the library runs
            memory = PRIVATE_BYTES if self._arena.device == "cpu" else None
            reply = self.request("confine", scratch=self._scratch.name, readable=[path], memory_bytes=memory)
            state = {measure: str(reply["sandbox"][measure]) for measure in sandbox.MEASURES}
        self.request("load", kind="library", name=path)
        return state

    def load_provider(self, name: str) -> dict[str, Any]:
        return self.request("load", kind="provider", name=name, timeout_s=START_TIMEOUT_S)

    # ------------------------------------------------------------ calls

    def _encode(self, call: Call) -> dict[str, Any]:
        ref = self._arena.ref
        if not call.refs:  # a call is captured for several routes, and once more for a larger workspace
            call.refs.update({name: ref(getattr(call, name)) for name in TENSORS})
        return {
            "entry": call.entry,
            **call.refs,
            "max_seqlen": call.max_seqlen,
            "workspace": ref(self._workspace),
            "num_sms": call.num_sms or self.multiprocessors,
            "num_threads": call.num_threads,
        }

    def _show(self, encoded: list[dict[str, Any]]) -> None:
        """Have the worker map every chunk that these calls refer to."""
        chunks = {value["chunk"] for call in encoded for value in call.values() if isinstance(value, dict)}
        for chunk in sorted(chunks - self._opened):
            if self._arena.closed(chunk) and not self.trusted:
                raise AssertionError(f"{self.name} is shown memory that is closed to it")
            arguments, descriptors = self._arena.handle(chunk)
            self.request("open_arena", descriptors=descriptors, **arguments)
            self._opened.add(chunk)

    def poison(self) -> None:
        """Overwrite the workspace; each time with another byte."""
        if self._workspace is not None and self._guards.on("poison"):
            self._poisoned += 1
            self._workspace.fill_(POISONS[self._poisoned % len(POISONS)])
            self.synchronize()

    def synchronize(self) -> None:
        if self._arena.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _with_workspace(self, cmd: str, calls: list[Call], **arguments: Any) -> dict[str, Any]:
        self.synchronize()  # what the judge wrote must be there before another process reads it
        for _ in range(3):
            encoded = [self._encode(call) for call in calls]
            self._show(encoded)
            reply = self.request(cmd, calls=encoded, **arguments)
            if reply["ok"]:
                return reply
            need = reply["workspace"]
            if not isinstance(need, int) or isinstance(need, bool) or not 0 < need <= self._workspace_left:
                raise self._fail("RUNTIME_ERROR", f"asks for a workspace of {str(need)[:40]} bytes")
            need = 1 << (need - 1).bit_length()  # so that one that grows step by step costs twice its end at most
            self._workspace_left -= need
            self._workspace = self._arena.keep(need, closed=self.trusted)
            self.poison()
        raise WorkerFailure("RUNTIME_ERROR", self.name, "asks for more workspace every time it is asked")

    def run(self, calls: list[Call], *, stream: str = "side", route: str | None = None) -> float:
        """Run calls once, in order, and wait; the milliseconds that the worker says it took."""
        if self.poison_workspace:
            self.poison()
        taken = self._with_workspace("call", calls, stream=stream, route=route).get("ms")
        return float(taken) if isinstance(taken, int | float) and 0 <= taken < LONGEST_MS else 0.0

    def capture(self, calls: list[Call], *, route: str | None = None) -> int:
        """Capture calls as one graph and return its number."""
        self._graphs += 1
        self.poison()
        reply = self._with_workspace("capture", calls, graph=self._graphs, route=route)
        samples = reply.get("samples_per_pass")
        if type(samples) is not int or samples != (len(calls) if self._arena.device == "cpu" else 1):
            raise self._fail("RUNTIME_ERROR", f"rubbish in reply to capture: {str(reply)[:120]}")
        self._passes[self._graphs] = samples
        return self._graphs

    def ping(self) -> None:
        """A request that does next to nothing, on the device too."""
        self.synchronize()
        self.request("ping")

    def passes(self, graph: int) -> int:
        """Samples that run every captured call once."""
        return self._passes[graph]

    def replay_all(self, graph: int) -> None:
        """Run every captured call once more."""
        self.replay(graph, self._passes[graph])

    def calls_per_sample(self, graph: int, calls: int) -> int:
        return calls // self._passes[graph]

    def replay(self, graph: int, count: int) -> list[float]:
        """Milliseconds of each of the next `count` samples (device.py) as the worker's device measured them."""
        self.synchronize()
        times = self.request("replay", graph=graph, count=count).get("ms")
        if not (
            isinstance(times, list)
            and len(times) == count
            and all(isinstance(t, int | float) and not isinstance(t, bool) and 0 < t < LONGEST_MS for t in times)
        ):
            raise self._fail("RUNTIME_ERROR", f"rubbish in reply to replay: {str(times)[:120]}")
        return [float(t) for t in times]

    def collect(self, graph: int, calls: list[Call]) -> None:
        encoded = [self._encode(call) for call in calls]
        self._show(encoded)
        self.request("collect", graph=graph, calls=encoded)

    def poison_outputs(self, graph: int) -> None:
        """Fill a provider's own captured outputs with NaN."""
        self.request("poison", graph=graph)

    def profile(self, graphs: list[int]) -> list[dict[str, Any]]:
        """What the worker's profiler saw of one replay of each graph, or of none where it answers rubbish."""
        found = self.request("profile", graphs=graphs).get("replays")
        if isinstance(found, list) and len(found) == len(graphs) and all(isinstance(one, dict) for one in found):
            return found
        return [{} for _ in graphs]

    def drop(self, graph: int) -> None:
        self._passes.pop(graph, None)
        self.request("drop", graph=graph)
