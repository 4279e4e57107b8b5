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


def test_demo_ends_with_a_table_that_equals_its_source(place):
    """From nothing to Zoiee in one command; everything is stopped and gone (E2, C1)."""
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
    assert told["user-17"] == "Zoiee"
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
