"""The pictures of a run: what the page and the drawings hold, that records cannot break out of them, and that they stay small."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import ir_tools
import pytest
from page_tools import FakeRun, make_run

from tools.search import curve, graph, page, page_html
from tools.search.page_attempt import Room, attempt
from tools.search.page_data import tell
from tools.search.run import Run
from tools.search.style import DARK, HEAT, LIGHT, heat_class

HOSTILE = '<script>alert(\'x\')</script>" onload="alert(1)" ]]> & </style>'
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Elements, ids and links of a page; fails where a tag closes another one than the last opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


@pytest.fixture(scope="module")
def run() -> FakeRun:
    return make_run(40)


def test_files_are_written_and_replaced(run, tmp_path):
    paths = page.write_report(run, tmp_path / "report")
    assert sorted(path.name for path in paths) == ["lineage.svg", "progress.svg", "report.html"]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in page.write_report(run, tmp_path / "report")] == first
    for path in paths:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
            assert "prefers-color-scheme:dark" in path.read_text()


def test_page_is_well_formed_and_its_links_lead_somewhere(run):
    seen = Reader(page.page(tell(run)))
    ids = seen.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in seen.values("href")} <= set(ids)
    assert {f"I{place:04d}" for place in range(41)} <= set(ids)
    assert seen.tags.count("h1") == 1


def test_page_asks_for_nothing_outside(run):
    text = page.page(tell(run))
    seen = Reader(text)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(seen.tags)
    assert not seen.values("src") and not seen.values("style")
    assert all(link.startswith("#") for link in seen.values("href"))
    assert not re.search(r"https?://|@import|url\(", text)
    policy = next(value for value in seen.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy


def test_records_cannot_break_out(tmp_path):
    hostile = make_run(20, text=HOSTILE)
    text = page.page(tell(hostile))
    assert text.count(page_html.esc("<script>alert('x')")) > 200  # the texts are shown
    seen = Reader(text)
    assert seen.tags.count("script") == 1 and seen.tags.count("style") == 1
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    page.write_report(hostile, tmp_path)
    for name in ("lineage.svg", "progress.svg"):
        tags = [element.tag.split("}")[1] for element in ElementTree.parse(tmp_path / name).iter()]
        assert "script" not in tags and tags.count("style") == 1


def test_every_record_is_shown(run):
    text = page.page(tell(run))
    for kind in run.stored:
        for record in run.stored[kind]:
            assert record["id"] in text, record["id"]
    for words in (
        "Would be contradicted by",
        "First failure",
        "B3 H12/2 S129",
        "Conversions and order of rescaling",
        "Falsified by",
        "Reconsider when",
    ):
        assert words in text


def test_prediction_stands_beside_measurement(run):
    story = tell(run)
    promoted = next(step for step in story.attempts if step.promoted)
    text = attempt(promoted, Room(10_000, 1000, 1000))
    audit = promoted.audit
    assert f"{100 * audit['gain']:.1f} % lower (interval" in text
    assert "Expected effect" in text and "22.0 %" in text
    targeted = re.search(r"Targeted cells</dt><dd>([\d.]+). the incumbent \(median of (\d+)", text)
    ratios = sorted(cell["incumbent_us"] / cell["us"] for cell in audit["cells"] if cell["name"].startswith("decode"))
    assert int(targeted[2]) == len(ratios) == 6
    assert float(targeted[1]) == pytest.approx((ratios[2] + ratios[3]) / 2, abs=0.006)


def test_figures_are_written_as_a_person_would():
    minus, times = page_html.MINUS, page_html.TIMES
    shares = (0.2, 0.031, -0.031, 0.0, -0.0004, 1.0, None, float("nan"))
    assert [page_html.percent(share) for share in shares[:6]] == [
        "20.0 %",
        "3.1 %",
        f"{minus}3.1 %",
        "0.0 %",
        "0.0 %",
        "100.0 %",
    ]
    assert [page_html.percent(share) for share in shares[6:]] == [page_html.MISSING] * 2
    assert [page_html.percent(share, signed=True) for share in shares[1:4]] == ["+3.1 %", f"{minus}3.1 %", "0.0 %"]
    assert [page_html.times(value) for value in (1.0, 1.456, 250.4)] == [f"1.00{times}", f"1.46{times}", f"250{times}"]
    assert [page_html.microseconds(value) for value in (3.14159, 314.159, 31415.9)] == ["3.14", "314.2", "31,416"]
    assert [page_html.duration(value) for value in (41, 720, 12240)] == ["41 s", "12 min", "3.4 h"]
    assert page_html.count(None) == "unavailable" and page_html.count(2_087_319) == "2,087,319"


def test_a_run_on_disk_has_a_page(tmp_path):
    made = ir_tools.make_run(tmp_path / "run", 14, seed=3)
    made.usage(
        {"input_tokens": 900_000, "output_tokens": 100_000, "cached_tokens": None, "source": "the provider", "step": None}
    )
    read = Run.open(tmp_path / "run")
    page.write_report(read, tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    Reader(text)
    story = tell(read)
    assert {step.id for step in story.steps if step.promoted} == {
        audit.implementation for audit in read.state.audits.values() if audit.accepted
    }
    assert [step.id for step in story.steps] == list(read.state.implementations)
    assert story.efficiency == pytest.approx(read.state.speedup - 1)  # one million tokens
    for identity in (*read.state.implementations, *read.state.actions, *read.state.audits, *read.state.decisions):
        assert identity in text
    assert text.count("as I0000") > 5  # numerical requirements are told once, not with every child
    assert curve.by_tokens(story) is None  # recorded at the end only: no step knows its own


def test_long_patches_are_shortened_at_a_line_and_say_so():
    story = tell(make_run(1, patch_lines=400))
    whole, cut = attempt(story.steps[1], Room(10**6, 1000, 1000)), attempt(story.steps[1], Room(2000, 1000, 1000))
    assert "left out" not in whole and "next_399" in whole
    assert "next_399" not in cut
    left = int(re.search(r"(\d+) more lines are left out here; the record A0001 holds all", cut)[1])
    shown = re.search(r"<code>(---.*?)</code>", cut, re.S)[1]
    assert shown.count("\n") + left == 403
    assert "200 added" not in cut and "100 added, 100 removed lines" in cut  # of the whole patch


def test_efficiency_and_speed_are_those_of_the_search(run):
    story = tell(run)
    assert story.efficiency == pytest.approx((run.state.speedup - 1) / (run.state.tokens / 1e6))
    assert story.steps[-1].best == run.state.speedup and story.steps[-1].tokens == run.state.tokens
    assert story.steps[0].tokens == 21_000
    text = page.page(story)
    assert f"{story.efficiency:.3g}" in text and f"{page_html.times(run.state.speedup)}" in text
    assert sum(step.promoted for step in story.steps) == sum(audit["promoted"] for audit in run.stored["audit"])


def test_unknown_tokens_are_said_and_not_guessed():
    story = tell(make_run(12, tokens=False))
    assert story.efficiency is None and curve.by_tokens(story) is None
    text = page.page(story)
    assert "the provider reports no use" in text
    assert "Over tokens: unavailable" in text
    assert page.progress_svg(story).count("over tokens") == 0


def test_incomplete_runs_have_a_page():
    bare = make_run(0)
    bare.state.incumbent, bare.state.best, bare.state.frontier = None, [], []
    bare.state.vertex_status = lambda identity: "root"
    bare.stored["audit"].clear()
    text = page.page(tell(bare))
    Reader(text)
    assert "There is no incumbent with times yet." in text and "not evaluated" in text
    ElementTree.fromstring(page.progress_svg(tell(bare)))


def test_no_vertex_lies_on_another_or_on_a_line_of_others():
    for seed in range(8):
        story = tell(make_run(90, seed=seed))
        layout = graph.place(story.steps, story.incumbent_path)
        assert len(set(layout.place.values())) == len(story.steps)
        assert len({layout.place[identity][1] for identity in story.incumbent_path}) == 1  # the path is straight
        at = {place: identity for identity, place in layout.place.items()}
        for step in story.steps:
            end, row = layout.place[step.id]
            for parent in step.parents:
                start, parent_row = layout.place[parent]
                level = layout.line.get((parent, step.id), parent_row)
                on_line = {at.get((column, level)) for column in range(start + 1, end)} - {None}
                assert not on_line, (seed, parent, step.id, on_line)
                assert level == row or (end, level) not in at or end - start == 1


def test_merges_show_both_parents_and_edges_name_their_action(run):
    story = tell(run)
    merge = next(step for step in story.attempts if len(step.parents) == 2)
    drawing = ElementTree.fromstring(page.lineage_svg(story))
    kinds = [element.get("class", "") for element in drawing.iter() if element.tag.endswith("path")]
    assert "archived" in page.lineage_svg(story) and "verified, not promoted" in page.progress_svg(
        story
    )  # they explain their marks
    assert kinds.count("edge other") == sum(len(step.parents) == 2 for step in story.attempts)
    assert kinds.count("edge path") == len(story.incumbent_path) - 1
    texts = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert {step.action["id"] for step in story.attempts} <= set(texts)
    assert f"from {merge.parents[0]}, {merge.parents[1]}" in graph.describe(merge)


def test_statuses_differ_in_shape_not_only_in_colour():
    shapes = {re.sub(r"<title>.*?</title>", "", graph.mark(status, 50, 50)) for status in graph.STATUSES}
    assert len(shapes) >= len(graph.STATUSES) - 2  # frontier (filled), verified (hollow) and unaudited (dashed) are circles


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_words_are_legible(palette):
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        bright, dark = sorted((light(one), light(other)), reverse=True)
        return (bright + 0.05) / (dark + 0.05)

    for name in ("ink", "muted", "accent", *graph.STATUSES):
        least = 3.0 if name == "unaudited" else 4.5
        assert min(contrast(palette[name], palette[ground]) for ground in ("ground", "surface")) >= least, name
    assert contrast(palette["added-ink"], palette["added"]) >= 4.5
    assert contrast(palette["removed-ink"], palette["removed"]) >= 4.5
    for name, _, for_light, for_dark in HEAT:
        assert contrast(palette["ink"], for_light if palette is LIGHT else for_dark) >= 4.5, name


def test_heat_classes_follow_the_ratio():
    assert [heat_class(value) for value in (0.5, 0.92, 1.0, 1.02, 1.05, 1.2, 2.0)] == ["h0", "h1", "h3", "h4", "h5", "h6", "h7"]
    story = tell(make_run(3, seed=3))
    cell = next(step for step in story.attempts if step.verified).audit["cells"][0]
    value = cell["root_us"] / cell["us"]
    assert f'<td class="n {heat_class(value)}">{value:.2f}</td>' in page.page(story)


def test_a_page_can_be_kept_smaller(tmp_path):
    run = make_run(30, patch_lines=200)
    sizes = []
    for limit in (2_000_000, 300_000):
        page.write_report(run, tmp_path, limit=limit)
        sizes.append((tmp_path / "report.html").stat().st_size)
    assert sizes[1] < 0.6 * sizes[0]
    assert "more lines are left out here" in (tmp_path / "report.html").read_text()


def test_three_hundred_attempts_are_quick_and_small():
    run = make_run(
        300,
        cells=[
            f"{phase} B{batch} S{size}"
            for phase in ("prefill", "update", "decode")
            for batch in (1, 4, 8, 16)
            for size in range(4)
        ],
        patch_lines=120,
    )
    began = time.process_time()
    text = page.page(tell(run))
    assert time.process_time() - began < 2.0
    assert len(text.encode()) < 3_000_000
    Reader(text)
