"""The two records of an action: the edit, and the implementation that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.core.files import sha256_bytes
from tools.search import patches
from tools.search.records import RuleError

if TYPE_CHECKING:
    from tools.search.run import Run

Record = dict[str, Any]
RENEWED = ("shared_regions", "dispatch", "numerical_requirements")  # what an action may say anew about its child
RISKS = ("reduction_order", "scaling_and_masking", "instructions_constants_subnormals", "conversion_and_rescale_order")
NO_PATCH = "none"  # stands where rules will refuse the action whatever its patch


def build(run: Run, fields: Record, source: bytes, suffix: str, time: str) -> tuple[list[Record], dict[Path, bytes]]:
    """The child's record and the action's, and the source to keep. `fields`: as the agent wrote them; its key
    `implementation` may restate what the child changes of its first parent's description."""
    state = run.state
    fields = dict(fields)
    renewed = fields.pop("implementation", {})
    if state.without("numerics"):  # the context does not ask for them then
        fields.setdefault("numerical_risks", dict.fromkeys(RISKS, "none: not asked in this run"))
    action, child, created = state.next_id("A"), state.next_id("I"), time[:19] + "+00:00"
    if not isinstance(renewed, dict) or not set(renewed) <= set(RENEWED):
        raise RuleError(action, "schema", f"implementation: an object with some of {', '.join(RENEWED)}")
    parents = fields.get("parents")
    first = parents[0] if isinstance(parents, list) and parents else None
    described = first if isinstance(first, str) and first in state.implementations else "I0000"
    inherited = run.record(described)
    known = state.implementations[described].source["suffix"]
    if suffix != known:
        raise RuleError(
            action, "schema", f"the source is a .{suffix} file, its parent a .{known} file: give it the same suffix"
        )
    digest = sha256_bytes(source)
    made = {
        **inherited,
        **renewed,
        "id": child,
        "created": created,
        "source": {"sha256": digest, "bytes": len(source), "suffix": suffix},
        "parents": parents,
        "action": action,
    }
    refused = described != first or digest in state.sources
    patch = NO_PATCH if refused else patches.make(run.source(described), source, f"source.{suffix}")
    edit = {
        **{"schema": "areal-tik/action/1", "id": action, "created": created, "opportunity": None, "variants": []},
        **fields,
        **{"child": child, "patch": patch},
    }
    return [made, edit], {run.folder / "sources" / f"{digest}.{suffix}": source}


def check_form(run: Run, action: Record, source: bytes) -> None:
    """RuleError `form` where the code that a form promises to leave alone has changed."""
    from tools.search import bridge

    bridge.check_form(run, action["id"], action["form"], run.source(action["parents"][0]), source)
