"""The model of an unmeasured card: its formulas, its error on held-out cells, what it refuses, and that it stays a prediction."""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from archive_tools import forge_report

from tools import predict, tables
from tools.archive.verify import update
from tools.core.config import EXPERIMENTAL, Target, load_target, target_names
from tools.core.errors import UserError
from tools.evaluator import report as reports
from tools.evaluator.grids import Cell, cells
from tools.evaluator.timing import floor_us
from tools.figures import sources
from tools.model import kernels
from tools.model.calibrate import QUANTILE, Model, calibrated, fit, predictions
from tools.model.kernels import (
    FULL,
    KERNELS,
    Card,
    Dealing,
    cluster_spread,
    decode_us,
    full_us,
    section_of,
    shares,
    slice_spread,
)
from tools.search.context_predicted import predicted_section

TARGETS = [load_target(name) for name in target_names()]
REPO = EXPERIMENTAL.parent
CUDA = [target for target in TARGETS if target.config["target"]["device"] == "cuda"]
MEASURED = {entry.target.name for entry in sources.read(predict.EVIDENCE, predict.LISTING, TARGETS)}
UNMEASURED = [target for target in CUDA if target.name not in MEASURED]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {target.name: calibrated(target, TARGETS, predict.EVIDENCE, predict.LISTING) for target in CUDA}


# ---------------------------------------------------------------- what is counted


def test_tiles_of_a_small_cell_by_hand() -> None:
    """Five blocks of 5, 4, 3, 2, 1 tiles for two CTAs: back and forth 5 2 1 and 4 3, to the first that is free 5 2 and 4 3 1."""
    cell = Cell("x", "full", "prefill", 1, 5 * 128, 5 * 128)
    for dealing, expected in (("apart", ([8, 7], [3, 2])), ("free", ([7, 8], [2, 3]))):
        tiles, items = shares(cell, (1, 1), 2, dealing)
        assert (tiles.tolist(), items.tolist()) == expected


def test_sections_apart_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV heads of 3, 2, 1 tiles each, one after the other: in each CTA 0 has 3, CTA 1 has 2 and 1."""
    cell = Cell("x", "full", "prefill", 2, 3 * 128, 3 * 128)
    monkeypatch.setattr(kernels, "L2_BUDGET_BYTES", 3 * 128 * 512)
    monkeypatch.setattr(kernels, "LEAST_ROUNDS", 1)
    shares.cache_clear()
    try:
        tiles, items = shares(cell, (1, 1), 2, "apart")
        assert tiles.tolist() == [3 + 0 + 3 + 0, 2 + 1 + 2 + 1] and items.tolist() == [2, 4]
    finally:
        shares.cache_clear()


@pytest.mark.parametrize("dealing", ["apart", "free"])
def test_no_tile_is_lost(dealing: Dealing) -> None:
    for cell in cells(CUDA[0].config["workloads"]):
        if cell.phase == "full" and cell.batch < 16:
            tiles, items = shares(cell, (32, 8), 132, dealing)
            blocks = -(-cell.rows // 128)
            assert tiles.sum() == cell.batch * 32 * blocks * (blocks + 1) // 2 and items.sum() == cell.batch * 32 * blocks


def test_tile_policies_are_those_of_the_sources(repo: Path, tmp_path: Path) -> None:
    """The kernels' own functions, compiled, beside their copies here."""
    hopper, portable = (
        (repo / "experimental" / name).read_text() for name in ("h200/kernels/unified_attn_ext.cu", "common/portable_attn.cu")
    )

    def function(source: str, head: str) -> str:
        found = re.search(rf"^{head}\(.*?^}}$", source, re.M | re.S)
        assert found is not None, head
        return found[0]

    program = [
        "#include <cstdint>\n#include <cstdio>\n#include <initializer_list>\nusing bf16 = uint16_t; constexpr int64_t HEAD_DIM = 128;",
        function(hopper, "int decode_cluster"),
        function(portable, "int64_t prefill_section"),
        function(portable, "int decode_slices"),
        function(hopper, "int64_t prefill_section"),
        "int main() { for (int heads = 1; heads < 200; heads += 3) for (int tiles = 1; tiles < 130; tiles += 7) for (int sms : {20, 78, 108, 132})",
        'for (int group : {4, 12}) printf("%d %d %d %d %d %d %ld %ld %ld\\n", heads, group, tiles, sms, decode_cluster(heads, group, tiles, sms),',
        "decode_slices(heads, sms), (long)prefill_section(heads, tiles * 128),",
        "(long)prefill_section(heads, 4 * tiles, tiles * 128, sms), (long)prefill_section(heads, group, tiles * 128, sms)); }",
    ]
    (tmp_path / "policy.cpp").write_text("\n".join(program))
    subprocess.run(["c++", "-std=c++17", "-o", tmp_path / "policy", tmp_path / "policy.cpp"], check=True)
    lines = subprocess.run([tmp_path / "policy"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) > 5000
    for line in lines:
        heads, group, tiles, sms, cluster, slices, section, whole, few = map(int, line.split())
        assert (
            cluster_spread(heads, group, tiles, sms).ctas == cluster and slice_spread(heads, group, tiles, sms).ctas == slices
        )
        assert min(heads, max(1, kernels.L2_BUDGET_BYTES // (tiles * 128 * 4 * 128))) == section
        assert section_of("apart", heads, 4 * tiles, tiles * 128, sms) == whole
        assert section_of("apart", heads, group, tiles * 128, sms) == few


# ---------------------------------------------------------------- the fit


@pytest.mark.parametrize("name", KERNELS)
def test_known_parameters_are_found_again(name: str) -> None:
    kernel, card = KERNELS[name], Card.of(CUDA[0].config["target"])
    timed = cells(CUDA[0].config["workloads"])
    for phase, formula, truth in (
        ("full", full_us, dict(zip(FULL, (4.0, 2.5, 2.0), strict=True))),
        ("decode", decode_us, {"launch_us": 3.0, "chain_us": 0.5, "values_us": 0.4, "bandwidth_share": 0.8}),
    ):
        names = FULL if phase == "full" else kernel.decode
        values = [truth[key] for key in names]

        def of(fitted: Any, cell: Cell, formula: Any = formula) -> tuple[float, str]:
            return formula(kernel, fitted, card, cell, (32, 8), 1.0)  # type: ignore[no-any-return]

        own = [(cell, of(values, cell)[0]) for cell in timed if cell.phase == phase]
        found = fit(of, own, [2 * value if key != "bandwidth_share" else 0.9 for key, value in zip(names, values, strict=True)])
        assert found == pytest.approx(values, rel=1e-3), phase


def test_the_same_evidence_gives_the_same_model(models: dict[str, Model]) -> None:
    target = UNMEASURED[0]
    again = calibrated(target, TARGETS, predict.EVIDENCE, predict.LISTING)
    assert again.phases == models[target.name].phases


def test_the_band_holds_what_it_says(models: dict[str, Model]) -> None:
    for model in models.values():
        for phase, found in model.phases.items():
            names = {cell.name for cell, _ in model.measured.cells if cell.phase == phase}
            assert set(found.errors) == names and len(found.fitted) <= 4
            inside = sum(
                1 / found.band <= error * (1 + 1e-9) and error <= found.band * (1 + 1e-9) for error in found.errors.values()
            )
            assert inside >= QUANTILE * len(names) > inside - 2
            assert 1.0 < found.band < found.worst < 1.15


def test_a_cell_that_is_held_out_does_not_help_itself(models: dict[str, Model]) -> None:
    """A wrong time of one workload moves its own held-out error by all of it: nothing of it was fitted."""
    from tools.model.calibrate import _of, _phase

    model = models[CUDA[0].name]
    timed = [(cell, modes["cold"].ours.us) for cell, modes in model.measured.cells if cell.phase == "decode"]
    formula = _of("decode", model.kernel, model.card, (32, 8), 1.0)
    wrong = [(cell, us * 1.5 if cell.name == timed[5][0].name else us) for cell, us in timed]
    before, after = (_phase(model.kernel.decode, entries, formula).errors[timed[5][0].name] for entries in (timed, wrong))
    assert before / after == pytest.approx(1.5, rel=1e-2)


# ---------------------------------------------------------------- the predictions


@pytest.mark.parametrize("target", CUDA, ids=lambda target: target.name)
def test_no_prediction_beats_the_peaks(target: Target, models: dict[str, Model]) -> None:
    found = predictions(models[target.name], target.config)
    assert [entry.cell for entry in found] == cells(target.config["workloads"])
    for entry in found:
        floor = floor_us(entry.cell, (32, 8), target.config["target"], "cold")
        assert floor * (1 - 1e-9) <= entry.low < entry.us < entry.high
        assert floor == pytest.approx(kernels.least_us(Card.of(target.config["target"]), entry.cell, (32, 8)))


@pytest.mark.parametrize("key", ["peak_tflops", "peak_bandwidth_gbps", "clock_mhz"])
def test_a_faster_card_is_predicted_faster(key: str, models: dict[str, Model]) -> None:
    for target in UNMEASURED:
        config = copy.deepcopy(target.config)
        config["target"][key] *= 2
        before, after = (predictions(models[target.name], found) for found in (target.config, config))
        assert all(new.us <= old.us for old, new in zip(before, after, strict=True))
        assert any(new.us < 0.9 * old.us for old, new in zip(before, after, strict=True)), key


def test_a_slow_tensor_core_bounds_full_sequences_and_is_marked(models: dict[str, Model]) -> None:
    """With a seventh of the tensor rate the products bind, as in no measured cell; the model says so."""
    target = next(target for target in CUDA if target.name in MEASURED)
    config = copy.deepcopy(target.config)
    config["target"]["peak_tflops"] /= 7
    found = {entry.cell.name: entry for entry in predictions(models[target.name], config)}
    usual = {entry.cell.name: entry for entry in predictions(models[target.name], target.config)}
    long = "prefill B4 S8192"
    assert (usual[long].bound, usual[long].covered) == ("softmax", True)
    assert (found[long].bound, found[long].covered) == ("products", False)


def test_another_implementation_elsewhere_is_near(models: dict[str, Model]) -> None:
    """What the documents say: a published FlashAttention-3 on the card with slow tensor cores, batch 1, within 4 %."""
    slow = min(CUDA, key=lambda target: target.config["target"]["peak_tflops"])
    ours = {entry.cell.name: entry.us for entry in predictions(models[slow.name], slow.config)}
    lines = [line.split(",") for line in (EXPERIMENTAL / "figures" / "published_reference.csv").read_text().splitlines()]
    published = {
        f"prefill B{line[2]} S{line[3]}": 1e3 * float(line[5]) for line in lines if line[:2] == [slow.name.upper(), "prefill"]
    }
    assert len(published) == 4
    assert max(abs(math.log(ours[name] / us)) for name, us in published.items()) < 0.04


def test_the_documents_figures_are_the_models(repo: Path, models: dict[str, Model]) -> None:
    text = (repo / "experimental" / "README.md").read_text()
    for model in models.values():
        full, decode = model.phases["full"], model.phases["decode"]
        costs = [
            f"{decode.fitted[key]:#.3g}" if key in decode.fitted else "-" for key in ("launch_us", "chain_us", "values_us")
        ]
        percents = [f"{100 * (value - 1):.1f} %" for value in (full.band, decode.band, full.worst, decode.worst)]
        line = (
            f"| `{model.measured.kernel}` ({model.measured.name}) | {', '.join(f'{value:#.3g}' for value in full.fitted.values())} us "
            f"| {', '.join(costs)} us; {decode.fitted['bandwidth_share']:.3f} "
            f"| {percents[0]}, {percents[1]} (worst {percents[2]}, {percents[3]}) |"
        )
        assert line in text
    for cell in (cell for cell in cells(CUDA[0].config["workloads"]) if cell.phase == "full" and cell.rows >= 4096):
        found = shares(cell, (32, 8), 132, "apart")[0]
        assert found.max() / (found.sum() / 132) < 1.01, cell.name


def test_configs_state_what_the_driver_said() -> None:
    """Multiprocessors and clock of each target with an evaluation of its own."""
    for target in (target for target in CUDA if target.name in MEASURED):
        for path in sorted(predict.EVIDENCE.glob("*.json")):
            found = json.loads(path.read_bytes())
            if "timing" not in found or found["compatibility"] or found["target"]["name"] != target.name:
                continue
            section, environment = target.config["target"], found["environment"]
            assert environment["gpu"]["multiprocessors"] == section["multiprocessors"], path.name
            assert environment["gpu_state"]["clocks.max.sm"] == f"{section['clock_mhz']} MHz", path.name


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("target", CUDA, ids=lambda target: target.name)
def test_the_command_says_that_nothing_was_measured(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--gpu", target.name]) == 0
    text = capsys.readouterr().out
    first, *rest = text.splitlines()
    assert first.startswith(f"{target.name}: predicted, not measured")
    assert all(any(line.startswith(f"{cell.name} ") for line in rest) for cell in cells(target.config["workloads"]))
    assert ("held out / measured" in text) == (target.name in MEASURED)
    assert predict.main(["--gpu", target.name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "predicted, not measured" and len(found["cells"]) == len(cells(target.config["workloads"]))
    assert all(("measured_us" in cell) == (target.name in MEASURED) for cell in found["cells"])
    assert ("another architecture" in text) != found["calibration"]["same_architecture"]


def test_another_architecture_is_said(models: dict[str, Model]) -> None:
    for target in CUDA:
        own, calibrating = (
            entry.config["target"]["compute_capability"][0] for entry in (target, models[target.name].measured.target)
        )
        assert predict.record(target, models[target.name])["calibration"]["same_architecture"] == (own == calibrating)
    assert {predict.record(target, models[target.name])["calibration"]["same_architecture"] for target in CUDA} == {True, False}


def test_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target cpu is no CUDA device"):
        predict.main(["--gpu", "cpu"])
    target = UNMEASURED[0]
    other = replace(target, config={**target.config, "kernel": {**target.config["kernel"], "source": "kernels/mine.cu"}})
    with pytest.raises(
        UserError, match=r"mine.cu: the model knows the schedules of unified_attn_ext.cu, portable_attn.cu only"
    ):
        calibrated(other, TARGETS, predict.EVIDENCE, predict.LISTING)
    (tmp_path / "reports.json").write_text(json.dumps({"drawn": ["cpu-avx2.json"], "left_out": {}}))
    with pytest.raises(UserError, match=r"no report of \S+ on any GPU: there is nothing to calibrate"):
        calibrated(target, TARGETS, predict.EVIDENCE, tmp_path / "reports.json")
    run = subprocess.run([sys.executable, REPO / "tools" / "predict.py", "--gpu", "cpu"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "error: target cpu is no CUDA device: the model is of GPUs\n")


# ---------------------------------------------------------------- the context


def view_of(target: Target, **changes: Any) -> Any:
    return SimpleNamespace(**{"config": target.config, "withheld": frozenset(), "incumbent": None, **changes})


def test_the_context_of_an_unmeasured_target_has_predictions() -> None:
    for target in TARGETS:
        section = predicted_section(view_of(target))
        assert bool(section.blocks) == (target in UNMEASURED), target.name
        if section.blocks:
            text = "\n".join(block.text for block in section.blocks)
            assert section.title == "Predicted, not measured" and "By a model" in text and "the error is unknown" in text
            rows = [line for line in text.splitlines() if re.match(r"\| (prefill|update|decode) B", line)]
            assert len(rows) == 12 and len(text) < 2500
            assert not any(block.always for block in section.blocks)


@pytest.mark.parametrize("change", [{"incumbent": "I0000"}, {"withheld": frozenset({"evidence"})}, {"config": None}])
def test_the_context_drops_them(change: dict[str, Any]) -> None:
    """Once the root is audited, under the ablation of evidence, and where an older config lacks the fields."""
    target = UNMEASURED[0]
    section = {key: value for key, value in target.config["target"].items() if key != "multiprocessors"}
    config = {**target.config, "target": section}
    if "config" in change:
        change = {"config": config}
    assert predicted_section(view_of(target)).blocks and not predicted_section(view_of(target, **change)).blocks


# ---------------------------------------------------------------- a prediction is no result


def test_no_result_says_predicted(repo: Path) -> None:
    """Tables of the documents, CSV files, pictures and archive."""
    results = [
        path
        for path in (repo / "experimental").rglob("*")
        if path.suffix in (".csv", ".svg") or path.name in ("archive.json", "validation.json")
    ]
    assert len(results) > 10
    assert not [path.name for path in results if b"predicted" in path.read_bytes().lower()]
    for name in tables.DOCUMENTS:
        found = tables.TABLE.findall((repo / name).read_text())
        assert found and not [match[1] for match in found if "predicted" in "".join(match).lower()]


def test_only_the_command_and_the_context_know_the_model(repo: Path) -> None:
    """What makes tables, figures, archives, reports and records does not import it."""
    may = {"tools/predict.py", "tools/search/context_predicted.py", "tools/model/calibrate.py", "tools/model/kernels.py"}
    found = {}
    for path in sorted((repo / "tools").rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        found[path.relative_to(repo).as_posix()] = names
    model = {name for name, imports in found.items() if any(re.match(r"tools\.(model|predict)\b", each) for each in imports)}
    assert model <= may and "tools/predict.py" in model
    assert [name for name, imports in found.items() if any("context_predicted" in each for each in imports)] == [
        "tools/search/context.py"
    ]


def test_a_prediction_is_no_evidence(archive: Path, models: dict[str, Model]) -> None:
    """As it is, it is no record; dressed as a report it has no samples, and is refused by archive and figures."""
    target = UNMEASURED[0]
    made = predict.record(target, models[target.name])
    path = archive / "experimental" / "evidence" / "guess.json"
    path.write_text(json.dumps(made))
    with pytest.raises(UserError, match=r"guess.json: no report of evaluate.py"):
        update(archive)
    by_name = {cell["name"]: cell["predicted_us"] for cell in made["cells"]}

    def dress(report: Any) -> None:
        report["target"]["name"] = target.name
        report["environment"]["gpu"]["name"] = target.config["target"]["gpu_names"][0]
        for cell in report["timing"]["cells"]:
            cell["modes"]["cold"]["kernels"]["candidate"]["median_us"] = by_name[cell["name"]]

    path.write_bytes((path.parent / models[target.name].measured.name).read_bytes())
    forge_report(archive, "experimental/evidence/guess.json", dress)
    with pytest.raises(UserError, match=r"guess.json"):
        update(archive)
    with pytest.raises(UserError, match=r"the median of the samples is"):
        sources.measured(path, {known.name: known for known in TARGETS})
    with pytest.raises(UserError):
        reports.validate(made)
