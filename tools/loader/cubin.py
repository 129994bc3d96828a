"""Device code inside a host object: which images it holds, and what identifies each kernel in them.

    code = device_code(Elf(data, "kernel.o"))
    code.kernels[0].name, code.kernels[0].sha256, code.kernels[0].registers

A kernel's hash covers its instructions, what they refer to by name, its constants, its registers and its stack. It
covers no line table and no module id, so two builds of one source agree (measured: nvcc 13.0, with and without
-lineinfo, another module id). Everything is read from the binary; the compiler's words are not asked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.core.errors import UserError
from tools.core.files import sha256_json
from tools.loader.elf import EM_CUDA, SHN_UNDEF, STT_FUNC, Elf, Relocation, Section
from tools.loader.toolchain import demangle

FATBIN_MAGIC, PTX_IMAGE, ELF_IMAGE = 0xBA55ED50, 1, 2
FATBIN_SECTION = ".nv_fatbin"
STT_OBJECT, ENTRY_POINT = 1, 0x10  # in a symbol's `other`
_ATTRIBUTES = {0x11: "stack_bytes", 0x2F: "registers"}  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT
# nvcc's name for a file's internal namespace: a module id that changes with the text, the file's name, and what the file
# exports first. In a mangled name its length stands before it.
_MANGLED = re.compile(r"(\d+)(_GLOBAL__N__|_INTERNAL_)(?=[0-9a-f]{8}_(\d+)_)")
_DEMANGLED = re.compile(r"(?<![\dA-Za-z])_INTERNAL_[0-9a-f]{8}_\d+_\w+")


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. `code_bytes` is the size of its instructions."""

    name: str  # as in the source, where c++filt is installed
    symbol: str
    arch: str  # sm_90
    sha256: str
    code_bytes: int
    registers: int
    stack_bytes: int


@dataclass
class DeviceCode:
    """All that an object holds for a GPU."""

    images: list[tuple[str, bytes]] = field(default_factory=list)  # (sm_90, cubin)
    ptx: list[str] = field(default_factory=list)  # compute_80, ...
    kernels: list[Kernel] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)  # what device code calls and does not define: printf, malloc, ...
    variables: dict[str, int] = field(default_factory=dict)  # bytes of each variable that outlives a launch
    hidden: list[str] = field(default_factory=list)  # sections that hold code images where none belongs


def device_code(elf: Elf) -> DeviceCode:
    """Read an object; UserError where an image cannot be read (compressed or malformed)."""
    found = DeviceCode()
    for section in elf.sections:
        if section.name == FATBIN_SECTION:
            for kind, arch, data in _images(section, elf.name):
                if kind == PTX_IMAGE:
                    found.ptx.append(f"compute_{arch}")
                else:
                    found.images.append((f"sm_{arch}", data))
        elif section.loaded and (b"\x7fELF" in section.data or struct.pack("<I", FATBIN_MAGIC) in section.data):
            found.hidden.append(section.name)
    for number, (target, cubin) in enumerate(found.images):
        _read_image(Elf(cubin, f"{elf.name}: device image {number} ({target})"), target, found)
    return found


def plain(name: str) -> str:
    """A symbol, mangled or not, without what changes from build to build."""
    found, at = [], 0
    for match in _MANGLED.finditer(name):
        digits, mark, file = match.groups()
        shortest = len(mark) + 10 + len(file) + int(file) if len(file) < 5 else len(name)
        # The digits of a name that ends just before may run into the length: take the longest number that fits.
        fitting = [int(digits[i:]) for i in range(len(digits)) if shortest <= int(digits[i:]) <= len(name) - match.start(2)]
        if match.start() >= at and fitting:
            found.append(name[at : match.start(2)].rstrip("0123456789") + mark)
            at = match.start(2) + fitting[0]
    return _DEMANGLED.sub("_INTERNAL_", "".join([*found, name[at:]]))


def _images(section: Section, name: str) -> Iterator[tuple[int, int, bytes]]:
    """(kind, architecture, content) of every image; the section must hold nothing else but padding."""
    data, at = section.data, 0
    while at < len(data):
        if len(data) - at < 16:
            if data[at:].strip(b"\0"):
                break
            return
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic == 0 and not data[at : at + 8].strip(b"\0"):
            at += 8
            continue
        end = at + header + size
        if magic != FATBIN_MAGIC or header < 16 or end > len(data):
            break
        at += header
        while at < end:
            if end - at < 48:
                raise UserError(f"{name}: malformed: an image header ends outside {section.name}")
            kind, _, head, length, packed, _, _, _, arch = struct.unpack_from("<HHIQIIHHI", data, at)
            if head < 48 or at + head + length > end:
                raise UserError(f"{name}: malformed: an image ends outside {section.name}")
            content = data[at + head : at + head + length]
            if kind not in (PTX_IMAGE, ELF_IMAGE) or packed or (kind == ELF_IMAGE) != content.startswith(b"\x7fELF"):
                raise UserError(f"{name}: malformed: a device image of kind {kind} is compressed or of an unknown form")
            yield kind, arch, content
            at += head + length
    if at < len(data):
        raise UserError(f"{name}: malformed: {section.name} holds something else than device images at byte {at}")


def _read_image(cubin: Elf, arch: str, found: DeviceCode) -> None:
    if cubin.machine != EM_CUDA:
        raise cubin.error(f"machine {cubin.machine} is no GPU")
    uses = _attributes(cubin)
    by_section: dict[int, list[Relocation]] = {}
    for relocation in cubin.relocations:
        by_section.setdefault(relocation.target, []).append(relocation)
    found.imports += [name for name in cubin.undefined() if not name.startswith(".nv.")]
    kernels = []
    for index, symbol in enumerate(cubin.symbols()):
        if symbol.section == SHN_UNDEF or symbol.section >= len(cubin.sections):
            continue
        section = cubin.sections[symbol.section]
        if symbol.kind == STT_OBJECT and section.name.startswith(".nv.global"):
            name = plain(symbol.name)
            found.variables[name] = max(found.variables.get(name, 0), symbol.size)
        if symbol.kind == STT_FUNC and symbol.other & ENTRY_POINT:
            kernels.append((symbol.name, section, uses.get(index, {})))
    shown = demangle([name for name, _, _ in kernels])
    for (name, section, use), title in zip(kernels, shown, strict=True):
        registers = use.get("registers", section.info >> 24)  # in the section's header before CUDA 13
        stack = use.get("stack_bytes", 0)
        code = _content(cubin, section, name, by_section)
        digest = sha256_json([code, registers, stack, _module_data(cubin, by_section)])
        found.kernels.append(Kernel(plain(title), name, arch, digest, section.size, registers, stack))


def _content(cubin: Elf, first: Section, name: str, relocations: dict[int, list[Relocation]]) -> list[Any]:
    """A kernel's code section with those that it calls, and its own constants, as JSON."""
    waiting, seen, content = [first], {first.index}, []
    while waiting:
        section = waiting.pop(0)
        refers = []
        for relocation in relocations.get(section.index, []):
            place = relocation.symbol.section
            target = cubin.sections[place] if 0 < place < len(cubin.sections) else None
            title = relocation.symbol.name or (target.name if target else "")
            refers.append([relocation.offset, relocation.kind, plain(title), relocation.addend])
            if target and target.executable and target.index not in seen:
                seen.add(target.index)
                waiting.append(target)
        content.append([section.sha256, refers])
    own = [s for s in cubin.sections if re.fullmatch(rf"\.nv\.constant[1-9]\d*\.{re.escape(name)}", s.name)]
    return [content, [[s.name.split(".")[2], s.sha256] for s in own]]


def _module_data(cubin: Elf, relocations: dict[int, list[Relocation]]) -> list[Any]:
    """Constants, initial values and addresses of variables, which every kernel of an image may read."""
    found: list[Any] = []
    for section in cubin.sections:
        if section.name in (".nv.constant3", ".nv.constant4", ".nv.global.init"):
            refers = [[r.offset, plain(r.symbol.name), r.addend] for r in relocations.get(section.index, [])]
            found.append([section.name, section.sha256, refers])
    return found


def _attributes(cubin: Elf) -> dict[int, dict[str, int]]:
    """Registers and stack bytes by symbol index, from the image's list of attributes."""
    section = cubin.section(".nv.info")
    data, at, uses = section.data if section else b"", 0, dict[int, dict[str, int]]()
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != 4:  # its value stands in the header
            continue
        if attribute in _ATTRIBUTES and size == 8 and at + 8 <= len(data):
            symbol, value = struct.unpack_from("<II", data, at)
            uses.setdefault(symbol, {})[_ATTRIBUTES[attribute]] = value
        at += size
    return uses
