"""What a search found, for a person and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.core import files
from tools.core.errors import UserError
from tools.core.files import show_path
from tools.fuzzer import case as cases
from tools.fuzzer.case import TENSORS, CallSpec, Case, Drawn, Layout, Scene
from tools.fuzzer.search import Finding, Search


def _scene(scene: Scene) -> str:
    source = scene.inputs
    values = f"scores {source.scores}, values {source.values}" if isinstance(source, Drawn) else "given words"
    return f"B{scene.batch} heads {scene.heads_q}/{scene.heads_kv} keys {scene.keys}, {values}"


def _layout(layout: Layout) -> str:
    shown = ["".join("bhr"[d] for d in layout.order)] if layout.order != (0, 1, 2) else []
    shown += [f"pad {'+'.join(map(str, layout.pad))}"] if any(layout.pad) else []
    shown += [f"columns +{layout.columns}"] if layout.columns else []
    return " ".join(shown + ([f"skew {layout.skew}"] if layout.skew else []))


def show_call(call: CallSpec) -> str:
    """One line that says what is special about a call."""
    shown = [f"{b}:{n}" for b, n in call.parts[:8]] + (["..."] if len(call.parts) > 8 else [])
    text = f"{call.entry} of {len(call.parts)} (sequence:keys {' '.join(shown)})"
    if call.entry == "extend":
        text += f", {call.rows} rows"
    details = {"capacity": call.capacity, "KV heads": call.heads, "route": call.route}
    text += "".join(f", {name} {value}" for name, value in details.items() if value is not None)
    for name in ("num_threads", "num_sms"):
        text += f", {name} {getattr(call, name)}" if getattr(call, name) else ""
    text += ", views" if call.view else ""
    text += f", stream {call.stream}" if call.stream != "side" else ""
    text += ", replayed" if call.graph else ""
    text += "".join(f", {name}: {_layout(getattr(call, name))}" for name in TENSORS if _layout(getattr(call, name)))
    return text + (f", on the {call.on}" if call.on != "candidate" else "")


def show_case(case: Case) -> list[str]:
    """A case in a few lines."""
    seen = case.observed
    lines = [f"scene     {_scene(scene)}" for scene in case.scenes[:4]]
    lines += [f"first     {show_call(case.first)}"]
    if len(case.before) > 3:
        lines.append(f"then      {len(case.before)} calls, the last {show_call(case.before[-1])}")
    else:
        lines += [f"then      {show_call(call)}" for call in case.before]
    if case.second is not None:
        lines.append(f"second    {show_call(case.second)}")
    if "first" in seen:
        at = seen["first"]
        place = ", ".join(f"{name} {at[name]}" for name in ("sequence", "head", "row", "dim") if name in at)
        what = "LSE words" if case.output == "lse" else "words"
        lines.append(
            f"differ    {seen['differing']} of {seen['words']} {what}, first at {place}: {at['first']} and {at['second']}"
        )
    elif seen.get("message"):
        lines.append(f"message   {seen['message'][:200]}")
    if "fails" in seen and seen["fails"][0] < seen["fails"][1]:
        lines.append(f"repeats   fails in {seen['fails'][0]} of {seen['fails'][1]} runs")
    return lines


def show_finding(finding: Finding) -> list[str]:
    head = f"found     {finding.relation}  (after {finding.seconds:.1f} s, {finding.cases} scenes)"
    return [head, *show_case(finding.case)]


def summary(search: Search, backend: Any, seed: int, seconds: float, left_out: list[str], interrupted: bool) -> dict[str, Any]:
    """The result of a search as JSON."""
    counts = search.counts
    return {
        "format": "areal-tik fuzz",
        "version": 1,
        "backend": {"kind": backend.kind, "name": backend.name, "source": backend.source,
                    "source_sha256": backend.source_sha256, "version": backend.version},
        "seed": seed,
        "seconds": round(seconds, 3),
        "interrupted": interrupted,
        "cases": counts.cases,
        "calls": counts.calls,
        "pairs": counts.pairs,
        "words": counts.words,
        "differing_pairs": counts.differing_pairs,
        "failed_batches": counts.failed_batches,
        "cases_per_second": round(counts.cases / max(seconds, 1e-9), 2),
        "calls_per_second": round(counts.calls / max(seconds, 1e-9), 2),
        "relations": dict(sorted(counts.relations.items())),
        "features": dict(sorted(counts.features.items())),
        "left_out": left_out,
        "refused": counts.refused,
        "compared_with_itself": sorted(search.generator.split),
        "findings": [
            {"relation": f.relation, "output": f.case.output, "seconds": round(f.seconds, 3), "cases": f.cases,
             "met": f.met, "case": cases.to_json(f.case)}
            for f in search.findings.values()
        ],
    }  # fmt: skip


def show_summary(result: dict[str, Any]) -> list[str]:
    counts = ", ".join(f"{name} {n}" for name, n in result["relations"].items())
    lines = [
        f"searched  {result['cases']} scenes, {result['calls']} calls, {result['pairs']} pairs, {result['words']:.3g} words "
        f"in {result['seconds']:.1f} s ({result['calls_per_second']:.0f} calls/s)",
        f"relations {counts or 'none'}",
        f"features  {', '.join(f'{name} {n}' for name, n in result['features'].items()) or 'none'}",
    ]
    lines += [f"left out  {text}" for text in result["left_out"]]
    lines += [f"refused   {entry}: {text[:160]}" for entry, text in result["refused"].items()]
    if result["compared_with_itself"]:
        lines.append(
            f"note      {', '.join(result['compared_with_itself'])}: compared with plain calls of the same entry point"
        )
    found = len(result["findings"])
    return [*lines, f"verdict   {found} kinds of disagreement" if found else "verdict   all agree"]


class Folder:
    """Where a search leaves its files: a case for each finding as it is found, and the summary at the end."""

    def __init__(self, path: Path) -> None:
        if path.exists() or path.is_symlink():
            raise UserError(f"--output: {show_path(path)} exists already and is never overwritten")
        self.path = files.make_folder(path)
        self._number = 0

    def add(self, case: Case) -> Path:
        self._number += 1
        path = self.path / f"case-{self._number}.json"
        cases.write(path, case)
        return path

    def finish(self, result: dict[str, Any]) -> None:
        files.write_new(self.path / "summary.json", json.dumps(result, indent=1) + "\n")
