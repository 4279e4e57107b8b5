"""With Spark: an event that ends its worker is found and parked, and the pipeline goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

import psutil
import pytest

from sideline import Event, Insert, Pipeline
from tests.support.pipelines import applied, faults, numbered, publish, query
from tests.support.run import TOKEN_VARIABLE
from tests.support.waiting import wait_for


def deadly(name, topic, **options):
    """Writes a row for every event, unless the event ends its worker."""
    pipeline = Pipeline(name, topics=topic, **options)

    @pipeline.handler
    def die(event: Event):
        match event.value:
            case b"segfault":
                ctypes.string_at(0)
            case b"hang":
                time.sleep(3600)
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        return Insert("applied", row | {"key": event.key.decode(), "value": event.text()})

    return pipeline


def with_poison(count, poison):
    """Every event of a key of its own, some of them deadly."""
    events = numbered(count, keys=count)
    return [(key, poison.get(number, value)) for number, (key, value) in enumerate(events)]


def parked(database):
    return query(
        database,
        'select topic, partition, "offset", error from sideline.events'
        " where state = 'parked' order by value",
    )


def keepers():
    """Where careful workers are kept now: children of this run's nurseries."""
    found = []
    for process in psutil.process_iter():
        # Processes end while they are looked at, and some are none of our business.
        with contextlib.suppress(psutil.Error):
            if _is_of_daemon(process) and not _has_parent(process):
                found += process.children()
    return found


def _is_of_daemon(process):
    if "sideline.engine.daemon" not in process.cmdline():
        return False
    return process.environ().get(TOKEN_VARIABLE) == os.environ[TOKEN_VARIABLE]


def _has_parent(process):
    parent = process.parent()
    return parent is not None and (parent.name() == "java" or _is_of_daemon(parent))


@pytest.mark.parametrize(
    ("how", "error"), [("segfault", "WorkerCrashed"), ("hang", "HandlerTimeout")]
)
def test_an_event_that_ends_its_worker_is_parked(start, ready, kafka, topics, how, error):
    """Two of them in four partitions, everything else takes effect once (F3, C2)."""
    topic = topics(partitions=4)
    sent = publish(kafka, topic, with_poison(2_000, {700: how, 1_300: how}))

    # Every slot's keeper has to start: on a busy machine that takes its time.
    assert start(deadly("deadly", topic, handler_timeout="1s"), once=True).wait(240)

    found = parked(ready.database)
    assert [row[3] for row in found] == [f"sideline.errors.{error}"] * 2
    healthy = [place for place in sent if place not in {row[:3] for row in found}]
    assert len(healthy) == 1_998
    assert faults(applied(ready.database), healthy) == []


def test_care_ends_with_the_culprit(start, ready, kafka, topics):
    """It is parked while events flow; the run's end leaves no keeper and no session (E1)."""
    topic = topics(partitions=2)
    running = start(deadly("live", topic))
    sent = publish(kafka, topic, with_poison(100, {40: "segfault"}))
    wait_for(keepers, what="a lease with care", within_seconds=120)
    wait_for(lambda: parked(ready.database), what="the culprit", within_seconds=120)
    sent += publish(kafka, topic, numbered(100, start=1_000, keys=2_000))
    wait_for(lambda: len(applied(ready.database)) == 199, what="the rest", within_seconds=120)

    running.stop()
    assert running.wait(60)

    (culprit,) = parked(ready.database)
    assert faults(applied(ready.database), [place for place in sent if place != culprit[:3]]) == []
    wait_for(lambda: not keepers(), what="the end of all keepers")
    sessions = """
        select application_name
        from pg_stat_activity
        where datname = current_database() and application_name like 'sideline%%'
    """
    wait_for(lambda: query(ready.database, sessions) == [], what="the end of all sessions")
