"""The process that decides: it draws the inputs, owns the memory, commands the workers, compares, times and reports.

It never loads candidate code, and draws the seed after the candidate is loaded. Order: machine, builds, correctness
(all of it), baselines, timing, verdict. Whatever ends a run early becomes a status, and the report is written; what could
not begin, for a source that is not there or a GPU that is not the target's, is a UserError and leaves the report's name free.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tools.core.config import Target, load_target
from tools.core.errors import BuildError, UserError
from tools.core.files import sha256_file, sha256_json, show_path
from tools.evaluator import (
    checks,
    checks_hidden,
    checks_memory,
    checks_values,
    environment,
    integrity,
    providers,
    report,
    sandbox,
)
from tools.evaluator.arena import Arena
from tools.evaluator.baselines import Baselines
from tools.evaluator.bench import Show
from tools.evaluator.cases import CHECKS, Context
from tools.evaluator.localise import FirstDivergence, Found, Parts
from tools.evaluator.options import Options
from tools.evaluator.race import RACING, Race
from tools.evaluator.reproducer import Origin
from tools.evaluator.runner import Stop, WorkerFailure
from tools.loader.build import check_source
from tools.loader.device import check_machine, resolve_device

_REGISTERED = (checks, checks_hidden, checks_memory, checks_values)  # importing them registers the checks


def evaluate(options: Options, show: Show) -> dict[str, Any]:
    """Run one evaluation and return the report that was written.

    UserError, and no report, where nothing can be written or asked for (output, config, names, sources) or the machine is
    not the target's; KeyboardInterrupt after an INCOMPLETE report.
    """
    report.check_output(options.output)
    target = options.target or load_target(options.gpu, options.config)
    for source in (options.source, options.root, options.incumbent):
        if source is not None:
            check_source(target, source)
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
    if stand_in := check_machine(target, resolve_device(target, None), allow_compat=options.allow_compat):
        record["compatibility"] = True
        record["notes"].append(stand_in)
        record["notes"].append("this run shows that the build agrees with itself here, nothing of the target's bits or speed")
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


class Judge(Race):
    """The stages of one run; each fills its part of the report."""

    def run(self) -> None:
        if self.device == "cpu":
            environment.keep_still()
        with self._stage("machine"):
            self.record["environment"] = environment.record(self.device)
            self.record["hashes"]["environment"] = sha256_json(report.finite(self.record["environment"]))
            if self.root_report is not None:
                report.refuse_other_machine(self.root_report, self.record["environment"])
        with self._stage("build"):
            self._build()
        with self._stage("turn"):
            self._take_turn()
            self.arena = Arena(self.device, self._chunk_bytes())
        with self._stage("baselines start"):
            self.baselines = Baselines(self.target, self.options.cases, self.options.require, self.limits)
            everything = self.options.timing and not self.options.only
            for name in self.baselines.wanted(everything):
                self.baselines.add(name, self._spawn(name))
            self.record["baselines"] = self.baselines.records
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

    def _correctness(self) -> None:
        if missing := self.baselines.missing_library():
            self.record["notes"].append(missing)
        context = self._context(self.seed)
        if self.record["compatibility"] and self.device == "cuda":  # what is shared out is shared out as on the target
            wanted = self.runners["candidate"].multiprocessors = int(self.target.config["target"]["multiprocessors"])
            self.record["notes"].append(f"in the correctness checks every call was told of {wanted} multiprocessors")
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
            self.runners["candidate"].multiprocessors = 0
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
