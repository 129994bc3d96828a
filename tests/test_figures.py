"""The figures are their evidence: data recomputed here from the raw samples, tampering found, unfit reports refused."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import plot
from tools.core.config import Target, load_target, target_names
from tools.core.errors import UserError, run_command
from tools.evaluator import report as reports
from tools.figures import data, sources

pytest.importorskip("matplotlib", reason="the extra `figures` is not installed")
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tools.figures import cells, drawings, roofline, style

H200 = next(name for name in sources.listing(plot.FIGURES / plot.REPORTS)[0] if name.startswith("h200-"))
TARGETS = [load_target(name) for name in target_names()]


@pytest.fixture(scope="module")
def measured() -> list[sources.Measured]:
    return sources.read(plot.EVIDENCE, plot.FIGURES / plot.REPORTS, TARGETS)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder `evidence` with one good report, and `figures` that draw it."""
    (tmp_path / "evidence").mkdir()
    (tmp_path / "figures").mkdir()
    shutil.copy(plot.EVIDENCE / H200, tmp_path / "evidence")
    shutil.copy(plot.FIGURES / plot.PUBLISHED, tmp_path / "figures")
    name_reports(tmp_path, [H200])
    return tmp_path


def name_reports(lab: Path, drawn: list[str], left_out: dict[str, str] | None = None) -> None:
    (lab / "figures" / plot.REPORTS).write_text(json.dumps({"drawn": drawn, "left_out": left_out or {}}))


def read(lab: Path, targets: list[Target] | None = None) -> list[sources.Measured]:
    return sources.read(lab / "evidence", lab / "figures" / plot.REPORTS, targets or TARGETS)


def change(path: Path, edit: Callable[[dict[str, Any]], object], *, rehash: bool = True) -> None:
    """Edit a report and give it the hash of its new content, as whoever forges one would."""
    report = json.loads(path.read_text())
    edit(report)
    if rehash:
        report["hashes"]["report"] = reports.own_hash(report)
    path.write_text(json.dumps(report))


def rows(text: bytes | str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.decode() if isinstance(text, bytes) else text)))


# ---------------------------------------------------------------- the kept files


def test_the_kept_figures_are_their_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    if why := plot.other_matplotlib():
        with pytest.raises(UserError, match=f"pictures not compared, .*{re.escape(why)}"):
            plot.main(["--check"])
    else:
        assert plot.main(["--check"]) == 0, capsys.readouterr().out
    for path in [*plot.FIGURES.glob("*.svg"), *plot.FIGURES.glob("*.pdf")]:
        assert not re.search(rb"[dD]ate>|/CreationDate|/ModDate", path.read_bytes()), path


def test_the_drawing_matplotlib_is_the_pinned_one(repo: Path) -> None:
    assert f"matplotlib=={style.DRAWN_WITH};" in (repo / "constraints.txt").read_text()


def test_the_front_page_shows_the_bars_and_says_what_they_are(repo: Path, measured: list[sources.Measured]) -> None:
    found = re.findall(r'<img src="([^"]+)"[^>]* alt="([^"]+)"', (repo / "README.md").read_text())
    alt = dict(found)["experimental/figures/performance.svg"]
    assert "geometric mean of library time / our time" in alt
    assert all(entry.machine in alt for entry in measured)
    assert all(target.name in alt.lower() for target in data.unmeasured(measured, TARGETS))


def test_every_bar_from_the_raw_samples() -> None:
    """Each line of attention_performance.csv, computed from the report with the standard library alone."""
    kinds = {
        "prefill, batch 1": ("prefill", 1),
        "prefill": ("prefill", None),
        "policy update": ("update", None),
        "decode": ("decode", None),
    }
    lines = [line for line in rows((plot.FIGURES / "attention_performance.csv").read_text()) if line["status"] == "measured"]
    assert len(lines) == len({(line["report"], line["group"], line["mode"], line["library"]) for line in lines})
    assert {(line["report"], line["group"], line["mode"]) for line in lines} == {
        (name, group, mode)
        for name in sources.listing(plot.FIGURES / plot.REPORTS)[0]
        for group in kinds
        for mode in ("cold", "hot")
    }
    loaded = {name: json.loads((plot.EVIDENCE / name).read_text()) for name in {line["report"] for line in lines}}
    for line in lines:
        kind, batch = kinds[line["group"]]
        ratios = []
        for cell in loaded[line["report"]]["timing"]["cells"]:
            if cell["kind"] != kind or batch not in (None, cell["batch"]):
                continue
            mode = cell["modes"][line["mode"]]
            mode = cell["modes"][mode["same_as"]] if mode["same_as"] else mode
            times = {name: statistics.median(entry["samples_us"]) for name, entry in mode["baselines"].items()}
            theirs = min(times.values()) if line["library"] == "fastest" else times[line["library"]]
            ratios.append(theirs / statistics.median(mode["kernels"]["candidate"]["samples_us"]))
        assert len(ratios) == int(line["cells"]) > 0
        assert math.isclose(statistics.geometric_mean(ratios), float(line["ratio"]), rel_tol=1e-5), line
    counts = {(line["target"], line["group"]): int(line["cells"]) for line in lines}
    assert [counts["h200", group] for group in kinds] == [4, 16, 16, 16]


def test_every_cell_stands_in_the_csv_once(measured: list[sources.Measured]) -> None:
    lines = rows((plot.FIGURES / "attention_performance_cells.csv").read_text())
    keys = [(line["report"], line["cell"], line["mode"], line["library"]) for line in lines]
    assert len(keys) == len(set(keys))
    for entry in measured:
        report = json.loads((plot.EVIDENCE / entry.name).read_text())
        want = {
            (entry.name, cell["name"], mode, library)
            for cell in report["timing"]["cells"]
            for mode in ("cold", "hot")
            for library in cell["modes"]["cold"]["baselines"]
        }
        assert want == {key for key in keys if key[0] == entry.name}
    for line in lines:
        assert float(line["our_low_us"]) <= float(line["our_us"]) <= float(line["our_high_us"])
        assert float(line["library_low_us"]) <= float(line["library_us"]) <= float(line["library_high_us"])
        assert math.isclose(float(line["library_us"]) / float(line["our_us"]), float(line["ratio"]), rel_tol=2e-5)
        assert int(line["our_calls_per_sample"]) >= 1


def test_the_roofline_counts_operations_and_bytes(measured: list[sources.Measured]) -> None:
    """Prefill of one row of 1,024 queries, 32 query and 8 KV heads of 128, by hand; every point lies under the roof."""
    entry = next(entry for entry in measured if entry.name == H200)
    cell, modes = next((cell, modes) for cell, modes in entry.cells if cell.name == "prefill B1 S1024")
    flop = 4 * 128 * 32 * 1024 * 1025 / 2
    moved = 2 * 128 * 1024 * (32 + 8 + 8 + 32)
    x, y = roofline.point(cell, modes["cold"].ours, (32, 8))
    assert math.isclose(x, flop / moved) and math.isclose(y, flop / modes["cold"].ours.us * 1e6 / 1e12)
    peaks = entry.target.config["target"]
    for cell, modes in entry.cells:
        for time in (modes["cold"].ours, *modes["cold"].libraries.values()):
            x, y = roofline.point(cell, time, (32, 8))
            assert y < min(peaks["peak_tflops"], x * peaks["peak_bandwidth_gbps"] / 1e3), cell.name


# ---------------------------------------------------------------- legibility


def words_of(sheet: style.Sheet) -> list[tuple[str, Any]]:
    """(text, its box in pixels) of all words that a figure shows."""
    canvas = FigureCanvasAgg(sheet.figure)
    canvas.draw()
    found = []
    for axes in sheet.figure.axes:
        shown = [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            shown += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        hidden = not axes.axison
        found += [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for text in shown
            if text.get_text() and text.get_visible() and not (hidden and text not in axes.texts)
        ]
    return found


def drawn_sheets(measured: list[sources.Measured]) -> list[tuple[str, style.Sheet]]:
    with style.settings():
        return [*plot.sheets(measured, TARGETS, plot.FIGURES / plot.PUBLISHED), *drawings.drawings()]


def test_no_word_is_cut_off_or_covered_by_another(measured: list[sources.Measured]) -> None:
    """In the figures of all targets and in the drawings: with the margin that each sheet keeps, and half a point apart."""
    for name, sheet in drawn_sheets(measured):
        with style.settings():
            found = words_of(sheet)
        assert len(found) > 1, name
        unit = sheet.figure.dpi / 72
        for text, box in found:
            inside = box.x0 >= 12 * unit and box.x1 <= (sheet.width - 12) * unit
            assert inside and box.y0 >= 4 * unit and box.y1 <= (sheet.height - 4) * unit, f"{name}: {text!r} is cut off"
        for (one, first), (other, second) in itertools.combinations(found, 2):
            apart = (
                min(first.x1, second.x1) - max(first.x0, second.x0),
                min(first.y1, second.y1) - max(first.y0, second.y0),
            )
            assert min(apart) < unit, f"{name}: {one!r} and {other!r} overlap"


def test_a_ratio_is_legible_on_its_colour() -> None:
    """The ink with the most contrast, nowhere less than 3.9 (3 is what large type needs, 4.5 small type)."""
    for step in range(-300, 301):
        field, ink = style.ratio_colours(2 ** (step / 100))
        least = max(style._contrast(one, field) for one in ("#ffffff", style.INK))
        assert style._contrast(ink, field) == least >= 3.9, step


def test_what_is_hot_as_cold_is_said(measured: list[sources.Measured]) -> None:
    """Every figure with hot times says what it shows where a cell was not timed hot."""
    for name, sheet in drawn_sheets(measured):
        said = " ".join(text for text, _ in words_of(sheet))
        if re.search(r"\bhot\b", said) and not name.startswith("roofline"):
            assert re.search(r"hot is as cold|hot time is its cold one", said), name


# ---------------------------------------------------------------- tampering


def test_tampering_is_found(tmp_path: Path) -> None:
    """An edited CSV, an edited or exchanged picture, a missing and an extra file: the first is named."""
    folder = tmp_path / "figures"
    shutil.copytree(plot.FIGURES, folder)

    def verdict(name: str, raw: bytes | None) -> str | None:
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).unlink() if raw is None else (folder / name).write_bytes(raw)
        try:
            return plot.check(folder, plot.EVIDENCE, TARGETS)
        finally:
            (folder / name).unlink(missing_ok=True) if before is None else (folder / name).write_bytes(before)

    for name in ("attention_performance.csv", "attention_performance_cells.csv"):
        text = (folder / name).read_text()
        *_, last = re.finditer(r",\d+\.(\d)", text)
        edited = text[: last.start(1)] + str((int(last[1]) + 1) % 10) + text[last.end(1) :]
        assert (found := verdict(name, edited.encode())) and name in found and "differs" in found
    assert (found := verdict("cells_h20.svg", None)) and "cells_h20.svg: missing" in found
    assert (found := verdict("old.svg", b"<svg/>")) and "old.svg: nothing makes" in found
    if plot.other_matplotlib() is None:
        svg = (folder / "performance.svg").read_bytes()
        number = re.search(rb"L (223\.\d+|[23]\d\d\.\d+) 1\d\d", svg)
        assert number
        moved = svg.replace(number[1], b"400.000000", 1)
        assert (found := verdict("performance.svg", moved)) and "performance.svg: differs" in found


def test_the_users_settings_of_matplotlib_change_nothing() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    target = next(target for target in TARGETS if target.name == "h20")

    def drawn() -> bytes:
        return dict(plot.pictures([], [target], plot.FIGURES / plot.PUBLISHED, ["svg"]))["roofline_h20.svg"]

    plain = drawn()
    with matplotlib.rc_context({"font.size": 20.0, "axes.labelpad": 30.0, "svg.fonttype": "none", "font.family": ["serif"]}):
        assert drawn() == plain


def test_another_matplotlib_writes_nothing(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "DRAWN_WITH", "0.0.1")
    with pytest.raises(UserError, match=r"0\.0\.1 drew them"):
        plot.write(lab / "figures", lab / "evidence", TARGETS)
    assert sorted(path.name for path in (lab / "figures").iterdir()) == [plot.PUBLISHED, plot.REPORTS]


@pytest.mark.parametrize("installed", ["none", "another"])
def test_a_check_that_compares_no_pictures_says_so_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: str
) -> None:
    """A file that differs is still named first."""
    if installed == "none":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        monkeypatch.setattr(style, "DRAWN_WITH", "0.0.1")
    assert run_command(lambda: plot.main(["--check"])) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: pictures not compared, only the CSV files") and said.err.count("\n") == 1
    assert {"none": "pip install", "another": "0.0.1 drew them"}[installed] in said.err and not said.out
    shutil.copytree(plot.FIGURES, tmp_path / "figures")
    with (tmp_path / "figures" / "attention_performance.csv").open("a") as stream:
        stream.write("more\n")
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    assert run_command(lambda: plot.main(["--check"])) == 1
    said = capsys.readouterr()
    assert "attention_performance.csv: differs" in said.out and not said.err


# ---------------------------------------------------------------- refusals


def cell(report: dict[str, Any], name: str = "decode B4 L1024") -> dict[str, Any]:
    found: dict[str, Any] = next(cell for cell in report["timing"]["cells"] if cell["name"] == name)
    return found


def cold(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = cell(report)["modes"]["cold"]
    return found


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r["timing"]["cells"].remove(cell(r)), "no cell 'decode B4 L1024'"),
        (lambda r: r["timing"]["cells"].append(cell(r)), "a cell stands there twice"),
        (lambda r: cell(r).update(name="decode B4 L2048"), "no cell 'decode B4 L1024'"),
        (lambda r: cell(r).update(keys=2048), "not the workload's"),
        (lambda r: cell(r)["modes"].pop("hot"), "no hot times"),
        (lambda r: cold(r)["kernels"].pop("candidate"), "no times of the candidate"),
        (lambda r: cold(r)["kernels"]["candidate"].update(median_us=1.0), "decode B4 L1024: cold: candidate: the median"),
        (lambda r: cold(r)["baselines"]["fa3"].update(samples_us=[1.0] * 15), "cold: fa3: the median of the samples is 1.0"),
        (lambda r: r.update(compatibility=True), "compatibility"),
        (lambda r: r["environment"]["gpu"].update(name="NVIDIA H100"), "'NVIDIA H100' is none of this target's"),
        (lambda r: r["environment"].update(gpu=None), "environment.gpu.name: None"),
        (lambda r: r["run"].update(cases="quick"), "not a full evaluation"),
        (lambda r: r["run"].update(only=["tails"]), "not a full evaluation"),
        (lambda r: r["run"].update(guards_off=["clock"]), "run.guards_off: clock"),
        (lambda r: r.update(status="INCOMPLETE", timing=None), "status: INCOMPLETE"),
        (lambda r: r["target"].update(name="b300"), "'b300' is none of"),
        (lambda r: r["target"]["sections"].update(workloads="0" * 64), "not the workloads of"),
    ],
)  # fmt: skip
def test_unfit_reports_are_refused(lab: Path, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    change(lab / "evidence" / H200, edit)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        read(lab)
    assert H200 in str(caught.value) and "\n" not in str(caught.value)


def test_nan_and_broken_files_are_refused(lab: Path) -> None:
    path = lab / "evidence" / H200
    good = path.read_text()
    for word in ("NaN", "Infinity", "-Infinity"):
        path.write_text(re.sub(r'("median_us": )[\d.]+', rf"\g<1>{word}", good, count=1))
        with pytest.raises(UserError, match=f"{word} is no number"):
            read(lab)
    path.write_text(good[:-200])
    with pytest.raises(UserError, match="not JSON"):
        read(lab)
    path.write_text(good)
    change(path, lambda r: r["run"].update(seconds=1.0), rehash=False)
    with pytest.raises(UserError, match="not what was written"):
        read(lab)


def more_evidence(lab: Path) -> None:
    """The same evaluation again, a compatibility run, and a record that is no report."""
    for name in ("again.json", "proxy.json"):
        shutil.copy(lab / "evidence" / H200, lab / "evidence" / name)
    change(lab / "evidence" / "proxy.json", lambda r: r.update(compatibility=True))
    (lab / "evidence" / "mutation.json").write_text('{"kind": "mutation", "version": 1}')


def test_other_records_and_compatibility_runs_need_no_name(lab: Path) -> None:
    more_evidence(lab)
    name_reports(lab, [H200], {"again.json": "x"})
    assert [entry.name for entry in read(lab)] == [H200]


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ({"drawn": ["proxy.json"], "left_out": {H200: "x", "again.json": "x"}}, "compatibility"),
        ({"drawn": ["missing.json"], "left_out": {}}, "missing.json: no such report"),
        ({"drawn": [H200, H200], "left_out": {}}, "named twice"),
        ({"drawn": ["../" + H200], "left_out": {}}, "no file name"),
        ({"drawn": [H200, "again.json"], "left_out": {}}, "of one target and machine"),
        ({"drawn": [H200], "left_out": {}}, "again.json: a full pass that"),
        ({"drawn": H200, "left_out": {}}, "drawn: a list"),
    ],
)  # fmt: skip
def test_the_list_of_reports_is_checked(lab: Path, listing: object, words: str) -> None:
    more_evidence(lab)
    (lab / "figures" / plot.REPORTS).write_text(json.dumps(listing))
    with pytest.raises(UserError, match=re.escape(words)):
        read(lab)


def test_a_refused_report_leaves_the_figures_alone(lab: Path) -> None:
    change(lab / "evidence" / H200, lambda r: r.update(compatibility=True))
    with pytest.raises(UserError, match="compatibility"):
        plot.write(lab / "figures", lab / "evidence", TARGETS)
    assert sorted(path.name for path in (lab / "figures").iterdir()) == [plot.PUBLISHED, plot.REPORTS]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.split("\n", 1)[1], "line 1: no comment"),
        (lambda t: t.replace("A100,prefill,1,1024", "A100,prefill,one,1024"), "line 3"),
        (lambda t: t.replace("A100,prefill,1,1024,0.09", "A100,prefill,1,1024,0.05"), "line 3: ratio"),
        (lambda t: t.replace("A100,prefill,1,1024,", "A100,pad,1,1024,"), "line 3: 'pad'"),
        (lambda t: t.replace("0.8499782692040171", "nan"), "line 3: ratio nan"),
    ],
)  # fmt: skip
def test_the_published_figures_are_checked(lab: Path, edit: Callable[[str], str], words: str) -> None:
    path = lab / "figures" / plot.PUBLISHED
    assert len(data.published(path)) == 60
    path.write_text(edit(path.read_text()))
    with pytest.raises(UserError, match=re.escape(words)):
        data.published(path)


def test_an_edited_or_missing_drawing_is_found(tmp_path: Path) -> None:
    if why := plot.other_matplotlib():
        pytest.skip(why)
    folder = tmp_path / "assets"
    shutil.copytree(plot.ASSETS, folder)
    assert plot.check_assets(folder) is None
    (folder / "logo.png").unlink()
    assert "logo.png: missing" in str(plot.check_assets(folder))
    (folder / "logo.png").write_bytes(b"any")
    (folder / "workflow.svg").write_bytes((folder / "search.svg").read_bytes())
    assert "workflow.svg: differs" in str(plot.check_assets(folder))


# ---------------------------------------------------------------- what was not measured


def test_a_target_without_evidence_is_not_measured(lab: Path, repo: Path) -> None:
    """A made-up target: said in every figure and in the CSV, with no bar and no point."""
    folder = lab / "b300"
    folder.mkdir()
    text = (repo / "experimental" / "a100" / "config.yaml").read_text()
    text = text.replace("../cuda.yaml", str(repo / "experimental" / "cuda.yaml")).replace("name: a100", "name: b300")
    (folder / "config.yaml").write_text(text)
    shutil.copytree(repo / "experimental" / "common", folder / "common")
    made_up = load_target(config=folder / "config.yaml")
    targets = [made_up, next(target for target in TARGETS if target.name == "h200")]
    measured = read(lab, targets)
    line = next(line for line in rows(data.bars_csv(measured, targets)) if line["target"] == "b300")
    assert line["status"] == "not measured" and not line["ratio"]
    drawn = dict(plot.pictures(measured, targets, lab / "figures" / plot.PUBLISHED, ["svg"]))
    said = {name: raw.count(b"<!-- not measured") for name, raw in drawn.items()}
    assert said["performance.svg"] == said["cells_b300.svg"] == said["roofline_b300.svg"] == 1
    assert said["cells_h200.svg"] == said["roofline_h200.svg"] == 0
    _, alone = next(plot.pictures([], [made_up], lab / "figures" / plot.PUBLISHED, ["svg"]))
    for raw in (alone, drawn["cells_b300.svg"]):  # no bar, no field
        assert b"<!-- not measured" in raw
        assert style.SLOWER.encode() not in raw and style.FASTER.encode() not in raw


def test_a_library_missing_in_a_cell_has_no_bar(lab: Path, measured: list[sources.Measured]) -> None:
    """A mean over fewer cells is another figure; the other libraries keep theirs, and the field stays empty."""
    change(lab / "evidence" / H200, lambda r: cold(r)["baselines"].pop("fa3"))
    (entry,) = read(lab)
    found = {(bar.group, bar.mode, bar.library) for bar in data.bars(entry)}
    assert ("decode", "cold", "fa3") not in found and ("decode", "cold", "flashinfer") in found
    assert ("decode", "cold", "fastest") in found and ("prefill", "cold", "fa3") in found
    whole = next(one for one in measured if one.name == H200)
    before, after = (style.picture(cells.draw(one.target, [one]), "svg").count(b"<!-- - -->") for one in (whole, entry))
    assert (before, after) == (0, 1)
