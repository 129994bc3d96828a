"""How long a cell takes: formulas of a few terms, for the two schedules that the project's kernels have.

    times = full_us(parameters, card, work, clock_ratio), decode_us(...)     # microseconds a call

Bytes, operations and shares of work are counted, not fitted; rates come from the target's config. What is fitted is what no
data sheet says: the parameters, in microseconds at the clock of the card of the calibrating report.

Full sequences. A CTA works on blocks of 128 queries, two halves of 64 rows in turns, a tile of 128 keys at a time:
    tile = max(2 P, P + softmax)    P = 4 * 64 * 128 * 128 operations / the tensor rate of one multiprocessor: the products of
                                    one half. While one half multiplies, the other is in its softmax, or waits for its turn
    call = launch + max over CTAs of (its tiles * tile + its items * item)      and at least bytes / bandwidth
Tiles above the diagonal are not visited; that CTAs get unequal shares is counted from the kernel's own dealing.

Decode. A cluster of CTAs takes the tiles of one KV head in turn; heads that do not run together wait for the next wave:
    step = chain + values / (CTAs a head) + 8 * (4096 operations / a quarter of a multiprocessor's tensor rate)
    wave = max(load of the first round + tiles * step, load of all rounds + last round's steps)
    call = launch + sum of waves
The last term of a step is the issue time of the eight dependent m16n8k16 of a 128-key tile. A load takes
bytes / (share * bandwidth).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tools.evaluator.grids import Cell

Counts = npt.NDArray[np.int64]
# Blocks go back and forth over one CTA a multiprocessor, from the start of each section; or to the first CTA that is free.
Dealing = Literal["apart", "free"]
TILE, HEAD_DIM = 128, 128  # keys of a tile (the contract's), output dimensions
HALF_OPERATIONS = 4.0 * 64 * TILE * HEAD_DIM  # products of 64 query rows with one tile: Q K and P V
MMA_OPERATIONS = 2.0 * 16 * 8 * 16  # of one mma m16n8k16
CHAIN = 8  # dependent products of one tile: eight k16 slices of 128 keys
KV_TILE_BYTES = 2 * TILE * HEAD_DIM * 2  # K and V of one tile in bf16
L2_BUDGET_BYTES, LEAST_ROUNDS = 24 << 20, 8  # prefill_section of both kernels; of the Hopper kernel
FULL = ("launch_us", "softmax_us", "item_us")
DECODE = ("launch_us", "chain_us", "bandwidth_share")


@dataclass(frozen=True)
class Card:
    """What a config's target section says of a GPU."""

    multiprocessors: int
    tensor_rate: float  # operations a microsecond of one multiprocessor
    bandwidth: float  # bytes a microsecond
    clock_mhz: float

    @classmethod
    def of(cls, section: dict[str, Any]) -> Card:
        each = 1e6 * float(section["peak_tflops"]) / section["multiprocessors"]
        return cls(section["multiprocessors"], each, 1e3 * section["peak_bandwidth_gbps"], section["clock_mhz"])


@dataclass(frozen=True)
class Spread:
    """Of one KV head in decode: how many CTAs share it, how many tiles they take in a round, how many heads run together."""

    ctas: int
    round_tiles: int
    together: int


@dataclass(frozen=True)
class Kernel:
    """A kernel's schedule. decode: the names of what is fitted."""

    dealing: Dealing
    spread: Callable[[int, int, int, int], Spread]  # KV heads, query heads of each, tiles, multiprocessors
    decode: tuple[str, ...]


def cluster_spread(kv_heads: int, group: int, tiles: int, multiprocessors: int) -> Spread:
    """decode_cluster of unified_attn_ext.cu: clusters of 1, 2, 4 or 8 CTAs, each CTA scores one tile of a round."""

    def pays(ctas: int) -> bool:
        return tiles >= (32 if ctas == 8 else ctas) and kv_heads * ctas <= multiprocessors // 2

    ctas = 1
    while ctas < (2 if group > 8 else 8) and pays(2 * ctas):
        ctas *= 2
    room = multiprocessors if ctas <= 2 else multiprocessors * 10 // 11  # that can be had in clusters
    return Spread(ctas, ctas, max(1, room // ctas))


def slice_spread(kv_heads: int, group: int, tiles: int, multiprocessors: int) -> Spread:
    """decode_slices of portable_attn.cu: up to four CTAs share the output dimensions, one tile a step."""
    ctas = 1
    while ctas < 4 and kv_heads * ctas * 2 <= multiprocessors:
        ctas *= 2
    return Spread(ctas, 1, max(1, multiprocessors // ctas))


KERNELS = {  # the packaged ones by the name of the source
    "unified_attn_ext.cu": Kernel("apart", cluster_spread, DECODE),
    "portable_attn.cu": Kernel("free", slice_spread, (*DECODE[:2], "values_us", DECODE[2])),
}


def section_of(dealing: Dealing, kv_heads: int, items: int, keys: int, multiprocessors: int) -> int:
    """prefill_section of the kernels: KV heads of a section, of which each has `items` blocks."""
    fit = max(1, L2_BUDGET_BYTES // (keys * 4 * HEAD_DIM))
    full = -(-LEAST_ROUNDS * multiprocessors // items) if dealing == "apart" else 1
    return min(kv_heads, max(fit, full))


@functools.cache
def shares(cell: Cell, heads: tuple[int, int], multiprocessors: int, dealing: Dealing) -> tuple[Counts, Counts]:
    """(tiles, items) of each CTA in a full-sequence cell; an item is a block of 128 queries of one query head.

    Sections of KV heads whose K and V fit the L2 budget follow one another, in each the blocks with most keys first.
    """
    kv_heads, group, blocks = cell.batch * heads[1], heads[0] // heads[1], -(-cell.rows // TILE)
    section = section_of(dealing, kv_heads, group * blocks, cell.keys, multiprocessors)
    sizes = [section] * (kv_heads // section) + [kv_heads % section] * (kv_heads % section > 0)
    order = -(-(cell.keys - cell.rows + TILE * np.arange(blocks, 0, -1)) // TILE)  # tiles that a block's last row sees
    items = [np.repeat(order, size * group) for size in sizes]
    ctas = min(sum(map(len, items)), multiprocessors)
    if dealing != "free":
        filled = -(-len(items[0]) // ctas) * ctas  # every section has as many rounds as the first
        rounds = np.concatenate([np.pad(one, (0, filled - len(one))) for one in items]).reshape(-1, ctas)
        rounds[1::2] = rounds[1::2, ::-1].copy()
        return rounds.sum(axis=0), (rounds > 0).sum(axis=0)
    free = [(0, 0)] * ctas
    for tiles in np.concatenate(items).tolist():
        heapq.heapreplace(free, (free[0][0] + tiles, free[0][1] + 1))
    return np.array([tiles for tiles, _ in free]), np.array([count for _, count in free])


def least_us(card: Card, cell: Cell, heads: tuple[int, int]) -> float:
    """What operations and bytes allow at the card's peaks, microseconds: the evaluator refuses a cold time below it."""
    moved = cell.input_bytes(*heads) + cell.output_bytes(heads[0])
    return max(cell.flop(heads[0]) / (card.tensor_rate * card.multiprocessors), moved / card.bandwidth)


def full_us(
    kernel: Kernel, fitted: Sequence[float], card: Card, cell: Cell, heads: tuple[int, int], slower: float
) -> tuple[float, str]:
    """(microseconds, what bounds them: launch | softmax | products | memory). slower: the calibrating clock / this card's."""
    launch, softmax, item = (slower * value for value in fitted)
    products = HALF_OPERATIONS / card.tensor_rate
    tile = max(2 * products, products + softmax)
    tiles, items = shares(cell, heads, card.multiprocessors, kernel.dealing)
    work = float((tiles * tile + items * item).max())
    memory = (cell.input_bytes(*heads) + cell.output_bytes(heads[0])) / card.bandwidth
    bound = "memory" if memory > work else "products" if 2 * products > products + softmax else "softmax"
    taken = launch + max(work, memory)
    return taken, "launch" if 2 * launch > taken else bound


def decode_us(
    kernel: Kernel, fitted: Sequence[float], card: Card, cell: Cell, heads: tuple[int, int], slower: float
) -> tuple[float, str]:
    """(microseconds, what bounds them: launch | chain | memory)."""
    named = dict(zip(kernel.decode, fitted, strict=True))
    left, tiles = cell.batch * heads[1], -(-cell.keys // TILE)
    spread = kernel.spread(left, heads[0] // heads[1], tiles, card.multiprocessors)
    launch = slower * named["launch_us"]
    step = slower * (named["chain_us"] + named.get("values_us", 0.0) / spread.ctas)
    step += CHAIN * MMA_OPERATIONS / (card.tensor_rate / 4)
    load = KV_TILE_BYTES / (named["bandwidth_share"] * card.bandwidth)
    in_round = min(spread.round_tiles, tiles)
    taken, chained, loaded = launch, 0.0, 0.0
    while left > 0:
        now = min(left, spread.together)
        chain, memory = now * in_round * load + tiles * step, now * tiles * load + in_round * step
        taken += max(chain, memory)
        chained, loaded, left = chained + chain, loaded + memory, left - now
    return taken, "launch" if 2 * launch > taken else "chain" if chained > loaded else "memory"
