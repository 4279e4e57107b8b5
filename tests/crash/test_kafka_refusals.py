"""From Kafka to Kafka: records that the broker does not take, and those of which nobody knows."""

from __future__ import annotations

import dataclasses

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tests.support import checkers
from tests.support.ground import numbered
from tests.support.operations import balanced, counts, operate
from tests.support.waiting import wait_for

# A record without a key is refused there, and so is whatever shares its batch.
COMPACT = {"cleanup_policy": "compact"}
# There it is one that is too old; which one of its batch the broker does not say.
RECENT = {"message_timestamp_before_max_ms": 3_600_000}
REFUSED = [(COMPACT, "keyless"), (RECENT, "old")]
DELIVERIES = ["exactly-once", "at-least-once"]


def _offsets(places):
    return [place.offset for place in places]


def _work_until(ground, lease, question):
    """One worker until the ledger says yes: what it knows of refused records ends with it."""
    # With a bound the lease would end while something waits for its turn.
    shares = tuple(dataclasses.replace(share, bound=None) for share in lease.shares)
    worker = ground.start(dataclasses.replace(lease, shares=shares))
    wait_for(lambda: ground.query(question), what=question, within_seconds=60)
    worker.kill()


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_refused_records_trip_the_flood_guard(outputs, delivery):
    """They are failures of their events, and counted like any other (F12, F3)."""
    ground = outputs(
        slice_size=50,
        in_a_row=5,
        delivery=delivery,
        out_config=COMPACT,
        argument={"keyless": ["keyless"]},
    )
    ground.publish([("a", "fine"), *((f"k{n}", "keyless") for n in range(9)), ("a", "last")])
    (report,) = ground.run(ground.lease(seconds=90))
    assert report.failure["stage"] == "guard"
    assert _offsets(ground.parked()) == [1, 2, 3, 4]
    # At least once, what stood behind them in the slice may be sent already.
    assert {*_offsets(ground.effects())} - ({10} if delivery == "at-least-once" else set()) == {0}
    assert ground.next_offsets() == {0: 5}
    balanced(ground.database)


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize(("config", "word"), REFUSED, ids=["by itself", "by its batch"])
def test_a_refused_record_is_its_events_failure(outputs, delivery, config, word):
    """Its event is parked and its key waits; the others of the slice are published (F3, F4, P2)."""
    ground = outputs(
        slice_size=10, delivery=delivery, out_config=config, argument={word: ["v13", "v17"]}
    )
    ground.publish(numbered(40, keys=10))
    (report,) = ground.run(ground.lease(seconds=90))
    assert report.failure is None
    assert _offsets(ground.parked()) == [13, 17, 23, 27, 33, 37]
    assert sorted({*_offsets(ground.effects())}) == [
        n for n in range(40) if n < 13 or n % 10 not in {3, 7}
    ]
    balanced(ground.database)
    mended = {"argument": {"to": ground.out}}
    operate(ground.database, "ground")
    ground.run(pipeline=mended)
    assert ground.parked() == []
    assert {*_offsets(ground.effects())} == {*range(40)}
    balanced(ground.database)
    if delivery == "exactly-once":
        ground.check()


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_refused_record_of_an_event_that_comes_back(outputs, delivery, tmp_path):
    """The event stays parked with the new reason, and the other keys are applied (R1, P2)."""
    mended = tmp_path / "mended"
    argument = {"bad": ["v3", "v5"], "keyless": ["v3"], "mended": str(mended)}
    ground = outputs(slice_size=10, delivery=delivery, out_config=COMPACT, argument=argument)
    ground.publish(numbered(10, keys=10))
    ground.run()
    assert _offsets(ground.parked()) == [3, 5]
    mended.touch()
    operation = operate(ground.database, "ground", stop_at=1.0)
    done = "select 1 from sideline.operations where state = 'done'"
    _work_until(ground, ground.lease(seconds=90), done)
    assert counts(ground.database, operation)[:3] == ("done", 1, 1)
    assert _offsets(ground.parked()) == [3]
    assert {*_offsets(ground.effects())} == {*range(10)} - {3}
    balanced(ground.database)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_refused_record_of_a_retry_copy_is_given_up(chained, delivery, concurrency):
    """Its event dies by the policy, and its retry topic goes on (F8, P2)."""
    chain = chained(
        delays=["50ms", "50ms"],
        slice_size=5,
        delivery=delivery,
        concurrency=concurrency,
        out_config=COMPACT,
        argument={"keyless": ["heals:1"]},
    )
    chain.ground.publish([("a", "fine"), ("b", "heals:1"), ("c", "heals:2"), ("d", "fine")])
    settled = """
        select 1 where exists (select from sideline.events where state = 'dead')
        and not exists (select from sideline.events where state in ('retrying', 'pending'))
    """
    _work_until(chain.ground, chain.lease(seconds_=90), settled)
    chain.settle()
    if delivery == "exactly-once":
        chain.check(dead={1})
    assert chain.dead_letters() == [1]
    assert {*_offsets(chain.ground.effects())} == {0, 2, 3}
    chain.check_books()


def test_under_block_a_refused_record_is_sent_again(outputs, kafka):
    """It waits with the reason; once its topic takes it, it is published, once (F6, P2)."""
    ground = outputs(block=True, out_config=COMPACT, argument={"keyless": ["v1"]})
    ground.publish(numbered(3))
    worker = ground.start(ground.lease(seconds=60))
    why = "select trouble from sideline.progress where trouble like 'Refused%'"
    wait_for(lambda: ground.query(why), what="the reason in the ledger")
    _reconfigure(kafka, ground.out, "cleanup.policy", "delete")
    worker.reports()
    assert sorted(_offsets(ground.effects())) == [0, 1, 2]
    balanced(ground.database)


def _reconfigure(kafka, topic, name, value):
    admin = AdminClient({"bootstrap.servers": kafka})
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result()


def test_at_most_once_nothing_is_sent_again(outputs):
    """Of a slice that Kafka took in part nobody knows: it stays unknown, and none is twice (C2)."""
    ground = outputs(
        slice_size=10,
        delivery="at-most-once",
        skip=True,
        out_partitions=3,
        out_config=COMPACT,
        argument={"keyless": ["v13"]},
    )
    ground.publish(numbered(40, keys=10))
    ground.run()
    assert checkers.duplicate(ground.effects()) == []
    row = ground.accounts()[ground.topic, 0]
    assert (row.consumed, row.applied, row.unknown) == (40, 30, 10)
    balanced(ground.database)


def test_at_most_once_what_was_sent_is_not_sent_again(outputs):
    """PostgreSQL refuses to note that a slice was sent: it stays unknown, and once (C2)."""
    ground = outputs(slice_size=10, delivery="at-most-once", skip=True)
    ground.query(
        """
        create function refuse() returns trigger language plpgsql as $$
        begin raise 'no room' using errcode = 'disk_full'; end $$;
        create constraint trigger refuse after update on sideline.progress
        deferrable initially deferred for each row
        when (new.applied > old.applied and old.next_offset = 20)
        execute function refuse();
        """
    )
    ground.publish(numbered(40, keys=10))
    ground.run()
    assert checkers.duplicate(ground.effects()) == []
    assert len(ground.effects()) == 40
    row = ground.accounts()[ground.topic, 0]
    assert (row.consumed, row.applied, row.unknown) == (40, 30, 10)
    balanced(ground.database)
