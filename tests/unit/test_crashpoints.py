"""The moments at which tests kill a process."""

from __future__ import annotations

import re
from pathlib import Path

from sideline.crashpoints import POINTS

ROOT = Path(__file__).parents[2]
THIS = Path(__file__)


def sources(folder: str) -> str:
    """The text of all modules in a folder but this one."""
    return "\n".join(
        file.read_text() for file in ROOT.joinpath(folder).rglob("*.py") if file != THIS
    )


def test_every_moment_that_is_reached_can_be_armed():
    """A name that nobody can arm would let a crash test pass without a kill (C3)."""
    reached = re.findall(r"\breach\(\s*\"([^\"]+)\"", sources("src"))
    assert sorted(set(reached)) == sorted(POINTS)


def test_every_moment_is_used_by_a_test():
    """What no test kills at proves nothing (C3)."""
    tests = sources("tests")
    assert [name for name in POINTS if not re.search(rf"[\"']{name}[\"':]", tests)] == []
