"""One run of the command: what to call, the workers, the search or the replay, and what is printed and saved."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.core.config import Target, load_target
from tools.core.errors import UserError
from tools.core.files import show_path
from tools.evaluator.arena import Arena
from tools.evaluator.guards import Guards
from tools.evaluator.providers import NAMES
from tools.evaluator.runner import WorkerFailure
from tools.fuzzer import case as cases
from tools.fuzzer.case import Backend, Case
from tools.fuzzer.start import CHUNK_BYTES, GUARDS, Start
from tools.loader.build import build

if TYPE_CHECKING:
    from tools.fuzzer.bench import Bench

TIMEOUT_S = {"cpu": 10.0, "cuda": 60.0}  # of one request


@dataclass(frozen=True)
class Options:
    """One search, as the command line states it. began: time.monotonic() of the start."""

    gpu: str
    backend: str | None
    seconds: float
    seed: int
    began: float
    cases: int | None = None
    stop_at: int | None = None
    output: Path | None = None
    quiet: bool = False
    witness: bool = True
    allow_compat: bool = False
    timeout_s: float | None = None
    guards: Guards = GUARDS


def provider_name(name: str, device: str) -> str | None:
    """The provider that a backend's name means, or None where it is no provider."""
    if name == "torch":
        return "sdpa_cpu" if device == "cpu" else "sdpa_flash"
    return name if name in NAMES else None


@contextlib.contextmanager
def opened(
    target: Target,
    name: str | None,
    *,
    witness: bool,
    allow_compat: bool = False,
    timeout_s: float | None = None,
    guards: Guards = GUARDS,
) -> Iterator[Bench]:
    """A bench for a backend's name or source, ended with all its workers. UserError where it cannot be used."""
    device = target.config["target"]["device"]
    provider = provider_name(name, device) if name is not None else None
    libraries: dict[str, Path] = {}
    if provider is not None:
        backend = Backend("provider", provider)
    else:
        source = None if name is None else Path(name)
        if source is not None and not source.is_file():
            raise UserError(f"--backend {name}: neither a library ({', '.join(('torch', *NAMES))}) nor a source file")
        if device == "cuda":
            _check_machine(target, allow_compat)  # before minutes of compilation
        built = build(target, source)
        libraries["candidate"] = built.library
        if witness:
            libraries["witness"] = build(target, role="witness").library
        backend = Backend("library", target.name, show_path(built.source), built.source_sha256)
    timeout = TIMEOUT_S[device] if timeout_s is None else timeout_s
    start = Start(Arena(device, CHUNK_BYTES[device]), "candidate", timeout, backend, libraries.get("candidate"), guards)
    bench: Bench | None = None
    try:
        _check_machine(target, allow_compat)
        from tools.fuzzer.bench import Bench

        bench = Bench(target, backend, libraries, timeout, start)
        yield bench
    except WorkerFailure as problem:
        raise UserError(f"{backend.name} does not start: {problem.message}") from None
    finally:
        if bench is None:
            start.abandon()
        else:
            bench.close()


def _check_machine(target: Target, allow_compat: bool) -> None:
    from tools.loader.device import check_machine, resolve_device

    note = check_machine(target, resolve_device(target, None), allow_compat=allow_compat)
    if note:
        print(f"note: {note}", file=sys.stderr)


def search(options: Options) -> dict[str, Any]:
    """Search and return the summary, also after Ctrl-C. Prints findings as they come unless quiet."""
    target = load_target(options.gpu)
    if options.output is not None and (options.output.exists() or options.output.is_symlink()):
        raise UserError(f"--output: {show_path(options.output)} exists already and is never overwritten")
    with opened(
        target,
        options.backend,
        witness=options.witness,
        allow_compat=options.allow_compat,
        timeout_s=options.timeout_s,
        guards=options.guards,
    ) as bench:
        import torch

        from tools.fuzzer import report
        from tools.fuzzer.search import Finding, Search

        torch.set_num_threads(1)  # tensors are small, and the kernel under test needs the cores

        folder = report.Folder(options.output) if options.output is not None else None

        def show(lines: list[str]) -> None:
            if not options.quiet:
                print("\n".join(lines), flush=True)

        def tell(finding: Finding) -> None:
            path = folder.add(finding.case) if folder is not None else None
            show(report.show_finding(finding) + ([f"saved     {show_path(path)}"] if path else []) + [""])

        own = bench.backend.kind == "library"
        version = bench.backend.version or (bench.backend.source_sha256 or "")[:12]
        show([f"backend   {bench.backend.name} {version}, seed {options.seed}"])
        hunt = Search(
            bench, options.seed, witness=options.witness and own, tell=tell, hint=lambda text: show([f"hit       {text}"])
        )
        hunt.started = options.began
        interrupted = False
        try:
            hunt.run(options.began + options.seconds, cases=options.cases, stop_at=options.stop_at)
        except KeyboardInterrupt:
            interrupted = True
        seconds = time.monotonic() - options.began
        result = report.summary(hunt, bench.backend, options.seed, seconds, left_out(bench), interrupted)
        show(report.show_summary(result))
        if folder is not None:
            folder.finish(result)
        return result


def left_out(bench: Bench) -> list[str]:
    """What the backend cannot be asked, in words."""
    from tools.fuzzer.bench import ENTRIES

    abilities = bench.abilities
    found = [f"{entry}: {bench.backend.name} has no such call here" for entry in ENTRIES if entry not in abilities.entries]
    missing = {
        "lengths and capacity": abilities.lengths,
        "other strides": abilities.strides,
        "LSE": abilities.lse,
        "threads and multiprocessors": abilities.own,
    }
    return found + [name for name, has in missing.items() if not has]


def replay(path: Path, gpu: str | None, backend: str | None, as_json: bool, allow_compat: bool, guards: Guards = GUARDS) -> int:
    """Run a saved case again: 1 where it still disagrees, 0 where it does not."""
    case = cases.read(path)
    target = load_target(gpu or case.target)
    if target.name != case.target:
        raise UserError(f"--gpu {gpu}: {show_path(path)} is a case of target {case.target}")
    witness = any(call.on == "witness" for call in case.calls)
    with opened(target, _backend_name(case, backend), witness=witness, allow_compat=allow_compat, guards=guards) as bench:
        from tools.fuzzer import report
        from tools.fuzzer.trial import AGREES, attempt

        if case.backend.source_sha256 not in (None, bench.backend.source_sha256):
            print(f"note: the source has changed since the case was saved ({bench.backend.source})", file=sys.stderr)
        outcome = attempt(bench, case)
        observed = outcome.observed()
        if as_json:
            print(json.dumps({"case": str(path), **observed}))
        else:
            print("\n".join(report.show_case(dataclasses.replace(case, observed=observed))))
            print(f"verdict   {outcome.what if outcome.what != AGREES else 'the calls agree now'}")
        return int(outcome.what != AGREES)


def _backend_name(case: Case, given: str | None) -> str | None:
    """What a replay calls: the given backend, or the case's own."""
    if given is not None:
        return given
    if case.backend.kind == "provider":
        return case.backend.name
    if case.backend.source is None:
        return None
    from tools.core.files import REPO_ROOT

    source = REPO_ROOT / case.backend.source
    if not source.is_file():
        raise UserError(f"{case.backend.source}: no such source; name one with --backend")
    packaged = load_target(case.target).source()
    return None if source.resolve() == packaged.resolve() else str(source)
