"""The examples do what they say, on a real broker, Spark and PostgreSQL."""

from __future__ import annotations

import json
import re
import runpy
from decimal import Decimal
from pathlib import Path

import pytest

from sideline import Calls, Event, Pipeline, loading
from tests.support.outputs import read_committed
from tests.support.pipelines import execute, publish, query
from tests.support.records import records

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


def test_a_failing_key_steps_aside(example, ready):
    """Zoiee waits behind Zoë, a refused row fails its event alone, Bob goes on (F3, F4)."""
    names = [("1", "Zoey"), ("2", "Bob"), ("1", "Zoë"), ("2", "Bobby"), ("1", "Zoiee")]
    names += [("3", "Eve"), ("3", "E" * 41), ("3", "Eva")]
    status = example("failing", [(key, {"id": key, "name": name}) for key, name in names])
    rows = query(ready.database, "select name from members order by id")
    assert rows == [("Zoey",), ("Bobby",), ("Eve",)]
    assert (status["applied"], status["parked"], status["aside"]) == (4, 4, 2)
    causes = query(ready.database, "select error, parked from sideline.causes order by error")
    assert causes == [("ValueError", 1), ("psycopg.errors.CheckViolation", 1)]


def test_parcels_follow_paid_orders(finish, kafka, topics):
    """Every paid order is a parcel, once, for readers of committed records (C2, P2)."""
    source, out = topics(partitions=2), topics(partitions=2)
    text = (EXAMPLES / "parcels.py").read_text("utf-8")
    made = {}
    exec(compile(text.replace('"parcels", orjson', f'"{out}", orjson'), "parcels.py", "exec"), made)
    pipeline = made["parcels"]
    pipeline.topics = (source,)
    orders = [
        (str(n % 5), {"id": n, "state": "paid" if n % 3 else "open", "lines": [1] * n})
        for n in range(30)
    ]
    publish(kafka, source, [(key, json.dumps(value)) for key, value in orders])
    status = finish(pipeline)
    assert (status["applied"], status["filtered"]) == (20, 10)
    messages = [one for number in range(2) for one in read_committed(kafka, out, number)]
    sent = [json.loads(message.value())["order"] for message in messages]
    assert sorted(sent) == [n for n in range(30) if n % 3]
    for key in "01234":
        of_key = [n for n, one in zip(sent, messages, strict=True) if one.key() == key.encode()]
        assert of_key == sorted(of_key)


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


def test_the_shop_publishes_its_orders(topics, kafka, monkeypatch, capsys):
    """Every order with its key and both ids, the tombstone last (P1)."""
    topic = topics(partitions=1)
    monkeypatch.setenv("SIDELINE_KAFKA", kafka)
    shop = runpy.run_path(str(EXAMPLES / "shop.py"))

    assert shop["main"](topic) == 0

    found = records(kafka, topic)
    assert [one.key() for one in found] == [b"1", b"2", b"1", b"2"]
    assert json.loads(found[2].value())["state"] == "paid"
    assert found[3].value() is None
    assert [name for name, _ in found[0].headers()] == ["message-id", "correlation-id"]
    assert f"topic={topic!r}, partition=0, offset=2" in capsys.readouterr().out


def test_enriched_users_are_parsed_by_the_jvm(example, ready):
    """Names come from Spark's own JSON, drafts are filtered, a tombstone deletes (C7)."""
    status = example(
        "enriched",
        [
            ("1", {"id": "1", "name": "Zoey"}),
            ("2", {"id": "2", "name": "Bob"}),
            ("1", {"id": "1", "name": "Zoiee"}),
            ("3", {"id": "3", "name": "Eve", "state": "draft"}),
            ("2", None),
        ],
    )
    assert query(ready.database, "select id, name from users") == [("1", "Zoiee")]
    assert (status["consumed"], status["applied"], status["filtered"]) == (5, 4, 1)
