"""Keys step aside, their events wait, everybody else goes on: on real rows, and through crashes."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time

import psycopg
import pytest

from sideline.keys import mark
from tests.support.ground import numbered
from tests.support.proxy import wire
from tests.support.waiting import wait_for

# Beside those of every slice.
POINTS = ("after-handler", "after-park", "between-write-and-commit", "after-commit")
BAD = "bad"
# Two keys with one mark.
ALIKE = "key-582648344", "key-1000209295"

WAITS = """
insert into sideline.events (
    pipeline, topic, partition, "offset", queue, state, why, timestamp_ms, handler_version
)
values ('ground', 't', 0, 9, {queue}, 'parked', 'follows', 0, '')
"""


def story(ground):
    """Zoey, then Zoë (who fails), then Zoiee; and Bob, all the while."""
    return ground.publish(
        [("zoe", "Zoey"), ("bob", "Bob"), ("zoe", BAD), ("bob", "Bobby"), ("zoe", "Zoiee")]
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("handler", ["failing", "failing_tx", "refused"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_zoiee_waits_behind_zoe_and_bob_does_not(grounds, size, handler, concurrency):
    """Wherever the slice ends, and whoever finds it: handler or database (C1, F3, F4, K9)."""
    if handler == "failing_tx" and concurrency > 1:
        pytest.skip("a handler with the transaction runs event by event")
    ground = grounds(slice_size=size, handler=handler, concurrency=concurrency)
    story(ground)
    ground.run()
    ground.check()
    assert [(place.offset, place.key) for place in ground.parked()] == [(2, "zoe"), (4, "zoe")]
    assert [place.offset for place in ground.effects()] == [0, 1, 3]
    assert ground.query("select why from sideline.events order by place") == [
        ("failed",),
        ("follows",),
    ]
    assert ground.query("select aside, parked from sideline.progress") == [(1, 2)]
    assert ground.query("select events from sideline.queues") == [(2,)]
    ((parked, stage),) = ground.query("select parked, stage from sideline.causes")
    assert (parked, stage) == (1, "write" if handler == "refused" else "handler")


@pytest.mark.parametrize("handler", ["failing", "refused"])
def test_a_key_stays_aside_in_later_leases(grounds, handler):
    """In a process that never saw it fail (F4)."""
    ground = grounds(slice_size=10, handler=handler)
    story(ground)
    ground.run()
    ground.publish([("zoe", "Zoe again"), ("bob", "Robert"), (None, "nobody"), ("", "empty")])
    ground.run()
    ground.check()
    assert [place.offset for place in ground.parked()] == [2, 4, 5]
    assert ground.query("select events from sideline.queues") == [(3,)]


def test_a_key_with_the_mark_of_another_is_not_taken_for_it(grounds):
    """Marks only say who is not aside; who may be is asked for, in every slice and lease (F4)."""
    ground = grounds(slice_size=2, handler="failing")
    twin, other = ALIKE
    assert mark(twin.encode()) == mark(other.encode())
    ground.publish([(twin, BAD), (other, "fine"), (twin, "waits")])
    ground.run()
    ground.publish([(other, "fine too"), (twin, "waits too"), (other, BAD), (other, "now waits")])
    ground.run()
    ground.run()
    ground.check()
    assert [place.offset for place in ground.effects()] == [1, 3]
    assert [place.offset for place in ground.parked()] == [0, 2, 4, 5, 6]
    ground.publish([(twin, "still"), (other, "still"), ("third", "flows")])
    ground.run()
    assert [place.offset for place in ground.parked()][-2:] == [7, 8]


def test_what_is_parked_is_kept_exactly(grounds, kafka):
    """Bytes, headers with duplicates and order, timestamp (F13)."""
    # The broker would delete records of 1970.
    ground = grounds(handler="failing")
    headers = [("b", b"\x00\xff"), ('a"\\{},', None), ("b", b""), ("ü", b"NULL")]
    ground._producer.produce(
        ground.topic, key=b"\xff\x00k", value=b"\x00bad\xff", headers=headers, timestamp=123_456
    )
    ground._producer.produce(ground.topic, key=b"", value=None, timestamp=5)
    ground._producer.flush()
    ground.run(pipeline={"handler": "failing_all"})
    rows = ground.query(
        "select key, value, header_names, header_values, timestamp_ms from sideline.events"
        " order by place"
    )
    assert rows == [
        (
            b"\xff\x00k",
            b"\x00bad\xff",
            [name for name, _ in headers],
            [value for _, value in headers],
            123_456,
        ),
        (b"", None, [], [], 5),
    ]


def test_events_without_a_key_stand_alone(grounds):
    """They are parked without a queue, and nothing waits behind them (F4, K14)."""
    ground = grounds(handler="failing")
    ground.publish([(None, BAD), (None, "fine"), (None, BAD), ("k", "fine")])
    ground.run()
    ground.check()
    assert [place.offset for place in ground.parked()] == [0, 2]
    assert ground.query("select queue from sideline.events") == [(None,), (None,)]
    assert ground.query("select count(*) from sideline.queues") == [(0,)]


def test_many_keys_fail_at_once(grounds):
    """A slice with hundreds of failures and followers, in several partitions (F3, F4)."""
    ground = grounds(partitions=3, handler="failing", slice_size=100, guard_off=True)
    ground.publish(
        [
            (f"k{n % 97}", BAD if n % 97 % 3 == 0 and n // 97 in {1, 4} else f"v{n}")
            for n in range(900)
        ]
    )
    ground.run()
    ground.check()
    assert len(ground.parked()) > 150
    (aside,) = ground.query("select sum(aside), sum(parked) from sideline.progress")
    assert aside == (
        ground.query("select count(*) from sideline.queues")[0][0],
        ground.query("select count(*) from sideline.events")[0][0],
    )


def test_a_queue_cannot_be_forgotten_while_an_event_waits(grounds):
    """The schema itself forbids it (K14)."""
    ground = grounds(handler="failing")
    story(ground)
    ground.run()
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        ground.query("with gone as (delete from sideline.keys) delete from sideline.queues")


def test_nobody_waits_in_a_queue_that_is_not_there(grounds):
    """Neither an event nor a key, whether it arrives there or is moved there (K14)."""
    ground = grounds(handler="failing")
    story(ground)
    ground.run()
    key = "select pipeline, topic, gen_random_uuid(), key, derived, 99, version from sideline.keys"
    for statement in (
        "update sideline.events set queue = 99 where queue is not null",
        "update sideline.keys set queue = 99",
        f"insert into sideline.keys {key} limit 1",
        WAITS.format(queue=99),
    ):
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            ground.query(statement)


@pytest.mark.parametrize("first", ["waits", "ends"])
def test_ending_a_queue_and_waiting_in_it_at_once(grounds, first):
    """Whoever comes second waits for the other, and is refused by what that one did (K14)."""
    ground = grounds(handler="failing")
    story(ground)
    ground.run()
    ((queue,),) = ground.query(
        "insert into sideline.queues (pipeline, topic, home, digest, mark)"
        " values ('ground', 't', 0, gen_random_uuid(), 0) returning id"
    )
    statements = {
        "waits": WAITS.format(queue=queue),
        "ends": f"delete from sideline.queues where id = {queue}",
    }
    second = statements.pop("ends" if first == "waits" else "waits")
    (begun,) = statements.values()
    refusals = []

    def other():
        with pytest.raises(psycopg.errors.ForeignKeyViolation) as refused:
            ground.query(second)
        refusals.append(refused.value)

    with psycopg.connect(ground.database) as connection:
        connection.execute(begun)
        thread = threading.Thread(target=other)
        thread.start()
        wait_for(
            lambda: ground.query("select 1 from pg_locks where not granted"), what="the second one"
        )
        connection.commit()
    thread.join()
    assert len(refusals) == 1


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("handler", ["failing", "refused"])
def test_killed_while_parking(grounds, point, handler):
    """Failures, effects and progress of a slice are committed together or not at all (C3)."""
    ground = grounds(partitions=2, slice_size=7, handler=handler)
    ground.publish([(f"k{n % 9}", BAD if n % 10 == 4 else f"v{n}") for n in range(120)])
    for count in (1, 2, 4):
        worker = ground.start(ground.lease(), crash_at=f"{point}:{count}")
        ground.perhaps_killed(worker)
        ground.check_prefix()
    ground.run()
    ground.check()
    assert ground.kills
    assert ground.next_offsets() == ground.ends()


def test_killed_again_and_again_while_parking(grounds):
    """A tenth of the long run: nothing lost, twice, overtaken or unaccounted for (C1, C3)."""
    _die(grounds(partitions=3, slice_size=8, handler="failing", guard_off=True), deaths=12)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_a_hundred_times_while_parking(grounds):
    """The same, longer."""
    _die(grounds(partitions=3, slice_size=8, handler="failing", guard_off=True), deaths=120)


def _die(ground, deaths):
    published = 0
    while ground.kills < deaths:
        ground.publish(
            [
                (f"k{n % 40}", BAD if n % 17 == 3 else f"v{n}")
                for n in range(published, published + 60)
            ]
        )
        published += 60
        point = POINTS[published // 60 % len(POINTS)]
        worker = ground.start(ground.lease(), crash_at=f"{point}:{1 + published % 3}")
        ground.perhaps_killed(worker)
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


@pytest.mark.parametrize("cut", ["before_commit", "after_commit"])
def test_the_wire_is_cut_while_parking(grounds, cut):
    """Around every COMMIT: what waits is known afterwards, and nothing is half done (C3, K5)."""
    ground = grounds(partitions=1, slice_size=10, handler="failing", guard_off=True)
    for number in range(2, 12):
        start = len(ground.produced)
        ground.publish(
            [(f"k{n % 50}", BAD if n % 11 == 3 else f"v{n}") for n in range(start, start + 60)]
        )
        with wire(ground.database, **{cut: number}) as proxy:
            ground.run(ground.lease(), database=proxy.url)
    ground.run()
    ground.check()
    assert ground.next_offsets() == ground.ends()


def test_the_flood_guard_stops_before_the_event_that_is_one_too_many(grounds):
    """What came before is committed; a restart parks no further event (F12)."""
    ground = grounds(slice_size=4, handler="failing", in_a_row=5)
    ground.publish([("a", "fine"), *((f"k{n}", BAD) for n in range(9)), ("a", "last")])
    (report,) = ground.run()
    assert report.failure["stage"] == "guard"
    assert report.failure["event"] == f"{ground.topic}/0/5"
    assert [place.offset for place in ground.parked()] == [1, 2, 3, 4]
    for _ in range(2):
        (report,) = ground.run()
        assert report.failure["stage"] == "guard"
        assert len(ground.parked()) == 4
    # Mended: it goes on, and forgets.
    ground.run(pipeline={"handler": "record"})
    ground.check()
    assert ground.next_offsets() == ground.ends()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_followers_do_not_trip_the_guard(grounds, concurrency):
    """One bad key with a long tail is one failure (F12)."""
    ground = grounds(slice_size=9, handler="failing", in_a_row=3, concurrency=concurrency)
    ground.publish([("a", BAD), *((("a", f"v{n}")) for n in range(40)), ("b", "fine")])
    ground.run()
    ground.check()
    assert len(ground.parked()) == 41


def test_rows_that_the_database_refuses_trip_the_guard_too(grounds):
    """Poison is found in the write, and counted in its place (F12, K9)."""
    ground = grounds(slice_size=50, handler="refused", in_a_row=5)
    ground.publish([("a", "fine"), *((f"k{n}", BAD) for n in range(9)), ("a", "last")])
    (report,) = ground.run()
    assert report.failure["stage"] == "guard"
    assert [place.offset for place in ground.parked()] == [1, 2, 3, 4]
    ground.check_prefix()


def test_the_guard_can_be_overridden(grounds):
    """By a lease that says so."""
    ground = grounds(slice_size=4, handler="failing", in_a_row=2)
    ground.publish([(f"k{n}", BAD) for n in range(9)])
    (report,) = ground.run(dataclasses.replace(ground.lease(), guard=False))
    assert report.failure is None
    assert len(ground.parked()) == 9


def test_a_guard_that_was_overridden_begins_anew(grounds):
    """The next run does not stop at its first failure; a crash overrides nothing (F12, C3)."""
    ground = grounds(slice_size=4, handler="failing", in_a_row=3)
    ground.publish([(f"k{n}", BAD) for n in range(9)])
    assert ground.run()[0].failure["stage"] == "guard"
    overriding = dataclasses.replace(ground.lease(), guard=False)
    ground.killed(ground.start(overriding, crash_at="between-write-and-commit"))
    assert ground.run()[0].failure["stage"] == "guard"
    assert len(ground.parked()) == 2
    ground.run(dataclasses.replace(ground.lease(), guard=False))
    ground.publish([("k10", BAD), ("k11", BAD)])
    assert ground.run()[0].failure is None
    ground.publish([("k12", BAD)])
    assert ground.run()[0].failure["stage"] == "guard"
    assert len(ground.parked()) == 11
    ground.check_prefix()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_event_whose_key_nobody_can_tell(grounds, concurrency):
    """It waits under its record's key; whatever has it waits behind, and takes its own key along.

    Queues that meet are joined, in the order of the log (F14, K15).
    """
    ground = grounds(handler="failing", key="json_id", slice_size=3, concurrency=concurrency)
    ground.publish(
        [
            ("r1", '{"id": "A", "n": 1}'),
            ("r2", '{"id": "B", "fail": true}'),  # queue of B
            ("r1", "not json"),  # queue of r1
            ("r1", '{"id": "A", "n": 2}'),  # waits for r1, takes A along
            ("r3", '{"id": "A", "n": 3}'),  # waits for A
            ("r1", '{"id": "B", "n": 4}'),  # has both: the queues meet
            ("r4", '{"id": "C", "n": 5}'),  # goes on
        ]
    )
    ground.run()
    assert [place.offset for place in ground.effects()] == [0, 6]
    assert ground.query("select count(distinct queue), count(*) from sideline.events") == [(1, 5)]
    assert ground.query("select count(*), sum(events) from sideline.queues") == [(1, 5)]
    keys = ground.query("select convert_from(key, 'utf8'), derived from sideline.keys order by 1")
    assert keys == [("A", True), ("B", True), ("r1", False)]
    assert ground.query("select aside, parked from sideline.progress") == [(1, 5)]
    places = [place.offset for place in ground.parked()]
    assert places == sorted(places) == [1, 2, 3, 4, 5]


def test_a_key_in_two_partitions_is_not_applied_behind_its_back(grounds):
    """A slice that was admitted before its key stepped aside elsewhere is admitted anew (K13)."""
    ground = grounds(partitions=2, handler="failing", slice_size=5)
    ground.query("update sideline.progress set shared = true")
    ground.publish([("k", "first"), ("k", BAD)], partition=0)
    ground.publish([("other", "fine"), ("k", "later")], partition=1)
    frozen = ground.start(ground.lease(1), crash_at="after-handler:1:STOP")
    frozen.frozen()
    ground.run(ground.lease(0))
    frozen.signal(signal.SIGCONT)
    frozen.reports()
    assert [(place.partition, place.offset) for place in ground.parked()] == [(0, 1), (1, 1)]
    assert ground.query("select distinct queue is not null from sideline.events") == [(True,)]
    assert ground.query("select home, events from sideline.queues") == [(0, 2)]
    assert ground.query("select partition, parked, aside from sideline.progress order by 1") == [
        (0, 1, 1),
        (1, 1, 0),
    ]


def test_a_key_that_is_aside_in_another_partition_only_holds_nothing_up_here(grounds):
    """A mark of this partition is no reason to wait behind another's queue (K13).

    Nobody in this partition would know of it: the key's next event would overtake.
    """
    ground = grounds(partitions=2, handler="failing", slice_size=1)
    twin, other = ALIKE
    ground.publish([(other, BAD)], partition=0)
    ground.run(ground.lease(0))
    ground.publish([(twin, BAD), (other, "fine"), (twin, "waits"), (other, "too")], partition=1)
    ground.run(ground.lease(1))
    ground.publish([(other, "still"), (twin, "waits too")], partition=1)
    ground.run(ground.lease(1))
    places = [(place.partition, place.offset) for place in ground.parked()]
    assert sorted(places) == [(0, 0), (1, 0), (1, 2), (1, 5)]
    assert [place.offset for place in ground.effects()] == [1, 3, 4]
    assert ground.query("select home, events from sideline.queues order by 1") == [(0, 1), (1, 3)]


def test_a_key_that_rejoined_here_and_stepped_aside_elsewhere_meanwhile(grounds):
    """A slice admitted before that is admitted anew, not parked behind the other's queue (K13)."""
    ground = grounds(partitions=2, handler="failing", slice_size=1)
    ground.publish([("k", BAD)], partition=1)
    ground.run(ground.lease(1))
    ground.publish([("k", "later")], partition=1)
    frozen = ground.start(ground.lease(1), crash_at="after-handler:1:STOP")
    frozen.frozen()
    # What a discarded event leaves behind, and then the same key in the other partition.
    ground.query("delete from sideline.events")
    ground.query("delete from sideline.keys")
    ground.query("delete from sideline.queues")
    ground.query(
        "update sideline.progress set aside = 0, parked = 0, discarded = 1 where partition = 1"
    )
    ground.publish([("k", BAD)], partition=0)
    ground.run(ground.lease(0))
    frozen.signal(signal.SIGCONT)
    frozen.reports()
    assert [(place.partition, place.offset) for place in ground.parked()] == [(0, 0)]
    assert [(place.partition, place.offset) for place in ground.effects()] == [(1, 1)]
    assert ground.query("select home, events from sideline.queues") == [(0, 1)]


def test_a_topic_that_grows_under_a_lease_shares_its_keys_from_the_next_slice_on(grounds):
    """The fence itself says so: no slice is committed in the old belief (K13)."""
    ground = grounds(partitions=2, handler="failing", slice_size=2)
    ground.publish(numbered(6, keys=1), partition=1)
    frozen = ground.start(ground.lease(1), crash_at="after-handler:2:STOP")
    frozen.frozen()
    ground.query("update sideline.progress set shared = true")
    ground.publish([("k0", BAD)], partition=0)
    ground.run(ground.lease(0))
    frozen.signal(signal.SIGCONT)
    frozen.reports()
    assert [(place.partition, place.offset) for place in ground.parked()] == [
        (0, 0),
        *((1, n) for n in range(2, 6)),
    ]


@pytest.mark.parametrize("options", [{"skip": True}, {"block": True}])
def test_followers_wait_whatever_the_policy_is_now(grounds, options):
    """A key that is aside stays aside when the pipeline changes its mind (C1, F4)."""
    ground = grounds(handler="failing")
    story(ground)
    ground.run()
    ground.publish([("zoe", "after"), ("bob", "after")])
    ground.run(pipeline=options)
    ground.check()
    assert [place.offset for place in ground.parked()] == [2, 4, 5]


def test_what_is_skipped_is_counted_by_its_cause(grounds):
    """Skip keeps no event, but says how many failed like what (F5)."""
    ground = grounds(handler="failing", skip=True)
    ground.publish([("a", BAD), ("a", "fine"), ("b", BAD)])
    ground.run()
    assert ground.query("select skipped, parked, last_offset from sideline.causes") == [(2, 0, 2)]
    assert ground.query("select skipped, parked from sideline.progress") == [(2, 0)]


def test_an_event_that_blocks_is_set_aside_by_hand(grounds):
    """Its partition waits for it until somebody says so; then it goes on (F6)."""
    ground = grounds(handler="failing", block=True)
    story(ground)
    state = "select next_offset, stuck_at, attempts > 1 from sideline.progress"
    ground.run_until(
        lambda: ground.query(state) == [(2, 2, True)],
        what="the event that blocks",
        lease=lambda: ground.lease(seconds=2),
    )
    ground.check_prefix()
    ground.query("update sideline.progress set park_at = 2, park_reason = 'known', due_at = null")
    ground.run()
    ground.check()
    assert [place.offset for place in ground.parked()] == [2, 4]
    rows = ground.query(
        "select error, message, attempts > 1 from sideline.events where why = 'failed'"
    )
    assert [(error.rpartition(".")[2], message, many) for error, message, many in rows] == [
        ("ParkedByHand", "known", True)
    ]
    assert ground.query("select park_at, stuck_at from sideline.progress") == [(None, None)]


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"block": True}], ids=str)
def test_a_stop_does_not_wait_for_the_next_attempt(grounds, tmp_path, options):
    """Nor is it one: whoever goes on later finds a single attempt (F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    late = {"retry_first": "10m", "retry_limit": "10m"}
    ground = grounds(handler="waiting", argument=str(flag), **late, **options)
    ground.publish([("zoe", "Zoey"), ("zoe", "wait"), ("zoe", "Zoiee")])
    state = "select next_offset, attempts, stuck_at from sideline.progress"
    worker = ground.start(ground.lease(seconds=120))
    wait_for(lambda: ground.query(state) == [(1, 1, 1)], what="the event that waits")
    ground.query("update sideline.pipelines set stop_requested = true")
    began = time.monotonic()
    (report,) = worker.reports()
    assert time.monotonic() - began < 60, "it waited for its next attempt, or for its lease"
    assert report.failure is None
    assert ground.query(state) == [(1, 1, 1)]
    assert ground.parked() == []
    ground.query("update sideline.pipelines set stop_requested = false")
    ground.query("update sideline.progress set due_at = null")
    flag.unlink()
    ground.run()
    ground.check()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_what_blocks_in_key_is_set_aside_by_hand(grounds, concurrency):
    """Where key= is what fails, the event is parked by its record's own key (F6, F14)."""
    ground = grounds(handler="record", block=True, key="json_id", concurrency=concurrency)
    good = [("zoe", '{"id": 1}'), ("bob", '{"id": 2}')]
    ground.publish([*good, ("zoe", "no json"), *good])
    state = "select next_offset, stuck_at from sideline.progress"
    ground.run_until(
        lambda: ground.query(state) == [(2, 2)],
        what="the event that blocks",
        lease=lambda: ground.lease(seconds=1.5),
    )
    ground.query("update sideline.progress set park_at = 2, park_reason = 'known', due_at = null")
    ground.run()
    ground.check()
    assert [(place.offset, place.key) for place in ground.parked()] == [(2, "zoe"), (3, "zoe")]
    rows = ground.query("select error, message, stage from sideline.events where why = 'failed'")
    assert rows == [("sideline.errors.ParkedByHand", "known", "key")]


def test_calls_are_parked_too(grounds, tmp_path):
    """A handler that acts by itself has its events set aside like any other (F3, F4)."""
    path = tmp_path / "calls"
    ground = grounds(handler="failing_call", argument=str(path), calls=True, slice_size=3)
    story(ground)
    ground.run()
    assert [place.offset for place in ground.calls(path)] == [0, 1, 3]
    assert [place.offset for place in ground.parked()] == [2, 4]


def test_a_missing_column_stops_the_pipeline_and_parks_nothing(grounds):
    """That is the deployment's failure, not the event's (F1)."""
    ground = grounds(handler="record", slice_size=5)
    ground.publish(numbered(10))
    frozen = ground.start(ground.lease(), crash_at="after-handler:2:STOP")
    frozen.frozen()
    ground.query("alter table users drop column value")
    frozen.signal(signal.SIGCONT)
    (report,) = frozen.reports()
    assert report.failure["kind"] == "deployment"
    assert ground.parked() == []
    ground.query("alter table users add column value text")
    ground.run()
    ground.check()
