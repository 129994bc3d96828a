"""What to try next: scenes, and for each a reference call and many others that must agree with it.

A batch is a few scenes whose calls run interleaved in one request, so that each meets what others of other sizes left
behind. Small spaces are enumerated (decks.py): every length, every batch with every ratio of heads, every capacity,
every order of dimensions, every pair of kinds. The rest is drawn, small sizes and edges of tiles more often.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from typing import Any

from tools.evaluator.inputs import KINDS
from tools.fuzzer.bench import Abilities
from tools.fuzzer.case import DIM, CallSpec, Drawn, Layout, Scene
from tools.fuzzer.decks import TILES, Deck, Sizes
from tools.fuzzer.relations import Natural, twin


@dataclass(frozen=True)
class Limits:
    """Sizes of one device type. words: of a scene, drawn between the two. flop: of one call. keys: of a sequence.
    parts: of a call. heads: of all sequences together. calls: drawn for a scene."""

    words: tuple[int, int]
    flop: float
    keys: int
    parts: int
    heads: int
    calls: tuple[int, int]


LIMITS = {
    "cpu": Limits((1 << 13, 1 << 19), 1.2e8, 1100, 64, 256, (8, 20)),
    "cuda": Limits((1 << 13, 1 << 24), 4e11, 9000, 64, 4096, (8, 20)),
}
KV_HEADS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = tuple(range(1, 17))
THREADS = (1, 2, 3, 4, 5, 7, 8, 16)
MULTIPROCESSORS = (1, 2, 16, 66, 78, 108, 114, 132, 144)
WEIGHTS = {"decode": 8, "extend": 6, "prefill": 4, "packed": 3}
# Kinds whose v is that of `normal`, and kinds whose q and k are those of another kind.
ONLY_SCORES = ("large_scores", "equal_scores", "rising", "falling", "jumps", "below_any_mask", "underflow", "zero_rows")
ONLY_VALUES = ("tiny_v", "subnormal_v", "zero_columns")
SPOTS = 3  # lengths a scene of an entry point that is compared with itself


@dataclass(frozen=True)
class Batch:
    """Scenes, calls in the order in which they run, and the pairs of calls that must agree (smaller index first)."""

    scenes: tuple[Scene, ...]
    calls: tuple[CallSpec, ...]
    pairs: tuple[tuple[int, int], ...]


class Generator:
    """Draws batches. `split`: entry points that are compared with plain calls of their own, not with a prefill."""

    def __init__(self, abilities: Abilities, natural: Natural, device: str, seed: int, *, witness: bool) -> None:
        self.abilities, self._natural, self._device, self._seed = abilities, natural, device, seed
        self._witness = witness
        self._limits = LIMITS[device]
        self.entries = [entry for entry in WEIGHTS if entry in abilities.entries]
        self.split = set() if "prefill" in self.entries else set(self.entries)
        self.scenes = 0
        self._rng = rng = random.Random(f"fuzz {seed}")
        self._lengths = Sizes(self._limits.keys, rng)
        self._rows = Sizes(self._limits.keys, rng)
        self._capacities = Sizes(self._limits.keys, rng)
        self._heads = Deck(list(itertools.product(KV_HEADS, GROUPS)), rng)
        self._counts: dict[tuple[str, int, int], Deck[int]] = {}  # parts, by entry point and heads
        self._parts = Deck(range(1, self._limits.parts + 1), rng)
        kinds = itertools.product((k for k in KINDS if k not in ONLY_VALUES), (k for k in KINDS if k not in ONLY_SCORES))
        self._kinds = Deck(list(kinds), rng)
        self._orders = Deck(list(itertools.permutations(range(3))), rng)
        self._columns = Deck(range(1, 33), rng)
        self._styles = Deck(("lengths", "lengths", "batch", "layouts", "mixed"), rng)

    def chance(self, p: float) -> bool:
        return self._rng.random() < p

    # ------------------------------------------------------------ scenes

    def scene(self, style: str) -> Scene:
        rng, limits = self._rng, self._limits
        if style == "batch":
            heads_kv, group = self._heads.deal()
            batch = rng.randint(1, max(1, min(limits.parts, limits.heads // (heads_kv * group))))
        else:
            batch = rng.choice((1, 1, 1, 2, 2, 3, 4))
            heads_kv, group = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 1, 1, 2, 3, 4, 8))
        if style == "mixed":
            batch, group = rng.randint(1, 8), rng.choice(GROUPS)
        heads = heads_kv * group
        smallest, largest = limits.words
        words = smallest * (largest / smallest) ** rng.random() ** {"lengths": 0.5, "layouts": 4.0}.get(style, 2.0)
        room = min(words / (DIM * batch * (heads + 2 * heads_kv)), (limits.flop / (2 * DIM * batch * heads)) ** 0.5)
        room = int(min(max(room, 2), limits.keys))
        keys = rng.randint(room // 2 + 1, room) if style == "lengths" else self._lengths.draw(room)
        scores, values = self._kinds.deal() if self.chance(0.6) else ("normal", "normal")
        self.scenes += 1
        return Scene(batch, heads, heads_kv, keys, Drawn(self._seed, f"scene {self.scenes}", scores, values))

    # ------------------------------------------------------------ calls

    def call(self, number: int, scene: Scene, style: str, spots: list[tuple[int, int]]) -> CallSpec:
        """A call over some rows of a scene. spots: (keys, rows) that entry points in `split` choose from."""
        rng = self._rng
        weights = [1 if style == "layouts" else WEIGHTS[name] for name in self.entries]
        entry = rng.choices(self.entries, weights)[0]
        natural = self._natural(entry)
        heads = (0, scene.heads_kv)
        if scene.heads_kv > 1 and self.chance(0.15):
            first = rng.randrange(scene.heads_kv)
            heads = (first, rng.randint(1, scene.heads_kv - first))
        split = entry in self.split
        ragged = entry == "packed" or (entry != "prefill" and self.abilities.lengths and self.chance(0.6))
        n, rows = rng.choice(spots) if split else (self._lengths.draw(scene.keys), 0)
        parts_limit = self._room(entry, scene, heads[1], scene.keys if ragged else n)
        sequences = self._sequences(entry, scene, min(parts_limit, 8) if split else parts_limit, style)
        capacity = None
        if split:
            lengths = [rng.choice(spots)[0] for _ in sequences] if ragged else [n] * len(sequences)
            rows = min(rows, min(lengths))
        else:
            lengths = self._ragged(entry, scene.keys, len(sequences)) if ragged else [n] * len(sequences)
            rows = self._rows.draw(max(lengths) if ragged else n)
        if ragged and entry != "packed":
            capacity = self._capacity(max(lengths), scene.keys)
            if self._rng.random() < 0.2 and not split:  # lengths near the capacity
                lengths = [max(1, min(capacity, scene.keys) - rng.randrange(9)) for _ in sequences]
        parts = tuple(zip(sequences, lengths, strict=True))
        rows = rows if entry == "extend" else 1
        layouts = self._layouts(natural, style)
        same, neighbours = len(set(sequences)) == 1, sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        plain = all(layout == natural for layout in layouts.values())
        view = entry != "packed" and (same or neighbours) and (capacity or 0) <= scene.keys and self.abilities.strides
        view = view and self.chance(0.5 if plain else 0.05)
        return CallSpec(
            entry, parts, rows=rows, scene=number, heads=None if heads == (0, scene.heads_kv) else heads,
            capacity=capacity, behind=rng.choice(("nan", "inf", "huge", "zeros")), view=view, **layouts,
            lse=self.abilities.lse and self.chance(0.6), route=self._route(entry), **self._machine(),
        )  # fmt: skip

    def _room(self, entry: str, scene: Scene, heads_kv: int, keys: int) -> int:
        """Parts that a call may have so that it stays cheap."""
        group = scene.heads_q // scene.heads_kv
        rows = {"decode": 1, "extend": keys / 4}.get(entry, keys / 2)
        by_flop = self._limits.flop / (4 * DIM * heads_kv * group * rows * keys)
        by_words = 2 * self._limits.words[1] / (DIM * heads_kv * 2 * keys)
        return int(max(1, min(by_flop, by_words, self._limits.parts)))

    def _sequences(self, entry: str, scene: Scene, limit: int, style: str) -> list[int]:
        """Sequences of a call's parts; in scenes of style "batch" every number of parts has its turn with every heads."""
        rng, batch = self._rng, scene.batch
        if style == "batch" and self.chance(0.7):
            key = (entry, scene.heads_q, scene.heads_kv)
            deck = self._counts.setdefault(key, Deck(range(1, self._limits.parts + 1), rng))
            count, first = min(limit, deck.deal()), rng.randrange(batch)
            return list(range(first, first + count)) if first + count <= batch else [i % batch for i in range(count)]
        way = rng.random()
        if way < 0.4:
            return [rng.randrange(batch)]
        if way < 0.55:
            count, one = min(limit, self._parts.deal()), rng.randrange(batch)
            return [one] * count
        if way < 0.65:
            return [rng.randrange(batch) for _ in range(min(limit, self._parts.deal()))]
        if way < 0.9 and batch <= 2 * limit:
            return list(range(batch))
        first = rng.randrange(batch)
        return list(range(first, min(batch, first + rng.randint(1, max(1, min(limit, batch))))))

    def _ragged(self, entry: str, keys: int, count: int) -> list[int]:
        """Lengths of one call: drawn each by itself, or consecutive ones."""
        rng = self._rng
        if self.chance(0.5):
            first = rng.randint(1, max(1, keys - count + 1))
            return [min(keys, first + i) for i in range(count)]
        lengths = [self._lengths.draw(keys) for _ in range(count)]
        if entry == "packed" and count > 1 and self.chance(0.1):
            lengths[rng.randrange(1, count)] = 0
        return lengths

    def _capacity(self, longest: int, keys: int) -> int:
        """Entries of the cache: exact, the scene's, a little more, whole tiles, or any."""
        rng = self._rng
        tile = rng.choice(TILES)
        options = (longest, keys, longest + rng.randrange(9), -(-longest // tile) * tile)
        return rng.choice(options) if self.chance(0.7) else max(longest, self._capacities.draw(2 * keys))

    def _layouts(self, natural: Layout, style: str = "") -> dict[str, Any]:
        if not self.abilities.strides or (style != "layouts" and self.chance(0.4)):
            return dict.fromkeys("qkvo", natural)
        return {name: self._layout() if self.chance(0.8) else natural for name in "qkvo"}

    def _layout(self) -> Layout:
        rng = self._rng
        pad = tuple(rng.choice((1, 2, 3, rng.randint(1, 9))) if self.chance(0.3) else 0 for _ in range(3))
        columns = 8 * (self._columns.deal() if self.chance(0.7) else rng.choice((1, 2, 4, 8, 16))) if self.chance(0.8) else 0
        return Layout(self._orders.deal(), pad, columns, 16 * rng.randrange(16) if self.chance(0.3) else 0)

    def _machine(self) -> dict[str, Any]:
        """Threads or multiprocessors of a kernel of ours."""
        if not self.abilities.own or self.chance(0.4):
            return {}
        if self._device == "cpu":
            return {"num_threads": 1 if self.chance(0.7) else self._rng.choice(THREADS)}
        return {"num_sms": self._rng.choice(MULTIPROCESSORS)} if self.chance(0.4) else {}

    def _route(self, entry: str) -> str | None:
        ways = self.abilities.routes[entry]
        return self._rng.choice(ways) if self.chance(0.3) else ways[0]

    # ------------------------------------------------------------ batches

    def _reference(self, number: int, scene: Scene, sequences: range) -> CallSpec:
        natural = self._natural("prefill")
        return CallSpec(
            "prefill", tuple((b, scene.keys) for b in sequences), scene=number, lse=self.abilities.lse,
            route=self.abilities.routes["prefill"][0], **self._layouts(natural), **self._machine(),
        )  # fmt: skip

    def _calls(self, number: int, scene: Scene, style: str) -> tuple[list[CallSpec], list[tuple[int, int]]]:
        """The calls of one scene and the pairs among them."""
        rng = self._rng
        spots = [(n, self._rows.draw(n)) for n in (self._lengths.draw(scene.keys) for _ in range(SPOTS))]
        calls: list[CallSpec] = []
        pairs: list[tuple[int, int]] = []
        twins: dict[CallSpec, int] = {}
        whole = None
        if "prefill" in self.entries:
            whole = 0
            calls.append(self._reference(number, scene, range(scene.batch)))
            if scene.batch > 1 and "prefill" not in self.split and (style == "batch" or self.chance(0.3)):
                middle = rng.randint(1, scene.batch - 1)
                calls += [self._reference(number, scene, part) for part in (range(middle), range(middle, scene.batch))]
                pairs += [(0, 1), (0, 2)]
            small = 2 * DIM * scene.batch * scene.heads_q * scene.keys**2 < self._limits.flop / 8
            if self._witness and small and self.chance(0.1):
                calls.append(dataclasses.replace(self._reference(number, scene, range(scene.batch)), on="witness"))
                pairs.append((0, len(calls) - 1))
        for _ in range(rng.randint(*self._limits.calls) * {"mixed": 1, "layouts": 4}.get(style, 2)):
            call = self.call(number, scene, style, spots)
            calls.append(call)
            mine = len(calls) - 1
            if call.entry not in self.split:
                assert whole is not None
                pairs.append((whole, mine))
                continue
            for part in dict.fromkeys(call.parts):
                if part[1]:
                    plain = twin(call, part, self._natural)
                    if plain not in twins:
                        twins[plain] = len(calls)
                        calls.append(plain)
                    pairs.append((twins[plain], mine))
        if self.chance(0.3):
            again = rng.randrange(len(calls))
            calls.append(calls[again])
            pairs.append((again, len(calls) - 1))
        return calls, pairs

    def batch(self) -> Batch:
        """The next scenes, calls and pairs."""
        rng = self._rng
        scenes: list[Scene] = []
        calls: list[CallSpec] = []
        pairs: list[tuple[int, int]] = []
        for number in range(rng.choice((1, 2, 2, 3))):
            style = self._styles.deal()
            scenes.append(self.scene(style))
            more, new = self._calls(number, scenes[-1], style)
            pairs += [(len(calls) + i, len(calls) + j) for i, j in new]
            calls += more
        calls = self._varied(calls)
        order = list(range(len(calls)))
        rng.shuffle(order)
        groups = [_group(call) for call in calls]
        rank = {group: rng.random() for group in dict.fromkeys(groups)}
        order.sort(key=lambda i: (calls[i].on != "candidate", rank[groups[i]]))  # stable: shuffled within each group
        place = {old: new for new, old in enumerate(order)}
        moved = [(min(place[i], place[j]), max(place[i], place[j])) for i, j in pairs]
        return Batch(tuple(scenes), tuple(calls[i] for i in order), tuple(moved))

    def _varied(self, calls: list[CallSpec]) -> list[CallSpec]:
        """Some calls of a batch are replayed from a graph or run on other streams."""
        cuda = self._device == "cuda"
        changes: dict[str, Any] = {}
        if self.chance(0.2 if cuda else 0.05):
            changes = {"graph": True}
        elif cuda and self.chance(0.25):
            changes = {"stream": self._rng.choice(("default", "busy"))}
        if not changes:
            return calls
        chosen = set(self._rng.sample(range(len(calls)), min(len(calls), self._rng.randint(1, 6))))
        return [
            dataclasses.replace(call, view=call.view and "graph" not in changes, **changes)
            if i in chosen and call.on == "candidate"
            else call
            for i, call in enumerate(calls)
        ]


def _group(call: CallSpec) -> tuple[Any, ...]:
    return call.on, call.graph, call.stream, call.route
