"""How a running command is stopped."""

from __future__ import annotations

import signal
import time

import pytest

from sideline.engine.driver import STOP_SECONDS
from tests.support.pipelines import (
    applied,
    counted,
    faults,
    numbered,
    progress,
    publish,
    recorder,
    write_app,
)
from tests.support.waiting import wait_for


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_ends_at_a_slice_boundary(
    command, ready, database, kafka, topics, finish, tmp_path, number, group
):
    """Exit 0 with everything consistent; the next run does the rest (C2, C3).

    A terminal sends Ctrl-C to the whole group: Spark's processes must not die of it.
    """
    topic = topics(partitions=2)
    sent = publish(kafka, topic, numbered(6_000))
    app = write_app(tmp_path, "stopped", topic, before="time.sleep(0.002)")
    running = command("run", app)
    wait_for(
        lambda: progress(database, "stopped") and counted(database, "stopped") > 0,
        what="first events",
        within_seconds=120,
    )

    running.signal(number, group=group)

    assert running.end() == 0, running.err
    assert "stopped." in running.err
    assert "Traceback" not in running.err
    done = applied(database)
    assert 0 < len(done) < len(sent)
    assert len(done) == counted(database, "stopped") == sum(progress(database, "stopped").values())
    finish(recorder("stopped", topic))
    assert faults(applied(database), sent) == []


def test_a_second_signal_ends_at_once(command, ready, database, kafka, topics, finish, tmp_path):
    """Whoever does not want to wait for a handler does not have to, and loses nothing (C2)."""
    topic = topics(partitions=1)
    sent = publish(kafka, topic, numbered(200))
    busy = tmp_path / "busy"
    before = f"""if event.offset == 100:
        open({str(busy)!r}, "w").close()
        time.sleep(600)"""
    app = write_app(tmp_path, "hurry", topic, before=before, options="slice_size=100")
    running = command("run", app)
    wait_for(busy.exists, what="a busy handler", within_seconds=120)

    running.signal(signal.SIGINT, group=True)
    running.says("once more to end at once")
    asked = time.monotonic()
    running.signal(signal.SIGINT, group=True)

    assert running.end() == 130
    # Less than what a first signal is granted.
    assert time.monotonic() - asked < STOP_SECONDS
    finish(recorder("hurry", topic))
    assert faults(applied(database), sent) == []
