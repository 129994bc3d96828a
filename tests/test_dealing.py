"""The Hopper kernel's dealing of blocks to CTAs: its own functions, compiled for the host, on many shapes."""

from __future__ import annotations

import random
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.core.config import load_target
from tools.evaluator.grids import cells

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "experimental/h200/kernels/unified_attn_ext.cu"
LARGEST = 2**31 - 1

# What the source's text stands in: CUDA's words, the call's sizes, and who counts what each CTA is dealt.
BEFORE = """
#include <cstdint>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
using bf16 = uint16_t;
struct { uint32_t x; } gridDim, blockIdx;
constexpr int64_t HEAD_DIM = 128;
constexpr int TOO_LARGE = -8;
struct Sizes { int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv; };
"""
AFTER = """
struct Plan { PrefillSchedule s; int64_t ctas, last, rounds, section; };
int planned(const Sizes* p, int num_sms, Plan* plan) {
  CONSTRUCTION
  *plan = {s, ctas, last, rounds, section};
  return 0;
}
// The item by 64-bit division, from the list of a section: its blocks from the last one down, in each its heads.
bool right(const Sizes& z, const Plan& plan, int64_t round, int64_t cta, const Item& item) {
  const int64_t group = z.heads_q / z.heads_kv, blocks = (z.seqlen_q + BLOCK_M - 1) / BLOCK_M, kv_heads = z.batch * z.heads_kv;
  const int64_t most = plan.section, section = round / plan.rounds;
  const int64_t left = kv_heads - section * most, heads = (left < most ? left : most) * group;
  const int64_t index = round % plan.rounds * plan.ctas + (round % 2 ? plan.ctas - 1 - cta : cta);
  if (index >= heads * blocks) return item.block < 0;
  const int64_t head = section * most * group + index % heads;  // of all heads of the batch
  return item.block == blocks - 1 - index / heads && item.batch == head / z.heads_q && item.head_q == head % z.heads_q &&
         item.head_kv == item.head_q / group;
}
Item at(const Plan& plan, int64_t round, int64_t cta) {
  blockIdx.x = static_cast<uint32_t>(cta);
  return item_of(plan.s, static_cast<int32_t>(round));
}
int main() {
  long long b, hq, hkv, q, k, sms, walk;
  while (scanf("%lld %lld %lld %lld %lld %lld %lld", &b, &hq, &hkv, &q, &k, &sms, &walk) == 7) {
    const Sizes z{b, hq, hkv, q, k};
    Plan plan{{Divisor(1), Divisor(1), Divisor(1), Divisor(1), Divisor(1), 0, 0, 0, 0, false}, 0, 0, 0, 0};
    if (planned(&z, static_cast<int>(sms), &plan)) {
      puts("large");
      continue;
    }
    gridDim.x = static_cast<uint32_t>(plan.ctas);
    const int64_t blocks = (q + BLOCK_M - 1) / BLOCK_M, all = (plan.last + 1) * plan.rounds;
    int64_t wrong = 0, idle = 0, most = 0, total = 0;
    if (!walk) {  // some rounds of some CTAs: the first and last ones of sections, and any
      wrong += plan.s.all_rounds != all;
      uint64_t x = 88172645463325252u;
      auto below = [&](int64_t n) { return x ^= x << 13, x ^= x >> 7, x ^= x << 17, static_cast<int64_t>(x % static_cast<uint64_t>(n)); };
      for (int i = 0; i < 3000 && !wrong; ++i) {
        const int64_t first = (i % 5 == 0 ? plan.last : below(plan.last + 1)) * plan.rounds;
        const int64_t round = first + (i % 3 == 0 ? 0 : i % 3 == 1 ? plan.rounds - 1 : below(plan.rounds)), cta = below(plan.ctas);
        wrong += !right(z, plan, round, cta, at(plan, round, cta));
      }
    } else {
      std::vector<uint8_t> dealt(static_cast<size_t>(blocks * b * hq));
      for (int64_t cta = 0; cta < plan.ctas; ++cta) {
        int64_t tiles = 0, items = 0;
        for (int64_t round = 0; round < plan.s.all_rounds; ++round) {
          const Item item = at(plan, round, cta);
          if (item.block < 0) continue;
          if (item.block >= blocks || item.batch < 0 || item.batch >= b || item.head_q < 0 || item.head_q >= hq || item.head_kv != item.head_q / (hq / hkv)) {
            ++wrong;
            continue;
          }
          wrong += dealt[static_cast<size_t>((item.batch * hq + item.head_q) * blocks + item.block)]++ != 0;
          const int64_t end = (item.block + int64_t{1}) * BLOCK_M;
          tiles += (k - q + (end < q ? end : q) + 127) / 128;
          ++items;
        }
        idle += items == 0, total += tiles, most = tiles > most ? tiles : most;
      }
      for (const uint8_t times : dealt) wrong += times != 1;
    }
    printf("%lld %lld %lld %lld %lld\\n", static_cast<long long>(wrong), static_cast<long long>(plan.ctas), static_cast<long long>(idle),
           static_cast<long long>(most), static_cast<long long>(total));
  }
}
"""


class Shape(NamedTuple):
    batch: int
    heads_q: int
    heads_kv: int
    queries: int
    keys: int
    multiprocessors: int
    walked: bool = True  # every slot; else some, beside the item that 64-bit division gives

    @property
    def items(self) -> int:
        return -(-self.queries // 128) * self.batch * self.heads_q


class Dealt(NamedTuple):
    wrong: int
    ctas: int
    idle: int
    most: int
    total: int


def program(source: str) -> str:
    """A host program around the source's own text."""

    def part(pattern: str) -> str:
        found = re.findall(pattern, source, re.M | re.S)
        assert len(found) == 1, pattern
        return str(found[0])

    construction = part(r"^  const int64_t blocks = \(p->seqlen_q.*?^ +false\};$")
    return "\n".join(
        [
            BEFORE,
            part(r"^constexpr int BLOCK_M = \d+").strip() + ";",
            *(part(rf"^struct {name} \{{.*?^\}};$") for name in ("Divisor", "PrefillSchedule", "Item")),
            part(r"^__device__ __forceinline__ Item item_of\(.*?^\}$"),
            part(r"^int64_t prefill_section\(.*?^\}$"),
            AFTER.replace("CONSTRUCTION", construction),
        ]
    )


def built(source: str, folder: Path) -> Path:
    (folder / "dealing.cpp").write_text(program(source))
    flags = ["-std=c++17", "-O2"]
    subprocess.run(["c++", *flags, "-o", folder / "dealing", folder / "dealing.cpp"], check=True)
    return folder / "dealing"


def run(binary: Path, shapes: list[Shape]) -> list[Dealt | None]:
    """What became of each shape; None where the call is refused as too large."""
    text = "".join(" ".join(str(int(field)) for field in shape) + "\n" for shape in shapes)
    lines = subprocess.run([binary], input=text, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(shapes)
    return [None if line == "large" else Dealt(*map(int, line.split())) for line in lines]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(SOURCE.read_text(), tmp_path_factory.mktemp("dealing"))


def random_shapes(count: int, largest: int) -> list[Shape]:
    """Full and packed sequences and extends, of no more than `largest` items."""
    draw, shapes = random.Random(20), list[Shape]()
    while len(shapes) < count:
        group, heads_kv = draw.randint(1, 16), draw.choice([1, 1, 2, 3, 4, 5, 8, 16, 32])
        keys = draw.choice([draw.randint(1, 300), draw.randint(1, 5000), round(2 ** draw.uniform(0, 17))])
        queries = draw.choice([keys, keys, 1, draw.randint(1, keys), keys // 2 + 1, max(1, keys // 2), max(1, keys // 16)])
        batch = draw.choice([1, 2, 3, 4, 8, 16, draw.randint(1, 300)])
        multiprocessors = draw.choice([1, 2, 7, 20, 78, 108, 114, 132, draw.randint(1, 1000)])
        shape = Shape(batch, group * heads_kv, heads_kv, queries, keys, multiprocessors)
        if shape.items <= largest:
            shapes.append(shape)
    return shapes


def edges() -> list[Shape]:
    """One of everything, one section more or less, a last section of one head, CTAs without an item in a section."""
    shapes = [Shape(1, 1, 1, 1, keys, sms) for keys in (1, 2, 3, 128, 129) for sms in (1, 2, 1000)]
    for group in (1, 3, 4, 16):
        for keys in (128, 8192, 24576, 24577, 49152, 49153, 131072):
            fit = max(1, 49152 // keys)
            for kv_heads in sorted({1, max(1, fit - 1), fit, fit + 1, 2 * fit, 2 * fit + 1} - {768, 769}):
                for queries in (keys, 1, keys // 2, keys // 2 + 1):
                    for batch, heads_kv in ((kv_heads, 1), (1, kv_heads)):
                        shapes.append(Shape(batch, group * heads_kv, heads_kv, queries, keys, 132 if group != 3 else 1000))
    return [shape for shape in shapes if shape.items <= 8000]


def huge() -> list[Shape]:
    """As many items, rounds and heads as a call may have, and one item more."""
    shapes = []
    for sms in (1, 2, 3, 132, 999, 1000):
        for group in (1, 5, 16):
            for keys, queries in (
                (1, 1),
                (128, 128),
                (2, 1),
                (129, 129),
                (8192, 8192),
                (LARGEST, LARGEST),
                (LARGEST, 1),
                (LARGEST, 2**30),
            ):
                for room in (2 * sms, 2 * sms - 1):
                    kv_heads = (LARGEST - room) // (group * -(-queries // 128))
                    for batch, heads_kv in ((kv_heads, 1), (1, kv_heads), (kv_heads + 1, 1)):
                        if kv_heads > 0 and batch * group * heads_kv <= LARGEST:
                            shapes.append(Shape(batch, group * heads_kv, heads_kv, queries, keys, sms, False))
    return shapes


@cache
def cell_shapes() -> dict[str, Shape]:
    """The timed full cells: prompts, and prompts with their answers."""
    config = load_target("h200").config
    work, sms = config["workloads"], config["target"]["multiprocessors"]
    full = [cell for cell in cells(work) if cell.phase == "full"]
    assert len(full) == 32
    return {cell.name: Shape(cell.batch, work["heads_q"], work["heads_kv"], cell.rows, cell.keys, sms) for cell in full}


def tiles(shape: Shape) -> int:
    rows = [min(first + 128, shape.queries) for first in range(0, shape.queries, 128)]
    return shape.batch * shape.heads_q * sum(-(-(shape.keys - shape.queries + row) // 128) for row in rows)


def even(shape: Shape, found: Dealt) -> bool:
    """Whether the fullest CTA has little more than the mean, as far as this is promised: for few queries of many keys, beside
    one block an eighth, and nobody without any; for a timed cell of 4,096 rows and more, less than 2 %."""
    if 2 * shape.queries <= shape.keys:
        return found.idle == 0 and (found.most - -(-shape.keys // 128)) * found.ctas <= 1.125 * found.total
    return shape not in cell_shapes().values() or shape.queries < 4096 or found.most * found.ctas < 1.02 * found.total


def test_every_block_is_dealt_once(binary: Path) -> None:
    shapes = random_shapes(400, 30_000) + edges()
    for shape, found in zip(shapes, run(binary, shapes), strict=True):
        assert found is not None, shape
        assert found.wrong == 0 and found.total == tiles(shape), shape
        assert found.ctas == min(shape.items, shape.multiprocessors) and even(shape, found), (shape, found)


def test_the_timed_cells_are_dealt_evenly(binary: Path) -> None:
    names = cell_shapes()
    for (name, shape), found in zip(names.items(), run(binary, list(names.values())), strict=True):
        assert found is not None and found.wrong == 0 and found.idle == 0 and found.total == tiles(shape), name
        assert even(shape, found), (name, found)


def too_large(shape: Shape) -> bool:
    """Whether a number of an item, or of a round, would not be one of 31 bits."""
    kv_heads, ctas = shape.batch * shape.heads_kv, min(shape.items, shape.multiprocessors)
    each = shape.items // kv_heads
    section = min(kv_heads, max((24 << 20) // (512 * shape.keys), -(-8 * shape.multiprocessors // each)))
    return shape.items > LARGEST - 2 * ctas or -(-kv_heads // section) * -(-section * each // ctas) > LARGEST


def test_the_largest_calls_are_dealt_or_refused(binary: Path) -> None:
    shapes = huge()
    refused = 0
    for shape, found in zip(shapes, run(binary, shapes), strict=True):
        assert (found is None) == too_large(shape), shape
        assert found is None or found.wrong == 0, shape
        refused += found is None
    assert 0 < refused < len(shapes) / 2


def test_all_warps_walk_the_same_rounds() -> None:
    """The producer and the consumers, which wait for each other, pass over the same items."""
    source = SOURCE.read_text()
    kernel = source[source.index("prefill_kernel(") : source.index("one-token decode")]
    head = "for (int32_t round = 0; round < schedule.all_rounds; ++round) {"
    walks = [[line.strip() for line in walk.splitlines()[1:4]] for walk in kernel.split(head)[1:]]
    assert (
        walks
        == [
            [
                "const Item item = item_of(schedule, round);",
                "if (item.block < 0) continue;",
                "const Span span = span_of(p, item);",
            ]
        ]
        * 2
    )
    assert kernel.count("item_of(") == 2


# Of each, what of the tests must notice it: a block that is not dealt once, or CTAs with more than the others.
BREAKS = {
    "a round too few": ("ctas - 1) / ctas;", "ctas - 1) / ctas - (last == 0 && items > ctas);"),
    "a round of each section too few": (
        "ctas - 1) / ctas;",
        "ctas - 1) / ctas - (last > 0 && section * group * blocks > ctas);",
    ),
    "a section too few": ("static_cast<int32_t>((last + 1) * rounds)", "static_cast<int32_t>((last + (last == 0)) * rounds)"),
    "one CTA off on the way back": ("gridDim.x - 1 - blockIdx.x", "gridDim.x - blockIdx.x"),
    "the last section as the others": ("s.last_section ? s.last_heads : s.heads", "s.last_section ? s.heads : s.heads"),
    "the wrong KV head": ("batch * s.heads_kv.by;", "batch;"),
    "a quotient too small": ("+ by - 1) / by)", ") / by)"),
    "the same way every round": ("round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x", "blockIdx.x"),
    "sections of few rounds": ("fit < full ? full : fit", "fit < 1 ? 1 : fit"),
}
UNEVEN_ONLY = {"the same way every round", "sections of few rounds"}  # every block is dealt once all the same


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_dealing_is_found(name: str, tmp_path: Path) -> None:
    source, (right, wrong) = SOURCE.read_text(), BREAKS[name]
    assert source.count(right) == 1
    broken = built(source.replace(right, wrong), tmp_path)
    shapes = random_shapes(200, 8000) + edges() + list(cell_shapes().values())
    found = list(zip(shapes, run(broken, shapes), strict=True))
    wrong_ones = [shape for shape, one in found if one is None or one.wrong]
    if name in UNEVEN_ONLY:
        assert not wrong_ones and any(one is not None and not even(shape, one) for shape, one in found)
    else:
        assert wrong_ones
