"""The model's parameters from an evaluation of the same kernel, and its error on cells that it was not fitted to.

    model = calibrated(target, targets, evidence, listing)     # UserError where there is nothing to calibrate on
    for line in predictions(model, target.config): ...

Least squares on the logarithms of latencies, a phase at a time, from several starts: where two terms of a cell change places
the squares have a kink that one descent may not pass. The error band is measured: each workload (a batch size and
a length, as prefill and as policy update) is held out once, and the band holds QUANTILE of the held-out cells.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.core.config import Target
from tools.core.errors import UserError
from tools.evaluator.grids import Cell, cells
from tools.figures import sources
from tools.model.kernels import FULL, KERNELS, Card, Kernel, decode_us, full_us, least_us

Vector = npt.NDArray[np.float64]
QUANTILE = 0.9
START = {"launch_us": 2.0, "softmax_us": 1.0, "item_us": 1.0, "chain_us": 0.3, "values_us": 0.3, "bandwidth_share": 0.8}


@dataclass(frozen=True)
class Phase:
    """What was fitted to the cells of a phase. errors: model / measured of each cell while it was held out."""

    fitted: dict[str, float]
    errors: dict[str, float]
    bounds: frozenset[str]  # what bounds the calibrating cells

    @property
    def band(self) -> float:
        """A factor: QUANTILE of the held-out cells lie within measured / band .. measured * band."""
        apart = sorted(abs(math.log(error)) for error in self.errors.values())
        return math.exp(apart[math.ceil(QUANTILE * len(apart)) - 1])

    @property
    def worst(self) -> float:
        return max(max(error, 1 / error) for error in self.errors.values())


@dataclass(frozen=True)
class Model:
    """A packaged kernel's schedule, and parameters with the report and the card that they come from. earlier: the report is
    of another version of the source."""

    kernel: Kernel
    earlier: bool
    measured: sources.Measured
    phases: dict[str, Phase]

    @property
    def card(self) -> Card:
        return Card.of(self.measured.target.config["target"])


@dataclass(frozen=True)
class Prediction:
    """A cell's latency, microseconds a call. covered: whether a calibrating cell of the phase is bound by the same."""

    cell: Cell
    us: float
    low: float
    high: float
    bound: str
    covered: bool


def calibrated(target: Target, targets: Sequence[Target], evidence: Path, listing: Path) -> Model:
    """The model of a target's packaged kernel, from the first report of that kernel that reports.json names, its own first.

    UserError for a target that is no CUDA device, and where no report of the kernel is there.
    """
    if target.config["target"]["device"] != "cuda":
        raise UserError(f"target {target.name} is no CUDA device: the model is of GPUs")
    source = Path(target.config["kernel"]["source"]).name
    if (kernel := KERNELS.get(source)) is None:
        raise UserError(f"{source}: the model knows the schedules of {', '.join(KERNELS)} only")
    measured, digest = _report(target, source, targets, evidence, listing)
    card, heads = Card.of(measured.target.config["target"]), _heads(measured.target)
    timed = [(cell, modes["cold"].ours.us) for cell, modes in measured.cells]
    phases = {
        phase: _phase(names, [entry for entry in timed if entry[0].phase == phase], _of(phase, kernel, card, heads, 1.0))
        for phase, names in (("full", FULL), ("decode", kernel.decode))
    }
    return Model(kernel, digest != target.config["kernel"]["sha256"], measured, phases)


def predictions(model: Model, config: dict[str, Any]) -> list[Prediction]:
    """Every timed cell of a target's config (its workloads) on the card of its target section."""
    card, found = Card.of(config["target"]), []
    heads = config["workloads"]["heads_q"], config["workloads"]["heads_kv"]
    slower = model.card.clock_mhz / card.clock_mhz
    for cell in cells(config["workloads"]):
        phase = model.phases[cell.phase]
        us, bound = _of(cell.phase, model.kernel, card, heads, slower)(tuple(phase.fitted.values()), cell)
        low = max(us / phase.band, least_us(card, cell, heads))
        found.append(Prediction(cell, us, low, us * phase.band, bound, bound in phase.bounds))
    return found


def _heads(target: Target) -> tuple[int, int]:
    return target.config["workloads"]["heads_q"], target.config["workloads"]["heads_kv"]


def _report(
    target: Target, source: str, targets: Sequence[Target], evidence: Path, listing: Path
) -> tuple[sources.Measured, str]:
    """The report to calibrate on, and the hash of its kernel's source. Reports of other cells than a target's are left out."""
    found, grids = {}, {known.name: known.sections["workloads"] for known in targets}
    for name in (name for names in sources.listing(listing) for name in names):
        report = json.loads((evidence / name).read_bytes())
        own_cells = report["target"]["sections"].get("workloads") == grids.get(report["target"]["name"])
        if own_cells and Path(report["builds"]["candidate"]["source"]).name == source:
            found[name] = str(report["builds"]["candidate"]["source_sha256"])
    if not found:
        raise UserError(f"target {target.name}: no report of {source} on any GPU: there is nothing to calibrate a model on")
    read = [sources.measured(evidence / name, {known.name: known for known in targets}) for name in found]
    chosen = next((entry for entry in read if entry.target.name == target.name), read[0])
    return chosen, found[chosen.name]


Formula = Callable[[Sequence[float], Cell], tuple[float, str]]


def _of(phase: str, kernel: Kernel, card: Card, heads: tuple[int, int], slower: float) -> Formula:
    formula = full_us if phase == "full" else decode_us
    return lambda fitted, cell: formula(kernel, fitted, card, cell, heads, slower)


def _phase(names: Sequence[str], timed: list[tuple[Cell, float]], formula: Formula) -> Phase:
    starts = itertools.product(*((START[name] / 2, START[name] * 2) for name in names))
    fitted = min((fit(formula, timed, start) for start in starts), key=lambda found: _squares(formula, timed, found))
    errors: dict[str, float] = {}
    for key in sorted({_workload(cell) for cell, _ in timed}):
        rest = fit(formula, [entry for entry in timed if _workload(entry[0]) != key], fitted)
        errors |= {cell.name: formula(rest, cell)[0] / us for cell, us in timed if _workload(cell) == key}
    bounds = frozenset(formula(fitted, cell)[1] for cell, _ in timed)
    return Phase(dict(zip(names, fitted, strict=True)), errors, bounds)


def _squares(formula: Formula, timed: Sequence[tuple[Cell, float]], fitted: Sequence[float]) -> float:
    return sum(math.log(formula(fitted, cell)[0] / us) ** 2 for cell, us in timed)


def _workload(cell: Cell) -> tuple[int, int]:
    """Cells that are held out together: a prefill and its policy update differ by one tile."""
    return cell.batch, (cell.keys // 1024) * 1024 or cell.keys


def fit(formula: Formula, timed: Sequence[tuple[Cell, float]], start: Sequence[float]) -> list[float]:
    """Positive parameters that make the squared errors of log latency least, from `start` on (Levenberg-Marquardt)."""
    goal = np.log([us for _, us in timed])

    def errors(logs: Vector) -> Vector:
        values = np.exp(logs).tolist()
        return np.array([math.log(formula(values, cell)[0]) for cell, _ in timed]) - goal

    at, damping = np.log(np.asarray(start, float)), 1e-2
    now = errors(at)
    while damping < 1e8:
        slopes = np.stack([(errors(at + 1e-4 * axis) - now) / 1e-4 for axis in np.eye(len(at))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(at)), -slopes.T @ now)
        step = np.clip(step, -0.3, 0.3)  # a longer one may take a cost to 0, from where no slope leads back
        there = errors(at + step)
        if there @ there < (1 - 1e-9) * (now @ now):
            at, now, damping = at + step, there, damping / 3
        else:
            damping *= 3
    return [float(value) for value in np.exp(at)]
