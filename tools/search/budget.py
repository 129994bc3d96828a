"""A text of sections that fits a number of tokens: the least useful blocks go first, and the text says what went.

    section = Section("Latency", hint="records/E0007.json", unit="rows")
    section.add(table_head + first_row, worth=80)
    section.add(second_row, worth=78)
    text = fit([section, ...], budget=2000)

A section is a list of blocks. Blocks are taken by worth over all sections, so a section shrinks, from its end, before
it vanishes. A block is kept whole or left out whole; no line is ever cut. `always` marks what stands at any budget.

No tokenizer is needed: `estimate` is meant to count rather too many tokens than too few, for prose, tables and code.
Hashes cost a tokenizer more than other text and tell a reader nothing: they do not belong into such a text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tools.core.errors import UserError

BYTES_A_TOKEN = 3  # of prose and code
# Tables hold more: tokenizers divide digits into groups of at most three, and keep letters and signs apart.
_PIECE = re.compile(r"[^\W\d_]{1,6}|\d{1,3}|[^\w\s]{1,2}|_+")
GENERAL_NOTE = "Everything else was left out for this budget: a larger --budget shows it."


def estimate(text: str) -> int:
    """Tokens that a text is counted as: a third of its UTF-8 bytes, or its pieces (six letters, three digits, two signs).

    The larger of the two. The estimate of lines that are joined is at most the sum of `estimate(line + newline)`.
    """
    return max(-(-len(text.encode("utf-8")) // BYTES_A_TOKEN), sum(1 for _ in _PIECE.finditer(text)))


Text = str | Callable[[], str]


@dataclass
class Block:
    """One piece of a section, kept or left out as a whole."""

    made: Text
    worth: float  # blocks of higher worth are taken first
    place: float  # blocks of a section are shown in this order
    always: bool

    @functools.cached_property
    def text(self) -> str:
        """Made when it is first needed: a block that nothing asks for costs no reading of records."""
        return self.made if isinstance(self.made, str) else self.made()


@dataclass
class Section:
    """A heading and its blocks, in the order of usefulness.

    hint: where a reader finds what was left out. unit: what a block is, in the plural. independent: a block that does
    not fit is skipped and smaller ones after it may still be taken; else the section ends there.
    """

    title: str
    hint: str = ""
    unit: str = "lines"
    independent: bool = False
    blocks: list[Block] = field(default_factory=list)

    def add(self, text: Text, worth: float, *, place: float | None = None, always: bool = False) -> None:
        """Add a block, or a function that makes its text. Without `place` it is shown after the blocks before it."""
        if text:
            self.blocks.append(Block(text, worth, len(self.blocks) if place is None else place, always))

    def add_rows(self, rows: Sequence[Text], worth: float, floor: float) -> None:
        """Add rows whose worth falls evenly from `worth` to `floor`."""
        step = (worth - floor) / max(1, len(rows) - 1)
        for i, row in enumerate(rows):
            self.add(row, worth - i * step)

    @property
    def heading(self) -> str:
        return f"## {self.title}"


def fit(sections: Sequence[Section], budget: int) -> str:
    """The sections within `budget` tokens as `estimate` counts; UserError where not even the `always` blocks fit."""
    always = {i: [block for block in section.blocks if block.always] for i, section in enumerate(sections)}
    needed = sum(_cost(sections[i].heading) + sum(_cost(b.text) for b in blocks) for i, blocks in always.items() if blocks)
    minimum = needed + _cost(GENERAL_NOTE)
    kept = _taken(sections, always, budget - needed)
    if needed <= budget and not _left_out(sections, kept):
        return _text(sections, kept, "")
    if minimum > budget:
        raise UserError(f"--budget {budget}: too small for the stage and the next command; give at least {minimum}")
    # What is left out is named at the end: no block may take that room. Of the forms of the note the most telling one
    # whose longest version takes no more than an eighth of the budget.
    longest = [_cost(note(sections, {})) for note in (_full_note, _brief_note)]
    note_cost = next((cost for cost in longest if cost <= min(budget // 8, budget - needed)), _cost(GENERAL_NOTE))
    kept = _taken(sections, always, budget - needed - note_cost)
    for note in (_full_note(sections, kept), _brief_note(sections, kept), GENERAL_NOTE):
        text = _text(sections, kept, note)
        if estimate(text) <= budget:
            return text
    raise AssertionError("the general note was accounted for")


def _taken(sections: Sequence[Section], always: dict[int, list[Block]], room: int) -> dict[int, list[Block]]:
    """Blocks of each section that fit into `room` tokens beside those that always stand."""
    kept = {i: list(blocks) for i, blocks in always.items()}
    ended: set[int] = set()
    ranked = [(-block.worth, i, n) for i, s in enumerate(sections) for n, block in enumerate(s.blocks) if not block.always]
    for _, i, n in sorted(ranked):
        if i in ended:
            continue
        section, block = sections[i], sections[i].blocks[n]
        cost = _cost(block.text) + (0 if kept[i] else _cost(section.heading))
        if cost <= room:
            kept[i].append(block)
            room -= cost
        elif not section.independent:
            ended.add(i)
    return kept


def _cost(text: str) -> int:
    """Tokens of a block and the empty line after it."""
    return estimate(text + "\n\n")


def _text(sections: Sequence[Section], kept: dict[int, list[Block]], note: str) -> str:
    lines: list[str] = []
    for i, section in enumerate(sections):
        if kept[i]:
            lines += [section.heading, *(b.text for b in sorted(kept[i], key=lambda b: b.place)), ""]
    return "\n".join([*lines, note]).strip("\n") + "\n"


def _left_out(sections: Sequence[Section], kept: dict[int, list[Block]]) -> list[tuple[Section, int]]:
    return [(s, n) for i, s in enumerate(sections) if (n := len(s.blocks) - len(kept.get(i, [])))]


def _brief_note(sections: Sequence[Section], kept: dict[int, list[Block]]) -> str:
    names = "; ".join(f"{section.title} ({n})" for section, n in _left_out(sections, kept))
    return f"Left out for this budget (a larger --budget shows it, or the run's records): {names}" if names else ""


def _full_note(sections: Sequence[Section], kept: dict[int, list[Block]]) -> str:
    rows = [
        f"- {section.title}: {n} of {len(section.blocks)} {section.unit}" + (f"; see {section.hint}" if section.hint else "")
        for section, n in _left_out(sections, kept)
    ]
    return "\n".join(["## Left out for this budget (a larger --budget shows it)", *rows]) if rows else ""
