"""Zoey, Zoë, Zoiee: parked, fixed, released, right; through Spark."""

from __future__ import annotations

import json

from sideline import Event, Pipeline, Upsert
from sideline.engine.lease import Report
from tests.support.desk import Desk
from tests.support.operations import balanced, counts, operate
from tests.support.pipelines import execute, publish, query
from tests.support.waiting import wait_for

NAMES = [("1", "Zoey"), ("2", "Ann"), ("1", "Zo\u00eb"), ("2", "Anne"), ("1", "Zoiee")]


def login(topic, *, fixed):
    pipeline = Pipeline("login", topics=topic)

    @pipeline.handler
    def rename(event: Event):
        user = event.json()
        if not fixed:
            user["name"].encode("ascii")
        return Upsert("users", {"id": user["id"], "name": user["name"]}, key="id")

    return pipeline


def story(ready, kafka, topic):
    execute(ready.database, "create table users (id text primary key, name text)")
    users = [(key, json.dumps({"id": key, "name": name})) for key, name in NAMES]
    publish(kafka, topic, users)


def names(ready):
    return dict(query(ready.database, "select id, name from users"))


def test_parked_fixed_released_right(finish, ready, kafka, topics):
    """--once ends when all there is was read and what was released is back (R1, R2)."""
    topic = topics(partitions=4)
    story(ready, kafka, topic)
    finish(login(topic, fixed=False))
    assert names(ready) == {"1": "Zoey", "2": "Anne"}

    operation = operate(ready.database, "login")
    finish(login(topic, fixed=True))

    assert names(ready) == {"1": "Zoiee", "2": "Anne"}
    assert counts(ready.database, operation) == ("done", 2, 0, 0, 0)
    balanced(ready.database)


def test_replay_only_reads_nothing_new(finish, ready, kafka, topics):
    """It carries out what was released, then ends; what arrived is left for the next run (R1)."""
    topic = topics(partitions=4)
    story(ready, kafka, topic)
    finish(login(topic, fixed=False))
    publish(kafka, topic, [("2", json.dumps({"id": "2", "name": "Anna"}))])
    operation = operate(ready.database, "login")

    finish(login(topic, fixed=True), replay_only=True)

    assert names(ready) == {"1": "Zoiee", "2": "Anne"}
    assert counts(ready.database, operation)[0] == "done"
    finish(login(topic, fixed=True))
    assert names(ready)["2"] == "Anna"
    balanced(ready.database)


def test_a_partition_with_nothing_to_read_is_leased_for_what_comes_back(database, kafka, topics):
    """And no longer once nothing waits; a finished run ends then, and closes the operation."""
    topic = topics(partitions=2)
    leased = []

    def work(lease):
        leased.extend((share.partition, share.replay) for share in lease.shares)
        execute(database, "update sideline.operation_items set state = 'done'")
        return Report(lease.round)

    first = Desk(database, kafka, Pipeline("idle", topics=topic), once=True)
    assert first.end() is None
    execute(
        database,
        "insert into sideline.operations"
        " (pipeline, kind, selection, actor, items, events, plan)"
        " values ('idle', 'release', '{}', 'test', 1, 1, 'x')",
    )
    execute(
        database,
        "insert into sideline.operation_items (operation, number, topic, home, queue)"
        f" select id, 1, '{topic}', 1, 99 from sideline.operations",
    )
    desk = Desk(database, kafka, Pipeline("idle", topics=topic), work=work, once=True)
    assert desk.end() is None
    assert set(leased) == {(1, True)}
    wait_for(
        lambda: query(database, "select state from sideline.operations") == [("done",)],
        what="the operation's end",
    )
