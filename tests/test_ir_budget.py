"""The token budget of the context, and the regions of a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.core.errors import UserError
from tools.search import budget as budgets
from tools.search import regions

REPO = Path(__file__).resolve().parents[1]
CPU = REPO / "experimental" / "cpu" / "kernels" / "unified_attn.cpp"
CUDA = REPO / "experimental" / "common" / "portable_attn.cu"


# ------------------------------------------------------------------------------------------------------------- budget
def sections(rows: list[list[str]], independent: bool = False) -> list[budgets.Section]:
    first = budgets.Section("Next")
    first.add("stage: action", 100, always=True)
    made = [first]
    for i, texts in enumerate(rows):
        section = budgets.Section(f"Part {i}", hint=f"records/{i}", unit="rows", independent=independent)
        section.add_rows(texts, 90 - i, 10 - i)
        made.append(section)
    return made


LINES = st.lists(
    st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1), max_size=8), max_size=6
)


@given(LINES, st.booleans(), st.integers(0, 600))
def test_fit_is_never_above_the_budget_and_never_cuts_a_line(rows: list[list[str]], independent: bool, size: int) -> None:
    parts = sections(rows, independent)
    whole = set(budgets.fit(parts, 10**9).split("\n"))
    try:
        text = budgets.fit(parts, size)
    except UserError as error:
        minimum = int(re.findall(r"\d+", str(error))[-1])
        assert minimum > size and budgets.estimate(budgets.fit(parts, minimum)) <= minimum
        return
    assert budgets.estimate(text) <= size
    assert "stage: action" in text
    kept, _, note = text.partition("Left out for this budget")
    kept = kept.removesuffix("## ").replace(budgets.GENERAL_NOTE, "")
    assert {line for line in kept.split("\n") if line} <= whole
    if len(text) < len(budgets.fit(parts, 10**9)):
        assert note or budgets.GENERAL_NOTE in text, "what was left out is not said"


@given(st.lists(st.text(), max_size=6))
def test_the_estimate_of_a_whole_is_at_most_that_of_its_parts(parts: list[str]) -> None:
    assert budgets.estimate("\n".join(parts)) <= sum(budgets.estimate(part + "\n") for part in parts)


def test_the_estimate_counts_bytes_and_pieces() -> None:
    assert budgets.estimate("") == 0
    assert budgets.estimate("a b c d") == 4  # words
    assert budgets.estimate("| 0.99x | 1,024 |") == 10  # pieces: | 0 . 99 x | 1 , 024 |
    assert budgets.estimate("x" * 30) == 10  # bytes
    assert budgets.estimate("\u00b5" * 30) == 20


def test_the_least_useful_goes_first_and_a_section_shrinks_before_it_vanishes() -> None:
    rows = [[f"part {part} row {n} with some words in it" for n in range(20)] for part in range(2)]
    parts = sections(rows)
    text = budgets.fit(parts, 400)
    counts = [len(re.findall(f"part {part} row", text)) for part in range(2)]
    assert counts[0] >= counts[1] >= 1
    assert [f"part 0 row {n} " in text for n in range(20)] == [n < counts[0] for n in range(20)]
    assert f"{20 - counts[1]} of 20 rows; see records/1" in text


def test_a_block_that_does_not_fit_ends_its_section_or_is_skipped() -> None:
    for independent in (False, True):
        first, second = sections([["short one", "long " * 400, "short two"]], independent)
        text = budgets.fit([first, second], 200)
        assert "short one" in text and "long" not in text
        assert ("short two" in text) == independent


# ------------------------------------------------------------------------------------------------------------ regions
@pytest.mark.parametrize(
    "path", [CPU, CUDA, CPU.with_name("witness.cpp"), CUDA.with_name("fa3_numerics.cuh")], ids=lambda p: p.name
)
def test_regions_hold_every_line_once(path: Path) -> None:
    text = path.read_text()
    lines = text.split("\n")
    held = [n for region in regions.scan(text) for n in range(region.first, region.last + 1)]
    assert held == sorted(set(held))
    assert not [lines[n - 1] for n in set(range(1, len(lines) + 1)) - set(held) if lines[n - 1].strip()]
    for region in regions.scan(text):
        assert region.text == "\n".join(lines[region.first - 1 : region.last])


def test_regions_of_the_cpu_kernel() -> None:
    found = {region.name: region for region in regions.scan(CPU.read_text())}
    contract = {name for name, region in found.items() if region.scope == "numerics" and region.kind == "function"}
    assert contract == {"fma", "larger", "largest_lane", "exp2", "ln", "to_bf16", "scores", "softmax", "accumulate", "finish"}
    assert {name for name, region in found.items() if region.kind == "export" and "workspace" not in name} == {
        *("unified_prefill", "unified_extend", "unified_decode", "unified_attn_abi_version", "unified_attn_error"),
    }
    assert found["Scratch"].kind == "type" and found["MESSAGES"].kind == "data"
    assert found["opening comment"].kind == "opening" and "Contract cpu-v1" in found["opening comment"].text
    softmax = found["softmax"].text.splitlines()
    assert softmax[0].startswith("// Turns one row's scores") and softmax[-1] == "}"


def test_regions_of_the_cuda_kernel() -> None:
    found = {region.name: region for region in regions.scan(CUDA.read_text())}
    assert {name for name, region in found.items() if region.kind == "kernel"} == {"prefill_kernel", "decode_kernel"}
    assert found["decode_kernel"].text.lstrip().startswith("template <int SLICE")
    assert found["unified_decode"].kind == "export" and found["DecodeShared"].kind == "type"


def test_entry_points_reach_their_own_kernels() -> None:
    found = regions.scan(CUDA.read_text())
    decode, full = regions.reach(found, {"unified_decode"}), regions.reach(found, {"unified_prefill", "unified_extend"})
    assert {"decode_kernel", "sum_chain", "check"} <= decode and "prefill_kernel" not in decode
    assert {"prefill_kernel", "prefill_work", "check"} <= full and "decode_kernel" not in full


def test_regions_are_ranked_by_what_the_step_is_about() -> None:
    found = regions.scan(CUDA.read_text())

    def first(**about: object) -> list[str]:
        about = {"declared": [], "entries": [], "words": "", **about}
        return [region.name for region, _ in regions.ranked(found, **about)]  # type: ignore[arg-type]

    assert first(declared=["the sum of sum_chain"])[0] == "sum_chain"
    assert first(declared=["lines 433-436"])[0] in ("Error", "aligned")
    assert first(words="split the loads of load_matrices in prefill_work")[0] == "prefill_work"
    assert first(entries=["decode"]).index("decode_kernel") < first(entries=["decode"]).index("prefill_kernel")
    assert sorted(first(entries=["decode"])) == sorted(region.name for region in found)
    cpu = regions.scan(CPU.read_text())
    assert {r.scope for r, _ in regions.ranked(cpu, ["namespace numerics"], [], "")[:10]} == {"numerics"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "void f() {",
        "}",
        "#if A\nint f(int x) {\n#else\nint f() {\n#endif\n  return 1;\n}\n",
        "no code at all",
        "{{{}",
    ],
)
def test_a_source_that_cannot_be_divided_is_one_region(text: str) -> None:
    assert [region.text for region in regions.scan(text)] == ([text.strip("\n")] if text.strip() else [])


def test_braces_in_comments_strings_and_characters_do_not_count() -> None:
    text = "int f() { return '{' + \"}{\"[0]; /* } */ } // {\nint n = 1'000;\nint g() { return n; }\n"
    assert [region.name for region in regions.scan(text) if region.kind == "function"] == ["f", "g"]


@given(st.text("{}();=#\"'/*\n\f\u2028 ab<>", max_size=60))
def test_scan_holds_every_line_of_anything(text: str) -> None:
    lines = text.split("\n")
    held = [n for region in regions.scan(text) for n in range(region.first, region.last + 1)]
    assert held == sorted(set(held)) and not [n for n in range(len(lines)) if lines[n].strip() and n + 1 not in held]
