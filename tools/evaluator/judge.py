"""The process that decides: it draws the inputs, owns the memory, commands the workers, compares, times and reports.

It never loads candidate code, and draws the seed after the candidate is loaded. Order: machine, builds, correctness
(all of it), baselines, timing, verdict. Whatever ends a run early becomes a status, and the report is written.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.core.config import Target, load_target
from tools.core.errors import BuildError, UserError
from tools.core.files import sha256_file, sha256_json, show_path
from tools.evaluator import (
    checks,
    checks_hidden,
    checks_memory,
    checks_values,
    counters,
    dispatch,
    environment,
    integrity,
    objective,
    promotion,
    providers,
    report,
    sandbox,
    static,
)
from tools.evaluator.arena import Arena
from tools.evaluator.baselines import Baselines
from tools.evaluator.cases import CHECKS, Context
from tools.evaluator.grids import Grid, cells, grid
from tools.evaluator.guards import Guards
from tools.evaluator.localise import FirstDivergence, Found, Parts
from tools.evaluator.passes import Mismatch, Racer, Refused
from tools.evaluator.reproducer import Origin
from tools.evaluator.runner import START_TIMEOUT_S, Runner, Stop, WorkerFailure, live_workers
from tools.evaluator.sealed import sealed_cases
from tools.evaluator.timing import EFFORTS, MODES, Timer, machine_section
from tools.loader.build import Built, build, unchanged
from tools.loader.device import check_machine, resolve_device

RACING = ("candidate", "root", "incumbent", "twin")
_REGISTERED = (checks, checks_hidden, checks_memory, checks_values)  # importing them registers the checks
ANOTHER_TIMEOUT_S = 15.0
CHUNK_BYTES = 1 << 30  # of CPU memory, which is taken only when touched
CUDA_CHUNK_BYTES, CUDA_CHUNK_SHARE = 32 << 30, 0.35  # of device memory: one chunk that fits every cell, a part of what is free


@dataclass(frozen=True)
class Options:
    """One run, as the command line states it."""

    gpu: str | None
    output: Path
    source: Path | None = None
    root: Path | None = None
    incumbent: Path | None = None
    root_report: Path | None = None
    config: Path | None = None
    cases: str = "full"
    require: tuple[str, ...] = ()
    allow_compat: bool = False
    seed: int | None = None
    only: tuple[str, ...] = ()
    timing: bool = True
    hot: bool = True  # time with shared inputs too
    command: tuple[str, ...] = ()
    # Only from Python, for tests: a target and a grid in place of the packaged ones, and guards that are switched off.
    target: Target | None = None
    grid: Grid | None = None
    guards_off: frozenset[str] = frozenset()
    cached: bool = False  # the candidate may come from the cache
    observed: bool = True  # dispatch and counters after timing


Show = Callable[[str, str], None]


def evaluate(options: Options, show: Show) -> dict[str, Any]:
    """Run one evaluation and return the report that was written.

    UserError where nothing can be written or asked for (output, config, names); KeyboardInterrupt after an INCOMPLETE
    report.
    """
    report.check_output(options.output)
    target = options.target or load_target(options.gpu, options.config)
    if unknown := [name for name in options.only if name not in CHECKS]:
        raise UserError(f"--only: no check {unknown[0]!r}; known: {', '.join(CHECKS)}")
    configured = {name for phase in ("full", "decode") for name in target.config["baselines"][phase]}
    for name in sorted(configured | set(options.require)):
        if name not in providers.NAMES or name not in configured:
            raise UserError(
                f"no baseline {name!r} for target {target.name}; configured: {', '.join(sorted(configured)) or 'none'}"
            )
    integrity.refuse_weaker(target)
    root = _root_report(options, target)
    record = report.new(
        target,
        {
            "cases": options.cases,
            "seed": options.seed,
            "seed_given": options.seed is not None,
            "only": list(options.only),
            "timed": options.timing,
            "command": list(options.command),
            "guards_off": sorted(options.guards_off),
        },
    )
    sandbox.harden_judge()
    judge = Judge(options, target, record, root, show)
    started = time.monotonic()
    try:
        judge.run()
    except Stop as stop:
        record.update(status=stop.status, reason=stop.reason)
    except BuildError as problem:
        record.update(status=problem.status, reason=str(problem))
        record["logs"]["build"] = problem.log[-8000:]
    except UserError as problem:
        record.update(status="REFUSED", reason=str(problem))
    except WorkerFailure as problem:
        status = problem.status if problem.worker == "candidate" else "REFUSED"  # the candidate answers for itself only
        record.update(status=status, reason=str(problem))
    except KeyboardInterrupt:
        record.update(status="INCOMPLETE", reason="interrupted")
        raise
    except Exception as problem:
        record.update(
            status="INCOMPLETE", reason=" ".join(f"the evaluator failed: {type(problem).__name__}: {problem}".split())
        )
        raise
    finally:
        with _undisturbed():
            try:
                judge.close()
            except Exception as problem:  # the report is worth more than a clean end
                record["notes"].append(f"not everything was ended: {type(problem).__name__}: {problem}")
            record["run"]["seconds"] = round(time.monotonic() - started, 3)
            record["run"]["judge_seconds"] = round(max(0.0, time.monotonic() - started - judge.waited_s), 3)
            written = report.write(options.output, record)
    return written


def _root_report(options: Options, target: Target) -> dict[str, Any] | None:
    """The root report, of the packaged kernel or of --root; UserError where it is of anything else."""
    if options.root_report is None:
        return None
    source = sha256_file(options.root) if options.root else target.config["kernel"]["sha256"]
    return report.root(options.root_report, target, source)


@contextmanager
def _refusals() -> Iterator[None]:
    """What a timed pass can end with becomes a status."""
    try:
        yield
    except Refused as problem:
        raise Stop("REFUSED", str(problem)) from None
    except Mismatch as problem:
        raise Stop("BIT_MISMATCH", str(problem)) from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No second signal stops the report from being written."""
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Judge:
    """The stages of one run; each fills its part of the report."""

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
        self.arena: Any = None
        self.baselines: Any = None
        self.diverged: FirstDivergence | None = None
        self.disk = integrity.Disk([*integrity.evaluator_files(), *target.merged.chain])
        self._stage_name = ""

    # ------------------------------------------------------------ plumbing

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

    # ------------------------------------------------------------ stages

    def run(self) -> None:
        if self.device == "cpu":
            environment.keep_still()
        with self._stage("machine"):
            where = resolve_device(self.target, None)
            note = check_machine(self.target, where, allow_compat=self.options.allow_compat)
            if note:
                self.record["compatibility"] = True
                self.record["notes"].append(note)
                self.record["notes"].append(
                    "this run shows that the build agrees with itself here, nothing of the target's bits or speed"
                )
            self.record["environment"] = environment.record(self.device)
            self.record["hashes"]["environment"] = sha256_json(report.finite(self.record["environment"]))
            if self.root_report is not None:
                report.refuse_other_machine(self.root_report, self.record["environment"])
            self.arena = Arena(self.device, self._chunk_bytes())
        with self._stage("baselines start"):
            self.baselines = Baselines(self.target, self.options.cases, self.options.require, self.limits)
            everything = self.options.timing and not self.options.only
            for name in self.baselines.wanted(everything):
                self.baselines.add(name, self._spawn(name))
            self.record["baselines"] = self.baselines.records
        with self._stage("build"):
            self._build()
        if "incumbent" in self.builds:  # once more, in a process of its own: how much two of a kind differ
            self.builds["twin"] = self.builds["incumbent"]
        with self._stage("workers"):
            for role in self.builds:
                self._spawn(role)
            for role in self.builds:
                self._load(role)
            self.baselines.load(self.heads)
            self._draw_seed()
        with self._stage("correctness"):
            self._correctness()
        if self.options.only or not self.options.timing:
            what = "only some checks were asked for" if self.options.only else "no timing was asked for"
            raise Stop("INCOMPLETE", f"{what}; those that ran passed")
        with self._stage("timing"):
            first = self._measure(RACING)
        if self.device == "cuda":
            self.record["environment"]["gpu_state_after"] = environment.gpu_state()
        self._verdict(first)
        if self.guards.on("files"):
            self._refuse_changes()

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

    def _load(self, role: str) -> None:
        runner = self.runners[role]
        runner.settle("hello", START_TIMEOUT_S)
        self.record["confinement"][role] = runner.load_library(self._library(role))

    # ------------------------------------------------------------ correctness

    def _context(self, seed: int) -> Context:
        library = self.baselines.library()
        if seed == self.seed:  # nothing is told of sealed cases
            self.diverged = FirstDivergence(
                Parts(
                    start=self._another,
                    witness=self.runners["witness"],
                    arena=self.arena,
                    tile=self.target.config["contract"]["tile"],
                    order=self.target.config["contract"]["order"],
                    origin=Origin(
                        self.target.name,
                        None if self.options.source is None else str(self.options.source),
                        self.builds["candidate"].source_sha256,
                    ),
                )
            )
        return Context(
            arena=self.arena,
            candidate=self.runners["candidate"],
            witness=self.runners["witness"],
            seed=seed,
            grid=self.grid if seed == self.seed else replace(self.grid, hidden=2 * self.grid.hidden),
            tile=self.target.config["contract"]["tile"],
            cells=self.cells,
            heads=self.heads,
            limits=self.limits,
            library=library.runner if library else None,
            library_layout=library.layout if library else "bhsd",
            references=self.baselines.references(),
            progress=self._progress,
            guards=self.guards,
            diverged=self.diverged if seed == self.seed else None,
        )

    def _save_case(self, found: Found) -> None:
        """The reproducer goes beside the report, under its name."""
        path = report.case_path(self.options.output)
        try:
            if found.save(path):
                self.record["notes"].append(f"reproduce: python tools/fuzz.py --replay {show_path(path)}")
        except UserError as problem:
            self.record["notes"].append(f"the reproducer was not written: {problem}")

    def _another(self) -> Runner:
        """A worker of the candidate beside the one that is judged: it may die without harm to the run."""
        runner = Runner("candidate", self.arena, ANOTHER_TIMEOUT_S, guards=self.guards)
        self.runners["candidate again"] = runner
        runner.hello()
        runner.load_library(self._library("candidate"))
        return runner

    def _correctness(self) -> None:
        if missing := self.baselines.missing_library():
            self.record["notes"].append(missing)
        context = self._context(self.seed)
        try:
            for name, item in CHECKS.items():
                if (not self.options.only or name in self.options.only) and (name != "hidden" or self.guards.on("hidden")):
                    context.perform(item)
        except WorkerFailure as problem:
            context.tally.fail(context.label, str(problem))
            raise WorkerFailure(
                problem.status, problem.worker, f"{context.tally.name}, {context.label}: {problem.message}"
            ) from None
        finally:
            if self.diverged is not None and self.diverged.found is not None:
                self._save_case(self.diverged.found)
            every = [*context.tallies, context.witnessed, context.untouched]
            self.record["correctness"] = {
                "words": sum(t.words for t in every),
                "differing": sum(t.differing for t in every),
                "checks": [t.record() for t in every],
            }
        failed = [t for t in every if t.failed]
        if failed:
            # A difference of bits outranks an inaccuracy.
            first = next((t for t in failed if t.failed > t.inaccuracies), None)
            status = "BIT_MISMATCH" if first else "INACCURATE"
            first = first or failed[0]
            failure = first.failures[0]
            names = ", ".join(t.name for t in failed)
            raise Stop(status, f"{first.name}: {failure['case']}: {failure['what']} (failed: {names})")

    # ------------------------------------------------------------ timing

    def _timer(self, seed: int, progress: Callable[[str], None]) -> Timer:
        return Timer(
            self.arena,
            machine_section(self.target, self.record["environment"]["gpu"]),
            self.limits,
            self.heads,
            self.target.config["contract"]["tile"],
            seed,
            EFFORTS[self.device, self.options.cases],
            self.runners["witness"],
            progress,
            self.guards,
        )

    def _racers(self, roles: Sequence[str]) -> list[Racer]:
        baselines: list[Racer] = self.baselines.racers()
        return [Racer(role, self.runners[role]) for role in roles if role in self.builds] + baselines

    def _measure(self, roles: Sequence[str]) -> list[dict[str, Any]]:
        self._progress("baselines compile")
        self.baselines.await_compilation()
        timer = self._timer(self.seed, self._progress)
        racers = self._racers(roles)
        with _refusals():
            found = [timer.cell(cell, racers, MODES if self.options.hot else ("cold",)) for cell in self.cells]
        report.add_ratios(found)
        if self.record["dispatch"] is None and self.options.observed:
            with self._stage("dispatch"):
                self.record["dispatch"] = dispatch.observe(
                    timer, self.arena, self.cells, racers, found, self._progress, self._profiled
                )
                self.record["counters"] = self._counters()
        return found

    def _counters(self) -> dict[str, Any]:
        if self.device != "cuda" or self.options.cases == "quick":
            return {"note": "unavailable: read in full runs on CUDA devices only", "kernels": []}
        seen = {
            name: sum(kernel["launches"] for kernel in racers["candidate"]["kernels"])
            for name, racers in self.record["dispatch"].items()
            if "candidate" in racers
        }
        self._progress("hardware counters")
        start = time.monotonic()
        try:
            return counters.read(self.builds["candidate"].library, counters.chosen(self.cells), self.heads, seen)
        finally:
            self.waited_s += time.monotonic() - start

    def _verdict(self, first: list[dict[str, Any]]) -> None:
        self.record["timing"] = {
            "unit": "microseconds a call",
            "cells": first,
            "geomeans": report.geomeans(first),
            "again": [],
        }
        root = None if self.root_report is None else report.latencies(self.root_report)
        if "root" in self.builds:
            root = {cell["name"]: taken for cell in first if (taken := objective.cold(cell, "root")) is not None}
        self.record["objective"] = objective.summary(self.target.config["objective"], first, root)
        if root is not None or "incumbent" in self.builds:
            self._promotion(first, root)
        self.record.update(status="PASSED", reason=None)
        if self.record["compatibility"]:
            self.record["notes"].append("times of a compatibility run are proxies and enter no result")

    def _promotion(self, first: list[dict[str, Any]], root: dict[str, float] | None) -> None:
        blockers = self._blockers(root)
        problems = objective.admissible(first, root, self.limits["max_slowdown"]) if root is not None else []
        comparison, sealed = None, None
        if "incumbent" in self.builds and not problems:
            w = {cell["name"]: cell["weight"] for cell in self.record["objective"]["cells"]}
            sessions = [first]
            comparison = promotion.compare(sessions, w, noise=self.guards.on("noise"))
            while comparison["verdict"] == "unclear":
                with self._stage("measured again"):
                    sessions.append(self._remeasure())
                comparison = promotion.compare(sessions, w)
            self.record["timing"]["again"] = sessions[1:]
            if comparison["verdict"] == "better" and not blockers:
                self._show("sealed", "")
                sealed = self._sealed() if self.guards.on("sealed") else True
        self.record["promotion"] = promotion.record(first, comparison, root, self.limits["max_slowdown"], blockers, sealed)

    def _blockers(self, root: dict[str, float] | None) -> list[str]:
        """Why this run may promote nothing, whatever it measures."""
        guards = sorted(self.guards.off)
        reasons = {
            "the seed was given": self.options.seed is not None,
            "a compatibility run": self.record["compatibility"],
            "not the full cases": self.options.cases != "full",
            "no root to be admissible under": root is None,
            "the root lacks cells": root is not None and any(cell.name not in root for cell in self.cells),
            f"guards were off: {', '.join(guards)}": bool(guards),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def _sealed(self) -> bool:
        """Nothing of it reaches the report but the answer: the worker is fresh and its output is thrown away."""
        kept = self.runners.pop("candidate")
        try:
            self._respawn(["candidate"])
            racers = [racer for racer in self._racers(RACING) if racer.fixed]
            cells = self.target.config["workloads"], float(self.limits["max_slowdown"])
            return sealed_cases(self._context, lambda seed: self._timer(seed, lambda text: None), racers, *cells)
        except Stop:
            raise
        except Exception:  # whatever it was, nothing of it is told
            return False
        finally:
            if (fresh := self.runners.pop("candidate", None)) is not None:
                fresh.kill()
            self.runners["candidate"] = kept

    def _respawn(self, roles: list[str]) -> None:
        for role in roles:
            self._spawn(role)
        for role in roles:
            self._load(role)

    def _remeasure(self) -> list[dict[str, Any]]:
        """The cold cells of all kernels once more, in fresh processes that start in the other order."""
        roles = [role for role in reversed(RACING) if role in self.builds]
        for role in roles:
            self.runners[role].strike()
        for role in roles:
            self.runners[role].kill()
            self.waited_s += self.runners[role].waited_s
        self._respawn(roles)
        timer = self._timer(self.seed, self._progress)
        with _refusals():
            return [timer.cell(cell, [Racer(role, self.runners[role]) for role in roles], ("cold",)) for cell in self.cells]
