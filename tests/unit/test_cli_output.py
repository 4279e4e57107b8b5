"""What commands print: data on stdout, words on stderr, live only on a terminal."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

import pytest
from rich.console import Console

from sideline.cli import output


@pytest.fixture
def plain():
    """A console that is no terminal."""
    return Console(file=io.StringIO(), force_terminal=False, width=40)


@pytest.fixture
def terminal():
    """A console that says it is a terminal."""
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_keeps_64_bit_integers_and_times(capsys):
    """Offsets beyond 2**53 survive `--json`."""
    output.print_json({"offset": 2**63 - 1, "at": datetime(2026, 1, 2, tzinfo=UTC), "name": "Zoë"})
    out = capsys.readouterr().out
    assert json.loads(out) == {
        "offset": 9223372036854775807,
        "at": "2026-01-02T00:00:00Z",
        "name": "Zoë",
    }


def test_table_in_a_pipe_is_tab_separated_and_complete(capsys):
    """A script can cut the table; nothing is shortened to a screen's width."""
    output.print_table(("name", "lag"), [("Zoë" * 100, 12345)])
    assert capsys.readouterr().out == f"name\tlag\n{'Zoë' * 100}\t12345\n"


def test_steps_without_a_terminal_are_plain_lines_said_once(plain):
    """A log gets one line per change, no control characters, no wrapping."""
    with output.Steps(plain) as steps:
        steps("Kafka", "starting")
        steps("Kafka", "starting")
        steps("Kafka", "waiting for the broker to answer on its port")
        steps.done("Kafka [4.3.1] is up", of=["Kafka"])
    assert text(plain).splitlines() == [
        "Kafka: starting",
        "Kafka: waiting for the broker to answer on its port",
        " ok  Kafka [4.3.1] is up",
    ]


def test_bar_without_a_terminal_speaks_now_and_then(plain, monkeypatch):
    """A log gets a line every two seconds, with count and rate."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.Steps(plain) as steps:
        bar = steps.bar("publish", 2000)
        now[0] = 1.0
        bar.advance(500)
        now[0] = 2.0
        bar.advance(500)
        bar.close("2,000 events published")
    assert text(plain).splitlines() == [
        "publish: 1,000 / 2,000   500/s",
        " ok  2,000 events published",
    ]


def test_terminal_shows_bars_and_leaves_only_what_stays(terminal):
    """On a terminal the live lines are drawn; what is done stays."""
    with output.Steps(terminal) as steps:
        steps("Kafka", "starting")
        steps("Kafka", "answering")
        bar = steps.bar("publish", 10)
        bar.reach(10)
        assert steps.live is not None
        assert len(steps.live.tasks) == 2
        bar.close("published")
        steps.done("Kafka is up", of=["Kafka"])
        assert steps.live.tasks == []
    assert "published" in text(terminal)
    assert "Kafka is up" in text(terminal)


def test_bar_grows_with_what_comes_later(plain, monkeypatch):
    """A pipeline that runs on never stands at 12 of 6."""
    monkeypatch.setattr(output, "PLAIN_SECONDS", 0.0)
    output.Steps(plain).bar("login", 6).reach(12)
    assert "12 / 12" in text(plain)
