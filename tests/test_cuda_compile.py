"""Every CUDA source compiles for its target's architecture, with no spills and no local memory. Needs nvcc, no GPU.

A debug build may spill: it is there for its words.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.core.config import EXPERIMENTAL, Target, load_target
from tools.core.errors import UserError
from tools.loader.build import build
from tools.loader.toolchain import find_nvcc

# Every config of a target: its own, and others beside it, such as debug builds.
CONFIGS = {str(path.relative_to(EXPERIMENTAL)): load_target(config=path) for path in sorted(EXPERIMENTAL.glob("*/*.yaml"))}
CUDA = {name: target for name, target in CONFIGS.items() if target.config["build"]["compiler"] == "nvcc"}


def has_nvcc() -> bool:
    try:
        find_nvcc()
    except UserError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc on this machine")


def test_every_cuda_source_belongs_to_a_target(repo: Path) -> None:
    used = {target.source(role).resolve() for target in CUDA.values() for role in ("kernel", "witness")}
    there = {path.resolve() for path in (repo / "experimental").rglob("*.cu") if "search" not in path.parts}
    assert there == used


@needs_nvcc
@pytest.mark.parametrize("role", ["kernel", "witness"])
@pytest.mark.parametrize("target", CUDA.values(), ids=CUDA)
def test_compiles_without_spills_or_local_memory(target: Target, role: str) -> None:
    resources = build(target, role=role).resources
    assert resources, "ptxas reported no kernel"
    for use in resources:
        if target.path.name != "debug.yaml":  # its delays need registers
            assert use["spill_store_bytes"] == use["spill_load_bytes"] == use["stack_bytes"] == 0, use
        assert 0 < use["registers"] <= 255, use


@needs_nvcc
def test_local_memory_is_seen(tmp_path: Path) -> None:
    """The negative control of the test above: a kernel with an array that cannot live in registers."""
    source = tmp_path / "local.cu"
    source.write_text(
        "__global__ void k(float* x, int n) { float a[64]; for (int i = 0; i < 64; ++i) a[i] = x[i * n];\n"
        "  for (int i = 0; i < n; ++i) a[(i * 7) % 64] += a[(i * n) % 64]; x[0] = a[n % 64]; }\n"
    )
    (use,) = build(load_target("h200"), source).resources
    assert use["stack_bytes"] > 0


@needs_nvcc
def test_cuda_compile_error_names_its_line(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void k() { missing(); }\n")
    with pytest.raises(UserError, match=r"broken.cu: does not compile: .*broken.cu\(1\): error: .*missing"):
        build(load_target("h200"), source)


@needs_nvcc
def test_cuda_source_may_not_read_undeclared_files(tmp_path: Path) -> None:
    assert shutil.which("c++") or shutil.which("g++")
    (tmp_path / "secret.cuh").write_text("")
    source = tmp_path / "includes.cu"
    for include in ("secret.cuh", str(tmp_path / "secret.cuh")):
        source.write_text(f'#include "{include}"\n__global__ void k() {{}}\n')
        with pytest.raises(UserError, match=r"includes .*secret.cuh, which the config does not declare"):
            build(load_target("h200"), source)
