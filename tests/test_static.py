"""What is read from a binary without running it: every refusal has a candidate that earns it, and honest ones pass."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.core.config import load_target
from tools.core.errors import UserError
from tools.evaluator import allowed, census, static
from tools.evaluator.static import inspect, refusal
from tools.loader import elf, toolchain
from tools.loader.build import Built, build
from tools.loader.cubin import device_code, plain
from tools.loader.elf import Elf

ENTRY = 'extern "C" int unified_prefill(const void* p, void* s) { (void)p, (void)s; BODY; return 0; }\n'


def candidate(folder: Path, head: str, body: str = "") -> Built:
    """A candidate of a few lines. `body` stands in an entry point."""
    path = folder / "candidate.cpp"
    path.write_text(f"{head}\n{ENTRY.replace('BODY', body)}")
    return build(load_target("cpu"), path, fresh=folder / f"build-{len(list(folder.iterdir()))}")


def evidence_of(folder: Path, head: str, body: str = "") -> dict[str, Any]:
    return inspect(candidate(folder, head, body), "cpu")


# --------------------------------------------------------------------------------------------------------------- CPU


def test_packaged_cpu_kernels_pass() -> None:
    for role in ("kernel", "witness"):
        evidence = inspect(build(load_target("cpu"), role=role), "cpu")
        assert refusal(evidence) is None
        assert set(allowed.ABI) <= set(evidence["exports"])
        assert evidence["libraries"]
        assert evidence["initialisers"] == []


HONEST = """
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <sched.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <vector>
namespace {
std::vector<int> filled(100, 3);
thread_local std::vector<float> scratch;
std::mutex lock;
std::condition_variable wake;
}  // namespace
struct Base { virtual ~Base() = default; virtual float f(float x) { return std::exp(x); } };
struct Other : Base { float f(float x) override { return std::tanh(x); } };
int helper(int n) {
  static std::vector<int> kept(n);
  std::map<int, std::string> names;
  std::unordered_map<std::string, int> numbers;
  names[n] = std::to_string(n), numbers["n"] = n;
  auto shared = std::make_shared<Other>();
  Base* base = shared.get();
  std::function<float(float)> f = [&](float x) { return base->f(x) + (dynamic_cast<Other*>(base) ? 1 : 0); };
  std::thread([&] { std::unique_lock<std::mutex> held(lock); wake.wait_for(held, std::chrono::microseconds(1)); }).join();
  std::sort(filled.begin(), filled.end());
  scratch.resize(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus)) throw std::runtime_error("no cores " + names.at(n));
  return (int)f(1) + CPU_COUNT(&cpus) + numbers.at("n") + std::async(std::launch::async, [] { return 1; }).get() + kept[0];
}
"""


def test_an_honest_kernel_may_use_the_language(tmp_path: Path) -> None:
    evidence = evidence_of(
        tmp_path, HONEST, "try { return helper(3); } catch (const std::exception& e) { return e.what()[0]; }"
    )
    assert refusal(evidence) is None
    assert [name for name in evidence["initialisers"] if name.startswith("_GLOBAL__sub_I_")]


@pytest.mark.parametrize("head, body, words", [
    ("#include <dlfcn.h>", 'dlopen("libcublas.so", 1)', "dlopen"),
    ("#include <dlfcn.h>", "dlsym((void*)p, (const char*)s)", "dlsym"),
    ("#include <link.h>", "dl_iterate_phdr(nullptr, (void*)p)", "dl_iterate_phdr"),
    ("extern char _DYNAMIC[];", "return _DYNAMIC[0]", "_DYNAMIC"),
    ("", 'void* t; asm volatile("lea _GLOBAL_OFFSET_TABLE_(%%rip), %0" : "=r"(t)); return *(int*)t', "_GLOBAL_OFFSET_TABLE_"),
    ("#include <stdio.h>", 'fopen("/tmp/x", "w")', "fopen"),
    ("#include <stdio.h>", 'printf("%p", p)', "printf"),
    ("#include <fcntl.h>", 'open("/tmp/x", 0)', "open"),
    ("#include <unistd.h>", "return write(1, p, 8)", "write"),
    ("#include <sys/mman.h>", "mmap(0, 1, 7, 34, -1, 0)", "mmap"),
    ("#include <sys/mman.h>", "mprotect((void*)p, 1, 7)", "mprotect"),
    ("#include <unistd.h>", "return syscall(1)", "syscall"),
    ("#include <unistd.h>", "return fork()", "fork"),
    ("#include <signal.h>", "signal(11, SIG_IGN)", "signal"),
    ("#include <sys/ptrace.h>", "ptrace(PTRACE_TRACEME)", "ptrace"),
    ("#include <stdlib.h>", 'return getenv("HOME") != 0', "getenv"),
    ("extern char** environ;", "return environ != 0", "environ"),
    ("#include <time.h>", "timespec t; clock_gettime(0, &t)", "clock_gettime"),
    ("#include <chrono>", "return (int)std::chrono::system_clock::now().time_since_epoch().count()", "system_clock"),
    ("#include <stdlib.h>", "_Exit(0)", "_Exit"),
    ("#include <fstream>", 'std::ofstream("/tmp/x") << 1', "std::"),
    ("#include <iostream>", "std::cout << 1", "std::"),
    ("#include <random>", "return (int)std::random_device{}()", "std::random_device"),
    ('extern "C" void* cublasGemmEx(...);', "cublasGemmEx(p)", "cublasGemmEx"),
    ('extern "C" void* old(const char*, int); asm(".symver old, dlopen@GLIBC_2.2.5");', 'old("x", 1)', "dlopen@GLIBC_2.2.5"),
])  # fmt: skip
def test_a_call_that_no_kernel_needs_is_refused_by_name(tmp_path: Path, head: str, body: str, words: str) -> None:
    reason = refusal(evidence_of(tmp_path, head, body))
    assert reason is not None and reason.startswith("it asks other libraries for") and words in reason


@pytest.mark.parametrize("head, words", [
    ('extern "C" void* malloc(unsigned long) { return nullptr; }', "it defines malloc for others"),
    ('extern "C" int helper() { return 1; }', "it defines helper for others"),
    ('extern "C" __attribute__((visibility("hidden"))) void* dlsym(void*, const char*) { return 0; }', "it defines dlsym"),
    ("void* operator new(unsigned long) { return nullptr; }", "it defines _Znwm for others"),
    ("namespace std { void __throw_bad_alloc() { __builtin_trap(); } }", "it defines _ZSt17__throw_bad_allocv for others"),
    ('asm(".comm environ,8,8");', "it defines environ for others"),
    ("__attribute__((constructor)) static void early() { asm(\"\"); }", "it runs _ZL5earlyv when it is loaded"),
    ("__attribute__((destructor)) static void late() { asm(\"\"); }", "it has a section .fini_array"),
    ('asm(".section .init,\\"ax\\",@progbits\\n nop\\n .text");', "it has a section .init,"),
    ('asm(".section .preinit,\\"aw\\",@progbits\\n .quad 0\\n .text");', "it has a section .preinit,"),
    ('asm(".section .evil,\\"awx\\",@progbits\\n nop\\n .text");', "it has a section .evil,"),
    ('asm(".section .data.x,\\"awx\\",@progbits\\n nop\\n .text");', "it has a section .data.x,"),
    ('asm(".section .note.GNU-stack,\\"x\\",@progbits\\n .text");', "it asks for an executable stack"),
    ('extern "C" { static int one() { return 1; } static int (*pick())() { return one; } }\n'
     'static int chosen() __attribute__((ifunc("pick")));\nint use() { return chosen(); }', "(an indirect function)"),
    ('int call() { int r; asm volatile("syscall" : "=a"(r) : "a"(39) : "rcx", "r11"); return r; }', "system call by itself: syscall at"),
    ('int call() { int r; asm volatile("int $0x80" : "=a"(r) : "a"(20)); return r; }', "system call by itself: int $0x80 at"),
    ("int shared_state;", "it defines shared_state for others"),
    ('static const char image[] __attribute__((used)) = "xx\\x7f" "ELF\\2\\1\\1";', "it hides a code image in section .rodata"),
])  # fmt: skip
def test_what_no_kernel_needs_is_refused(tmp_path: Path, head: str, words: str) -> None:
    if not toolchain.cxx_toolchain().gnu:
        pytest.skip("written for GCC on x86-64")
    reason = refusal(evidence_of(tmp_path, head))
    assert reason is not None and words in reason, reason


def test_a_library_linked_with_others_is_refused(tmp_path: Path) -> None:
    built = candidate(tmp_path, "")
    assert refusal(inspect(built, "cpu")) is None
    cxx = [*toolchain.find_cxx(), "-shared"]
    (tmp_path / "helper.cpp").write_text('extern "C" int help() { return 1; }')
    subprocess.run([*cxx, "-fPIC", str(tmp_path / "helper.cpp"), "-o", str(tmp_path / "libhelper.so")], check=True)
    for extra, words in (
        ([str(tmp_path / "libhelper.so"), "-Wl,--no-as-needed"], "it is linked with"),
        (["-Wl,-rpath,/opt/x"], "it searches libraries in /opt/x"),
        (["-Wl,-z,execstack"], "it asks for an executable stack"),
    ):
        linked = tmp_path / f"{len(words)}.so"
        subprocess.run([*cxx, "-Wl,--no-as-needed", *extra, str(built.object), "-o", str(linked)], check=True)
        reason = refusal(inspect(replace(built, library=linked), "cpu"))
        assert reason is not None and words in reason


def test_without_objdump_the_check_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = candidate(tmp_path, "", 'asm volatile("syscall")')
    assert inspect(built, "cpu")["system_calls"]["byte_patterns"] >= 1
    monkeypatch.setattr(static.shutil, "which", lambda name: None)
    calls = inspect(built, "cpu")["system_calls"]
    assert calls["checked"] == "not checked: no objdump" and calls["instructions"] == []


def test_host_code_of_a_parent_is_compared(tmp_path: Path) -> None:
    first = candidate(tmp_path, "static const float c[2] = {1, 2};", "return (int)c[(long)p & 1]")
    same = candidate(tmp_path, "// a comment\nstatic const float c[2] = {1, 2};", "return (int)c[(long)p & 1]")
    constant = candidate(tmp_path, "static const float c[2] = {1, 3};", "return (int)c[(long)p & 1]")
    assert first.key != same.key
    assert inspect(same, "cpu", first)["host_code"] == "identical"
    assert inspect(constant, "cpu", first)["host_code"] == "changed"


def test_evidence_stays_small(tmp_path: Path) -> None:
    """A million symbols and a name of a mile make a bounded report, and are refused all the same."""
    calls = f"void f{'x' * 9000}();" + "".join(f"void g{i}();" for i in range(800))
    body = f"f{'x' * 9000}(); " + "; ".join(f"g{i}()" for i in range(800))
    evidence = evidence_of(tmp_path, calls, body)
    assert len(evidence["refused_imports"]) == static.MAX_LIST
    assert max(map(len, evidence["imports"])) <= static.MAX_TEXT + 3
    assert str(refusal(evidence)).startswith("it asks other libraries for")


def test_an_object_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "MAX_OBJECT_BYTES", 100)
    with pytest.raises(UserError, match=r"kernel.o: \d+ bytes; no kernel needs more than 100"):
        inspect(candidate(tmp_path, ""), "cpu")


# --------------------------------------------------------------------------------------------------------------- ELF


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    """Any damage is a UserError or another value, never a crash and never a long wait."""
    whole = candidate(tmp_path, HONEST, "return helper(2)").object.read_bytes()
    draw = random.Random(3)
    errors = 0
    for round_ in range(300):
        data = bytearray(whole)
        if round_ % 3 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(draw.randrange(1, 6)):
            place = (
                draw.randrange(64)
                if round_ % 2
                else draw.choice((draw.randrange(len(whole)), len(whole) - 64 * draw.randrange(1, 80)))
            )
            if 0 <= place < len(data):
                data[place] = draw.randrange(256)
        try:
            file = Elf(bytes(data), "damaged.o")
            file.undefined(), file.defined(), file.relocations, file.segments, file.dynamic(elf.DT_NEEDED)
            device_code(file)
        except UserError as error:
            errors += 1
            assert str(error).startswith("damaged.o: malformed: ")
    assert errors > 100


@pytest.mark.parametrize("name, expected", [
    ("_ZN49_GLOBAL__N__26dd889b_16_portable_attn_cu_55ce270814prefill_kernelE1P", "_ZN_GLOBAL__N__14prefill_kernelE1P"),
    ("_ZN33_INTERNAL_4d239db3_5_as_cu__Z1fPf35_GLOBAL__N__4d239db3_5_as_cu__Z1fPf4seenE", "_ZN_INTERNAL__GLOBAL__N__4seenE"),
    ("_ZN4cuda3std3__438_GLOBAL__N__ffaf3650_6_tma_cu_55ce27086ignoreE", "_ZN4cuda3std3___GLOBAL__N__6ignoreE"),
    ("_INTERNAL_ffaf3650_6_tma_cu_55ce2708::k<3>(float*)", "_INTERNAL_::k<3>(float*)"),
    ("_Z1k12_INTERNAL_xx", "_Z1k12_INTERNAL_xx"), ("_ZN9_INTERNAL_4d239db3_99999_x", "_ZN9_INTERNAL_4d239db3_99999_x"),
])  # fmt: skip
def test_names_without_their_module(name: str, expected: str) -> None:
    assert plain(name) == expected


def test_what_is_no_elf_file_is_said() -> None:
    for data, words in (
        (b"", "no ELF file"),
        (b"\x7fELF\x01\x01" + bytes(80), "not a 64-bit little-endian"),
        (b"MZ" * 60, "no ELF"),
    ):
        with pytest.raises(UserError, match=words):
            Elf(data, "x.o")


# ------------------------------------------------------------------------------------------------------------ census

NVDISASM = """
	.section	.text._Z1kPf,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0020*/                   MUFU.EX2 R4, R4 ;
        /*0030*/                   MUFU.RCP R4, R4 ;
        /*0040*/                   F2FP.BF16.F32.PACK_AB R4, R4, R5 ;
        /*0050*/             @!UP1 UTMALDG.2D [UR4], [UR6] ;
        /*0060*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0070*/              @!PT LDS RZ, [RZ] ;
.L_x_0:
        /*0080*/                   BRA `(.L_x_0);
        /*0090*/                   NOP;
"""
CUOBJDUMP = """
		Function : _Z1kPf
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;   /* 0x0000000000007919 */
                                                                                     /* 0x000e620000002100 */
"""


def test_listings_are_counted() -> None:
    (counts,) = census.parse(NVDISASM).values()
    expected = {"mma": 1, "exponential": 1, "mufu_other": 1, "conversion": 1, "tma": 1, "shared_load": 1, "nop": 2, "other": 2}
    assert {name: number for name, number in counts.items() if number} == {**expected, "total": 8}
    assert census.parse(CUOBJDUMP)["_Z1kPf"]["mma"] == 1


def test_without_a_disassembler_the_census_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(census, "find_tools", lambda: [])
    assert census.count([("sm_90", b"")]) == (
        {},
        "unavailable: no nvdisasm and no cuobjdump (CUDA toolkit, or pip install nvidia-cuda-nvdisasm)",
    )
    broken = tmp_path / "nvdisasm"
    broken.write_text("#!/bin/sh\necho cannot read it >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(census, "find_tools", lambda: [broken])
    assert census.count([("sm_90", b"")]) == ({}, "unavailable: nvdisasm: cannot read it")
