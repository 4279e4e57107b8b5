"""Whatever a handler raises, returns or says: it is a failure of its event alone."""

from __future__ import annotations

import json

import pytest

from sideline.causes import MESSAGE_CHARACTERS, TRACEBACK_CHARACTERS
from tests.support.hostile import WAYS
from tests.support.operations import operate
from tests.support.waiting import wait_for

KINDS = {
    "plain": {"handler": "hostile"},
    "transaction": {"handler": "hostile_tx"},
    "threads": {"handler": "hostile", "concurrency": 3},
    "async": {"handler": "hostile_async", "concurrency": 3},
    "derived keys": {"handler": "hostile", "key": "record"},
}
# More than a report may weigh, which passes through Spark and the driver's log.
REPORT_BYTES = 50_000


def published(ground, ways):
    """Each way between two healthy events of its key, and healthy keys all around."""
    ground.publish([(f"k{number}", "fine") for number in range(len(ways))])
    for number, way in enumerate(ways):
        ground.publish([(f"k{number}", way), (f"healthy {number % 3}", f"v{number}")])
    ground.publish([(f"k{number}", "later") for number in range(len(ways))])


@pytest.mark.parametrize("size", [1, 4, 1_000])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_handler_does(grounds, kind, size):
    """It fails, what follows it waits, everything else is applied (F3, F4, F14)."""
    ground = grounds(slice_size=size, guard_off=True, **KINDS[kind])
    ways = list(WAYS)
    published(ground, ways)
    (report,) = ground.run(ground.lease(seconds=120))
    assert report.failure is None
    assert report.trouble is None
    rows = ground.query(
        "select convert_from(value, 'utf8'), why, length(message), length(traceback)"
        " from sideline.events order by place"
    )
    failed = {value for value, why, *_ in rows if why == "failed"}
    assert failed == set(ways)
    assert sum(why == "follows" for _, why, *_ in rows) == len(ways)
    assert all(message <= MESSAGE_CHARACTERS for *_, message, _ in rows if message)
    assert all(trace <= TRACEBACK_CHARACTERS for *_, trace in rows if trace)
    assert ground.next_offsets() == ground.ends()
    ground.check()
    # Of what failed nothing is left, also of what came before the failure.
    parked = {place.offset for place in ground.parked()}
    assert not parked & {number for (number,) in ground.query("select number from history")}
    values = ground.query("select value from users where id like 'k%%'")
    assert {value for (value,) in values} <= {"fine"}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_whatever_key_raises(grounds, concurrency):
    """Live and released, it is its event that fails, by the record's own key (F3, F14, R3)."""
    ground = grounds(handler="hostile", key="hostile", guard_off=True, concurrency=concurrency)
    ways = ["BaseException", "sys.exit", "KeyboardInterrupt", "GeneratorExit", "StopIteration"]
    published(ground, ways)
    (report,) = ground.run(ground.lease(seconds=120))
    assert (report.failure, report.trouble) == (None, None)
    failed = "select convert_from(value, 'utf8'), generation from sideline.events where stage ="
    assert sorted(ground.query(f"{failed} 'key'")) == sorted((way, 0) for way in ways)
    operate(ground.database, "ground")
    (report,) = ground.run(ground.lease(seconds=120))
    assert (report.failure, report.trouble) == (None, None)
    assert sorted(ground.query(f"{failed} 'key'")) == sorted((way, 1) for way in ways)
    ground.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", ["an exception without words", "an exception without a face", "a message of 100 MB"]
)
def test_what_trips_the_guard_may_be_hostile_too(grounds, kind, way):
    """The report that stops the pipeline can be sent and read (F12)."""
    ground = grounds(slice_size=10, in_a_row=2, **KINDS[kind])
    ground.publish([("a", "BaseException"), ("b", way), ("c", "fine")])
    (report,) = ground.run()
    assert report.failure["stage"] == "guard"
    assert report.failure["event"] == f"{ground.topic}/0/1"
    assert len(json.dumps(report.as_dict())) < REPORT_BYTES
    assert [place.offset for place in ground.parked()] == [0]


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}], ids=str)
@pytest.mark.parametrize("value", ["wait", "wait: NUL", "wait: 100 MB"])
def test_a_trouble_that_nobody_can_write_down(grounds, tmp_path, value, options):
    """The event waits, its partition says why as well as it can, and goes on later (F2)."""
    flag = tmp_path / "broken"
    flag.touch()
    ground = grounds(handler="unspeakable_trouble", argument=str(flag), **options)
    ground.publish([("a", "fine"), ("a", value), ("a", "later")])
    state = "select next_offset, stuck_at from sideline.progress"
    (report,) = ground.run_until(
        lambda: ground.query(state) == [(1, 1)],
        what="the event that waits",
        lease=lambda: ground.lease(seconds=5),
    )
    assert report.failure is None
    assert len(json.dumps(report.as_dict())) < REPORT_BYTES
    ((length,),) = ground.query("select length(trouble) from sideline.progress")
    assert 0 < length < REPORT_BYTES
    assert ground.parked() == []
    flag.unlink()
    wait_for(lambda: ground.run() and ground.next_offsets() == ground.ends(), what="the end")
    ground.check()


def test_a_handler_that_closes_the_connection(grounds):
    """Nobody can say what became of its transaction: the pipeline stops, and says why (C3)."""
    ground = grounds(handler="closing", slice_size=10)
    ground.publish([("a", "fine"), ("b", "close"), ("c", "fine")])
    (report,) = ground.run()
    assert "closed" in report.failure["message"]
    assert ground.parked() == []
    ground.check_prefix()


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("how", ["transaction", "raises", "effect", "effect, side by side"])
def test_sql_that_ends_the_transaction(grounds, how, place):
    """Nothing is parked or tried again: the pipeline is refused, and says why (C3)."""
    way, _, beside = how.partition(", ")
    ways = ["commit", "rollback", "commit; begin"]
    ground = grounds(
        partitions=len(ways),
        handler="ending",
        argument=way,
        concurrency=2 if beside else 1,
        slice_size=10,
    )
    for number, sql in enumerate(ways):
        events = [("a", "fine"), ("b", "fine")]
        events.insert({"first": 0, "last": 2}[place], ("c", f"end: {sql}"))
        ground.publish(events, partition=number)
        (report,) = ground.run(ground.lease(number))
        assert report.failure["stage"] == "refused", report.failure
        assert "ended the slice's transaction" in report.failure["message"]
    assert ground.parked() == []
    assert set(ground.next_offsets().values()) == {0}
    # What a COMMIT wrote before it was noticed is there: once, for it was tried once.
    effects = ground.effects()
    assert len(set(effects)) == len(effects)
    assert ways.index("rollback") not in {effect.partition for effect in effects}
