"""What two calls that should agree have in common and what sets them apart: the plain twin of a call, and names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tools.fuzzer.case import TENSORS, CallSpec, Case, Layout

Natural = Callable[[str], Layout]
USUAL = (Layout(), Layout((0, 2, 1)))  # heads before rows, rows before heads


def twin(call: CallSpec, part: tuple[int, int], natural: Natural) -> CallSpec:
    """The plainest call of the same entry point that computes one part of `call`: alone, dense, nothing special."""
    layout = natural(call.entry)
    return CallSpec(
        call.entry, (part,), rows=min(call.rows, part[1]), scene=call.scene, heads=call.heads, lse=call.lse,
        route=call.route, on=call.on, q=layout, k=layout, v=layout, o=layout,
    )  # fmt: skip


def differences(first: CallSpec, second: CallSpec) -> list[str]:
    """In what two calls differ beside the entry point and the kernel, by name."""
    found = []

    def differ(name: str, a: object, b: object) -> None:
        if a != b:
            found.append(name)

    differ("batch", len(first.parts), len(second.parts))
    if first.entry == second.entry:
        if {n for _, n in first.parts} != {n for _, n in second.parts} and "batch" not in found:
            found.append("length")
        differ("rows", first.rows, second.rows)
    differ("lengths", first.capacity, second.capacity)
    if any(n != second.parts[0][1] for _, n in second.parts) or any(n != first.parts[0][1] for _, n in first.parts):
        found.append("neighbours")
    differ("heads", first.heads, second.heads)
    storage = [_storage(call) for call in (first, second)]
    if first.entry == second.entry:
        differ("strides", *storage)
    elif not all(view or (len(set(layouts)) == 1 and layouts[0] in USUAL) for layouts, view in storage):
        found.append("strides")
    differ("addresses", *([getattr(c, t).skew for t in TENSORS] for c in (first, second)))
    differ("LSE asked for", first.lse, second.lse)
    differ("threads", first.num_threads, second.num_threads)
    differ("multiprocessors", first.num_sms, second.num_sms)
    differ("stream", first.stream, second.stream)
    differ("graph", first.graph, second.graph)
    if first.entry == second.entry:
        differ("route", first.route, second.route)
    return found


def _storage(call: CallSpec) -> tuple[list[Layout], bool]:
    """How a call's tensors are stored, their addresses left out, and whether k and v are views."""
    return [dataclasses.replace(getattr(call, tensor), skew=0) for tensor in TENSORS], call.view


def name(case: Case) -> str:
    """The relation that a case is about, e.g. "prefill/decode", "decode: batch", "extend: history"."""
    first, second = case.first, case.second
    if second is None:
        return str(case.observed.get("what", "fails")) + ": " + first.entry
    entries = sorted({first.entry, second.entry}, key=("prefill", "packed", "extend", "decode").index)
    found = differences(first, second) + (["history"] if case.before else [])
    head = "/".join(entries) + ("/witness" if first.on != second.on else "")
    if not found and len(entries) == 1 and first.on == second.on:
        found = ["again"]
    return head + (": " + " + ".join(found) if found else "")
