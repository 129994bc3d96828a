"""Verify what is published, without a GPU: evidence, searches, the archive's list, and the tables of the documents.

    python tools/verify_archive.py                 # check everything; exit 1 at the first thing that does not hold
    python tools/verify_archive.py --update        # after new evidence or a new search: write archive.json, validation.json

Every hash, schema and reference is checked, and every figure computed again from raw samples: medians, intervals, ratios,
geometric means, T, promotions. Hashes find accidents and single edits. They are no signature: whoever rewrites samples,
figures and all hashes together makes another archive that holds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.archive.verify import Verification, update
from tools.core.errors import CommandParser, UserError, run_command
from tools.core.files import REPO_ROOT


def verified(root: Path, show: bool) -> dict[str, Any]:
    """Run all parts until one fails. show: print a line a part. Returns counts and seconds of each, and the problem."""
    start = time.monotonic()
    parts: list[dict[str, Any]] = []
    problem = None
    for name, part in Verification(root).parts():
        began = time.monotonic()
        try:
            counts = part()
        except UserError as found:
            problem = {"part": name, "message": str(found)}
            break
        parts.append({"part": name, "counts": counts, "seconds": round(time.monotonic() - began, 3)})
        if show:
            said = ", ".join(f"{count:,} {what}" for what, count in counts.items())
            print(f"{name:<10}{said} ({parts[-1]['seconds']:.1f} s)")
    return {"holds": problem is None, "problem": problem, "parts": parts, "seconds": round(time.monotonic() - start, 3)}


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=REPO_ROOT, help="a copy of README.md and experimental/ to verify instead")
    parser.add_argument("--update", action="store_true", help="write archive.json and validation.json from what lies there")
    parser.add_argument("--json", action="store_true", help="print counts, seconds and the problem as JSON")
    options = parser.parse_args(arguments)
    root: Path = options.root.resolve()
    if not (root / "experimental").is_dir():
        raise UserError(f"--root {options.root}: there is no folder experimental")
    if options.update:
        if options.json:
            raise UserError("--json: goes with a verification, not with --update")
        changed = update(root)
        print("\n".join(f"written   {name}" for name in changed) or "nothing to write: all is as it should be")
        return 0
    found = verified(root, show=not options.json)
    if options.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    elif found["problem"]:
        print(f"error: {found['problem']['message']}", file=sys.stderr)
    else:
        print(f"holds     all of it, in {found['seconds']:.1f} s")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
