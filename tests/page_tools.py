"""A made-up search for the tests of pictures: made in milliseconds, with merges, and with any text in every text field."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from tools.search.state import Best

CELLS = [
    f"{phase} B{batch} {size}"
    for phase in ("prefill", "update", "decode")
    for batch in (1, 4)
    for size in ("S256", "S1024", "S4096")
]
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
