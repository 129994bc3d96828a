"""Validation of records against experimental/schemas/<kind>.schema.json."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from tools.core.files import REPO_ROOT, read_bytes
from tools.search import quick
from tools.search.records import RuleError

FOLDER = REPO_ROOT / "experimental" / "schemas"
VERSION = 1


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    """The schema of a kind of records, or of the manifest (`run`)."""
    found: dict[str, Any] = json.loads(read_bytes(FOLDER / f"{kind}.schema.json"))
    return found


@functools.cache
def _surely_valid(kind: str) -> quick.Test:
    return quick.compiled(schema(kind))


@functools.cache
def _validator(kind: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(schema(kind))


def check_version(kind: str, record: Any, name: str) -> None:
    """RuleError where a record is of another kind, or of a format that this version does not know."""
    if not isinstance(record, dict):
        raise RuleError(name, "schema", "is not a JSON object")
    stated = record.get("schema")
    expected = f"areal-tik/{kind}/{VERSION}"
    if stated == expected:
        return
    family, _, version = str(stated).rpartition("/")
    if family == f"areal-tik/{kind}" and version.isdecimal() and int(version) > VERSION:
        raise RuleError(name, "schema", f"{stated} was written by a newer version than this one; update this checkout")
    raise RuleError(name, "schema", f"{stated!r} is not {expected}")


def validate(kind: str, record: Any, name: str) -> None:
    """RuleError naming the path of the first thing that the schema of `kind` refuses. `name`: what messages call it."""
    check_version(kind, record, name)
    problems = [] if _surely_valid(kind)(record) else _validator(kind).iter_errors(record)
    problem = min(problems, key=lambda error: [str(part) for part in error.absolute_path], default=None)
    if problem is not None:
        raise RuleError(name, "schema", f"{'.'.join(map(str, problem.absolute_path)) or kind}: {_explain(problem)}")
    if where := _infinite(record):
        raise RuleError(name, "schema", f"{where}: is not a finite number")


def _explain(problem: Any) -> str:
    value = repr(problem.instance)
    shown = value if len(value) <= 60 else value[:57] + "..."
    if problem.validator == "required":
        missing = [key for key in problem.validator_value if key not in problem.instance]
        return f"{', '.join(missing)} missing"
    if problem.validator == "additionalProperties" and problem.schema.get("properties"):
        known = problem.schema["properties"]
        unknown = [str(key) for key in problem.instance if key not in known]
        return f"unknown: {', '.join(unknown)}; known here: {', '.join(known)}"
    if problem.validator == "enum":
        return f"{shown} is none of {', '.join(map(str, problem.validator_value))}"
    if problem.validator == "type":
        wanted = problem.validator_value
        return f"{shown} is not of type {wanted if isinstance(wanted, str) else ' or '.join(wanted)}"
    if problem.validator == "pattern":
        return f"{shown} does not match {problem.validator_value}"
    if problem.validator in ("minItems", "minLength"):
        return "is empty" if not problem.instance else f"{shown} is too short"
    return str(problem.message)[:200]


def _infinite(value: Any, where: str = "") -> str | None:
    """The path of the first number that JSON cannot hold."""
    if isinstance(value, float):
        return None if math.isfinite(value) else where
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return None
    for key, item in items:
        if found := _infinite(item, f"{where}.{key}" if where else str(key)):
            return found
    return None
