"""The pictures of a run: what the page and the drawings hold, that records cannot break out of them, and that they stay small."""

from __future__ import annotations

import random
import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from tools.search import curve, graph, page, page_html
from tools.search.page_attempt import Room, attempt
from tools.search.page_data import tell
from tools.search.state import Best
from tools.search.style import DARK, HEAT, LIGHT, heat_class

CELLS = [
    f"{phase} B{batch} {size}"
    for phase in ("prefill", "update", "decode")
    for batch in (1, 4)
    for size in ("S256", "S1024", "S4096")
]
HOSTILE = '<script>alert(\'x\')</script>" onload="alert(1)" ]]> & </style>'
VOID = {"meta", "br", "hr", "img", "input", "link"}
DIRECTIONS = [
    "wider-tiles",
    "prefetch-values",
    "fewer-barriers",
    "packed-row-sum",
    "split-heads",
    "register-blocking",
    "skip-rescale",
]


class FakeRun(SimpleNamespace):
    """A run with the attributes that the pictures read: manifest, state, records(kind)."""

    def records(self, kind: str) -> list[dict[str, Any]]:
        return self.stored[kind]


def make_run(
    attempts: int, text: str = "", tokens: bool = True, seed: int = 1, cells: list[str] = CELLS, patch_lines: int = 24
) -> FakeRun:
    """A search of so many attempts: failures, ties, gains, archives, abandons and merges. `text` is put into every text field."""
    draw = random.Random(seed)

    def said(words: str) -> str:
        return f"{words} {text}".strip()

    stored: dict[str, list[dict[str, Any]]] = {
        kind: [] for kind in ("opportunity", "implementation", "action", "audit", "lineage")
    }
    status = {"I0000": "frontier"}
    accepted: dict[str, Any] = {}
    speed = {"I0000": 1.0}
    incumbent, best, points, kappa, audited = "I0000", 1.0, [Best(0, 21_000 if tokens else None, 1.0)], 0, 0
    frontier, archive, used = ["I0000"], [], 21_000

    def implementation(identity: str, parents: list[str], action: str | None) -> None:
        stored["implementation"].append(
            {
                "id": identity, "source": {"sha256": f"{len(speed):064x}", "bytes": 48_000, "suffix": "cpp"}, "parents": parents, "action": action,
                "target": "cpu", "architecture": "native", "entry_points": ["prefill", "extend", "decode"], "shared_regions": [said("namespace numerics")],
                "dispatch": said("one variant for each phase"), "numerical_requirements": said("the row sum stays sequential over lanes, then a tree of eight"),
                "contract": "cpu-v1", "contract_sha256": "0" * 64,
            }
        )  # fmt: skip

    def audit(identity: str, action: str | None, verified: bool, gain: float | None, promoted: bool, against: str) -> None:
        here = speed[identity]
        rows = []
        for name in cells if verified else ():
            ratio = here * draw.uniform(0.94, 1.06) if identity != "I0000" else 1.0
            root = 900.0 if name.startswith("decode") else 12000.0
            us = root / ratio
            rows.append(
                {
                    "name": name, "phase": "decode" if name.startswith("decode") else "full", "us": us, "interval_us": [us * 0.99, us * 1.01],
                    "root_us": root, "incumbent_us": root / best, "best_baseline_us": root * 0.8, "best_baseline": said("sdpa_cpu"), "floor_us": root / 6,
                    "share": 1 / len(cells),
                }
            )  # fmt: skip
        identity_audit = f"E{len(stored['audit']):04d}"
        stored["audit"].append(
            {
                "id": identity_audit, "implementation": identity, "action": action, "report": {"sha256": "a" * 64, "bytes": 90_000},
                "status": "PASSED" if verified else said("BIT_MISMATCH"), "verified": verified, "complete": verified, "admissible": True if verified else None,
                "promoted": promoted, "T": 0.77 / here if verified else None, "T_root": 0.77 if verified else None, "T_incumbent": 0.77 / best if verified else None,
                "gain": gain, "gain_interval": None if gain is None else [gain - 0.008, gain + 0.008], "incumbent": against, "cells": rows,
                "failure": None if verified else {"check": said("partition"), "case": "B3 H12/2 S129", "row": 128, "words": 4, "got": "0x3f80", "expected": "0x3f81"},
                "dispatch": {name: [said("decode_rows<8>")] for name in cells}, "resources": [said("prefill_rows: 2 KiB of stack")] * 40, "counters": None,
                "code": {} if action is None else {"prefill": "identical", "decode": "changed"}, "environment": {"machine": said("AMD EPYC, 2 cores")}, "seconds": 141.0, "job": None,
            }
        )  # fmt: skip
        accepted[identity_audit] = SimpleNamespace(accepted=promoted)

    implementation("I0000", [], None)
    audit("I0000", None, True, None, False, "I0000")
    for place in range(1, attempts + 1):
        child, action = f"I{place:04d}", f"A{place:04d}"
        merge = place % 17 == 0 and len(frontier) > 1
        parents = (
            draw.sample(frontier[-12:], 2) if merge else [incumbent if draw.random() < 0.6 else draw.choice(frontier[-6:])]
        )
        direction = DIRECTIONS[place % len(DIRECTIONS)]
        used += draw.randrange(20_000, 90_000)
        audited += 1
        verified = place % 10 > 0 and draw.random() > 0.3
        speed[child] = speed[parents[0]] * draw.uniform(0.93, 1.08)
        promoted = verified and speed[child] > best * 1.02
        gain = 1 - best / speed[child] if verified else None
        stored["opportunity"].append(
            {
                "id": f"O{place:04d}", "direction": direction, "mechanism": said("Values of the next tile are loaded while the scores of this one are summed; the load port is idle then."),
                "workloads": [said("decode")], "evidence": [f"E{place - 1:04d}"], "applies_to": parents, "merge": merge, "expected_share": 0.22, "origin": None,
            }
        )  # fmt: skip
        patch = [
            "--- a/unified_attn.cpp",
            "+++ b/unified_attn.cpp",
            "@@ -210,9 +210,12 @@ static void decode_rows(const Params &p)",
        ]
        for line in range(patch_lines):
            patch.append(said("+-  "[line % 4] + f"  const float next_{line} = load_lanes(values + stride * {line});"))
        stored["action"].append(
            {
                "id": action, "opportunity": f"O{place:04d}", "parents": parents, "child": child, "form": ("decode_only", "joint", "full_sequence_only")[place % 3],
                "patch": "\n".join(patch) + "\n", "workloads": [said("decode")], "variants": [said("decode_rows")], "scope": said("the decode loop only"),
                "regions": [said("decode_rows")], "expected_effect": said("Decode at long contexts 5 % faster: one load less a step on the critical path."),
                "numerical_risks": dict.fromkeys(("reduction_order", "scaling_and_masking", "instructions_constants_subnormals", "conversion_and_rescale_order"), said("none: loads only")),
                "contradicted_by": said("decode B1 L4096 not faster beyond its interval"),
            }
        )  # fmt: skip
        implementation(child, parents, action)
        audit(child, action, verified, gain, promoted, incumbent)
        if promoted:
            incumbent, best, kappa = child, speed[child], 0
        else:
            kappa += 1
        points.append(Best(audited, used if tokens else None, best))
        decision = (
            "continue"
            if verified and speed[child] > 0.98 * best
            else "archive"
            if verified
            else "abandon"
            if place % 5 == 0
            else "continue"
        )
        status[child] = (
            "failed"
            if not verified
            else "abandoned"
            if place % 23 == 0
            else "frontier"
            if decision == "continue"
            else "archived"
        )
        if status[child] in ("frontier", "archived"):
            (frontier if status[child] == "frontier" else archive).append(child)
        stored["lineage"].append(
            {
                "id": f"L{place:04d}", "audit": f"E{place:04d}", "subject": child if verified else parents[0], "decision": decision,
                "interpretation": said("The gain stands in the long decode cells only, so the load port was not the limit for short ones."),
                "follow_ups": [], "reactivate": [], "evidence": [f"E{place:04d}"] if decision == "abandon" else [],
                "falsified_by": {"audit": f"E{place:04d}", "measurement": said("decode B1 L4096 at 1.00 of the incumbent")} if decision == "abandon" else None,
                "reconsider_when": said("values are packed in lanes") if decision == "archive" else None,
            }
        )  # fmt: skip
    status[incumbent] = "incumbent"
    manifest = {
        "schema": "areal-tik/run/1", "name": said("cpu-trial"), "created": "2026-11-30T08:00:00+00:00", "target": {"name": "cpu", "config": said("experimental/cpu/config.yaml"), "sections": {}},
        "contract": said("cpu-v1"), "root": "I0000", "evaluator": {"sha256": "b" * 64, "version": 3}, "prompts": {}, "specification_sha256": "c" * 64,
        "settings": {"kappa_max": 20, "max_audits": 400, "max_tokens": None, "max_seconds": None, "parallel": 1, "abandon_after": 2, "ablations": ["numerics"]},
    }  # fmt: skip
    state = SimpleNamespace(
        incumbent=incumbent, kappa=kappa, stage="action", stop_reason=None, frontier=frontier, archive=archive, pending=["O0001"], audits=accepted, best=points,
        speedup=best, tokens=used if tokens else None, tokens_unavailable=None if tokens else said("the provider reports no use"), audited=audited,
        vertex_status=status.__getitem__, seconds=lambda: 8000.0,
    )  # fmt: skip
    return FakeRun(manifest=manifest, state=state, stored=stored)


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
