"""Several partitions on one lease, holes in their offsets, bounds, and odd events."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.checkers import Place
from tests.support.ground import numbered
from tests.support.waiting import wait_for

# Nobody waits for the end of this.
LATE = {"retry_first": "10m", "retry_limit": "10m"}


def done(ground, partition, ends):
    return lambda: ground.next_offsets()[partition] == ends[partition]


# Each partition by itself


def test_a_backoff_stops_only_its_own_partition(grounds, tmp_path):
    """The slot's other partitions go on while one waits for its due time (K4, F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(partitions=2, handler="waiting", argument=str(flag), slice_size=10, **LATE)
    ground.publish([("a", "wait"), *numbered(500)], partition=0)
    ground.publish([("b", "first")], partition=1)
    worker = ground.start(ground.lease(bounded=False, seconds=200))
    wait_for(done(ground, 1, {1: 1}), what="partition 1")
    # Far more than a buffer's worth waits behind the event that fails.
    ground.publish(numbered(100, start=500), partition=1)
    wait_for(done(ground, 1, {1: 101}), what="partition 1 goes on")
    assert ground.next_offsets()[0] == 0
    worker.kill()
    flag.unlink()
    ground.query("update sideline.progress set due_at = null")
    ground.run()
    ground.check()


def test_a_partition_is_taken_as_it_is_released(grounds, tmp_path):
    """While one partition waits in backoff, another one is handed over (K4)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(partitions=2, handler="waiting", argument=str(flag), **LATE)
    ground.publish([("a", "wait")], partition=0)
    holder = ground.start(ground.lease(1, bounded=False, seconds=200))
    owner = "select owner is not null from sideline.progress where partition = %s"
    wait_for(lambda: ground.query(owner, 1)[0][0], what="partition 1 is held")
    worker = ground.start(ground.lease(bounded=False, seconds=200))
    tried = "select count(*) from sideline.progress where partition = 0 and owner is not null"
    wait_for(lambda: ground.query(tried)[0][0], what="partition 0 is taken")
    ground.publish(numbered(10), partition=1)
    holder.kill()
    wait_for(done(ground, 1, {1: 10}), what="partition 1 is taken over")
    worker.kill()
    flag.unlink()
    ground.query("update sideline.progress set due_at = null")
    ground.run()
    ground.check()


def test_the_backoff_outlives_its_lease(grounds, tmp_path):
    """The report and the row say when the partition is due: the driver plans by that (K4, F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="waiting", argument=str(flag), **LATE)
    ground.publish([("a", "wait")])
    (report,) = ground.run_until(
        lambda: ground.query("select attempts from sideline.progress") == [(1,)],
        what="an attempt",
        lease=lambda: ground.lease(seconds=2),
    )
    assert report.partitions[0].retry_in_seconds > 5
    assert report.partitions[0].attempts == 1
    due = ground.query("select due_at > now() + interval '5 s', attempts from sideline.progress")
    assert due == [(True, 1)]
    # A successor that comes too early waits as well.
    (report,) = ground.run_until(
        lambda: ground.query("select lease[2] from sideline.progress") == [(ground.round,)],
        what="a successor",
        lease=lambda: ground.lease(seconds=2),
    )
    assert report.partitions[0].attempts == 1


def test_an_event_heals_in_place(grounds, tmp_path):
    """Nothing is parked or skipped because the outside world was broken for a while (F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="waiting", argument=str(flag), slice_size=5, retry_first="20ms")
    ground.publish([*numbered(12), ("k3", "wait"), *numbered(12, start=12)])
    worker = ground.start(ground.lease())
    wait_for(done(ground, 0, {0: 12}), what="everything before")
    flag.unlink()
    worker.reports()
    ground.check()


def test_partitions_that_are_done_leave_room_for_the_others(grounds):
    """Under --once, what lies beyond one partition's bound does not stop another's events."""
    ground = grounds(partitions=2, handler="slow", argument=0.01, slice_size=10)
    ground.publish(numbered(5), partition=0)
    ground.publish(numbered(60), partition=1)
    lease = ground.lease(seconds=40)
    bounded = list(ground.produced)
    ground.publish(numbered(3000, start=5), partition=0)
    (report,) = ground.run(lease)
    assert ground.next_offsets() == {0: 5, 1: 60}
    assert {part.consumed for part in report.partitions} == {5, 60}
    assert sorted(ground.effects()) == sorted(bounded)


def test_nothing_is_read_beyond_the_bound(grounds):
    """--once ends at the end that the log had when it began, in the middle of a fetch too."""
    ground = grounds(slice_size=10)
    ground.publish(numbered(25))
    lease = ground.lease()
    ground.publish(numbered(25, start=25))
    ground.run(lease)
    assert ground.next_offsets() == {0: 25}
    ground.run()
    ground.check()


def test_many_partitions_on_one_lease(grounds):
    """Twelve partitions, one worker, uneven load."""
    ground = grounds(partitions=12, slice_size=25)
    ground.publish(numbered(600, keys=40))
    ground.publish(numbered(200, start=600), partition=3)
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


# Holes


def transactions(ground, *plan):
    """Publish in transactions: (how many events, whether to commit)."""
    producer = Producer(
        {"bootstrap.servers": ground.kafka, "transactional.id": f"tx-{ground.topic}"}
    )
    producer.init_transactions(30)
    for number, (count, commit) in enumerate(plan):
        sent = []
        producer.begin_transaction()
        for event in range(count):
            producer.produce(
                ground.topic,
                key=f"k{event % 3}",
                value=f"{number}",
                on_delivery=lambda error, message, sent=sent: sent.append((error, message)),
            )
        producer.flush(30)
        if commit:
            producer.commit_transaction(30)
            ground.produced += [
                Place(
                    message.topic(), message.partition(), message.offset(), message.key().decode()
                )
                for error, message in sent
                if error is None
            ]
        else:
            producer.abort_transaction(30)
    wait_for(lambda: ground.ends() == {0: written_end(ground)}, what="the transactions' markers")


def written_end(ground):
    """The end of the log with what is not yet committed."""
    settings = {"bootstrap.servers": ground.kafka, "group.id": "x", "log_level": 0}
    consumer = Consumer(settings | {"isolation.level": "read_uncommitted"})
    try:
        return consumer.get_watermark_offsets(TopicPartition(ground.topic, 0), timeout=30)[1]
    finally:
        consumer.close()


@pytest.mark.parametrize(
    "plan",
    [
        [(5, True)],
        [(5, False)],
        [(5, False), (5, True)],
        [(5, True), (5, False)],
        [(7, True), (3, False), (7, True), (1, False), (1, False), (9, True), (20, False)],
    ],
)
def test_aborted_transactions_leave_holes(grounds, plan):
    """Offsets that are never delivered are passed, up to the end of the log (--once ends)."""
    ground = grounds(slice_size=4)
    transactions(ground, *plan)
    (report,) = ground.run()
    assert ground.next_offsets() == ground.ends()
    assert report.partitions[0].consumed == len(ground.produced)
    ground.check()


def test_killed_among_holes(grounds):
    """A slice that ends at a hole is followed by one that begins there, whoever reads it."""
    ground = grounds(slice_size=4)
    plan = [(6, True), (4, False)] * 6
    transactions(ground, *plan)
    for count in (1, 2, 1, 3):
        ground.killed(ground.start(ground.lease(), crash_at=f"between-write-and-commit:{count}"))
        ground.killed(ground.start(ground.lease(), crash_at="after-commit:1"))
    ground.run()
    assert ground.next_offsets() == ground.ends()
    ground.check()


# Odd events


def test_events_without_a_key_and_with_an_empty_one(ground):
    """No key, an empty key, no value: events like all others (C7)."""
    ground.publish([(None, "a"), ("", "b"), (None, None), ("", None), ("x", ""), (None, "a")])
    ground.run()
    ground.check()
    assert ground.query("select key, value from history order by seq") == [
        (None, "a"),
        ("", "b"),
        (None, None),
        ("", None),
        ("x", ""),
        (None, "a"),
    ]
    assert ground.query("select id, value from users order by id") == [("x", "")]


@pytest.mark.parametrize("slice_size", [1, 2, 100])
def test_a_tombstone_deletes(grounds, slice_size):
    """Upsert, delete and upsert of one key end as the last one says, in one slice or three (C7)."""
    ground = grounds(slice_size=slice_size)
    ground.publish([("a", "1"), ("a", None), ("b", "1"), ("a", "2"), ("b", None), ("c", "1")])
    ground.run()
    ground.check()
    assert ground.query("select id, value from users order by id") == [("a", "2"), ("c", "1")]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_skipped_events_are_counted(grounds, concurrency):
    """Left out, and accounted for (F5)."""
    ground = grounds(handler="failing", skip=True, slice_size=4, concurrency=concurrency)
    ground.publish([(f"k{n % 3}", "bad" if n % 5 == 0 else "good") for n in range(23)])
    ground.run()
    row = ground.accounts()[ground.topic, 0]
    assert (row.consumed, row.applied, row.skipped) == (23, 18, 5)
    assert len(ground.effects()) == 18


def test_side_by_side_in_order(grounds):
    """With concurrency, events of one key still take effect in log order, across crashes (C1)."""
    ground = grounds(partitions=2, handler="slow", argument=0.002, concurrency=8, slice_size=25)
    ground.publish(numbered(300, keys=7))
    for point in ("after-handler:2", "between-write-and-commit:3", "after-commit:4"):
        ground.killed(ground.start(ground.lease(), crash_at=point))
    ground.run()
    ground.check()


def test_the_finished_prefix_commits_while_later_handlers_run(grounds, tmp_path):
    """What is done beyond it is dropped at the lease's end, and called again (K11)."""
    path, gate = tmp_path / "calls", tmp_path / "gate"
    ground = grounds(
        handler="gated_call", argument=[str(path), str(gate)], calls=True, concurrency=3
    )
    before = ground.publish([("a", "v"), ("b", "v")])
    ground.publish([("w", "wait"), ("w", "behind")])
    beyond = ground.publish([("c", "v"), ("d", "v"), ("e", "v")])
    worker = ground.start(ground.lease(seconds=250))
    wait_for(done(ground, 0, {0: len(before)}), what="the finished prefix")
    wait_for(lambda: set(beyond) <= set(ground.calls(path)), what="calls beyond it")
    ground.query("update sideline.pipelines set stop_requested = true")
    beat = "select beat_at from sideline.workers"
    for _ in range(2):
        # The first one hears of the stop; with the next the loop has ended.
        (last,) = ground.query(beat)
        wait_for(lambda last=last: ground.query(beat) != [last], what="a beat")
    gate.touch()
    worker.reports()
    assert ground.next_offsets() == {0: len(before) + 1}
    ground.query("update sideline.pipelines set stop_requested = false")
    ground.run()
    assert ground.next_offsets() == ground.ends()
    counts = Counter(ground.calls(path))
    assert {counts[place] for place in beyond} == {2}
    assert {counts[place] for place in set(counts) - set(beyond)} == {1}


def test_a_slice_that_takes_too_long_is_halved(grounds):
    """Until it fits into the time that a transaction may take; nothing is parked (K10, F2)."""
    ground = grounds(handler="limited", argument=0.03, slice_size=20)
    ground.publish(numbered(20))
    (report,) = ground.run()
    assert ground.next_offsets() == ground.ends()
    assert report.partitions[0].slices > 1
    assert ground.parked() == []
    ground.check()


def test_handlers_side_by_side_keep_the_rate(grounds, tmp_path):
    """Events are counted as their handlers begin: none runs ahead of the rate (rate=)."""
    path = tmp_path / "calls"
    slow = [str(path), 0.3]
    ground = grounds(handler="slow_call", argument=slow, calls=True, concurrency=64)
    ground.publish(numbered(120, keys=120))
    started = time.monotonic()
    ground.run(dataclasses.replace(ground.lease(), rate=40.0))
    assert time.monotonic() - started > 119 / 40
    assert len(ground.calls(path)) == 120


def test_a_blocked_event_holds_up_its_own_partition_only(grounds):
    """Block: the event waits and is tried again, nothing overtakes it, others go on (F6)."""
    ground = grounds(partitions=2, handler="failing", block=True, **LATE)
    ground.publish([("a", "good"), ("a", "bad"), ("a", "late")], partition=0)
    ground.publish(numbered(20), partition=1)
    stuck = "select stuck_at from sideline.progress where partition = 0"
    (report,) = ground.run_until(
        lambda: ground.next_offsets()[1] == 20 and ground.query(stuck) == [(1,)],
        what="the event that blocks, and the other partition",
        lease=lambda: ground.lease(seconds=3),
    )
    assert report.failure is None
    assert ground.next_offsets() == {0: 1, 1: 20}
    waits = "select due_at > now(), trouble from sideline.progress where partition = 0"
    assert ground.query(waits) == [(True, "ValueError: bad")]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_paused_partition_is_let_go(grounds, concurrency):
    """In the middle of a lease, at a slice boundary; the others go on."""
    ground = grounds(partitions=2, slice_size=5, concurrency=concurrency)
    ground.publish(numbered(20), partition=0)
    ground.publish(numbered(20), partition=1)
    worker = ground.start(ground.lease(seconds=250, bounded=False))
    wait_for(lambda: ground.next_offsets() == {0: 20, 1: 20}, what="everything there is")
    ground.query("update sideline.progress set paused = true where partition = 1")
    released = "select released from sideline.progress where partition = 1"
    wait_for(lambda: ground.query(released) == [(True,)], what="the release")
    ground.publish(numbered(20, start=20), partition=1)
    ground.publish(numbered(20, start=20), partition=0)
    wait_for(lambda: ground.next_offsets()[0] == 40, what="the other partition")
    ground.query("update sideline.pipelines set stop_requested = true")
    (report,) = worker.reports()
    assert ground.next_offsets() == {0: 40, 1: 20}
    assert {part.partition: part.consumed for part in report.partitions} == {0: 40, 1: 20}
    ground.check_prefix()
