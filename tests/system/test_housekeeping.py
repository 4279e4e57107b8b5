"""What a driver clears away when it begins, and what it learns from rounds that crash."""

from __future__ import annotations

import time

import psycopg
import pytest

from sideline import Pipeline
from sideline.engine import housekeeping
from sideline.engine.driver import Driver, Options
from sideline.engine.lease import PartitionReport, Report
from sideline.ledger import schema
from sideline.ledger.connection import connect
from sideline.ledger.place import Place
from sideline.topics.admin import Cluster
from tests.support.pipelines import numbered, publish, query
from tests.support.waiting import wait_for

BEAT = """
insert into sideline.workers (worker, pipeline, host, pid, beat_at)
values (gen_random_uuid(), 'tidy', %s, 1, now() - %s::interval)
"""


def test_rows_of_workers_that_are_long_gone_are_buried(database, kafka, topics):
    """The table of signs of life does not grow with every worker that ever was (K3)."""
    pipeline = Pipeline("tidy", topics=topics(partitions=1))
    pipeline.handler(lambda event: None)
    with connect(database, role="test") as connection:
        schema.ensure(connection)
        connection.execute(BEAT, ("gone", "2 hours"))
        connection.execute(BEAT, ("here", "1 second"))
    cluster = Cluster({"bootstrap.servers": kafka})
    Driver(pipeline, Place(database, pipeline), cluster, lambda _: [], Options(once=True)).run()
    with psycopg.connect(database) as connection:
        assert connection.execute("select host from sideline.workers").fetchall() == [("here",)]


POINTER = """
insert into sideline.events (
    pipeline, topic, partition, "offset", incarnation, imported_from, state, why, fingerprint,
    handler_version, timestamp_ms, held_in
)
values ('points', %s, 0, 1, %s, %s, %s, 'failed', 'f', '', %s, 'source')
returning 1
"""


@pytest.mark.parametrize("state", ["parked", "dead"])
def test_pointers_are_watched_whatever_the_stash_is_now(
    desk, database, kafka, topics, monkeypatch, state
):
    """Left over from another ``stash=``, or imported from a share group: an alert (S2)."""
    monkeypatch.setattr(housekeeping, "TOPIC_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(housekeeping, "POINTER_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(housekeeping, "NO_POINTER_CHECK_SECONDS", 0.1)
    topic = topics(partitions=1, retention_ms=2 * 86_400_000)
    publish(kafka, topic, numbered(3))
    driver = desk(Pipeline("points", topics=topic)).begun()
    made = int((time.time() - 1.5 * 86_400) * 1000)
    imported = {"parked": (0, None), "dead": (-1, "dlq/0/1")}[state]
    query(database, POINTER, topic, *imported, state, made)

    def alerts():
        return query(
            database,
            "select subject, message from sideline.alerts"
            " where kind = 'retention' and cleared_at is null",
        )

    ((subject, message),) = wait_for(alerts, what="an alert")
    assert subject == f"{topic}/0"
    assert message.startswith(f"event {topic}/0/1 is {state}, and its bytes go from the source")
    # It came back, or was given up: nothing is watched any more.
    query(database, "update sideline.events set state = 'resolved' returning 1")
    wait_for(lambda: not alerts(), what="the alert's end")
    assert driver.stop() is None


def test_after_a_crash_the_next_leases_go_with_care(desk, kafka, topics):
    """Until a careful lease has come to the end of what there is; deaths in it count too."""
    topic = topics(partitions=1)
    publish(kafka, topic, numbered(5))
    cares: list[bool] = []
    offsets = iter([0, 3, 5])

    def work(lease):
        cares.append(lease.care)
        if len(cares) == 1:
            raise RuntimeError("Python worker exited unexpectedly (crashed)")
        if len(cares) == 2:
            return Report(lease.round, crash="the worker died of SIGSEGV")
        at = next(offsets, 5)
        done = PartitionReport(topic, 0, taken=True, next_offset=at, high=5, consumed=at)
        return Report(lease.round, partitions=[done])

    driver = desk(Pipeline("careful", topics=topic), work)
    wait_for(lambda: len(cares) > 7, what="rounds")
    driver.stop()
    assert cares[:7] == [False, True, True, True, True, False, False]
