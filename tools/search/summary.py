"""What `ir.py status` says of a run: from the log alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.core.files import show_path
from tools.search.log import now_text
from tools.search.run import Run

NEXT = {
    "audit": "audit --run {run}",
    "lineage": "decide --run {run} --file FILE",
    "action": "act --run {run} --file FILE --source CHILD",
    "propose": "propose --run {run} --file FILE",
    "stopped": "report --run {run}",
    "published": "verify --run {run}",
}


def summary(run: Run, published: Path | None = None) -> dict[str, Any]:
    """Everything that status tells, as JSON. `published`: the folder of a published run, which `run` was unpacked from."""
    state = run.state
    now = state.time if published else now_text()
    shown = show_path(published or run.folder)
    stop = state.stop_at(now)
    return {
        "run": shown,
        "name": state.name,
        "target": state.target,
        "contract": state.contract,
        "stage": state.stage,
        "stop_reason": stop,
        "incumbent": state.incumbent,
        "speedup": state.speedup,
        "kappa": state.kappa,
        "audited": state.audited,
        "tokens": state.tokens,
        "tokens_unavailable": state.tokens_unavailable,
        "seconds": round(state.seconds(now)),
        "settings": state.settings,
        "frontier": state.frontier,
        "archive": state.archive,
        "pending": [{"id": o, "direction": state.opportunities[o].direction} for o in state.pending],
        "open": [
            {"action": a, "child": state.actions[a].child, "status": state.vertex_status(state.actions[a].child)}
            for a in state.open_attempts
        ],
        "undecided": state.undecided(),
        "unaudited": state.unaudited(),
        "lines": state.lines,
        "last_step": state.time,
        "next": "python tools/ir.py " + NEXT["published" if published else _next(run, stop)].format(run=shown),
    }


def _next(run: Run, stop: str | None) -> str:
    """What the search waits for, as a key of NEXT."""
    state = run.state
    if not state.qualified:
        return "audit"
    if state.stage in ("audit", "lineage"):
        return state.stage
    if stop and not stop.startswith("no-opportunity"):
        return "stopped"
    return "action" if state.pending or state.without("opportunities") else "propose"


def text(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    settings = found["settings"]
    rows = [
        ("run", f"{found['run']}: {found['target']}, contract {found['contract']}"),
        ("stage", found["stage"] + (f" ({found['stop_reason']})" if found["stop_reason"] else "")),
        (
            "incumbent",
            f"{found['incumbent']}, {found['speedup']:.4f} times the root's speed" if found["incumbent"] else "none yet",
        ),
        ("kappa", f"{found['kappa']} of {settings['kappa_max']}"),
        ("audits", _of(found["audited"], settings["max_audits"])),
        ("tokens", _tokens(found)),
        ("seconds", _of(found["seconds"], settings["max_seconds"])),
        ("frontier", _many(found["frontier"])),
        ("archive", _many(found["archive"])),
        ("pending", _many([f"{item['id']} {item['direction']}" for item in found["pending"]])),
        ("open", _many([f"{item['action']} made {item['child']} ({item['status']})" for item in found["open"]])),
    ]
    if settings["ablations"]:
        rows.append(("without", ", ".join(settings["ablations"])))
    return "\n".join(f"{name:<10}{value}" for name, value in [*rows, ("next", found["next"])])


def _of(count: int, most: int | None) -> str:
    return f"{count}" if most is None else f"{count} of {most}"


def _tokens(found: dict[str, Any]) -> str:
    missing = f"in part unavailable: {found['tokens_unavailable']}" if found["tokens_unavailable"] else ""
    if found["tokens"] is None:
        return missing.removeprefix("in part ") or "not reported"
    return _of(found["tokens"], found["settings"]["max_tokens"]) + (f" ({missing})" if missing else "")


def _many(items: list[str], most: int = 8) -> str:
    """The latest of a list, at most so many."""
    shown = ", ".join(items[-most:]) or "none"
    return shown if len(items) <= most else f"{len(items) - most} older, {shown}"
