"""Inputs of one row that leave one stage of the reduction something to do and make every other stage exact.

Scores without rounding: a *carrier* query has 1 in three dims, and a key holds in those dims three bf16 numbers whose sum is
any fp32 score; the products are exact in every order. A *quiet* key lies so far below the rest that its weight is exactly
0, and so is the rescale from a tile of quiet keys. Keys of one score have weight exactly 1. A sum of weights 1 is exact,
and so is a sum of three values that are the upper, middle and lower 8 bits of one fp32 number.

What an output rounded to bf16 would hide is brought out by cancelling the upper bits (`weight`, `product`) or by putting the
quotient beside a tie (`tie_values`), where the last bit of the divisor decides.

All tensors here are on the CPU; a Probe's q is [128], its k and v [n,128], n the keys that the row sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

DIM = 128
C2 = float.fromhex("0x1.0527dcp-3")  # log2(e) / sqrt(128), as both contracts have it
FAR = 4096.0  # raw score units; a weight is 0 from 990 on


MARK = (1 + torch.arange(DIM) / DIM).to(torch.bfloat16)  # a value like no other, exact


@dataclass(frozen=True)
class Probe:
    """keys: what the keys behind the row's own hold: "own" (left as they are) or "loud" (above every visible score)."""

    name: str
    q: Any
    k: Any
    v: Any
    behind: str = "own"


def split3(x: Any) -> Any:
    """fp32 [...] -> bf16 [..., 3] with the exact sum x: upper, middle and lower 8 bits, of one sign."""
    parts = []
    for _ in range(3):
        upper = (x.view(torch.int32) & -65536).view(torch.float32)
        parts.append(upper)
        x = x - upper
    return torch.stack(parts, -1).to(torch.bfloat16)


class RowData:
    """A row's own q, k, v (bf16, CPU copies), its scores as nearby fp32 numbers, and the tiles in the order of the contract."""

    def __init__(self, q: Any, k: Any, v: Any, tile: int, order: str, weights_in_bf16: bool) -> None:
        self.q, self.k, self.v = (t.detach().cpu().clone() for t in (q, k, v))
        self.n, self.weights_in_bf16 = int(k.shape[0]), weights_in_bf16
        self.scores = (self.k.double() @ self.q.double()).float()
        starts = list(range(0, self.n, tile))
        self.tiles = [range(s, min(s + tile, self.n)) for s in (reversed(starts) if order == "descending" else starts)]
        self.tile_of = {t.start // tile: t for t in self.tiles}
        self.quiet = -float(torch.tensor(2 * float(self.scores.abs().max()) + FAR).to(torch.bfloat16))
        self.q_size = float(self.q.double().abs().sum())
        self.usable = bool(torch.isfinite(self.scores).all() and torch.isfinite(self.v).all() and self.n)

    # ------------------------------------------------------------ keys and queries

    def carrier_q(self) -> Any:
        q = torch.zeros(DIM, dtype=torch.bfloat16)
        q[:3] = 1.0
        return q

    def carrier_k(self, scores: Any) -> Any:
        """[n,128] from fp32 scores [n]."""
        k = torch.zeros(self.n, DIM, dtype=torch.bfloat16)
        k[:, :3] = split3(scores)
        return k

    def with_scores(self, given: dict[int, float]) -> Any:
        """Carrier keys: `given` scores, all others quiet."""
        scores = torch.full((self.n,), self.quiet)
        for key, score in given.items():
            scores[key] = score
        return self.carrier_k(scores)

    def own_keys(self, keys: list[int], copies: dict[int, int]) -> Any:
        """The row's own keys where named, quiet ones for its own q elsewhere. copies: key -> the key whose copy it holds."""
        scale = -2.0 * self.quiet / self.q_size
        k = (-scale * torch.where(self.q.float() < 0, -1.0, 1.0)).to(torch.bfloat16).expand(self.n, DIM).clone()
        k[keys] = self.k[keys]
        for key, source in copies.items():
            k[key] = self.k[source]
        return k

    def values(self, given: dict[int, Any]) -> Any:
        """[n,128]: the given rows, 0 elsewhere."""
        v = torch.zeros(self.n, DIM, dtype=torch.bfloat16)
        for key, row in given.items():
            v[key] = row
        return v

    def weight(self, key: int, top: float) -> float:
        """Of a key relative to score `top`."""
        return float(2.0 ** ((float(self.scores[key]) - top) * C2))

    def others(self, keys: range, key: int, count: int) -> list[int]:
        """`count` keys of a tile beside `key`, the next ones around; fewer where the tile has no more."""
        return [keys[(keys.index(key) + step) % len(keys)] for step in range(1, min(count, len(keys) - 1) + 1)]

    def loudest(self, keys: range) -> int:
        return keys[int(self.scores[keys.start : keys.stop].argmax())]


# ---------------------------------------------------------------- which keys take part


def which_keys(row: RowData, block: range) -> Probe:
    """All weights equal; value j of the block is 1 in dim j alone, so that the output shows which keys took part."""
    v = torch.zeros(row.n, DIM, dtype=torch.bfloat16)
    for key in block:
        v[key, key - block.start] = 1.0
    return Probe(f"keys {block.start} to {block.stop - 1}", torch.zeros_like(row.q), row.k, v)


# ---------------------------------------------------------------- the end


def tie_values(total: float, seed: int) -> Any:
    """[128,3] bf16: three values a dim whose sum over `total` lies beside a tie between two bf16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randint(128, 256, (DIM,), generator=generator).double() * 2 + 1
    ulps = torch.arange(DIM).double() - DIM // 2
    return split3((total * odd / 256 * (1 + ulps * 2.0**-24)).float())


def exact_ties(total: int, seed: int) -> Any:
    """The same with quotients that are ties exactly."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randint(128, 256, (DIM,), generator=generator) * 2 + 1
    return split3((total * odd).float())


def ends(row: RowData) -> Iterator[Probe]:
    """All keys of one score: weights 1, sum n, exact output sums. Only the division, the last rounding and the LSE act."""
    for seed in range(3):
        ties = exact_ties(row.n, seed)
        if row.n < 3:
            ties = torch.randn(DIM, 3, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        spread = [row.n // 2, 0, row.n - 1]
        v = row.values({key: ties[:, part] for part, key in enumerate(spread[: row.n])})
        zero = torch.zeros_like(row.q)
        yield Probe(f"equal scores, {row.n} keys", zero, row.carrier_k(torch.zeros(row.n)), v)
    keys = row.tiles[0]
    for count in (1, 3, 5, 7, 11, 13, 29, 61):
        if count <= len(keys):
            loud = list(keys[:count])
            ties = exact_ties(count, count) if count > 2 else split3(torch.ones(DIM))
            k = row.with_scores(dict.fromkeys(loud, 0.0))
            yield Probe(
                f"{count} keys of one score",
                row.carrier_q(),
                k,
                row.values({key: ties[:, p] for p, key in enumerate(loud[:3])}),
            )


# ---------------------------------------------------------------- scores and maximum


def own_score(row: RowData, key: int) -> Probe:
    """One key heard, all others quiet: the LSE is its scaled score, the output its value."""
    return Probe(f"key {key} alone", row.q, row.own_keys([key], {}), row.values({key: MARK}))


def exact_score(row: RowData, key: int, score: float, behind: str = "own") -> Probe:
    """The same with a score that needs no rounding; weights are 0 and 1."""
    name = f"key {key} alone, exact score {score:.9g}" + (", louder keys behind" if behind == "loud" else "")
    return Probe(name, row.carrier_q(), row.with_scores({key: score}), row.values({key: MARK}), behind)


def ties_at(row: RowData, keys: range, score: float) -> Iterator[Probe]:
    """Three keys of one exact score; their outputs lie on ties, and move where the weights are not exactly 1."""
    for seed in range(2 if len(keys) > 2 else 0):
        ties = exact_ties(3, seed)
        loud = list(keys[:3])
        k, v = row.with_scores(dict.fromkeys(loud, score)), row.values({key: ties[:, p] for p, key in enumerate(loud)})
        yield Probe(f"3 keys of score {score:.9g}", row.carrier_q(), k, v)


# ---------------------------------------------------------------- weights


def _low_bits(weight: float) -> tuple[Any, Any]:
    """The upper 8 and the next 8 bits of a weight, as bf16."""
    parts = split3(torch.tensor(weight, dtype=torch.float32))
    return parts[0], parts[1]


def _weight_values(row: RowData, key: int, tops: list[int], weight: float) -> Any:
    """Values that show a weight's upper, middle and lower bits."""
    upper, middle = _low_bits(weight)
    v = torch.zeros(row.n, DIM, dtype=torch.bfloat16)
    v[key] = 1.0
    v[tops[0], 1::4] = -upper
    v[tops[0], 2::4] = -upper
    if len(tops) > 1:
        v[tops[1], 2::4] = -middle
    return v


def weights(row: RowData, keys: range, key: int, *, own_scores: bool) -> Iterator[tuple[str, Probe]]:
    """A key beside one or two copies of the row's loudest; ("o" or "lse", which of the two to look at)."""
    top = row.loudest(range(row.n))
    weight = row.weight(key, float(row.scores[top]))
    for count, shown in ((2, "o"), (1, "lse")):
        tops = row.others(keys, key, count)
        if not tops:
            return
        v = _weight_values(row, key, tops, weight)
        if own_scores:
            yield shown, Probe(f"weight of key {key}", row.q, row.own_keys([key], dict.fromkeys(tops, top)), v)
        else:
            given = {key: float(row.scores[key]), **dict.fromkeys(tops, float(row.scores[top]))}
            yield shown, Probe(f"weight of key {key}, exact scores", row.carrier_q(), row.with_scores(given), v)


# ---------------------------------------------------------------- sums


def row_sum(row: RowData, tiles: list[range], home: range, seed: int = 0) -> Probe:
    """Exact own scores in `tiles`, three copies of the loudest in `home`, one of them (of 5 keys or more).

    The output reads the sum of weights to its last bit.
    """
    shift = torch.tensor(seed / 7.0, dtype=torch.float32)  # other scores for every seed
    given = {key: float(row.scores[key] + (shift if key % 3 else -shift)) for keys in tiles for key in keys}
    top = max(given.values())
    places = [home[0], home[len(home) // 2], home[-1]]
    given.update(dict.fromkeys(places, top))
    total = sum(2.0 ** ((s - top) * C2) for s in torch.tensor(list(given.values())).double().tolist())
    ties = tie_values(total, seed)
    v = row.values({key: ties[:, part] for part, key in enumerate(places)})
    return Probe(
        f"sum of weights of {len(tiles)} tile(s), the loudest from key {home.start}", row.carrier_q(), row.with_scores(given), v
    )


def subnormal(row: RowData) -> Probe:
    """One key of subnormal values: they must come out as they are."""
    key = row.tiles[0].start
    value = ((torch.arange(DIM) - DIM // 2) * 2.0**-133).to(torch.bfloat16)
    return Probe("one key of subnormal values", row.carrier_q(), row.with_scores({key: 0.0}), row.values({key: value}))


def rescales(row: RowData, before: range, after: range, *, plain: bool) -> Iterator[tuple[str, Probe]]:
    """One key in a tile and a louder one in a later tile: the first one's weight is the rescale itself.

    plain: without values that become subnormal.
    """
    low, high = row.loudest(before), row.loudest(after)
    scores = float(row.scores[low]), float(row.scores[high])
    rise = abs(scores[0] - scores[1])
    for gap in (rise, min(rise, 300.0), 1.7, 0.0):
        score = float(torch.tensor(scores[1] - gap, dtype=torch.float32))
        rescale = float(2.0 ** ((score - scores[1]) * C2))
        for count, shown in ((2, "o"), (1, "lse")):
            tops = [high, *row.others(after, high, count - 1)]
            v = _weight_values(row, low, tops, rescale)
            if not plain:
                v[low, 7::8] = (torch.arange(DIM // 8) - 7).to(torch.bfloat16) * 2.0**-131  # subnormal after or before it
                v[tops[0], 7::8] = 0.0
            given = {low: score, **dict.fromkeys(tops, scores[1])}
            yield shown, Probe(f"rescale of key {low} by a gap of {gap:.4g}", row.carrier_q(), row.with_scores(given), v)


def cancelling(row: RowData, keys: list[int], seed: int) -> Any:
    """[n,128]: values of `keys` that cancel under their weights, so that the roundings of the sum are what is left."""
    v = torch.randn(row.n, DIM, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    scores = row.scores[keys].double()
    weight = 2.0 ** ((scores - scores.max()) * C2)
    if row.weights_in_bf16:
        weight = weight.to(torch.bfloat16).double()
    inside = v[keys]
    for position in weight.argsort(descending=True)[:2].tolist():
        rest = weight @ inside.double() - weight[position] * inside[position].double()
        inside[position] = (-rest / weight[position]).to(torch.bfloat16)
    return row.values(dict(zip(keys, inside, strict=True)))


def products(row: RowData, keys: range) -> Iterator[Probe]:
    """Exact own scores in one tile; values that cancel, and own values."""
    k = row.with_scores({key: float(row.scores[key]) for key in keys})
    for seed in range(2):
        v = cancelling(row, list(keys), seed)
        yield Probe(f"products of the tile from key {keys.start}", row.carrier_q(), k, v)
    own = row.values({key: row.v[key] for key in keys})
    yield Probe(f"own values of the tile from key {keys.start}", row.carrier_q(), k, own)


def up_to(row: RowData, count: int) -> Iterator[Probe]:
    """The row itself, all but the first `count` tiles of the reduction quiet; with own values, and with cancelling ones."""
    keys = [key for tile in row.tiles[:count] for key in tile]
    k = row.own_keys(keys, {})
    yield Probe(f"the first {count} tile(s)", row.q, k, row.values({key: row.v[key] for key in keys}))
    yield Probe(f"the first {count} tile(s), cancelling values", row.q, k, cancelling(row, keys, count))


def own(row: RowData) -> Probe:
    """The row as it is."""
    return Probe("own values", row.q, row.k, row.v)
