"""The parts of a C++ or CUDA source: functions, kernels, exports, types and what lies between, with line numbers.

    regions = scan(text)
    for region, rank in ranked(regions, declared=["numerics", "lines 10-40"], entries=["decode"], words="softmax"):
        print(region.first, region.last, region.name, region.kind, rank)

A small scanner, not a compiler: comments, strings and directives are blanked out, braces are counted, and the words
before an opening brace say what it opens. Namespaces and extern "C" are looked into; a function's inside is not. Where
the braces do not match (a function whose head stands twice under #if), the whole file is one region. Every line of the
file that is not blank is in exactly one region.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BLANKED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_SCOPE = re.compile(r"^\s*(?:inline\s+)?namespace\b|^\s*extern\s*$")
_TYPE = re.compile(r"\b(?:struct|class|union|enum)\b")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
_ATTRIBUTE = re.compile(r"\b(?:alignas|__align__|__attribute__|__launch_bounds__|noexcept)\s*\(+[^()]*\)+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(?<![\w.])(?:lines?\s*)?L?(\d+)\s*(?:-|to|\.\.)\s*L?(\d+)(?![\w.])")


@dataclass(frozen=True)
class Region:
    """Lines `first` to `last` (from 1, both included) of a source."""

    name: str
    kind: str  # kernel | export | function | type | data | opening (before the first directive) | other
    scope: str  # innermost named namespace, "" where there is none
    first: int
    last: int
    text: str  # without a line end at its end
    uses: frozenset[str]  # identifiers in the code, comments and strings left out


@dataclass(frozen=True)
class _Found:
    name: str
    kind: str
    scope: str
    begin: int  # offsets into the text
    end: int


def scan(text: str) -> list[Region]:
    """All regions of a source in file order."""
    code = _BLANKED.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    lines, code_lines = text.split("\n"), code.split("\n")  # not splitlines: it ends lines at other characters too
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]

    def line_of(offset: int) -> int:
        return bisect.bisect_right(starts, offset) - 1

    regions: list[Region] = []

    def add(name: str, kind: str, scope: str, begin: int, end: int) -> None:
        while begin < end and not lines[begin].strip():
            begin += 1
        while end > begin and not lines[end - 1].strip():
            end -= 1
        if begin < end:
            part = "\n".join(lines[begin:end])
            uses = frozenset(_WORD.findall("\n".join(code_lines[begin:end])))
            regions.append(Region(name, kind, scope, begin + 1, end, part, uses))

    opening = next((i for i, line in enumerate(lines) if line.lstrip().startswith("#")), 0)
    if opening and not "".join(code_lines[:opening]).strip():
        add("opening comment", "opening", "", 0, opening)
    else:
        opening = 0
    done = opening
    for found in _top_level(code):
        begin, end = max(done, line_of(found.begin)), line_of(found.end) + 1
        while begin > done and (above := lines[begin - 1].strip()) and not code_lines[begin - 1].strip():
            if above.startswith("#"):
                break
            begin -= 1  # its comment belongs to it
        if end <= done:  # a second one on the same line
            continue
        if begin > done:
            add("between", "other", found.scope, done, begin)
        add(found.name, found.kind, found.scope, begin, end)
        done = end
    add("between" if regions else "whole file", "other", "", done, len(lines))
    return regions


def _top_level(code: str) -> list[_Found]:
    """What stands at namespace level, in order; [] where braces do not match."""
    found: list[_Found] = []
    scopes: list[str] = []  # names of the namespaces that are open, "" for extern "C" and unnamed ones
    exported = 0  # depth of scopes at which extern "C" was opened, 0 where it is not open
    depth = 0  # braces open inside a thing at namespace level
    head_start = 0  # offset after the last ; { or } at namespace level
    pending: _Found | None = None  # its closing brace was seen or is awaited
    begin = 0
    for match in re.finditer(r"[{};]", code):
        mark, at = match.group(), match.start()
        if depth:
            depth += (mark == "{") - (mark == "}")
            if depth == 0 and pending:
                if pending.kind in ("type", "data"):  # these end with their semicolon
                    continue
                found.append(_Found(pending.name, pending.kind, pending.scope, pending.begin, at))
                pending, head_start = None, at + 1
        elif mark == "{":
            head = code[head_start:at]
            if _SCOPE.search(head):
                words = _WORD.findall(head)
                scopes.append(words[-1] if words[-1] != "namespace" and words[-1] != "extern" else "")
                if words[-1] == "extern" and not exported:
                    exported = len(scopes)
                head_start = at + 1
                continue
            depth = 1
            if pending is None:
                begin = head_start + len(head) - len(head.lstrip())
                name, kind = _named(head, bool(exported))
                pending = _Found(name, kind, next((s for s in reversed(scopes) if s), ""), begin, at)
        elif mark == ";":
            if pending:
                found.append(_Found(pending.name, pending.kind, pending.scope, pending.begin, at))
            pending, head_start = None, at + 1
        else:
            if not scopes:
                return []
            if len(scopes) == exported:
                exported = 0
            scopes.pop()
            head_start = at + 1
    return [] if depth or scopes or pending else found


def _named(head: str, exported: bool) -> tuple[str, str]:
    """Name and kind of what the words before an opening brace open."""
    plain = head
    while (shorter := re.sub(r"<[^<>]*>", " ", plain)) != plain:
        plain = shorter  # template arguments and parameters hide names
    plain = _ATTRIBUTE.sub(" ", plain)
    before, call, _ = plain.partition("(")
    if "=" in before or (not call and not _TYPE.search(plain)):
        words = _WORD.findall(before.partition("=")[0])
        return (words[-1] if words else "data"), "data"
    if not call:
        words = _WORD.findall(before.partition(":")[0])
        return words[-1], "type"
    name = _CALL.search(plain)
    if "__global__" in before:
        kind = "kernel"
    else:  # a source may export through a macro of its own, but the names are the interface's
        kind = "export" if exported or (name and name[1].startswith("unified_")) else "function"
    return (name[1] if name else "operator"), kind


def ranked(regions: Sequence[Region], declared: Iterable[str], entries: Iterable[str], words: str) -> list[tuple[Region, int]]:
    """Regions with their ranks: 0 declared, 1 named, 2 reached by the entry points, 3 others, 4 what has no name.

    By rank, and within a rank in file order.

    declared: names of functions or namespaces, or line ranges ("lines 10-40"), in any prose. entries: prefill, extend,
    decode. words: prose whose identifiers may name regions.
    """
    shared = "\n".join(declared)
    spans = [(int(a), int(b)) for a, b in _RANGE.findall(shared)]
    shared_words, named = set(_WORD.findall(shared)), set(_WORD.findall(words))
    reached = reach(regions, {f"unified_{entry}" for entry in entries})

    def rank(region: Region) -> int:
        if region.name in shared_words or (region.scope in shared_words and region.scope):
            return 0
        if any(a <= region.last and region.first <= b for a, b in spans):
            return 0
        if region.kind != "other" and region.name in named:
            return 1
        if region.kind in ("kernel", "function", "export") and region.name in reached:
            return 2
        return 4 if region.kind in ("other", "opening") else 3

    return sorted(((region, rank(region)) for region in regions), key=lambda pair: (pair[1], pair[0].first))


def reach(regions: Sequence[Region], names: set[str]) -> set[str]:
    """The given names and those of all regions that they use, directly or through others."""
    by_name: dict[str, set[str]] = {}
    for region in regions:
        by_name.setdefault(region.name, set()).update(region.uses)
    seen: set[str] = set()
    todo = [name for name in names if name in by_name]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [used for used in by_name[name] if used in by_name and used not in seen]
    return seen


def outline(regions: Sequence[Region]) -> str:
    """One line a scope: every named region with its lines."""
    groups: dict[str, list[str]] = {}
    for region in regions:
        if region.kind not in ("other", "opening"):
            where = f"{region.first}-{region.last}" if region.last > region.first else f"{region.first}"
            mark = f"{region.kind} " if region.kind in ("kernel", "export") else ""
            groups.setdefault(region.scope, []).append(f"{mark}{region.name} {where}")
    return "\n".join(f"- {f'namespace {scope}' if scope else 'file'}: {', '.join(names)}" for scope, names in groups.items())
