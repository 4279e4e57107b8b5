"""The examples do what they say, on a real broker, Spark and PostgreSQL."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from sideline import Calls, Event, Pipeline, loading
from tests.support.pipelines import execute, publish, query

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(finish, ready, kafka, topics):
    """Create the tables that an example names, run it once over events, return its status."""

    def run(name, events, *statements):
        path = EXAMPLES / f"{name}.py"
        pipeline = loading.load(f"{path}:{name}")
        needs = path.read_text("utf-8").partition("Needs:")[2].partition('"""')[0]
        tables = re.findall(r"create table .*?;", needs, re.DOTALL)
        assert tables, "the example names its tables"
        execute(ready.database, *tables, *statements)
        pipeline.topics = (topics(partitions=2),)
        sent = [(key, None if value is None else json.dumps(value)) for key, value in events]
        publish(kafka, pipeline.topics[0], sent)
        return finish(pipeline)

    return run


def test_orders_keep_the_newest_version(example, ready):
    """A late event does not win, a draft is filtered, a tombstone deletes (F10, C7)."""
    order = {"id": 1, "state": "paid", "total": 10.5, "version": 2}
    status = example(
        "orders",
        [
            ("1", order),
            ("1", order | {"state": "open", "version": 1}),
            ("2", order | {"id": 2, "state": "draft"}),
            ("3", order | {"id": 3}),
            ("3", None),
        ],
    )
    rows = query(ready.database, "select id, state, total, version from orders")
    assert rows == [(1, "paid", Decimal("10.50"), 2)]
    assert (status["consumed"], status["applied"], status["filtered"]) == (5, 4, 1)


def test_places_stay_in_order_while_handlers_wait(example, ready):
    """Side by side, yet the last city of each key is the one that stays (C1)."""
    cities = ["Oslo", "Lyon", "Osaka"]
    events = [(str(n % 7), {"id": str(n % 7), "city": cities[n % 3]}) for n in range(61)]
    example("places", events)
    rows = query(ready.database, "select id, city from places")
    assert dict(rows) == {key: value["city"] for key, value in events}


def test_stock_is_never_sold_twice(example, ready):
    """A handler with the transaction sees what earlier events of its slice did (C1, C3)."""
    sales = [("tea", {"item": "tea", "pieces": pieces}) for pieces in (3, 1, 4, 1)]
    example("stock", sales, "insert into stock values ('tea', 5)")
    assert query(ready.database, "select pieces from stock") == [(0,)]
    assert query(ready.database, "select count(*) from refused") == [(1,)]


def test_calls_count_as_applied(finish, kafka, topics):
    """A handler that acts by itself returns nothing; its events are not filtered out (C2)."""
    topic = topics(partitions=1)
    publish(kafka, topic, [("k", "v")] * 5)
    pipeline = Pipeline("calls", topics=topic, sink=Calls())

    @pipeline.handler
    def act(event: Event):
        return None

    status = finish(pipeline)
    assert (status["applied"], status["filtered"]) == (5, 0)
