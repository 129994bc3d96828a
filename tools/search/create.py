"""Making a run folder: the root, the frozen config and prompts, the manifest, and the log's first line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.core.config import Target, load_target
from tools.core.errors import UserError
from tools.core.files import make_folder, read_bytes, sha256_bytes, sha256_json, show_path, write_atomic
from tools.search import facts, log
from tools.search.records import ABLATIONS, ROOT, record_bytes
from tools.search.run import Run
from tools.search.schemas import validate

Record = dict[str, Any]
DEFAULTS: Record = {
    **{"kappa_max": 20, "max_audits": None, "max_tokens": None, "max_seconds": None},
    **{"parallel": 1, "abandon_after": 2, "ablations": []},
}
JUDGED_BY = ("contract", "workloads", "objective", "limits", "build", "target")  # sections that decide what an attempt is worth
FOLDERS = ("records", "sources", "reports", "prompts", "jobs", "work")
PARTS = {*FOLDERS, "run.json", "config.json", "lock", log.NAME}


def create(
    folder: Path,
    gpu: str | None = None,
    config: Path | None = None,
    source: Path | None = None,
    settings: Record | None = None,
    name: str | None = None,
) -> Run:
    """Make a run. An `init` that was killed is begun anew; a folder with anything else in it is refused."""
    from tools.evaluator import integrity
    from tools.evaluator.report import VERSION

    target = load_target(gpu, config)
    integrity.refuse_weaker(target)
    path = source or target.source()
    data = read_bytes(path)
    suffix = path.suffix.lstrip(".")
    make_folder(folder)
    with log.lock(folder):
        _refuse_taken(folder)
        chain = log.Log(folder)
        time = chain.next_time()
        created = time[:19] + "+00:00"
        evaluator = sha256_json(integrity.evaluator_hashes())
        judged = {**{section: target.sections[section] for section in JUDGED_BY}, "evaluator": evaluator}
        prompts = {key: text.encode() for key, text in target.config["prompts"].items()}
        manifest = {
            "schema": "areal-tik/run/1",
            "name": name or folder.resolve().name,
            "created": created,
            "target": {
                "name": target.name,
                "config": None if config is None else show_path(target.path),
                "sections": dict(target.sections),
            },
            "contract": target.config["contract"]["name"],
            "root": ROOT,
            "evaluator": {"sha256": evaluator, "version": VERSION},
            "settings": _settings(settings or {}),
            "prompts": {key: sha256_bytes(text) for key, text in prompts.items()},
            "specification_sha256": sha256_json(judged),
        }
        root = _root(target, data, suffix, created)
        validate("run", manifest, "run.json")
        validate("implementation", root, ROOT)
        for part in FOLDERS:
            make_folder(folder / part)
        for key, text in prompts.items():
            write_atomic(folder / "prompts" / f"{key}.md", text)
        write_atomic(folder / "config.json", record_bytes(target.config))
        write_atomic(folder / "sources" / f"{root['source']['sha256']}.{suffix}", data)
        chain.append(chain.line("init", [manifest, root], facts.of_line("init", manifest, [root]), time), [manifest, root])
    return Run.open(folder)


def _settings(stated: Record) -> Record:
    settings = {**DEFAULTS, **stated}
    if unknown := [name for name in settings["ablations"] if name not in ABLATIONS]:
        raise UserError(f"--without {unknown[0]}: none of {', '.join(ABLATIONS)}")
    return settings


def _refuse_taken(folder: Path) -> None:
    """UserError where a folder holds a run, or anything that init did not make."""
    if log.read_lines(folder):
        raise UserError(
            f"{show_path(folder)}: holds a run already; go on with it (ir.py status --run ...), or name another folder"
        )
    strange = sorted(entry.name for entry in folder.iterdir() if entry.name not in PARTS and not entry.name.startswith("."))
    if strange:
        raise UserError(f"{show_path(folder)}: is not empty ({strange[0]}): name a new folder")


def _root(target: Target, data: bytes, suffix: str, created: str) -> Record:
    contract = target.config["contract"]
    steps = "\n".join(f"{step}: {text}" for step, text in contract["steps"].items())
    return {
        "schema": "areal-tik/implementation/1",
        "id": ROOT,
        "created": created,
        "source": {"sha256": sha256_bytes(data), "bytes": len(data), "suffix": suffix},
        "parents": [],
        "action": None,
        "target": target.name,
        "architecture": ", ".join(target.config["build"]["arch"]) or "native",
        "entry_points": ["prefill", "extend", "decode"],
        "shared_regions": ["namespace numerics"],
        "dispatch": "as the tile policy of the source states",
        "numerical_requirements": f"Contract {contract['name']}, the same for every entry point.\n{steps}",
        "contract": contract["name"],
        "contract_sha256": target.sections["contract"],
    }
