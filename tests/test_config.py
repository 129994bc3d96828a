"""Target configs: what is packaged is valid, and every kind of bad input is one line that names file and value."""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools import load_kernel
from tools.core.config import SECTIONS, Target, load_target, target_names
from tools.core.errors import UserError
from tools.core.files import sha256_file
from tools.core.hashes import update_hashes


@pytest.fixture
def tree(tmp_path: Path, repo: Path) -> Path:
    """A copy of experimental/ without evidence, to be spoiled."""
    wanted = shutil.ignore_patterns("evidence", "figures", "search")
    shutil.copytree(repo / "experimental", tmp_path / "experimental", ignore=wanted)
    for name in target_names():
        update_hashes(load_target(config=tmp_path / "experimental" / name / "config.yaml"))
    return tmp_path / "experimental"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def message(config: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_target(config=config)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", target_names())
def test_packaged_targets_are_valid(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert set(target.sections) == set(SECTIONS)
    assert all(len(digest) == 64 for digest in target.sections.values())
    assert target.source().is_file()
    assert target.source("witness").is_file()


@pytest.mark.parametrize("name", target_names())
def test_stated_hashes_match_the_sources(name: str) -> None:
    for role in ("kernel", "witness"):
        assert set(load_target(name).verified_files(role)) == set(load_target(name).kernel_files(role))


def test_hopper_targets_share_one_contract_and_the_others_have_their_own() -> None:
    contracts = {name: load_target(name).sections["contract"] for name in target_names()}
    assert contracts["h200"] == contracts["h20"]
    assert len(set(contracts.values())) == len(contracts) - 1


CPU, CUDA, H200, COMMON = "cpu/config.yaml", "cuda.yaml", "h200/config.yaml", "common.yaml"
BAD = {
    "wrong type": (COMMON, "max_slowdown: 1.10", "max_slowdown: fast", H200,
                   "common.yaml: limits.max_slowdown: 'fast' is not a number"),
    "bool is not a number": (COMMON, "case_timeout_s: 120", "case_timeout_s: yes", H200, "limits.case_timeout_s: True is not a number"),
    "unknown key": (H200, "l2_bytes:", "l3_bytes:", H200, "h200/config.yaml: target.l3_bytes: unknown key"),
    "unknown section": (CPU, "baselines:", "baseline:", CPU, "config.yaml: baseline: unknown key"),
    "missing key": (H200, "  l2_bytes: 62914560\n", "", H200, "h200/config.yaml: target.l2_bytes: missing"),
    "missing section": (COMMON, "objective: {kind: phase_balanced}", "", H200, "config.yaml: objective: missing section"),
    "removed section": (CPU, "extends: ../common.yaml", "extends: ../common.yaml\nobjective:", CPU, "objective: missing section"),
    "null": (CPU, "  l2_bytes: 67108864", "  l2_bytes:", CPU, "cpu/config.yaml: target.l2_bytes: None is not a whole number"),
    "duplicate key": (H200, "  name: h200\n", "  name: h200\n  name: h20\n", H200, "line 5: key 'name' is stated twice"),
    "key is no text": (H200, "  name: h200\n", "  1: h200\n", H200, "line 4: key 1 is not text"),
    "not yaml": (H200, "gpu_names: [", "gpu_names: [[", H200, "h200/config.yaml: line"),
    "not finite": (COMMON, "accuracy_rms: 0.004", "accuracy_rms: .nan", H200, "limits.accuracy_rms: nan is not a finite number"),
    "out of range": (COMMON, "max_slowdown: 1.10", "max_slowdown: 0.9", CPU, "limits.max_slowdown: 0.9 is not >= 1"),
    "not one of": (COMMON, "kind: phase_balanced", "kind: best", CPU, "objective.kind: 'best' is none of phase_balanced, "),
    "needs weights": (COMMON, "kind: phase_balanced", "kind: token_counts", CPU, "common.yaml: objective.full: missing"),
    "empty axis": (COMMON, "batch: [1, 4, 8, 16], context", "batch: [], context", H200, "workloads.decode.batch: [] "),
    "zero in an axis": (COMMON, "context: [128,", "context: [0,", H200, "workloads.decode.context.0: 0 is not >= 1"),
    "cuda without a gpu": (H200, '  gpu_names: ["NVIDIA H200"]\n', "", H200, "target.gpu_names: missing"),
    "bad hash": (CPU, "  source: kernels/unified_attn.cpp\n  sha256: ", "  source: kernels/unified_attn.cpp\n  sha256: x", CPU, "is not"),
    "no arch": (H200, 'arch: ["compute_90a,code=sm_90a"]', "arch: []", H200, "h200/config.yaml: build.arch: nvcc needs at least one"),
    "wrong compiler": (CPU, "compiler: c++", "compiler: nvcc", CPU, "build.compiler: 'nvcc' does not compile for this"),
    "head ratio": (COMMON, "heads_kv: 8", "heads_kv: 7", CPU, "workloads.heads_q: heads_q / heads_kv is 32 / 7"),
    "no parent": (H200, "../cuda.yaml", "../cud.yaml", H200, "h200/config.yaml: extends: no file ../cud.yaml"),
    "extends itself": (COMMON, "# Defaults", "extends: cuda.yaml\n# Defaults", H200, "extends itself"),
    "source outside": (CPU, "source: kernels/witness.cpp", "source: ../../../../../etc/passwd", CPU, "lies outside"),
    "absolute source": (CPU, "source: kernels/witness.cpp", "source: /etc/passwd", CPU, "'/etc/passwd' lies outside"),
    "arch": (H200, "compute_90a,code=sm_90a", "sm_90a", H200, "build.arch.0: 'sm_90a' is not of the form"),
    "empty prompt": (CPU, "  target: |", '  audit: ""\n  target: |', CPU, "cpu/config.yaml: prompts.audit: "),
    "rounding in the contract": (CUDA, "-fmad=false", "-ftz=true", H200, "contract.flags.0: '-ftz=true' is none of"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_config(tree: Path, kind: str) -> None:
    file, old, new, config, expected = BAD[kind]
    load_target(config=tree / config)
    edit(tree / file, old, new)
    assert expected in message(tree / config)


def test_bad_files(tree: Path) -> None:
    assert "cannot read" in message(tree / "none.yaml")
    (tree / "list.yaml").write_text("[1]")
    assert "is not a mapping" in message(tree / "list.yaml")
    (tree / "binary.yaml").write_bytes(b"a: \xff\x00\x01")
    assert "not valid YAML" in message(tree / "binary.yaml")


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown target 'h300'; known: a100, cpu"):
        load_target("h300")


def test_name_must_be_the_files(tree: Path) -> None:
    with pytest.raises(UserError, match=r"target.name: 'h200' is not 'cpu'"):
        load_target("cpu", tree / H200)


def test_changed_source_is_refused_until_hashes_are_updated(tree: Path) -> None:
    source = tree / "cpu" / "kernels" / "unified_attn.cpp"
    source.write_text(source.read_text() + "\n// changed\n")
    target = load_target(config=tree / CPU)
    with pytest.raises(
        UserError, match=r"config.yaml: kernel.sha256: cpu/kernels/unified_attn.cpp has changed .*--update-hashes"
    ):
        target.verified_files()
    target.verified_files(without_source=True)
    before = (tree / CPU).read_text()
    assert len(update_hashes(target)) == 1
    after = (tree / CPU).read_text()
    changed = [(old, new) for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert len(changed) == 1
    load_target(config=tree / CPU).verified_files()


def test_hashes_of_kernels_that_are_not_selected_are_updated_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, config = tree / "h200" / "kernels" / "another.cu", tree / "h200" / "another.yaml"
    source.write_text("// another\n")
    config.write_text(f'extends: config.yaml\nkernel:\n  source: kernels/another.cu\n  sha256: "{sha256_file(source)}"\n')
    monkeypatch.setattr(load_kernel, "EXPERIMENTAL", tree)
    for options in (["--update-hashes"], ["--update-hashes", "--gpu", "h200"], ["--update-hashes", "--config", str(config)]):
        source.write_text(source.read_text() + "\n// changed\n")
        with pytest.raises(UserError, match=r"another.cu has changed"):
            load_target(config=config).verified_files()
        assert load_kernel.main(options) == 0
        load_target(config=config).verified_files()


def test_changed_header_and_missing_file_are_refused(tree: Path) -> None:
    (tree / "common" / "attn_abi.h").write_text("// empty\n")
    with pytest.raises(UserError, match=r"cuda.yaml: kernel.files.common/attn_abi.h: .* has changed"):
        load_target(config=tree / H200).verified_files()
    (tree / "common" / "attn_abi.h").unlink()
    with pytest.raises(UserError, match=r"no file .*attn_abi.h"):
        load_target(config=tree / H200).verified_files()


def test_symbolic_link_out_is_refused(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    header = tree / "common" / "attn_abi.h"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "attn_abi.h"
    shutil.move(header, elsewhere)
    header.symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"kernel.files.common/attn_abi.h: common/attn_abi.h leads outside"):
        load_target(config=tree / H200).verified_files()


def test_sections_are_hashed_apart(tree: Path) -> None:
    before = load_target(config=tree / H200).sections
    edit(tree / COMMON, "You optimize one", "You optimise one")
    after = load_target(config=tree / H200).sections
    assert {name for name in before if before[name] != after[name]} == {"prompts"}


def test_a_config_elsewhere_may_extend_a_packaged_one(tmp_path: Path, repo: Path) -> None:
    packaged = load_target("cpu")
    (tmp_path / "mine.yaml").write_text(f"extends: {repo}/experimental/cpu/config.yaml\nlimits: {{max_slowdown: 2}}\n")
    target = load_target(config=tmp_path / "mine.yaml")
    assert target.config["limits"]["max_slowdown"] == 2
    assert target.sections["contract"] == packaged.sections["contract"]
    assert target.source() == packaged.source()
    assert target.verified_files().keys() == {str(repo / name) for name in packaged.verified_files()}
    assert target.merged.origin(("limits", "max_slowdown")) == tmp_path / "mine.yaml"
    assert target.merged.origin(("limits", "accuracy_rms")) == repo / "experimental" / "common.yaml"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_anywhere_is_valid_or_one_line(tmp_path: Path, data: st.DataObject) -> None:
    resolved = copy.deepcopy(load_once("h200").config)
    place, key = resolved, data.draw(st.sampled_from(list(resolved)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(list(place)))
    place[key] = data.draw(JSON)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(resolved, allow_unicode=True))
    try:
        load_target(config=config)
    except UserError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(f"{config}: ")


@functools.cache
def load_once(name: str) -> Target:
    return load_target(name)
