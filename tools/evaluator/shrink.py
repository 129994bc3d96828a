"""Ever smaller surroundings in which a row still comes out wrong. All are views, and so move no addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.evaluator.scene import Scene, alone


def _sequences(scene: Scene, low: int, high: int) -> Scene:
    """Only the sequences low .. high - 1."""
    if scene.starts is not None:
        mine = slice(scene.starts[low], scene.starts[high])
        starts = tuple(s - scene.starts[low] for s in scene.starts[low : high + 1])
        return replace(scene, q=scene.q[mine], k=scene.k[mine], v=scene.v[mine], batch=scene.batch - low, starts=starts)
    mine = slice(low, high)
    lengths = None if scene.lengths is None else scene.lengths[low:high]
    return replace(scene, q=scene.q[mine], k=scene.k[mine], v=scene.v[mine], batch=scene.batch - low, lengths=lengths)


def _kv_heads(scene: Scene, low: int, high: int) -> Scene:
    group = int(scene.q.shape[1]) // int(scene.k.shape[1])
    return replace(
        scene,
        q=scene.q[:, low * group : high * group],
        k=scene.k[:, low:high],
        v=scene.v[:, low:high],
        head=scene.head - low * group,
    )


def _rows(scene: Scene, low: int, high: int) -> Scene | None:
    """Only the query rows low .. high - 1 of every sequence; a row keeps the keys that it sees."""
    if scene.starts is not None or scene.entry == "decode" or not low <= scene.row < high:
        return None
    behind = scene.rows - high
    if scene.entry == "prefill":
        if low:
            return None
        cut = slice(0, high)
        return replace(scene, q=scene.q[:, :, cut], k=scene.k[:, :, cut], v=scene.v[:, :, cut])
    room = int(scene.k.shape[2])
    if behind >= room:
        return None
    cut, lengths = slice(0, room - behind), scene.lengths
    if lengths is not None:
        lengths = tuple(max(0, n - behind) for n in lengths)
        cut = slice(0, room)
    return replace(
        scene, q=scene.q[:, :, low:high], k=scene.k[:, :, cut], v=scene.v[:, :, cut], row=scene.row - low, lengths=lengths
    )


def _keys(scene: Scene, count: int, *, front: bool) -> Scene | None:
    """The first or the last `count` keys of every sequence left out, for all rows."""
    if count < 1 or count >= scene.visible or (scene.starts is not None and scene.sequences > 1):
        return None
    room = int(scene.k.shape[0 if scene.starts is not None else 2])
    kept = slice(count, room) if front else slice(0, room - count)
    square = scene.entry in ("prefill", "packed")
    if square and scene.row < count:
        return None
    if scene.starts is not None:
        q, k, v = scene.q[count:], scene.k[kept], scene.v[kept]
        return replace(scene, q=q, k=k, v=v, row=scene.row - count, starts=(0, room - count))
    lengths = scene.lengths
    if lengths is not None:
        lengths = tuple(max(0, n - count) for n in lengths)
    q = scene.q[:, :, count:] if square else scene.q
    row = scene.row - count if square else scene.row
    return replace(scene, q=q, k=scene.k[:, :, kept], v=scene.v[:, :, kept], row=row, lengths=lengths)


def _halves(at: int, total: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold `at`, from one alone to all but one."""
    for width in sorted({1, *(total >> shift for shift in range(1, total.bit_length())), total - 1}):
        if 0 < width < total:
            for low in dict.fromkeys((0, total - width, max(0, min(at, total - width)), max(0, at - width + 1))):
                if low <= at < low + width:
                    yield low, low + width


def smaller(scene: Scene) -> Iterator[Scene]:
    """Surroundings one step smaller, the boldest first; all keys stay."""
    yield alone(scene)
    for low, high in _halves(scene.batch, scene.sequences):
        yield _sequences(scene, low, high)
    for low, high in _halves(scene.kv_head, int(scene.k.shape[1])):
        yield _kv_heads(scene, low, high)
    if int(scene.k.shape[1]) == 1 and int(scene.q.shape[1]) > 1:
        for low, high in _halves(scene.head, int(scene.q.shape[1])):
            yield replace(scene, q=scene.q[:, low:high], head=scene.head - low)
    for low, high in _halves(scene.row, scene.rows):
        if (found := _rows(scene, low, high)) is not None:
            yield found
    if scene.lengths is not None and scene.sequences == 1 and scene.keys:
        yield replace(scene, k=scene.k[:, :, : scene.keys], v=scene.v[:, :, : scene.keys], lengths=None)
    if scene.num_sms or scene.num_threads:
        yield replace(scene, num_sms=0, num_threads=0)


def fewer_keys(scene: Scene, tile: int) -> Iterator[Scene]:
    """Fewer keys, whole tiles at the front first: those keep the place of every tile's edge."""
    sizes = sorted({scene.visible >> shift for shift in range(1, 16)} | {1}, reverse=True)
    for size in [s // tile * tile for s in sizes] + sizes:
        for front in (True, False):
            if (found := _keys(scene, size, front=front)) is not None:
                yield found


def shrink(
    scene: Scene, steps: Callable[[Scene], Iterator[Scene]], shows: Callable[[Scene], bool], left: Callable[[], bool]
) -> Scene:
    """Take the first smaller scene that still shows, again and again, until none does or no time is left."""
    again = True
    while again:
        again = False
        for smaller_scene in steps(scene):
            if not left():
                return scene
            if _size(smaller_scene) < _size(scene) and shows(smaller_scene):
                scene, again = smaller_scene, True
                break
    return scene


def _size(scene: Scene) -> tuple[int, int]:
    """Words of all tensors, then the options that are set."""
    words = sum(int(t.numel()) for t in (scene.q, scene.k, scene.v))
    return words, sum(bool(x) for x in (scene.lengths, scene.num_sms, scene.num_threads))
