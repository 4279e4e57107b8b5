"""What leaves for Kafka: never lost, never twice, never for an event that was applied after all."""

from __future__ import annotations

import signal

import pytest
from confluent_kafka import Consumer, TopicPartition

from sideline.engine.relay import private_group
from tests.support.waiting import wait_for

# From the handler to the mark, every step of a record that leaves.
POINTS = (
    pytest.param("after-handler", marks=pytest.mark.long),
    "after-copy-written",
    pytest.param("between-write-and-commit", marks=pytest.mark.long),
    "after-commit",
    pytest.param("before-outbox-init", marks=pytest.mark.long),
    "after-outbox-init",
    pytest.param("before-send", marks=pytest.mark.long),
    "between-produce-and-commit",
    "between-send-and-mark",
    pytest.param("after-mark", marks=pytest.mark.long),
    pytest.param("before-release", marks=pytest.mark.long),
)
EVENTS = [("a", "fine"), ("b", "never"), ("a", "never"), ("c", "fine"), ("b", "fine")]


def test_dead_letters_are_exact_copies(chains):
    """Key, value, headers and timestamp of the event, byte by byte (F7, F13)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    headers = [("b", b"\x00\xff"), ("a", None), ("b", b""), ("sideline-origin-topic", b"forged")]
    ground._producer.produce(
        ground.topic, key=b"\xff\x00k", value=b"never\x00\xff"[:5], headers=headers
    )
    ground._producer.flush()
    ground.publish([("k", None)])
    ground.run(pipeline={"handler": "failing_all"})
    first, second = chain.committed(chain.dlq)
    assert first.key() == f"{ground.topic}/0/0".encode()
    assert first.value() == b"never"
    assert first.headers()[:4] == headers
    told = dict(first.headers()[4:])
    ((stamp,),) = ground.query('select timestamp_ms from sideline.events where "offset" = 0')
    assert told["sideline-origin-topic"] == ground.topic.encode()
    assert told["sideline-origin-key"] == b"\xff\x00k"
    assert told["sideline-origin-timestamp"] == str(stamp).encode()
    assert told["sideline-group"] == b"ground"
    assert told["sideline-attempt"] == b"1"
    assert told["sideline-error"] == b"ValueError"
    assert "sideline-origin-null-value" not in told
    # A tombstone must not be one there.
    assert second.value() == b""
    assert dict(second.headers())["sideline-origin-null-value"] == b"true"
    assert [row[1:] for row in chain.states()] == [("dead", 1), ("dead", 1)]
    assert ground.query("select dead, retried from sideline.causes") == [(2, 0)]
    assert ground.query("select consumed, dead, parked from sideline.progress") == [(2, 2, 0)]


@pytest.mark.parametrize("handler", ["flaky", "flaky_async", "flaky_tx"])
def test_every_error_is_tried_so_often_in_place(chains, handler):
    """Recoverable or not; then the copy, and the stream goes on (F7)."""
    chain = chains(dead_letter=3, handler=handler, retry_first="10ms")
    chain.ground.publish(
        [("a", "fine"), ("b", "heals:2"), ("c", "never"), ("d", "heals:9"), ("e", "fine")]
    )
    chain.run()
    chain.check(dead={2, 3})
    assert [len(chain.tries(offset)) for offset in (1, 2, 3)] == [3, 3, 3]
    assert chain.states() == [(2, "dead", 3), (3, "dead", 3)]


def test_tries_are_counted_over_deaths(chains):
    """Two attempts before the worker dies, one after it: not three more (F7)."""
    chain = chains(dead_letter=3, retry_first="10ms")
    chain.ground.publish([("b", "never")])
    for _ in range(2):
        worker = chain.ground.start(chain.lease(), crash_at="after-tries")
        chain.ground.killed(worker)
    assert len(chain.tries(0)) == 2
    chain.run()
    assert len(chain.tries(0)) == 3
    chain.check(dead={0})


@pytest.mark.parametrize("point", POINTS)
def test_a_death_anywhere_loses_and_doubles_nothing(chains, point):
    """SIGKILL between any two steps of a record that leaves (F7, K23, K24)."""
    chain = chains(dead_letter=1, slice_size=2)
    chain.ground.publish(EVENTS)
    chain.ground.killed(chain.ground.start(chain.lease(), crash_at=point))
    # Whoever only sends what was committed sends it to its end.
    chain.ground.run(chain.lease(relay=True))
    assert chain.unsent() == 0
    chain.run()
    chain.check(dead={1, 2})


def test_a_zombie_sends_nothing(chains):
    """It froze before it sent; its successor sent; it wakes with its producer fenced (K24)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish(EVENTS)
    for point in ("before-send", "between-produce-and-commit"):
        zombie = ground.start(chain.lease(), crash_at=f"{point}:1:STOP", grace_seconds=0.5)
        zombie.frozen()
        chain.ground.run(chain.lease(), grace_seconds=0.5)
        chain.check()
        word = chain.word()
        zombie.signal(signal.SIGCONT)
        zombie.end()
        assert chain.word() == word
        chain.check()
        ground.publish(EVENTS)
    chain.run()
    chain.check()


def test_two_owners_in_turn_send_in_order(chains):
    """Producers of two processes follow each other; numbers are sent as a prefix (K24)."""
    chain = chains(dead_letter=1, slice_size=3)
    ground = chain.ground
    for _ in range(4):
        ground.publish([("b", "never")] * 5)
        ground.run(chain.lease())
    assert chain.dead_letters() == list(range(20))
    chain.check(dead=set(range(20)))
    assert chain.word().startswith("20:")


def test_what_kafka_has_is_marked_not_sent_again(chains):
    """The taker reads the last number after its init; a number of another outbox means nothing."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish(EVENTS)
    ground.killed(ground.start(chain.lease(), crash_at="between-send-and-mark"))
    assert chain.unsent() == 2
    assert chain.word().startswith("2:")
    # As after a restore: the same numbers, other records.
    ground.query("update sideline.outbox set written_at = written_at - interval '1 day'")
    chain.run()
    assert sorted(chain.dead_letters()) == [1, 1, 2, 2]
    ground.publish([("x", "never")])
    ground.killed(ground.start(chain.lease(), crash_at="between-send-and-mark"))
    chain.run()
    assert sorted(chain.dead_letters()) == [1, 1, 2, 2, 5]


def test_a_refused_record_waits_and_nothing_overtakes_it(chains):
    """Its topic is gone after COMMIT: the outbox waits, says so, and goes on afterwards (K23)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish(EVENTS)
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    # Auto-creation would make it again.
    ground.query("update sideline.outbox set to_topic = 'no topic' where number = 1")
    trouble = "select 1 from sideline.progress where topic = %s and outbox_trouble is not null"
    ground.run_until(
        lambda: ground.query(trouble, ground.topic),
        what="somebody to say so",
        lease=lambda: chain.lease(relay=True, seconds_=4),
    )
    assert chain.unsent() == 2
    ground.query("update sideline.outbox set to_topic = %s", chain.dlq)
    chain.run()
    chain.check(dead={1, 2})
    assert ground.query("select outbox_trouble from sideline.progress") == [(None,)]


def test_what_comes_before_a_refused_record_is_sent(chains):
    """A record above the broker's limit is found among others (K23)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish([("k", "never")] * 3)
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    big = b"x" * 2_000_000
    ground.query('update sideline.events set value = %s where "offset" = 1', big)
    worker = ground.start(chain.lease(relay=True, seconds_=90))
    wait_for(lambda: chain.unsent() == 2, what="the first one to be sent", within_seconds=80)
    worker.signal(signal.SIGKILL)
    ground.killed(worker)
    # It may have died in a transaction, which stays open for a while.
    wait_for(lambda: chain.dead_letters(over=False) == [0], what="it to be seen")
    assert chain.unsent() == 2
    ground.query("update sideline.events set value = 'never' where \"offset\" = 1")
    chain.run()
    assert chain.dead_letters() == [0, 1, 2]


def test_a_copy_too_large_for_its_topic_stays_in_the_ledger(chains):
    """Its size is looked at before COMMIT: nothing waits, nothing is lost (F7)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    small = f"{ground.topic}.ground.dlq"
    chain.delete(small)
    chain.make(small, {"max.message.bytes": "2000"})
    ground.publish([("a", "never"), ("b", "never " + "x" * 3_000), ("c", "never")])
    ground.run(pipeline={"handler": "failing_all"})
    assert chain.dead_letters() == [0, 2]
    assert chain.states() == [(0, "dead", 1), (1, "dead", 1), (2, "dead", 1)]
    rows = ground.query(
        "select octet_length(value), copy_topic from sideline.events order by 1 desc"
    )
    assert rows[0] == (3_006, None)
    chain.check_books()


def test_a_missing_topic_keeps_its_events_waiting(chains):
    """It was deleted while running: the event waits in place, what came before is applied (F7)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    chain.delete(chain.dlq)
    ground.publish(EVENTS)
    # As short as its leases are when nothing goes wrong; a loaded machine needs several.
    state = "select next_offset, trouble, stuck_at from sideline.progress"
    for _ in range(10):
        ground.run(chain.lease(seconds_=3))
        ((offset, trouble, stuck),) = ground.query(state)
        if stuck is not None:
            break
    assert (offset, stuck) == (1, 1)
    assert "does not exist" in trouble
    chain.make(chain.dlq)
    chain.run()
    chain.check(dead={1, 2})


def test_a_partition_with_too_much_unsent_reads_no_more(chains):
    """Beyond a bound the stream waits for its outbox (K23)."""
    chain = chains(dead_letter=1, slice_size=50, guard_off=True)
    ground = chain.ground
    ground.publish([("k", "never")])
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    ground.query(
        "insert into sideline.outbox (pipeline, topic, partition, number, to_topic)"
        " select pipeline, topic, partition, more + 1, 'no topic'"
        " from sideline.outbox, generate_series(1, 10001) as more"
    )
    ground.query("update sideline.progress set outbox_last = outbox_last + 10001")
    ground.publish([("k", "fine")] * 3)
    ground.run(chain.lease(seconds_=4))
    assert ground.next_offsets() == {0: 1}
    ground.query("delete from sideline.outbox where to_topic = 'no topic'")
    ground.query("update sideline.progress set outbox_last = outbox_sent")
    chain.run()
    assert len(ground.effects()) == 3


def test_a_paused_pipeline_still_sends(chains):
    """Paused as a whole: leases for the outbox alone read nothing and send everything (K23)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish(EVENTS)
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    ground.query("update sideline.pipelines set paused = true")
    ground.publish(EVENTS)
    (report,) = ground.run(chain.lease(relay=True))
    assert (chain.unsent(), sum(part.consumed for part in report.partitions)) == (0, 0)
    ground.query("update sideline.pipelines set paused = false")
    chain.run()
    chain.check(dead={1, 2, 6, 7})


def test_aborted_copies_are_seen_by_nobody_who_reads_committed_ones(chains):
    """A producer that dies in its transaction leaves records behind that were never sent (K24)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish(EVENTS)
    ground.killed(ground.start(chain.lease(), crash_at="between-produce-and-commit"))
    chain.run()
    chain.check(dead={1, 2})


def test_a_forged_private_offset_is_not_obeyed(chains):
    """Somebody writes nonsense under the private group: everything is sent all the same (K24)."""
    chain = chains(dead_letter=1)
    ground = chain.ground
    ground.publish(EVENTS)
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    consumer = Consumer({"bootstrap.servers": ground.kafka, "group.id": private_group("ground")})
    consumer.commit(
        offsets=[TopicPartition(ground.topic, 0, 9, metadata="2:77")], asynchronous=False
    )
    consumer.close()
    chain.run()
    chain.check(dead={1, 2})


def test_a_pipeline_without_failures_pays_no_statement_more(chains):
    """No outbox row, no relay: not even a producer is made."""
    chain = chains(dead_letter=1)
    chain.ground.publish([("a", "fine")] * 5)
    (report,) = chain.run(crash_at="before-outbox-init")
    assert [part.unsent for part in report.partitions] == [0]
    assert chain.word() is None
