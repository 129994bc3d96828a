"""A worker process: loads one thing (a kernel library or a baseline provider) and obeys the judge over a socket.

Usage (started by tools/evaluator/runner.py only): python -m tools.evaluator.worker --socket FD --device cpu|cuda

It owns no data of the evaluation: tensors arrive as references into the judge's arena. A kernel library is called
through the C interface directly, so that the judge also owns its workspace. torch is imported only where a CUDA
device or a provider needs it. Before a kernel library is loaded the process confines itself (sandbox.py).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.core.errors import KernelError, UserError
from tools.evaluator import sandbox
from tools.evaluator.arena import Mapping, Ref
from tools.evaluator.device import Graph, Thunk, open_device
from tools.evaluator.protocol import Channel, ChannelClosed
from tools.loader import abi

ENTRIES = {"prefill": abi.PREFILL, "packed": abi.PREFILL, "extend": abi.EXTEND, "decode": abi.DECODE}


class WorkspaceTooSmall(Exception):
    """A call needs more workspace than the judge lent; the argument is the number of bytes."""


def _strides(ref: Ref, packed: bool) -> Any:
    """(batch, head, row) strides of a [B,H,S,128] reference, or of a packed [total,H,128] one."""
    stride = ref["stride"]
    return (ctypes.c_int64 * 3)(*((0, stride[1], stride[0]) if packed else stride[:3]))


class LibraryHost:
    """Calls one kernel library. A call is {"entry", "q", "k", "v", "o", "lse", "lengths", "cu_seqlens", "max_seqlen",
    "workspace", "num_sms", "num_threads"}; tensors are references or null."""

    def __init__(self, path: str, mapping: Mapping) -> None:
        self._library = abi.Library(Path(path))
        self._mapping = mapping

    def params(self, call: dict[str, Any]) -> abi.Params:
        packed = call["entry"] == "packed"
        pointer = self._mapping.pointer
        q, k, lse = call["q"], call["k"], call["lse"]
        params = abi.Params()
        for name in ("q", "k", "v", "o", "lse", "lengths", "cu_seqlens", "workspace"):
            setattr(params, name, pointer(call[name]))
        params.q_stride, params.k_stride = _strides(q, packed), _strides(k, packed)
        params.v_stride, params.o_stride = _strides(call["v"], packed), _strides(call["o"], packed)
        params.heads_q, params.heads_kv = q["shape"][1], k["shape"][1]
        if packed:
            params.batch = call["cu_seqlens"]["shape"][0] - 1
            params.seqlen_q = params.seqlen_kv = call["max_seqlen"]
        else:
            params.batch, params.seqlen_q, params.seqlen_kv = q["shape"][0], q["shape"][2], k["shape"][2]
        if lse is not None:
            params.lse_stride = (ctypes.c_int64 * 2)(*((0, lse["stride"][0]) if packed else lse["stride"][:2]))
        params.num_sms, params.num_threads = call["num_sms"], call["num_threads"]
        return params

    def prepare(self, call: dict[str, Any], route: str | None) -> Thunk:
        params, entry, library = self.params(call), ENTRIES[call["entry"]], self._library
        need = library.workspace_bytes(entry, params)
        have = 0 if call["workspace"] is None else call["workspace"]["shape"][0]
        if need > have:
            raise WorkspaceTooSmall(need)
        if need == 0:
            params.workspace = None
        return lambda stream: library.call(entry, params, stream)


class ProviderHost:
    """Calls one baseline. Its outputs live in its own memory; `collect` copies them into the arena."""

    def __init__(self, name: str, mapping: Mapping) -> None:
        import torch

        from tools.evaluator import providers

        torch.set_grad_enabled(False)
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        self.provider = providers.make(name)
        self._mapping = mapping

    def prepare(self, call: dict[str, Any], route: str | None) -> Thunk:
        names = ("q", "k", "v", "lengths", "cu_seqlens")
        tensors = {name: self._mapping.tensor(call[name]) for name in names}
        run = self.provider.prepare(call["entry"], tensors, call["max_seqlen"], route)
        return lambda stream: run()

    def describe(self) -> dict[str, Any]:
        available, reason, version = self.provider.available()
        return {
            "available": available,
            "reason": reason,
            "version": version,
            "layout": self.provider.layout,
            "compiles": self.provider.compiles,
        }


class Worker:
    """The command loop."""

    def __init__(self, channel: Channel, device: str) -> None:
        self._channel = channel
        self._mapping = Mapping(device)
        self._kind = device
        self._device: Any = None
        self._host: Any = None
        self._graphs: dict[int, Graph] = {}

    def serve(self) -> None:
        while True:
            request = self._channel.receive()
            if request["cmd"] == "quit":
                self._channel.send({"id": request["id"], "ok": True})
                return
            handler: Callable[..., dict[str, Any]] = getattr(self, "do_" + request["cmd"])
            arguments = {key: value for key, value in request.items() if key not in ("id", "cmd")}
            try:
                reply = {"ok": True, **handler(**arguments)}
            except WorkspaceTooSmall as need:
                reply = {"ok": False, "error": "workspace", "workspace": need.args[0]}
            except (UserError, KernelError) as problem:
                reply = {"ok": False, "error": str(problem)}
            except Exception as problem:  # a library's own exception is the judge's to report
                reply = {"ok": False, "error": " ".join(f"{type(problem).__name__}: {problem}".split())[:2000]}
            self._channel.send({"id": request["id"], **reply})

    def do_hello(self) -> dict[str, Any]:
        self._device = open_device(self._kind)
        return {"pid": os.getpid()}

    def do_ping(self) -> dict[str, Any]:
        self._device.touch()
        return {}

    def do_warm_profiler(self) -> dict[str, Any]:
        """Load what a profiler needs, while this process can still read it."""
        self._device.warm_profiler()
        return {}

    def do_open_arena(self, chunk: int, handle: str, bytes: int) -> dict[str, Any]:
        descriptors = self._channel.descriptors
        self._mapping.open(chunk, handle, bytes, descriptors.pop() if descriptors else None)
        return {}

    def do_confine(self, scratch: str, readable: list[str], memory_bytes: int | None) -> dict[str, Any]:
        return {"sandbox": sandbox.enter(scratch, readable, self._kind, memory_bytes=memory_bytes)}

    def do_load(self, kind: str, name: str) -> dict[str, Any]:
        if kind == "provider":
            self._host = ProviderHost(name, self._mapping)
            return dict(self._host.describe())
        self._host = LibraryHost(name, self._mapping)
        return {}

    def do_routes(self, entry: str) -> dict[str, Any]:
        return {"routes": self._host.provider.routes(entry)}

    def do_warm(self, heads_q: int, heads_kv: int) -> dict[str, Any]:
        self._host.provider.warm(heads_q, heads_kv)
        return {}

    def do_call(self, calls: list[dict[str, Any]], stream: str, route: str | None = None) -> dict[str, Any]:
        """Run calls once, in order, on one stream, and wait for them. Providers' outputs are copied to each call's o."""
        start = time.perf_counter()
        thunks = [self._host.prepare(call, route) for call in calls]
        with self._device.stream(stream) as handle:
            for call, thunk in zip(calls, thunks, strict=True):
                self._store(thunk(handle), call)
        self._device.synchronize()
        return {"ms": 1000 * (time.perf_counter() - start)}

    def _store(self, output: Any, call: dict[str, Any]) -> None:
        if output is not None:
            out, lse = output
            self._mapping.tensor(call["o"]).copy_(out)
            if call["lse"] is not None and lse is not None:
                self._mapping.tensor(call["lse"]).copy_(lse)

    def do_capture(self, graph: int, calls: list[dict[str, Any]], route: str | None = None) -> dict[str, Any]:
        self._graphs[graph] = self._device.capture([self._host.prepare(call, route) for call in calls])
        return {"samples_per_pass": self._device.samples_per_pass(self._graphs[graph])}

    def do_replay(self, graph: int, count: int) -> dict[str, Any]:
        return {"ms": self._device.replay(self._graphs[graph], count)}

    def do_poison(self, graph: int) -> dict[str, Any]:
        """Fill a provider's captured outputs with a NaN that no finite input leads to."""
        from tools.evaluator.compare import poison_

        for output in self._graphs[graph].outputs:
            if output is not None:
                poison_(output[0])
        self._device.synchronize()
        return {}

    def do_collect(self, graph: int, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Copy a provider's captured outputs into the judge's memory."""
        for output, call in zip(self._graphs[graph].outputs, calls, strict=True):
            self._store(output, call)
        self._device.synchronize()
        return {}

    def do_profile(self, graphs: list[int]) -> dict[str, Any]:
        return {"replays": self._device.profile([self._graphs[graph] for graph in graphs])}

    def do_drop(self, graph: int) -> dict[str, Any]:
        found = self._graphs.pop(graph, None)
        if found is not None:
            self._device.release(found)
        return {}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan outlives a killed judge
    try:
        Worker(Channel(socket.socket(fileno=options.socket), takes=True), options.device).serve()
    except ChannelClosed:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
