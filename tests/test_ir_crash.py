"""Commands that are killed at every write, disks that are full, folders that cannot be written, two writers at once.

A kill is a child process that leaves without any clean-up before one of the calls that change the disk, or after the last.
Then a run is what it was before the command or after it; the command is run again, and it counts once.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ir_tools import ROOT, Agent, Scripted, action, decision, edited, new_run, opportunity, started, unsynced

from tools.core.config import load_target
from tools.core.errors import UserError
from tools.core.files import write_new
from tools.evaluator import integrity
from tools.evaluator import report as reports
from tools.evaluator.integrity import evaluator_hashes
from tools.search import bridge
from tools.search import create as create_module
from tools.search.create import create
from tools.search.log import read_lines
from tools.search.records import RuleError
from tools.search.run import Run
from tools.search.verify import verify

WRITES = ("open", "replace", "link", "ftruncate", "pwrite", "fsync", "mkdir", "unlink", "chmod")
KILLED = 77
Command = Callable[[Path], None]
USAGE = {"input_tokens": 7, "output_tokens": 3, "cached_tokens": None, "source": "counter", "step": "I0001"}


def child(work: Callable[[], None]) -> int:
    """Do something in a forked process; its exit code, 0 where it ended by itself."""
    process = os.fork()
    if process == 0:
        code = 0
        try:
            work()
        except UserError:
            code = 2
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def killed_at(number: int, command: Command, folder: Path) -> bool:
    """Kill a command just before its write of this number; False where it makes fewer and ends by itself."""

    def work() -> None:
        left = number

        def wrapped(real: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                nonlocal left
                left -= name != "open" or bool(given[1] & (os.O_CREAT | os.O_RDWR | os.O_WRONLY))
                if left == 0:
                    os._exit(KILLED)
                return real(*given, **named)

            return call

        for name in WRITES:
            mock.patch.object(os, name, wrapped(getattr(os, name), name)).start()
        command(folder)

    code = child(work)
    assert code in (0, KILLED), code
    return code == KILLED


def once_more(command: Command, folder: Path) -> None:
    """What someone does whose command was killed: run it again; where it is recorded already, the tool says so."""
    try:
        command(folder)
    except RuleError as refusal:
        assert refusal.rule in ("open-attempt", "duplicate-opportunity", "decided-already", "usage", "audited-already")
    except UserError as refusal:
        assert "holds a run already" in str(refusal) or "nothing waits" in str(refusal)


def told(folder: Path) -> Any:
    """A run's history without its times."""
    return [(line["type"], line["facts"]) for line in read_lines(folder)]


def init(folder: Path) -> None:
    create(folder, gpu="cpu", name="run")


@pytest.fixture(autouse=True, scope="module")
def quicker() -> Iterator[None]:
    """Configs and the evaluator's hashes are read once: they do not change here, and make most of an init."""
    with (
        mock.patch.object(create_module, "load_target", functools.cache(load_target)),
        mock.patch.object(integrity, "load_target", functools.cache(load_target)),
        mock.patch.object(integrity, "evaluator_hashes", functools.cache(evaluator_hashes)),
        mock.patch.object(reports, "evaluator_hashes", functools.cache(evaluator_hashes)),
    ):
        yield


@functools.cache
def written(identity: str) -> list[bytes]:
    """The report of an implementation, once it was made."""
    return []


def audit(folder: Path) -> None:
    scripted, run = Scripted(), Run.open(folder)

    def evaluate(run: Run, identity: str, output: Path, show: Any) -> None:
        if not written(identity):
            written(identity).append(scripted.write(run, identity, output).read_bytes())
        else:
            write_new(output, written(identity)[0])

    with scripted.at_work(), mock.patch.object(bridge, "evaluate", evaluate):
        run.audit()


def propose(folder: Path) -> None:
    Run.open(folder).propose(opportunity())


def act(folder: Path) -> None:
    run = Run.open(folder)
    run.act(action(), edited(run.source(ROOT), "a child"), "cpp")


def decide(folder: Path) -> None:
    follow = opportunity(direction="next", applies_to=["I0001"], evidence=["E0001"])
    Run.open(folder).decide(decision("continue", follow_ups=[follow]))


def use(folder: Path) -> None:
    Run.open(folder).usage(dict(USAGE))


STEPS: list[Command] = [init, audit, propose, act, audit, decide, use]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run before each of the steps, and after the last."""
    base = tmp_path_factory.mktemp("stages")
    folders = [base / f"{number}" for number in range(len(STEPS) + 1)]
    with unsynced():
        for number, command in enumerate(STEPS):
            if number:
                shutil.copytree(folders[number], folders[number + 1])
            command(folders[number + 1])
    return folders


@pytest.mark.parametrize("number", range(len(STEPS)), ids=[f"{n}-{step.__name__}" for n, step in enumerate(STEPS)])
def test_a_command_killed_at_any_write_counts_once(stages: list[Path], tmp_path: Path, number: int) -> None:
    command, before, after = STEPS[number], stages[number], stages[number + 1]
    whole = told(after)
    write, killed = 0, True
    with unsynced():
        while killed:
            write += 1
            folder = tmp_path / f"{write}"
            if before.exists():
                shutil.copytree(before, folder)
            killed = killed_at(write, command, folder)
            assert (told(folder) if folder.exists() else []) in ([], whole, whole[:-1])
            once_more(command, folder)
            assert told(folder) == whole
            verify(folder)
            shutil.rmtree(folder)
    assert write > 4  # lock, log, its end, the line, its sync


def test_a_line_cut_at_any_byte_was_never_written(stages: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stages[-1], folder)
    log = folder / "log.jsonl"
    content = log.read_bytes()
    start = content.rindex(b"\n", 0, -1) + 1
    before = Run.open(stages[-2]).state
    with unsynced():
        for cut in range(start, len(content)):
            log.write_bytes(content[:cut])
            run = Run.open(folder)
            assert run.state == before
            run.usage(dict(USAGE))
            assert told(folder) == told(stages[-1]) and log.read_bytes().count(b"\n") == content.count(b"\n")
    log.write_bytes(content[:start] + b'{"n":6,\x00 garbage\n')  # whole, but never flushed whole
    assert Run.open(folder).state == before


def test_writers_wait_for_each_other(stages: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stages[-1], folder)
    lines, each = len(read_lines(folder)), 12
    processes = []
    for writer in range(4):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                run = Run.open(folder)
                for number in range(each):
                    run.usage({**USAGE, "step": f"{writer}.{number}"})
                    run.propose(opportunity(direction=f"w{writer}-{number}"))
                code = 0
            finally:
                os._exit(code)
        processes.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [0] * 4
    run = Run.open(folder)
    assert len(run.lines) == lines + 4 * 2 * each and len(run.state.opportunities) == 2 + 4 * each
    assert run.state.tokens == 10 * (1 + 4 * each)
    verify(folder)


def test_two_inits_make_one_run(tmp_path: Path) -> None:
    codes = []
    processes = []
    for _ in range(3):
        process = os.fork()
        if process == 0:
            code = 2
            try:
                init(tmp_path / "run")
                code = 0
            finally:
                os._exit(code)
        processes.append(process)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)
    assert codes == [0, 2, 2] and len(read_lines(tmp_path / "run")) == 1


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_loses_nothing(stages: list[Path], tmp_path: Path, room: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The log may not grow by more than `room` bytes: the kernel refuses, or takes a part of the line only."""
    folder = tmp_path / "run"
    shutil.copytree(stages[-1], folder)
    content = (folder / "log.jsonl").read_bytes()

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + room, len(content) + room))
        try:
            Run.open(folder).propose(opportunity(direction="another"))
        except UserError as problem:
            print(problem, flush=True)
            raise

    assert child(work) == 2
    said = capfd.readouterr().out
    assert "log.jsonl: cannot write" in said and "run the command again" in said
    assert (folder / "log.jsonl").read_bytes() == content
    Run.open(folder).propose(opportunity(direction="another"))
    verify(folder)


@pytest.mark.parametrize("call", ["fsync", "link", "replace", "pwrite"])
def test_no_space_anywhere_is_one_line(stages: list[Path], tmp_path: Path, call: str) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "run"
    shutil.copytree(stages[3], folder)
    before = told(folder)
    with mock.patch.object(os, call, full):
        if call == "link":
            act(folder)  # records replace what was never acknowledged: nothing is linked
            return
        with pytest.raises(UserError, match="No space left"):
            act(folder)
    assert told(folder) == before
    act(folder)
    verify(folder)


def test_a_read_only_folder_can_be_read(stages: list[Path], tmp_path: Path) -> None:
    """Simulated: whoever runs the tests may be allowed everything."""
    real = os.open

    def guarded(path: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(folder)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *given, **named)

    folder = tmp_path / "run"
    shutil.copytree(stages[-1], folder)
    with mock.patch.object(os, "open", guarded):
        assert Run.open(folder).state.stage == "action"
        verify(folder)
        with pytest.raises(UserError, match="Read-only file system"):
            propose(folder)
        with pytest.raises(UserError, match="Read-only file system"):
            new_run(folder / "inside")


def test_an_evaluation_that_was_not_recorded_is_taken_up(stages: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stages[4], folder)
    scripted = Scripted()
    run = Run.open(folder)
    scripted.write(run, "I0001", folder / "reports" / "I0001.json")
    with scripted.at_work(), unsynced():
        run.audit(show=lambda text: None)
        assert scripted.evaluations == 0 and run.state.stage == "lineage"
    assert not (folder / "reports" / "I0001.json").exists()
    again = tmp_path / "again"
    shutil.copytree(stages[4], again)
    (again / "reports" / "I0001.json").write_text(json.dumps({"status": "INCOMPLETE"}))
    with scripted.at_work(), unsynced():
        Run.open(again).audit()
        assert scripted.evaluations == 1


def test_agents_of_one_run_do_not_mix_their_ids(tmp_path: Path) -> None:
    """Two open runs of one folder: each step is checked on the newest state."""
    with unsynced():
        first = started(tmp_path / "run", parallel=2)
        second = Agent(Run.open(tmp_path / "run"), seed=2)
        children = [first.act([ROOT])[0], second.act([ROOT])[0]]
        assert children == ["I0001", "I0002"]
        with pytest.raises(RuleError, match="open-attempt"):
            first.act([ROOT])
