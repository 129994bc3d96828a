"""Every way of tampering with the archive is caught, and the message names the thing.

Where nothing is said, the tamperer also mends each hash that stands in the way, so that only what is computed again is left
to catch it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from archive_tools import (
    ARCHIVE,
    EVIDENCE,
    REPO,
    RUN,
    Quick,
    audits,
    copied,
    edit,
    forge_audit_report,
    forge_records,
    forge_report,
    put,
    relisted,
    repack,
    restored,
)
from ir_tools import unsynced

from tools.core.files import sha256_file, sha256_json

V2, V1, GPU = (f"{EVIDENCE}/{name}.json" for name in ("cpu-avx2", "cpu-avx512", "h200-judge"))
COMPATIBILITY = f"{EVIDENCE}/a100-on-h200-compatibility.json"
Tamper = Callable[[Path], Any]


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    with unsynced(), Quick() as verifier:
        yield verifier


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, quick: Quick) -> Path:
    """A copy that holds."""
    root = copied(REPO, tmp_path_factory.mktemp("archive"))
    assert quick.problem(root) is None
    return root


@pytest.fixture
def root(whole: Path) -> Iterator[Path]:
    with restored(whole):
        yield whole


def caught(quick: Quick, root: Path, tamper: Tamper, *words: str) -> None:
    tamper(root)
    problem = quick.problem(root)
    assert problem is not None, "nobody noticed"
    assert all(word in problem for word in words), problem


# ---------------------------------------------------------------- reports, all their hashes mended


def cell(report: Any, number: int = 0) -> Any:
    return report["timing"]["cells"][number]


def cold(report: Any, number: int = 0) -> Any:
    return cell(report, number)["modes"]["cold"]


def ours(report: Any) -> Any:
    return cold(report)["kernels"]["candidate"]


def faster(report: Any) -> None:
    """Most samples a tenth lower, the median left as it was."""
    ours(report)["samples_us"] = [round(0.9 * sample, 4) for sample in ours(report)["samples_us"]]


def one_sample(report: Any) -> None:
    """The middle one."""
    samples = ours(report)["samples_us"]
    samples[samples.index(sorted(samples)[len(samples) // 2])] *= 0.5


def sample(value: Any) -> Callable[[Any], None]:
    return lambda report: ours(report)["samples_us"].__setitem__(3, value)


def median_too(report: Any) -> None:
    """Samples, median and interval, each as it should be: what follows from them is left."""
    faster(report)
    ours(report)["median_us"] *= 0.9
    ours(report)["interval_us"] = [0.9 * end for end in ours(report)["interval_us"]]


def other_best(report: Any) -> None:
    cold(report)["best"] = {**cold(report)["best"], "name": "nobody"}


def ratios_too(report: Any) -> None:
    """Everything of the cell; the geometric means are left."""
    from tools.evaluator.report import add_ratios

    median_too(report)
    add_ratios(report["timing"]["cells"])


def geomeans_too(report: Any) -> None:
    """All figures of the times; T is left."""
    from tools.evaluator.report import geomeans

    ratios_too(report)
    report["timing"]["geomeans"] = geomeans(report["timing"]["cells"])


def renamed(report: Any) -> None:
    cell(report)["name"] = "prefill B1 S257"


def swapped_cells(report: Any) -> None:
    cells = report["timing"]["cells"]
    cells[0], cells[1] = cells[1], cells[0]


def times_swapped(report: Any) -> None:
    """Two cells with each other's times."""
    cell(report)["modes"], cell(report, 1)["modes"] = cell(report, 1)["modes"], cell(report)["modes"]


def promoted(report: Any) -> None:
    report["promotion"] = {
        "admissible": True, "problems": [], "doubtful": [], "blockers": [], "sealed": "passed", "comparison": None,
        "promoted": True, "reason": "T is 9 % lower",
    }  # fmt: skip


def failed_check(report: Any) -> None:
    report["correctness"]["checks"][2].update(status="failed", failed=1)


def another_gpu(report: Any) -> None:
    report["environment"]["gpu"]["name"] = "NVIDIA H20"


def mended_gpu(report: Any) -> None:
    another_gpu(report)
    before = {key: value for key, value in report["environment"].items() if key != "gpu_state_after"}
    report["hashes"]["environment"] = sha256_json(before)


REPORTS = [
    ("a sample", V2, one_sample, "prefill B1 S256 cold candidate: median_us"),
    ("a sample of version 1", V1, one_sample, "prefill B1 S256 cold candidate: median_us"),
    ("all samples of a cell", GPU, faster, "prefill B1 S1024 cold candidate: median_us"),
    ("a sample that is NaN", V2, sample(float("nan")), "NaN is no number of JSON"),
    ("a sample that is infinite", V2, sample(float("inf")), "Infinity is no number of JSON"),
    ("a negative sample", V2, sample(-1.0), "samples_us.3"),
    ("a sample that is 0", V1, sample(0), "samples_us.3"),
    ("a sample that is text", V2, sample("1.0"), "samples_us.3"),
    ("too few samples", V2, lambda r: ours(r)["samples_us"].__delitem__(slice(14, None)), "samples_us"),
    ("a median", V2, lambda r: ours(r).update(median_us=ours(r)["median_us"] - 0.001), "prefill B1 S256 cold candidate: median_us"),
    ("a library's median", GPU, lambda r: cold(r)["baselines"]["fa3"].update(median_us=99.0), "prefill B1 S1024 cold fa3: median_us"),
    ("a hot median", V2, lambda r: cell(r)["modes"]["hot"]["kernels"]["candidate"].update(median_us=9.0), "S256 hot candidate: median_us"),
    ("an interval", V2, lambda r: ours(r)["interval_us"].__setitem__(0, 1.0), "prefill B1 S256 cold candidate: interval_us"),
    ("a ratio", V2, lambda r: cold(r)["ratios"].update(sdpa_cpu=9.0), "prefill B1 S256 cold ratios.sdpa_cpu"),
    ("the fastest library", GPU, other_best, "prefill B1 S1024 cold best.name"),
    ("samples and median", V2, median_too, "prefill B1 S256 cold best"),
    ("a geometric mean", GPU, lambda r: r["timing"]["geomeans"]["cold"]["full"]["best"].update(ratio=1.2), "timing.geomeans.cold.full.best.ratio"),
    ("the cells of a geometric mean", V2, lambda r: r["timing"]["geomeans"]["cold"]["full"]["best"].update(cells=7), "geomeans.cold.full.best.cells"),
    ("all but geometric means", V2, ratios_too, "timing.geomeans.cold.full"),
    ("T", GPU, lambda r: r["objective"].update(T=1.0), "objective.T is 1.0"),
    ("a weight", V2, lambda r: r["objective"]["cells"][2].update(weight=0.5), "].weight is 0.5"),
    ("a share", V2, lambda r: r["objective"]["cells"][2].update(share=0.5), "].share is 0.5"),
    ("all but T", V2, geomeans_too, "objective.T"),
    ("no T", V2, lambda r: r.update(objective=None), "objective is missing"),
    ("a promotion", V2, promoted, "promotion.promoted is True"),
    ("a missing cell", V2, lambda r: r["timing"]["cells"].pop(), "cell 'decode B16 L4096' of the workloads is missing"),
    ("a cell twice", V2, lambda r: r["timing"]["cells"].append(cell(r)), "cell 'prefill B1 S256' stands twice"),
    ("a renamed cell", V2, renamed, "cell 'prefill B1 S256' of the workloads is missing"),
    ("another cell", V2, lambda r: r["timing"]["cells"].append({**cell(r), "name": "decode B2 L9"}), "cell 'decode B2 L9' is none"),
    ("cells in another order", V2, swapped_cells, "'prefill B1 S1024': name is"),
    ("a cell of another batch", V2, lambda r: cell(r).update(batch=2), "cell 'prefill B1 S256': batch is 2"),
    ("times of two cells", V2, times_swapped, "objective.cells[prefill B1 S256]"),
    ("a time below its floor", V2, lambda r: cold(r).update(floor_us=1e6), "below its floor of 1000000.0"),
    ("no own times", V2, lambda r: cold(r).update(same_as="cold"), "prefill B1 S256: a mode has either"),
    ("words", V2, lambda r: r["correctness"].update(words=10**15), "correctness.words is 1000000000000000"),
    ("differing words", V2, lambda r: r["correctness"]["checks"][0].update(differing=1), "correctness.differing is 0"),
    ("a failed check", V2, failed_check, "check extend failed"),
    ("a check twice", V1, lambda r: r["correctness"]["checks"].append({**r["correctness"]["checks"][0], "words": 0}), "every_length stands twice"),
    ("another status", V2, lambda r: r.update(status="INACCURATE"), "timing: exists under status INACCURATE"),
    ("another version", V2, lambda r: r.update(version=3), "version: 3"),
    ("an unknown key", V2, lambda r: r.update(more=1), "'more'"),
    ("a missing key", V2, lambda r: r.pop("builds"), "'builds'"),
    ("another environment", V2, lambda r: r["environment"].update(cores=1), "hashes.environment"),
    ("another GPU", GPU, another_gpu, "hashes.environment"),
    ("another GPU with its hash", GPU, mended_gpu, "environment.gpu is no GPU of target h200"),
    ("no mark of compatibility", COMPATIBILITY, lambda r: r.update(compatibility=False), "is no GPU of target a100"),
    ("another evaluator", V2, lambda r: r["hashes"]["evaluator_files"].popitem(), "hashes.evaluator is not that"),
    ("another contract", V2, lambda r: r["target"]["sections"].update(contract="0" * 64), "target.sections.contract"),
    ("other workloads", V1, lambda r: r["target"]["sections"].update(workloads="0" * 64), "target.sections.workloads"),
    ("another source", V2, lambda r: r["builds"]["candidate"].update(source_sha256="0" * 64), "builds.candidate.source_sha256"),
    ("another target", V2, lambda r: r["target"].update(name="h300"), "target 'h300' is none of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), [row[1:] for row in REPORTS], ids=[row[0] for row in REPORTS])
def test_a_forged_report_is_caught(quick: Quick, root: Path, name: str, change: Callable[[Any], None], words: str) -> None:
    caught(quick, root, lambda root: forge_report(root, name, change), name, words)


def largest(report: Any) -> None:
    """A sample on which no figure hangs."""
    samples = ours(report)["samples_us"]
    samples[samples.index(max(samples))] += 0.001


def test_a_sample_on_which_nothing_hangs_is_caught_by_the_hashes(quick: Quick, root: Path) -> None:
    """By the archive's, by the report's own where that is mended, and by nothing where both are: the README says so."""
    edit(root, V2, largest)
    assert (problem := quick.problem(root)) and f"{V2}: has sha256" in problem
    relisted(root)
    assert (problem := quick.problem(root)) and f"{V2}: report: hashes.report" in problem
    shutil.copyfile(REPO / V1, root / V1)
    edit(root, V1, largest)
    assert (problem := quick.problem(root)) and f"{V1}: has sha256" in problem


# ---------------------------------------------------------------- other records, their hashes mended


def listed(name: str, change: Callable[[Any], Any]) -> Tamper:
    def tamper(root: Path) -> None:
        edit(root, f"{EVIDENCE}/{name}", change)
        relisted(root)

    return tamper


RECORDS = [
    ("killed mutants", "mutation-cpu.json", lambda r: r["corpora"]["cpu"].update(killed=57), "corpora.cpu.killed is 57"),
    ("a survivor", "mutation-cpu.json", lambda r: r["corpora"]["cpu"]["mutants"][0].update(status="survived"), "corpora.cpu.killed is 58"),
    ("a mutant less", "mutation-h200.json", lambda r: r["corpora"]["cuda"]["mutants"].pop(), "corpora.cuda.killed is 50"),
    ("a mutant twice", "mutation-cpu.json", lambda r: r["corpora"]["cpu"]["mutants"].append(r["corpora"]["cpu"]["mutants"][0]), "stands twice"),
    ("promoted trials", "trials-cpu.json", lambda r: r["summary"]["equal"].update(promoted=0), "summary.equal.promoted is 0"),
    ("a trial", "trials-cpu.json", lambda r: r["trials"]["equal"][0].update(promoted=True), "summary.equal.promoted"),
    ("a rate's interval", "trials-h200.json", lambda r: r["summary"]["equal"].update(rate_interval=[0.0, 0.1]), "summary.equal.rate_interval"),
    ("an exploit", "exploits-h200.json", lambda r: r["exploits"][0].update(refused=False), "score is"),
    ("a score", "exploits-h200.json", lambda r: r.update(score=r["score"].replace("7/8", "8/8")), "8/8"),
    ("fuzzed pairs", "fuzz-cpu.json", lambda r: r.update(pairs=10**9), "pairs is 1000000000"),
    ("a finding", "fuzz-cpu.json", lambda r: r.update(differing_pairs=3), "differing_pairs is 3"),
    ("a record of nothing", "fuzz-cpu.json", lambda r: r.clear(), "no report of evaluate.py"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), [row[1:] for row in RECORDS], ids=[row[0] for row in RECORDS])
def test_a_forged_record_is_caught(quick: Quick, root: Path, name: str, change: Callable[[Any], Any], words: str) -> None:
    caught(quick, root, listed(name, change), f"{EVIDENCE}/{name}", words)


# ---------------------------------------------------------------- files


def swap(root: Path, one: str, two: str) -> None:
    os.rename(root / one, root / "third")
    os.rename(root / two, root / one)
    os.rename(root / "third", root / two)


def swap_and_mend(root: Path) -> None:
    swap(root, V1, V2)
    relisted(root)


def linked(root: Path, name: str, to: Path) -> None:
    """A file or folder replaced by a link to the same content elsewhere."""
    path = root / name
    os.rename(path, root / "moved") if path.exists() else None
    path.symlink_to(to if to.is_absolute() else root / to)


def search_elsewhere(root: Path) -> None:
    """A search of the CPU shown as one of another target, and listed there."""
    shutil.copytree(root / RUN, root / "experimental/h20/search/cpu-trial")

    def move(archive: Any) -> None:
        (entry,) = archive["runs"]
        archive["runs"].append({**entry, "path": "experimental/h20/search/cpu-trial", "target": "h20"})

    edit(root, ARCHIVE, move)


def stray(root: Path) -> None:
    shutil.copyfile(root / "experimental/cpu/validation.json", root / "experimental/h20/validation.json")


FILES = [
    ("swapped", lambda root: swap(root, V1, V2), V2, "has sha256"),
    ("swapped and mended", swap_and_mend, "validation.json", "avx2.json].sha256"),
    ("extra", lambda root: put(root, f"{EVIDENCE}/more.json", {}), f"{EVIDENCE}/more.json", "does not list it"),
    ("hidden", lambda root: put(root, f"{EVIDENCE}/.more", {}), f"{EVIDENCE}/.more", "does not list it"),
    ("in a folder", lambda root: (root / EVIDENCE / "x").mkdir() or put(root, f"{EVIDENCE}/x/y.json", {}), f"{EVIDENCE}/x/y.json", "does not"),
    ("extra in a search", lambda root: put(root, f"{RUN}/report/more.svg", {}), f"{RUN}/report/more.svg", "does not list it"),
    ("beside searches", lambda root: put(root, "experimental/cpu/search/more", {}), "experimental/cpu/search/more", "does not list it"),
    ("missing", lambda root: (root / V2).unlink(), V2, "is missing"),
    ("missing page", lambda root: (root / RUN / "report/report.html").unlink(), f"{RUN}/report/report.html", "is missing"),
    ("missing run", lambda root: (root / RUN / "run.xz").unlink(), f"{RUN}/run.xz", "is missing"),
    ("missing archive", lambda root: (root / ARCHIVE).unlink(), ARCHIVE, "is missing"),
    ("missing validation", lambda root: (root / "experimental/cpu/validation.json").unlink(), "cpu/validation.json", "is missing"),
    ("missing document", lambda root: (root / "README.md").unlink(), "README.md", "cannot read"),
    ("link out", lambda root: linked(root, V2, REPO / V2), V2, "is a link"),
    ("link inside", lambda root: linked(root, V2, Path("moved")), V2, "is a link"),
    ("broken link", lambda root: linked(root, f"{EVIDENCE}/x.json", Path("nowhere")), f"{EVIDENCE}/x.json", "is a link"),
    ("linked folder", lambda root: linked(root, EVIDENCE, REPO / EVIDENCE), EVIDENCE, "is a link"),
    ("linked search", lambda root: linked(root, RUN, REPO / RUN), RUN, "is a link"),
    ("linked archive", lambda root: linked(root, ARCHIVE, REPO / ARCHIVE), ARCHIVE, "is a link"),
    ("linked kernel", lambda root: linked(root, "experimental/cpu/kernels", REPO / "experimental/cpu/kernels"), "cpu/kernels", "is a link"),
    ("broken JSON", lambda root: (root / V2).write_text("{") and relisted(root), V2, "not JSON"),
    ("a key twice", lambda root: (root / f"{EVIDENCE}/fuzz-cpu.json").write_text('{"a": 1, "a": 2}') and relisted(root), "fuzz-cpu.json", "'a' stands twice"),
    ("a text of nothing", lambda root: (root / f"{EVIDENCE}/fuzz-h200.txt").write_text("all agree") and relisted(root), "fuzz-h200.txt", "no output"),
    ("a search elsewhere", search_elsewhere, "experimental/h20/search/cpu-trial", "is a search of target 'cpu'"),
    ("validation of nothing", stray, "experimental/h20/validation.json", "no full evaluation"),
    ("an edited page", lambda root: (root / RUN / "report/report.html").write_text("9.9x"), f"{RUN}/report/report.html", "has sha256"),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "name", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_other_files_are_caught(quick: Quick, root: Path, tamper: Tamper, name: str, words: str) -> None:
    caught(quick, root, tamper, name, words)


# ---------------------------------------------------------------- archive.json, validation.json, configs


def evidence_of(archive: Any, name: str = V2) -> Any:
    return next(entry for entry in archive["evidence"] if entry["path"] == name)


def target_of(archive: Any, name: str) -> Any:
    return next(entry for entry in archive["targets"] if entry["name"] == name)


LISTS = [
    ("a short hash", lambda a: evidence_of(a).update(sha256=evidence_of(a)["sha256"][:63]), "sha256"),
    ("a long hash", lambda a: evidence_of(a).update(sha256=evidence_of(a)["sha256"] + "0"), "sha256"),
    ("not hex", lambda a: evidence_of(a).update(sha256="x" * 64), "sha256"),
    ("upper case", lambda a: evidence_of(a).update(sha256=evidence_of(a)["sha256"].upper()), "sha256"),
    ("hash of another file", lambda a: evidence_of(a).update(sha256=evidence_of(a, V1)["sha256"]), f"{V2}: has sha256"),
    ("evidence twice", lambda a: a["evidence"].append(evidence_of(a)), "stands twice"),
    ("evidence not listed", lambda a: a["evidence"].remove(evidence_of(a)), f"{V2}: lies there"),
    ("evidence outside", lambda a: evidence_of(a).update(path="../x.json"), f"{V2}: lies there"),
    ("another kind", lambda a: evidence_of(a, COMPATIBILITY).update(kind="evaluation"), "compatibility.json].kind is 'evaluation'"),
    ("another target", lambda a: evidence_of(a).update(target="h20"), "cpu-avx2.json].target is 'h20'"),
    ("measured without evidence", lambda a: target_of(a, "h20").update(status="measured"), "targets[h20].status is 'measured'"),
    ("measured elsewhere", lambda a: target_of(a, "a100").update(status="measured"), "targets[a100].status is 'measured'"),
    ("not measured", lambda a: target_of(a, "cpu").update(status="not measured"), "targets[cpu].status"),
    ("no such status", lambda a: target_of(a, "cpu").update(status="excellent"), "status"),
    ("borrowed evidence", lambda a: target_of(a, "h20")["evidence"].append(GPU), "targets[h20].evidence"),
    ("another source", lambda a: target_of(a, "h20").update(source_sha256="0" * 64), "targets[h20].source_sha256"),
    ("another contract", lambda a: target_of(a, "h20").update(contract_sha256="0" * 64), "targets[h20].contract_sha256"),
    ("qualified attempts", lambda a: target_of(a, "cpu")["attempts"].update(qualified=7), "targets[cpu].attempts.qualified is 7"),
    ("failed attempts", lambda a: target_of(a, "cpu")["attempts"].update(failed=0), "targets[cpu].attempts.failed is 0"),
    ("a target less", lambda a: a["targets"].remove(target_of(a, "h20")), "targets[h20] is missing"),
    ("a target more", lambda a: a["targets"].append({**target_of(a, "h20"), "name": "b200"}), "targets[b200]"),
    ("a run's attempts", lambda a: a["runs"][0].update(attempts=8), "cpu-trial].attempts is 8"),
    ("a run's log", lambda a: a["runs"][0].update(log="0" * 64), "cpu-trial].log"),
    ("a run's bytes", lambda a: a["runs"][0].update(bytes=1), "cpu-trial].bytes is 1"),
    ("a run less", lambda a: a["runs"].pop(), f"{RUN}/report/lineage.svg: lies there"),
    ("a run's files", lambda a: a["runs"][0].pop("files"), "files is missing"),
    ("a figure of nothing", lambda a: a["figures"].append({"path": "experimental/figures/x.svg", "sha256": "0" * 64, "evidence": [V2]}), "x.svg: is missing"),
    ("an unknown key", lambda a: a.update(more=1), "more"),
    ("another schema", lambda a: a.update(schema="areal-tik/archive/2"), "newer version"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in LISTS], ids=[row[0] for row in LISTS])
def test_an_edited_archive_is_caught(quick: Quick, root: Path, change: Callable[[Any], Any], words: str) -> None:
    caught(quick, root, lambda root: edit(root, ARCHIVE, change), words)


VALIDATIONS = [
    ("words", lambda v: v["evaluations"][0].update(words=1), "cpu-avx2.json].words is 1"),
    ("cases of a check", lambda v: v["evaluations"][0]["checks"][3].update(cases=999), "checks[head_ratios].cases is 999"),
    ("a check less", lambda v: v["evaluations"][0]["checks"].pop(0), "checks[every_length] is missing"),
    ("the machine", lambda v: v["evaluations"][1]["environment"].update(machine="a laptop"), "environment.machine is 'a laptop'"),
    ("the judged source", lambda v: v["evaluations"][0].update(source_sha256="0" * 64), "cpu-avx2.json].source_sha256"),
    ("whether it is selected", lambda v: v["evaluations"][0].update(selected=False), "cpu-avx2.json].selected is False"),
    ("the report's hash", lambda v: v["evaluations"][0].update(sha256="0" * 64), "cpu-avx2.json].sha256"),
    ("another report", lambda v: v["evaluations"][0].update(report=GPU), "cpu-avx2.json] is missing"),
    ("an evaluation less", lambda v: v["evaluations"].pop(), "cpu-avx512.json] is missing"),
    ("a hash of wrong length", lambda v: v.update(contract_sha256="0" * 63), "contract_sha256"),
    ("a negative count", lambda v: v["evaluations"][0].update(differing=-1), "differing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in VALIDATIONS], ids=[row[0] for row in VALIDATIONS])
def test_an_edited_validation_is_caught(quick: Quick, root: Path, change: Callable[[Any], Any], words: str) -> None:
    name = "experimental/cpu/validation.json"
    caught(quick, root, lambda root: edit(root, name, change), name, words)


def select_witness(root: Path) -> None:
    """The CPU target's witness as its kernel, with the right hash."""
    path, text = root / "experimental/cpu/config.yaml", (root / "experimental/cpu/config.yaml").read_text()
    source = root / "experimental/cpu/kernels/unified_attn.cpp"
    text = text.replace("source: kernels/unified_attn.cpp", "source: kernels/witness.cpp")
    path.write_text(text.replace(sha256_file(source), sha256_file(root / "experimental/cpu/kernels/witness.cpp")))


def append(name: str, text: str) -> Tamper:
    def tamper(root: Path) -> None:
        with open(root / name, "a") as stream:
            stream.write(text)

    return tamper


def replace(name: str, old: str, new: str) -> Tamper:
    def tamper(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return tamper


CONFIGS = [
    ("another selected source", select_witness, ARCHIVE, "targets[cpu].source is 'experimental/cpu/kernels/unified_attn.cpp'"),
    ("an edited source", append("experimental/cpu/kernels/unified_attn.cpp", "//\n"), "unified_attn.cpp", "has sha256"),
    ("an edited header", append("experimental/common/attn_abi.h", "//\n"), "attn_abi.h", "has sha256"),
    ("an edited witness", append("experimental/cpu/kernels/witness.cpp", "//\n"), "witness.cpp", "for its witness"),
    ("a missing source", lambda root: (root / "experimental/common/portable_attn.cu").unlink(), "portable_attn.cu", "is missing"),
    ("other workloads", replace("experimental/cpu/config.yaml", "context: [128, 1024, 4096]", "context: [128, 1024]"), V2, "target.sections.workloads"),
    ("another contract", replace("experimental/cpu/config.yaml", "tile: 64", "tile: 32"), V2, "target.sections.contract"),
    ("another GPU", replace("experimental/h200/config.yaml", '["NVIDIA H200"]', '["NVIDIA H100"]'), "h200-judge.json", "is no GPU of target h200"),
    ("another name", replace("experimental/h20/config.yaml", "name: h20", "name: h21"), "h20/config.yaml", "target.name"),
    ("a config that is none", replace("experimental/h20/config.yaml", "device: cuda", "device: abacus"), "h20/config.yaml", "abacus"),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "name", "words"), [row[1:] for row in CONFIGS], ids=[row[0] for row in CONFIGS])
def test_a_changed_target_is_caught(quick: Quick, root: Path, tamper: Tamper, name: str, words: str) -> None:
    caught(quick, root, tamper, name, words)


# ---------------------------------------------------------------- published runs


def refused(files: dict[str, bytes]) -> Any:
    """The last admissible audit that was not promoted."""
    return next(a for a in reversed(audits(files)) if a["admissible"] and not a["promoted"] and a["incumbent"] is not None)


def rewritten(path: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        assert old in files[path]
        files[path] = files[path].replace(old, new, 1)

    return change


def forged_promotion(files: dict[str, bytes]) -> None:
    forge_records(files, {refused(files)["id"]: lambda record: record.update(promoted=True)})


def promoted_in_the_report_too(files: dict[str, bytes]) -> None:
    def change(report: Any) -> None:
        report["promotion"].update(promoted=True, sealed="passed", blockers=[], reason="T is 9 % lower")

    forge_audit_report(files, refused(files)["id"], change, lambda record: record.update(promoted=True))


def inadmissible_promotion(files: dict[str, bytes]) -> None:
    forge_records(files, {"E0006": lambda record: record.update(promoted=True)})


def a_gain(files: dict[str, bytes]) -> None:
    """Of the last promotion."""
    last = next(audit for audit in reversed(audits(files)) if audit["promoted"])
    forge_records(files, {last["id"]: lambda record: record.update(gain=0.5)})


def no_promotion(files: dict[str, bytes]) -> None:
    last = next(audit for audit in reversed(audits(files)) if audit["promoted"])
    forge_records(files, {last["id"]: lambda record: record.update(promoted=False)})


def better_times(files: dict[str, bytes]) -> None:
    """The candidate's samples of one cell, medians left, record and all hashes mended."""
    forge_audit_report(files, refused(files)["id"], faster)


def better_T(files: dict[str, bytes]) -> None:
    forge_records(files, {refused(files)["id"]: lambda record: record.update(T=0.5)})


def a_report_less(files: dict[str, bytes]) -> None:
    del files["reports/E0003.json"]


def lines_swapped(files: dict[str, bytes]) -> None:
    lines = files["log.jsonl"].splitlines(keepends=True)
    lines[4], lines[5] = lines[5], lines[4]
    files["log.jsonl"] = b"".join(lines)


def a_record_more(files: dict[str, bytes]) -> None:
    files["records/O0999.json"] = files["records/O0001.json"]


RUNS = [
    ("a record", rewritten("records/A0001.json", b"joint", b"decode_only"), "A0001"),
    ("a line of the log", rewritten("log.jsonl", b'"promoted":false', b'"promoted":true'), "log.jsonl: line"),
    ("lines out of order", lines_swapped, "log.jsonl: line"),
    ("a report", rewritten("reports/E0003.json", b'"PASSED"', b'"REFUSED"'), "E0003"),
    ("a missing report", a_report_less, "E0003"),
    ("a record that no line names", a_record_more, "O0999"),
    ("a prompt", rewritten("prompts/action.md", b"e", b"a"), "prompts/action.md"),
    ("the config", rewritten("config.json", b"1.1", b"9.1"), "config.json"),
    ("a promotion", forged_promotion, "promoted is True"),
    ("a promotion, also in its report", promoted_in_the_report_too, "promotion.promoted is True"),
    ("a promotion of what is too slow", inadmissible_promotion, "promotion-not-granted"),
    ("a promotion taken away", no_promotion, "promoted is False"),
    ("a gain", a_gain, "gain is 0.5"),
    ("times", better_times, "median"),
    ("T", better_T, "T is 0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in RUNS], ids=[row[0] for row in RUNS])
def test_a_forged_search_is_caught(quick: Quick, root: Path, change: Callable[[dict[str, bytes]], None], words: str) -> None:
    caught(quick, root, lambda root: repack(root, change), RUN, words)


def flipped(root: Path) -> None:
    data = bytearray((root / RUN / "run.xz").read_bytes())
    data[len(data) // 2] ^= 1
    (root / RUN / "run.xz").write_bytes(data)


@pytest.mark.parametrize(("mend", "words"), [(False, "has sha256"), (True, "damaged")])
def test_a_flipped_bit_of_a_search_is_caught(quick: Quick, root: Path, mend: bool, words: str) -> None:
    caught(quick, root, lambda root: (flipped(root), relisted(root) if mend else None), f"{RUN}/run.xz", words)


# ---------------------------------------------------------------- documents


TABLES = [
    ("a time", "README.md", "41.1 µs", "31.1 µs", "grid"),
    ("a ratio", "README.md", "| 0.43x |", "| 1.43x |", "summary"),
    ("words", "experimental/README.md", "| every_length | 20 |", "| every_length | 21 |", "checks"),
    ("a search", "experimental/README.md", "| 1.22x |", "| 2.22x |", "searches"),
    ("evidence", "README.md", "grid experimental/evidence/h200-portable", "grid experimental/evidence/h200-better", "h200-better"),
    ("an end", "README.md", "<!-- end of table -->", "", "without its end"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "words"), [row[1:] for row in TABLES], ids=[row[0] for row in TABLES])
def test_an_edited_table_is_caught(quick: Quick, root: Path, name: str, old: str, new: str, words: str) -> None:
    caught(quick, root, replace(name, old, new), name, words)
