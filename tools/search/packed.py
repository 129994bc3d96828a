"""A whole run in one compressed file: how a published run is kept, and how it is read again, byte for byte.

    data = pack({"log.jsonl": b"...", "reports/E0000.json": b"..."})
    assert unpack(data)["log.jsonl"] == b"..."
    with opened(Path("experimental/cpu/search/x")) as folder:
        run = Run.open(folder)

Files of a run repeat each other, so they are compressed as one. What does not repeat are the reports' samples, most of
their bytes: those lists leave the text, and stand as integers, one byte of significance after another. Medians and their
intervals that follow from a list leave it too. A file that would not come back exactly is kept as it is.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tools.core.errors import UserError
from tools.core.files import canonical_json, read_bytes, show_path, write_new
from tools.evaluator.statistics import median, median_interval

NAME = "run.xz"
FORMAT, FIRST_FORMAT = "areal-tik/packed/2", "areal-tik/packed/1"  # in the first one medians stand in the text
SAMPLES = ("samples_us", "pass_us")  # keys of long lists of times
FOLLOWS = "follows"  # in place of a value that samples_us beside it give
MOST_DECIMALS = 4  # of a time in a report
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """The folder of a run to read from: itself, or that of a published one, unpacked for as long as this lasts."""
    if not (folder / NAME).is_file():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="areal-tik-run-") as name:
        try:
            files = unpack(read_bytes(folder / NAME))
        except UserError as problem:
            raise UserError(f"{show_path(folder / NAME)}: {problem}") from None
        for path, data in files.items():
            write_new(Path(name) / path, data)
        yield Path(name)


def is_published(folder: Path) -> bool:
    """Whether a folder holds a published run, to which nothing is added."""
    return (folder / NAME).is_file()


# ---------------------------------------------------------------- packing


def pack(files: dict[str, bytes]) -> bytes:
    """One compressed file of some text files, by their path. UserError for a file that is not UTF-8."""
    numbers = _Numbers()
    texts: dict[str, str] = {}
    emptied: list[str] = []
    for path, data in files.items():
        try:
            texts[path] = data.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8: it is no file of a run") from None
        if path.startswith("reports/") and (text := numbers.taken_from(texts[path])) is not None:
            texts[path] = text
            emptied.append(path)
    head = {"format": FORMAT, "files": texts, "emptied": emptied, "lists": numbers.lists}
    return lzma.compress(canonical_json(head) + b"\n" + numbers.data(), format=lzma.FORMAT_XZ, filters=_FILTERS)


def unpack(data: bytes) -> dict[str, bytes]:
    """The files of a packed run by path; UserError where it is damaged, or of a newer version."""
    try:
        head, _, rest = lzma.decompress(data).partition(b"\n")
        found: Any = json.loads(head)
        if found["format"] not in (FORMAT, FIRST_FORMAT):
            raise UserError(f"{found['format']!r} is not {FORMAT}: it was packed by another version; update this checkout")
        lists = iter(_lists(found["lists"], rest))
        emptied = set(found["emptied"])
        files = {}
        for path, text in found["files"].items():
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise UserError(f"it holds a file {path!r} outside its folder")
            files[path] = (_text(_filled(json.loads(text), lists)) if path in emptied else text).encode()
        return files
    except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as problem:
        raise UserError(f"it is damaged ({type(problem).__name__}): restore it from a copy") from None


def _text(report: Any) -> str:
    """A report as the evaluator writes it."""
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# ---------------------------------------------------------------- lists of times


class _Numbers:
    """Lists of times that were taken out of reports."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []  # of each list: length, decimals, median
        self._steps: list[int] = []  # of every number: its distance from the median, 2 n or -2 n - 1

    def taken_from(self, text: str) -> str | None:
        """A report's text without its lists; None, and nothing taken, where the report would not come back exactly."""
        lists, steps = len(self.lists), len(self._steps)
        emptied, restored = "", None
        try:
            emptied = json.dumps(self._emptied(json.loads(text)), ensure_ascii=False, separators=(",", ":"))
            restored = _text(_filled(json.loads(emptied), iter(_lists(self.lists[lists:], _planes(self._steps[steps:])))))
        except (ValueError, TypeError, OverflowError, StopIteration):
            pass  # no report, or none whose lists can be taken out
        if restored == text:
            return emptied
        del self.lists[lists:], self._steps[steps:]
        return None

    def _emptied(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._emptied(item) for item in value]
        if not isinstance(value, dict):
            return value
        found = {}
        for key, item in value.items():
            if key in SAMPLES:
                self._take(item)
            found[key] = None if key in SAMPLES else self._emptied(item)
        if "samples_us" in value:
            given = _given(value["samples_us"])
            found.update({key: FOLLOWS for key in given if value.get(key) == given[key]})
        return found

    def _take(self, times: list[float]) -> None:
        decimals = next(n for n in range(MOST_DECIMALS + 1) if all(round(time, n) == time for time in times))
        whole = [round(time * 10**decimals) for time in times]
        middle = sorted(whole)[len(whole) // 2] if whole else 0
        self.lists.append([len(whole), decimals, middle])
        self._steps += [2 * (n - middle) if n >= middle else 2 * (middle - n) - 1 for n in whole]

    def data(self) -> bytes:
        return _planes(self._steps)


def _planes(steps: list[int]) -> bytes:
    """Four bytes a number, the lowest byte of all numbers first: high bytes are nearly constant and cost nothing."""
    if any(step >= 1 << 32 for step in steps):
        raise OverflowError("a step of more than four bytes")
    return b"".join(bytes(step >> shift & 255 for step in steps) for shift in (0, 8, 16, 24))


def _lists(stated: list[list[int]], planes: bytes) -> Iterator[list[float]]:
    """The lists of times, in the order in which they were taken."""
    count = len(planes) // 4
    parts = [planes[number * count : (number + 1) * count] for number in range(4)]
    steps = [a | b << 8 | c << 16 | d << 24 for a, b, c, d in zip(*parts, strict=True)]
    if sum(length for length, _, _ in stated) != count:
        raise ValueError("other numbers than its lists have")
    at = 0
    for length, decimals, middle in stated:
        part = steps[at : at + length]
        at += length
        yield [(middle + (-(step + 1) // 2 if step & 1 else step // 2)) / 10**decimals for step in part]


def _filled(value: Any, lists: Iterator[list[float]]) -> Any:
    """A report with its lists, and what follows from them, in place again."""
    if isinstance(value, dict):
        found = {key: next(lists) if key in SAMPLES else _filled(item, lists) for key, item in value.items()}
        if "samples_us" in found:
            given = _given(found["samples_us"])
            found.update({key: given[key] for key in given if found.get(key) == FOLLOWS})
        return found
    return [_filled(item, lists) for item in value] if isinstance(value, list) else value


def _given(samples: list[float]) -> dict[str, Any]:
    """What the evaluator derives from a list of samples."""
    return {"median_us": median(samples), "interval_us": list(median_interval(samples))} if samples else {}
