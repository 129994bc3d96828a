"""What the log says of records: the fields that the state follows from, and no others.

The log's facts are always made here, from the very bytes that the log names by hash; `verify` makes them again.
"""

from __future__ import annotations

from typing import Any

from tools.search.records import kind_of

_FIELDS = {
    "opportunity": ("direction", "workloads", "evidence", "applies_to", "merge", "expected_share", "origin"),
    "implementation": ("source", "parents", "action"),
    "action": ("opportunity", "parents", "child", "form"),
    "audit": (
        "implementation", "action", "status", "verified", "complete", "admissible", "promoted",
        "T", "T_root", "T_incumbent", "gain", "incumbent", "seconds",
    ),
    "lineage": ("audit", "subject", "decision", "follow_ups", "reactivate", "evidence", "falsified_by", "reconsider_when"),
}  # fmt: skip
GROUPS = {
    "opportunity": "opportunities",
    "implementation": "implementations",
    "action": "actions",
    "audit": "audits",
    "lineage": "decisions",
}


def of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of one step's records, grouped by kind."""
    facts: dict[str, Any] = {}
    for record in records:
        kind = kind_of(record["id"])
        facts.setdefault(GROUPS[kind], []).append({key: record[key] for key in ("id", *_FIELDS[kind])})
    return facts


def of_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Facts of run.json, which the first line holds."""
    return {
        "name": manifest["name"],
        "target": manifest["target"]["name"],
        "contract": manifest["contract"],
        "settings": manifest["settings"],
        "specification_sha256": manifest["specification_sha256"],
    }


def of_line(kind: str, manifest: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of a line that names these records."""
    facts = of_records(records)
    return {**of_manifest(manifest), **facts} if kind == "init" else facts
