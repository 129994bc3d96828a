"""Patches of complete sources: every byte comes back, or nothing is applied."""

from __future__ import annotations

import random

import pytest

from tools.core.errors import UserError
from tools.search import patches


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\nb\n", "a\nc\n"),
        ("a\nb", "a\nb\n"),
        ("a\nb\n", "a\nb"),
        ("", "a"),
        ("a", ""),
        ("a\r\nb\r\n", "a\nb\r\n"),
        ("-- a\n++ b\n@@ x\n", "--- a\n+++ b\n"),
        ("\\ No newline at end of file\n", "x"),
        ("ä\u2028ö\x0c\n", "ä\u2028ü\x0c\n"),
    ],
)
def test_a_patch_gives_every_byte_back(old: str, new: str) -> None:
    patch = patches.make(old.encode(), new.encode(), "source.cpp")
    assert patches.apply(old.encode(), patch) == new.encode()


def test_patches_of_random_texts_are_exact() -> None:
    draw = random.Random(5)
    for _ in range(300):
        old, new = ("".join(draw.choice("ab\r\n- +@\\") for _ in range(draw.randrange(40))) for _ in range(2))
        if old != new:
            assert patches.apply(old.encode(), patches.make(old.encode(), new.encode(), "x")) == new.encode()


def test_a_patch_fits_exactly_or_not_at_all() -> None:
    old = "".join(f"line {n}\n" for n in range(40)).encode()
    patch = patches.make(old, old.replace(b"line 20", b"line XX"), "x")
    with pytest.raises(UserError, match=r"A0001: patch: does not apply: its old lines do not stand at line 18"):
        patches.apply(b"one more\n" + old, patch, "A0001: patch")
    with pytest.raises(UserError, match="does not have the lines that its header counts"):
        patches.apply(old, patch.replace("+line XX\n", ""))
    with pytest.raises(UserError, match="does not apply"):
        patches.apply(old.replace(b"line 19", b"line 1X"), patch)
    with pytest.raises(UserError, match="changes 2 files"):
        patches.apply(old, patch + patch.replace("a/x", "a/y").replace("b/x", "b/y"))


def test_what_no_patch_can_hold_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"source.cpp: line 2: not UTF-8"):
        patches.make(b"a\n", b"a\n\xff\n", "source.cpp")
    with pytest.raises(UserError, match=r"source.cpp: the child is the parent unchanged"):
        patches.make(b"a\n", b"a\n", "source.cpp")
