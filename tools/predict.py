"""Predict a kernel's latencies on a card that nobody measured. Predicted, not measured: no figure of it enters a result.

    python tools/predict.py --gpu h20
    python tools/predict.py --gpu h20 --json

A small model (tools/model/kernels.py has its formulas) is fitted to an evaluation of the same kernel on another card and
asked for the target's, of which its config states rates, multiprocessors and clock. Beside each latency stand what bounds it
and a band that was measured on held-out cells of the calibrating card, never on the target; a `*` marks cells bound by
something that bounds no calibrating cell of their phase. A target with an evaluation of its own shows its measured medians,
and how far off the model is for each cell while that is held out. Exit codes: 0, and 2 where there is nothing to predict
from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.core.config import EXPERIMENTAL, Target, load_target, target_names
from tools.core.errors import CommandParser, run_command
from tools.model.calibrate import QUANTILE, Model, calibrated, predictions

TITLE = "predicted, not measured"
EVIDENCE, LISTING = EXPERIMENTAL / "evidence", EXPERIMENTAL / "figures" / "reports.json"


def record(target: Target, model: Model) -> dict[str, Any]:
    """All that is known of the predictions, for --json. Times in microseconds.

    Where the report is the target's own, measured_us, and held_out_ratio: model / measured while the cell is held out.
    """
    known = {cell.name: modes["cold"].ours.us for cell, modes in model.measured.cells}
    own = model.measured.target.name == target.name
    cells = []
    for entry in predictions(model, target.config):
        line = {"name": entry.cell.name, "phase": entry.cell.phase, "bound": entry.bound, "covered": entry.covered}
        line |= {"predicted_us": entry.us, "low_us": entry.low, "high_us": entry.high}
        if own and entry.cell.name in known:
            ratio = model.phases[entry.cell.phase].errors[entry.cell.name]
            line |= {"measured_us": known[entry.cell.name], "held_out_ratio": ratio}
        cells.append(line)
    return {
        "title": TITLE,
        "target": target.name,
        "calibration": {
            "report": model.measured.name,
            "report_sha256": model.measured.sha256,
            "machine": model.measured.machine,
            "same_architecture": _architecture(target) == _architecture(model.measured.target),
            "earlier_source": model.earlier,
        },
        "phases": {
            name: {"fitted": phase.fitted, "quantile": QUANTILE, "band": phase.band, "worst": phase.worst}
            | {"held_out_cells": len(phase.errors)}
            for name, phase in model.phases.items()
        },
        "cells": cells,
    }


def _architecture(target: Target) -> int:
    return int(target.config["target"]["compute_capability"][0])


def lines(found: dict[str, Any]) -> list[str]:
    """The record as text."""
    origin, phases = found["calibration"], found["phases"]
    own = any("measured_us" in cell for cell in found["cells"])
    text = [
        f"{found['target']}: {TITLE}{'; beside it what was measured' if own else ''}",
        f"calibrated on {origin['report']}, {origin['machine']}",
        f"the band holds {100 * QUANTILE:.0f} % of the cells held out there:",
        *(
            f"  {name}: within a factor of {phase['band']:.3f} (worst of {phase['held_out_cells']}: {phase['worst']:.3f})"
            for name, phase in phases.items()
        ),
    ]
    if not origin["same_architecture"]:
        text.append(
            "another architecture than the calibrating card's: costs in cycles are taken over, the band says nothing of it"
        )
    if origin["earlier_source"]:
        text.append("the report is of an earlier version of the source, whose costs are taken over")
    text += [
        "",
        f"{'cell':<22}{'predicted us':>14}{'band, us':>26}  bound by" + ("    measured us, held out / measured" if own else ""),
    ]
    for cell in found["cells"]:
        band = f"{cell['low_us']:,.1f} .. {cell['high_us']:,.1f}"
        line = f"{cell['name']:<22}{cell['predicted_us']:>14,.1f}{band:>26}  {cell['bound']}{'' if cell['covered'] else ' *'}"
        if "measured_us" in cell:
            line = f"{line:<76}{cell['measured_us']:>11,.1f}{cell['held_out_ratio']:>12.3f}"
        text.append(line)
    if any(not cell["covered"] for cell in found["cells"]):
        text.append("* bounds no calibrating cell of this phase: the band was not measured for it")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", metavar="TARGET", required=True, help="a CUDA target, a folder of experimental/")
    parser.add_argument("--json", action="store_true", help="print a JSON object and nothing else")
    options = parser.parse_args(arguments)
    target = load_target(options.gpu)
    model = calibrated(target, [load_target(name) for name in target_names()], EVIDENCE, LISTING)
    found = record(target, model)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
