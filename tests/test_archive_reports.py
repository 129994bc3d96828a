"""Every way of tampering with reports and records of the archive is caught, and the message names the thing.

The tamperer also mends each hash that stands in the way, so that only what is computed again is left to catch it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archive_tools import (
    COMPATIBILITY,
    EVIDENCE,
    GPU,
    REPO,
    V1,
    V2,
    Quick,
    Tamper,
    cell,
    cold,
    edit,
    faster,
    forge_report,
    ours,
    relisted,
)

from tools import plot
from tools.archive.figures import FIGURES
from tools.archive.targets import variant
from tools.archive.verify import update
from tools.core.config import EXPERIMENTAL, load_target
from tools.core.files import sha256_json
from tools.figures.sources import read

# ---------------------------------------------------------------- reports, all their hashes mended


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
def test_a_forged_report_is_caught(
    verifier: Quick, archive: Path, name: str, change: Callable[[Any], None], words: str
) -> None:
    verifier.catches(archive, lambda root: forge_report(root, name, change), name, words)


def largest(report: Any) -> None:
    """A sample on which no figure hangs."""
    samples = ours(report)["samples_us"]
    samples[samples.index(max(samples))] += 0.001


def test_a_sample_on_which_nothing_hangs_is_caught_by_the_hashes(verifier: Quick, archive: Path) -> None:
    """The archive's, and the report's own where that is mended; by nothing where all are: the README says so."""
    edit(archive, V2, largest)
    assert (problem := verifier.problem(archive)) and f"{V2}: has sha256" in problem
    relisted(archive)
    assert (problem := verifier.problem(archive)) and f"{V2}: report: hashes.report" in problem
    shutil.copyfile(REPO / V2, archive / V2)
    edit(archive, V1, largest)
    relisted(archive)
    assert (problem := verifier.problem(archive)) and "cpu-avx512.json].sha256" in problem  # in validation.json
    update(archive)
    assert (problem := verifier.problem(archive)) and "attention_performance" in problem  # which names the report's hash
    targets = [load_target(config=path) for path in sorted((archive / "experimental").glob("*/config.yaml"))]
    measured = read(archive / EVIDENCE, archive / FIGURES / "reports.json", targets)
    for name, content in plot.tables(measured, targets).items():
        (archive / FIGURES / name).write_bytes(content)
    update(archive)
    assert verifier.problem(archive) is None


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
    ("promoted trials", "trials-cpu.json", lambda r: r["summary"]["equal"].update(promoted=1), "summary.equal.promoted is 1"),
    ("a trial", "trials-cpu.json", lambda r: r["trials"]["equal"][0].update(promoted=True), "summary.equal.promoted"),
    ("a rate's interval", "trials-h200.json", lambda r: r["summary"]["equal"].update(rate_interval=[0.0, 0.1]), "summary.equal.rate_interval"),
    ("an exploit", "exploits-h200.json", lambda r: r["exploits"][0].update(refused=False), "score is"),
    ("a score", "exploits-h200.json", lambda r: r.update(score=r["score"].replace("7/8", "8/8")), "8/8"),
    ("fuzzed pairs", "fuzz-cpu.json", lambda r: r.update(pairs=10**9), "pairs is 1000000000"),
    ("a finding", "fuzz-cpu.json", lambda r: r.update(differing_pairs=3), "differing_pairs is 3"),
    ("a word that moved", "repeats-h200.json", lambda r: r["cells"][7]["beside_gathers"].update(differing_words=1), "same"),
    ("a word that did not", "repeats-h200.json", lambda r: r.update(same=False), "same"),
    ("a target that is no name", "exploits-h200.json", lambda r: r.update(gpu={}), "target {} is none of"),
    ("a record of nothing", "fuzz-cpu.json", lambda r: r.clear(), "no report of evaluate.py"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), [row[1:] for row in RECORDS], ids=[row[0] for row in RECORDS])
def test_a_forged_record_is_caught(verifier: Quick, archive: Path, name: str, change: Callable[[Any], Any], words: str) -> None:
    verifier.catches(archive, listed(name, change), f"{EVIDENCE}/{name}", words)


def test_a_report_is_held_against_the_config_whose_workloads_it_states() -> None:
    """beyond.yaml has other cells than the target's config, under the same name."""
    own, beyond = load_target("h200"), load_target(config=EXPERIMENTAL / "h200" / "beyond.yaml")
    assert own.sections["workloads"] != beyond.sections["workloads"]
    assert variant(own, beyond.sections["workloads"]).path == beyond.path
    for workloads in (own.sections["workloads"], "0" * 64, None):
        assert variant(own, workloads) is own
