"""Which stage of the reduction is the first to leave the contract, found by probing one row (probes.py).

Every probe runs on the candidate, in the scene that shows the fault, and on the witness. The stages, in their order:
keys (which take part), scores, max, P (weights), row sum, rescale, PV, final (division and rounding), lse. A stage is
named where a probe diverges in which it alone has something to round; "by elimination" where only the row's own values
show the fault.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.evaluator import probes
from tools.evaluator.probes import Probe, RowData
from tools.evaluator.scene import HEAD_DIM, Row, Scene, Stage, copy, extent

COARSE = 1e-4  # an LSE further off than this, relative to 1 + its size, is no matter of rounding
MEANING = {
    "keys": "some key takes no part, or one does that should not",
    "scores": "a score q.k is not the contract's: order of the sum, operands, or a key's place",
    "max": "weights of the loudest key are not 1: the maximum is taken over other keys, or otherwise",
    "P": "a weight of one key is not the contract's: its argument, exponential or rounding",
    "row sum": "weights agree one by one, and their sum over a tile or over tiles does not: association, order, edges of tiles",
    "rescale": "what a louder key in a later tile does to the sums before it",
    "PV": "weights and their sum agree, and the sum of their products with V does not",
    "final": "the sums agree, and their quotient or its rounding does not",
    "lse": "the output agrees, and the LSE does not",
}
MAX_TILES = 32  # the row is cut after each of these; beyond, after powers of two
FEW_KEYS = 5
OTHER_TILES = 6  # tried beside the likely one
MAX_SLOTS, SLOT_BYTES = 64, 64 << 20  # probes in one request, and the memory of their copies


def as_float(word: int, bits: int) -> float:
    """The number of a bf16 or fp32 word."""
    return float(struct.unpack("<f", struct.pack("<I", word << 16 if bits == 16 else word))[0])


@dataclass(frozen=True)
class Seen:
    """One probe's outcome."""

    got: Row
    expected: Row

    @property
    def o(self) -> bool:
        return self.got.o != self.expected.o

    @property
    def lse(self) -> bool:
        return self.got.differing(self.expected)[1]

    def coarse(self) -> bool:
        """The LSE is off by more than rounding, or no number."""
        if self.got.lse is None or self.expected.lse is None:
            return False
        got, expected = as_float(self.got.lse, 32), as_float(self.expected.lse, 32)
        return not abs(got - expected) <= COARSE * (1 + abs(expected))

    def finite(self) -> bool:
        words = [as_float(word, 16) for word in self.got.o]
        return all(map(math.isfinite, words)) and (self.got.lse is None or math.isfinite(as_float(self.got.lse, 32)))


@dataclass
class Verdict:
    """stage: the first that diverges, None where nothing does. tile: keys of the first tile in which it was seen to."""

    stage: str | None = None
    probe: str = ""
    tile: range | None = None
    by_elimination: bool = False
    untrusted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True

    def record(self) -> dict[str, Any]:
        return {
            "first": self.stage,
            "meaning": MEANING.get(self.stage or ""),
            "probe": self.probe,
            "by_elimination": self.by_elimination,
            "tile": None if self.tile is None else [self.tile.start, self.tile.stop],
            "untrusted": self.untrusted,
            "complete": self.complete,
        }


class OutOfTime(Exception):
    """The budget is spent."""


class Lab:
    """Writes probes into copies of a scene and runs many of them in one request."""

    def __init__(self, stage: Stage, scene: Scene, tile: int, order: str, spare_s: float) -> None:
        """spare_s: seconds of the stage's budget that are not for probes."""
        self._stage, self._scene, self._spare_s = stage, scene, spare_s
        self.row = RowData(scene.row_q(), *scene.row_kv(), tile, order, stage.arena.device == "cuda")
        self._behind = scene.sequence_kv()[0][self.row.n :].clone()
        self._slots: list[Scene] = []
        size = 2 * sum(extent(t) for t in (scene.q, scene.k, scene.v, scene.q))
        self._width = max(1, min(MAX_SLOTS, SLOT_BYTES // size))
        self.runs = 0

    def _slot(self, number: int, probe: Probe) -> Scene:
        while len(self._slots) <= number:
            self._slots.append(copy(self._stage.arena, self._scene))
        slot = self._slots[number]
        k, v = slot.sequence_kv()
        for target, source in ((slot.row_q(), probe.q), (k[: self.row.n], probe.k), (v[: self.row.n], probe.v)):
            target.copy_(source)
        if self._behind.numel():
            loud = -self.row.quiet * self.row.carrier_q().to(k.device)
            k[self.row.n :] = loud if probe.behind == "loud" else self._behind
        return slot

    def look(self, wanted: list[Probe]) -> list[Seen]:
        """Raises OutOfTime or WorkerFailure."""
        found: list[Seen] = []
        for start in range(0, len(wanted), self._width):
            if self._stage.left() <= self._spare_s:
                raise OutOfTime
            some = [self._slot(i, probe) for i, probe in enumerate(wanted[start : start + self._width])]
            self.runs += len(some)
            found += [Seen(*pair) for pair in zip(self._stage.answers(some), self._stage.truths(some), strict=True)]
        return found


# ---------------------------------------------------------------- the stages


class Ladder:
    """Goes through the stages. `o` and `lse`: whether differences there still say something about what comes before."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.row = lab, lab.row
        self.o = self.lse = True
        self.final = self.only_lse = ""  # probes that show the end itself to be off
        self.small = ""  # the probe that shows subnormal values to come out otherwise
        self.blamed: tuple[str, str] | None = None  # a stage and a probe: weights that should be 1 are not
        self.notes: list[str] = []
        self.own_scores = bool(self.row.q_size) and math.isfinite(self.row.quiet / self.row.q_size)

    def _first(self, wanted: list[Probe], shown: list[str] | None = None) -> str | None:
        """The name of the first probe that diverges in a channel that is trusted (and shown)."""
        seen = self.lab.look(wanted)
        for probe, one, channel in zip(wanted, seen, shown or ["both"] * len(seen), strict=True):
            if (self.o and one.o and channel != "lse") or (self.lse and one.lse and channel != "o"):
                return probe.name
        return None

    def ends(self) -> None:
        """What the end alone does; whatever is wrong there can no longer be used to read the stages before."""
        wanted = list(probes.ends(self.row))
        seen = self.lab.look(wanted)
        o = [probe.name for probe, one in zip(wanted, seen, strict=True) if one.o]
        lse = [probe.name for probe, one in zip(wanted, seen, strict=True) if one.lse]
        if o and lse:  # one cause for both: a sum of ones that is not their number, or weights other than 1
            self.blamed = ("row sum" if any(one.coarse() for one in seen) else "max", o[0])
        elif o:
            self.final, self.o = o[0], False
        elif lse:
            self.only_lse, self.lse = lse[0], False
        if self.o:
            self.small = self._first([probes.subnormal(self.row)], ["o"]) or ""

    def one_score(self, tile: range) -> None:
        """A single key of an exact score has weight 1. Sets `blamed` where it has not."""
        if self.blamed:
            return
        keys, spread = list(tile), list(tile[:: max(1, len(tile) // 8)])
        own = [probes.exact_score(self.row, key, float(self.row.scores[key])) for key in keys]
        loud = [probes.exact_score(self.row, key, float(self.row.scores[key]), "loud") for key in spread]
        whole = [probes.exact_score(self.row, key, float(131 + 12 * i)) for i, key in enumerate(spread)]
        seen = self.lab.look(own + loud)
        bad = [(p.name, one) for p, one in zip(own + loud, seen, strict=True) if (self.o and one.o) or (self.lse and one.lse)]
        if not bad:
            return
        if any(one.o or one.coarse() or not one.finite() for _, one in bad):
            zero = [probes.exact_score(self.row, key, 0.0) for key in keys]
            # The value of a score is off, though the right key is heard, and equal scores are right.
            value = not any(one.o for _, one in bad) and all(one.finite() for _, one in bad) and self._first(zero) is None
            self.blamed = ("scores" if value else "max", bad[0][0])
        elif self._weights(tile) is None and self._ties(tile) is None:
            self.only_lse, self.lse = bad[0][0], False
        else:
            name = self._first(whole)
            self.blamed = ("P", name) if name else ("max", bad[0][0])

    def keys(self, tile: range) -> str | None:
        """Keys that take no part, or values that should not."""
        blocks = [range(s, min(s + HEAD_DIM, tile.stop)) for s in range(tile.start, tile.stop, HEAD_DIM)]
        wanted = [probes.which_keys(self.row, block) for block in blocks]
        for block, probe, seen in zip(blocks, wanted, self.lab.look(wanted), strict=True):
            there = [as_float(word, 16) != 0 for word in seen.got.o]
            missing = [block.start + d for d in range(len(block)) if not there[d]]
            foreign = sum(there[len(block) :])
            if self.row.n > len(missing) > 0 or foreign:
                what = f"keys {missing[0]} to {missing[-1]} ({len(missing)}) take no part" if missing else "no key is missing"
                self.notes.append(what + (f"; values of other keys reach {foreign} dims" if foreign else ""))
                return probe.name
        return None

    def scores(self, tile: range) -> str | None:
        """Own scores, where exact ones give no difference."""
        if not self.own_scores:
            return None
        name = self._first([probes.own_score(self.row, key) for key in tile])
        if name is None and self._weights(tile) is None:
            return self._weights(tile, own_scores=True)
        return name

    def _weights(self, tile: range, own_scores: bool = False) -> str | None:
        """Weights read in the output alone."""
        found = [pair for key in tile for pair in probes.weights(self.row, tile, key, own_scores=own_scores)]
        wanted = [probe for shown, probe in found if shown == "o"]
        return self._first(wanted, ["o"] * len(wanted))

    def _ties(self, tile: range) -> str | None:
        scores = sorted({float(self.row.scores[key]) for key in tile})
        wanted = [probe for score in scores[:: max(1, len(scores) // 16)] for probe in probes.ties_at(self.row, tile, score)]
        return self._first(wanted, ["o"] * len(wanted))

    def weights(self, tile: range) -> str | None:
        return self._weights(tile)

    def sum_of_two(self, tile: range) -> str | None:
        """Two weights of which one is 1: their sum, read in the LSE."""
        found = [pair for key in tile for pair in probes.weights(self.row, tile, key, own_scores=False)]
        wanted = [probe for shown, probe in found if shown == "lse"]
        return self._sums(wanted, tile) if self.lse else None

    def row_sum(self, tile: range) -> str | None:
        return self._sums([], tile)

    def _sums(self, wanted: list[Probe], tile: range) -> str | None:
        """The first of `wanted`, and of sums of the tile, that diverges. An LSE that is off beside right sums is off itself."""
        sums = [probes.row_sum(self.row, [tile], tile, seed) for seed in range(4)] if len(tile) > 4 else []
        in_output = self._first(sums, ["o"] * len(sums))
        in_lse = self._first(wanted + sums, ["lse"] * len(wanted + sums))
        if in_lse and not in_output and self.o and sums:
            self.only_lse, self.lse = in_lse, False
            return None
        return in_lse or in_output

    def rescale(self, tile: range) -> str | None:
        place = self.row.tiles.index(tile)
        if place == 0:
            return None
        found = list(probes.rescales(self.row, self.row.tiles[place - 1], tile, plain=bool(self.small)))
        return self._first([probe for _, probe in found], [shown for shown, _ in found])

    def running_sum(self, tile: range) -> str | None:
        """The sum over tiles, once weights, rescales and sums of one tile are known to agree."""
        tiles = self.row.tiles[: self.row.tiles.index(tile) + 1]
        homes = [home for home in (tiles[0], tiles[-1]) if len(home) > 4]
        if len(tiles) == 1:
            return None
        return self._first([probes.row_sum(self.row, tiles, home, seed) for home in homes for seed in range(12)])

    def products(self, tile: range) -> str | None:
        wanted = list(probes.products(self.row, tile))
        return self._first(wanted, ["o"] * len(wanted))

    def steps(self) -> Iterator[tuple[str, Callable[[range], str | None]]]:
        yield "keys", self.keys
        yield "scores", self.scores
        yield "P", self.weights
        yield "P" if self.row.weights_in_bf16 else "row sum", self.sum_of_two  # the output has weights of 24 bits, or of 8
        yield "row sum", self.row_sum
        yield "rescale", self.rescale
        yield "row sum", self.running_sum
        yield "PV", self.products


def _suspect(ladder: Ladder) -> range:
    """The tile with which the row, computed up to some tile of the reduction, first comes out differently."""
    row = ladder.row
    if ladder.own_scores:
        for count in (c for c in range(1, len(row.tiles) + 1) if c <= MAX_TILES or c & (c - 1) == 0):
            if any(seen.o or seen.lse for seen in ladder.lab.look(list(probes.up_to(row, count)))):
                return row.tiles[count - 1]
    return row.tiles[-1]


def diagnose(lab: Lab) -> Verdict:
    """The first stage that diverges. Raises WorkerFailure; being out of time is noted in the verdict."""
    verdict = Verdict()
    if not lab.row.usable:
        verdict.notes.append("the row has no keys or no finite values: its stages cannot be told apart")
        return verdict
    ladder = Ladder(lab)
    if lab.row.n < FEW_KEYS:
        verdict.notes.append(f"the row sees {lab.row.n} keys: maximum, weights, sums and LSE can hardly be told apart")
    try:
        _climb(ladder, verdict)
    except OutOfTime:
        verdict.complete = False
        verdict.notes.append("the time for probes ran out")
    if verdict.stage is None and (ladder.final or ladder.only_lse):
        verdict.stage = "final" if ladder.final else "lse"
        verdict.probe = ladder.final or ladder.only_lse
    verdict.untrusted = [name for name, trusted in (("o", ladder.o), ("lse", ladder.lse)) if not trusted]
    verdict.notes += ladder.notes
    return verdict


def _climb(ladder: Ladder, verdict: Verdict) -> None:
    ladder.ends()
    suspect, tiles = _suspect(ladder), ladder.row.tiles
    rest = [tile for tile in tiles if tile != suspect]
    for tried in ([suspect], rest[:: max(1, len(rest) // OTHER_TILES)]):  # the likely tile through all stages first
        for stage, probe in ladder.steps():
            if stage == "scores":  # the keys are right, and nothing else has been looked at
                for tile in tried:
                    ladder.one_score(tile)
                    if ladder.blamed:
                        verdict.stage, verdict.probe = ladder.blamed
                        verdict.tile = tile
                        return
            for tile in tried:
                name = probe(tile)
                if name is not None:
                    verdict.stage, verdict.probe, verdict.tile = stage, name, tile
                    _earliest(tiles[: tiles.index(tile)], probe, verdict)
                    return
        if ladder.final or ladder.only_lse:
            return  # seen already, and nothing before it
    whole = probes.own(ladder.row)
    (seen,) = ladder.lab.look([whole])
    verdict.stage, verdict.probe = "row sum" if seen.lse else "PV", ladder.small or whole.name
    verdict.tile, verdict.by_elimination = suspect, not ladder.small


def _earliest(tiles: list[range], probe: Callable[[range], str | None], verdict: Verdict) -> None:
    """The first tile of the reduction in which the probe diverges."""
    for tile in tiles:
        if (name := probe(tile)) is not None:
            verdict.probe, verdict.tile = name, tile
            return
