"""What can be said of a candidate without running it: what it asks of others, what it is made of, what has changed.

    evidence = inspect(built, "cuda", parent=root)      # for the report
    reason = refusal(evidence)                          # None, or the sentence with which it is refused

The object is read before it is linked, so every symbol in it is the candidate's own. A list of what is allowed stands in
allowed.py. This keeps honest candidates honest, and makes the dishonest ones work for it: native code can still find a
function without naming it (through the dynamic linker's tables, or by computing an address), so what it may do is
bounded by the operating system and by what the judge sees, never by this check alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.core.errors import UserError
from tools.core.files import sha256_json
from tools.evaluator import allowed, census
from tools.loader import cache, elf, toolchain
from tools.loader.build import Built
from tools.loader.cubin import DeviceCode, device_code, plain
from tools.loader.elf import Elf

OBJDUMP_TIMEOUT_S = 120
MAX_OBJECT_BYTES = 128 << 20
MAX_LIST, MAX_TEXT = 500, 2000  # of the evidence: a source of one line can have a million symbols
_SYSTEM_CALL = re.compile(r"^\s*([0-9a-f]+):\s+(?:\S+\s+)*?(syscall|sysenter|int\s+\$0x80|svc\s+\S+)(?:\s|$)")
_SYSTEM_CALL_BYTES = (b"\x0f\x05", b"\x0f\x34", b"\xcd\x80")
# x86-64 relocations that give the address of the table of imported functions: GOTOFF64, GOTPC32, GOT64, GOTPC64, ...
_TABLE_RELOCATIONS = {elf.EM_X86_64: (25, 26, 27, 29, 30, 31)}
_TABLE = "_GLOBAL_OFFSET_TABLE_"


def inspect(built: Built, device: str, parent: Built | None = None) -> dict[str, Any]:
    """Everything known of a build for "cpu" or "cuda", as JSON; with a parent, also which code is the same.

    UserError where the object or the library cannot be read.
    """
    content = cache.read_regular(built.object)
    if len(content) > MAX_OBJECT_BYTES:
        raise UserError(f"{built.object.name}: {len(content)} bytes; no kernel needs more than {MAX_OBJECT_BYTES}")
    own = Elf(content, built.object.name)
    library = Elf(cache.read_regular(built.library), built.library.name)
    code = device_code(own)
    evidence: dict[str, Any] = {
        "device": device,
        **_linking(own, library, device),
        **_special(own, library),
        "system_calls": _system_calls(own, built.object),
        "host_code_sha256": _host_hash(own, device),
        "device_imports": sorted(set(code.imports)),
        "device_variables": [{"name": name, "bytes": size} for name, size in sorted(code.variables.items())],
        "hidden_images": code.hidden,
        "ptx": code.ptx,
        "census": None,
        "kernels": [],
        "removed_kernels": [],
        "host_code": None,
    }
    if device == "cuda":
        _add_kernels(evidence, code, built.resources)
    if parent is not None:
        _compare(evidence, parent)
    evidence["refusal"] = refusal(evidence)  # before lists are cut
    bounded: dict[str, Any] = _bounded(evidence)
    return bounded


def refusal(evidence: dict[str, Any]) -> str | None:
    """Why a candidate with this evidence is refused, in one sentence that names the first cause; None where it is not."""
    device = evidence["device"]
    if names := evidence["refused_imports"]:
        (title,) = toolchain.demangle(names[:1])
        shown = title if title == names[0] else f"{title} ({names[0]})"
        return f"it asks other libraries for {shown}, which a {device} kernel may not use"
    for key, what in (("refused_libraries", "is linked with"), ("search_paths", "searches libraries in")):
        if evidence[key]:
            return f"it {what} {evidence[key][0]}"
    if names := evidence["refused_exports"]:
        return f"it defines {names[0]} for others, which is none of the interface's functions (make it static)"
    if names := evidence["refused_sections"]:
        return f"it has a section {names[0]}, which a kernel does not need"
    if names := evidence["refused_initialisers"]:
        return f"it runs {names[0]} when it is loaded"
    if names := evidence["ifuncs"]:
        return f"it chooses {names[0]} while it is loaded (an indirect function)"
    if evidence["executable_stack"]:
        return "it asks for an executable stack"
    if evidence["writable_code"]:
        return "it has memory that is both writable and executable"
    if calls := evidence["system_calls"]["instructions"]:
        return f"it makes a system call by itself: {calls[0]}"
    if names := evidence["hidden_images"]:
        return f"it hides a code image in section {names[0]}"
    if device == "cpu":
        return "it holds device code, and its target is a CPU" if evidence["ptx"] or evidence["kernels"] else None
    if names := [name for name in evidence["device_imports"] if name not in allowed.DEVICE_IMPORTS]:
        return f"its device code calls {names[0]}"
    for variable in evidence["device_variables"]:
        text = "__assertfail" in evidence["device_imports"] and allowed.ASSERT_TEXT.fullmatch(variable["name"])
        if variable["bytes"] > allowed.STATE_BYTES and not text:
            return f"it keeps the variable {variable['name']} on the device between calls (constants may be __constant__)"
    if evidence["registrations"] > 1:
        return f"it registers device code {evidence['registrations']} times"
    return None


def _bounded(value: Any) -> Any:
    """The same evidence with its longest lists and texts cut."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}..."
    if isinstance(value, list):
        return [_bounded(item) for item in value[:MAX_LIST]]
    return {key: _bounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def _linking(own: Elf, library: Elf, device: str) -> dict[str, Any]:
    """What the object asks of other libraries and shows to them."""
    used = {relocation.symbol.name for relocation in own.relocations}
    imports = [name for name in own.undefined() if name != _TABLE or _TABLE in used]
    kinds = _TABLE_RELOCATIONS.get(own.machine, ())
    if _TABLE not in imports and any(relocation.kind in kinds for relocation in own.relocations):
        imports.append(_TABLE)
    needed = library.dynamic(elf.DT_NEEDED, elf.DT_AUXILIARY, elf.DT_FILTER, elf.DT_AUDIT, elf.DT_DEPAUDIT)
    exports = own.defined()
    return {
        "imports": imports,
        "refused_imports": [name for name in imports if not allowed.may_import(name, device)],
        "libraries": needed,
        "refused_libraries": [name for name in needed if not allowed.LIBRARIES.fullmatch(name)],
        "search_paths": library.dynamic(elf.DT_RPATH, elf.DT_RUNPATH),
        "exports": sorted({plain(s.name) for s in exports if s.visibility in elf.VISIBLE}),
        "refused_exports": sorted(
            {s.name for s in exports if not allowed.may_define(s.name, weak=s.binding != elf.STB_GLOBAL)}
        ),
        "registrations": sum(r.symbol.name == "__cudaRegisterFatBinary" for r in own.relocations),
    }  # fmt: skip


def _special(own: Elf, library: Elf) -> dict[str, Any]:
    """Code that runs at load time, sections and memory that a kernel does not need."""
    starts = _initialisers(own)
    stack = [segment.flags for segment in library.segments if segment.kind == elf.PT_GNU_STACK]
    both = elf.PF_W | elf.PF_X
    refused = [s.name for s in own.sections if s.loaded and s.size and not allowed.SECTIONS.fullmatch(s.name)]
    refused += [s.name for s in own.sections if s.name.startswith((".gnu.lto_", ".deplibs"))]
    refused += [s.name for s in own.sections if s.flags & elf.SHF_WRITE and s.executable]
    return {
        "initialisers": [plain(name) for name in starts],
        "refused_initialisers": [name for name in starts if not allowed.INITIALISERS.fullmatch(name)],
        "refused_sections": refused,
        "ifuncs": sorted({symbol.name for symbol in own.symbols() if symbol.kind == elf.STT_GNU_IFUNC}),
        "executable_stack": not stack or any(flags & elf.PF_X for flags in stack),
        "writable_code": any(s.kind == elf.PT_LOAD and s.flags & both == both for s in library.segments),
    }


def _initialisers(own: Elf) -> list[str]:
    """Names of the functions that the object asks the dynamic linker to run when it is loaded."""
    lists = {
        section.index
        for section in own.sections
        if section.kind == elf.SHT_INIT_ARRAY or section.name.startswith(".init_array")
    }
    found = []
    for relocation in own.relocations:
        if relocation.target not in lists:
            continue
        symbol, place = relocation.symbol, relocation.symbol.value + relocation.addend
        if symbol.kind == elf.STT_SECTION:
            inside = (s for s in own.symbols() if s.kind == elf.STT_FUNC and s.section == symbol.section and s.value == place)
            symbol = next(inside, symbol)
        found.append(symbol.name or f"an unnamed function at byte {place}")
    entries = sum(own.sections[index].size // 8 for index in lists)
    return found + ["an address that no relocation states"] * (entries - len(found))


def _system_calls(own: Elf, path: Path) -> dict[str, Any]:
    """Instructions that enter the kernel, as a disassembler sees them.

    `byte_patterns` counts the same bytes anywhere in code. A few lie inside other instructions by chance, so the number
    decides nothing; it bounds what code could hide from the disassembler.
    """
    patterns = 0
    if own.machine == elf.EM_X86_64:
        patterns = sum(s.data.count(pattern) for s in own.sections if s.executable for pattern in _SYSTEM_CALL_BYTES)
    program = shutil.which("objdump")
    result: dict[str, Any] = {"checked": "objdump", "instructions": [], "byte_patterns": patterns}
    if program is None:
        return {**result, "checked": "not checked: no objdump"}
    try:
        done = subprocess.run(
            [program, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, errors="replace",
            timeout=OBJDUMP_TIMEOUT_S, stdin=subprocess.DEVNULL, env=toolchain.clean_environment()[0], check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**result, "checked": f"not checked: objdump: {type(error).__name__}"}
    if done.returncode:
        return {**result, "checked": f"not checked: objdump ended with exit code {done.returncode}"}
    for line in done.stdout.splitlines():
        if match := _SYSTEM_CALL.match(re.sub(r"<[^>]*>", "", line)):
            result["instructions"].append(f"{' '.join(match[2].split())} at {match[1]}")
    return result


def _host_hash(own: Elf, device: str) -> str:
    """SHA-256 over the object's machine code and what it refers to; on a CPU over its constants as well.

    A CUDA object's host constants hold the names of its kernels, with a module id that changes from build to build.
    """
    relocations: dict[int, list[list[Any]]] = {}
    for r in own.relocations:
        title = r.symbol.name or (own.sections[r.symbol.section].name if r.symbol.section < len(own.sections) else "")
        relocations.setdefault(r.target, []).append([r.offset, r.kind, plain(title), r.addend])
    content = []
    for section in own.sections:
        constants = device == "cpu" and section.name.startswith((".rodata", ".data", ".init_array"))
        if section.executable or (section.loaded and constants):
            content.append([plain(section.name), section.sha256, relocations.get(section.index, [])])
    return sha256_json(sorted(content))


def _add_kernels(evidence: dict[str, Any], code: DeviceCode, resources: list[dict[str, Any]]) -> None:
    """One entry a kernel: identity, resources, and its census where a disassembler is installed."""
    counts, evidence["census"] = census.count(code.images)
    said = {(plain(use["kernel"]), use["arch"].rstrip("af")): use for use in resources}
    for kernel in code.kernels:
        entry = asdict(kernel)
        entry["symbol"] = plain(kernel.symbol)
        use = said.get((kernel.name, kernel.arch), {})
        for key in ("shared_bytes", "spill_store_bytes", "spill_load_bytes"):
            entry[key] = use.get(key)
        counted = counts.get((kernel.arch, kernel.symbol))
        if counted and (counted["total"] + counted["nop"]) * census.INSTRUCTION_BYTES != kernel.code_bytes:
            evidence["census"] = f"unavailable: {evidence['census']} does not show all instructions of {kernel.name}"
            counted = None
        entry |= {"census": counted, "parent": None}
        evidence["kernels"].append(entry)


def _compare(evidence: dict[str, Any], parent: Built) -> None:
    """State of every kernel, and of the host code, whether the parent's build has it."""
    other = Elf(cache.read_regular(parent.object), f"the parent's {parent.object.name}")
    before = {(kernel.name, kernel.arch): kernel.sha256 for kernel in device_code(other).kernels}
    for entry in evidence["kernels"]:
        digest = before.pop((entry["name"], entry["arch"]), None)
        entry["parent"] = "new" if digest is None else "identical" if digest == entry["sha256"] else "changed"
    evidence["removed_kernels"] = [f"{name} [{arch}]" for name, arch in before]
    same = evidence["host_code_sha256"] == _host_hash(other, evidence["device"])
    evidence["host_code"] = "identical" if same else "changed"
