"""Bytes of parked events in a topic of the pipeline's own, or still at their source."""

from __future__ import annotations

import json
import sys
import time

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from sideline.cli import main
from sideline.engine.lease import Partition
from sideline.engine.worker import Access, Worker
from sideline.errors import KafkaUnreachableError, RefusedError
from sideline.ledger import contents
from sideline.ledger.place import Place
from sideline.topics import scanning
from sideline.topics.admin import Cluster
from sideline.topics.names import TopicNames
from sideline.views import Held
from tests.conftest import _create
from tests.support import handlers
from tests.support.operations import balanced, counts, operate
from tests.support.outputs import read_committed
from tests.support.pipelines import publish
from tests.support.waiting import wait_for

BAD = "bad"
# A port that nobody listens on.
NOBODY = "127.0.0.1:1"
STORY = [("zoe", "Zoey"), ("bob", "Bob"), ("zoe", BAD), ("bob", "Bobby"), ("zoe", None)]


@pytest.fixture
def stashing(grounds, kafka):
    """A ground whose parked events are stashed; its stash topic goes with it."""
    admin = AdminClient({"bootstrap.servers": kafka})
    made = []

    def make(**options):
        ground = grounds(handler="failing", slice_size=2, stash="topic", **options)
        ground.stash = f"{ground.topic}.ground.stash"
        config = {"cleanup.policy": "compact"}
        _create(admin, NewTopic(ground.stash, 2, 1, config=config))
        made.append(ground.stash)
        return ground

    yield make
    for future in admin.delete_topics(made).values() if made else ():
        future.result()


def records(kafka, topic, partitions=2):
    """Committed records of a topic, by key."""
    return [
        (message.key().decode(), message.value(), dict(message.headers() or []))
        for number in range(partitions)
        for message in read_committed(kafka, topic, number)
    ]


def held(ground):
    rows = ground.query(
        'select topic, partition, "offset", incarnation, held_in from sideline.events'
        " where state = 'parked' order by place"
    )
    return [Held(*row) for row in rows]


def fetched(ground, kafka):
    with psycopg.connect(ground.database) as connection:
        found = contents.fetch(connection, {"bootstrap.servers": kafka}, "ground", held(ground))
    return [(one.offset, content and content.value) for one, content in found.items()]


def test_parked_bytes_are_in_the_stash_topic(stashing, kafka, capsys):
    """The ledger keeps key, cause and place; value and headers are in the topic, exactly (F13)."""
    ground = stashing()
    ground.publish(STORY)
    ground.run()
    ground.check()
    rows = ground.query(
        "select held_in, value, header_names, key, copy_offset is not null"
        " from sideline.events order by place"
    )
    assert rows == [("stash", None, [], b"zoe", True)] * 2
    assert ground.query("select count(*) from sideline.outbox") == [(0,)]
    found = {key: (value, headers) for key, value, headers in records(kafka, ground.stash)}
    assert set(found) == {f"{ground.topic}/0/2", f"{ground.topic}/0/4"}
    # A parked tombstone is none there, so that compaction leaves it alone.
    assert found[f"{ground.topic}/0/4"][0] == b""
    assert found[f"{ground.topic}/0/2"][1]["sideline-group"] == b"ground"
    assert fetched(ground, kafka) == [(2, b"bad"), (4, None)]
    shown = ["parked", "show", f"{ground.topic}/0/2", "--database", ground.database]
    assert main.run([*shown, "--kafka", kafka, "--json"]) == 0
    event = json.loads(capsys.readouterr().out)
    assert (event["value"], event["held_in"]) == ({"text": "bad"}, "stash")
    assert main.run(["parked", "export", "--database", ground.database, "--kafka", kafka]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["value"] for line in lines] == ["YmFk", None]


@pytest.mark.parametrize(
    "point",
    ["after-stash-written", "after-commit", "before-send", "between-send-and-mark", "after-mark"],
)
def test_killed_while_stashing(stashing, kafka, point):
    """Nothing is lost and nothing is there twice; until it is sent, it is in the outbox (K25)."""
    ground = stashing()
    ground.publish(STORY)
    worker = ground.start(ground.lease(), crash_at=f"{point}:1")
    ground.killed(worker)
    ground.check_prefix()
    # Wherever they are now, the bytes of what is parked can be had.
    assert all(value in {b"bad", None} for _, value in fetched(ground, kafka))
    assert len(fetched(ground, kafka)) == len(ground.parked())
    ground.run()
    ground.check()
    assert fetched(ground, kafka) == [(2, b"bad"), (4, None)]
    assert sorted(key for key, _, _ in records(kafka, ground.stash)) == [
        f"{ground.topic}/0/2",
        f"{ground.topic}/0/4",
    ]


def test_what_was_sent_and_not_noted_is_found(stashing, kafka):
    """An owner that died before it could say where: the topic is looked through once."""
    ground = stashing()
    ground.publish(STORY)
    ground.run()
    ground.query("update sideline.events set copy_partition = null, copy_offset = null")
    assert fetched(ground, kafka) == [(2, b"bad"), (4, None)]
    noted = ground.query("select count(*) from sideline.events where copy_offset is not null")
    assert noted == [(2,)]


@pytest.mark.parametrize("kind", ["stash", "dead_letter"])
def test_a_topic_keeps_its_name_while_events_are_in_it(stashing, chains, kind):
    """Under another name their bytes would be gone, and never purged: the run is refused (R7)."""
    if kind == "stash":
        ground = stashing()
        old = ground.stash
    else:
        chain = chains(dead_letter=1, handler="failing", argument=None)
        ground, old = chain.ground, chain.dlq
    ground.publish(STORY[:3])
    ground.run()

    def begin(**names):
        options = {"handler": "record", "argument": None, "names": TopicNames(**names)}
        holder = Place(ground.database, handlers.build(**ground.options | options))
        try:
            holder.hold()
        finally:
            holder.close()

    begin()
    with pytest.raises(RefusedError, match="the ledger knows of 1 event with a record") as refused:
        begin(**{kind: "{group}.{topic}.aside"})
    assert old in refused.value.message
    # Others may change; what is over and purged holds nobody back.
    begin(retry="{group}.{topic}.again.{n}")
    ground.query("update sideline.events set purged_at = now() returning 1")
    begin(**{kind: "{group}.{topic}.aside"})


def test_without_its_topic_the_ledger_keeps_them(grounds):
    """A stash topic that is missing stops nobody: the row says where the bytes are."""
    ground = grounds(handler="failing", stash="topic")
    ground.publish(STORY)
    ground.run()
    ground.check()
    assert ground.query("select distinct held_in from sideline.events") == [("ledger",)]


def test_a_pointer_is_followed_until_it_is_gone(grounds, kafka, capsys):
    """Nothing is copied; what retention took is shown as gone, never as a tombstone."""
    ground = grounds(handler="failing", stash="pointer")
    ground.publish(STORY)
    ground.run()
    ground.check()
    assert ground.query("select held_in, value from sideline.events") == [("source", None)] * 2
    assert fetched(ground, kafka) == [(2, b"bad"), (4, None)]
    with psycopg.connect(ground.database) as connection:
        found = contents.fetch(connection, {"bootstrap.servers": kafka}, "ground", held(ground))
    assert None not in found.values()
    admin = AdminClient({"bootstrap.servers": kafka})
    (deleted,) = admin.delete_records([TopicPartition(ground.topic, 0, 4)]).values()
    deleted.result()
    with psycopg.connect(ground.database) as connection:
        found = contents.fetch(connection, {"bootstrap.servers": kafka}, "ground", held(ground))
    assert [content is None for content in found.values()] == [True, False]
    shown = ["parked", "show", f"{ground.topic}/0/2", "--database", ground.database]
    assert main.run([*shown, "--kafka", kafka]) == 0
    assert "gone: it was in the source topic" in capsys.readouterr().out
    assert main.run(["parked", "export", "--database", ground.database, "--kafka", kafka]) == 5
    capsys.readouterr()


@pytest.mark.parametrize(
    ("stash", "point"),
    [
        ("topic", None),
        ("pointer", None),
        ("topic", "replay-before-commit"),
        ("pointer", "replay-handled"),
    ],
)
def test_what_is_held_elsewhere_comes_back_in_order(stashing, grounds, kafka, stash, point):
    """Bytes come from the stash topic or the source, also after a death (R1, R2, C3, F13)."""
    ground = stashing() if stash == "topic" else grounds(handler="failing", stash=stash)
    ground.publish([*STORY[:4], ("zoe", "Zoiee")])
    ground.run()
    operate(ground.database, "ground")
    if point is not None:
        ground.killed(ground.start(ground.lease(), crash_at=point, pipeline={"handler": "record"}))
        ground.check_prefix()
        balanced(ground.database)
    ground.run(pipeline={"handler": "record"})
    ground.check()
    balanced(ground.database)
    assert ground.parked() == []
    assert dict(ground.query("select id, value from users")) == {"zoe": "Zoiee", "bob": "Bobby"}
    assert [one.offset for one in ground.effects() if one.key == "zoe"] == [0, 2, 4]


@pytest.mark.parametrize("stash", ["ledger", "topic", "pointer"])
def test_the_handler_gets_what_was_produced_to_the_byte(stashing, grounds, stash):
    """Key, value, headers in their order with those that are there twice, timestamp (F13)."""
    ground = stashing() if stash == "topic" else grounds(stash=stash)
    ground.query(
        "create table seen (number bigint, key bytea, value bytea, at bigint, headers jsonb)"
    )
    headers = [("a", b"1"), ("b", b"\xfe\x00"), ("a", None), ("c", b""), ("a", b"1")]
    # Not so old that retention takes them.
    now = round(time.time() * 1000)
    produced = [
        (b"\xff\xfe", b"\x00\x80bad", headers, now - 3_600_123),
        (b"\xff\xfe", None, headers[::-1], now - 7_200_001),
        (None, b"", [], now - 1),
        (b"", b"\xc3\x28", [("a", b"")], now),
    ]
    for key, value, given, at in produced:
        ground._producer.produce(
            ground.topic, key=key, value=value, headers=given, timestamp=at, partition=0
        )
    assert ground._producer.flush(30) == 0
    ground.run(pipeline={"handler": "failing_all"})
    assert ground.query("select count(*) from sideline.events where state = 'parked'") == [(4,)]
    operate(ground.database, "ground")
    ground.run(pipeline={"handler": "exact"})
    seen = ground.query("select key, value, headers -> 'all', at from seen order by number")
    assert seen == [
        (key, value, [[name, data if data is None else data.hex()] for name, data in given], at)
        for key, value, given, at in produced
    ]
    balanced(ground.database)


def test_what_is_gone_cannot_come_back(grounds, kafka):
    """It fails again and says so; nothing behind it goes first (C1)."""
    ground = grounds(handler="failing", stash="pointer")
    ground.publish(STORY)
    ground.run()
    admin = AdminClient({"bootstrap.servers": kafka})
    (deleted,) = admin.delete_records([TopicPartition(ground.topic, 0, 4)]).values()
    deleted.result()
    operation = operate(ground.database, "ground")
    ground.run(pipeline={"handler": "record"})
    assert counts(ground.database, operation)[1:3] == (0, 1)
    rows = ground.query("select generation, message from sideline.events order by place")
    assert rows[0][0] == 1
    assert "its bytes are gone" in rows[0][1]
    assert len(ground.parked()) == 2
    balanced(ground.database)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_topic_that_was_made_again_has_other_bytes(grounds, kafka, accepted):
    """What stands at a parked event's place now is another event: its own is gone (F13, C1)."""
    ground = grounds(handler="failing", stash="pointer")
    ground.publish(STORY)
    ground.run()
    assert len(ground.parked()) == 2
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.delete_topics([ground.topic], operation_timeout=30)[ground.topic].result()
    wait_for(
        lambda: ground.topic not in admin.list_topics(timeout=30).topics,
        what=f"the end of {ground.topic}",
    )
    _create(admin, NewTopic(ground.topic, 1, 1))
    publish(kafka, ground.topic, [(key, "another") for key, _ in STORY])
    if accepted:
        # As `--accept-loss` does.
        ground.query("update sideline.progress set incarnation = 1, next_offset = 5 returning 1")
        # Even one that looks the same.
        stamp = [event.timestamp_ms for event in _all(kafka, ground.topic)]
        for offset in (2, 4):
            ground.query(
                'update sideline.events set timestamp_ms = %s where "offset" = %s returning 1',
                stamp[offset],
                offset,
            )
    assert fetched(ground, kafka) == [(2, None), (4, None)]
    operation = operate(ground.database, "ground")
    ground.run(pipeline={"handler": "record"})
    assert counts(ground.database, operation)[1:3] == (0, 1)
    assert dict(ground.query("select id, value from users")) == {"zoe": "Zoey", "bob": "Bobby"}


def _all(kafka, topic):
    spots = [Partition(topic, 0)]
    cluster = Cluster({"bootstrap.servers": kafka})
    batches = scanning.scan(
        {"bootstrap.servers": kafka}, cluster.beginnings(spots), cluster.ends(spots)
    )
    return [event for batch in batches for event in batch]


APP = """
from sideline import Pipeline, Upsert

pipeline = Pipeline("ground", {topic!r}, stash={stash!r})


@pipeline.handler
def handle(event):
    return Upsert("users", {{"id": event.key.decode(), "value": event.text()}}, key="id")
"""


@pytest.mark.parametrize("stash", ["topic", "pointer"])
def test_a_trial_gets_the_bytes_from_where_they_are(
    stashing, grounds, kafka, stash, tmp_path, monkeypatch, capsys
):
    """And says of how many events bytes are gone; nothing is changed (R4)."""
    ground = stashing() if stash == "topic" else grounds(handler="failing", stash=stash)
    ground.publish([*STORY[:4], ("zoe", "Zoiee")])
    ground.run()
    app = tmp_path / "trial_app.py"
    app.write_text(APP.format(topic=ground.topic, stash=stash))
    before = ground.query("select id, value from users order by id")

    def trial():
        monkeypatch.delitem(sys.modules, "trial_app", raising=False)
        where = ["--database", ground.database, "--kafka", kafka, "--json"]
        chosen = ["release", "ground", "--all", "--trial", "--app", f"{app}:pipeline"]
        assert main.run([*chosen, *where]) == 0
        told = json.loads(capsys.readouterr().out)["trial"]
        return {name: told[name] for name in ("tried", "applied", "elsewhere")}

    assert trial() == {"tried": 2, "applied": 2, "elsewhere": 0}
    assert ground.query("select id, value from users order by id") == before
    if stash == "pointer":
        admin = AdminClient({"bootstrap.servers": kafka})
        (deleted,) = admin.delete_records([TopicPartition(ground.topic, 0, 3)]).values()
        deleted.result()
        assert trial() == {"tried": 0, "applied": 0, "elsewhere": 2}


def test_a_release_waits_while_kafka_is_away(stashing, monkeypatch):
    """The operation says why and goes on by itself; nothing has failed again (R3)."""
    ground = stashing()
    ground.publish([*STORY[:4], ("zoe", "Zoiee")])
    ground.run()
    operation = operate(ground.database, "ground")
    monkeypatch.setattr(scanning, "PATIENCE_SECONDS", 0.1)
    pipeline = handlers.build(**ground.options | {"handler": "record"})
    worker = Worker(
        pipeline, Access(ground.database, {"bootstrap.servers": NOBODY, "log_level": 0})
    )

    def noted():
        worker.work(ground.lease(seconds=3))
        ((note,),) = ground.query("select note from sideline.operations")
        return note

    note = wait_for(noted, what="a release that waits")
    worker.close()
    assert counts(ground.database, operation) == ("running", 0, 0, 0, 0)
    assert note.startswith("waits: Kafka: ")
    assert len(ground.parked()) == 2
    ground.run(pipeline={"handler": "record"})
    ground.check()
    balanced(ground.database)
    assert counts(ground.database, operation) == ("done", 2, 0, 0, 0)
    assert ground.query("select note from sideline.operations") == [(None,)]


def test_bytes_behind_an_open_transaction_are_not_gone(kafka, topics, monkeypatch):
    """Somebody else's transaction hides a record for a while; that is no loss (R1, K25)."""
    topic = topics(1)
    other = Producer({"bootstrap.servers": kafka, "transactional.id": f"open-{topic}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(topic, "open")
    other.flush()
    publish(kafka, topic, [("zoe", "Zoey")])
    wanted = [(Partition(topic, 0), 1)]
    monkeypatch.setattr(scanning, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(KafkaUnreachableError):
        list(scanning.pick({"bootstrap.servers": kafka}, wanted))
    other.abort_transaction(30)
    monkeypatch.undo()
    (found,) = scanning.pick({"bootstrap.servers": kafka}, wanted)
    assert found.value == b"Zoey"
