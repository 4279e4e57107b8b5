"""The demo, as a newcomer runs it: it ends well, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sideline.cli import story

SMALL = ("--users", "60", "--events", "600")


@pytest.fixture
def place(run) -> Iterator[Path]:
    """An empty directory to run the demo in."""
    directory = run.directory("demo")
    yield directory
    shutil.rmtree(directory)


def environment() -> dict[str, str]:
    """Ours, without settings: the demo must not find anybody's broker."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SIDELINE_") or name.startswith(("SIDELINE_TEST_", "SIDELINE_CACHE"))
    }


def waiting(facts: list[story.Fact]) -> int:
    """Events from the first of each user that version 1 cannot write."""
    aside: set[str] = set()
    count = 0
    for fact in facts:
        if fact.name is not None and not fact.name.isascii():
            aside.add(fact.user)
        count += fact.user in aside
    return count


def test_demo_ends_with_a_table_that_equals_its_source(place):
    """Parked, mended, released, right: Zoiee in one command, and nothing left (E2, C1, R1, R2).

    The handler of version 1 fails on every name with an 'ë'; what it parks is what its keys had
    left to say; version 2 gets one key, ten, all, and the books balance.
    """
    done = subprocess.run(
        [sys.executable, "-m", "sideline", "demo", *SMALL, "--json"],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["published"], told["consumed"], told["different"]) == (600, 600, 0)
    assert (told["before"]["user-17"], told["user-17"]) == ("Zoey", "Zoiee")
    facts = story.tell(60, 600)
    aside = story.troubled(facts)
    assert (told["keys"], told["parked"]) == (len(aside), waiting(facts))
    assert [step["keys"] for step in told["released"]] == [1, len(aside) - 1]
    assert sum(step["applied"] for step in told["released"]) == told["parked"]
    assert {(step["failed"], step["state"]) for step in told["released"]} == {(0, "done")}
    assert (told["still_parked"], told["books_balance"]) == (0, True)
    lines = done.stderr.splitlines()
    assert lines[0] == "sideline demo: Zoey, Zoë and Zoiee"
    assert any(line.startswith(" ok  Kafka ") for line in lines)
    # Words of ours only: Java's and librdkafka's are in a log.
    assert "WARN" not in done.stderr
    assert list(place.iterdir()) == []


def test_interrupted_demo_stops_what_it_started(place):
    """Ctrl-C in the middle: exit 130, no broker, no database, no directory left (E2)."""
    with subprocess.Popen(
        [sys.executable, "-m", "sideline", "demo", *SMALL],
        cwd=place,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("published" in line for line in process.stderr), "the demo ended early"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert list(place.iterdir()) == []
