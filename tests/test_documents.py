"""The documents state what is there: links resolve, tables are their evidence, the example runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tools.core.errors import UserError
from tools.evaluator import report as reports
from tools.load_kernel import load_kernel
from tools.tables import DOCUMENTS, main, rendered

REPORT = {
    "status": "PASSED",
    "timing": {
        "cells": [
            {
                "kind": "decode", "phase": "decode", "batch": 1, "keys": 128,
                "modes": {"cold": {"same_as": None, "kernels": {"candidate": {"samples_us": [2.0, 4.0, 3.0]}},
                                   "baselines": {"fast": {"samples_us": [6.0]}, "slow": {"samples_us": [9.0]}}}},
            }
        ]
    },
}  # fmt: skip


def test_tables_are_their_evidence(repo: Path) -> None:
    assert main(["--check"]) == 0
    assert sum((repo / name).read_text().count("<!-- end of table -->") for name in DOCUMENTS) >= 6


def test_a_table_is_taken_from_raw_samples(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(REPORT))
    text = "<!-- table: grid r.json -->\nold\n<!-- end of table -->\n"
    once = rendered(text, "x.md", tmp_path)
    assert "3.0 µs (2.00x)" in once and "old" not in once and once.endswith("<!-- end of table -->\n")
    assert rendered(once, "x.md", tmp_path) == once
    with pytest.raises(UserError, match="without its end"):
        rendered("<!-- table: grid r.json -->\n", "x.md", tmp_path)
    REPORT["timing"]["cells"][0]["modes"]["cold"]["kernels"]["candidate"]["samples_us"][2] = 4.0  # type: ignore[index]
    (tmp_path / "r.json").write_text(json.dumps(REPORT))
    assert "4.0 µs (1.50x)" in rendered(text, "x.md", tmp_path)


def test_scores_are_counted_again(tmp_path: Path) -> None:
    """From what each mutant, exploit and trial did, whatever the record claims as its sum."""
    mutants = [
        {"name": "a", "status": "killed", "subtle": True, "witness_only": False},
        {"name": "b", "status": "survived", "subtle": True, "witness_only": True},
    ]
    exploits = [
        {"guard": "clock", "refused": True, "succeeds_without_guard": True, "control": "PASSED"},
        {"guard": None, "refused": False, "succeeds_without_guard": None, "control": "REFUSED"},
    ]
    records = {
        "mutants": ({"corpora": {"cpu": {"target": "cpu", "killed": 2, "mutants": mutants}}}, "| cpu | 1 of 2 | 2 | 1 | b |"),
        "trials": (
            {
                "target": "cpu",
                "summary": {"equal": {"promoted": 9, "rate_interval": [0.0, 0.5]}},
                "trials": {"equal": [{"promoted": False}, {"promoted": True}]},
            },
            "| cpu | the incumbent's equal | 1 of 2 | 0 to 50 % |",
        ),
        "exploits": ({"gpu": "cpu", "score": "2/2", "exploits": exploits}, "| cpu | 1 of 2 | 1 of 1 | 1 of 2 |"),
    }
    for kind, (record, line) in records.items():
        (tmp_path / "r.json").write_text(json.dumps(record))
        text = f"<!-- table: {kind} r.json r.json -->\n<!-- end of table -->\n"
        assert rendered(text, "x.md", tmp_path).count(line) == 2, kind
    with pytest.raises(UserError, match="takes one report"):
        rendered("<!-- table: grid r.json r.json -->\n<!-- end of table -->\n", "x.md", tmp_path)


@pytest.mark.parametrize(
    ("kind", "path", "word"),
    [("grid", "missing.json", "missing.json"), ("pie", "r.json", "pie"), ("grid", "r.json", "REFUSED")],
)
def test_a_table_without_evidence_is_refused(tmp_path: Path, kind: str, path: str, word: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps({**REPORT, "status": "REFUSED"}))
    with pytest.raises(UserError, match=word):
        rendered(f"<!-- table: {kind} {path} -->\n<!-- end of table -->\n", "x.md", tmp_path)


@pytest.mark.parametrize("name", [*DOCUMENTS, "AGENTS.md"])
def test_links_and_paths_exist(repo: Path, name: str) -> None:
    text = (repo / name).read_text()
    folder = (repo / name).parent
    links = [link for link in re.findall(r"\]\(([^)#:\s]+)\)", text) if not (folder / link).exists()]
    paths = re.findall(r"`((?:tools|tests|experimental|\.ci)/[\w./*<>-]+)`", text)
    missing = [path for path in paths if not any(c in path for c in "<*") and not (repo / path).exists()]
    assert not links + missing


def anchors(text: str) -> set[str]:
    """The headings of a document, as a link names them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", [*DOCUMENTS, "AGENTS.md"])
def test_links_to_a_heading_find_it(repo: Path, name: str) -> None:
    for file, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", (repo / name).read_text()):
        linked = (repo / name).parent / file if file else repo / name
        assert anchor in anchors(linked.read_text()), f"{name}: {file}#{anchor}"


def section(text: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, heading
    return found[1]


def test_requirements_are_those_of_package_and_evidence(repo: Path) -> None:
    """Versions and times under Installation."""
    said = section((repo / "README.md").read_text(), "Installation")
    project = (repo / "pyproject.toml").read_text()
    python, torch_version = (
        re.search(pattern, project) for pattern in (r'requires-python = ">=([\d.]+)"', r'"torch>=([\d.]+)"')
    )
    assert python and torch_version
    assert f"Python {python[1]} or later" in said and f"build of torch, {torch_version[1]} or later" in said
    for name in ("cpu-avx512", "cpu-avx2"):
        report = json.loads((repo / "experimental/evidence" / f"{name}.json").read_text())
        assert f"{report['run']['seconds']:.0f} s ([{name}]" in said and report["environment"]["cores"] == 2
        assert "g++ 12.2" in said and ") 12.2." in report["builds"]["candidate"]["toolchain"]["version"]
    report = json.loads((repo / "experimental/evidence/h200-hopper.json").read_text())
    environment, tools = report["environment"], report["builds"]["candidate"]["toolchain"]
    nvcc, host = re.search(r"V([\d.]+)", tools["version"]), re.search(r"\) (\d+\.\d+)\.\d+\n", tools["host_version"])
    assert nvcc and host
    for words in (
        f"Python {'.'.join(environment['python'].split('.')[:2])},",
        f"torch {'.'.join(environment['packages']['torch'].split('.')[:2])},",
        f"CUDA {environment['torch_cuda']} (nvcc {nvcc[1]}, g++ {host[1]})",
        f"driver {environment['gpu_state']['driver_version']}",
        f"{environment['cores']} cores",
        f"{report['run']['seconds']:.0f} s",
    ):
        assert words in said, words


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_table_of_an_old_report_says_so(repo: Path, name: str) -> None:
    """Above a table from a report of an earlier version of the evaluator, in its own paragraph."""
    text = (repo / name).read_text()
    for table in re.finditer(r"<!-- table: (?:grid|summary|peers|checks) (\S+) -->", text):
        version = json.loads((repo / table[1]).read_text())["version"]
        before = text[: table.start()].rstrip().rsplit("\n\n", 1)[-1]
        assert version == reports.VERSION or f"version {version}" in before, table[1]


def test_owners_of_unmeasured_gpus_are_asked(repo: Path) -> None:
    text = (repo / "README.md").read_text()
    said = section(text, "Measure your GPU")
    measured = {
        target["name"] for target in json.loads((repo / "experimental/archive.json").read_text())["targets"]
        if target["status"] == "measured"
    }  # fmt: skip
    for name in ("a100", "h20", "h200"):
        assert f"GPU={name}" in said
        assert (f"| `{name}` |" in text and "| [not yet](#measure-your-gpu) |" not in _row(text, name)) == (name in measured)
    assert "pull request" in said and "issue" in said and "tools/verify_archive.py" in said


def _row(text: str, target: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| `{target}` |"))


def test_commands_of_the_readme_exist(repo: Path) -> None:
    text = (repo / "README.md").read_text()
    commands = re.findall(r"python (tools/\w+\.py)((?: --[\w-]+)*)", text)
    assert commands
    for script, options in commands:
        source = (repo / script).read_text()
        for option in options.split():
            assert f'"{option}"' in source, f"{script} has no {option}"


def python_block(repo: Path, word: str) -> str:
    """The README's first Python block that has a word."""
    blocks = re.findall(r"```python\n(.*?)```", (repo / "README.md").read_text(), re.S)
    return next(block for block in blocks if word in block)


def test_the_models_example_of_the_readme_runs(repo: Path) -> None:
    """It ends with equal bits of rollout and trainer."""
    pytest.importorskip("transformers", reason="transformers is not installed (it needs Python 3.11): pip install '.[models]'")
    code = python_block(repo, "patch_model")
    assert "assert equal_bits(old, new)" in code
    exec(compile(code, "README.md", "exec"), {})


def test_the_example_of_the_readme_runs(repo: Path) -> None:
    """Every call of the README's Python block, on the CPU target."""
    code = (
        python_block(repo, "load_kernel")
        .replace('load_kernel("h200")', 'load_kernel("cpu")')
        .replace('device="cuda"', 'device="cpu"')
    )
    names: dict[str, object] = {}
    torch.manual_seed(17)
    exec(compile(code, "README.md", "exec"), names)  # the block is complete: it makes its own tensors
    assert isinstance(names["o"], torch.Tensor)
    assert type(names["kernel"]) is type(load_kernel("cpu"))
