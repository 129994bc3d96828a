"""Between a run and the evaluator: starts it as a user would, and takes no report that was not made for this run.

    evaluate(run, "I0001", run.folder / "reports" / "E0001.json", show=print)
    check_report(run, "I0001", report)             # RuleError where it is of something else
    fields = audit_from_report(run, "I0001", report)

A run froze its specification: contract, workloads, objective, limits, build, target, headers, witness, and the evaluator.
Before an evaluation and for every report those must be the same, and the machine that of the root's audit: figures of
one run compare with each other or they are none.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.core.config import Target
from tools.core.errors import BuildError, UserError
from tools.core.files import REPO_ROOT, read_bytes, sha256_bytes, sha256_json, show_path, write_new
from tools.evaluator import report as reports
from tools.evaluator.integrity import evaluator_hashes
from tools.search import outcome
from tools.search.entry_code import Undecided, fingerprints, same
from tools.search.records import ROOT, RuleError

if TYPE_CHECKING:
    from tools.search.run import Run

EVALUATE = REPO_ROOT / "tools" / "evaluate.py"
FROZEN = ("contract", "workloads", "objective", "limits", "build", "target")  # sections that every attempt is judged by
FULL_SEQUENCE, DECODE = ("prefill", "extend"), ("decode",)
LEFT_ALONE = {"full_sequence_only": DECODE, "decode_only": FULL_SEQUENCE, "joint": ()}
Show = Callable[[str], None]


# ---------------------------------------------------------------- what a run froze


def check_frozen(run: Run) -> Target:
    """The run's target as it is packaged now; RuleError where it, or the evaluator, is not what the run froze."""
    target = run.target()
    wanted = run.manifest["target"]["sections"]
    for section in FROZEN:
        if target.sections[section] != wanted[section]:
            raise _refused(
                run.manifest["name"],
                f"the config's section {section} has changed since the run was made: restore it, or start a new run "
                "(a changed contract is a new root)",
            )
    frozen = frozen_config(run)
    for role, now, then in (
        ("kernel.files", target.config["kernel"]["files"], frozen["kernel"]["files"]),
        ("kernel.witness", target.kernel_files("witness"), _files(frozen["kernel"]["witness"])),
    ):
        if sorted(now.values()) != sorted(then.values()):
            raise _refused(run.manifest["name"], f"{role} has changed since the run was made: restore it, or start a new run")
    if (found := sha256_json(evaluator_hashes())) != run.manifest["evaluator"]["sha256"]:
        raise _refused(
            run.manifest["name"],
            f"this checkout's evaluator ({found[:12]}...) is not the one that the run froze "
            f"({run.manifest['evaluator']['sha256'][:12]}...): check out that version, or start a new run",
        )
    return target


def frozen_config(run: Run) -> dict[str, Any]:
    """The resolved config that the run froze; UserError where the file is not what the manifest has hashes of."""
    path = run.folder / "config.json"
    try:
        found: Any = json.loads(read_bytes(path))
        changed = [name for name, digest in run.manifest["target"]["sections"].items() if sha256_json(found[name]) != digest]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{show_path(path)}: was cut or edited; restore it from a copy of the run") from None
    if changed:
        raise UserError(f"{show_path(path)}: section {changed[0]} is not what the run froze: restore it from a copy")
    return dict(found)


def _files(unit: dict[str, Any]) -> dict[str, str]:
    return {unit["source"]: unit["sha256"], **unit["files"]}


def _refused(record: str, what: str) -> RuleError:
    return RuleError(record, "audit-target", what)


# ---------------------------------------------------------------- running the evaluator


def source_path(run: Run, implementation: str) -> Path:
    """The file with an implementation's source, named after its content; written where the run keeps it as a patch only."""
    path = run.source_path(implementation)
    if not path.exists():
        write_new(path, run.source(implementation))
    if sha256_bytes(read_bytes(path)) != path.stem:
        raise RuleError(implementation, "source", f"{show_path(path)} was edited: delete it, it is rebuilt from the records")
    return path


def command(run: Run, implementation: str, output: Path, path_of: Callable[[str], Path]) -> list[str]:
    """Arguments of tools/evaluate.py that measure an implementation beside root and incumbent; `path_of`: of a source."""
    config = run.manifest["target"]["config"]
    words = ["--gpu", run.manifest["target"]["name"]] if config is None else ["--config", str(REPO_ROOT / config)]
    words += ["--source", str(path_of(implementation)), "--cold"]
    if implementation != ROOT:
        incumbent = run.state.incumbent
        if incumbent is None:
            raise RuleError(implementation, "root-first", "there is no incumbent yet: audit I0000 first")
        words += ["--root", str(path_of(ROOT)), "--incumbent", str(path_of(incumbent))]
    return [*words, "--output", str(output)]


def evaluate(run: Run, implementation: str, output: Path, show: Show) -> dict[str, Any]:
    """Run the evaluator on an implementation and return its report, which lies at `output` then and is checked.

    `show` is told what the evaluator says, but for its `error:` line, which the audit or the UserError repeats. RuleError
    where the run's specification has changed; UserError where the evaluator wrote no report, which for a machine without the
    target's GPU names the way out; KeyboardInterrupt after it has ended by itself. `output` is never overwritten.
    """
    target = check_frozen(run)
    reports.check_output(output)
    words = command(run, implementation, output, lambda name: source_path(run, name))
    process = subprocess.Popen(
        [sys.executable, str(EVALUATE), *words], cwd=REPO_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    last = ""
    with process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                last = line.strip() or last
                if not line.startswith("error: "):
                    show(line.rstrip("\n"))
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)  # it writes what it knows, as INCOMPLETE
            process.wait()
            raise
    if not output.exists():
        _refuse_machine(run, target)
        raise UserError(f"{implementation}: the evaluator wrote no report: {last.removeprefix('error: ') or 'it was killed'}")
    found = reports.read(output)
    check_report(run, implementation, found)
    return found


def _refuse_machine(run: Run, target: Target) -> None:
    """UserError where this machine has not the target's GPU. Asked afterwards only: it takes torch, and a context on a GPU."""
    from tools.loader.device import check_machine, resolve_device

    try:
        check_machine(target, resolve_device(target, None))
    except UserError as problem:
        raise UserError(
            f"{problem}: nothing was recorded; on a machine that has it measure what this writes: "
            f"python tools/ir.py export-job --run {show_path(run.folder)}"
        ) from None


# ---------------------------------------------------------------- what a report is of


def check_report(run: Run, implementation: str, report: dict[str, Any]) -> None:
    """RuleError where a report is not a whole evaluation of this implementation, by this run's evaluator, on its machine.

    Rules: audit-target, and incomplete-report for one that was interrupted.
    """
    reports.validate(report)  # its schema, and its own hash
    if report["version"] != reports.VERSION:
        raise _refused(implementation, f"a report of version {report['version']}, not {reports.VERSION}: measure it again")
    if report["status"] == "INCOMPLETE":
        raise RuleError(
            implementation,
            "incomplete-report",
            f"the evaluation did not end ({report['reason']}): it is no audit; run it again",
        )
    _check_way(implementation, report)
    _check_specification(run, implementation, report)
    _check_sources(run, implementation, report)
    _check_machine(run, implementation, report)


def _check_way(name: str, report: dict[str, Any]) -> None:
    """It was a whole run, as this tool starts it."""
    run = report["run"]
    for wrong, what in (
        (report["compatibility"], "a compatibility run: its times are proxies; measure on the target's own device"),
        (run.get("guards_off"), f"guards were off ({', '.join(run.get('guards_off', []))}): measure with all guards"),
        (run["seed_given"], "the seed was given, so the inputs were known: measure without --seed"),
        (run["cases"] != "full", f"the cases were {run['cases']}: measure with the full cases"),
        (run["only"] or not run["timed"], "only a part was asked for: measure without --only and --no-timing"),
    ):
        if wrong:
            raise _refused(name, what)


def _check_specification(run: Run, name: str, report: dict[str, Any]) -> None:
    """The same target, headers, witness and evaluator."""
    manifest, hashes = run.manifest, report["hashes"]
    if report["target"]["name"] != manifest["target"]["name"]:
        raise _refused(name, f"a report of target {report['target']['name']}, the run's is {manifest['target']['name']}")
    for section in FROZEN:
        if report["target"]["sections"].get(section) != manifest["target"]["sections"][section]:
            raise _refused(name, f"the report's section {section} is not what the run froze: measure it with the run's config")
    found = sha256_json(hashes["evaluator_files"])
    if found != hashes["evaluator"] or found != manifest["evaluator"]["sha256"]:
        raise _refused(
            name,
            f"a report of another evaluator ({found[:12]}..., the run froze {manifest['evaluator']['sha256'][:12]}...): "
            "measure it with the run's version",
        )
    kernel = frozen_config(run)["kernel"]
    headers, witness = sorted(kernel["files"].values()), kernel["witness"]["sha256"]
    for role, build in report["builds"].items():
        others = list(build["files"].values())
        others.remove(build["source_sha256"])
        wanted = sorted(kernel["witness"]["files"].values()) if role == "witness" else headers
        if sorted(others) != wanted or (role == "witness" and build["source_sha256"] != witness):
            raise _refused(name, f"the report's {role} was built from other files than the run froze")


def _check_sources(run: Run, name: str, report: dict[str, Any]) -> None:
    """Candidate, root and incumbent are implementations of this run."""
    wanted = run.record(name)["source"]["sha256"]
    if (found := candidate_hash(report)) != wanted:
        raise _refused(name, f"a report of another source ({str(found)[:12]}..., {name} is {wanted[:12]}...)")
    if name == ROOT:
        return
    builds = report["builds"]
    if report["status"] == "PASSED" and not {"root", "incumbent"} <= set(builds):
        raise _refused(name, "root and incumbent were not measured in the same run: use ir.py audit or export-job")
    if "root" in builds and builds["root"]["source_sha256"] != run.record(ROOT)["source"]["sha256"]:
        raise _refused(name, "the report's root is not I0000's source")
    if "incumbent" in builds and compared_with(run, report) is None:
        raise _refused(name, "the report's incumbent is no implementation of this run")


def candidate_hash(report: dict[str, Any]) -> str | None:
    """SHA-256 of the source that a report is of. A source that does not build leaves no build: then the file's name says it,
    since this tool names sources after their content."""
    if "candidate" in report["builds"]:
        return str(report["builds"]["candidate"]["source_sha256"])
    words = report["run"]["command"]
    at = words.index("--source") if "--source" in words else len(words)
    return Path(words[at + 1]).stem if at + 1 < len(words) else None


def compared_with(run: Run, report: dict[str, Any]) -> str | None:
    """The implementation that was the incumbent of a report; None where there was none."""
    digest = report["builds"].get("incumbent", {}).get("source_sha256")
    return next((name for name, found in run.state.implementations.items() if found.source["sha256"] == digest), None)


def _check_machine(run: Run, name: str, report: dict[str, Any]) -> None:
    audits = [audit for audit in run.state.audits.values() if audit.implementation == ROOT and audit.verified]
    if not audits or name == ROOT:
        return
    wanted, found = run.record(audits[-1].id)["environment"]["machine"], outcome.machine(report)
    if found != wanted and (report["environment"] or report["status"] == "PASSED"):
        raise _refused(name, f"measured on {found}, the root on {wanted}: measure it there, or start a run here")


# ---------------------------------------------------------------- what a report says


def audit_from_report(run: Run, implementation: str, report: dict[str, Any]) -> dict[str, Any]:
    """The fields of an audit record that follow from a checked report; id, created, report and job are the caller's."""
    record = run.record(implementation)
    parents = record["parents"]
    return {
        "implementation": implementation,
        "action": record["action"],
        **_figures(run, implementation, report),
        "code": _code(run, parents[0], implementation) if parents and report["status"] != "COMPILE_ERROR" else {},
    }


def _figures(run: Run, implementation: str, report: dict[str, Any]) -> dict[str, Any]:
    is_root = implementation == ROOT
    incumbent = None if is_root else compared_with(run, report)
    try:
        return outcome.audit_fields(report, frozen_config(run), incumbent, is_root=is_root)
    except UserError as problem:
        raise _refused(implementation, f"{problem}; measure it again") from None


def _code(run: Run, parent: str, child: str) -> dict[str, str]:
    """Which entry points have the parent's code; none where that cannot be told here."""
    try:
        return code_identity(run, run.source(parent), run.source(child))
    except UserError:
        return {}


def code_identity(run: Run, parent: bytes, child: bytes) -> dict[str, str]:
    """Entry point -> "identical" or "changed", from compiled code (see entry_code.py).

    Undecided (a UserError) where compiled code does not tell; BuildError where a source does not compile.
    """
    before, after = (fingerprints(run.target(), source) for source in (parent, child))
    return {entry: "identical" if same(before[entry], after[entry]) else "changed" for entry in after}


def check_form(run: Run, record: str, form: str, parent: bytes, child: bytes) -> dict[str, str]:
    """The code of every entry point that the form touches or leaves alone; RuleError (form) where the edit contradicts it.

    A joint action claims nothing, so nothing is compiled for it and {} returned. A child that does not compile has no code
    to contradict a form: that is for its audit to find, and {} too.
    """
    if not LEFT_ALONE[form]:
        return {}
    try:
        code = code_identity(run, parent, child)
    except Undecided as problem:
        raise RuleError(record, "form", f"{form} cannot be decided here: {problem}; state the form joint") from None
    except BuildError:
        return {}
    if changed := [entry for entry in LEFT_ALONE[form] if code[entry] != "identical"]:
        raise RuleError(
            record, "form", f"{form}, but the code of {' and '.join(changed)} changed: state the form joint, or leave it alone"
        )
    return code
