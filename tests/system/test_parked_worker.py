"""What a real worker parks is what a person sees, exports and may publish again."""

from __future__ import annotations

import base64
import json
from functools import partial

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.waiting import wait_for

ANY_BYTES = bytes(range(256))
# Zoey, then Zoë (who fails), then Zoiee behind her; Bob fails too, in strange clothes.
HEADERS = [("trace", b"abc"), ("trace", None), ("Zo\u00eb\u202e", ANY_BYTES), ("", b"")]
RECORDS = [
    (b"zoe", b"Zoey", []),
    (b"zoe", b"bad", HEADERS),
    (b"zoe", None, [("empty", b"")]),
    (b"zoe", b"Zoiee \x1b[2J", []),
    (b"eve", b"Eve", []),
]


def send(kafka: str, topic: str, records) -> None:
    """Publish (key, value, headers, timestamp) exactly so."""
    producer = Producer({"bootstrap.servers": kafka})
    for key, value, headers, timestamp_ms in records:
        producer.produce(
            topic, key=key, value=value, headers=headers, timestamp=timestamp_ms, partition=0
        )
    assert producer.flush(30) == 0


def received(kafka: str, topic: str, count: int) -> list[tuple]:
    """What a topic holds."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "reader"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        messages = consumer.consume(count, timeout=30)
        return [
            (each.key(), each.value(), each.headers() or [], each.timestamp()[1])
            for each in messages
        ]
    finally:
        consumer.close()


def exported(text: str) -> list[tuple]:
    """An export as the page about it says that one is read."""

    def data(value: str | None) -> bytes | None:
        return None if value is None else base64.b64decode(value)

    lines = [json.loads(line) for line in text.splitlines()]
    return [
        (
            data(line["key"]),
            data(line["value"]),
            [(name, data(value)) for name, value in line["headers"]],
            line["timestamp_ms"],
        )
        for line in lines
    ]


def test_from_the_topic_to_the_screen_and_back(grounds, cli, read, kafka, topics):
    """Parked by a worker, listed, shown, exported and published again, byte by byte (F13, S1)."""
    ground = grounds(handler="failing", slice_size=2)
    records = [(*record, 1_700_000_000_000 + number) for number, record in enumerate(RECORDS)]
    send(kafka, ground.topic, records)
    reports = ground.run()
    assert ground.next_offsets() == {0: 5}, reports

    (key,) = read("parked", "keys", "ground")["keys"]
    assert (key["key"], key["events"], key["head"]["id"]) == (
        {"text": "zoe"},
        3,
        f"{ground.topic}/0/1",
    )
    (cause,) = read("parked", "causes")["causes"]
    assert (cause["parked"], cause["error"], cause["message"]) == (1, "ValueError", "bad")
    assert (cause["share"], cause["example"]) == (1.0, f"{ground.topic}/0/1")
    events = read("parked", "list", "--key", "zoe")["events"]
    assert [event["why"] for event in events] == ["failed", "follows", "follows"]
    shown = read("parked", "show", f"{ground.topic}/0/1")
    assert shown["queue"]["behind"] == [f"{ground.topic}/0/2", f"{ground.topic}/0/3"]
    assert "in handle" in shown["traceback"]
    assert read("status", "--check")["ok"] is True
    assert read("status", "ground")["parked"] == 3

    code, out, _ = cli("parked", "export")
    assert code == 0
    assert exported(out) == records[1:4]
    again = topics(partitions=1)
    send(kafka, again, exported(out))
    assert received(kafka, again, 3) == records[1:4]


def test_what_blocks_is_set_aside_by_hand(grounds, cli, read):
    """The partition goes on, the key waits, and the reason is kept with the event (F6)."""
    ground = grounds(handler="failing", block=True)
    ground.publish([("zoe", "Zoey"), ("zoe", "bad"), ("zoe", "Zoiee"), ("bob", "Bob")])
    short = partial(ground.lease, seconds=2.0)
    ground.run_until(lambda: waiting(read), what="the event that blocks", lease=short)
    blocked = f"{ground.topic}/0/1"
    assert ground.next_offsets() == {0: 1}
    assert read("status", "ground")["partitions"][0]["stuck_at"] == 1

    assert cli("park", f"{ground.topic}/0/2", "--reason", "typo", "--execute")[0] == 5
    assert read("park", blocked, "--reason", "typed in by hand", "--execute")["executed"] is True
    ground.run()

    assert ground.next_offsets() == {0: 4}
    found = read("parked", "list", "--key", "zoe")["events"]
    assert [event["id"] for event in found] == [blocked, f"{ground.topic}/0/2"]
    assert "typed in by hand" in found[0]["message"]
    assert [place.offset for place in ground.effects()] == [0, 3]
    assert read("status", "--check")["ok"] is True
    assert cli("park", blocked, "--reason", "again", "--execute")[0] == 5


KINDS = {
    "ordinary": {"handler": "failing"},
    "beside others": {"handler": "failing", "concurrency": 3},
    "with the transaction": {"handler": "failing_tx"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_what_blocks_is_seen_and_set_aside_while_its_lease_lasts(grounds, cli, read, options):
    """At once, not when the lease is over, which may be a minute later (F2, F6, S2)."""
    ground = grounds(block=True, **options)
    ground.publish([("zoe", "Zoey"), ("zoe", "bad"), ("zoe", "Zoiee"), ("bob", "Bob")])
    worker = ground.start(ground.lease(seconds=120))
    row = wait_for(lambda: waiting(read), what="the event that blocks")
    assert (row["stuck_at"], row["trouble"]) == (1, "ValueError: bad")
    assert row["attempts"] >= 1
    assert row["waits_until"] is not None
    # Attempt after attempt it stays in sight.
    wait_for(lambda: waiting(read)["attempts"] > row["attempts"], what="another attempt")
    assert cli("park", f"{ground.topic}/0/1", "--reason", "typed in", "--execute")[0] == 0
    worker.reports()
    assert ground.next_offsets() == {0: 4}
    assert [place.offset for place in ground.parked()] == [1, 2]
    assert waiting(read) is None
    ground.check()


def waiting(read) -> dict | None:
    """The partition, if it waits for an event."""
    found = read("status", "ground")["partitions"]
    return found[0] if found and found[0]["stuck_at"] is not None else None


def test_what_heals_is_out_of_sight_again(grounds, read, tmp_path):
    """Status shows a retry while it lasts; a worker that dies in it leaves it to see (F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="waiting", argument=str(flag))
    ground.publish([("zoe", "Zoey"), ("zoe", "wait"), ("zoe", "Zoiee")])
    ground.killed(ground.start(ground.lease(seconds=120), crash_at="after-tries"))
    assert waiting(read)["stuck_at"] == 1
    worker = ground.start(ground.lease(seconds=120))
    wait_for(lambda: waiting(read)["attempts"] > 1, what="an attempt of the next worker")
    flag.unlink()
    worker.reports()
    assert waiting(read) is None
    ground.check()


REFUSE = """
create table outage ();
create function refuse() returns trigger language plpgsql as $$
begin
    if to_regclass('outage') is not null then
        raise exception 'no room' using errcode = 'disk_full';
    end if;
    return null;
end $$;
create trigger refuse after insert on history for each row execute function refuse()
"""


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}], ids=["ordinary", "beside others"])
def test_a_slice_that_postgresql_refuses_is_seen_while_its_lease_lasts(grounds, read, options):
    """What has to heal outside shows at once: attempt, due time and reason (F2)."""
    ground = grounds(**options)
    ground.query(REFUSE)
    ground.publish([("zoe", "Zoey"), ("bob", "Bob")])
    worker = ground.start(ground.lease(seconds=120))

    def troubled():
        row = read("status", "ground")["partitions"][0]
        return row if row["attempts"] else None

    row = wait_for(troubled, what="the refusal")
    assert "no room" in row["trouble"]
    assert row["waits_until"] is not None
    ground.query("drop table outage")
    worker.reports()
    assert troubled() is None
    ground.check()
