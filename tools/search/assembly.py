"""What a function does, read from a compiler's assembly: all code and data that it reaches, without the names' accidents.

    unit = Unit(text)
    unit.reached("unified_decode")      # a hash, and the names of the functions reached

The text is cut into pieces, one a symbol. Starting from one of them, every reference to another is followed, and each
label is replaced by the number of its first mention. So labels, internal names, the order of functions in the file and
whatever is not reached make no difference; any instruction, constant or table that is reached does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.core.errors import UserError
from tools.core.files import sha256_json

_LABEL = re.compile(r"([\w.$]+):")
_NAME = re.compile(r"(?<![\w.%])[A-Za-z_.][\w.$]*")
_EXCEPTIONS = re.compile(r"\.LLSDAC?\d+")
_FUNCTION = re.compile(r"\.type\s+([\w.$]+),\s*[@%]function")
_SIZE = re.compile(r"\.size\s+([\w.$]+),")
_SET = re.compile(r"\.set\s+([\w.$]+),\s*(.*)")
_COMMON = re.compile(r"\.(?:l?comm)\s+([\w.$]+),\s*(.*)")
_SECTION = re.compile(r"\.(?:section\s+([\w.$-]+).*|(text|data|bss))\b.*")
_ALIGN = re.compile(r"\.(p2|b)?align\b")
# Directives that say where code stands or how it is debugged, not what it does.
_SILENT = re.compile(
    r"\.(file|loc|ident|globl|global|weak|hidden|internal|protected|local|type|size|cfi_(?!lsda|personality)\w+|addrsig\w*)\b.*"
)
_TEXT = re.compile(r"\.(string|ascii|asciz)\b")
IMAGE_SECTIONS = (".nv_fatbin", ".nvFatBinSegment", "__nv_module_id")  # device code: compared by itself


class Undecided(UserError):
    """Compiled code does not tell whether two sources do the same at an entry point."""


class Unit:
    """One assembly file of GCC. Undecided where inline assembly hides what it defines."""

    def __init__(self, text: str) -> None:
        self.initialisers: list[str] = []  # functions that run when the library is loaded
        self._pieces: dict[str, list[str]] = {}  # symbol -> its lines, labels inside a function included
        self._home: dict[str, str] = {}  # label -> the piece that it stands in
        self._functions: set[str] = set(_FUNCTION.findall(text))
        self._open: dict[str, str | None] = {}  # section -> the piece that is being written there
        self._read(text)
        lines = (line for piece in self._pieces.values() for line in piece if not line.endswith(":"))
        self._mentioned = {name for line in lines for name in _NAME.findall(line)}

    def _read(self, text: str) -> None:
        section, before, by_hand = ".text", ".text", False
        for raw in text.splitlines():
            line = raw.strip()
            if line in ("#APP", "#NO_APP"):
                by_hand = line == "#APP"
            elif not line or line.startswith("#"):
                continue
            elif switched := _SECTION.fullmatch(line):
                before, section = section, switched[1] or f".{switched[2]}"
            elif line == ".previous":
                before, section = section, before
            else:
                if by_hand and section not in IMAGE_SECTIONS:
                    self._check_by_hand(line, section)
                self._line(line, section)

    def _check_by_hand(self, line: str, section: str) -> None:
        """Inline assembly may hold instructions of the function around it; what defines something of its own is not read."""
        label = _LABEL.match(line)
        named = label is not None and not label[1].isdigit()
        if self._open.get(section) is None or ";" in line or line.startswith(".") or named:
            raise Undecided(f"inline assembly holds more than instructions: {line[:60]!r}")

    def _line(self, line: str, section: str) -> None:
        piece = self._open.get(section)
        if (label := _LABEL.match(line)) and not label[1].isdigit():
            self._label(label[1], section)
        elif alias := _SET.fullmatch(line):
            if alias[2].startswith((". ", ".+", ".-")) or alias[2] == ".":
                raise Undecided(f"a symbol is defined by its place: {line[:60]!r}")
            self._define(alias[1], alias[2])
        elif common := _COMMON.fullmatch(line):
            self._define(common[1], f"zeros {common[2]}")
        elif section.startswith((".init_array", ".preinit_array", ".ctors")):
            self.initialisers += [name for name in _NAME.findall(line) if name in self._functions]
        elif piece in self._functions and (ended := _SIZE.match(line)) and ended[1] == piece:
            self._open[section] = None  # what stands between functions belongs to none
        elif piece is not None and not _SILENT.fullmatch(line) and (piece in self._functions or not _ALIGN.match(line)):
            self._pieces[piece].append(" ".join(line.split()))

    def _define(self, name: str, content: str) -> None:
        """A piece of one line."""
        self._home[name] = name
        self._pieces[name] = [content]

    def _label(self, name: str, section: str) -> None:
        """A label inside a function is part of it; any other begins a piece, or names the one that has just begun.

        A function's exception table begins one too: the label before it is the end of another function's.
        """
        piece = self._open.get(section)
        inside = piece is not None and name not in self._functions and not _EXCEPTIONS.fullmatch(name)
        if inside and (piece in self._functions or all(line.endswith(":") for line in self._pieces[piece or ""])):
            self._home[name] = piece or ""
            self._pieces[piece or ""].append(f"{name}:")
        else:
            self._home[name] = self._open[section] = name
            self._pieces[name] = []

    def reached(self, *entries: str) -> tuple[str, list[str]]:
        """(hash of all that some symbols reach, names of the functions reached). Undecided where one is not defined here."""
        numbers: dict[str, int] = {}
        waiting: list[str] = []
        for entry in entries:
            if entry not in self._home:
                raise Undecided(f"the source does not define {entry}")
            self._number(entry, numbers, waiting)
        content: list[list[str]] = []
        functions: list[str] = []
        at = 0
        while at < len(waiting):
            piece = waiting[at]
            at += 1
            if piece in self._functions:
                functions.append(piece)
            content.append([self._renamed(line, numbers, waiting) for line in self._lines(piece)])
        return sha256_json(content), functions

    def _lines(self, piece: str) -> Iterator[str]:
        """A piece without labels that nothing refers to: those count what the compiler numbered on its way."""
        for line in self._pieces[piece]:
            if not line.endswith(":") or line[:-1].isdigit() or line[:-1] in self._mentioned:
                yield line

    def _renamed(self, line: str, numbers: dict[str, int], waiting: list[str]) -> str:
        if _TEXT.match(line):
            return line
        return _NAME.sub(lambda found: self._number(found[0], numbers, waiting), line)

    def _number(self, name: str, numbers: dict[str, int], waiting: list[str]) -> str:
        """A symbol of this unit as its number; another library's by its name. A piece is read when it is first mentioned."""
        home = self._home.get(name)
        if home is None:
            return name
        if home not in waiting:
            waiting.append(home)
        return f"<{numbers.setdefault(name, len(numbers))}>"
