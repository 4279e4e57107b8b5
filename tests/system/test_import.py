"""`sideline parked import`: dead letters of every dialect, into the ledger."""

from __future__ import annotations

import json
import struct

import pytest
from confluent_kafka import Producer

from sideline import Event
from sideline.cli import main
from sideline.ledger import schema
from sideline.topics import headers as h
from tests.support.operations import balanced, operate

from tests.support.pipelines import query  # isort: skip

APP = """
from sideline import Insert, Pipeline

flow = Pipeline("adopt", topics={topic!r}, effects=[Insert])


@flow.handler
def record(event):
    return Insert("applied", {{"number": event.offset}})
"""


def spring(topic, partition, offset):
    return [
        ("trace", b"abc"),
        ("kafka_dlt-exception-fqcn", b"org.example.ListenerFailed"),
        ("kafka_dlt-exception-cause-fqcn", b"java.lang.IllegalStateException"),
        ("kafka_dlt-exception-message", b"no such user"),
        ("kafka_dlt-original-topic", topic.encode()),
        ("kafka_dlt-original-partition", struct.pack(">i", partition)),
        ("kafka_dlt-original-offset", struct.pack(">q", offset)),
        ("kafka_dlt-original-timestamp", struct.pack(">q", 1_700_000_000_123)),
    ]


def text(prefix, topic, partition, offset, **more):
    place = {"topic": topic, "partition": partition, "offset": offset}
    named = place | {name.replace("_", "."): value for name, value in more.items()}
    return [(f"{prefix}{name}", str(value).encode()) for name, value in named.items()]


@pytest.fixture
def source(topics, kafka):
    """A source of one partition with ten records."""
    topic = topics(partitions=1)
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(10):
        producer.produce(topic, key=b"k%d" % number, value=b"v%d" % number)
    assert producer.flush(30) == 0
    return topic


@pytest.fixture
def letters(topics, kafka):
    """A dead-letter topic, and a way to write to it."""
    topic = topics(partitions=2, name="dead")
    producer = Producer({"bootstrap.servers": kafka})

    def send(headers, key=b"k", value=b"v", partition=0):
        producer.produce(topic, key=key, value=value, headers=headers, partition=partition)
        assert producer.flush(30) == 0

    send.topic = topic
    return send


@pytest.fixture
def take_in(kafka, database, source, letters, tmp_path, capsys):
    """Run the import; returns exit code and JSON."""
    app = tmp_path / "app.py"
    app.write_text(APP.format(topic=source))

    def call(*more, pipeline=f"{app}:flow"):
        where = ["--kafka", kafka, "--database", database, "--json"]
        code = main.run(["parked", "import", letters.topic, "--pipeline", pipeline, *where, *more])
        return code, json.loads(capsys.readouterr().out)

    return call


def events(database, columns):
    return query(
        database, f'select {columns} from sideline.events order by topic, partition, "offset"'
    )


def test_every_dialect_is_imported_once(take_in, letters, source, database, capsys):
    """Dead letters of all five become dead events under their origins; again adds nothing (F7)."""
    event = Event(source, 0, 4, 77, b"zo\xff", None, (("own", b"1"),))
    ours = h.write(event.headers, h.letter_of(event, group="x", attempt=3, first_failure_ms=9))
    letters(spring(source, 0, 1), key=b"zoe", value=b"Zo\xc3\xab")
    letters(text("__connect.errors.", source, 0, 2, exception_class_name="a.B"), partition=1)
    letters(text("__streams.errors.", source, 0, 3, exception="a.C: no", message="no"))
    letters(list(ours), key=event.id.encode(), value=b"")
    letters(text("__dlq.errors.", source, 0, 5, group="g"), key=None, value=None)
    code, told = take_in()
    assert (code, told["read"], told["imported"], told["before"]) == (0, 5, 5, 0)
    assert told["voices"] == {
        "spring": 1, "connect": 1, "streams": 1, "sideline": 1, "share": 1
    }  # fmt: skip
    assert told["elsewhere"] == {}
    found = events(database, 'state, topic, "offset", key, value, error, held_in, timestamp_ms')
    assert [row[:3] for row in found] == [("dead", source, offset) for offset in range(1, 6)]
    assert found[0][3:] == (
        b"zoe", b"Zo\xc3\xab", "java.lang.IllegalStateException", "ledger", 1_700_000_000_123
    )  # fmt: skip
    # A tombstone is a tombstone again, with its own key, headers and time.
    assert found[3][3:] == (b"zo\xff", None, "unknown", "ledger", 77)
    names = query(database, 'select header_names from sideline.events where "offset" = 4')
    assert names == [(["own"],)]
    # Share groups copy no bytes unless told to: they are where they were.
    assert found[4][6] == "source"
    code, told = take_in()
    assert (code, told["imported"], told["before"]) == (0, 0, 5)
    assert len(events(database, "1")) == 5
    ((audited,),) = query(database, "select count from sideline.audit where action = 'import'")
    assert audited == 5


def test_origins_that_make_no_sense_are_kept_where_they_are(take_in, letters, source, database):
    """Missing, forged or known origins: the record is kept under its own position, and said so."""
    letters([("x", b"y")])
    letters(text("__connect.errors.", "another", 0, 1))
    letters(text("__connect.errors.", source, 0, 10))
    letters(text("__connect.errors.", source, 7, 1))
    letters(text("__connect.errors.", source, 0, -1))
    letters(text("__connect.errors.", source, 0, 6))
    letters(text("__connect.errors.", source, 0, 6))
    letters([], key=b"gone", value=None)
    code, told = take_in()
    assert (code, told["read"], told["imported"], told["tombstones"]) == (0, 8, 7, 1)
    assert told["elsewhere"] == {"no-origin": 2, "foreign": 1, "impossible": 2, "known": 1}
    assert told["examples"]["foreign"] == f"{letters.topic}/0/1"
    found = events(database, 'topic, "offset", imported_from')
    assert (source, 6, f"{letters.topic}/0/5") in found
    assert (letters.topic, 6, f"{letters.topic}/0/6") in found
    assert take_in()[1]["imported"] == 0


def test_the_books_balance_and_the_pipeline_may_meet_the_same_event(
    take_in, letters, source, database, grounds, capsys
):
    """Imported events are in no counter, and do not stand in the way of the pipeline's own."""
    ground = grounds(handler="failing")
    with_bad = ground.publish([("a", "fine"), ("b", "bad"), ("b", "behind")])
    assert len(with_bad) == 3
    for offset in (0, 1):
        letters(text("__connect.errors.", ground.topic, 0, offset))
    code, told = take_in(pipeline="ground")
    assert (code, told["imported"], told["elsewhere"]) == (0, 2, {})
    ground.run()
    ground.check()
    states = query(
        database, 'select "offset", incarnation, state from sideline.events order by 1, 2'
    )
    assert states == [(0, -1, "dead"), (1, -1, "dead"), (1, 0, "parked"), (2, 0, "parked")]
    assert main.run(["status", "--check", "--database", database]) == 0
    capsys.readouterr()
    # Now it is known by itself: another dead letter of it has no place there.
    letters(text("__connect.errors.", ground.topic, 0, 2))
    assert take_in(pipeline="ground")[1]["elsewhere"] == {"known": 1}


def test_a_dry_run_changes_nothing(take_in, letters, source, database):
    """It says what would happen; not even the ledger's tables are made."""
    letters(spring(source, 0, 1))
    code, told = take_in("--dry-run")
    assert (code, told["imported"], told["dry_run"]) == (0, 1, True)
    assert take_in("--dry-run", pipeline="nobody")[0] == 4
    assert query(database, "select to_regnamespace('sideline')") == [(None,)]
    assert take_in()[1]["imported"] == 1
    code, told = take_in("--dry-run")
    assert (code, told["imported"], told["before"]) == (0, 0, 1)


def test_imported_events_are_chosen_by_their_cause(
    take_in, letters, source, database, grounds, cli
):
    """What others say of a failure is a cause here, in words and numbers (F7, R4)."""
    ground = grounds(handler="insert", independent=True)
    ground.publish([("a", "one"), ("b", "two"), ("c", "three")])
    ground.run()
    letters(spring(ground.topic, 0, 0))
    letters(spring(ground.topic, 0, 1))
    letters(text("__connect.errors.", ground.topic, 0, 2, exception_class_name="a.B"))
    assert take_in(pipeline="ground")[1]["imported"] == 3
    take_in(pipeline="ground")
    query(database, "update sideline.pipelines set order_free = true returning 1")
    assert query(database, "select error, dead from sideline.causes order by 1") == [
        ("a.B", 1),
        ("java.lang.IllegalStateException", 2),
    ]
    code, out, err = cli("release", "ground", "--dead", "--cause", "IllegalStateException")
    assert code == 0, err
    assert "2  java.lang.IllegalStateException" in out + err
    assert "no such user" in out + err
    balanced(database)


def test_what_is_not_there_is_not_found(take_in, letters, database, kafka, capsys):
    """A pipeline that never ran has to be named with its app; a topic has to exist (exit 4)."""
    code, told = take_in(pipeline="nobody")
    assert (code, told["error"]) == (4, "not-found")
    assert "APP:NAME" in told["hint"]
    where = ["--kafka", kafka, "--database", database]
    assert main.run(["parked", "import", "not-there", "--pipeline", "x", *where]) == 4
    capsys.readouterr()


def test_two_pipelines_never_have_a_topic_in_common(database):
    """Whoever comes second with the same name for a topic of its own is refused (F11)."""
    import psycopg

    from sideline import DeadLetter, Pipeline
    from sideline.errors import RefusedError
    from sideline.ledger.place import Place

    with psycopg.connect(database) as connection:
        schema.migrate(connection)
    places = []
    for name, topic in (("b.c", "a"), ("c", "a.b"), ("d", "a")):
        pipeline = Pipeline(name, topics=topic, independent=True)
        pipeline.on_failure = DeadLetter()
        places.append(Place(database, pipeline))
    places[0].hold()
    with pytest.raises(RefusedError, match="already a topic of pipeline"):
        places[1].hold()
    places[2].hold()
    assert query(
        database, "select name, own_topics, order_free from sideline.pipelines order by 1"
    ) == [
        ("b.c", ["a.b.c.dlq"], True),
        ("d", ["a.d.dlq"], True),
    ]
    for place in places:
        place.close()


def test_imported_events_are_released_only_where_order_does_not_matter(
    take_in, letters, source, database, grounds, capsys
):
    """Without a word about order a release does not find them; giving them up is free (F9)."""
    ground = grounds(handler="failing")
    letters(text("__connect.errors.", ground.topic, 0, 0), key=b"a", value=b"one")
    ground.publish([("a", "one")])
    assert take_in(pipeline="ground")[1]["imported"] == 1
    found = []
    for kind, free in (("release", False), ("release", True), ("discard", False)):
        query(database, "update sideline.pipelines set order_free = %s returning 1", free)
        reason = ["--reason", "old"] if kind == "discard" else []
        main.run([kind, "ground", "--dead", "--all", "--json", "--database", database, *reason])
        found.append(json.loads(capsys.readouterr().out).get("plan", {}).get("events", 0))
    assert found == [0, 1, 1]


def test_what_was_declared_of_imported_events_is_not_believed(
    take_in, letters, database, grounds, capsys
):
    """Effects were declared harmless, and are not: the imported event stays dead (F9)."""
    ground = grounds(handler="unversioned")
    letters(text("__connect.errors.", ground.topic, 0, 0), key=b"zoe", value=b"Zoey")
    ground.publish([("zoe", "Zoey"), ("zoe", "Zoiee")])
    ground.run()
    assert take_in(pipeline="ground")[1]["imported"] == 1
    query(database, "update sideline.pipelines set order_free = true returning 1")
    where = ["--execute", "--database", database]
    assert main.run(["release", "ground", "--dead", "--all", *where]) == 0
    ground.run()
    ((state, note),) = query(database, "select state, note from sideline.operations")
    assert state == "stopped"
    assert "updates table users" in note
    assert query(database, "select state from sideline.events") == [("dead",)]
    assert query(database, "select id, value from users") == [("zoe", "Zoiee")]
    balanced(database)


def test_imported_events_come_back_and_no_counter_notices(take_in, letters, database, grounds):
    """An owner applies them; this pipeline never consumed them (R1)."""
    ground = grounds(handler="insert", independent=True)
    ground.publish([("a", "one"), ("b", "two")])
    ground.run()
    letters(text("__connect.errors.", ground.topic, 0, 1), key=b"b", value=b"two")
    assert take_in(pipeline="ground")[1]["imported"] == 1
    operate(ground.database, "ground", events=[(0, 1)])
    ground.run()
    states = query(database, "select incarnation, state from sideline.events")
    assert states == [(-1, "resolved")]
    assert [one.offset for one in ground.effects()] == [0, 1, 1]
    balanced(database)


def test_letters_kept_where_they_are_can_be_given_up(take_in, letters, source, database, cli, read):
    """Nobody reads where they are kept: giving up needs no owner, a release says why not (R6)."""
    letters([("x", b"y")])
    letters(text("__connect.errors.", "another", 0, 1))
    letters(text("__connect.errors.", source, 0, 10))
    assert take_in()[1]["imported"] == 3
    code, out, _ = cli("release", "adopt", "--dead", "--all")
    assert code == 0
    assert "3 imported events cannot be released" in out
    assert read("release", "adopt", "--dead", "--all")["plan"]["apart"] == 3

    code, _, err = cli("discard", "adopt", "--dead", "--all", "--reason", "old", "--execute")

    assert code == 0
    assert "It is done." in err
    assert events(database, "state, former") == [("discarded", "dead")] * 3
    event = f"{letters.topic}/0/0"
    assert cli("restore", "adopt", "--event", event, "--reason", "no", "--execute")[0] == 0
    assert sorted(events(database, "state")) == [("dead",), ("discarded",), ("discarded",)]
    shown = read("ops", "list")["operations"]
    assert [(one["state"], one["discarded"], one["restored"]) for one in shown] == [
        ("done", 0, 1),
        ("done", 3, 0),
    ]
    balanced(database)
