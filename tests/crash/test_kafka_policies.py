"""From Kafka to Kafka: what Kafka may answer, what people may do, and every policy."""

from __future__ import annotations

import json
import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from sideline import Kafka, Pipeline, Publish
from sideline.engine.worker import Access, Worker
from sideline.errors import RefusedError
from sideline.homes import transactions
from sideline.homes.transactions import home_group
from sideline.ledger import erasing, purging
from sideline.ledger.connection import connect
from sideline.topics.admin import Cluster
from tests.support.again import AgainRun
from tests.support.chain import Chain
from tests.support.ground import numbered
from tests.support.operations import balanced, counts, operate
from tests.support.outputs import read_committed
from tests.support.records import until_over
from tests.support.waiting import patiently, wait_for


@pytest.mark.parametrize("rule", ["answers of Kafka", "commits of Kafka"])
def test_an_unclear_commit_is_decided_by_the_offset(outputs, rule):
    """Committed without an answer, or given up: no record is lost or twice (K19, K20)."""
    ground = outputs(partitions=2, slice_size=10, argument={"bad": ["v13"]})
    ground.publish(numbered(60, keys=10))
    ground.run(without=[rule])
    ground.check()
    balanced(ground.database)
    assert ground.next_offsets() == ground.ends()
    assert len(ground.parked()) == 5


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_flood_guard_stops_what_publishes(outputs, delivery, concurrency):
    """What came before is published, once; a restart parks no more; mended, it goes on (F12)."""
    ground = outputs(
        slice_size=4,
        in_a_row=5,
        delivery=delivery,
        concurrency=concurrency,
        argument={"bad": ["bad"]},
    )
    ground.publish([("a", "fine"), *((f"k{n}", "bad") for n in range(9)), ("a", "last")])
    for _ in range(2):
        (report,) = ground.run()
        assert report.failure["stage"] == "guard"
        assert report.failure["event"] == f"{ground.topic}/0/5"
        assert [place.offset for place in ground.parked()] == [1, 2, 3, 4]
        assert [place.offset for place in ground.effects()] == [0]
        assert ground.next_offsets() == {0: 5}
        assert ground.open() == []
    ground.run(pipeline={"argument": {"to": ground.out}})
    ground.check()
    balanced(ground.database)
    assert ground.next_offsets() == ground.ends()


def test_without_the_word_of_kafka_records_come_twice(outputs):
    """What the test above would see if nobody asked (K19)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(60))
    ground.run(without=["answers of Kafka", "word of Kafka"])
    assert "duplicate" in ground.faults()


def _set_offset(ground, group, offset):
    # Not before the last transaction's own offset is there.
    ground.committed(group)
    consumer = Consumer(
        {"bootstrap.servers": ground.kafka, "group.id": group, "enable.auto.commit": False}
    )
    consumer.commit(offsets=[TopicPartition(ground.topic, 0, offset)], asynchronous=False)
    consumer.close()


def _forget(ground, group):
    """What a broker does with a group of which it has not heard for a week."""
    # Not before the last transaction's own offset is there.
    ground.committed(group)
    admin = AdminClient({"bootstrap.servers": ground.kafka})
    patiently(admin.delete_consumer_groups([group])[group].result)
    wait_for(lambda: ground.committed(group)[0][0] < 0, what="the broker to forget it")


def test_offsets_that_a_tool_has_reset_are_refused_while_a_slice_is_open(outputs):
    """Nothing is guessed, nothing is deleted, and one sentence says why (K19)."""
    ground = outputs(slice_size=10, argument={"bad": ["v3"]})
    ground.publish(numbered(30))
    ground.killed(ground.start(ground.lease(), crash_at="after-kafka-commit:2"))
    kept = ground.open()
    _set_offset(ground, home_group("ground"), 0)
    (report,) = ground.run()
    assert report.failure["error"] == "UnclearError"
    assert "cannot be known" in report.failure["message"]
    assert ground.open() == kept


def test_offsets_that_the_broker_has_forgotten_are_refused_while_a_slice_is_open(outputs):
    """The group is really gone: nothing is guessed, nothing is deleted (K19)."""
    ground = outputs(slice_size=10, argument={"bad": ["v3"]})
    ground.publish(numbered(30))
    ground.killed(ground.start(ground.lease(), crash_at="after-kafka-commit:2"))
    kept, before = ground.open(), ground.accounts()
    _forget(ground, home_group("ground"))
    (report,) = ground.run()
    assert report.failure["error"] == "UnclearError"
    assert "shows no offset" in report.failure["message"]
    assert (ground.open(), ground.accounts()) == (kept, before)


def test_offsets_mean_nothing_while_no_slice_is_open(outputs):
    """The progress row is the truth, and is written to Kafka again (K19)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(20))
    ground.run()
    for group in ("ground", home_group("ground")):
        _set_offset(ground, group, 0)
    ground.publish(numbered(5, start=20))
    ground.run()
    ground.check()
    assert ground.committed("ground")[0][0] == 25


def test_offsets_of_an_idle_partition_are_written_again(outputs):
    """Once a lease, before a broker forgets them; the truth and the public copy (P2, K19)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(20))
    ground.run()
    kept = ground.committed()
    _forget(ground, home_group("ground"))
    _forget(ground, "ground")
    # Without a bound there is nothing to do, and no end of it but time.
    ground.run_until(
        lambda: ground.committed() == kept,
        what="offsets that were written again",
        lease=lambda: ground.lease(bounded=False, seconds=5.0),
    )
    assert ground.committed("ground")[0][0] == 20
    ground.check()


def test_a_ledger_from_a_backup_is_refused(outputs):
    """It does not know what was published since: it would publish it again (K19)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(20))
    ground.run()
    ground.query(
        "update sideline.progress set next_offset = 10, consumed = 10, applied = 10,"
        " slice_number = 1, applied_number = 1"
    )
    (report,) = ground.run()
    assert "backup" in report.failure["message"]


def _work(ground, act, **options):
    """One lease in this process, by a handler of the test's own."""
    pipeline = Pipeline("ground", ground.topic, sink=Kafka(), **options)
    pipeline.handler(act)
    worker = Worker(pipeline, Access(ground.database, _access(ground)))
    report = worker.work(ground.lease(), 0)
    worker.close()
    assert report.failure is None


def _access(ground):
    return {"bootstrap.servers": ground.kafka}


class Telling(Producer):
    """A producer that says what it is asked to do."""

    def __init__(self, settings):
        self.steps.append(settings["transaction.timeout.ms"])
        super().__init__(settings)

    def begin_transaction(self):
        self.steps.append("begin")
        super().begin_transaction()

    def send_offsets_to_transaction(self, *args):
        self.steps.append("offsets")
        super().send_offsets_to_transaction(*args)

    def commit_transaction(self, *args):
        super().commit_transaction(*args)
        self.steps.append("commit")


def test_no_handler_runs_inside_a_transaction(outputs, monkeypatch):
    """Only Kafka itself is waited for in there, and not for long (P2)."""
    ground = outputs()
    ground.publish(numbered(4))
    steps = Telling.steps = []
    monkeypatch.setattr(transactions, "Producer", Telling)

    def act(event):
        steps.append("handler")
        return Publish(ground.out, event.value, event.key)

    _work(ground, act, slice_size=2)
    slice_ = ["begin", "offsets", "offsets", "commit"]
    first = ["handler", "handler", 20_000, *slice_, *slice_]
    assert steps == [*first, "handler", "handler", *slice_]
    longest = 1000 * (transactions.COMMIT_SECONDS + transactions.ANSWER_SECONDS)
    assert transactions.PRODUCER["message.timeout.ms"] < steps[2] < longest


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_outputs_are_as_the_handler_says(outputs):
    """Partition, time and headers of a record, and what its event came with (P2, P3)."""
    ground = outputs(out_partitions=3)
    producer = Producer(_access(ground))
    came = {"correlation-id": b"story", "traceparent": TRACE.encode(), "message-id": b"m-1"}
    for number in range(2):
        producer.produce(ground.topic, b"v%d" % number, b"k", headers=list(came.items()))
    assert producer.flush(30) == 0

    def act(event):
        own = {"kind": "copy", "correlation-id": None} if event.offset else {"kind": "copy"}
        return Publish(ground.out, event.value, b"\xff", own, partition=2, timestamp=1_000)

    _work(ground, act)
    # A broker says that a transaction is over before its readers may see it.
    first, second = wait_for(
        lambda: read_committed(ground.kafka, ground.out, 2), what="records to be seen"
    )
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"\xff", b"v0", 1_000)
    own = {"kind": b"copy", "causation-id": b"m-1", "traceparent": TRACE.encode()}
    assert dict(first.headers()) == {
        **own,
        "correlation-id": b"story",
        "message-id": f"ground/{ground.topic}/0/0/0".encode(),
    }
    assert dict(second.headers()) == {**own, "message-id": f"ground/{ground.topic}/0/1/0".encode()}


def test_aborted_transactions_of_the_input_are_not_seen(outputs, kafka):
    """What a producer took back is no event; progress passes its place (P2)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(5))
    other = Producer({"bootstrap.servers": kafka, "transactional.id": f"t-{ground.topic}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(ground.topic, b"taken back", b"k1", partition=0)
    other.flush(30)
    other.abort_transaction(30)
    ground.publish(numbered(5, start=5))
    until_over(kafka, ground.topic)
    ground.run()
    ground.check()
    assert len(ground.effects()) == 10


def test_at_least_once_publishes_before_it_says_so(outputs):
    """Killed in between, a slice is published again; nothing is lost (C2)."""
    ground = outputs(slice_size=10, delivery="at-least-once", argument={"bad": ["v14"]})
    ground.publish(numbered(30, keys=10))
    ground.killed(ground.start(ground.lease(), crash_at="between-effects-and-progress:2"))
    ground.run()
    assert {place.offset for place in ground.effects()} == set(range(30)) - {14, 24}
    assert len(ground.effects()) == 28 + 9
    ground.run(pipeline={"argument": {"to": ground.out}})
    operate(ground.database, "ground")
    ground.run(pipeline={"argument": {"to": ground.out}})
    balanced(ground.database)
    assert {place.offset for place in ground.effects()} == set(range(30))


@pytest.mark.parametrize(
    ("point", "order"),
    [
        ("after-kafka-commit:2", [(0, 0), (1, 0)]),
        # Dropped and done again: order across partitions is the order of commits.
        ("after-pending", [(1, 0), (0, 0)]),
    ],
)
def test_a_key_in_two_partitions_waits_in_both(outputs, point, order):
    """A slice of the other partition that is not applied yet is a tail already (K13, K21)."""
    ground = outputs(partitions=2, slice_size=10, key="json_id", argument={"bad": ['{"id": 1}']})
    bad, fine = json.dumps({"id": 1}), json.dumps({"id": 1, "then": 2})
    ground.publish([("k", bad)], partition=0)
    ground.killed(ground.start(ground.lease(0), crash_at=point))
    ground.publish([("j", fine)], partition=1)
    ground.run(ground.lease(1))
    assert ground.effects() == []
    ground.run(ground.lease(0))
    balanced(ground.database)
    assert [(place.partition, place.offset) for place in ground.parked()] == order
    assert not ground.open()


def test_a_queue_joins_another_while_its_replay_is_open(outputs, tmp_path):
    """What Kafka has of a replay is taken out where it waits by then, nothing else (K15, K19)."""
    mended = tmp_path / "mended"
    bad, later = json.dumps({"id": "d"}), json.dumps({"id": "d", "then": 2})
    argument = {"bad": [bad], "mended": str(mended)}
    ground = outputs(partitions=2, slice_size=10, key="json_id", argument=argument)
    ground.publish([("j", "no json")], partition=1)
    ground.run(ground.lease(1))
    ground.publish([("k", bad)], partition=0)
    ground.run(ground.lease(0))
    mended.touch()
    operation = operate(ground.database, "ground", keys=["d"])
    ground.killed(ground.start(ground.lease(0), crash_at="after-kafka-commit"))
    (_, _, opened), _ = ground.open()
    assert opened["replay"]
    # Damaged or not, this one is of both: what waits for j and what waits for d is one queue now.
    ground.publish([("j", later)], partition=1)
    ground.run_until(
        lambda: ground.query("select home, events from sideline.queues") == [(1, 3)],
        what="one queue",
        lease=lambda: ground.lease(1, seconds=3.0),
    )
    ground.run(ground.lease(0))
    balanced(ground.database)
    assert not ground.open()
    assert [(place.partition, place.offset) for place in ground.effects()] == [(0, 0)]
    assert [(place.partition, place.offset) for place in ground.parked()] == [(1, 0), (1, 1)]
    operate(ground.database, "ground")
    ground.run(pipeline={"key": "mended_id"})
    balanced(ground.database)
    assert counts(ground.database, operation)[0] == "done"
    assert ground.query("select sum(aside) from sideline.progress") == [(0,)]
    assert sorted((place.partition, place.offset) for place in ground.effects()) == [
        (0, 0),
        (1, 0),
        (1, 1),
    ]


STORY = [("a", "fine"), ("b", "heals:1"), ("c", "never"), ("d", "heals:9"), ("e", "fine")]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("after-pending:2", marks=pytest.mark.long),
        pytest.param("before-kafka-commit:3", marks=pytest.mark.long),
        "after-kafka-commit:2",
    ],
)
def test_retry_topics_through_deaths(chained, point):
    """Copies leave in the slice's own transaction, and each has one turn (F8, K22)."""
    chain = chained(delays=["100ms", "100ms"], slice_size=3)
    chain.ground.publish(STORY)
    for _ in range(2):
        chain.ground.start(chain.lease(), crash_at=point).end()
    chain.settle()
    chain.check(dead={2, 3})
    assert not chain.ground.open()
    assert chain.ground.query("select count(*) from sideline.outbox") == [(0,)]


def test_a_copy_that_comes_before_its_row_waits(chained):
    """Its partition waits until the slice that sent it is applied (K22)."""
    chain = chained(delays=["50ms"], slice_size=10)
    chain.ground.publish(STORY)
    # The first transaction only says where the partition begins.
    chain.ground.killed(chain.ground.start(chain.lease(), crash_at="after-kafka-commit:2"))
    chain.until_all_due()
    lease = chain.lease()
    retry_only = tuple(share for share in lease.shares if share.delay_ms is not None)
    assert retry_only[0].bound > 0
    short = type(lease)(lease.pipeline, lease.epoch, lease.round, retry_only, time.time() + 1.0)
    chain.ground.run(short)
    assert chain.ground.query(
        "select next_offset from sideline.progress where topic = %s", chain.retries[0]
    ) == [(0,)]
    chain.settle()
    chain.check(dead={2, 3})


@pytest.fixture
def stashing(outputs, _admin, tmp_path):
    """A pipeline that publishes, and whose parked events are stashed, until a file is there."""
    mended = tmp_path / "mended"
    ground = outputs(slice_size=5, stash="topic", argument={"bad": ["v1"], "mended": str(mended)})
    chain = Chain(ground, _admin, tmp_path)
    ground.stash, ground.mended = f"{ground.topic}.ground.stash", mended
    chain.make(ground.stash)
    yield ground
    chain.close()


def test_dead_letters_leave_with_the_slice(chained):
    """Their copies are in the slice's transaction, not in the outbox (F7)."""
    chain = chained(dead_letter=2, slice_size=3)
    chain.ground.publish(STORY)
    chain.ground.killed(chain.ground.start(chain.lease(), crash_at="after-kafka-commit:2"))
    chain.settle()
    chain.check(dead={2, 3})


def test_stashed_events_leave_with_the_slice_and_come_back(stashing):
    """Their bytes are in the stash topic alone, put there by the slice's transaction (F13, K25)."""
    ground = stashing
    ground.publish(numbered(6, keys=2))
    ground.run()
    assert len(read_committed(ground.kafka, ground.stash, 0)) == 3
    assert ground.query("select distinct held_in, value from sideline.events") == [("stash", None)]
    ground.mended.touch()
    operate(ground.database, "ground")
    ground.run()
    ground.check()
    assert ground.parked() == []


def test_a_stash_whose_slice_is_open(stashing):
    """Its bytes are in Kafka and its rows are not applied: they wait, and come back (K21, K25)."""
    ground = stashing
    ground.query(
        "update sideline.pipelines set stashes = jsonb_build_object(%s::text, %s::text)",
        ground.topic,
        ground.stash,
    )
    ground.publish(numbered(5, keys=2))
    ground.killed(ground.start(ground.lease(), crash_at="after-kafka-commit:2"))
    assert len(read_committed(ground.kafka, ground.stash, 0)) == 2
    assert [row[2] for row in ground.open()[1:]] == ["pending", "pending"]
    with connect(ground.database, role="test") as connection:
        # Without its bytes it could not be applied once it is known that Kafka has the slice.
        with pytest.raises(RefusedError, match="2 events of that key wait"):
            erasing.erase(connection, "ground", b"k1", actor="me", reason="because")
        plan = purging.look(connection, purging.Chosen("ground"), Cluster(_access(ground)))
    assert (plan.topics, plan.open) == ({}, 2)
    ground.run()
    ground.check()
    balanced(ground.database)
    assert len(ground.parked()) == 2
    assert ground.query("select distinct held_in, value from sideline.events") == [("stash", None)]
    ground.mended.touch()
    operate(ground.database, "ground")
    ground.run()
    ground.check()
    assert ground.parked() == []
    assert len(ground.effects()) == 5


def test_what_is_skipped_is_counted_once(outputs):
    """Killed with a slice open, dropped, done again: the books balance all the while (F5, K18)."""
    ground = outputs(slice_size=10, skip=True, argument={"bad": ["v3", "v14"]})
    ground.publish(numbered(20))
    for point in ("after-pending", "before-kafka-commit:2", "after-kafka-commit"):
        ground.killed(ground.start(ground.lease(), crash_at=point))
        balanced(ground.database)
    ground.run()
    balanced(ground.database)
    assert ground.query("select consumed, applied, skipped from sideline.progress") == [(20, 18, 2)]
    assert len(ground.effects()) == 18


def test_a_range_is_published_again(outputs):
    """A reprocess publishes each event once more, with the ids that its records had (R5)."""
    ground = outputs(slice_size=10)
    ground.publish(numbered(20))
    ground.run()
    before = {dict(message.headers())["message-id"] for message in ground.messages()}
    again = AgainRun(ground)
    ground.killed(again.start(crash_at="after-kafka-commit:1"))
    again.run()
    places = ground.effects()
    assert len(places) == 40
    assert set(places) == set(ground.produced)
    assert {dict(message.headers())["message-id"] for message in ground.messages()} == before
