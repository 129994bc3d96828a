"""The mutation score: how many numerical mutants of the kernels the correctness checks kill.

    result = score(["cpu"], print)
    print(render(result))

Every mutant of tests/mutants/ (mutants.py) is built as a candidate and put through the checks of a run, one after the
other, in a worker of its own beside the honest witness. Three questions are asked of each:

    gate      does the fp64 accuracy check alone let it pass? Then it is *subtle*.
    checks    which check, without a witness, is the first to fail?
    witness   where none is: in which check does the comparison with the witness fail? Then *only the witness sees it*.

A mutant that fails nowhere has survived, and is a hole in the checks. One that does not apply, compile or answer is an
error of the corpus and counts as not killed. The unpatched kernel goes through the same loop and must pass: the control.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.core.config import Target, load_target, target_names
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, sha256_json, show_path, write_new
from tools.evaluator import environment, mutants
from tools.evaluator.integrity import evaluator_hashes
from tools.evaluator.mutant_bench import SEED, Bench, build_all, judged
from tools.evaluator.mutants import Mutant
from tools.evaluator.report import check_output, finite
from tools.loader.device import check_machine, resolve_device

EVIDENCE = REPO_ROOT / "experimental" / "evidence"
Progress = Callable[[str], None]


def score_corpus(target: Target, progress: Progress, names: set[str] | None = None) -> dict[str, Any]:
    """The record of one target's corpus (JSON-able); `names` limits it to some mutants."""
    started = time.monotonic()
    corpus = _corpus(target, names)
    with tempfile.TemporaryDirectory() as folder:
        units = build_all(target, [None, *corpus], Path(folder), progress)
    built_s = time.monotonic() - started
    bench = Bench(target)
    try:
        records = list(judged(bench, units, progress))
    finally:
        bench.close()
    control, every = records[0], records[1:]
    if control["status"] == "survived":
        control["status"] = "passed"
    role = mutants.role_of(target, corpus)
    return {
        "target": target.name,
        "status": "scored",
        "complete": names is None,
        "killed": sum(r["status"] == "killed" for r in every),
        "total": len(every),
        "subtle": sum(bool(r["subtle"]) for r in every),
        "witness_only": sum(bool(r["witness_only"]) for r in every),
        "survivors": [r["name"] for r in every if r["status"] == "survived"],
        "errors": [r["name"] for r in every if r["status"] == "error"],
        "control": control,
        "sources": target.kernel_files(role),
        "seed": SEED,
        "seconds": {"build": round(built_s, 1), "all": round(time.monotonic() - started, 1)},
        "mutants": every,
    }


def _corpus(target: Target, names: set[str] | None) -> list[Mutant]:
    corpus = mutants.load_corpus()[target.config["target"]["device"]]
    if unknown := (names or set()) - {mutant.name for mutant in corpus}:
        raise UserError(f"no mutant {sorted(unknown)[0]!r} of target {target.name}")
    return [mutant for mutant in corpus if names is None or mutant.name in names]


def _device(target: Target) -> str:
    return str(target.config["target"]["device"])


def score(target_names: list[str], progress: Progress, names: set[str] | None = None) -> dict[str, Any]:
    """The mutation score of some targets' corpora, JSON-able; `names` limits it to some mutants.

    A target whose GPU is not here gets a record that says so, with the figure of recorded evidence where there is one.
    """
    found: dict[str, Any] = {}
    for target in [load_target(name) for name in target_names]:
        try:
            check_machine(target, resolve_device(target, None))
        except UserError as problem:
            recorded = recorded_score(target)
            found[_device(target)] = {
                "target": target.name,
                "status": "needs a GPU",
                "reason": str(problem),
                "recorded": recorded,
            }
            continue
        found[_device(target)] = score_corpus(target, progress, names) | {
            "environment": finite(environment.record(_device(target)))
        }
    return {"kind": "mutation score", "version": 1, "evaluator": sha256_json(evaluator_hashes()), "corpora": found}


def recorded_score(target: Target, folder: Path = EVIDENCE) -> dict[str, Any] | None:
    """What mutation-*.json records of a target's corpus, preferably of the same patches and sources as are here now."""
    corpus = _corpus(target, None)
    patches = {mutant.name: mutant.sha256 for mutant in corpus}
    sources = target.kernel_files(mutants.role_of(target, corpus))
    best = None
    for path in sorted(folder.glob("mutation-*.json")):
        try:
            record = json.loads(path.read_bytes())["corpora"][_device(target)]
            figure = {
                "file": show_path(path),
                "killed": record["killed"],
                "total": record["total"],
                "target": record["target"],
                "same": record["sources"] == sources and {m["name"]: m["patch_sha256"] for m in record["mutants"]} == patches,
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no record of this corpus
        if record["complete"] and (best is None or figure["same"] or not best["same"]):
            best = figure
    return best


def passed(result: dict[str, Any]) -> bool:
    """Whether everything that could run was killed, and every control passed."""
    scored = [corpus for corpus in result["corpora"].values() if corpus["status"] == "scored"]
    return all(corpus["killed"] == corpus["total"] and corpus["control"]["status"] == "passed" for corpus in scored)


# ---------------------------------------------------------------- for people


def render(result: dict[str, Any]) -> str:
    """A table a corpus, and one line with its figure."""
    lines: list[str] = []
    for device, corpus in result["corpora"].items():
        if corpus["status"] != "scored":
            lines.append(f"{device}: {corpus['status']}: {corpus['reason']}{_recorded(corpus['recorded'])}")
            continue
        rows: list[tuple[str, ...]] = [("mutant", "result", "subtle", "seen by", "check", "case")]
        rows += [_row(record) for record in corpus["mutants"]]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines += ["  ".join((*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[5])) for row in rows]
        lines += [
            f"{record['name']} is {'subtle' if record['subtle'] else 'not subtle'}, against its index"
            for record in corpus["mutants"]
            if record["subtle"] not in (None, record["expected_subtle"])
        ]
        lines.append(
            f"{device}: {corpus['killed']} of {corpus['total']} killed; {corpus['subtle']} pass the fp64 gate alone, "
            f"{corpus['witness_only']} are seen by the witness only"
        )
        for what in ("survivors", "errors"):
            if corpus[what]:
                lines.append(f"{device}: {what}: {', '.join(corpus[what])}")
        if corpus["control"]["status"] != "passed":
            why = corpus["control"]["killed_by"] or corpus["control"]["problem"]
            lines.append(f"{device}: the unpatched kernel does not pass: {why}")
    return "\n".join(line.rstrip() for line in lines)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    killed_by = record["killed_by"] or {"check": "", "case": record["problem"] or ""}
    subtle = {True: "yes", False: "no", None: "?"}[record["subtle"]]
    seen = "" if record["status"] != "killed" else "witness only" if record["witness_only"] else "checks"
    return record["name"], record["status"], subtle, seen, killed_by["check"], killed_by["case"][:60]


def _recorded(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "; nothing is recorded"
    sources = "the same patches and sources" if figure["same"] else "OTHER patches or sources"
    return (
        f"; recorded: {figure['killed']} of {figure['total']} killed on {figure['target']}, with {sources} ({figure['file']})"
    )


# ---------------------------------------------------------------- the command


def default_targets() -> list[str]:
    """The CPU target, and the CUDA target whose GPU this machine has; where it has none, the one that has a record."""
    cuda = [name for name in target_names() if _device(load_target(name)) == "cuda"]
    recorded = (recorded_score(load_target(cuda[0])) or {}).get("target")
    return ["cpu", next((name for name in cuda if _here(name)), recorded if recorded in cuda else cuda[0])]


def _here(name: str) -> bool:
    target = load_target(name)
    try:
        check_machine(target, resolve_device(target, None))
    except UserError:
        return False
    return True


def main_mutation(gpu: str | None, output: Path | None, as_json: bool, progress: Progress = lambda text: None) -> int:
    """`evaluate.py --mutation-score`: score, write, print. 0 only where everything that could run was killed.

    UserError where the output exists, or where --gpu names a GPU that is not here.
    """
    if output is not None:
        check_output(output)
    if gpu is not None:
        check_machine(load_target(gpu), resolve_device(load_target(gpu), None))
    result = score([gpu] if gpu is not None else default_targets(), progress)
    if output is not None:
        write_new(output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if as_json else render(result))
    return 0 if passed(result) else 1
