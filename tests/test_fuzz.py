"""The bit fuzzer: its cases, its search on honest and planted kernels, its shrinker, its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.core.errors import UserError
from tools.fuzzer import case as cases
from tools.fuzzer.case import Backend, CallSpec, Case, Drawn, Layout, Scene

# ---------------------------------------------------------------- cases on disk


def a_case(**changes: Any) -> Case:
    scene = Scene(3, 4, 2, 130, Drawn(5, "a", "jumps", "tiny_v"))
    second = CallSpec("decode", ((1, 65), (2, 1)), capacity=200, heads=(1, 1), k=Layout((2, 0, 1), (0, 1, 2), 8, 48), lse=True)
    values: dict[str, Any] = {
        "target": "cpu", "backend": Backend("library", "cpu", "x.cpp", "0" * 64), "scenes": (scene,),
        "first": CallSpec("prefill", ((0, 130), (1, 130), (2, 130)), lse=True), "second": second, "output": "lse",
        "before": (CallSpec("extend", ((2, 128),), rows=7, num_threads=3),), "observed": {"relation": "prefill/decode"},
    }  # fmt: skip
    return Case(**{**values, **changes})


def given_scene() -> Scene:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, s, 128, generator=generator).bfloat16() for h, s in ((2, 3), (1, 70), (1, 70)))
    return Scene.given(q, k, v, [70, 9])


@pytest.mark.parametrize("case", [
    a_case(),
    a_case(second=None, output="o"),
    a_case(scenes=(given_scene(),), before=(), output="o", first=CallSpec("extend", ((0, 70),), rows=3),
           second=CallSpec("decode", ((0, 69), (1, 8)), capacity=70)),
])  # fmt: skip
def test_case_round_trip(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    cases.write(path, case)
    assert cases.read(path) == case
    with pytest.raises(UserError, match="exists already"):
        cases.write(path, case)


@pytest.mark.parametrize(("change", "words"), [
    ({"version": 2}, "version"),
    ({"extra": 1}, "extra"),
    ({"first": {"entry": "decode", "parts": [[9, 3]]}}, r"first: part \[9, 3\]"),
    ({"first": {"entry": "prefill", "parts": [[0, 3], [1, 4]]}}, "first: a dense prefill takes parts of one length"),
    ({"first": {"entry": "sideways", "parts": [[0, 3]]}}, "first.entry: 'sideways'"),
    ({"second": {"entry": "decode", "parts": [[0, 9]], "capacity": 8, "lse": True}}, "second: capacity 8 is less than 9"),
    ({"second": {"entry": "decode", "parts": [[0, 9]]}}, "output: lse is compared"),
    ({"second": {"entry": "decode", "parts": [[0, 9]], "scene": 1}}, "second: no scene 1"),
    ({"second": {"entry": "decode", "parts": [[0, 9]], "k": {"skew": 8}}}, "second: k: layout"),
])  # fmt: skip
def test_a_file_that_is_no_case_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**cases.to_json(a_case()), **change}))
    with pytest.raises(UserError, match=words) as caught:
        cases.read(path)
    assert "\n" not in str(caught.value) and "case.json" in str(caught.value)


def test_given_words_must_fit_their_shape(tmp_path: Path) -> None:
    record = cases.to_json(
        a_case(scenes=(given_scene(),), before=(), output="o", first=CallSpec("extend", ((0, 70),), rows=3), second=None)
    )
    record["scenes"][0]["keys"] = 71
    with pytest.raises(UserError, match=r"given\.k: 35840 bytes, its shape needs 36352"):
        cases.from_json(record)
    record["scenes"][0]["inputs"]["given"]["q"] = "no base64!"
    with pytest.raises(UserError, match="scenes"):
        cases.from_json(record)
