"""What an installation takes: every package has its pinned version, and the citation is that of the package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton")  # a CUDA build of torch states the versions of these itself


def project(repo: Path) -> str:
    return (repo / "pyproject.toml").read_text()


def constrained(text: str) -> dict[str, Requirement]:
    """Name -> its line of constraints.txt for this Python."""
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    here = [line for line in lines if line.marker is None or line.marker.evaluate()]
    assert len({canonicalize_name(line.name) for line in here}) == len(here), "a package stands twice for one Python"
    return {canonicalize_name(line.name): line for line in here}


def required(roots: list[str]) -> Iterator[str]:
    """Every package that the roots bring, themselves included, as far as they are installed."""
    waiting, seen = [Requirement(root) for root in roots], set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in seen or name.startswith(PINNED_BY_TORCH):
            continue
        seen.add(name)
        try:
            needs = [Requirement(need) for need in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue  # not needed on this machine, such as a library of GPUs
        yield name
        extras = one.extras or {""}
        waiting += [need for need in needs if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras)]


def named(text: str, key: str) -> list[str]:
    """The requirements in a list of pyproject.toml."""
    found = re.search(rf"^{key} = \[(.*)\]$", text, re.M)
    assert found
    return re.findall(r'"([^"]+)"', found[1].replace("; python_version >= '3.11'", ""))


def test_every_package_that_is_installed_is_pinned(repo: Path) -> None:
    text = project(repo)
    pinned = constrained((repo / "constraints.txt").read_text())
    needed = set(required(named(text, "dependencies") + named(text, "dev")))
    assert {"torch", "networkx", "matplotlib", "pytest"} <= needed
    assert "transformers" in needed or sys.version_info < (3, 11)  # what the tests of models need runs where they do
    assert sorted(needed - set(pinned)) == []


def test_the_citation_is_of_the_package(repo: Path) -> None:
    cited = yaml.safe_load((repo / "CITATION.cff").read_text())
    text = project(repo)
    stated = dict(re.findall(r'^(version|license|description) = "([^"]+)"$', text, re.M))
    assert (cited["version"], cited["license"]) == (stated["version"], stated["license"])
    assert cited["abstract"].rstrip(".") == stated["description"]
    assert cited["title"] == "AReaL-TIK" and cited["authors"] == [{"name": "The AReaL-TIK authors"}]
    assert cited["cff-version"] == "1.2.0" and cited["message"] and cited["type"] == "software"
