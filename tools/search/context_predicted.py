"""The section of the context that a target without measurements has: what a model predicts for its packaged kernel.

Shown until the run's root has an audit, and only where no report of the target's own device is drawn. Marked as predicted
in its title and its first line; nothing of it is written into a record.
"""

from __future__ import annotations

from tools.core.config import load_target, target_names
from tools.core.errors import UserError
from tools.figures import sources
from tools.model.calibrate import QUANTILE, Model, calibrated, predictions
from tools.predict import EVIDENCE, LISTING
from tools.search.budget import Section
from tools.search.context_text import figure, row, table
from tools.search.context_view import View


def predicted_section(view: View) -> Section:
    """One row for each kind of cell and batch size; empty where something was measured or nothing can be predicted."""
    section = Section("Predicted, not measured", unit="rows")
    name = str(view.config["target"]["name"])
    if "evidence" in view.withheld or view.incumbent is not None or name not in target_names():
        return section
    if "multiprocessors" not in view.config["target"]:  # the CPU
        return section
    try:
        targets = [load_target(known) for known in target_names()]
        if any(entry.target.name == name for entry in sources.read(EVIDENCE, LISTING, targets)):
            return section
        model = calibrated(load_target(name), targets, EVIDENCE, LISTING)
        section.hint = f"python tools/predict.py --gpu {name}"
        _fill(section, view, model)
    except UserError:  # no report of this kernel, or none that can be read: there is nothing to say
        return Section("Predicted, not measured")
    return section


def _fill(section: Section, view: View, model: Model) -> None:
    found = predictions(model, view.config)
    bands = ", ".join(f"{name} {100 * (phase.band - 1):.1f} %" for name, phase in model.phases.items())
    section.add(
        f"By a model, for the packaged kernel; the root's audit replaces it. Calibrated on {model.measured.name} "
        f"({model.measured.machine}); {100 * QUANTILE:.0f} % of the cells held out there lie within: {bands}. "
        "On this device the error is unknown; * marks a bound that no calibrating cell has.\n",
        60,
    )
    groups: dict[str, list[str]] = {}
    for entry in found:
        group, _, length = entry.cell.name.rpartition(" ")
        mark = "" if entry.covered else " *"
        groups.setdefault(group, []).append(f"{length} {figure(entry.us)} {entry.bound}{mark}")
    first, *rest = [row([group, "; ".join(texts)]) for group, texts in groups.items()]
    section.add(f"{table(['cells', 'predicted us, bound by'], 'll')}\n{first}", 59)
    section.add_rows(rest, 58, 30)
