"""A target's arithmetic is written in one place: no instruction that rounds may appear in a kernel file outside of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CUDA = re.compile(
    r"\b(?:mul|add|sub|fma|max|min|ex2|rcp|lg2|sqrt|rsqrt|div|tanh|cvt)\.[a-z0-9.]*f(?:16|32|64)|mma\.(?:sync|async)"
    r"|\b__(?:f(?:mul|add|sub|ma|maf|div|rcp|sqrt)_r[nzud]|expf|exp2f|logf|log2f|fdividef|float2bfloat16\w*|floats2bfloat162_rn)\b"
    r"|\b(?:std::)?(?:exp2?f?|log2?f?|fmaf?|fmaxf?|fminf?|rsqrtf?|sqrtf?|frcp|powf?)\s*\("
)
CPU = re.compile(
    r"_mm\d*_f\w+|vfmaq_f32|__builtin_fmaf?\b|\bstd::(?:exp2?|log2?|fma|sqrt|pow)\b"
    r"|\b(?:exp2?f|log2?f|fmaf|sqrtf|powf)\s*\("
)


def code_outside_numerics(text: str) -> str:
    """A source without comments and without its `namespace numerics { ... }` blocks."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    while (start := re.search(r"namespace numerics \{", text)) is not None:
        depth, end = 1, start.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: start.start()] + text[end:]
    return re.sub(r"\bnumerics::\w+", "numerics", text)


def kernel_files(repo: Path) -> list[Path]:
    experimental = repo / "experimental"
    found = [p for end in ("cu", "cuh", "cpp", "h") for p in experimental.rglob(f"*.{end}")]
    return sorted(p for p in found if not p.name.endswith("witness.cpp"))  # a scalar witness is numerics from top to bottom


def pattern(path: Path) -> re.Pattern[str]:
    return CUDA if path.suffix in (".cu", ".cuh") else CPU


def test_no_rounding_instruction_outside_numerics(repo: Path) -> None:
    files = kernel_files(repo)
    assert len(files) >= 4
    stray = {f"{path.name}: {hit}" for path in files for hit in pattern(path).findall(code_outside_numerics(path.read_text()))}
    assert not stray


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("portable_attn.cu", 'asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));'),
        ("portable_attn.cu", "x = exp2f(x);"),
        ("portable_attn.cu", "x = __fmul_rn(x, y);"),
        ("unified_attn.cpp", "x = __builtin_fmaf(x, y, z);"),
        ("unified_attn.cpp", "x = std::exp2(x);"),
        ("operators.cpp", "x = __builtin_fma(x, y, z);"),
    ],
)
def test_a_stray_instruction_is_found(repo: Path, name: str, line: str) -> None:
    path = next(p for p in kernel_files(repo) if p.name == name)
    text = path.read_text() + f"\nvoid stray() {{ {line} }}\n"
    assert pattern(path).search(code_outside_numerics(text))
