"""A range applied again: exactly once, in order, without what is damaged or waits (R5, C6)."""

from __future__ import annotations

import signal

import pytest

from sideline import accounting
from sideline.errors import RefusedError
from sideline.ledger import runs
from sideline.ledger.connection import connect
from sideline.ledger.place import Place as DriverPlace
from sideline.ledger.runs import Range, Wish
from tests.support import checkers, handlers
from tests.support.again import WHO, AgainRun, damage
from tests.support.ground import numbered

POINTS = (
    "lease-taken",
    "after-handler",
    "before-first-write",
    "between-write-and-commit",
    "after-commit",
    "before-release",
)
BAD = "bad"
VERSIONS = "create table versions (id text primary key, value text, version bigint not null)"
# A row that goes back in time is an error of whoever wrote it.
NEVER_BACK = """
create function never_back() returns trigger language plpgsql as $$
begin
    if new.version < old.version then
        raise exception 'back in time';
    end if;
    return new;
end $$;
create trigger never_back before update on versions
for each row execute function never_back()
"""


def balanced(ground):
    """The books of every pipeline, and of every run, balance."""
    found = accounting.check(ground.database)
    assert [books.differences for books in found if books.differences] == []


def story(ground):
    """Zoey, then Zoë (who fails), then Zoiee; and Bob, all the while."""
    return ground.publish(
        [("zoe", "Zoey"), ("bob", "Bob"), ("zoe", BAD), ("bob", "Bobby"), ("zoe", "Zoiee")]
    )


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_is_killed_goes_on_exactly(grounds, point):
    """SIGKILL at every point: each event takes effect once more, in order (C6, R5, C3)."""
    ground = grounds(partitions=3, slice_size=10)
    ground.publish(numbered(150))
    ground.run()
    run = AgainRun(ground)
    count = 1 if point in {"lease-taken", "before-release"} else 3
    ground.killed(run.start(crash_at=f"{point}:{count}"))
    run.begin()
    run.run()
    assert checkers.faults(ground.produced, run.effects()) == {}
    assert run.progress() == {
        "consumed": 150,
        "applied": 150,
        "filtered": 0,
        "skipped": 0,
        "parked": 0,
    }
    assert run.finish()
    balanced(ground)
    # The pipeline itself stands where it stood, and goes on.
    assert ground.next_offsets() == ground.ends()
    ground.publish(numbered(20, start=150))
    ground.run()
    assert len(run.effects()) == 170


def test_a_part_of_the_topic(grounds):
    """From an offset up to another one, and nothing else (C6)."""
    ground = grounds(slice_size=7)
    ground.publish(numbered(100))
    ground.run()
    run = AgainRun(ground, first=31, beyond=64)
    run.run()
    assert [place.offset for place in run.effects()] == list(range(31, 64))
    assert run.finish()


@pytest.mark.parametrize("include_damaged", [False, True])
def test_imported_dead_events_are_left_out(grounds, include_damaged):
    """What others gave up is damaged, until the pipeline knows better by itself (R5)."""
    ground = grounds(slice_size=5)
    ground.publish(numbered(12))
    ground.run()
    for offset in (3, 5, 8):
        damage(ground, offset, "dead")
    ground.query(
        "update sideline.events set incarnation = -1, imported_from = 'dead/0/' || \"offset\""
        " returning 1"
    )
    # Applied after all, by this pipeline.
    damage(ground, 8, "dead")
    ground.query("update sideline.events set state = 'resolved' where incarnation = 0 returning 1")
    run = AgainRun(ground, include_damaged=include_damaged)
    run.run()
    left_out = set() if include_damaged else {3, 5}
    assert {place.offset for place in run.effects()} == {*range(12)} - left_out
    assert run.progress()["skipped"] == len(left_out)
    assert run.finish()


@pytest.mark.parametrize(("handler", "concurrency"), [("record", 1), ("record", 3), ("insert", 1)])
def test_damaged_events_are_left_out(grounds, handler, concurrency):
    """Dead and discarded ones, on and off slice boundaries; counted, with their cause (R5)."""
    ground = grounds(slice_size=5, handler=handler, concurrency=concurrency)
    ground.publish(numbered(30))
    ground.run()
    for offset, state in ((0, "dead"), (4, "discarded"), (5, "dead"), (17, "discarded")):
        damage(ground, offset, state)
    run = AgainRun(ground)
    run.run()
    damaged = {0, 4, 5, 17}
    assert [place.offset for place in run.effects()] == [n for n in range(30) if n not in damaged]
    assert run.progress()["skipped"] == 4
    rows = ground.query("select error, skipped from sideline.causes where pipeline = %s", run.name)
    assert rows == [("sideline.errors.KnownDamaged", 4)]
    assert run.finish()
    balanced(ground)


def test_damaged_events_are_tried_when_somebody_says_so(grounds):
    """--include-damaged (R5)."""
    ground = grounds(slice_size=5)
    ground.publish(numbered(10))
    ground.run()
    damage(ground, 3, "dead")
    run = AgainRun(ground, include_damaged=True)
    run.run()
    assert [place.offset for place in run.effects()] == list(range(10))


@pytest.mark.parametrize(("size", "concurrency"), [(1, 1), (3, 3), (10, 1)])
def test_a_key_aside_is_left_out_from_its_head_on(grounds, size, concurrency):
    """Zoë waits: Zoey and Bob are applied again, Zoë and Zoiee are not (R5, F4, C1)."""
    ground = grounds(slice_size=size, handler="failing", concurrency=concurrency)
    story(ground)
    ground.run()
    run = AgainRun(ground)
    # The handler is mended: it would take them, in the wrong place.
    run.run(pipeline={"handler": "record"})
    assert [place.offset for place in run.effects()] == [0, 1, 3]
    assert run.finish()
    balanced(ground)
    assert [place.offset for place in ground.parked()] == [2, 4]
    assert ground.query("select value from users where id = 'zoe'") == [("Zoey",)]


def test_a_damaged_event_behind_a_parked_one_is_not_tried(grounds):
    """Not even with --include-damaged: it would overtake the one that waits (C1, R5)."""
    ground = grounds(slice_size=3, handler="failing")
    ground.publish(
        [("zoe", "Zoey"), ("zoe", "early"), ("zoe", BAD), ("bob", "Bob"), ("zoe", "late")]
    )
    ground.run()
    damage(ground, 1, "discarded")
    # Somebody gave up one that waited in the middle.
    ground.query(
        "update sideline.events set state = 'discarded', queue = null where \"offset\" = 4"
    )
    run = AgainRun(ground, include_damaged=True)
    run.run(pipeline={"handler": "record"})
    assert [place.offset for place in run.effects()] == [0, 1, 3]


@pytest.mark.parametrize(
    ("handler", "concurrency"), [("failing", 1), ("failing", 3), ("refused", 1)]
)
def test_what_fails_stops_the_run(grounds, handler, concurrency):
    """Everything before it is applied, nothing is parked; mended, it goes on there (C3, F3)."""
    ground = grounds(slice_size=4, concurrency=concurrency)
    ground.publish([*numbered(10), ("k0", BAD), *numbered(5, start=11)])
    ground.run()
    run = AgainRun(ground)
    report = run.run(pipeline={"handler": handler})
    assert report.failure is not None
    assert report.failure["event"] == f"{ground.topic}/0/10"
    assert [place.offset for place in run.effects()] == list(range(10))
    assert not run.finish()
    assert ground.query("select count(*) from sideline.events") == [(0,)]
    run.run()
    assert [place.offset for place in run.effects()] == list(range(16))
    assert run.finish()
    balanced(ground)


def test_what_fails_can_be_left_out(grounds):
    """--skip-failures: counted by its cause, and nothing else of its key waits."""
    ground = grounds(slice_size=4)
    ground.publish([("k", "a"), ("k", BAD), ("k", "c")])
    ground.run()
    run = AgainRun(ground, skip_failures=True)
    run.run(pipeline={"handler": "failing"})
    assert [place.offset for place in run.effects()] == [0, 2]
    assert run.progress()["skipped"] == 1
    assert run.finish()
    balanced(ground)


def test_inserts_need_a_word(grounds):
    """Without --repeat-effects an Insert is refused when it is seen, and stops the run."""
    ground = grounds(slice_size=4)
    ground.publish(numbered(3))
    ground.run()
    run = AgainRun(ground, repeat_effects=False)
    report = run.run()
    assert "not one of Upsert, Delete" in report.failure["message"]
    assert run.effects() == []


# The pipeline itself meanwhile


def test_the_pipeline_waits_until_the_run_is_over(grounds):
    """Nobody takes its partitions, whoever hands out leases; then it goes on (C1)."""
    ground = grounds(partitions=2, slice_size=10)
    ground.publish(numbered(40))
    ground.run()
    run = AgainRun(ground)
    ground.publish(numbered(40, start=40))
    (report,) = ground.run(ground.lease(seconds=1))
    assert not any(part.taken for part in report.partitions)
    # A new driver changes nothing about it.
    ground.begin()
    (report,) = ground.run(ground.lease(seconds=1))
    assert not any(part.taken for part in report.partitions)
    run.run()
    assert run.finish()
    ground.run()
    assert ground.next_offsets() == ground.ends()
    assert checkers.faults(ground.produced, run.effects()) == {}


def test_without_the_rules_both_would_write(grounds):
    """The checks above can fail: a held partition is taken, a parked event is applied."""
    ground = grounds(slice_size=10, handler="failing")
    story(ground)
    ground.run()
    run = AgainRun(ground)
    ground.publish([("bob", "Robert")])
    (report,) = ground.run(without=["held for a run"])
    assert any(part.taken for part in report.partitions)
    run.run(pipeline={"handler": "record"}, without=["registry"])
    assert [place.offset for place in run.effects()] == [5, 0, 1, 2, 3, 4]


def test_a_run_with_records_to_send_is_not_over(ground):
    """Neither done nor given up before they are: nobody else would send them (K23)."""
    ground.publish(numbered(5))
    ground.run()
    unsent = "update sideline.progress set outbox_last = %s where pipeline = %s"
    ground.query(unsent, 1, "ground")
    with pytest.raises(RefusedError, match="still to be sent"):
        AgainRun(ground)
    ground.query(unsent, 0, "ground")
    run = AgainRun(ground)
    run.run()
    ground.query(unsent, 1, run.name)
    assert not run.finish()
    with pytest.raises(RefusedError, match="still to be sent"):
        run.cancel()
    ground.query(unsent, 0, run.name)
    assert run.finish()


def test_a_partition_that_the_topic_gains_waits_too(grounds):
    """Keys may move there whose older events the run still applies (C1)."""
    ground = grounds(slice_size=10)
    ground.publish(numbered(10))
    ground.run()
    run = AgainRun(ground)
    holder = ground._hold()
    holder.add(ground.topic, 1, "an id", 0)
    holder.close()
    held = "select held_for from sideline.progress where pipeline = 'ground' order by partition"
    assert ground.query(held) == [(run.row.id,), (run.row.id,)]
    run.run()
    assert run.finish()
    assert ground.query(held) == [(None,), (None,)]


def test_a_run_that_is_given_up_writes_nothing_more(grounds):
    """Its frozen worker wakes up after --cancel, and finds itself fenced (C1, K1)."""
    ground = grounds(slice_size=5)
    ground.publish(numbered(30))
    ground.run()
    run = AgainRun(ground)
    worker = run.start(crash_at="after-handler:3:STOP")
    worker.frozen()
    run.cancel()
    done = len(run.effects())
    ground.publish(numbered(10, start=30))
    ground.run()
    worker.signal(signal.SIGCONT)
    (report,) = worker.reports()
    assert report.fenced == [f"{ground.topic}/0"]
    assert len(run.effects()) == done + 10
    balanced(ground)


def test_a_frozen_worker_of_the_pipeline_is_fenced_by_the_run(grounds):
    """Its driver is gone, it wakes up in the middle of the run: it writes nothing (C1, K1)."""
    ground = grounds(slice_size=5)
    ground.publish(numbered(20))
    ground.run()
    ground.publish(numbered(10, start=20))
    worker = ground.start(ground.lease(), crash_at="after-handler:1:STOP")
    worker.frozen()
    run = AgainRun(ground, beyond=20)
    worker.signal(signal.SIGCONT)
    (report,) = worker.reports()
    assert report.fenced == [f"{ground.topic}/0"]
    run.run()
    assert [place.offset for place in run.effects()] == list(range(20))
    assert run.finish()
    ground.begin()
    ground.run()
    assert [place.offset for place in run.effects()] == list(range(30))


def wish(ground, **options):
    return Wish([Range(part, 0, end) for part, end in _ends(ground)], guarded=False, **options)


def _ends(ground):
    from sideline.engine.lease import Partition

    return [(Partition(ground.topic, n), end) for n, end in ground.next_offsets().items()]


def test_a_running_pipeline_is_refused_unless_it_is_paused(grounds, monkeypatch):
    """Order would break: exit 5, and what to do about it (C1)."""
    monkeypatch.setattr(runs, "QUIET_SECONDS", 0.3)
    ground = grounds(slice_size=5)
    ground.publish(numbered(20))
    ground.run()
    pipeline = handlers.build(**ground.options)
    driver = DriverPlace(ground.database, pipeline)
    driver.hold()
    with connect(ground.database, role="test") as connection:
        with pytest.raises(RefusedError, match="is running") as caught:
            runs.begin(connection, pipeline, wish(ground), WHO)
        assert f"sideline pause {pipeline.name}" in str(caught.value.hint)
        ground.query("update sideline.pipelines set paused = true")
        # A worker has not let go yet.
        ground.query("update sideline.progress set released = false")
        with pytest.raises(RefusedError, match="holds its partitions"):
            runs.begin(connection, pipeline, wish(ground), WHO)
        ground.query("update sideline.progress set released = true")
        row = runs.begin(connection, pipeline, wish(ground), WHO)
        with pytest.raises(RefusedError, match="is not over"):
            runs.begin(connection, pipeline, wish(ground), WHO)
    assert row.alone
    assert ground.query(
        "select held_for from sideline.progress where pipeline = %s", pipeline.name
    ) == [(row.id,)]
    driver.close()


def test_beside_a_live_pipeline_older_never_beats_newer(grounds):
    """Guarded by version, both run at once, and no row ever goes back (F10, C6)."""
    ground = grounds(partitions=2, slice_size=5, handler="versioned")
    ground.query(VERSIONS)
    ground.query(NEVER_BACK)
    ground.publish(numbered(100, keys=7))
    ground.run()
    run = AgainRun(ground, guarded=True)
    assert not run.row.alone
    ground.publish(numbered(100, start=100, keys=7))
    slow = run.start(pipeline={"argument": 0.002})
    live = ground.start(ground.lease(), pipeline={"argument": 0.002})
    (report,) = slow.reports()
    assert report.failure is None
    live.reports()
    assert run.finish()
    assert run.progress()["applied"] == 100
    assert ground.next_offsets() == ground.ends()
    last = {place.key: place.offset for place in sorted(ground.produced, key=lambda p: p.offset)}
    assert dict(ground.query("select id, version from versions")) == last
    balanced(ground)


def test_beside_a_live_pipeline_an_unguarded_upsert_stops_the_run(grounds):
    """What was declared and what the handler does are two things (F9, F10)."""
    ground = grounds(slice_size=5, handler="unversioned")
    ground.publish(numbered(5))
    ground.run()
    run = AgainRun(ground, guarded=True)
    report = run.run()
    assert "could let an older event overwrite a newer one" in report.failure["message"]
    assert run.progress()["consumed"] == 0
