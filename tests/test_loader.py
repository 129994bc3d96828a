"""The loader builds declared files only, caches by content, survives damage and company, and fails in one line."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.core import files
from tools.core.config import Target, load_target
from tools.core.errors import BuildError, UserError
from tools.loader import build as build_module
from tools.loader import device, interface, ptxas, sources, toolchain
from tools.loader.abi import Library, Params
from tools.loader.build import build, unchanged

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'


class Project:
    """A small target of its own in a folder, with one source and one declared header."""

    def __init__(self, folder: Path, repo: Path) -> None:
        self.folder, self.repo, self.extra = folder, repo, ""
        (folder / "kernels").mkdir()
        self.source, self.header = folder / "kernels" / "mine.cpp", folder / "kernels" / "answer.h"
        self.source.write_text(SOURCE)
        self.header.write_text("#define ANSWER 42\n")

    def target(self) -> Target:
        digest, header = files.sha256_file(self.source), files.sha256_file(self.header)
        unit = f'source: kernels/mine.cpp, sha256: "{digest}", files: {{kernels/answer.h: "{header}"}}'
        base, config = self.folder / "base.yaml", self.folder / "config.yaml"
        base.write_text(f"extends: {self.repo}/experimental/cpu/config.yaml\nkernel: null\n")
        config.write_text(f"extends: base.yaml\nkernel: {{{unit}, witness: {{{unit}}}}}\n{self.extra}\n")
        return load_target(config=config)


@pytest.fixture
def project(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("AREAL_TIK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "project").mkdir()
    return Project(tmp_path / "project", repo)


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_build_and_cache(project: Project) -> None:
    first = build(project.target())
    assert not first.cached
    assert answer(first.library) == 42
    assert first.library_sha256 == files.sha256_file(first.library)
    assert first.source_sha256 == files.sha256_file(project.source)
    assert set(first.files) == {"kernels/mine.cpp", "kernels/answer.h"}
    assert first.resources == []
    again = build(project.target())
    assert again.cached
    assert (again.key, again.library, again.preprocessed_sha256) == (first.key, first.library, first.preprocessed_sha256)


def test_key_covers_content_flags_compiler_and_torch(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [build(project.target()).key]
    project.header.write_text("#define ANSWER 43\n")
    keys.append(build(project.target()).key)
    project.extra = "build: {flags: [-O1]}"
    keys.append(build(project.target()).key)
    monkeypatch.setattr(build_module, "_package", lambda name: "0.0.0")
    keys.append(build(project.target()).key)
    monkeypatch.setattr(toolchain, "_version", lambda command: {"version": "another"})
    keys.append(build(project.target()).key)
    assert len(set(keys)) == len(keys)


def test_key_covers_the_processor_where_the_code_does(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    native, project.extra = build(project.target()).key, "build: {flags: [-O1]}"
    plain = build(project.target()).key
    monkeypatch.setattr(toolchain, "cpu_identity", lambda: "another processor")
    assert build(project.target()).key == plain
    project.extra = ""
    assert build(project.target()).key != native


def test_candidate_takes_the_sources_place(project: Project, tmp_path: Path) -> None:
    candidate = tmp_path / "elsewhere.cpp"
    candidate.write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    built = build(project.target(), candidate)
    assert answer(built.library) == 43
    assert built.source == candidate
    assert built.source_sha256 == files.sha256_file(candidate)
    candidate.write_text(SOURCE)
    assert build(project.target(), candidate).key == build(project.target()).key


def reseal(manifest: Path, **changes: object) -> None:
    """Change a manifest as somebody would who has read the cache's code."""
    facts = {**json.loads(manifest.read_text()), **changes}
    facts.pop("seal")
    manifest.write_text(json.dumps({**facts, "seal": files.sha256_json(facts)}))


@pytest.mark.parametrize("poison, name, words", [
    ("library", "kernel.so", "has sha256"), ("object", "kernel.o", "has sha256"), ("truncated", "kernel.so", "has sha256"),
    ("no library", "kernel.so", "cannot read: No such file"), ("manifest cut", "manifest.json", "is no manifest"),
    ("manifest byte", "manifest.json", "has been changed"), ("no manifest", "manifest.json", "cannot read: No such file"),
    ("other build", "manifest.json", "belongs to another build"), ("wrong types", "manifest.json", "is no manifest"),
    ("library link", "kernel.so", "is a symbolic link"), ("manifest link", "manifest.json", "is a symbolic link"),
    ("entry link", "", "is a symbolic link"), ("library folder", "kernel.so", "cannot read: not a regular file"),
])  # fmt: skip
def test_poisoned_entry_is_refused_by_name(project: Project, tmp_path: Path, poison: str, name: str, words: str) -> None:
    first = build(project.target())
    entry = first.library.parent
    manifest = entry / "manifest.json"
    if poison in ("library", "object"):
        path = first.library if poison == "library" else first.object
        path.write_bytes(path.read_bytes()[:-8] + b"damaged!")
    elif poison == "truncated":
        first.library.write_bytes(first.library.read_bytes()[:100])
    elif poison.startswith("no "):
        (entry / name).unlink()
    elif poison == "manifest cut":
        manifest.write_text(manifest.read_text()[:50])
    elif poison == "manifest byte":
        manifest.write_text(manifest.read_text().replace('"log": "', '"log": "x'))
    elif poison == "other build":
        project.header.write_text("#define ANSWER 43\n")
        other = build(project.target())
        project.header.write_text("#define ANSWER 42\n")
        for file in ("manifest.json", "kernel.so", "kernel.o"):
            (entry / file).write_bytes((other.library.parent / file).read_bytes())
    elif poison == "wrong types":
        reseal(manifest, headers=7)
    elif poison == "entry link":
        entry.rename(tmp_path / "moved")
        entry.symlink_to(tmp_path / "moved")
    elif poison == "library folder":
        first.library.unlink()
        first.library.mkdir()
    else:
        (entry / name).rename(tmp_path / "moved")
        (entry / name).symlink_to(tmp_path / "moved")
    with pytest.raises(BuildError, match=rf"{entry.name}/?{name}: {words}.*delete .*{entry.name}") as caught:
        build(project.target())
    assert caught.value.status == "REFUSED"
    if entry.is_symlink():
        entry.unlink()
    else:
        shutil.rmtree(entry)
    assert answer(build(project.target()).library) == 42  # what the message says helps


def test_links_among_the_locks_are_refused(project: Project, tmp_path: Path) -> None:
    first = build(project.target())
    lock = first.library.parents[1] / "locks" / first.key
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match=rf"locks/{first.key}: is a symbolic link"):
        build(project.target())


def test_a_changed_system_header_is_built_again(project: Project) -> None:
    project.source.write_text("#include <stddef.h>\n" + SOURCE)
    first = build(project.target())
    manifest = first.library.with_name("manifest.json")
    name = next(name for name in first.headers if name.endswith("stddef.h"))
    reseal(manifest, headers={**first.headers, name: "0" * 64})
    assert not build(project.target()).cached
    assert build(project.target()).cached


def test_fresh_build_trusts_no_entry(project: Project, tmp_path: Path) -> None:
    cached = build(project.target())
    cached.library.write_bytes(b"poison")
    for place in (True, tmp_path / "given"):
        built = build(project.target(), fresh=place)
        assert not built.cached
        assert answer(built.library) == 42
        assert built.library.parent.stat().st_mode & 0o077 == 0
        assert sorted(path.name for path in built.library.parent.iterdir()) == ["kernel.o", "kernel.so"]
        assert (built.key, built.library_sha256) == (cached.key, cached.library_sha256)
    with pytest.raises(UserError, match=r"given: a fresh build needs a new or empty folder"):
        build(project.target(), fresh=tmp_path / "given")


def test_a_library_changed_after_its_build_is_refused(project: Project, tmp_path: Path) -> None:
    built = build(project.target(), fresh=tmp_path / "given")
    unchanged(built)
    built.library.chmod(0o644)
    built.library.write_bytes(built.library.read_bytes() + b"x")
    with pytest.raises(BuildError, match=r"kernel.so: has changed since it was built"):
        unchanged(built)


def test_source_that_is_no_plain_file_is_refused(project: Project, tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.cpp", tmp_path / "pipe.cpp"
    link.symlink_to(project.source)
    os.mkfifo(pipe)
    for path, words in ((link, r"is a symbolic link \(to .*mine.cpp\)"), (pipe, "not a regular file")):
        with pytest.raises(UserError, match=rf"{path.name}: .*{words}"):
            build(project.target(), path)


def test_declared_file_that_leads_out_of_the_tree_is_refused(project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside.h"
    outside.write_text(project.header.read_text())
    project.header.unlink()
    project.header.symlink_to(outside)
    with pytest.raises(UserError, match=r"kernels/answer.h leads outside .*outside.h"):
        build(project.target())


def test_undeclared_includes_are_refused_by_name(project: Project, tmp_path: Path) -> None:
    (project.folder / "kernels" / "secret.h").write_text("#define SECRET 1\n")
    elsewhere = tmp_path / "far.h"
    elsewhere.write_text("#define SECRET 1\n")
    for include in ("secret.h", str(elsewhere), "../../far.h"):
        project.source.write_text(f'#include "{include}"\n{SOURCE}')
        with pytest.raises(
            BuildError, match=rf"mine.cpp: includes .*{Path(include).name}, which the config does not declare"
        ) as caught:
            build(project.target())
        assert caught.value.status == "REFUSED"


@pytest.mark.parametrize("text, word", [
    ('asm(".inc" "bin \\"/etc/hostname\\"");', "incbin"),
    ('asm(".in\\143bin \\"/etc/hostname\\"");', "incbin"),
    ('#define NAME "bin \\"/etc/hostname\\""\nasm(".inc" NAME);', "incbin"),
    ('asm(R"x(.include "/etc/hostname")x");', "include"),
    ('asm(".macro m a b\\n\\\\a\\\\b\\n.endm");', "macro"),
    ('#if 0\n#/* */em\\\nbed "secret"\n#endif', "embed"),
    ('#if __has_include("/etc/hostname")\n#endif', "__has_include"),
])  # fmt: skip
def test_text_that_reads_undeclared_files_is_refused(project: Project, text: str, word: str) -> None:
    project.source.write_text(f"{text}\n{SOURCE}")
    with pytest.raises(BuildError, match=rf"mine.cpp: {word} is refused: it .* a file that nobody declares") as caught:
        build(project.target())
    assert caught.value.status == "REFUSED"


@pytest.mark.parametrize("text", [
    'const char* words = "embed, include, has_include";', "int embed; // #embed __has_include .incbin",
    'asm("# a comment");',
])  # fmt: skip
def test_text_that_reads_nothing_is_built(project: Project, text: str) -> None:
    project.source.write_text(f"{text}\n{SOURCE}")
    assert answer(build(project.target()).library) == 42


def test_the_assembler_lists_what_it_reads(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the text does not say so: the scan of the text is switched off here."""
    if not toolchain.cxx_toolchain().gnu:
        pytest.skip("this compiler's assembler keeps no list")
    monkeypatch.setattr(sources, "undeclared_read", lambda data: None)
    (tmp_path / "far.inc").write_text("# far\n")
    name = tmp_path / "far.inc"
    macro = f'.macro m a b\n\\a\\b "{name}"\n.endm\n m .inc bin'
    for spelling in (f'.incbin "{name}"', f'.include "{name}"', macro, '.incbin "../../far.inc"'):
        project.source.write_text(f'asm(R"x({spelling})x");\n{SOURCE}')
        with pytest.raises(BuildError, match=r"mine.cpp: includes .*far.inc, which the config does not declare"):
            build(project.target())


def test_every_way_to_include_is_seen(project: Project, tmp_path: Path) -> None:
    far = tmp_path / "far.h"
    far.write_text("#define SECRET 1\n")
    (tmp_path / "near").symlink_to(tmp_path)
    for text in (f'#define NAME "{far}"\n#include NAME', f'#import "{far}"', f'#include "{tmp_path}/near/far.h"',
                 f'#include <{os.path.relpath(far, "/usr/include")}>'):  # fmt: skip
        project.source.write_text(f"{text}\n{SOURCE}")
        with pytest.raises(BuildError, match=r"mine.cpp: includes .*far.h, which the config does not declare"):
            build(project.target())


def test_a_compilers_errors_do_not_show_an_undeclared_file(project: Project, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret\n")
    project.source.write_text(f'#include "{secret}"\n{SOURCE}')
    with pytest.raises(BuildError, match=r"includes .*secret.txt, which") as caught:
        build(project.target())
    assert caught.value.status == "REFUSED" and "the secret" not in caught.value.log


def test_environment_adds_no_headers_and_no_flags(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "hidden.h").write_text("")
    monkeypatch.setenv("CPATH", str(tmp_path / "env"))
    monkeypatch.setenv("CXXFLAGS", "-ffast-math")
    built = build(project.target())
    assert built.notes == [
        "CXXFLAGS is set and is not passed to the compiler",
        "CPATH is set and is not passed to the compiler",
    ]
    project.source.write_text("#include <hidden.h>\n" + SOURCE)
    with pytest.raises(BuildError, match=r"includes hidden.h, which"):
        build(project.target())


@pytest.mark.parametrize("flag", [
    "-Ofast", "-ffast-math", "-ffp-contract=fast", "-funsafe-math-optimizations", "-use_fast_math", "--use_fast_math", "-ftz=true",
    "-fmad=true", "--fmad=true", "-prec-div=false", "-Xcompiler=-ffast-math", "-O3,-Ofast", "-mrecip", "@flags", "-fplugin=x.so",
])  # fmt: skip
def test_flags_that_move_rounding_are_refused(project: Project, flag: str) -> None:
    project.extra = f'build: {{flags: [-O2, "{flag}"]}}'
    with pytest.raises(UserError, match=r"config.yaml: build.flags: .* is refused"):
        build(project.target())


def test_ordinary_flags_are_not_refused() -> None:
    assert (
        toolchain.refused_flag(["-O3", "-march=native", "-lineinfo", "-pthread", "-Xptxas=-v", "-fno-math-errno", "-DFTZ=1"])
        is None
    )


def test_compile_error_is_one_line_and_keeps_the_log(project: Project) -> None:
    project.source.write_text(SOURCE + "int broken() { return missing; }\n")
    with pytest.raises(BuildError, match=r"mine.cpp: does not compile: .*mine.cpp:3:.*missing.*\(log: .*\.log\)") as caught:
        build(project.target())
    assert caught.value.status == "COMPILE_ERROR"
    assert "\n" not in str(caught.value)
    kept = Path(str(caught.value).split("(log: ")[1].rstrip(")"))
    assert "missing" in kept.read_text()
    assert "src/" not in kept.read_text()


def test_wrong_suffix_and_missing_source(project: Project, tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text("")
    with pytest.raises(UserError, match=r"kernel.cu: a source for c\+\+ ends in .cpp"):
        build(project.target(), tmp_path / "kernel.cu")
    with pytest.raises(UserError, match=r"none.cpp: cannot read"):
        build(project.target(), tmp_path / "none.cpp")


def slow_compiler(folder: Path) -> Path:
    """A program that says which compiler it is, and hangs when asked to compile, with a child that hangs too."""
    path = folder / "slow-compiler"
    path.write_text(
        "#!/bin/sh\ncase \"$*\" in *--version*) echo slow 1.0;; *' -v '*) echo;; "
        f"*) sleep 987 & echo $! > {folder}/child; wait;; esac\n"
    )
    path.chmod(0o755)
    return path


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie counts as ended)."""
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_hanging_compiler_times_out_and_leaves_nothing(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(slow_compiler(tmp_path)))
    project.extra = "limits: {build_timeout_s: 0.7}"
    with pytest.raises(BuildError, match=r"mine.cpp: the compiler took more than 0.7 s") as caught:
        build(project.target())
    assert caught.value.status == "TIMEOUT"
    assert gone(int((tmp_path / "child").read_text()))
    assert not list((tmp_path / "cache").glob("*.build"))


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    program = [sys.executable, str(files.REPO_ROOT / "tools" / "load_kernel.py"), *arguments]
    return subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_interrupt_is_one_line_and_leaves_nothing(project: Project, tmp_path: Path) -> None:
    process = command("--config", str(project.target().path), "--compile-only", CXX=str(slow_compiler(tmp_path)))
    for _ in range(200):
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "error: interrupted\n"
    assert gone(int((tmp_path / "child").read_text()))
    assert not list((tmp_path / "cache").glob("*.build"))


def test_no_compiler(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(UserError, match=r"CXX='no-such-compiler -O2' names no program"):
        build(project.target())
    monkeypatch.setenv("CXX", "c++ -Ofast")
    with pytest.raises(UserError, match="-Ofast is refused"):
        build(project.target())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no C\+\+ compiler: set CXX, or install"):
        build(project.target())


def test_no_cuda_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"CUDA_HOME='.*' has no bin/nvcc"):
        build(load_target("h200"))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"no CUDA compiler: set CUDA_HOME"):
        build(load_target("h200"))


def test_cutlass_comes_from_its_variable_or_is_asked_for(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.extra = "build: {headers: [cutlass]}"
    monkeypatch.setenv("CUTLASS_INCLUDE_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"CUTLASS_INCLUDE_DIR='.*' has no cutlass/cutlass.h"):
        build(project.target())
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "cutlass.h").write_text("#define CUTLASS 1\n")
    (tmp_path / "cutlass" / "version.h").write_text("// 1\n")
    project.source.write_text("#include <cutlass/cutlass.h>\n" + SOURCE)
    first = build(project.target())
    assert any(name.endswith("cutlass/cutlass.h") for name in first.headers)
    (tmp_path / "cutlass" / "cutlass.h").write_text("#define CUTLASS 2\n")
    assert not build(project.target()).cached
    (tmp_path / "cutlass" / "version.h").write_text("// 2\n")
    assert build(project.target()).key != first.key
    project.extra = ""
    with pytest.raises(BuildError, match=r"includes cutlass/cutlass.h, which"):
        build(project.target())


def test_unwritable_cache(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AREAL_TIK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"file/cache: cannot create the folder"):
        build(project.target())


def test_concurrent_builds_share_one(project: Project) -> None:
    config = str(project.target().path)
    running = [command("--config", config, "--compile-only", "--json") for _ in range(4)]
    results = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert sorted(result["cached"] for result in results) == [False, True, True, True]
    assert len({result["library_sha256"] for result in results}) == 1
    assert answer(Path(results[0]["library"])) == 42


@pytest.mark.parametrize("arguments, words", [
    ((), "name a target (--gpu) or a config file"),
    (("--gpu", "h300"), "unknown target 'h300'; known: a100, cpu"),
    (("--gpu", "cpu", "--config", "none.yaml"), "none.yaml: cannot read"),
    (("--gpu", "cpu", "--source", "none.cpp"), "none.cpp: cannot read"),
])  # fmt: skip
def test_command_errors_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    process = command(*arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


# ------------------------------------------------------------------------------------------------------------ machine


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_another_gpu_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "build", lambda *args, **kwargs: pytest.fail("compiled"))
    pretend(monkeypatch, "NVIDIA H200", (9, 0))
    with pytest.raises(UserError, match=r"this GPU is 'NVIDIA H200', target h20 is 'NVIDIA H20'"):
        interface.load_kernel("h20")
    with pytest.raises(UserError, match=r"this machine has 1 GPUs"):
        interface.load_kernel("h200", device="cuda:1")
    with pytest.raises(UserError, match=r"device 'cpu' is not of target h200's type, cuda"):
        interface.load_kernel("h200", device="cpu")
    with pytest.raises(UserError, match=r"device 'gpu'"):
        interface.load_kernel("h200", device="gpu")


def test_compatibility_needs_code_that_the_gpu_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device("cuda")
    pretend(monkeypatch, "NVIDIA H200", (9, 0))
    assert device.check_machine(load_target("h200"), where) is None
    note = device.check_machine(load_target("a100"), where, allow_compat=True)
    assert note is not None and note.startswith("compatibility only: this GPU is 'NVIDIA H200'")
    pretend(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert device.check_machine(load_target("a100"), where) is None
    with pytest.raises(UserError, match=r"compute capability 8.0 cannot run compute_90a,code=sm_90a"):
        device.check_machine(load_target("h200"), where, allow_compat=True)


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"target h200 needs a CUDA build of torch"):
        interface.load_kernel("h200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"target h200 needs a GPU \(NVIDIA H200\); torch sees none"):
        interface.load_kernel("h200")


@pytest.mark.parametrize("arch, capability, expected", [
    ("compute_90a,code=sm_90a", (9, 0), True), ("compute_90a,code=sm_90a", (10, 0), False),
    ("compute_80,code=sm_80", (8, 9), True), ("compute_80,code=sm_80", (9, 0), False), ("compute_86,code=sm_86", (8, 0), False),
    ("compute_80,code=[sm_80,compute_80]", (12, 0), True), ("compute_80,code=[sm_80,compute_80]", (7, 5), False),
])  # fmt: skip
def test_runs_on(arch: str, capability: tuple[int, int], expected: bool) -> None:
    assert device.runs_on(arch, capability) is expected


# ---------------------------------------------------------------------------------------------------------- interface


def test_params_mirror_the_header(repo: Path, tmp_path: Path) -> None:
    fields = [name for name, _ in Params._fields_]
    prints = "".join(f'  printf("%zu\\n", offsetof(UnifiedAttnParams, {name}));\n' for name in fields)
    (tmp_path / "offsets.cpp").write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "attn_abi.h"\nint main() {\n'
        f'{prints}  printf("%zu %d\\n", sizeof(UnifiedAttnParams), UNIFIED_ATTN_ABI_VERSION);\n}}\n'
    )
    program = [
        *toolchain.find_cxx(),
        f"-I{repo}/experimental/common",
        str(tmp_path / "offsets.cpp"),
        "-o",
        str(tmp_path / "offsets"),
    ]
    subprocess.run(program, check=True)
    lines = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [int(line) for line in lines[:-1]] == [getattr(Params, name).offset for name in fields]
    assert lines[-1] == f"{ctypes.sizeof(Params)} 1"


def test_what_is_no_kernel_library_is_said(project: Project) -> None:
    built = build(project.target())
    with pytest.raises(UserError, match=r"kernel.so: not a kernel library: .*undefined symbol: unified_attn_abi_version"):
        Library(built.library)
    with pytest.raises(UserError, match=r"mine.cpp: not a kernel library"):
        Library(project.source)
    names = ("unified_prefill", "unified_extend", "unified_decode", "unified_attn_workspace_bytes", "unified_attn_error")
    stubs = "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in names)
    project.source.write_text(f'{SOURCE}{stubs}extern "C" int unified_attn_abi_version() {{ return 999; }}\n')
    with pytest.raises(UserError, match=r"interface version 999 is not 1"):
        Library(build(project.target()).library)


def test_ptxas_log_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'\nptxas info    : Function properties for _Z1kPf\n"
        "    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 360 bytes cmem[0]\n"
    )
    (entry,) = ptxas.resources(log)
    assert entry.pop("kernel") in ("k(float*)", "_Z1kPf")
    assert entry == {"arch": "sm_80", "registers": 40, "shared_bytes": 1024, "spill_store_bytes": 4, "spill_load_bytes": 8,
                     "stack_bytes": 16}  # fmt: skip


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    process = command("--gpu", "cpu", PYTHONPATH=str(tmp_path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "error: Python package 'torch' is not installed: pip install . brings all of them\n"
