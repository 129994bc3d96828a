"""The figures of an archive: what lies there, and whether the data behind them is that of the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools import plot
from tools.archive.evidence import EVIDENCE
from tools.archive.reading import files_below, plain
from tools.core.config import Target
from tools.core.errors import UserError
from tools.core.files import read_bytes, sha256_file
from tools.figures.sources import listing, read

FIGURES = "experimental/figures"


def entries(root: Path) -> list[dict[str, Any]]:
    """Every file with its hash and the reports that it is made from, as the archive lists it."""
    if not (root / FIGURES).is_dir():
        return []
    drawn, _ = listing(plain(root, f"{FIGURES}/{plot.REPORTS}"))
    given = (plot.REPORTS, plot.PUBLISHED)
    return [
        {
            "path": name,
            "sha256": sha256_file(plain(root, name)),
            "evidence": [] if Path(name).name in given else [f"{EVIDENCE}/{report}" for report in drawn],
        }
        for name in files_below(root, FIGURES)
    ]


def check(root: Path, targets: dict[str, Target]) -> int:
    """How many data files are what the evidence gives; UserError for the first that is not. Pictures are drawn from the
    same data by tools/plot.py --check, which needs matplotlib."""
    if not (root / FIGURES).is_dir():
        return 0
    known = list(targets.values())
    tables = plot.tables(read(root / EVIDENCE, root / FIGURES / plot.REPORTS, known), known)
    for name, content in tables.items():
        if read_bytes(plain(root, f"{FIGURES}/{name}")) != content:
            raise UserError(f"{FIGURES}/{name}: not what the evidence gives: python tools/plot.py")
    return len(tables)
