"""A case: inputs, two calls whose common rows must agree bit for bit, and what was seen. Written and read as JSON.

    case = Case(target="cpu", backend=Backend("library", "cpu"), scenes=(scene,), first=CallSpec("prefill", ((0, 65),)),
                second=CallSpec("decode", ((0, 65),)), output="o")
    write(Path("found.json"), case);  read(Path("found.json")) == case
    python tools/fuzz.py --replay found.json

A *scene* is a set of sequences: k, v [batch, heads_kv, keys, 128] and one query for each position, q [batch, heads_q, keys,
128]. The query at position p of a sequence sees its keys 0 .. p; that pair is a *row*, and its output may depend on
nothing else. A *call* computes some rows of a scene in some way, so two calls of one scene must agree in every row that
both compute. Scenes are either drawn (seed and kinds: the same words on every run of one device type) or given (raw words).
Given scenes may hold only the last `q_rows` queries of each sequence, and sequences of their own `lengths`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.core import files
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, show_path

VERSION = 1
FORMAT = "areal-tik case"
SCHEMA = REPO_ROOT / "experimental" / "schemas" / "case.schema.json"
DIM = 128
Json = dict[str, Any]


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Drawn:
    """How a scene's values come to be: kinds of tools/evaluator/inputs.KINDS for q and k (scores) and for v (values)."""

    seed: int
    label: str
    scores: str = "normal"
    values: str = "normal"


@dataclass(frozen=True)
class Given:
    """Raw bf16 words, little-endian, row by row: q [batch,heads_q,q_rows,128], k and v [batch,heads_kv,keys,128]."""

    q: bytes = field(repr=False)
    k: bytes = field(repr=False)
    v: bytes = field(repr=False)


@dataclass(frozen=True)
class Scene:
    """Sequences with all that their rows may depend on. lengths: keys of each sequence, all `keys` where left out."""

    batch: int
    heads_q: int
    heads_kv: int
    keys: int
    inputs: Drawn | Given
    q_rows: int = 0  # 0: as many as keys
    lengths: tuple[int, ...] = ()

    def length(self, sequence: int) -> int:
        return self.lengths[sequence] if self.lengths else self.keys

    def first_query(self, sequence: int) -> int:
        """Position of the first stored query of a sequence."""
        return self.length(sequence) - (self.q_rows or self.keys)

    @staticmethod
    def given(q: Any, k: Any, v: Any, lengths: list[int] | None = None) -> Scene:
        """A scene of tensors as a call takes them: q holds the last queries of each sequence; `lengths` its keys."""
        import torch

        def words(tensor: Any) -> bytes:
            return bytes(tensor.contiguous().cpu().view(torch.int16).numpy().tobytes())

        return Scene(
            q.shape[0], q.shape[1], k.shape[1], k.shape[2], Given(words(q), words(k), words(v)),
            0 if q.shape[2] == k.shape[2] and not lengths else q.shape[2], tuple(lengths or ()),
        )  # fmt: skip


# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class Layout:
    """How one tensor lies in memory. order: its dimensions (0 batch, 1 heads, 2 rows; packed: 1 rows, 2 heads), outermost
    first. pad: entries more than needed in each of them. columns: elements more than 128 in a row. skew: bytes past a
    multiple of 256."""

    order: tuple[int, ...] = (0, 1, 2)
    pad: tuple[int, ...] = (0, 0, 0)
    columns: int = 0
    skew: int = 0


PLAIN = Layout()
TENSORS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class CallSpec:
    """One call. Each part is (sequence of the scene, number n of its keys): a prefill computes the rows at positions
    0 .. n-1, extend those of the last `rows` positions, decode that of position n-1.

    capacity: None passes no lengths (all parts have the same n); else the size of a cache whose entries behind n hold
    `behind`. view: k and v, and q where it can, are views of the scene itself (one sequence or neighbours), not copies.
    heads: (first KV head, count), with their query heads. graph: captured with other inputs, then replayed with these.
    on: which kernel runs it. route: one of a provider's ways.
    """

    entry: str
    parts: tuple[tuple[int, int], ...]
    rows: int = 1
    scene: int = 0
    heads: tuple[int, int] | None = None
    capacity: int | None = None
    behind: str = "nan"
    view: bool = False
    q: Layout = PLAIN
    k: Layout = PLAIN
    v: Layout = PLAIN
    o: Layout = PLAIN
    lse: bool = False
    num_threads: int = 0
    num_sms: int = 0
    stream: str = "side"
    graph: bool = False
    route: str | None = None
    on: str = "candidate"

    def rows_of(self, part: tuple[int, int]) -> range:
        """Positions whose rows this call computes for a part; below 0 where it has more queries than keys."""
        n = part[1]
        return range(n - {"prefill": n, "packed": n, "decode": 1}.get(self.entry, self.rows), n)


@dataclass(frozen=True)
class Backend:
    """What was called. kind: "library" (a kernel source of this interface) or "provider" (an installed library)."""

    kind: str
    name: str
    source: str | None = None
    source_sha256: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Case:
    """The first call runs over a workspace of garbage, then those of `before`, then the second; one request, one process.
    second is None where a call fails alone (then `before` runs ahead of it). output: "o" or "lse". observed: what was seen
    (free of meaning for a replay): relation, what, words, first, ..."""

    target: str
    backend: Backend
    scenes: tuple[Scene, ...]
    first: CallSpec
    second: CallSpec | None
    output: str = "o"
    before: tuple[CallSpec, ...] = ()
    observed: Json = field(default_factory=dict, hash=False)

    @property
    def calls(self) -> tuple[CallSpec, ...]:
        """In the order in which they run."""
        return (*self.before, self.first) if self.second is None else (self.first, *self.before, self.second)


# ---------------------------------------------------------------- JSON


def _plain(value: Any) -> Any:
    """Dataclasses to JSON; fields at their default are left out."""
    if dataclasses.is_dataclass(value):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        }
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def to_json(case: Case) -> Json:
    """The case as a JSON object."""
    record: Json = {"format": FORMAT, "version": VERSION, **_plain(case)}
    for scene, entry in zip(case.scenes, record["scenes"], strict=True):
        entry["inputs"] = {"drawn" if isinstance(scene.inputs, Drawn) else "given": entry["inputs"]}
    return record


def _layout(record: Json) -> Layout:
    values: Json = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return Layout(**values)


def _call(record: Json) -> CallSpec:
    values: Json = {name: _layout(value) if name in TENSORS else value for name, value in record.items()}
    values["parts"] = tuple((int(sequence), int(n)) for sequence, n in record["parts"])
    if "heads" in record:
        values["heads"] = tuple(record["heads"])
    return CallSpec(**values)


def _scene(record: Json) -> Scene:
    values: Json = {**record, "lengths": tuple(record.get("lengths", ()))}
    source = record["inputs"]
    if "drawn" in source:
        values["inputs"] = Drawn(**source["drawn"])
    else:
        values["inputs"] = Given(**{name: base64.b64decode(text, validate=True) for name, text in source["given"].items()})
    return Scene(**values)


def from_json(record: Any, where: str = "case") -> Case:
    """The case of a JSON object. UserError with one line where it is not one."""
    error = next(iter(sorted(_validator().iter_errors(record), key=lambda e: [str(p) for p in e.absolute_path])), None)
    if error is not None:
        place = ".".join(map(str, error.absolute_path)) or "the file"
        raise UserError(f"{where}: {place}: {error.message[:200]}")
    try:
        case = Case(
            record["target"], Backend(**record["backend"]), tuple(_scene(scene) for scene in record["scenes"]),
            _call(record["first"]), _call(record["second"]) if record.get("second") else None, record.get("output", "o"),
            tuple(_call(call) for call in record.get("before", ())), record.get("observed", {}),
        )  # fmt: skip
    except ValueError as problem:  # base64
        raise UserError(f"{where}: scenes: {problem}") from None
    check(case, where)
    return case


def write(path: Path, case: Case) -> None:
    """Write a new file; UserError where it exists. What is written can be read."""
    record = to_json(case)
    from_json(json.loads(json.dumps(record)), show_path(path))
    files.write_new(path, json.dumps(record, indent=1) + "\n")


def read(path: Path) -> Case:
    """Read and check a file; UserError with one line."""
    try:
        record = json.loads(files.read_bytes(path))
    except ValueError as problem:
        raise UserError(f"{show_path(path)}: not JSON: {problem}") from None
    return from_json(record, show_path(path))


@functools.cache
def _validator() -> Any:
    import jsonschema

    schema = json.loads(files.read_bytes(SCHEMA))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


# ---------------------------------------------------------------- rules that a schema cannot state


def check(case: Case, where: str = "case") -> None:
    """UserError where a scene or a call makes no sense, naming the value."""

    def refuse(place: str, text: str) -> None:
        raise UserError(f"{where}: {place}: {text}")

    for number, scene in enumerate(case.scenes):
        place = f"scenes.{number}"
        if scene.heads_q % scene.heads_kv:
            refuse(place, f"heads_q {scene.heads_q} is no multiple of heads_kv {scene.heads_kv}")
        if scene.q_rows > scene.keys:
            refuse(place, f"q_rows {scene.q_rows} is more than keys {scene.keys}")
        if scene.lengths and (len(scene.lengths) != scene.batch or max(scene.lengths) > scene.keys):
            refuse(place, f"lengths {list(scene.lengths)} do not fit batch {scene.batch} and keys {scene.keys}")
        if isinstance(scene.inputs, Given):
            sizes = {"q": (scene.heads_q, scene.q_rows or scene.keys), "k": (scene.heads_kv, scene.keys)}
            for name in ("q", "k", "v"):
                heads, rows = sizes.get(name, sizes["k"])
                need, have = 2 * math.prod((scene.batch, heads, rows, DIM)), len(getattr(scene.inputs, name))
                if need != have:
                    refuse(f"{place}.inputs.given.{name}", f"{have} bytes, its shape needs {need}")
        else:
            from tools.evaluator.inputs import KINDS

            for kind in (scene.inputs.scores, scene.inputs.values):
                if kind not in KINDS:
                    refuse(f"{place}.inputs.drawn", f"no kind {kind!r}; known: {', '.join(KINDS)}")
            if scene.lengths or scene.q_rows:
                refuse(place, "drawn inputs take neither lengths nor q_rows")
    named = [("first", case.first), *((f"before.{i}", call) for i, call in enumerate(case.before))]
    for name, call in [*named, *([("second", case.second)] if case.second else [])]:
        if call.scene >= len(case.scenes):
            refuse(name, f"no scene {call.scene}: there are {len(case.scenes)}")
        if problem := why_not(case.scenes[call.scene], call):
            refuse(name, problem)
    if case.second is not None:
        if case.second.scene != case.first.scene:
            refuse("second", f"scene {case.second.scene} is not the first call's, {case.first.scene}")
        if case.output == "lse" and not (case.first.lse and case.second.lse):
            refuse("output", "lse is compared, and a call does not ask for it")


def why_not(scene: Scene, call: CallSpec) -> str | None:
    """What is wrong with a call over a scene, or None."""
    for sequence, n in call.parts:
        if sequence >= scene.batch or n > scene.length(sequence):
            return f"part {[sequence, n]}: the scene has {scene.batch} sequences of at most {scene.keys} keys"
        rows = call.rows_of((sequence, n))
        if n == 0 and call.entry != "packed" and call.capacity is None:
            return f"part {[sequence, n]}: a call without lengths needs keys"
        if len(rows) > (scene.q_rows or scene.keys) or (rows and 0 <= rows[0] < scene.first_query(sequence)):
            return f"part {[sequence, n]}: the scene holds no queries for {len(rows)} rows"
    counts = {n for _, n in call.parts}
    if call.entry == "packed":
        if call.capacity is not None or max(counts) == 0:
            return "packed calls take no capacity and at least one row"
    elif call.entry == "prefill" and (len(counts) > 1 or call.capacity is not None):
        return "a dense prefill takes parts of one length and no capacity"
    elif call.capacity is None and len(counts) > 1:
        return f"parts of lengths {sorted(counts)} need a capacity"
    elif call.capacity is not None and call.capacity < max(counts):
        return f"capacity {call.capacity} is less than {max(counts)} keys"
    if call.entry == "extend" and call.capacity is None and call.rows > max(counts):
        return f"{call.rows} rows over {max(counts)} keys"
    first, count = call.heads or (0, scene.heads_kv)
    if first + count > scene.heads_kv:
        return f"heads {[first, count]}: the scene has {scene.heads_kv} KV heads"
    if call.view:
        sequences = [sequence for sequence, _ in call.parts]
        steps = {b - a for a, b in itertools.pairwise(sequences)}
        if call.entry == "packed" or steps not in (set(), {0}, {1}):
            return "a view is of one sequence or of neighbours, and not packed"
        if call.graph:
            return "a view is no input of a graph, whose inputs change"
        if (call.capacity or 0) > scene.keys:
            return f"a view has no more than the scene's {scene.keys} keys, capacity {call.capacity}"
    for name in TENSORS:
        layout: Layout = getattr(call, name)
        if sorted(layout.order) != [0, 1, 2] or layout.columns % 8 or layout.skew % 16:
            return f"{name}: layout {_plain(layout)} is no order of 3 dimensions in steps of 16 bytes"
    return None
