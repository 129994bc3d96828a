"""No tool knows a GPU: a made-up one is a folder with a config, and no name of one stands in code."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from archive_tools import copied

from tools import plot
from tools.core.config import load_target, target_names
from tools.core.files import sha256_file
from tools.tables import DOCUMENTS

NAME, GPU = "x900", "NVIDIA X900 Made Up"
CONFIG = f"""extends: ../cuda.yaml
target:
  name: {NAME}
  device: cuda
  gpu_names: ["{GPU}"]
  compute_capability: [9, 0]
  l2_bytes: 33554432
  peak_tflops: 500
  peak_bandwidth_gbps: 3000
  multiprocessors: 96
  clock_mhz: 1700
build:
  arch: ["compute_90a,code=sm_90a"]
contract:
  name: {NAME}-v1
baselines:
  full: [cudnn]
  decode: [flashinfer]
  quick: [cudnn]
"""


class Checkout:
    """A copy of what the tools need, to run them in."""

    def __init__(self, repo: Path, to: Path) -> None:
        self.root = copied(repo, to)
        for name in ("tools", "assets"):
            shutil.copytree(repo / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(repo / "tests" / "mutants", to / "tests" / "mutants")
        self.cache = repo / ".cache" / "kernels"

    def run(self, *words: str, code: int = 0) -> str:
        """Standard output of a command; it must end with this exit code and, where that is 2, in one line of error."""
        where = {**os.environ, "AREAL_TIK_CACHE": str(self.cache), "PYTHONPATH": str(self.root)}
        ran = subprocess.run([sys.executable, *words], cwd=self.root, env=where, capture_output=True, text=True)
        assert ran.returncode == code, f"{' '.join(words)}: {ran.stdout}{ran.stderr}"
        if code == 2:
            assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1
        return ran.stdout + (ran.stderr if code else "")


@pytest.fixture(scope="module")
def checkout(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout to which a made-up target was added: its folder, and nothing else."""
    found = Checkout(repo, tmp_path_factory.mktemp("checkout"))
    before = {path: sha256_file(path) for path in (found.root / "tools").rglob("*.py")}
    (found.root / "experimental" / NAME).mkdir()
    (found.root / "experimental" / NAME / "config.yaml").write_text(CONFIG)
    yield found
    assert before == {path: sha256_file(path) for path in (found.root / "tools").rglob("*.py")}


def test_it_is_listed_and_refused_on_another_machine(checkout: Checkout) -> None:
    said = checkout.run("tools/evaluate.py", "--gpu", "nothing", "--output", "x.json", code=2)
    assert NAME in said
    said = checkout.run("tools/load_kernel.py", "--gpu", NAME, code=2)
    assert f"target {NAME} needs" in said or GPU in said


def test_its_config_is_checked(checkout: Checkout) -> None:
    path = checkout.root / "experimental" / NAME / "config.yaml"
    try:
        path.write_text(CONFIG.replace("multiprocessors: 96", "multiprocessors: many"))
        assert "target.multiprocessors: 'many' is not a whole number" in checkout.run("tools/predict.py", "--gpu", NAME, code=2)
    finally:
        path.write_text(CONFIG)


def test_its_kernel_compiles(checkout: Checkout) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    assert "registers" in checkout.run("tools/load_kernel.py", "--gpu", NAME, "--compile-only", "--verbose")


def test_a_search_starts_and_leaves_as_a_job(checkout: Checkout) -> None:
    checkout.run("tools/ir.py", "init", "--gpu", NAME, "--run", "runs/trial")
    context = checkout.run("tools/ir.py", "context", "--run", "runs/trial", "--budget", "16000")
    assert f"{NAME}-v1" in context and "## Predicted, not measured" in context  # its kernel is the portable one
    checkout.run("tools/ir.py", "export-job", "--run", "runs/trial", "--implementation", "I0000")
    (folder,) = (checkout.root / "runs" / "trial" / "jobs").iterdir()
    job = json.loads((folder / "job.json").read_text())
    assert job["target"] == NAME and GPU in (folder / "config.yaml").read_text()
    checkout.run("tools/ir.py", "verify", "--run", "runs/trial")


def test_it_is_predicted(checkout: Checkout) -> None:
    found = json.loads(checkout.run("tools/predict.py", "--gpu", NAME, "--json"))
    assert found["target"] == NAME and found["title"] == "predicted, not measured"


def test_the_archive_figures_and_tables_take_it_in(checkout: Checkout) -> None:
    """Refused until they are made again; then all of them say that it was not measured."""
    assert f"targets[{NAME}]" in checkout.run("tools/verify_archive.py", code=1)
    assert NAME in checkout.run("tools/plot.py", "--check", code=1)
    if plot.other_matplotlib() is None:
        checkout.run("tools/plot.py")
        checkout.run("tools/plot.py", "--check")
        assert (checkout.root / "experimental" / "figures" / f"roofline_{NAME}.svg").is_file()
        assert f"{NAME},not measured" in (checkout.root / "experimental" / "figures" / "attention_performance.csv").read_text()
    checkout.run("tools/verify_archive.py", "--update")
    archive = json.loads((checkout.root / "experimental" / "archive.json").read_text())
    (entry,) = (target for target in archive["targets"] if target["name"] == NAME)
    assert entry["status"] == "not measured" and entry["evidence"] == []
    assert not (checkout.root / "experimental" / NAME / "validation.json").exists()
    checkout.run("tools/tables.py", "--check")
    if plot.other_matplotlib() is None:
        checkout.run("tools/verify_archive.py")
    assert all((checkout.root / name).is_file() for name in DOCUMENTS)


# ---------------------------------------------------------------- names in code


def names_in(path: Path, pattern: re.Pattern[str]) -> list[str]:
    """Names of GPUs in a file's identifiers and texts, but for docstrings and the examples of --help."""
    tree, skipped = ast.parse(path.read_bytes()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body and isinstance(node.body[0], ast.Expr):
            skipped.add(node.body[0].value)
        if isinstance(node, ast.Call):
            skipped.update(part for word in node.keywords if word.arg == "help" for part in ast.walk(word.value))  # type: ignore[arg-type]
    found = []
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            text = node.value
        elif isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = node.name
        if pattern.search(text):
            found.append(f"{path.name}:{node.lineno}: {text[:60]}")  # type: ignore[attr-defined]
    return found


def gpu_names() -> re.Pattern[str]:
    """CUDA targets, what the driver calls their GPUs, and any other NVIDIA card."""
    cuda = [found for found in map(load_target, target_names()) if found.config["target"]["device"] == "cuda"]
    words = [re.escape(word) for found in cuda for word in (found.name, *found.config["target"]["gpu_names"])]
    return re.compile(rf"(?i)(?<![a-z0-9])({'|'.join(words)}|nvidia [a-z]* ?\d+)(?![a-z0-9])")


def test_no_gpu_is_named_in_code(repo: Path) -> None:
    """In tools, and in what tests share; a test's own cases may name the packaged targets and their evidence."""
    evidence = {path.name for path in (repo / "experimental" / "evidence").iterdir()}
    pattern = gpu_names()
    helpers = [path for path in (repo / "tests").rglob("*.py") if not path.name.startswith("test_")]
    found = [name for path in (*sorted((repo / "tools").rglob("*.py")), *helpers) for name in names_in(path, pattern)]
    assert len(helpers) > 10
    assert not [name for name in found if name.rpartition(": ")[2].strip("/").removesuffix(".json") + ".json" not in evidence]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('x = load("h200")', 1),
        ('if name == "NVIDIA H20": pass', 1),
        ('if name == "NVIDIA B300": pass', 1),
        ("def tune_a100(): pass", 1),
        ("H200 = 3", 1),
        ('"""On an h200."""\nadd("--gpu", help="such as h200")', 0),
        ('x = "h2000 ah200"', 0),
        ('x = "NVIDIA_TF32"', 0),
    ],
)
def test_a_name_in_code_is_found(tmp_path: Path, code: str, count: int) -> None:
    path = tmp_path / "x.py"
    path.write_text(code)
    assert len(names_in(path, gpu_names())) == count
