"""A run folder: reading it, and the steps that add to it. Everything else about a run is derived from what it gives.

    run = Run.open(Path("runs/x"))
    run.state.stage, run.record("E0001"), run.source("I0003")
    run.propose({...}); run.act({...}, source); run.audit("I0001"); run.decide({...}); run.usage({...})

Each step checks schema and rules, writes its records, and appends one line. UserError (RuleError where a rule refuses)
leaves the run as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.core.errors import UserError
from tools.core.files import REPO_ROOT, read_bytes, sha256_bytes, show_path, write_atomic
from tools.search import facts, log, rules
from tools.search.records import LETTERS, MANIFEST, ROOT, RuleError, kind_of, make_id
from tools.search.schemas import check_version, validate
from tools.search.state import State

if TYPE_CHECKING:
    from tools.core.config import Target

Record = dict[str, Any]
Show = Callable[[str], None]
MADE = ("schema", "id", "created", "patch", "child")  # fields that no file of the agent may state


class Run:
    """One run folder. `state` follows from `lines`, the acknowledged lines of its log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State()
        self._log = log.Log(folder)
        self._hashes: dict[str, str] = {}
        self.refresh()
        self.manifest: Record = self._read(MANIFEST)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """The run in a folder. UserError where there is none, or its log or manifest does not hold."""
        if not folder.is_dir():
            raise UserError(f"{show_path(folder)}: no such folder; a run is made by: ir.py init --run {show_path(folder)}")
        return cls(folder)

    @property
    def lines(self) -> list[log.Line]:
        """The acknowledged lines of the log."""
        return self._log.lines

    def refresh(self) -> None:
        """Take in what other writers have appended."""
        for line in self._log.refresh():
            self._take(line)
        if not self.lines:
            raise UserError(f"{show_path(self.folder)}: no run there: {log.NAME} holds no line; make one with ir.py init")

    def _take(self, line: log.Line) -> None:
        try:
            self.state.replay(line)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            where = f"{show_path(self.folder / log.NAME)}: line {line['n'] + 1}"
            raise UserError(
                f"{where}: its facts are not what this version writes ({problem!r}): restore it from a copy"
            ) from None
        self._hashes.update({named["id"]: named["sha256"] for named in line["records"]})

    # ------------------------------------------------------------ reading

    def _read(self, identity: str) -> Record:
        """A record by its id, as the log knows it by hash."""
        path = log.record_path(self.folder, identity)
        if identity not in self._hashes:
            raise UserError(f"{identity}: there is no such record in {show_path(self.folder)}")
        if not path.is_file():
            raise UserError(f"{show_path(path)}: is missing; restore it from a copy of the run")
        data = read_bytes(path)
        kind = "run" if identity == MANIFEST else kind_of(identity)
        try:
            record: Any = json.loads(data)
        except ValueError:
            raise UserError(f"{show_path(path)}: not JSON: it was cut or edited; restore it from a copy of the run") from None
        check_version(kind, record, show_path(path))
        if sha256_bytes(data) != self._hashes[identity]:
            raise UserError(
                f"{show_path(path)}: does not have the hash that the log states: it was edited; restore it from a copy"
            )
        return dict(record)

    def record(self, identity: str) -> Record:
        """A record by its id; UserError where there is none, or the file is not what was written."""
        kind_of(identity)
        return self._read(identity)

    def ids(self, kind: str) -> list[str]:
        """Ids of all records of a kind, in order."""
        letter = LETTERS[kind]
        return [identity for identity in self._hashes if identity[0] == letter]

    def records(self, kind: str) -> list[Record]:
        """All records of a kind, in order."""
        return [self._read(identity) for identity in self.ids(kind)]

    def report_bytes(self, audit: str) -> bytes:
        """The evaluator's report of an audit, as it was written."""
        path = self.folder / "reports" / f"{audit}.json"
        data = read_bytes(path)
        if sha256_bytes(data) != self.record(audit)["report"]["sha256"]:
            raise UserError(
                f"{show_path(path)}: is not the report that {audit} was made from: restore it from a copy of the run"
            )
        return data

    def report(self, audit: str) -> Record:
        """The evaluator's report of an audit."""
        return dict(json.loads(self.report_bytes(audit)))

    def source_path(self, implementation: str) -> Path:
        """Where the source of an implementation lies, or would lie."""
        source = self.state.implementations[implementation].source
        return self.folder / "sources" / f"{source['sha256']}.{source['suffix']}"

    def source(self, implementation: str) -> bytes:
        """The complete source of an implementation: from sources/, or rebuilt from the patches of its line of parents."""
        if implementation not in self.state.implementations:
            raise UserError(f"{implementation}: there is no such implementation in {show_path(self.folder)}")
        chain: list[str] = []
        here = implementation
        while not self.source_path(here).is_file():
            if here == ROOT:
                raise UserError(f"{show_path(self.source_path(here))}: is missing: no source can be rebuilt without the root's")
            chain.append(here)
            here = self.state.implementations[here].parents[0]
        data = self._checked(here, read_bytes(self.source_path(here)), show_path(self.source_path(here)))
        for child in reversed(chain):
            data = self.rebuilt(child, data)
        return data

    def rebuilt(self, child: str, parent: bytes) -> bytes:
        """The source of a child, from that of its first parent and the action's patch."""
        from tools.search import patches

        action = self.state.implementations[child].action
        assert action is not None
        where = f"{action}: patch"
        return self._checked(child, patches.apply(parent, self.record(action)["patch"], where), where)

    def _checked(self, identity: str, data: bytes, where: str) -> bytes:
        if sha256_bytes(data) != self.state.implementations[identity].source["sha256"]:
            raise UserError(
                f"{where}: does not give the source of {identity} (another SHA-256): restore it from a copy of the run"
            )
        return data

    def target(self) -> Target:
        """The target's config as it is now; the run's own is frozen in config.json."""
        from tools.core.config import load_target

        target = self.manifest["target"]
        config = None if target["config"] is None else REPO_ROOT / target["config"]
        return load_target(target["name"], config)

    # ------------------------------------------------------------ steps

    def propose(self, fields: Record) -> Record:
        """Record an opportunity. Returns it."""
        _refuse_made(fields, "the opportunity")
        return self._commit("propose", lambda time: ([self._opportunity(fields, self.state.next_id("O"), time)], {}))[0]

    def decide(self, fields: Record) -> list[Record]:
        """Record a decision, with the follow-ups that are written out in it. Returns the decision, then those."""
        _refuse_made(fields, "the decision")

        def build(time: str) -> tuple[list[Record], dict[Path, bytes]]:
            identity = self.state.next_id("L")
            made: list[Record] = []
            names: list[Any] = []
            stated = fields.get("follow_ups", [])
            for item in stated if isinstance(stated, list) else [stated]:
                if isinstance(item, dict):
                    _refuse_made(item, "a follow-up")
                    number = int(self.state.next_id("O")[1:]) + len(made)
                    made.append(self._opportunity({**item, "origin": identity}, make_id("O", number), time))
                    item = made[-1]["id"]
                names.append(item)
            defaults: Record = {"reactivate": [], "evidence": [], "falsified_by": None, "reconsider_when": None}
            decision = {**_head("lineage", identity, time), **defaults, **fields, "follow_ups": names}
            return [decision, *made], {}

        return self._commit("decide", build)

    def act(self, fields: Record, source: bytes, suffix: str) -> list[Record]:
        """Record an action and the implementation that it makes. `source`: the complete child. Returns both."""
        from tools.search import acts

        def build(time: str) -> tuple[list[Record], dict[Path, bytes]]:
            return acts.build(self, fields, source, suffix, time)

        _refuse_made(fields, "the action")
        draft, _ = build(max(log.now_text(), self.state.time))
        self._line("act", draft, draft[1]["created"])
        acts.check_form(self, draft[1], source)
        return self._commit("act", build)

    def audit(
        self, implementation: str | None = None, report: Path | None = None, *, job: str | None = None, show: Show | None = None
    ) -> Record:
        """Record what the evaluator says of an implementation (the one that waits): runs it, or takes a report. Returns it."""
        from tools.search import audits

        identity = implementation or audits.waiting(self)
        rules.check_auditable(self.state, self.state.next_id("E"), identity)
        with audits.evaluation(self, identity, report, show or (lambda text: None)) as found:
            return self._commit("audit", lambda time: audits.build(self, identity, found, job, time))[0]

    def usage(self, fields: Record) -> None:
        """Record tokens as the agent's provider reports them, or why they are unavailable."""
        self._commit("usage", lambda time: ([], {}), fields)

    def _opportunity(self, fields: Record, identity: str, time: str) -> Record:
        defaults = {"merge": False, "expected_share": None, "origin": None}
        return {**_head("opportunity", identity, time), **defaults, **fields}

    def _line(self, kind: str, records: list[Record], time: str, usage: Record | None = None) -> dict[str, Any]:
        """The line that these records would make, after schema and rules have let them pass."""
        for record in records:
            validate(kind_of(record["id"]), record, record["id"])
        line = self._log.line(kind, records, usage or facts.of_records(records), time)
        rules.check(self.state, line)
        return line

    def _commit(
        self, kind: str, build: Callable[[str], tuple[list[Record], dict[Path, bytes]]], usage: Record | None = None
    ) -> list[Record]:
        """One step: under the lock, on the newest state, make the records, check them, write files, records and the line."""
        with log.lock(self.folder):
            self.refresh()
            time = self._log.next_time()
            records, files = build(time)
            line = self._line(kind, records, time, usage)
            for path, data in files.items():
                write_atomic(path, data)
            self._log.append(line, records)
            self._take(line)
            return records


def _head(kind: str, identity: str, time: str) -> Record:
    return {"schema": f"areal-tik/{kind}/1", "id": identity, "created": time[:19] + "+00:00"}


def _refuse_made(fields: Any, name: str) -> None:
    if not isinstance(fields, dict):
        raise RuleError(name, "schema", "is not a JSON object")
    if made := [key for key in MADE if key in fields]:
        raise RuleError(name, "schema", f"{', '.join(made)}: made by the tool; leave it out")
