"""Which entry points an edit changed, told from compiled code: real edits of the packaged kernels, and small assembly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.core.config import load_target
from tools.core.errors import BuildError, UserError
from tools.loader.toolchain import cxx_toolchain, find_nvcc
from tools.search import bridge
from tools.search.assembly import Undecided, Unit
from tools.search.entry_code import fingerprints
from tools.search.records import RuleError


def there(find: Any) -> bool:
    try:
        find()
    except UserError:
        return False
    return True


needs_gcc = pytest.mark.skipif(not there(cxx_toolchain) or not cxx_toolchain().gnu, reason="no GCC on this machine")
needs_nvcc = pytest.mark.skipif(not there(find_nvcc), reason="no nvcc on this machine")


def run_of(target: str) -> Any:
    """What these functions need of a run."""
    return SimpleNamespace(target=lambda: load_target(target))


def source(target: str, *edits: tuple[str, str]) -> bytes:
    """The packaged kernel with some texts replaced, each of which must stand in it."""
    text = load_target(target).source().read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text.encode()


def changed(target: str, *edits: tuple[str, str]) -> set[str]:
    code = bridge.code_identity(run_of(target), source(target), source(target, *edits))
    assert set(code) == {"prefill", "extend", "decode"}
    return {entry for entry, state in code.items() if state == "changed"}


# ---------------------------------------------------------------- the CPU kernel
ROWS = "  problem.rows_per_item = rows_per_item(rows, p->batch * p->heads_kv, threads);\n"
DECODE_ROWS = (ROWS, ROWS + "  if (entry == UNIFIED_ATTN_DECODE && rows > 4) problem.rows_per_item = 4;\n")


@needs_gcc
def test_names_comments_and_order_are_no_code() -> None:
    text = source("cpu").decode()
    start, end = text.index("inline void widen("), text.index("// kt[d][key]")
    behind = text.index("// --", end)
    moved = text[:start] + text[end:behind] + text[start:end] + text[behind:]
    moved = moved.replace("attend", "attend_rows").replace("namespace numerics {", "// words\n\nnamespace numerics {")
    code = bridge.code_identity(run_of("cpu"), source("cpu"), moved.encode())
    assert set(code.values()) == {"identical"}


@needs_gcc
def test_a_branch_of_decode_in_shared_code_is_decodes_alone() -> None:
    """All entry points of this kernel call one function; what it does for decode only must not count as prefill's."""
    assert changed("cpu", DECODE_ROWS) == {"decode"}
    assert bridge.check_form(run_of("cpu"), "A0001", "decode_only", source("cpu"), source("cpu", DECODE_ROWS)) == {
        "prefill": "identical", "extend": "identical", "decode": "changed",
    }  # fmt: skip
    with pytest.raises(RuleError, match=r"A0001: form: full_sequence_only, but the code of decode changed"):
        bridge.check_form(run_of("cpu"), "A0001", "full_sequence_only", source("cpu"), source("cpu", DECODE_ROWS))


@needs_gcc
def test_shared_code_is_everybodys() -> None:
    edit = ("0x1.5bba14p-10f", "0x1.5bba16p-10f")  # the last constant of exp2, a bit of it
    assert changed("cpu", edit) == {"prefill", "extend", "decode"}
    with pytest.raises(RuleError, match=r"form: decode_only, but the code of prefill and extend changed"):
        bridge.check_form(run_of("cpu"), "A0001", "decode_only", source("cpu"), source("cpu", edit))


@needs_gcc
def test_a_prefetch_is_code() -> None:
    """It has no effect that the compiler knows of, and all the speed."""
    assert changed("cpu", ("ahead.fetch(key);", "ahead.fetch(key / 2);")) == {"prefill", "extend", "decode"}


@needs_gcc
def test_what_decode_reads_alone_is_decodes() -> None:
    entry = "int unified_decode(const UnifiedAttnParams* params, void*) { return"
    table = "static const float TABLE[3] = {1.5f, 2.5f, 0.1f};\n"
    use = entry.replace("return", "if (params && params->num_sms < 3 && TABLE[params->num_sms] > 2.f) return 0; return")
    assert changed("cpu", (entry, table + use)) == {"decode"}
    other = table.replace("0.1f", "0.2f")
    code = bridge.code_identity(run_of("cpu"), source("cpu", (entry, table + use)), source("cpu", (entry, other + use)))
    assert code == {"prefill": "identical", "extend": "identical", "decode": "changed"}


@needs_gcc
def test_a_child_that_does_not_compile_contradicts_no_form() -> None:
    broken = source("cpu", ("namespace numerics {", "namespace numerics { rubbish"))
    assert bridge.check_form(run_of("cpu"), "A0001", "decode_only", source("cpu"), broken) == {}
    with pytest.raises(BuildError, match="does not compile"):
        fingerprints(load_target("cpu"), broken)


@needs_gcc
def test_inline_assembly_that_defines_code_leaves_it_open() -> None:
    hidden = source("cpu", ("namespace numerics {", 'asm(".globl tricks\\ntricks:\\n  ret\\n");\nnamespace numerics {'))
    with pytest.raises(RuleError, match=r"decode_only cannot be decided here: inline assembly .* state the form joint"):
        bridge.check_form(run_of("cpu"), "A0001", "decode_only", source("cpu"), hidden)


def test_a_joint_action_claims_nothing_and_compiles_nothing() -> None:
    assert bridge.check_form(run_of("cpu"), "A0001", "joint", b"no source", b"at all") == {}


# ---------------------------------------------------------------- the CUDA kernel


@needs_nvcc
@pytest.mark.parametrize(
    ("old", "new", "entries"),
    [
        (
            "numerics::inverse(shared.sums[head])",
            "numerics::inverse(shared.sums[head] + 1.0f)",
            {"decode"},  # an edit of the decode kernel
        ),
        ("L2_BUDGET_BYTES = 24 << 20", "L2_BUDGET_BYTES = 16 << 20", {"prefill", "extend"}),  # how the host launches prefill
    ],
)
def test_kernels_belong_to_the_entry_points_that_launch_them(old: str, new: str, entries: set[str]) -> None:
    assert changed("h200", (old, new)) == entries


# ---------------------------------------------------------------- assembly

CODE = """
\t.text
\t.p2align 4
\t.type\thelper, @function
helper:
.LFB1:
\t.cfi_startproc
\tmovl\t$1, %eax
\tret
\t.cfi_endproc
\t.size\thelper, .-helper
\t.type\tentry, @function
entry:
.LFB2:
\tmovss\t.LC0(%rip), %xmm0
\tcmpl\t$3, %edi
\tja\t.L4
\tleaq\t.L5(%rip), %rdx
\tcall\thelper
\tcall\tmemcpy@PLT
.L4:
\tjmp\t.L4
\t.section\t.rodata
\t.align 4
.L5:
\t.long\t.L4-.L5
\t.text
\tret
\t.size\tentry, .-entry
\t.section\t.rodata.cst4,"aM",@progbits,4
\t.align 4
.LC0:
\t.long\t1065353216
.LC1:
\t.long\t7
"""


def reached(text: str) -> str:
    return Unit(text).reached("entry")[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".L4", ".L44"),
        (".LC0", ".LC9"),
        (".LFB2", ".LFB77"),
        ("helper", "helper.constprop.0"),
        ("\t.long\t7\n", "\t.long\t8\n"),
        ("\t.cfi_startproc\n", ""),
        ("\t.type\tentry", '\t.section\t.text.unlikely,"ax",@progbits\n\t.type\tother, @function\nother:\n\tnop\n\t.size\tother, .-other\n\t.text\n\t.type\tentry'),
    ],
)  # fmt: skip
def test_accidents_of_the_text_make_no_difference(old: str, new: str) -> None:
    assert old in CODE and reached(CODE) == reached(CODE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("$1, %eax", "$2, %eax"),  # in a function that is called
        ("1065353216", "1065353217"),  # a constant that is loaded
        (".long\t.L4-.L5", ".long\t.L5-.L5"),  # a table of jumps
        ("memcpy@PLT", "memmove@PLT"),
        ("\tcall\thelper\n", ""),
        ("ja\t.L4", "jb\t.L4"),
        (".LC0(%rip)", ".LC1(%rip)"),  # another constant of the same section
        ("\tret\n\t.size\tentry", "\tnop\n\t.size\tentry"),  # behind the table that stands inside the function
    ],
)
def test_whatever_is_reached_makes_a_difference(old: str, new: str) -> None:
    assert old in CODE and reached(CODE) != reached(CODE.replace(old, new))


@pytest.mark.parametrize(
    "lines",
    ["nop; tricks: ret", ".set tricks, helper", "tricks:", ".pushsection .text"],
)
def test_inline_assembly_with_more_than_instructions_is_undecided(lines: str) -> None:
    with pytest.raises(Undecided, match="inline assembly"):
        Unit(CODE.replace("\tcall\thelper\n", f"#APP\n\t{lines}\n#NO_APP\n"))
    with pytest.raises(Undecided, match="inline assembly"):
        Unit(CODE + "\t.data\n#APP\n\tnop\n#NO_APP\n" if lines == "tricks:" else CODE + f"#APP\n\t{lines}\n#NO_APP\n")


def test_inline_instructions_and_numeric_labels_are_read() -> None:
    loop = CODE.replace("\tcall\thelper\n", "#APP\n1:\n\tpause\n\tjne\t1b\n#NO_APP\n")
    assert reached(loop) != reached(loop.replace("pause", "nop"))
    with pytest.raises(Undecided, match="does not define unified_decode"):
        Unit(CODE).reached("unified_decode")


def test_a_neighbours_exception_table_is_not_a_functions_own() -> None:
    """The label at the end of a table stands where the next function's begins."""

    def unit(landing: str) -> str:
        throws = '\t.section\t.gcc_except_table,"a",@progbits\n.LLSDA1:\n\t.uleb128 .LLSDACSE1-.LLSDACSB1\n.LLSDACSB1:\n'
        throws += "\t.uleb128 .L4-.LFB2\n.LLSDACSE1:\n.LLSDA2:\n\t.uleb128 .L9-.LFB3\n"
        other = (
            "\t.text\n\t.type\tother, @function\nother:\n.LFB3:\n\tmovl\t"
            + landing
            + ", %eax\n.L9:\n\tret\n\t.size\tother, .-other\n"
        )
        return CODE.replace("\tcall\thelper\n", "\t.cfi_lsda 0x1b,.LLSDA1\n\tleaq\t.LLSDA1(%rip), %rax\n") + throws + other

    assert reached(unit("$1")) == reached(unit("$2"))


def test_what_runs_at_load_time_is_found() -> None:
    start = '\t.section\t.init_array,"aw"\n\t.align 8\n\t.quad\thelper\n'
    assert Unit(CODE + start).initialisers == ["helper"]


def test_a_variable_without_content_is_a_piece_too() -> None:
    """Wherever the compiler declares it: also in the midst of another section."""
    common = '\t.section\t.init_array,"aw"\n\t.quad\thelper\n\t.local\tflag\n\t.comm\tflag,8,8\n'
    using = CODE.replace("$1, %eax", "flag(%rip), %eax") + common
    assert reached(using) == reached(using.replace("flag", "another_flag"))
    assert reached(using) != reached(using.replace("flag,8,8", "flag,4,4"))


def test_an_undeclared_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(Undecided, match="CXX="):
        fingerprints(load_target("cpu"), source("cpu"))
