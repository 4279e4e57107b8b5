"""From Kafka to Kafka with Spark: live, stopped, and refused where nobody can know."""

from __future__ import annotations

import pytest

from sideline import Event, Kafka, Pipeline, Publish
from sideline.errors import UnclearError
from tests.support.outputs import read_committed
from tests.support.pipelines import execute, publish, query
from tests.support.waiting import wait_for


def _copy(source: str, out: str) -> Pipeline:
    pipeline = Pipeline("copy", topics=source, sink=Kafka())

    @pipeline.handler
    def copy(event: Event) -> Publish:
        return Publish(out, event.value, event.key, headers={"from": event.id})

    return pipeline


def test_live_then_stopped_then_live_again(start, ready, kafka, topics):
    """Records appear while it runs, each once; group and books say the same (P2, C2, C5)."""
    source, out = topics(partitions=2), topics(partitions=1)
    running = start(_copy(source, out))
    publish(kafka, source, [(f"k{n}", f"v{n}") for n in range(50)])
    wait_for(lambda: running.status()["consumed"] == 50, what="50 events", within_seconds=90)
    # A lease lasts a minute here: whoever stops does not wait for it.
    running.stop()
    assert running.wait(45)
    publish(kafka, source, [(f"k{n}", f"v{n}") for n in range(50, 60)])
    again = start(_copy(source, out), once=True)
    assert again.wait(90)
    values = [message.value() for message in read_committed(kafka, out, 0)]
    assert sorted(values) == sorted(b"v%d" % n for n in range(60))
    assert query(
        ready.database, "select count(*) from sideline.progress where pending is null"
    ) == [(2,)]


def test_what_nobody_can_know_is_refused(finish, ready, kafka, topics):
    """Offsets that are gone while a slice is open: exit code 5, and nothing changes (K19)."""
    source, out = topics(partitions=1), topics(partitions=1)
    publish(kafka, source, [("k", "v")])
    finish(_copy(source, out))
    execute(
        ready.database,
        "update sideline.progress set slice_number = slice_number + 7, pending ="
        """ '{"start": 0, "end": 9, "consumed": 8, "applied": 8}'""",
    )
    publish(kafka, source, [("k", "w")])
    with pytest.raises(UnclearError) as caught:
        finish(_copy(source, out))
    assert caught.value.exit_code == 5
    assert "offset 9" in caught.value.message
    assert query(ready.database, "select next_offset, pending is null from sideline.progress") == [
        (1, False)
    ]
