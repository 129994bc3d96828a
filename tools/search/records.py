"""The kinds of records, their ids, and the error that names a rule."""

from __future__ import annotations

import json
import re
from typing import Any

from tools.core.errors import UserError

LETTERS = {"opportunity": "O", "implementation": "I", "action": "A", "audit": "E", "lineage": "L"}
KINDS = {letter: kind for kind, letter in LETTERS.items()}
FIRST = {"O": 1, "I": 0, "A": 1, "E": 0, "L": 1}  # the number of a kind's first record
ROOT = "I0000"
MANIFEST = "run"  # the id under which the log names run.json
ABLATIONS = ("history", "numerics", "evidence", "opportunities", "branches")
_ID = re.compile(r"([OIAEL])(\d{4,})")


class RuleError(UserError):
    """A record that a rule refuses: which record, which rule, and what is wrong with the way out of it."""

    def __init__(self, record: str, rule: str, way_out: str) -> None:
        super().__init__(f"{record}: {rule}: {way_out}")
        self.record = record
        self.rule = rule
        self.way_out = way_out


def kind_of(identity: str) -> str:
    """The kind that an id belongs to; UserError where it is no id."""
    found = _ID.fullmatch(identity)
    if not found:
        raise UserError(f"{identity!r} is no id of a record (a letter of {', '.join(KINDS)} and four digits)")
    return KINDS[found[1]]


def make_id(letter: str, number: int) -> str:
    return f"{letter}{number:04d}"


def record_bytes(record: dict[str, Any]) -> bytes:
    """A record as it stands on disk."""
    return (json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
