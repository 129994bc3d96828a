"""The kernels under test in workers of their own, and running lists of calls on them.

A worker that dies or hangs is killed and replaced when it is next needed, and the fuzzer goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.core.config import Target
from tools.core.errors import UserError
from tools.evaluator.runner import Runner, WorkerFailure
from tools.fuzzer import stage
from tools.fuzzer.case import PLAIN, Backend, CallSpec, Layout, Scene
from tools.fuzzer.stage import Placed, Values
from tools.fuzzer.start import Start

WARM_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Abilities:
    """What a backend can be asked. routes: for each entry point it has, the ways of calling it, the default first."""

    routes: dict[str, tuple[str | None, ...]]
    lengths: bool = True
    strides: bool = True
    lse: bool = True
    own: bool = True  # a kernel of ours: every legal call must work, in one thread or many

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(self.routes)


ENTRIES = ("prefill", "packed", "extend", "decode")
LIBRARY = Abilities(dict.fromkeys(ENTRIES, (None,)))
FLASH = Abilities(dict.fromkeys(ENTRIES, ()), lengths=False, own=False)
TORCH = Abilities(dict.fromkeys(("prefill", "decode"), ()), lengths=False, lse=False, own=False)
PROVIDERS = {
    "fa3": FLASH,
    "fa2": Abilities(FLASH.routes, lengths=False, lse=False, own=False),
    "sdpa_flash": TORCH,
    "sdpa_cpu": TORCH,
    "cudnn": TORCH,
    "flashinfer": Abilities({"decode": ()}, lengths=False, strides=False, lse=False, own=False),
}


class Failed(Exception):
    """Calls that gave no result. kind: "dies", "hangs" or "refuses" (the worker lives and said why)."""

    def __init__(self, kind: str, on: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.on, self.message = kind, on, message


class Bench:
    """One backend, and for a kernel of ours its witness. `close` ends the workers."""

    def __init__(self, target: Target, backend: Backend, libraries: dict[str, Path], timeout_s: float, start: Start) -> None:
        self.target, self.backend, self.timeout_s = target, backend, timeout_s
        self.device: str = target.config["target"]["device"]
        self.arena = start.arena
        self.layout = "bhsd"
        self.abilities = LIBRARY
        self.restarts = 0
        self._guards = start.guards
        self._libraries = libraries
        self._runners = {"candidate": start.runner()}
        if backend.kind == "provider":
            self._know(start.described)

    def _know(self, described: dict[str, Any]) -> None:
        """What the provider is and can do; UserError where it is not usable here."""
        if not described["available"]:
            raise UserError(f"--backend {self.backend.name}: not available here: {described['reason']}")
        runner, known = self._runners["candidate"], PROVIDERS[self.backend.name]
        routes = {entry: tuple(runner.request("routes", entry=entry)["routes"]) for entry in known.routes}
        self.abilities = dataclasses.replace(known, routes={entry: ways for entry, ways in routes.items() if ways})
        self.layout = described["layout"]
        self.backend = Backend("provider", self.backend.name, version=described["version"])
        if described["compiles"]:
            runner.request("warm", heads_q=32, heads_kv=8, timeout_s=WARM_TIMEOUT_S)

    def _runner(self, on: str) -> Runner:
        """The running worker of a role, started where there is none."""
        runner = self._runners.get(on)
        if runner is not None and runner.alive():
            return runner
        if runner is not None:
            runner.close()
            self.restarts += 1
        if on == "witness" and on not in self._libraries:
            raise UserError("a call on the witness, and none was built")
        start = Start(self.arena, on, self.timeout_s, self.backend, self._libraries.get(on), self._guards)
        self._runners[on] = runner = start.runner()
        return runner

    def renew(self) -> None:
        """Let the next call start a fresh candidate process."""
        if runner := self._runners.pop("candidate", None):
            runner.close()

    def close(self) -> None:
        for runner in self._runners.values():
            runner.kill()
        self._runners.clear()

    def natural(self, entry: str) -> Layout:
        """The storage that suits the backend: rows before heads for some libraries."""
        return PLAIN if self.layout == "bhsd" or entry == "packed" else Layout((0, 2, 1))

    # ------------------------------------------------------------ running

    @contextlib.contextmanager
    def placed(self, scenes: tuple[Scene, ...], calls: list[CallSpec]) -> Iterator[tuple[list[Values], list[Placed]]]:
        """Scenes and calls in memory, not yet run; the memory is taken back at the end."""
        with self.arena.scope():
            values = [stage.fill(self.arena, scene) for scene in scenes]
            yield values, [stage.place(self.arena, values[call.scene], call) for call in calls]

    def run(self, calls: list[Placed]) -> None:
        """Run calls in order, workspaces overwritten before the first. Raises Failed."""
        fresh = True
        for key, group in itertools.groupby(calls, lambda c: (c.spec.on, c.spec.graph, c.spec.stream, c.spec.route)):
            on, graph, stream_name, route = key
            try:
                runner = self._runner(on)
                runner.poison_workspace = fresh or on != "candidate"
                if graph:
                    self._replay(runner, list(group), route)
                else:
                    runner.run([placed.call for placed in group], stream=stream_name, route=route)
            except WorkerFailure as problem:
                runner_alive = on in self._runners and self._runners[on].alive()
                kind = "refuses" if runner_alive else "hangs" if problem.status == "TIMEOUT" else "dies"
                raise Failed(kind, on, problem.message) from None
            fresh = fresh and on != "candidate"

    def _replay(self, runner: Runner, group: list[Placed], route: str | None) -> None:
        """Capture calls over other inputs and lengths, then put the real ones in and replay twice."""
        calls = [placed.call for placed in group]
        inputs = [tensor for call in calls for tensor in (call.q, call.k, call.v, call.lengths) if tensor is not None]
        kept = [tensor.clone() for tensor in inputs]
        for tensor in inputs:
            tensor.fill_(stage.GRAPH_FILL if tensor.is_floating_point() else 1)
        number = runner.capture(calls, route=route)
        for tensor, real in zip(inputs, kept, strict=True):
            tensor.copy_(real)
        for placed in group:
            stage.poison(placed)
        runner.replay_all(number)
        runner.replay_all(number)
        if self.backend.kind == "provider":
            runner.collect(number, calls)
        runner.drop(number)
