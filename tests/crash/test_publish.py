"""Records that a PostgreSQL pipeline publishes: with the rows, once, through crashes (P2, K24)."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from tests.support.again import AgainRun
from tests.support.operations import balanced, operate
from tests.support.outputs import read_committed

KINDS = {
    "effects": {},
    "one by one": {"slice_size": 1},
    "side by side": {"kind": "async", "concurrency": 3},
    "transaction": {"kind": "tx"},
    "at least once": {"delivery": "at-least-once"},
    "at most once": {"delivery": "at-most-once", "skip": True},
}
POINTS = (
    "after-publish-written",
    "between-write-and-commit",
    "after-commit",
    "before-outbox-init",
    "after-outbox-init",
    "before-send",
    "between-produce-and-commit",
    "between-send-and-mark",
    "after-mark",
)


@pytest.fixture
def outputs(grounds, topics):
    """A pipeline that publishes, and the topic that it publishes to."""

    def make(kind=None, **options):
        topic = topics(partitions=1)
        argument = [topic, kind]
        return grounds(**{"handler": "publishing", "argument": argument} | options), topic

    return make


def committed(ground, topic):
    """What readers of committed records see."""
    return read_committed(ground.kafka, topic, 0)


def ids(records):
    return [dict(record.headers())["message-id"].decode() for record in records]


def expected(ground, *numbers, partition=0):
    """The ids of what events publish: the first and the last of their effects."""
    spot = f"ground/{ground.topic}/{partition}"
    last = 1 if ground.options["argument"][1] == "tx" else 3
    return [f"{spot}/{number}/{place}" for number in numbers for place in (0, last)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_leaves_once_and_in_order(outputs, kind):
    """With an id of its own, the same at every try, and in the order of the log (P2)."""
    ground, topic = outputs(**KINDS[kind])
    ground.publish([(f"k{n % 3}", f"m{n} x") for n in range(20)])
    ground.run()
    records = committed(ground, topic)
    assert ids(records) == expected(ground, *range(20))
    values = [record.value().decode() for record in records]
    assert values[:4] == ["m0 x", "m0 again", "m1 x", "m1 again"]
    assert len(ground.effects()) == 20
    assert ground.query("select count(*) from sideline.outbox") == [(0,)]
    balanced(ground.database)


def test_key_partition_timestamp_and_headers(outputs):
    """As the handler says; correlation, trace and cause come from the event (P1, S3)."""
    ground, topic = outputs()
    carried = [("correlation-id", b"c"), ("traceparent", b"t"), ("message-id", b"m")]
    ground._producer.produce(ground.topic, key="k", value="null x", headers=carried)
    ground._producer.flush()
    ground.run()
    first, second = committed(ground, topic)
    assert (first.key(), first.value()) == (b"k", b"null x")
    assert (second.key(), second.value(), second.timestamp()[1]) == (b"k", None, 1_000)
    known = {"correlation-id": b"c", "traceparent": b"t", "causation-id": b"m"}
    assert known.items() <= dict(first.headers()).items()
    assert {**known, "own": b"yes"}.items() <= dict(second.headers()).items()


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        *[("effects", word) for word in ("missing", "large", "partition", "nonsense")],
        *[("side by side", "large"), ("transaction", "missing")],
    ],
)
def test_what_cannot_be_sent_is_its_events_failure(outputs, kind, word):
    """It is parked before COMMIT, alone with its key; once mended it leaves, once (P2, F3)."""
    ground, topic = outputs(**KINDS[kind])
    ground.publish([("a", "m0 x"), ("b", f"{word} x"), ("a", "m1 x"), ("b", "m2 x")])
    ground.run()
    assert ids(committed(ground, topic)) == expected(ground, 0, 2)
    assert [place.offset for place in ground.parked()] == [1, 3]
    assert [place.offset for place in ground.effects()] == [0, 2]
    # Released to code that is no better, it fails again, and nothing of it leaves.
    operate(ground.database, "ground")
    ground.run()
    assert ids(committed(ground, topic)) == expected(ground, 0, 2)
    mended = {"handler": "insert" if kind == "transaction" else "record"}
    operate(ground.database, "ground")
    ground.run(pipeline=mended | {"argument": None})
    assert ground.parked() == []
    assert len(ground.effects()) == 4
    balanced(ground.database)


@pytest.mark.parametrize("kind", ["effects", "side by side", "transaction"])
def test_a_released_event_publishes(outputs, kind):
    """What waited leaves with its rows, behind what left before (P2, R1)."""
    ground, topic = outputs(**KINDS[kind])
    ground.publish([("a", "bad x"), ("a", "m1 x"), ("b", "m2 x")])
    ground.run()
    assert ids(committed(ground, topic)) == expected(ground, 2)
    ground.query("update sideline.events set value = 'm0 x' where \"offset\" = 0")
    operate(ground.database, "ground")
    ground.run()
    assert ids(committed(ground, topic)) == expected(ground, 2, 0, 1)
    assert ground.parked() == []
    balanced(ground.database)


def test_of_a_dead_event_nothing_but_its_copy_leaves(chains, topics):
    """And an event that heals in a retry topic publishes once (F7, F8, P2)."""
    topic = topics(partitions=1)
    chain = chains(
        handler="publishing",
        argument=[topic, "effects"],
        delays=["50ms"],
        independent=True,
    )
    ground = chain.ground
    ground.publish([("a", "m0 x"), ("b", "bad x"), ("c", "heals x"), ("d", "missing x")])
    chain.run()
    # It heals by itself once it is tried again.
    chain.run(pipeline={"argument": [topic, "effects"]})
    chain.settle()
    assert sorted(chain.dead_letters()) == [1, 2, 3]
    assert ids(committed(ground, topic)) == expected(ground, 0)
    chain.check_books()


@pytest.mark.parametrize("point", POINTS)
def test_killed_on_the_way_to_kafka(outputs, point):
    """Between COMMIT and send, and between send and mark: each record once (K23, K24)."""
    ground, topic = outputs(partitions=2, slice_size=4)
    for partition in (0, 1):
        ground.publish([(f"k{n % 3}", f"m{n} x") for n in range(12)], partition=partition)
    worker = ground.start(ground.lease(), crash_at=f"{point}:2")
    assert worker.end() in {0, -signal.SIGKILL}
    ground.run()
    seen = Counter(ids(committed(ground, topic)))
    wanted = [
        *expected(ground, *range(12)),
        *expected(ground, *range(12), partition=1),
    ]
    assert seen == Counter(wanted)
    assert len(ground.effects()) == 24
    assert ground.query("select sum(outbox_last - outbox_sent) from sideline.progress") == [(0,)]
    balanced(ground.database)


@pytest.mark.parametrize(
    "point", ["replay-written", "replay-before-commit", "replay-after-commit", "before-send"]
)
def test_killed_while_a_released_event_publishes(outputs, point):
    """Its records leave with its rows, or wait with it (P2, R1)."""
    ground, topic = outputs()
    ground.publish([("a", "bad x"), ("a", "m1 x")])
    ground.run()
    ground.query("update sideline.events set value = 'm0 x' where \"offset\" = 0")
    operate(ground.database, "ground")
    ground.killed(ground.start(ground.lease(), crash_at=f"{point}:1"))
    ground.run()
    assert ids(committed(ground, topic)) == expected(ground, 0, 1)
    assert len(ground.effects()) == 2
    balanced(ground.database)


def test_a_reader_with_dedupe_drops_what_is_published_again(outputs, grounds):
    """A range applied again repeats its message ids, and a consumer knows them (C4, C6, P2)."""
    ground, topic = outputs()
    ground.publish([("a", "m0 x"), ("b", "m1 x")])
    ground.run()
    again = AgainRun(ground)
    again.run()
    records = ids(committed(ground, topic))
    assert records == expected(ground, 0, 1) * 2
    with_ids = grounds(name="reader", dedupe="header")
    with_ids.query("delete from history")
    for record in committed(ground, topic):
        with_ids._producer.produce(
            with_ids.topic, key=record.key(), value=record.value(), headers=record.headers()
        )
    with_ids._producer.flush()
    with_ids.run()
    assert [place.offset for place in with_ids.effects()] == [0, 1, 2, 3]
    counted = "select duplicate from sideline.progress where pipeline = 'reader'"
    assert with_ids.query(counted) == [(4,)]
