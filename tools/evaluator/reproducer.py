"""A scene as a case of the fuzzer: the candidate's call and the witness's decode of the row, with the inputs given as words.

`python tools/fuzz.py --replay FILE` runs it again. Before it is offered it is tried: built from its words alone, in plain
storage, and else with the strides and alignment of the scene.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from tools.evaluator.scene import Scene, Stage
from tools.fuzzer import stage as fuzzer
from tools.fuzzer.case import PLAIN, Backend, CallSpec, Case, Layout
from tools.fuzzer.case import Scene as Words

MAX_BYTES = 16 << 20  # of q, k and v; larger inputs make no file


@dataclass(frozen=True)
class Origin:
    """What a case names: the target and the candidate's source."""

    target: str
    source: str | None = None
    source_sha256: str | None = None


def layout_of(tensor: Any) -> Layout:
    """How a tensor [...,128] lies in memory, as far as a Layout can say it; plain otherwise."""
    dims = sorted((d for d in range(tensor.ndim - 1) if tensor.shape[d] > 1), key=lambda d: int(tensor.stride(d)))
    outer = [d for d in range(tensor.ndim - 1) if d not in dims]
    pad = [0] * (tensor.ndim - 1)
    columns = int(tensor.stride(dims[0])) - 128 if dims else 0
    step = 128 + columns
    for d, above in itertools.pairwise(dims):
        pad[d], left = divmod(int(tensor.stride(above)), step)
        pad[d] -= int(tensor.shape[d])
        if left or pad[d] < 0:
            return PLAIN
        step = int(tensor.stride(above))
    if columns < 0 or columns % 8:
        return PLAIN
    order = [*outer, *reversed(dims)]
    if tensor.ndim == 3:  # packed: no batch
        order, pad = [0, *(d + 1 for d in (1, 0))] if order == [1, 0] else [0, 2, 1], [0, *reversed(pad)]
        return Layout(tuple(order), (0, pad[1], pad[2]), columns)
    return Layout(tuple(order), (pad[0], pad[1], pad[2]), columns, 0 if columns or any(pad) else tensor.data_ptr() % 256)


def _words(scene: Scene) -> Words:
    if scene.starts is None:
        return Words.given(scene.q, scene.k, scene.v, None if scene.lengths is None else _lengths(scene))
    import torch

    lengths = [b - a for a, b in itertools.pairwise(scene.starts)]
    longest = max(lengths)
    made = []
    for tensor, last in ((scene.q, True), (scene.k, False), (scene.v, False)):
        padded = torch.zeros(len(lengths), tensor.shape[1], longest, 128, dtype=tensor.dtype, device=tensor.device)
        for b, n in enumerate(lengths):
            place = slice(longest - n, longest) if last else slice(0, n)
            padded[b, :, place] = tensor[scene.starts[b] : scene.starts[b + 1]].transpose(0, 1)
        made.append(padded)
    return Words.given(made[0], made[1], made[2], lengths)


def _lengths(scene: Scene) -> list[int]:
    room = int(scene.k.shape[2])
    return [max(0, min(n, room)) for n in scene.lengths or ()]


def _spec(scene: Scene) -> CallSpec:
    """The candidate's call, in plain storage."""
    if scene.starts is not None:
        lengths = [b - a for a, b in itertools.pairwise(scene.starts)]
    elif scene.lengths is not None:
        lengths = _lengths(scene)
    else:
        lengths = [int(scene.k.shape[2])] * scene.sequences
    cache = scene.lengths is not None
    return CallSpec(
        scene.entry,
        tuple(enumerate(lengths)),
        rows=int(scene.q.shape[2]) if scene.entry == "extend" else 1,
        capacity=int(scene.k.shape[2]) if cache else None,
        view=cache,  # what lies behind a sequence's keys stays what it was
        lse=scene.lse,
        num_threads=scene.num_threads,
        num_sms=scene.num_sms,
    )


def case_of(stage: Stage, scene: Scene, origin: Origin, relation: str) -> Case | None:
    """A case that was seen to show the difference, or None."""
    if 2 * sum(int(t.numel()) for t in (scene.q, scene.k, scene.v)) > MAX_BYTES or scene.visible == 0:
        return None
    words, plain = _words(scene), _spec(scene)
    strided = replace(plain, view=False, q=layout_of(scene.q), k=layout_of(scene.k), v=layout_of(scene.v))
    truth = CallSpec("decode", ((scene.batch, scene.visible),), lse=scene.lse, on="witness")
    for first in (plain, strided):
        for output in ("o", "lse") if scene.lse else ("o",):
            difference = _difference(stage, words, first, truth, output)
            if difference is not None:
                observed = {
                    "relation": relation,
                    "what": "disagree",
                    "words": difference.words,
                    "differing": difference.differing,
                    "first": difference.first,
                }
                backend = Backend("library", origin.target, origin.source, origin.source_sha256)
                return Case(origin.target, backend, (words,), first, truth, output, observed=observed)
    return None


def _difference(stage: Stage, words: Words, first: CallSpec, second: CallSpec, output: str) -> fuzzer.Difference | None:
    with stage.arena.scope():
        values = fuzzer.fill(stage.arena, words)
        placed = [fuzzer.place(stage.arena, values, spec) for spec in (first, second)]
        stage.candidate.run([placed[0].call])
        call = placed[0].call
        kept = replace(call, o=call.o.clone(), lse=None if call.lse is None else call.lse.clone())
        stage.witness.run([placed[1].call])
        return fuzzer.Comparison(replace(placed[0], call=kept), placed[1], words).difference(output)
