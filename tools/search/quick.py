"""A quick yes: whether a value surely satisfies a schema. No is no verdict: then jsonschema decides, and says why.

jsonschema takes 2 ms for an audit's record, which is too long for the thousands of a run. What is known here is the part of
JSON Schema that the records' schemas use; a schema with any other keyword is never accepted. tests/test_ir_commands.py holds
it against jsonschema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Test = Callable[[Any], bool]
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "number": (int, float), "integer": (int,),
}  # fmt: skip
_SILENT = {"$schema", "$id", "title", "description", "examples"}
_LENGTHS: dict[str, tuple[Any, Callable[[int, int], bool]]] = {
    **{"minLength": (str, int.__ge__), "maxLength": (str, int.__le__)},
    **{"minItems": (list, int.__ge__), "maxItems": (list, int.__le__)},
}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
}


def compiled(schema: dict[str, Any]) -> Test:
    """The test of a schema; one that always says no where a keyword is unknown."""
    tests = [_keyword(key, schema) for key in schema if key not in _SILENT]
    return lambda value: all(test(value) for test in tests)


def _keyword(key: str, schema: dict[str, Any]) -> Test:
    stated = schema[key]
    if key == "type":
        return _type([stated] if isinstance(stated, str) else stated)
    if key in ("const", "enum"):
        allowed = [stated] if key == "const" else stated
        return lambda value: any(type(value) is type(item) and value == item for item in allowed)
    if key == "pattern":
        search = re.compile(stated).search
        return lambda value: not isinstance(value, str) or search(value) is not None
    if key in _LENGTHS:
        kind, holds = _LENGTHS[key]
        return lambda value: not isinstance(value, kind) or holds(len(value), stated)
    if key in _BOUNDS:
        bound = _BOUNDS[key]
        return lambda value: not isinstance(value, int | float) or bound(value, stated)
    if key == "uniqueItems" and stated:
        return lambda value: not isinstance(value, list) or _unique(value)
    if key == "items":
        item = compiled(stated)
        return lambda value: not isinstance(value, list) or all(item(element) for element in value)
    if key == "required":
        names = set(stated)
        return lambda value: not isinstance(value, dict) or names <= value.keys()
    if key in ("properties", "additionalProperties"):
        return _members(schema) if key == "properties" or "properties" not in schema else lambda value: True
    return lambda value: False


def _type(names: list[str]) -> Test:
    kinds = tuple(kind for name in names for kind in _TYPES[name])
    truth = "boolean" in names

    def test(value: Any) -> bool:
        return isinstance(value, kinds) and (truth or not isinstance(value, bool))

    return test


def _unique(value: list[Any]) -> bool:
    return all(isinstance(item, str) for item in value) and len(set(value)) == len(value)


def _members(schema: dict[str, Any]) -> Test:
    """properties and additionalProperties, which belong together."""
    known = {name: compiled(inner) for name, inner in schema.get("properties", {}).items()}
    other = schema.get("additionalProperties", True)
    rest: Test = compiled(other) if isinstance(other, dict) else lambda value: bool(other)

    def test(value: Any) -> bool:
        return not isinstance(value, dict) or all(known.get(name, rest)(member) for name, member in value.items())

    return test
