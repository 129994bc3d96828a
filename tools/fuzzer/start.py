"""Starting a worker in the background: while it imports what it needs, so does the fuzzer. No torch is imported here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tools.evaluator.arena import Arena
from tools.evaluator.guards import Guards
from tools.evaluator.runner import Runner, WorkerFailure
from tools.fuzzer.case import Backend

# The evaluator stops a worker outside its turn; nothing is timed here, and a stop for every request costs much.
GUARDS = Guards(frozenset({"pause"}))
CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


class Start:
    """A worker that is starting. `runner` waits for it; then `described` says what a provider told of itself."""

    def __init__(
        self, arena: Arena, on: str, timeout_s: float, backend: Backend, library: Path | None, guards: Guards = GUARDS
    ) -> None:
        self.arena, self.guards, self.described = arena, guards, dict[str, Any]()
        self._problem: WorkerFailure | None = None
        self._runner = Runner(on, arena, timeout_s, guards=guards)
        self._thread = threading.Thread(target=self._load, args=(backend, library), daemon=True)
        self._thread.start()

    def _load(self, backend: Backend, library: Path | None) -> None:
        try:
            self._runner.hello()
            if backend.kind == "provider":
                self.described = self._runner.load_provider(backend.name)
            else:
                self._runner.load_library(str(library))
        except WorkerFailure as problem:
            self._problem = problem

    def runner(self) -> Runner:
        """The loaded worker. Raises WorkerFailure."""
        self._thread.join()
        if self._problem is not None:
            self._runner.kill()
            raise self._problem
        return self._runner

    def abandon(self) -> None:
        """End the worker, started or not."""
        self._runner.kill()
        self._thread.join()
