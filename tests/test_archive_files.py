"""Files that are added, missing, swapped, linked; edits of archive.json, validation.json, configs and documents: all are
caught, and the message names the thing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from archive_tools import (
    ARCHIVE,
    COMPATIBILITY,
    EVIDENCE,
    GPU,
    REPO,
    RUN,
    V1,
    V2,
    Quick,
    Tamper,
    edit,
    put,
    relisted,
)

from tools.archive.verify import update
from tools.core.files import sha256_file

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
        entry = run_of(archive)
        archive["runs"].append({**entry, "path": "experimental/h20/search/cpu-trial", "target": "h20"})

    edit(root, ARCHIVE, move)


def stray(root: Path) -> None:
    shutil.copyfile(root / "experimental/cpu/validation.json", root / "experimental/h20/validation.json")


def append(name: str, text: str) -> Tamper:
    def tamper(root: Path) -> None:
        with open(root / name, "a") as stream:
            stream.write(text)

    return tamper


def edit_csv(root: Path) -> None:
    """A ratio in the data of a figure, its hash in the archive mended."""
    name = "experimental/figures/attention_performance.csv"
    text = (root / name).read_text()
    (root / name).write_text(re.sub(r",(\d+)\.", lambda ratio: f",{int(ratio[1]) + 1}.", text, count=1))
    update(root)


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
    ("an edited figure", append("experimental/figures/performance.svg", "<!-- -->"), "performance.svg", "has sha256"),
    ("an edited line of a figure", edit_csv, "attention_performance.csv", "not what the evidence gives"),
    ("a figure more", append("experimental/figures/more.svg", "<svg/>"), "figures/more.svg", "does not list it"),
    ("a figure less", lambda root: (root / "experimental/figures/performance.pdf").unlink(), "performance.pdf", "is missing"),
    ("an edited page", lambda root: (root / RUN / "report/report.html").write_text("9.9x"), f"{RUN}/report/report.html", "has sha256"),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "name", "words"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_other_files_are_caught(verifier: Quick, archive: Path, tamper: Tamper, name: str, words: str) -> None:
    verifier.catches(archive, tamper, name, words)


# ---------------------------------------------------------------- archive.json, validation.json, configs


def evidence_of(archive: Any, name: str = V2) -> Any:
    return next(entry for entry in archive["evidence"] if entry["path"] == name)


def run_of(archive: Any) -> Any:
    return next(entry for entry in archive["runs"] if entry["path"] == RUN)


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
    ("a run's attempts", lambda a: run_of(a).update(attempts=8), "cpu-trial].attempts is 8"),
    ("a run's log", lambda a: run_of(a).update(log="0" * 64), "cpu-trial].log"),
    ("a run's bytes", lambda a: run_of(a).update(bytes=1), "cpu-trial].bytes is 1"),
    ("a run less", lambda a: a["runs"].pop(), f"{RUN}/report/lineage.svg: lies there"),
    ("a run's files", lambda a: run_of(a).pop("files"), "files is missing"),
    ("a figure of nothing", lambda a: a["figures"].append({"path": "experimental/figures/x.svg", "sha256": "0" * 64, "evidence": [V2]}), "x.svg: is missing"),
    ("an unknown key", lambda a: a.update(more=1), "more"),
    ("another schema", lambda a: a.update(schema="areal-tik/archive/2"), "newer version"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in LISTS], ids=[row[0] for row in LISTS])
def test_an_edited_archive_is_caught(verifier: Quick, archive: Path, change: Callable[[Any], Any], words: str) -> None:
    verifier.catches(archive, lambda root: edit(root, ARCHIVE, change), words)


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
def test_an_edited_validation_is_caught(verifier: Quick, archive: Path, change: Callable[[Any], Any], words: str) -> None:
    name = "experimental/cpu/validation.json"
    verifier.catches(archive, lambda root: edit(root, name, change), name, words)


def select_witness(root: Path) -> None:
    """The CPU target's witness as its kernel, with the right hash."""
    path, text = root / "experimental/cpu/config.yaml", (root / "experimental/cpu/config.yaml").read_text()
    source = root / "experimental/cpu/kernels/unified_attn.cpp"
    text = text.replace("source: kernels/unified_attn.cpp", "source: kernels/witness.cpp")
    path.write_text(text.replace(sha256_file(source), sha256_file(root / "experimental/cpu/kernels/witness.cpp")))


def replace(name: str, old: str, new: str) -> Tamper:
    def tamper(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new), errors="surrogateescape")

    return tamper


def one_figure(row: str, unit: str, other: str) -> Tamper:
    """The README's first figure in the row that begins so, whatever it is, is another."""

    def tamper(root: Path) -> None:
        text, count = re.subn(
            rf"({re.escape(row)})[\d.,]+{unit}", rf"\g<1>{other}{unit}", (root / "README.md").read_text(), count=1
        )
        assert count == 1
        (root / "README.md").write_text(text)

    return tamper


CONFIGS = [
    ("another selected source", select_witness, ARCHIVE, "targets[cpu].source is 'experimental/cpu/kernels/unified_attn.cpp'"),
    ("an edited source", append("experimental/cpu/kernels/unified_attn.cpp", "//\n"), "unified_attn.cpp", "has sha256"),
    ("an edited header", append("experimental/common/attn_abi.h", "//\n"), "attn_abi.h", "has sha256"),
    ("an edited witness", append("experimental/cpu/kernels/witness.cpp", "//\n"), "witness.cpp", "for its witness"),
    ("a missing source", lambda root: (root / "experimental/common/portable_attn.cu").unlink(), "portable_attn.cu", "is missing"),
    ("other workloads", replace("experimental/cpu/config.yaml", "context: [128, 1024, 4096]", "context: [128, 1024]"), V2, "target.sections.workloads"),
    ("another contract", replace("experimental/cpu/config.yaml", "tile: 64", "tile: 32"), V2, "target.sections.contract"),
    ("another GPU", replace("experimental/h200/config.yaml", '["NVIDIA H200"]', '["NVIDIA H100"]'), "h200-", "is no GPU of target h200"),
    ("another name", replace("experimental/h20/config.yaml", "name: h20", "name: h21"), "h20/config.yaml", "target.name"),
    ("a config that is none", replace("experimental/h20/config.yaml", "device: cuda", "device: abacus"), "h20/config.yaml", "abacus"),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "name", "words"), [row[1:] for row in CONFIGS], ids=[row[0] for row in CONFIGS])
def test_a_changed_target_is_caught(verifier: Quick, archive: Path, tamper: Tamper, name: str, words: str) -> None:
    verifier.catches(archive, tamper, name, words)


# ---------------------------------------------------------------- documents


TABLES = [
    ("a time", one_figure("| batch 1 | ", " µs", "31.1"), "README.md", "grid"),
    ("a ratio", one_figure("| full sequences, 32 cells | ", "x", "9.43"), "README.md", "summary"),
    ("words", replace("experimental/README.md", "| every_length | 20 |", "| every_length | 21 |"), "experimental/README.md", "checks"),
    ("a search", replace("experimental/README.md", "| 2 | 1.22x |", "| 2 | 2.22x |"), "experimental/README.md", "searches"),
    ("a peer", replace("experimental/README.md", "| decode B1 L128 | 2.3", "| decode B1 L128 | 2.1"), "experimental/README.md", "peers"),
    ("evidence", replace("README.md", "grid experimental/evidence/h200", "grid experimental/evidence/h201"), "README.md", "h201"),
    ("bytes that are no text", replace("README.md", "measured", "measur\udcef"), "README.md", "not UTF-8"),
    ("an end", replace("README.md", "<!-- end of table -->", ""), "README.md", "without its end"),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "name", "words"), [row[1:] for row in TABLES], ids=[row[0] for row in TABLES])
def test_an_edited_table_is_caught(verifier: Quick, archive: Path, tamper: Tamper, name: str, words: str) -> None:
    verifier.catches(archive, tamper, name, words)
