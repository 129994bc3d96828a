"""The sums in records that are no reports of evaluate.py: mutation scores, promotion trials, fuzzer runs, exploits, repeats.

`counted(name, record)` counts them again from what each mutant, trial, relation and exploit did.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tools.archive.reading import difference
from tools.core.errors import UserError
from tools.evaluator.statistics import binomial_bound, median

Record = dict[str, Any]


def _mutation(record: Record) -> int:
    for name, corpus in record["corpora"].items():
        every = corpus["mutants"]
        names = [mutant["name"] for mutant in every]
        if len(set(names)) != len(names):
            raise UserError(f"corpora.{name}: mutant {next(one for one in names if names.count(one) > 1)} stands twice")
        again = {
            "killed": sum(mutant["status"] == "killed" for mutant in every),
            "total": len(every),
            "subtle": sum(bool(mutant["subtle"]) for mutant in every),
            "witness_only": sum(bool(mutant["witness_only"]) for mutant in every),
            "survivors": [mutant["name"] for mutant in every if mutant["status"] == "survived"],
            "errors": [mutant["name"] for mutant in every if mutant["status"] == "error"],
        }
        _agree({key: corpus[key] for key in again}, again, f"corpora.{name}")
    return sum(len(corpus["mutants"]) for corpus in record["corpora"].values())


def _trials(record: Record) -> int:
    for kind, every in record["trials"].items():
        compared = [trial["comparison"] for trial in every if trial["comparison"] is not None]
        clocks = [comparison["clocks"]["judge"] for comparison in compared]
        gains, aa = [[value for clock in clocks for value in clock[key]] for key in ("gains", "aa")]
        count, promoted = len(every), sum(trial["promoted"] for trial in every)
        again = {
            "trials": count,
            "promoted": promoted,
            "refused": sum(trial["refused"] is not None for trial in every),
            "rate": promoted / count,
            "rate_interval": [1 - binomial_bound(count - promoted, count), binomial_bound(promoted, count)],
            "sessions": sum(comparison["sessions"] for comparison in compared) / max(1, len(compared)),
            "median_gain": median(gains) if gains else None,
            "gains": gains,
            "aa": aa,
        }
        _agree(record["summary"][kind], again, f"summary.{kind}")
        for number, trial in enumerate(every):
            found = trial["comparison"]
            if trial["promoted"] and (found is None or found["verdict"] != "better"):
                raise UserError(f"trials.{kind}[{number}]: promoted, and its comparison does not say better")
    return sum(len(every) for every in record["trials"].values())


def _fuzz(record: Record) -> int:
    _agree(record["pairs"], sum(record["relations"].values()), "pairs")
    if bool(record["findings"]) != bool(record["differing_pairs"]):
        raise UserError(f"differing_pairs is {record['differing_pairs']}, with {len(record['findings'])} findings")
    return int(record["pairs"])


def _exploits(record: Record) -> int:
    every = record["exploits"]
    guarded = [exploit for exploit in every if exploit["guard"]]
    counts = (
        (sum(exploit["refused"] for exploit in every), len(every)),
        (sum(exploit["control"] == "PASSED" for exploit in every), len(every)),
        (sum(bool(exploit["succeeds_without_guard"]) for exploit in guarded), len(guarded)),
    )
    stated = [(int(part), int(whole)) for part, whole in re.findall(r"(\d+)/(\d+)", record["score"])]
    if stated != list(counts):
        raise UserError(f"score is {record['score']!r}, its exploits give {', '.join(f'{a}/{b}' for a, b in counts)}")
    return len(every)


def _repeats(record: Record) -> int:
    modes = [cell[mode] for cell in record["cells"] for mode in ("alone", "beside_copies", "beside_gathers")]
    _agree(record["same"], not any(mode["differing_words"] for mode in modes), "same")
    return sum(3 * cell["calls"] for cell in record["cells"])


_COUNT: dict[str, Callable[[Record], int]] = {
    "mutation": _mutation,
    "trials": _trials,
    "fuzz": _fuzz,
    "exploits": _exploits,
    "repeats": _repeats,
}


def counted(name: str, kind: str, record: Record) -> int:
    """How many mutants, trials, pairs, exploits or calls a record holds; UserError where its sums are not theirs."""
    try:
        return _COUNT[kind](record)
    except UserError as problem:
        raise UserError(f"{name}: {problem}") from None
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as problem:
        raise UserError(f"{name}: no record of kind {kind}: {type(problem).__name__}: {problem}") from None


def _agree(stated: Any, found: Any, where: str) -> None:
    if problem := difference(stated, found, where):
        raise UserError(problem)
