"""The corpus of numerical mutants and its score: patches apply or are refused, the checks kill, the honest kernel lives."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tools.core.config import load_target
from tools.core.errors import UserError
from tools.core.unified_diff import parse as parse_patch
from tools.evaluator import mutant_bench, mutants, mutation
from tools.evaluator.mutants import Mutant, apply, candidate_source, load_corpus

PATCH = "--- a/x.h\n+++ b/x.h\n@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n"
# One a kind of answer: the gate, a check, and the witness alone; patches of the source and of both headers.
SAMPLE = {
    "output_halved",
    "extend_edge_open",
    "scale_last_bit",
    "subnormal_values_flushed_for_few_rows",
    "rounding_toward_zero",
}


def silent(text: str) -> None:
    pass


def mutant(patch: str, name: str = "made_up") -> Mutant:
    return Mutant(name, "cpu", "a fault", "kind", mutants.ENTRIES, True, "0" * 64, parse_patch(patch, name))


# ---------------------------------------------------------------- patches


@pytest.mark.parametrize("lines", ["a\nb\nc\nd\n", "0\n1\na\nb\nc\nd\n", "b\nc\nd\n"])
def test_a_patch_applies_near_and_far_from_its_line(lines: str) -> None:
    assert apply({"x.h": lines.encode()}, mutant(PATCH)) == {"x.h": lines.replace("c", "C").encode()}


@pytest.mark.parametrize("lines", ["a\nb\nX\nd\n", "b\nc\nd\n9\n9\nb\nc\nd\n", ""])
def test_a_patch_whose_place_is_gone_or_doubtful_is_refused(lines: str) -> None:
    with pytest.raises(UserError, match=r"mutant made_up: its patch does not apply to x.h \(hunk at line 2\)"):
        apply({"x.h": lines.encode()}, mutant(PATCH))


def test_a_patch_of_an_undeclared_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"made_up: x.h is no declared file"):
        apply({"y.h": b"b\nc\nd\n"}, mutant(PATCH))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no change"),
        ("--- a/x.h\n+++ b/x.h\n", "no change"),
        (PATCH + "rubbish\n", "'rubbish' does not belong"),
        (PATCH.replace("+C", "+c"), "changes nothing"),
    ],
)
def test_rubbish_is_no_patch(text: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        parse_patch(text, "p")


def test_includes_are_pasted_once_and_the_rest_is_kept() -> None:
    """A header that two files include appears once, the first time; system headers stay includes."""
    contents = {
        "k/main.cu": b'#include <math.h>\n#include "a.h"\n#include "b.h"\nmain\n',
        "k/a.h": b'#pragma once\n#include "../c/b.h"\na\n',
        "c/b.h": b"#pragma once\nb\n",
    }
    text = [line for line in "".join(mutants._pasted(contents, "k/main.cu", set())).splitlines() if "----" not in line]
    assert text == ["#include <math.h>", "b", "a", "main"]


# ---------------------------------------------------------------- the corpora


@pytest.mark.parametrize(("corpus", "target"), [("cpu", "cpu"), ("cuda", "h200"), ("cuda", "a100")])
def test_every_mutant_applies_and_changes_the_source(corpus: str, target: str) -> None:
    found, config = load_corpus()[corpus], load_target(target)
    role = mutants.role_of(config, found)
    sources = {candidate_source(config, one, role) for one in [None, *found]}
    assert len(sources) == len(found) + 1, "two mutants are the same, or one is the honest kernel"
    assert not any('#include "' in source for source in sources)


@pytest.mark.parametrize("corpus", ["cpu", "cuda"])
def test_corpus_is_large_and_subtle(corpus: str) -> None:
    found = load_corpus()[corpus]
    assert len(found) >= 28
    assert sum(one.subtle for one in found) >= len(found) / 2
    assert sum(one.entries == mutants.ENTRIES for one in found) >= 10, "changes shared by all entry points"
    assert len({one.fault for one in found}) == len(found), "each says what it does wrong"
    assert len({one.kind for one in found}) >= 8


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    folder = tmp_path / "mutants"
    shutil.copytree(mutants.FOLDER, folder)
    return folder


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("  reciprocal:\n", "  reciprocals:\n", "reciprocals.patch: cannot read"),
        ("    subtle: false\n", "    subtle: perhaps\n", "neither true nor false"),
        ("    entries: all\n", "    entries: [decoder]\n", "neither all nor a list"),
        ("    kind: tiles\n", "", "needs fault, kind, entries and subtle"),
    ],
)
def test_a_spoiled_index_is_refused(spoiled: Path, old: str, new: str, word: str) -> None:
    index = spoiled / "index.yaml"
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=word):
        load_corpus(spoiled)


def test_an_unlisted_patch_is_refused(spoiled: Path) -> None:
    (spoiled / "cpu" / "forgotten.patch").write_text(PATCH)
    with pytest.raises(UserError, match="does not list forgotten"):
        load_corpus(spoiled)


# ---------------------------------------------------------------- the score


@pytest.fixture(scope="module")
def sampled() -> dict[str, Any]:
    """The score of a few mutants of the CPU kernel."""
    return mutation.score(["cpu"], silent, SAMPLE)


def test_honest_kernel_passes_and_mutants_die(sampled: dict[str, Any]) -> None:
    corpus = sampled["corpora"]["cpu"]
    assert corpus["control"]["status"] == "passed", corpus["control"]
    assert corpus["killed"] == corpus["total"] == len(SAMPLE), (corpus["survivors"], corpus["errors"])
    assert not corpus["complete"]
    assert mutation.passed(sampled)
    found = {record["name"]: record for record in corpus["mutants"]}
    assert all(record["subtle"] == record["expected_subtle"] for record in found.values())
    assert found["output_halved"]["killed_by"]["check"] == "accuracy"
    assert found["scale_last_bit"]["witness_only"] and "witness" in found["scale_last_bit"]["killed_by"]["check"]
    assert found["rounding_toward_zero"]["witness_only"]
    assert not found["extend_edge_open"]["witness_only"]


def test_a_seventh_of_the_corpus_dies() -> None:
    """Another seventh every day, all of it in a week; AREAL_TIK_ALL_MUTANTS=1 takes the whole corpus (six minutes)."""
    found = load_corpus()["cpu"]
    today = datetime.date.today().toordinal() % 7
    every = os.environ.get("AREAL_TIK_ALL_MUTANTS") == "1"
    names = {one.name for number, one in enumerate(found) if every or number % 7 == today}
    corpus = mutation.score(["cpu"], silent, names)["corpora"]["cpu"]
    assert corpus["killed"] == corpus["total"] == len(names), mutation.render({"corpora": {"cpu": corpus}})


def test_render_names_mutants_and_figures(sampled: dict[str, Any]) -> None:
    text = mutation.render(json.loads(json.dumps(sampled)))
    assert f"cpu: {len(SAMPLE)} of {len(SAMPLE)} killed" in text
    assert all(name in text for name in SAMPLE)
    assert "survivors" not in text


def test_a_survivor_is_named_and_fails() -> None:
    """The honest kernel under the name of a mutant: nothing kills it."""
    comment = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-{1}+{2}"
    target = load_target("cpu")
    source = next(iter(target.kernel_files()))
    first = target.verified_files()[source].decode().splitlines(keepends=True)[0]
    same = mutant(comment.format(source, first, first.replace("Unified", "unified")), "only_a_comment")
    broken = mutant(comment.format(source, first, "#error\n"), "does_not_compile")
    gone = mutant(comment.format(source, "no such line\n", "x\n"), "does_not_apply")
    records = _records([same, broken, gone])
    assert [record["status"] for record in records] == ["survived", "error", "error"]
    assert "does not compile" in records[1]["problem"]
    assert "does_not_apply: its patch does not apply" in records[2]["problem"]


def test_a_mutant_that_crashes_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither counts as killed, and neither ends the run."""
    monkeypatch.setattr(mutant_bench, "REPLY_TIMEOUT_S", 3.0)
    entry = "int unified_prefill(const UnifiedAttnParams* params, void*) {{ {0}return run(UNIFIED_ATTN_PREFILL, params); }}\n"
    patch = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-{1}+{2}"
    source = next(iter(load_target("cpu").kernel_files()))
    made = {"crashes": "__builtin_trap(); ", "hangs": "for (volatile int i = 0; i < 1;) {} "}
    records = _records(
        [mutant(patch.format(source, entry.format(""), entry.format(code)), name) for name, code in made.items()]
    )
    assert [record["status"] for record in records] == ["error", "error"]
    assert "died from signal" in records[0]["problem"]
    assert "no answer" in records[1]["problem"]


def _records(found: list[Mutant]) -> list[dict[str, Any]]:
    target = load_target("cpu")
    with tempfile.TemporaryDirectory() as folder:
        units = mutant_bench.build_all(target, list(found), Path(folder), silent)
    bench = mutant_bench.Bench(target)
    try:
        return list(mutant_bench.judged(bench, units, silent))
    finally:
        bench.close()


def test_what_must_fail_fails(sampled: dict[str, Any]) -> None:
    """A survivor, or a control that does not pass, is not a pass; and both are said."""
    survived = json.loads(json.dumps(sampled))
    survived["corpora"]["cpu"].update(killed=len(SAMPLE) - 1, survivors=["scale_last_bit"])
    assert not mutation.passed(survived) and "survivors: scale_last_bit" in mutation.render(survived)
    spoiled = json.loads(json.dumps(sampled))
    spoiled["corpora"]["cpu"]["control"].update(status="error", problem="candidate: died")
    assert not mutation.passed(spoiled) and "the unpatched kernel does not pass: candidate: died" in mutation.render(spoiled)


def test_recorded_evidence_stands_in_for_a_gpu(sampled: dict[str, Any], tmp_path: Path) -> None:
    target = load_target("cpu")
    assert mutation.recorded_score(target, tmp_path) is None
    record = json.loads(json.dumps(sampled))
    record["corpora"]["cpu"]["complete"] = True
    (tmp_path / "mutation-x.json").write_text(json.dumps(record))
    (tmp_path / "mutation-y.json").write_text("{}")
    found = mutation.recorded_score(target, tmp_path)
    assert found is not None and found["killed"] == len(SAMPLE) and not found["same"]  # a sample is not this corpus
    absent = {"target": "h200", "status": "needs a GPU", "reason": "torch sees none", "recorded": found}
    text = mutation.render({"corpora": {"cuda": absent}})
    assert "needs a GPU: torch sees none" in text and "OTHER patches or sources" in text
    assert mutation.passed({"corpora": {"cuda": absent}})


def test_command_refuses_an_existing_output(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    path.write_text("")
    with pytest.raises(UserError, match="exists already"):
        mutation.main_mutation("cpu", path, False)


def test_unknown_mutant_is_named() -> None:
    with pytest.raises(UserError, match="no mutant 'typo' of target cpu"):
        mutation.score(["cpu"], silent, {"typo"})
