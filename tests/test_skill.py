"""The skill and the prompts say only what is so: every command parses, every path exists, every example is valid."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ir_tools import Scripted, edited

from tools import ir
from tools.core.config import load_target, target_names
from tools.core.errors import CommandParser, UserError
from tools.search.create import create
from tools.search.run import Run

REPO = Path(__file__).resolve().parents[1]
SKILL = REPO / ".agents" / "skills" / "areal-tik"
PAGES = [SKILL / "SKILL.md", *sorted((SKILL / "references").glob("*.md"))]
SIX = ("agent_task", "initialization", "action", "audit", "lineage_management", "agent_task_epoch")
KINDS = ("opportunity", "implementation", "action", "audit", "lineage")
BY_TOOL = {
    "opportunity": {"schema": "areal-tik/opportunity/1", "id": "O0001", "created": "2026-01-01T00:00:00+00:00"},
    "action": {
        "schema": "areal-tik/action/1",
        "id": "A0001",
        "created": "2026-01-01T00:00:00+00:00",
        "child": "I0001",
        "patch": "--- a\n",
    },
    "lineage": {"schema": "areal-tik/lineage/1", "id": "L0001", "created": "2026-01-01T00:00:00+00:00"},
}
_FENCE = re.compile(r"^[ \t]*```(\w+)\n(.*?)^[ \t]*```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)|\]\(#([^)\s]+)\)")
_SHELL = re.compile(r"\s+(?:\d?>&?|&)\s*\S*.*$")  # redirections, and what stands behind them


def shell_lines(text: str) -> Iterator[str]:
    """Lines of shell blocks that run one of the project's tools, and such commands in running text."""
    fenced = [line.strip() for kind, body in _FENCE.findall(text) if kind == "sh" for line in body.splitlines()]
    inline = _INLINE.findall(_FENCE.sub("", text))
    for line in [*fenced, *inline]:
        if re.match(r"(nohup )?python tools/\w+\.py ", line):
            yield line


def parse(line: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hand a command line to its tool's own parser and to nothing else. UserError where the parser refuses it."""
    words = shlex.split(_SHELL.sub("", line.removeprefix("nohup ")))
    assert words[0] == "python"
    module = importlib.import_module(words[1].removesuffix(".py").replace("/", "."))

    class Parsed(Exception):
        pass

    original = CommandParser.parse_args

    def only_parse(self: CommandParser, *args: Any, **kwargs: Any) -> Any:
        raise Parsed(original(self, *args, **kwargs))

    monkeypatch.setattr(CommandParser, "parse_args", only_parse)
    try:
        module.main(words[2:])
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        monkeypatch.undo()
    raise AssertionError(f"{line}: the command never parsed its arguments")


COMMANDS = sorted({(page.name, line) for page in PAGES for line in shell_lines(page.read_text())})


def test_the_skill_is_valid_under_the_specification(tmp_path: Path) -> None:
    skills_ref = pytest.importorskip("skills_ref", reason="the package skills-ref is not installed (Python 3.11 or later)")
    assert skills_ref.validate(SKILL) == []
    elsewhere = tmp_path / "other-name"
    elsewhere.mkdir()
    (elsewhere / "SKILL.md").write_text(PAGES[0].read_text())
    assert any("must match" in problem for problem in skills_ref.validate(elsewhere))


def test_front_matter_and_length() -> None:
    text = PAGES[0].read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["name"] == SKILL.name
    assert "$areal-tik Optimize H200 attention in a new run under runs/h200-trial." in front["description"]
    assert len(front["description"]) <= 1024
    assert len(text.splitlines()) < 400


def test_agents_that_look_elsewhere_find_the_same_skill() -> None:
    link = REPO / ".claude" / "skills" / "areal-tik"
    assert link.is_symlink() and not Path(link.readlink()).is_absolute()
    assert (link / "SKILL.md").samefile(SKILL / "SKILL.md")


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line[:60]}" for page, line in COMMANDS])
def test_every_command_parses(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse(line, monkeypatch)


def test_a_wrong_command_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unrecognized arguments: --sauce"):
        parse("python tools/load_kernel.py --gpu cpu --sauce x.cpp", monkeypatch)
    with pytest.raises(UserError):
        parse("nohup python tools/ir.py auditt --run runs/x > log 2>&1 &", monkeypatch)


def test_the_loop_is_covered() -> None:
    used = {line.split("tools/ir.py ")[1].split()[0] for _, line in COMMANDS if "tools/ir.py " in line}
    assert used == set(ir.COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_link_exists(page: Path) -> None:
    text = page.read_text()
    named = {found for found in re.findall(r"(?:tools|experimental|tests)/[\w./-]*\w", text) if "TARGET" not in found}
    assert not [path for path in named if not (REPO / path).exists()]
    for target, anchor, own in _LINK.findall(text):
        file = page.parent / target if target else page
        assert file.is_file(), f"{page.name} links to {target}"
        if anchor or own:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert (anchor or own) in {title.lower().replace(" ", "-") for title in titles}


def test_every_reference_is_reached_from_the_skill() -> None:
    text = PAGES[0].read_text()
    assert not [page.name for page in PAGES[1:] if f"references/{page.name}" not in text]
    assert {f"gpu-{name}.md" if name != "cpu" else "cpu.md" for name in target_names()} <= {page.name for page in PAGES}


def examples() -> dict[str, Any]:
    found = re.findall(r"<!-- example: (\w+) -->\n```json\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    return {name: json.loads(body) for name, body in found}


def check(kind: str, body: dict[str, Any]) -> None:
    """A file that the agent writes, with what the tool adds, is a valid record; the agent writes nothing of the tool's."""
    from tools.search.schemas import validate

    assert not body.keys() & BY_TOOL[kind].keys()
    validate(kind, {**body, **BY_TOOL[kind]}, kind)


def test_examples_are_valid_records() -> None:
    found = examples()
    assert set(found) == {"opportunity", "action", "decide"}
    check("opportunity", found["opportunity"])
    check("action", found["action"])
    assert found["decide"]["follow_ups"]
    for follow_up in found["decide"]["follow_ups"]:
        check("opportunity", follow_up)
    check("lineage", {**found["decide"], "follow_ups": ["O0002"]})


def test_examples_make_a_run(tmp_path: Path) -> None:
    """Taken as they stand, one after the other, they pass every rule, in the order that the skill tells."""
    found, folder = examples(), tmp_path / "run"
    run = create(folder, "cpu")
    evaluator = Scripted()
    evaluator.code["decode"] = "identical"
    child = run.folder / "work" / "child.cpp"
    child.write_bytes(edited(run.source("I0000"), "a change"))
    for name, body in found.items():
        (folder / "work" / f"{name}.json").write_text(json.dumps(body))
    steps: list[list[Any]] = [
        ["audit"],
        ["propose", "--file", folder / "work" / "opportunity.json"],
        ["act", "--file", folder / "work" / "action.json", "--source", child],
        ["audit"],
        ["decide", "--file", folder / "work" / "decide.json"],
        ["usage", "--unavailable", "the environment shows none"],
        ["verify"],
    ]
    with evaluator.at_work():
        for command, *options in steps:
            assert ir.main([command, "--run", str(folder), *map(str, options)]) == 0
    state = Run.open(folder).state
    assert state.stage == "action" and state.pending == ["O0002"] and "I0001" in state.frontier


def test_a_wrong_example_is_noticed() -> None:
    body = examples()["action"]
    del body["numerical_risks"]["scaling_and_masking"]
    with pytest.raises(UserError, match="scaling_and_masking missing"):
        check("action", body)


@pytest.mark.parametrize("kind", KINDS)
def test_records_page_has_every_field(kind: str) -> None:
    text = (SKILL / "references" / "records.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [part for part in sections if part.startswith(f"{kind},")]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    stated = {field for cell in rows for field in _INLINE.findall(cell)}
    schema = json.loads((REPO / "experimental" / "schemas" / f"{kind}.schema.json").read_text())
    assert stated == set(schema["properties"])
    for name, field in schema["properties"].items():
        inner = field.get("properties", {}) or field.get("items", {}).get("properties", {})
        (row,) = [line for line in section.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        if len(inner) > 1:
            assert set(inner) <= set(_INLINE.findall(row)), name


def rules_of_the_tool() -> set[str]:
    """The second argument of every RuleError that tools/search raises."""
    found = set()
    for path in (REPO / "tools" / "search").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RuleError":
                found |= {str(part.value) for part in ast.walk(node.args[1]) if isinstance(part, ast.Constant)}
    return found


def test_every_rule_is_explained() -> None:
    text = PAGES[0].read_text()
    table = text[text.index("## When the tool refuses") : text.index("## A quiet machine")]
    explained = {rule for row in table.splitlines() if row.startswith("| `") for rule in _INLINE.findall(row.split("|")[1])}
    noted = {"stale-incumbent"}  # no refusal: a note beside an audit
    assert explained == rules_of_the_tool() | noted


def test_what_an_action_may_restate_is_explained() -> None:
    from tools.search.acts import RENEWED

    text = (SKILL / "references" / "records.md").read_text()
    assert {row.split("`")[1] for row in text.splitlines() if "| inherited |" in row} == set(RENEWED)


@pytest.mark.parametrize("name", target_names())
def test_prompts_of_a_target(name: str) -> None:
    config = load_target(name).config
    prompts = config["prompts"]
    assert set(prompts) == {*SIX, "target"}
    assert all(prompts[key] == load_target("cpu").config["prompts"][key] for key in SIX)
    text = "\n".join(prompts.values())
    named = set(re.findall(r"ir\.py ([a-z-]+)", text))
    assert named >= {"context", "propose", "act", "audit", "decide", "usage", "status"} and named <= set(ir.COMMANDS)
    assert set(re.findall(r"\blimits\.(\w+)", text)) <= set(config["limits"])


def test_a_run_freezes_every_prompt(tmp_path: Path) -> None:
    run = create(tmp_path / "run", "cpu")
    prompts = load_target("cpu").config["prompts"]
    assert {path.stem: path.read_text() for path in (run.folder / "prompts").iterdir()} == prompts
    told = set(re.findall(r"RUN/([\w./-]*\w)", "\n".join(prompts.values())))
    assert told >= {"config.json", "prompts/target.md", "work"}
    assert not [path for path in told if not (run.folder / path).exists()]


def test_a_target_note_changes_no_other_section(tmp_path: Path) -> None:
    tree = tmp_path / "experimental"
    shutil.copytree(REPO / "experimental", tree, ignore=shutil.ignore_patterns("evidence"))
    config = tree / "cpu" / "config.yaml"
    before = load_target(config=config)
    config.write_text(config.read_text().replace("  target: |\n", "  target: |\n    Another machine.\n"))
    after = load_target(config=config)
    assert {key for key in before.sections if before.sections[key] != after.sections[key]} == {"prompts"}
    assert after.config["prompts"]["audit"] == before.config["prompts"]["audit"]
