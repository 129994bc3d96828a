"""Take a report of evaluate.py into what is published, so that all of it still holds.

    python tools/evidence.py runs/a100-20261201T120000Z.json     # `make gpu-check` does this after a pass

The report must be a full pass on the target's own hardware, of the sources that are packaged here. It is copied to
experimental/evidence/ and named in experimental/figures/reports.json: as drawn where its target and machine have no report
that is, and the matplotlib that draws the figures is installed; as left out, with the reason, otherwise. Then figures,
archive.json and validation.json are written, and everything is verified. Exit codes: 0, 2 (one line says why; a report that
is not taken changes nothing).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import plot
from tools.archive import evaluation, targets
from tools.archive.evidence import EVIDENCE
from tools.archive.figures import FIGURES
from tools.archive.verify import Verification, update
from tools.core.config import Target
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import REPO_ROOT, read_bytes, show_path, write_atomic, write_new
from tools.evaluator import report as reports
from tools.figures import sources


def take(root: Path, path: Path) -> list[str]:
    """Copy, name, draw, list, verify; returns what to tell, a line each. UserError, and nothing changed, where the report
    cannot be taken or what is published did not hold before."""
    known = targets.load(root)
    report = reports.read(path)
    _refuse_unfit(path, report, known)
    listed, folder = root / FIGURES / plot.REPORTS, root / EVIDENCE
    if (folder / path.name).exists():
        raise UserError(f"{EVIDENCE}/{path.name}: is there already: the report's file needs another name")
    before = sources.read(folder, listed, list(known.values()))
    reason = _why_left_out(report, before)
    drawn, left_out = sources.listing(listed)
    naming = {"drawn": drawn, "left_out": {**left_out, path.name: reason}} if reason else {
        "drawn": [*drawn, path.name], "left_out": left_out
    }  # fmt: skip
    write_new(folder / path.name, read_bytes(path))
    write_atomic(listed, json.dumps(naming, indent=1, ensure_ascii=False) + "\n")
    said = [f"taken     {EVIDENCE}/{path.name}: {f'left out of the figures: {reason}' if reason else 'drawn'}"]
    if not reason:
        said += [f"written   {FIGURES}/{name}" for name in plot.write(root / FIGURES, folder, list(known.values()))]
    said += [f"written   {name}" for name in update(root)]
    for _, part in Verification(root).parts():
        part()
    said.append("holds     all that is published (tools/verify_archive.py)")
    target = report["target"]["name"]
    if not reason and all(entry.target.name != target for entry in before):
        said.append(f"note      README.md says that {target} is not measured: its sentences are not made from evidence")
    return said


def _refuse_unfit(path: Path, report: dict[str, Any], known: dict[str, Target]) -> None:
    """UserError where a report is no evidence of a packaged target."""
    if why := sources.problem(report, known):
        raise UserError(f"{show_path(path)}: not taken: {why}")
    target = known[report["target"]["name"]]
    evaluation.check(show_path(path), report, target)
    built = report["builds"]["candidate"]
    if sorted(built["files"].values()) != sorted(target.kernel_files().values()):
        raise UserError(f"{show_path(path)}: not taken: {built['source']} is not the kernel that {target.name} packages here")


def _why_left_out(report: dict[str, Any], before: list[sources.Measured]) -> str | None:
    """Why the figures do not show a report, or None."""
    place = report["target"]["name"], sources.machine(report)
    if drawn := [entry.name for entry in before if (entry.target.name, entry.machine) == place]:
        return f"measured again: {drawn[0]} is drawn"
    if plot.other_matplotlib():
        return "its figures are not drawn yet: that takes the matplotlib that drew the others"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="a report of evaluate.py")
    print("\n".join(take(REPO_ROOT, parser.parse_args(arguments).report)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
