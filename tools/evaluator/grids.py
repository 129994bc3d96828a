"""How large the correctness cases are, by device kind and by how thorough the run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grid:
    """sweep: every length up to it is decoded. long: a length of many tiles. heads: the usual (query, KV) heads.
    ratios: head counts of the ratio check. batches: batch sizes. rounds: random repetitions of a check.
    repeats: runs of one call that must agree. library_shapes: shapes compared with the library, at least.
    witness_flop: work of one comparison with the witness; a larger call is compared in part.
    cells: how many cells of each phase a run times, 0 for all. oracle_rows: rows of a sequence the oracle looks at.
    hidden: secret shapes.
    """

    sweep: int
    long: int
    heads: tuple[int, int]
    ratios: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    rounds: int
    repeats: int
    library_shapes: int
    witness_flop: float
    cells: int
    oracle_rows: int
    hidden: int


RATIOS = (
    (8, 8),
    (4, 2),
    (6, 2),
    (32, 8),
    (5, 1),
    (6, 1),
    (7, 1),
    (32, 4),
    (9, 1),
    (20, 2),
    (11, 1),
    (12, 1),
    (13, 1),
    (14, 1),
    (15, 1),
    (16, 1),
    (64, 4),
    (12, 2),
)
SOME_RATIOS = ((2, 2), (12, 2), (16, 1), (5, 1))

GRIDS = {
    ("cpu", "full"): Grid(300, 1100, (4, 2), RATIOS, (2, 3, 5, 16), 3, 12, 60, 2.5e7, 0, 8, 24),
    ("cpu", "quick"): Grid(140, 300, (4, 2), SOME_RATIOS, (3,), 1, 4, 12, 5.0e6, 1, 6, 8),
    ("cuda", "full"): Grid(1200, 9000, (32, 8), RATIOS, (2, 3, 5, 16, 17), 6, 40, 220, 1e14, 0, 12, 80),
    ("cuda", "quick"): Grid(400, 2100, (32, 8), SOME_RATIOS, (3, 16), 2, 10, 60, 1e14, 2, 8, 20),
}


def grid(device: str, cases: str) -> Grid:
    return GRIDS[device, cases]


@dataclass(frozen=True)
class Cell:
    """One timed workload: `rows` query rows over `keys` keys for each of `batch` sequences."""

    name: str
    phase: str  # full | decode
    kind: str  # prefill | update | extend | decode
    batch: int
    rows: int
    keys: int

    @property
    def entry(self) -> str:
        return self.kind if self.kind in ("decode", "extend") else "prefill"

    def pairs(self) -> int:
        """Query-key pairs that one head computes: the last row sees all keys, each row before it one less."""
        return self.batch * (self.rows * self.keys - self.rows * (self.rows - 1) // 2)

    def flop(self, heads_q: int) -> float:
        return 4.0 * 128 * heads_q * self.pairs()

    def input_bytes(self, heads_q: int, heads_kv: int) -> int:
        return 2 * 128 * self.batch * (heads_q * self.rows + 2 * heads_kv * self.keys)

    def output_bytes(self, heads_q: int) -> int:
        return 2 * 128 * self.batch * heads_q * self.rows


def cells(workloads: dict[str, Any], limit: int = 0) -> list[Cell]:
    """All cells of a target's workloads in a fixed order; `limit` keeps that many of each kind, spread over the grid."""
    found: list[Cell] = []
    for kind, axis in (("prefill", "seqlen"), ("update", "prompt"), ("extend", "context"), ("decode", "context")):
        axes = workloads.get(kind)
        if not axes:
            continue
        more = axes.get("answer", 0) + axes.get("new", 0)
        group = []
        for batch in axes["batch"]:
            for size in axes[axis]:
                rows = {"decode": 1, "extend": more}.get(kind, size + more)
                label = ("S" if axis != "context" else "L") + f"{size}" + (f"+{more}" if more else "")
                phase = "decode" if kind == "decode" else "full"
                group.append(Cell(f"{kind} B{batch} {label}", phase, kind, batch, rows, size + more))
        if limit:
            group = group[:: max(1, len(group) // limit)][:limit]
        found += group
    return found
