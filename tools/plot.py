"""Draw the figures of the documentation from recorded evidence.

    python tools/plot.py            # write experimental/figures/: SVG, PDF and the CSV files behind them; and assets/
    python tools/plot.py --check    # write nothing; name the first file that is not what the evidence gives, exit 1

Which reports are drawn stands in experimental/figures/reports.json (tools/figures/sources.py has the rule). A target
without one shows "not measured". The same evidence gives the same bytes, where the installed matplotlib is the one that
drew the pictures (tools/figures/style.py). With another, or none, --check still compares the CSV files (exit 1 where one
differs), and then ends with `error: pictures not compared` and exit 2: a 0 means that all was compared. Without matplotlib
tools/verify_archive.py checks the data. assets/ holds the drawings that show no data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.config import EXPERIMENTAL, Target, load_target, target_names
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import REPO_ROOT, read_bytes, show_path, write_atomic
from tools.figures import data
from tools.figures.sources import Measured, read

if TYPE_CHECKING:
    from tools.figures.style import Sheet

EVIDENCE, FIGURES = EXPERIMENTAL / "evidence", EXPERIMENTAL / "figures"
REPORTS, PUBLISHED = "reports.json", "published_reference.csv"  # what a figure is made from; all else there is made
MADE = ("csv", "svg", "pdf")
ASSETS = REPO_ROOT / "assets"


def tables(measured: Sequence[Measured], targets: Sequence[Target]) -> dict[str, bytes]:
    """File name -> content of the CSV files."""
    return {
        "attention_performance.csv": data.bars_csv(measured, targets).encode(),
        "attention_performance_cells.csv": data.cells_csv(measured).encode(),
    }


def sheets(measured: Sequence[Measured], targets: Sequence[Target], published: Path) -> Iterator[tuple[str, Sheet]]:
    """(name, figure) of each picture, drawn when it is asked for. Needs matplotlib, and style.settings() around it."""
    from tools.figures import cells, performance, published_reference, roofline

    yield "performance", performance.draw(measured, targets)
    for target in targets:
        own = [entry for entry in measured if entry.target.name == target.name]
        yield f"cells_{target.name}", cells.draw(target, own)
        yield f"roofline_{target.name}", roofline.draw(target, own)
    yield "published_reference", published_reference.draw(data.published(published), measured)


def pictures(
    measured: Sequence[Measured], targets: Sequence[Target], published: Path, kinds: Sequence[str] = ("svg", "pdf")
) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of each picture, drawn when it is asked for. Needs matplotlib."""
    from tools.figures import style

    with style.settings():
        for name, sheet in sheets(measured, targets, published):
            for kind in kinds:
                yield f"{name}.{kind}", style.picture(sheet, kind)


def assets() -> dict[str, bytes]:
    """File name -> content of the drawings that show no data. Needs matplotlib."""
    from tools.figures import drawings, style

    with style.settings():
        sheets = drawings.drawings()
        return {f"{name}.{kind}": style.picture(sheet, kind) for name, sheet in sheets for kind in ("svg", "pdf", "png")}


def other_matplotlib() -> str | None:
    """Why pictures drawn here would differ from the kept ones, or None."""
    try:
        import matplotlib

        from tools.figures.style import DRAWN_WITH
    except ModuleNotFoundError:
        return "matplotlib is not installed: pip install -c constraints.txt '.[figures]'"
    if matplotlib.__version__ != DRAWN_WITH:
        return f"matplotlib {matplotlib.__version__} is here, {DRAWN_WITH} drew them"
    return None


def names(targets: Sequence[Target]) -> list[str]:
    """Every file that is made, in the order in which they are checked."""
    each = [f"{kind}_{target.name}" for target in targets for kind in ("cells", "roofline")]
    drawn = [f"{name}.{kind}" for name in ("performance", *each, "published_reference") for kind in ("svg", "pdf")]
    return ["attention_performance.csv", "attention_performance_cells.csv", *drawn]


def check(folder: Path, evidence: Path, targets: Sequence[Target]) -> str | None:
    """The first file of the folder that is not what the evidence gives, with what is wrong; None where all are.

    Without the matplotlib that drew the pictures only their presence is checked.
    """
    measured = read(evidence, folder / REPORTS, targets)
    known = names(targets)
    for name in known:
        if not (folder / name).is_file():
            return f"{show_path(folder / name)}: missing"
    for path in sorted(folder.iterdir()):
        if path.name not in (*known, REPORTS, PUBLISHED):
            return f"{show_path(path)}: nothing makes this file"
    data.published(folder / PUBLISHED)
    drawn = pictures(measured, targets, folder / PUBLISHED) if other_matplotlib() is None else ()
    for name, raw in chain(tables(measured, targets).items(), drawn):
        if read_bytes(folder / name) != raw:
            return f"{show_path(folder / name)}: differs from what the evidence gives"
    return None


def check_assets(folder: Path) -> str | None:
    """The first drawing that is not what the program gives; the bytes of a PNG are those of the machine's zlib."""
    fresh = assets() if other_matplotlib() is None else {}
    for name, raw in fresh.items():
        if not (folder / name).is_file():
            return f"{show_path(folder / name)}: missing"
        if not name.endswith(".png") and read_bytes(folder / name) != raw:
            return f"{show_path(folder / name)}: differs from what the program draws"
    return None


def write(folder: Path, evidence: Path, targets: Sequence[Target]) -> list[str]:
    """Write what differs; returns the names. Nothing is written where a report is refused."""
    measured = read(evidence, folder / REPORTS, targets)
    if why := other_matplotlib():
        raise UserError(f"pictures cannot be drawn as they are kept: {why}")
    fresh = {**tables(measured, targets), **dict(pictures(measured, targets, folder / PUBLISHED))}
    changed = [name for name, raw in fresh.items() if not (folder / name).is_file() or read_bytes(folder / name) != raw]
    for name in changed:
        write_atomic(folder / name, fresh[name])
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a file differs, 2 where pictures cannot be compared"
    )
    options = parser.parse_args(arguments)
    targets = [load_target(name) for name in target_names()]
    if not options.check:
        for name in write(FIGURES, EVIDENCE, targets):
            print(f"{show_path(FIGURES / name)}: written")
        for name, raw in assets().items():
            if not (ASSETS / name).is_file() or read_bytes(ASSETS / name) != raw:
                write_atomic(ASSETS / name, raw)
                print(f"{show_path(ASSETS / name)}: written")
        return 0
    if problem := check(FIGURES, EVIDENCE, targets) or check_assets(ASSETS):
        print(problem)
        return 1
    if why := other_matplotlib():
        raise UserError(f"pictures not compared, only the CSV files, which are what the evidence gives: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
