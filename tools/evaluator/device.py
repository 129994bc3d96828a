"""How a worker runs, captures and times calls on its device.

Both classes have the same methods. A *thunk* is a function of one argument, the stream's handle (None on the CPU), that
enqueues one call and returns its output or None. A *graph* is a list of thunks captured once and replayed many times;
on the CPU that is the plain loop over them.

A *sample* is one timed bracket: a whole replay of a CUDA graph, or one call on the CPU, where calls follow one another in
rotation. `samples_per_pass` of them run every captured call once.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Thunk = Callable[[Any], Any]
WARM_THUNKS = 4  # more calls than this in one graph are all alike
REPLAY = "areal-tik replay"  # name of a stretch of host code in a profiler's trace


@dataclass
class Graph:
    """thunks: what was captured. outputs: what each returned (kept alive, so that no two share memory)."""

    thunks: list[Thunk]
    outputs: list[Any] = field(default_factory=list)
    handle: Any = None
    position: int = 0  # CPU: the thunk that comes next


class CpuDevice:
    """Calls run at once; a replay is timed with perf_counter."""

    kind = "cpu"

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[Any]:
        yield None

    def synchronize(self) -> None:
        pass

    def touch(self) -> None:
        """The least that a device can be asked to do."""

    def samples_per_pass(self, graph: Graph) -> int:
        return len(graph.thunks)

    def capture(self, thunks: list[Thunk]) -> Graph:
        thunks[0](None)
        return Graph(thunks, [None] * len(thunks))

    def replay(self, graph: Graph, count: int) -> list[float]:
        """Milliseconds of each of the next `count` calls."""
        times = []
        for _ in range(count):
            index = graph.position
            graph.position = (index + 1) % len(graph.thunks)
            start = time.perf_counter_ns()
            output = graph.thunks[index](None)
            times.append((time.perf_counter_ns() - start) / 1e6)
            graph.outputs[index] = output
        return times

    def release(self, graph: Graph) -> None:
        graph.outputs.clear()

    def profile(self, graphs: list[Graph]) -> list[dict[str, Any]]:
        raise NotImplementedError("kernels are observed on CUDA devices only")


class CudaDevice:
    """CUDA graphs through torch, timed with events around every replay on a stream of their own."""

    kind = "cuda"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.zeros(1, device="cuda")
        gc.freeze()  # every capture collects garbage: leave what importing torch made out of it
        self._side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._other: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._noise: Any = None
        self._word: Any = None

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[Any]:
        """The stream to enqueue on: "default", "side", or "busy" (the side stream while another one is kept busy)."""
        torch = self._torch
        if name == "busy":
            if self._noise is None:
                self._noise = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()
            with torch.cuda.stream(self._other):
                for _ in range(8):
                    torch.mm(self._noise, self._noise)
        stream = torch.cuda.default_stream() if name == "default" else self._side
        with torch.cuda.stream(stream):
            yield stream.cuda_stream

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def touch(self) -> None:
        """The least that a device can be asked to do, and its end awaited: one word, between two events."""
        torch = self._torch
        if self._word is None:
            self._word = torch.zeros(1, device="cuda")
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.stream(self._side):
            events[0].record()
            self._word.fill_(1)
            events[1].record()
        torch.cuda.synchronize()

    def samples_per_pass(self, graph: Graph) -> int:
        return 1

    def capture(self, thunks: list[Thunk]) -> Graph:
        torch = self._torch
        with self.stream("side") as stream:
            for thunk in thunks[:WARM_THUNKS]:  # loads modules and builds handles before the capture
                thunk(stream)
        torch.cuda.synchronize()
        graph = Graph(thunks, handle=torch.cuda.CUDAGraph())
        # thread_local: a library may still be loading modules in a thread of its own
        with torch.cuda.graph(graph.handle, stream=self._side, capture_error_mode="thread_local"):
            graph.outputs = [thunk(self._side.cuda_stream) for thunk in thunks]
        torch.cuda.synchronize()
        return graph

    def replay(self, graph: Graph, count: int) -> list[float]:
        """Milliseconds of each of `count` replays, from the events around it."""
        torch = self._torch
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        with torch.cuda.stream(self._side):
            events[0].record()
            for event in events[1:]:
                graph.handle.replay()
                event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    def release(self, graph: Graph) -> None:
        graph.handle.reset()
        graph.outputs.clear()
        self._torch.cuda.empty_cache()

    def warm_profiler(self) -> None:
        """Profile nothing once: loads the profiler's libraries."""
        thunk: Thunk = lambda stream: self._torch.zeros(1, device="cuda")  # noqa: E731
        graph = self.capture([thunk])
        self.profile([graph])
        self.release(graph)

    def profile(self, graphs: list[Graph]) -> list[dict[str, Any]]:
        """Kernels of one replay of each: name, launches, grid, block, registers, shared bytes, share of the GPU time.

        In one session of the profiler, since starting and ending one takes a second.
        """
        torch = self._torch
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events.*")  # one cycle is all there is
            with torch.profiler.profile(activities=activities) as profiler:
                for number, graph in enumerate(graphs):
                    with torch.profiler.record_function(f"{REPLAY} {number}"):
                        self.replay(graph, 1)  # and its end awaited
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(path)
            with open(path) as file:
                events = json.load(file).get("traceEvents", [])
        found = [kernels_of(within(events, f"{REPLAY} {number}")) for number in range(len(graphs))]
        return [{"kernels": kernels, "note": "" if kernels else "the profiler reported no kernels"} for kernels in found]


def within(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The events of a profiler's trace that begin while the stretch of host code with that name runs."""
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation" and e.get("name") == name]
    return [event for event in events if any(start <= event.get("ts", -1.0) <= end for start, end in spans)]


def kernels_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of a profiler's trace, those of one name and shape together, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") != "kernel":
            continue
        args = event.get("args", {})
        grid, block = args.get("grid"), args.get("block")
        entry = found.setdefault(
            f"{event['name']} {grid} {block}",
            {
                "name": event["name"],
                "launches": 0,
                "grid": grid,
                "block": block,
                "gpu_us": 0.0,
                "registers": args.get("registers per thread"),
                "shared_bytes": args.get("shared memory"),
            },
        )
        entry["launches"] += 1
        entry["gpu_us"] += float(event.get("dur", 0.0))
    total = sum(entry["gpu_us"] for entry in found.values()) or 1.0
    for entry in found.values():
        entry["share"] = entry["gpu_us"] / total
    return sorted(found.values(), key=lambda entry: -entry["gpu_us"])


def open_device(kind: str) -> CpuDevice | CudaDevice:
    return CudaDevice() if kind == "cuda" else CpuDevice()
