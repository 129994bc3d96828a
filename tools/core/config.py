"""Target configurations: the folders experimental/*/ that have a config.yaml.

    target = load_target("cpu")
    target.config["limits"]["max_slowdown"], target.sections["contract"], target.kernel_files()

A config extends another file (deep merge: mappings merge, anything else replaces, null removes an inherited key) and is
checked against experimental/schemas/config.schema.json. Every error is one UserError line: file, path of the offending
value, what was expected. Paths inside a config are relative to the file that states them; the resolved config holds
them relative to the target's root (the repository, or the config's own folder where it lies elsewhere). Sections are
hashed apart, so that a changed prompt leaves the contract's hash alone.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.core import files
from tools.core.configfile import Merged, read_merged
from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, show_path

EXPERIMENTAL = REPO_ROOT / "experimental"
SCHEMA = EXPERIMENTAL / "schemas" / "config.schema.json"
SECTIONS = ("target", "build", "kernel", "contract", "workloads", "objective", "limits", "baselines", "prompts")
ROLES = ("kernel", "witness")


@dataclass(frozen=True)
class Target:
    """One resolved target configuration."""

    name: str
    path: Path  # the config.yaml
    root: Path  # what paths of `config` are relative to; files lie inside it or inside the repository
    config: dict[str, Any]
    sections: dict[str, str]  # SHA-256 of each section's canonical JSON
    merged: Merged = field(repr=False, compare=False)

    def error(self, where: str, message: str) -> UserError:
        """The UserError for the value at a dotted path, naming the file that states it."""
        return UserError(f"{show_path(self.merged.origin(tuple(where.split('.'))))}: {where}: {message}")

    def _unit(self, role: str) -> tuple[dict[str, Any], str]:
        """The kernel or witness entry and its dotted path."""
        if role not in ROLES:
            raise ValueError(f"role {role!r} is none of {ROLES}")
        unit = self.config["kernel"]
        return (unit, "kernel") if role == "kernel" else (unit["witness"], "kernel.witness")

    def source(self, role: str = "kernel") -> Path:
        """The configured source of a role."""
        unit, where = self._unit(role)
        return self._inside(unit["source"], f"{where}.source")

    def kernel_files(self, role: str = "kernel") -> dict[str, str]:
        """All files that a role's build may read beside system headers: path relative to the root -> SHA-256."""
        unit, _ = self._unit(role)
        return {unit["source"]: unit["sha256"], **unit["files"]}

    def verified_files(self, role: str = "kernel", *, without_source: bool = False) -> dict[str, bytes]:
        """Content of kernel_files(), each checked against its hash; UserError names the first that differs."""
        unit, where = self._unit(role)
        stated = [(name, digest, f"{where}.files.{name}") for name, digest in unit["files"].items()]
        if not without_source:
            stated.insert(0, (unit["source"], unit["sha256"], f"{where}.sha256"))
        contents: dict[str, bytes] = {}
        for name, digest, key in stated:
            data = files.read_bytes(self._inside(name, key))
            actual = files.sha256_bytes(data)
            if actual != digest:
                raise self.error(
                    key,
                    f"{name} has changed (sha256 {actual[:12]}..., stated {digest[:12]}...); "
                    "after a deliberate change run: python tools/load_kernel.py --update-hashes",
                )
            contents[name] = data
        return contents

    def _inside(self, name: str, key: str) -> Path:
        """The file of a root-relative name; UserError where it is missing or leaves the root through a symbolic link."""
        path = self.root / name
        if not path.is_file():
            raise self.error(key, f"no file {show_path(path)}")
        if not any(path.resolve().is_relative_to(root) for root in (self.root, REPO_ROOT)):
            raise self.error(key, f"{name} leads outside {self.root}, to {path.resolve()}")
        return path


def target_names() -> list[str]:
    """Names of all packaged targets."""
    return sorted(path.parent.name for path in EXPERIMENTAL.glob("*/config.yaml"))


def load_target(name: str | None = None, config: Path | None = None) -> Target:
    """Load and check a target by name, or from a config file; with both, the file's target must have that name."""
    if config is not None:
        path = Path(config)
    elif name is not None:
        if name not in target_names():
            raise UserError(f"unknown target {name!r}; known: {', '.join(target_names())}")
        path = EXPERIMENTAL / name / "config.yaml"
    else:
        raise UserError("name a target (--gpu) or a config file (--config)")
    path = path.resolve()
    merged = read_merged(path)
    _check(merged)
    resolved = merged.value
    if name is not None and resolved["target"]["name"] != name:
        raise UserError(f"{show_path(path)}: target.name: {resolved['target']['name']!r} is not {name!r}")
    sections = {section: files.sha256_json(resolved[section]) for section in SECTIONS}
    return Target(resolved["target"]["name"], path, merged.root, resolved, sections, merged)


@functools.cache
def _validator() -> Any:
    """The schema's validator; jsonschema is imported here because nothing else of the loader needs it."""
    import jsonschema

    schema = json.loads(files.read_bytes(SCHEMA))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _check(merged: Merged) -> None:
    """Raise the first schema violation as one line."""
    for where, value in _numbers(merged.value, ()):
        if not math.isfinite(value):
            raise _violation(merged, where, f"{value} is not a finite number")
    errors = sorted(_validator().iter_errors(merged.value), key=lambda e: ([str(p) for p in e.absolute_path], e.validator))
    if errors:
        first = errors[0]
        where, message = _explain(first)
        raise _violation(merged, (*map(str, first.absolute_path), *where), message)
    section, heads = merged.value["build"], merged.value["workloads"]
    cuda = merged.value["target"]["device"] == "cuda"
    if cuda != (section["compiler"] == "nvcc"):
        raise _violation(merged, ("build", "compiler"), f"{section['compiler']!r} does not compile for this target's device")
    if cuda != bool(section["arch"]):
        raise _violation(merged, ("build", "arch"), "nvcc needs at least one" if cuda else "only nvcc takes any")
    if heads["heads_q"] % heads["heads_kv"] or heads["heads_q"] > 16 * heads["heads_kv"]:
        ratio = f"{heads['heads_q']} / {heads['heads_kv']}"
        raise _violation(merged, ("workloads", "heads_q"), f"heads_q / heads_kv is {ratio}, not a whole number from 1 to 16")


def _violation(merged: Merged, where: tuple[str, ...], message: str) -> UserError:
    return UserError(f"{show_path(merged.origin(where))}: {'.'.join(where) or 'the file'}: {message}")


def _numbers(value: Any, where: tuple[str, ...]) -> Any:
    """Every float of a nested value with its path."""
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, (*where, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, (*where, str(index)))


_TYPES = {"object": "a mapping", "array": "a list", "string": "text", "number": "a number", "integer": "a whole number",
          "boolean": "true or false"}  # fmt: skip


def _explain(error: Any) -> tuple[tuple[str, ...], str]:
    """What a jsonschema error says, in plain words, and path parts to add to the error's own path."""
    value, rule = error.instance, error.validator_value
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    if error.validator == "type":
        names = [rule] if isinstance(rule, str) else rule
        return (), f"{shown} is not {' or '.join(_TYPES.get(name, name) for name in names)}"
    if error.validator == "required":
        missing = next(key for key in rule if key not in value)
        return (missing,), "missing section" if not error.absolute_path else "missing"
    if error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        unknown = next((str(key) for key in value if key not in known), "?")
        return (unknown,), f"unknown key; known here: {', '.join(known)}"
    if error.validator == "propertyNames":
        return (), f"key {shown} is not allowed: {error.message}"
    if error.validator == "enum":
        return (), f"{shown} is none of {', '.join(map(str, rule))}"
    if error.validator == "pattern":
        return (), f"{shown} is not {error.schema.get('x-expected', 'of the form ' + rule)}"
    if error.validator in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        sign = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}[error.validator]
        return (), f"{shown} is not {sign} {rule}"
    return (), error.message
