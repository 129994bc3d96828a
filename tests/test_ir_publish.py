"""Published runs: packed byte for byte, verified as they are, small, and never overwritten."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_tools import Scripted, action, decision, edited, new_run, opportunity

from tools.core.errors import UserError
from tools.core.files import canonical_json
from tools.evaluator.statistics import median, median_interval
from tools.evaluator.timing import ACCURACY_DIGITS, kept_us
from tools.search import packed
from tools.search.publish import publish
from tools.search.records import ROOT
from tools.search.run import Run
from tools.search.verify import verify

# ---------------------------------------------------------------- packing


def report(**lists: Any) -> bytes:
    """A text as the evaluator writes reports."""
    content = {"status": "PASSED", "timing": {"cells": [{"name": "a", **lists}, {"name": "b"}]}}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


times = st.lists(st.floats(min_value=0.001, max_value=1e6, allow_nan=False).map(lambda t: round(t, 3)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=4))
def test_reports_come_back_exactly(lists: list[tuple[list[float], list[float]]]) -> None:
    files = {f"reports/E{n:04d}.json": report(samples_us=a, pass_us=b) for n, (a, b) in enumerate(lists)}
    assert packed.unpack(packed.pack(files)) == files


@pytest.mark.parametrize(
    "data",
    [
        report(samples_us=[1, 2.5]),  # a whole number without its point
        report(samples_us=[0.1 + 0.2]),  # more decimals than are kept
        report(samples_us=[1e12, 0.5]),  # further apart than four bytes
        report(samples_us=["1"]),
        b'{"samples_us": [1.0]}',  # written in another way
        b"no report",
        "ä\r\n".encode(),
        b"",
    ],
)
def test_what_is_no_ordinary_report_comes_back_too(data: bytes) -> None:
    """Between two others, whose lists must not be lost or mixed up."""
    files = {
        "reports/E0000.json": report(samples_us=[1.5, 2.25]),
        "reports/E0001.json": data,
        "reports/E0002.json": report(pass_us=[9.0]),
    }
    assert packed.unpack(packed.pack(files)) == files


def test_lists_are_taken_out_of_the_text() -> None:
    """The control of the tests above: an ordinary report is not merely kept as it is."""
    draw = random.Random(1)
    data = report(samples_us=[round(draw.uniform(900, 1100), 3) for _ in range(4000)])
    assert len(packed.pack({"reports/E0000.json": data})) < 0.8 * len(packed.pack({"other/E0000.json": data}))


def test_medians_that_follow_from_samples_leave_the_text() -> None:
    samples = [3.0, 1.0, 2.0, 5.0, 4.0]
    honest = report(samples_us=samples, median_us=3.0, interval_us=[1.0, 5.0])
    others = [
        report(samples_us=samples, median_us=3.5, interval_us=[1.0, 5.0]),  # of other samples
        report(samples_us=samples, median_us=packed.FOLLOWS),
        report(median_us=packed.FOLLOWS),
        report(samples_us=[], median_us=3.0),
        report(median_us=3.0, interval_us=[1.0, 5.0]),
    ]
    files = {f"reports/E{n:04d}.json": data for n, data in enumerate([honest, *others])}
    data = packed.pack(files)
    assert packed.unpack(data) == files
    head = json.loads(lzma.decompress(data).partition(b"\n")[0])
    cell = json.loads(head["files"]["reports/E0000.json"])["timing"]["cells"][0]
    assert cell == {"name": "a", "samples_us": None, "median_us": packed.FOLLOWS, "interval_us": packed.FOLLOWS}


def test_a_run_of_the_first_format_is_read() -> None:
    """There a null is a list, and medians stand in the text."""
    data = report(samples_us=[1.5, 2.25, 2.5], median_us=2.25)
    packed_now = lzma.decompress(packed.pack({"reports/E0000.json": data})).partition(b"\n")
    head = json.loads(packed_now[0])
    head["format"] = packed.FIRST_FORMAT
    head["files"]["reports/E0000.json"] = json.dumps(json.loads(report(samples_us=None, median_us=2.25)))
    first = lzma.compress(canonical_json(head) + b"\n" + packed_now[2])
    assert packed.unpack(first) == {"reports/E0000.json": data}


def test_a_damaged_file_says_so() -> None:
    data = packed.pack({"run.json": b"{}\n"})
    for broken in (data[:-5], b"", b"no archive", lzma.compress(b"[]\n"), lzma.compress(b"{}")):
        with pytest.raises(UserError, match="it is damaged"):
            packed.unpack(broken)
    with pytest.raises(UserError, match="packed by another version"):
        packed.unpack(lzma.compress(b'{"format": "areal-tik/packed/3"}\n'))
    with pytest.raises(UserError, match="outside its folder"):
        packed.unpack(packed.pack({"../x": b"x"}))
    with pytest.raises(UserError, match=r"run.json: not UTF-8"):
        packed.pack({"run.json": b"\xff"})


# ---------------------------------------------------------------- a published run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four attempts with whole reports: a promotion, a failure, an archived one, a child of the first."""
    scripted = Scripted()
    scripted.speeds = {"I0001": 0.9, "I0003": 0.95, "I0004": 0.88}
    scripted.statuses = {"I0002": "BIT_MISMATCH"}
    made = new_run(tmp_path_factory.mktemp("published") / "trial")
    with scripted.at_work():
        made.audit(ROOT)
        parents = [ROOT, ROOT, ROOT, "I0001"]
        for number, parent in enumerate(parents, 1):
            child, audit = f"I{number:04d}", f"E{number:04d}"
            name = made.propose(opportunity(direction=f"way-{number}", applies_to=[parent]))["id"]
            made.act(action(opportunity=name, parents=[parent]), edited(made.source(parent), f"note {number}"), "cpp")
            assert made.audit(child)["id"] == audit
            if number == 1:
                follow = opportunity(direction="more", evidence=[audit], applies_to=[child])
                made.decide(decision("continue", audit=audit, subject=child, follow_ups=[follow]))
            elif number == 2:
                follow = opportunity(direction="again", evidence=[audit])
                made.decide(decision("continue", audit=audit, subject=ROOT, follow_ups=[follow]))
            elif number == 3:
                made.decide(decision(audit=audit, subject=child))
    made.usage({"unavailable": "a test"})
    return made


@pytest.fixture
def published(run: Run, tmp_path: Path) -> Path:
    return publish(run, "trial", tmp_path / "experimental")


def test_a_run_whose_figures_are_not_its_reports_is_not_published(finished: Path, tmp_path: Path) -> None:
    """Chain, hashes and rules hold, and the reports are no reports."""
    assert verify(finished)["reports"] == 7
    with pytest.raises(UserError, match="E0000: its report does not hold"):
        publish(Run.open(finished), "made-up", tmp_path / "experimental")
    assert not list((tmp_path / "experimental" / "cpu" / "search").iterdir())


def test_a_published_run_is_the_run(run: Run, published: Path) -> None:
    assert published.parts[-3:] == ("cpu", "search", "trial")
    with packed.opened(published) as folder:
        found = verify(folder)
        copy = Run.open(folder)
        assert copy.state == run.state and copy.lines == run.lines and copy.manifest == run.manifest
        assert found["sources"] == 5 and found["reports"] == 5
        for identity in run.ids("implementation"):
            assert copy.source(identity) == run.source(identity)
        for identity in run.ids("audit"):
            assert copy.report_bytes(identity) == run.report_bytes(identity)
        assert [path.name for path in (folder / "sources").iterdir()] == [run.source_path(ROOT).name]
    assert not folder.exists()
    assert (published / "report" / "report.html").read_text().count("I0004") > 0


def test_an_ordinary_run_is_opened_where_it_lies(run: Run) -> None:
    with packed.opened(run.folder) as folder:
        assert folder == run.folder and not packed.is_published(folder)


def test_the_original_is_left_as_it_was(run: Run, published: Path) -> None:
    assert packed.is_published(published)
    assert verify(run.folder)["sources"] == 5 and len(list((run.folder / "sources").iterdir())) == 5


def test_it_is_never_overwritten(run: Run, published: Path) -> None:
    before = {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="exists already and is never overwritten: publish under another --name"):
        publish(run, "trial", published.parents[2])
    assert before == {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}
    assert sorted(path.name for path in published.parent.iterdir()) == ["trial"]  # nothing half made is left


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "a b"])
def test_odd_names_are_refused(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name a published run"):
        publish(run, name, tmp_path / "experimental")
    assert not (tmp_path / "experimental").exists()


def test_a_run_that_does_not_hold_is_not_published(run: Run, tmp_path: Path) -> None:
    record = run.folder / "records" / "E0002.json"
    data = record.read_bytes()
    try:
        record.write_bytes(data.replace(b"BIT_MISMATCH", b"PASSED"))
        with pytest.raises(UserError, match=r"E0002.json: does not have the hash that the log states"):
            publish(run, "trial", tmp_path / "experimental")
    finally:
        record.write_bytes(data)
    assert list((tmp_path / "experimental" / "cpu" / "search").iterdir()) == []
    assert not (tmp_path / "experimental" / "archive.json").exists()


@pytest.mark.parametrize(
    "path", ["records/A0001.json", "reports/E0001.json", "prompts/action.md", "config.json", "log.jsonl", "run.json"]
)
def test_an_edit_of_a_published_run_is_found(published: Path, path: str) -> None:
    files = packed.unpack((published / packed.NAME).read_bytes())
    files[path] = files[path].replace(b"e", b"a", 1)
    (published / packed.NAME).write_bytes(packed.pack(files))
    with packed.opened(published) as folder, pytest.raises(UserError):
        verify(folder)


def test_the_archive_lists_it(run: Run, published: Path) -> None:
    archive = published.parents[2] / "archive.json"
    listed = json.loads(archive.read_text())["runs"]
    assert [entry["path"] for entry in listed] == ["experimental/cpu/search/trial"]
    assert listed[0]["log"] == run.lines[-1]["hash"] and listed[0]["attempts"] == 4
    publish(run, "another", published.parents[2])
    assert [entry["name"] for entry in json.loads(archive.read_text())["runs"]] == ["trial", "trial"]
    archive.write_text("[")
    with pytest.raises(UserError, match=r"archive.json: not JSON"):
        publish(run, "third", published.parents[2])
    assert not (published.parent / "third").exists()


# ---------------------------------------------------------------- size


def noisy(content: Any, draw: random.Random) -> Any:
    """A report with other times, as another evaluation on the same machine would give."""
    if isinstance(content, dict):
        return {
            key: [round(time * draw.uniform(0.97, 1.03), 4) for time in item] if key in packed.SAMPLES else noisy(item, draw)
            for key, item in content.items()
        }
    return [noisy(item, draw) for item in content] if isinstance(content, list) else content


def test_another_attempt_costs_less_than_20_kilobytes(repo: Path) -> None:
    """Reports of the size of real ones, measured once, with four kernels and a baseline in every cell; one that failed has
    none of them, one that was measured again has more."""
    draw = random.Random(2)
    real = json.loads((repo / "experimental" / "evidence" / "cpu-avx2.json").read_bytes())
    for cell in real["timing"]["cells"]:
        kernels = cell["modes"]["cold"]["kernels"]
        kernels.update(dict.fromkeys(("root", "incumbent", "twin"), kernels["candidate"]))

    def size(attempts: int) -> int:
        files = {f"reports/E{n:04d}.json": (json.dumps(noisy(real, draw), indent=1) + "\n").encode() for n in range(attempts)}
        return len(packed.pack(files))

    assert (size(12) - size(4)) / 8 < 20_000


def as_written_now(content: Any) -> Any:
    """A report of a published search with times and accuracies in the digits that the evaluator keeps now."""
    if isinstance(content, list):
        return [as_written_now(item) for item in content]
    if not isinstance(content, dict):
        return content
    found = {key: as_written_now(item) for key, item in content.items()}
    for key in packed.SAMPLES:
        if key in found:
            found[key] = kept_us([time / 1000 for time in found[key]], "cpu")
    for key in ("rms", "worst"):
        if key in found:
            found[key] = float(f"{found[key]:.{ACCURACY_DIGITS}g}")
    if found.get("samples_us"):
        found["median_us"], found["interval_us"] = median(found["samples_us"]), list(median_interval(found["samples_us"]))
    return found


@pytest.mark.parametrize("name", ["cpu-alone", "cpu-search", "cpu-trial"])
def test_a_hundred_attempts_of_a_real_search_take_less_than_2_megabytes(repo: Path, name: str) -> None:
    files = packed.unpack((repo / "experimental" / "cpu" / "search" / name / packed.NAME).read_bytes())
    attempts = [path for path in files if path.startswith("reports/E") and path.count(".") == 1]
    for path in attempts:
        files[path] = (json.dumps(as_written_now(json.loads(files[path])), indent=1, ensure_ascii=False) + "\n").encode()
    assert len(attempts) >= 8
    assert len(packed.pack(files)) / len(attempts) < 20_000
