"""A small reader of 64-bit little-endian ELF files: objects, shared libraries and CUDA's cubins.

    elf = Elf(data, "kernel.o")
    elf.undefined(), elf.section(".text"), elf.relocations, elf.dynamic(DT_NEEDED)

Nothing of the file is trusted: whatever points outside it, or makes no sense, is a UserError that names the file. The
reader executes nothing and never looks at another file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from tools.core.errors import UserError
from tools.core.files import sha256_bytes

EM_X86_64, EM_AARCH64, EM_CUDA = 62, 183, 190
SHT_SYMTAB, SHT_RELA, SHT_DYNAMIC, SHT_NOBITS, SHT_REL, SHT_DYNSYM = 2, 4, 6, 8, 9, 11
SHT_INIT_ARRAY, SHT_FINI_ARRAY, SHT_PREINIT_ARRAY, SHT_SYMTAB_SHNDX = 14, 15, 16, 18
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR = 1, 2, 4
STB_LOCAL, STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE = 0, 1, 2, 10
STT_SECTION, STT_FUNC, STT_GNU_IFUNC = 3, 2, 10
PT_LOAD, PT_GNU_STACK = 1, 0x6474E551
PF_X, PF_W = 1, 2
DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 14, 15, 29
DT_AUXILIARY, DT_FILTER, DT_AUDIT, DT_DEPAUDIT = 0x7FFFFFFD, 0x7FFFFFFF, 0x6FFFFEFC, 0x6FFFFEFB
VISIBLE = (0, 3)  # visibilities that other libraries see: default, protected
SHN_UNDEF, SHN_LORESERVE = 0, 0xFF00
MAX_SECTIONS, MAX_ENTRIES, MAX_TEXT_BYTES = 65536, 1 << 20, 1 << 28  # more than any kernel library has


@dataclass(frozen=True)
class Section:
    """One section; `data` is empty where it takes no room in the file, `size` is in bytes."""

    index: int
    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    data: bytes

    @property
    def executable(self) -> bool:
        return bool(self.flags & SHF_EXECINSTR)

    @property
    def loaded(self) -> bool:
        return bool(self.flags & SHF_ALLOC)

    @property
    def sha256(self) -> str:
        return sha256_bytes(self.data)


@dataclass(frozen=True)
class Symbol:
    """One symbol; `section` is a section's index, 0 where the symbol is undefined."""

    name: str
    value: int
    size: int
    kind: int
    binding: int
    visibility: int
    other: int
    section: int


@dataclass(frozen=True)
class Relocation:
    """One place in section `target` (an index) at `offset` bytes that refers to `symbol` + `addend`."""

    target: int
    offset: int
    kind: int
    symbol: Symbol
    addend: int


@dataclass(frozen=True)
class Segment:
    """One program header's kind and permission flags."""

    kind: int
    flags: int


class Elf:
    """A parsed file. Every table is read when it is first asked for."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name, self._text_bytes = data, name, 0
        if len(data) < 64 or data[:4] != b"\x7fELF":
            raise self.error("no ELF file")
        if data[4:6] != b"\x02\x01":
            raise self.error("not a 64-bit little-endian ELF file")
        fields = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
        self.kind, self.machine = int(fields[0]), int(fields[1])
        self._segments_at, self._sections_at = int(fields[4]), int(fields[5])
        self._segment_size, self._segment_count = int(fields[8]), int(fields[9])
        self._section_size, self._section_count, self._names_index = map(int, fields[10:13])

    def error(self, what: str) -> UserError:
        """The UserError for something wrong with this file."""
        return UserError(f"{self.name}: malformed: {what}")

    def _slice(self, offset: int, size: int, what: str) -> bytes:
        if offset < 0 or size < 0 or offset + size > len(self.data):
            raise self.error(f"{what} ends outside the file")
        return self.data[offset : offset + size]

    def _text(self, table: bytes, offset: int, what: str) -> str:
        end = table.find(b"\0", offset) if 0 <= offset < len(table) else -1
        if end < 0:
            raise self.error(f"the name of {what} lies outside its table")
        self._text_bytes += end - offset
        if self._text_bytes > MAX_TEXT_BYTES:
            raise self.error("its names overlap each other")
        return table[offset:end].decode("utf-8", "backslashreplace")

    @cached_property
    def sections(self) -> list[Section]:
        """All sections, the empty first one included, so that a section's index is its place here."""
        if self._sections_at == 0:
            return []
        if self._section_size != 64 or not 0 < self._section_count < SHN_LORESERVE or self._section_count > MAX_SECTIONS:
            raise self.error(f"{self._section_count} section headers of {self._section_size} bytes")
        table = self._slice(self._sections_at, 64 * self._section_count, "the section table")
        rows = [struct.unpack_from("<IIQQQQIIQQ", table, 64 * i) for i in range(self._section_count)]
        if self._names_index >= len(rows):
            raise self.error("no section holds the sections' names")
        names = self._slice(rows[self._names_index][4], rows[self._names_index][5], "the table of section names")
        if sum(row[5] for row in rows if row[1] != SHT_NOBITS) > 2 * len(self.data):
            raise self.error("its sections overlap each other")
        found = []
        for index, (name, kind, flags, _, offset, size, link, info, _, _) in enumerate(rows):
            empty = index == 0 or kind == SHT_NOBITS
            data = b"" if empty else self._slice(offset, size, f"section {index}")
            found.append(
                Section(
                    index, self._text(names, name, f"section {index}") if index else "", kind, flags, size, link, info, data
                )
            )
        return found

    def section(self, name: str) -> Section | None:
        """The first section of a name."""
        return next((section for section in self.sections if section.name == name), None)

    def _linked(self, section: Section) -> Section:
        if section.link >= len(self.sections):
            raise self.error(f"section {section.name} refers to section {section.link}, which there is not")
        return self.sections[section.link]

    def _rows(self, section: Section, form: str) -> list[tuple[int, ...]]:
        """A section's content as rows of a struct format."""
        row = struct.Struct(form)
        if section.size % row.size or section.size // row.size > MAX_ENTRIES:
            raise self.error(f"section {section.name} has {section.size} bytes, not some rows of {row.size}")
        return list(row.iter_unpack(section.data))

    @cached_property
    def _tables(self) -> dict[int, list[Symbol]]:
        """Symbol tables by their section's index."""
        tables: dict[int, list[Symbol]] = {}
        for section in self.sections:
            if section.kind == SHT_SYMTAB_SHNDX:
                raise self.error("more sections than are read here")
            if section.kind not in (SHT_SYMTAB, SHT_DYNSYM):
                continue
            names = self._linked(section).data
            tables[section.index] = [
                Symbol(self._text(names, name, "a symbol"), value, size, info & 15, info >> 4, other & 3, other, place)
                for name, info, other, place, value, size in self._rows(section, "<IBBHQQ")
            ]
        return tables

    def symbols(self, kind: int = SHT_SYMTAB) -> list[Symbol]:
        """The symbols of the static (SHT_SYMTAB) or dynamic (SHT_DYNSYM) table."""
        return [s for index, table in self._tables.items() if self.sections[index].kind == kind for s in table]

    def undefined(self, kind: int = SHT_SYMTAB) -> list[str]:
        """Names that the file uses and does not define, sorted."""
        return sorted({s.name for s in self.symbols(kind) if s.section == SHN_UNDEF and s.name})

    def defined(self, kind: int = SHT_SYMTAB) -> list[Symbol]:
        """Symbols that the file defines for the linker, hidden ones included: those bind the other files of the link."""
        return [s for s in self.symbols(kind) if s.section != SHN_UNDEF and s.binding != STB_LOCAL and s.name]

    @cached_property
    def relocations(self) -> list[Relocation]:
        """All relocations of an object."""
        found = []
        for section in self.sections:
            if section.kind not in (SHT_RELA, SHT_REL):
                continue
            table = self._tables.get(section.link)
            for offset, info, *addend in self._rows(section, "<QQq" if section.kind == SHT_RELA else "<QQ"):
                number = info >> 32
                if table is None or number >= len(table):
                    raise self.error(f"section {section.name} refers to symbol {number}, which there is not")
                found.append(Relocation(section.info, offset, info & 0xFFFFFFFF, table[number], addend[0] if addend else 0))
        return found

    @cached_property
    def segments(self) -> list[Segment]:
        """The program headers."""
        if self._segment_count == 0:
            return []
        if self._segment_size != 56:
            raise self.error(f"program headers of {self._segment_size} bytes")
        table = self._slice(self._segments_at, 56 * self._segment_count, "the program headers")
        return [Segment(*struct.unpack_from("<II", table, 56 * i)) for i in range(self._segment_count)]

    def dynamic(self, *tags: int) -> list[str]:
        """The texts of dynamic entries with one of some tags, such as DT_NEEDED."""
        found = []
        for section in self.sections:
            if section.kind == SHT_DYNAMIC:
                names = self._linked(section).data
                for tag, value in self._rows(section, "<qQ"):
                    if tag == 0:
                        break
                    if tag in tags:
                        found.append(self._text(names, value, "a dynamic entry"))
        return found
