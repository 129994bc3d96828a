"""What a person sees: progress while an evaluation runs, and a table at its end. Uses rich; knows no verdicts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str, str], None]]:
    """A function (stage, text) that shows what is going on: a live line on a terminal, else one line a stage."""
    seen = ""
    if console.is_terminal:
        with console.status("starting") as status:

            def show(stage: str, text: str) -> None:
                nonlocal seen
                if stage != seen:
                    seen = stage
                    console.print(f"[bold]{stage}[/bold]")
                status.update(escape(f"{stage}: {text}" if text else stage))

            yield show
    else:

        def tell(stage: str, text: str) -> None:
            nonlocal seen
            if stage != seen:
                seen = stage
                console.print(stage, soft_wrap=True, highlight=False)

        yield tell


def _microseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.1f}" if value < 10000 else f"{value:,.0f}"


def _cells(report: dict[str, Any], mode: str) -> Table:
    names = sorted({name for cell in report["timing"]["cells"] for name in cell["modes"][mode].get("baselines", {})})
    table = Table(
        title=f"{mode}: microseconds a call (in brackets: half the width of the median's 95 % interval)",
        title_justify="left",
        caption_justify="left",
    )
    if left_out := sum(cell["modes"][mode]["same_as"] is not None for cell in report["timing"]["cells"]):
        table.caption = f"as cold, and not run apart: {left_out} more cells, where one call's inputs exceed twice the L2"
    table.add_column("cell")
    table.add_column("ours", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("best / ours", justify="right")
    table.add_column("RMS error", justify="right")
    if mode == "cold":
        table.add_column("share of T", justify="right")
    shares = {cell["name"]: cell["share"] for cell in report["objective"]["cells"]}
    for cell in report["timing"]["cells"]:
        record = cell["modes"][mode]
        if record["same_as"]:
            continue
        own = record["kernels"]["candidate"]
        low, high = own["interval_us"]
        row = [cell["name"], f"{_microseconds(own['median_us'])} ({50 * (high - low) / own['median_us']:.1f} %)"]
        row += [_microseconds(found["median_us"]) if (found := record["baselines"].get(name)) else "-" for name in names]
        row += [f"{record['best']['ratio']:.2f}" if record["best"] else "-", f"{own['accuracy']['rms']:.5f}"]
        if mode == "cold":
            row.append(f"{100 * shares[cell['name']]:.1f} %")
        table.add_row(*row)
    return table


def _divergence(record: dict[str, Any]) -> str:
    """What the localiser found, in one line."""
    parts = []
    if stage := record["stage"]:
        tile = f" in the keys {stage['tile'][0]} to {stage['tile'][1] - 1}" if stage["tile"] else ""
        parts.append(f"diverges first in {stage['first'] or 'no stage that was told apart'}{tile}")
    if where := record["where"]:
        place = f"batch {where['batch']}, head {where['head']}, row {where['row']}"
        parts.append(f"{place}: {where['got']} for {where['expected']}")
    if far := record["how_far"]:
        parts.append(f"{far['differing']} of {far['words']} words, up to {far['ulp_max']} units in the last place")
    return "; ".join([*parts, *record["notes"]])


def show(console: Console, report: dict[str, Any]) -> None:
    """The verdict with what it rests on."""
    correctness = report["correctness"]
    if correctness is not None:
        table = Table(title="correctness", title_justify="left")
        for name, side in (
            ("check", "left"),
            ("result", "left"),
            ("cases", "right"),
            ("words", "right"),
            ("differing", "right"),
        ):
            table.add_column(name, justify=side)  # type: ignore[arg-type]
        for check in correctness["checks"]:
            colour = {"passed": "green", "failed": "red", "skipped": "yellow"}[check["status"]]
            table.add_row(
                check["name"],
                f"[{colour}]{check['status']}[/{colour}]",
                str(check["cases"]),
                f"{check['words']:,}",
                f"{check['differing']:,}",
            )
        console.print(table)
        for check in correctness["checks"]:
            for failure in check["failures"][:2]:
                console.print(
                    f"  {check['name']}: {failure['case']}: {failure['what']} {failure.get('first') or ''}",
                    soft_wrap=True,
                    highlight=False,
                    markup=False,
                )
                if "divergence" in failure:
                    console.print(f"    {_divergence(failure['divergence'])}", soft_wrap=True, highlight=False, markup=False)
    if report["timing"] is not None:
        for mode in ("cold", "hot"):
            if any(not cell["modes"].get(mode, {"same_as": "cold"})["same_as"] for cell in report["timing"]["cells"]):
                console.print(_cells(report, mode))
        for mode, phases in report["timing"]["geomeans"].items():
            for phase in ("full", "decode"):
                for name, found in phases.get(phase, {}).items():
                    console.print(
                        f"  {mode} {phase}: geometric mean of {name} / ours {found['ratio']:.3f} over {found['cells']} cells",
                        soft_wrap=True,
                        highlight=False,
                    )
        console.print(f"  T ({report['objective']['kind']}) = {report['objective']['T']:.4f}", soft_wrap=True, highlight=False)
    for name, found in report["baselines"].items():
        if not found["available"]:
            console.print(f"  {name}: unavailable: {found['reason']}", soft_wrap=True, highlight=False, markup=False)
    for measure, state in report["confinement"].get("candidate", {}).items():
        if state != "enforced":
            console.print(f"  confinement: {measure}: {state}", soft_wrap=True, highlight=False, markup=False)
    for note in report["notes"]:
        console.print(f"  note: {note}", soft_wrap=True, highlight=False, markup=False)
    if report["promotion"] is not None:
        console.print(
            f"  promotion: {'yes' if report['promotion']['promoted'] else 'no'}: {report['promotion']['reason']}",
            soft_wrap=True,
            highlight=False,
        )
    colour = "green" if report["status"] == "PASSED" else "red"
    marked = " (compatibility run: its times are proxies)" if report["compatibility"] else ""
    console.print(
        f"[bold {colour}]{report['status']}[/]{marked}" + (f": {escape(report['reason'])}" if report["reason"] else ""),
        soft_wrap=True,
        highlight=False,
    )
