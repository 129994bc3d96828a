"""Everything that one evaluation holds: arena, builds and workers, from their start to their end."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tools.core.config import Target
from tools.core.errors import BuildError
from tools.core.files import show_path
from tools.evaluator import integrity, report, sandbox, static, turn
from tools.evaluator.grids import cells, grid
from tools.evaluator.guards import Guards
from tools.evaluator.localise import FirstDivergence
from tools.evaluator.options import Options
from tools.evaluator.runner import START_TIMEOUT_S, Runner, Stop, live_workers
from tools.loader.build import Built, build, unchanged

ANOTHER_TIMEOUT_S = 15.0
CHUNK_BYTES = 1 << 30  # of CPU memory, which is taken only when touched
CUDA_CHUNK_BYTES, CUDA_CHUNK_SHARE = 32 << 30, 0.35  # of device memory: one chunk that fits every cell, a part of what is free

Show = Callable[[str, str], None]


class Bench:
    """One run's machine, files and processes."""

    def __init__(
        self, options: Options, target: Target, record: dict[str, Any], root: dict[str, Any] | None, show: Show
    ) -> None:
        self.options, self.target, self.record, self.root_report = options, target, record, root
        self.seed = -1  # until the candidate is loaded
        self.waited_s = 0.0  # for workers that are gone, for compilers, and for the profiler of counters
        self.guards = Guards(options.guards_off)
        self._show = show
        config = target.config
        self.device: str = config["target"]["device"]
        self.limits: dict[str, Any] = config["limits"]
        self.heads = (int(config["workloads"]["heads_q"]), int(config["workloads"]["heads_kv"]))
        self.grid = options.grid or grid(self.device, options.cases)
        self.cells = cells(config["workloads"], self.grid.cells)
        self.builds: dict[str, Built] = {}
        self.runners: dict[str, Runner] = {}
        self._turn = ExitStack()
        self.arena: Any = None
        self.baselines: Any = None
        self.diverged: FirstDivergence | None = None
        self.disk = integrity.Disk([*integrity.evaluator_files(), *target.merged.chain])
        self._stage_name = ""

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._show(name, "")
        before, self._stage_name = self._stage_name, name
        start = time.monotonic()
        try:
            yield
        finally:
            self._stage_name = before
            stages = self.record["run"]["stages"]
            stages[name] = round(stages.get(name, 0.0) + time.monotonic() - start, 3)

    def _chunk_bytes(self) -> int:
        if self.device == "cpu":
            return CHUNK_BYTES
        import torch

        free, _ = torch.cuda.mem_get_info()
        return min(CUDA_CHUNK_BYTES, int(CUDA_CHUNK_SHARE * free)) >> 21 << 21

    def _progress(self, text: str) -> None:
        self._show(self._stage_name, text)

    def _spawn(self, name: str) -> Runner:
        """Start a worker; its first reply is awaited when it is loaded."""
        if self.guards.on("files"):
            self._refuse_changes()
        runner = Runner(name, self.arena, self.limits["case_timeout_s"], guards=self.guards)
        self.runners[name] = runner
        runner.post("hello")
        return runner

    def _refuse_changes(self) -> None:
        if problem := self.disk.changed():
            raise Stop("REFUSED", problem)

    def _draw_seed(self) -> None:
        """After the candidate is loaded: nothing that it did before could know the inputs."""
        if self.options.seed is not None:
            self.seed = self.options.seed
        else:
            self.seed = secrets.randbits(62) if self.guards.on("seed") else 0
        self.record["run"]["seed"] = self.seed

    def close(self) -> None:
        """End all workers at once: none holds anything that is needed."""
        for runner in self.runners.values():
            runner.strike()
        for runner in self.runners.values():
            runner.kill()
            self.waited_s += runner.waited_s
        sandbox.kill_strays(live_workers())
        if "candidate" in self.builds and not self.options.cached:
            shutil.rmtree(self.builds["candidate"].library.parent, ignore_errors=True)
        for name, runner in self.runners.items():
            if runner.log().strip():
                self.record["logs"][name] = runner.log()[-4000:]
        self.runners.clear()
        if self.arena is not None:
            self.arena.close()
        self._turn.close()

    def _take_turn(self) -> None:
        start = time.monotonic()
        self._turn.enter_context(turn.take(self.device, lambda: self._progress("another evaluation has the GPU")))
        self.waited_s += time.monotonic() - start

    def _build(self) -> None:
        wanted: dict[str, tuple[Path | None, str]] = {
            "candidate": (self.options.source, "kernel"),
            "witness": (None, "witness"),
        }
        if self.options.root is not None and self.root_report is None:
            wanted["root"] = (self.options.root, "kernel")
        if self.options.incumbent is not None:
            wanted["incumbent"] = (self.options.incumbent, "kernel")
        for role, (source, kind) in wanted.items():
            self._progress(role)
            start = time.monotonic()
            try:
                # The candidate's library comes from no cache: whoever can write there could have put anything into it.
                self.builds[role] = built = build(
                    self.target, source, role=kind, fresh=role == "candidate" and not self.options.cached
                )
            except BuildError as problem:
                if role == "candidate":
                    raise
                raise Stop("REFUSED", f"the {role} does not build: {problem}") from None
            finally:
                self.waited_s += time.monotonic() - start
            self.disk.add([built.source, *(self.target.root / name for name in self.target.kernel_files(kind))])
            self.record["builds"][role] = report.build_record(built)
            self._inspect(role, built)
            spilling = [use["kernel"] for use in built.resources if use["spill_store_bytes"] or use["spill_load_bytes"]]
            if spilling:
                self.record["notes"].append(f"{role}: {len(spilling)} kernels spill registers, first {spilling[0]}")

    def _library(self, role: str) -> str:
        """Path of a role's library, which must be what was built."""
        unchanged(self.builds[role])
        return str(self.builds[role].library)

    def _inspect(self, role: str, built: Built) -> None:
        """Static evidence; a candidate, root or incumbent that asks for more than a kernel needs is refused."""
        parent = self.options.incumbent or self.options.root
        base = None
        if role == "candidate" and parent is not None:
            try:
                base = build(self.target, parent)
            except BuildError as problem:
                raise Stop("REFUSED", f"the candidate's parent does not build: {problem}") from None
        evidence = static.inspect(built, self.device, base)
        self.record["builds"][role]["static"] = evidence
        refusal = evidence["refusal"]
        if refusal and self.guards.on("imports"):
            raise Stop("REFUSED", f"{role}: {show_path(built.source)}: {refusal}")

    def _profiled(self, role: str) -> Runner:
        """A fresh worker of a role that a profiler may look into."""
        runner = self.runners[f"{role} profiled"] = Runner(role, self.arena, self.limits["case_timeout_s"], guards=self.guards)
        runner.request("hello", timeout_s=START_TIMEOUT_S)
        runner.request("warm_profiler")
        runner.load_library(self._library(role))
        return runner

    def _another(self) -> Runner:
        """A worker of the candidate beside the one that is judged: it may die without harm to the run."""
        runner = Runner("candidate", self.arena, ANOTHER_TIMEOUT_S, guards=self.guards)
        self.runners["candidate again"] = runner
        runner.hello()
        runner.load_library(self._library("candidate"))
        return runner

    def _load(self, role: str) -> None:
        runner = self.runners[role]
        runner.settle("hello", START_TIMEOUT_S)
        self.record["confinement"][role] = runner.load_library(self._library(role))

    def _respawn(self, roles: list[str]) -> None:
        for role in roles:
            self._spawn(role)
        for role in roles:
            self._load(role)
