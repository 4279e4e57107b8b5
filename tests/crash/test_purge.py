"""Topics that are emptied of what is over, and of nothing else."""

from __future__ import annotations

import json

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from sideline.cli import main
from tests.conftest import _create
from tests.support.operations import operate
from tests.support.outputs import read_committed
from tests.support.waiting import wait_for

# Cleaned as soon as the broker looks: every fifteen seconds.
EAGER = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.0001",
    "delete.retention.ms": "0",
    "max.compaction.lag.ms": "100",
}
CLOSE = (
    "update sideline.events set state = %s, queue = null where state in ('parked', 'dead')"
    ' and "offset" = any(%s)'
)


@pytest.fixture
def made(kafka):
    """Topics of a ground's own, deleted afterwards."""
    admin = AdminClient({"bootstrap.servers": kafka})
    names = []

    def make(name, **config):
        _create(admin, NewTopic(name, 1, 1, config=EAGER | config))
        names.append(name)

    yield make
    for future in admin.delete_topics(names).values() if names else ():
        future.result()


@pytest.fixture
def purge(kafka, database, capsys):
    """Run the command; exit code and JSON."""

    def call(*arguments):
        where = ["--kafka", kafka, "--database", database, "--json"]
        code = main.run(["purge", *arguments, *where])
        told = json.loads(capsys.readouterr().out)
        return code, told["pipelines"][0] if "pipelines" in told else told

    return call


def log_of(kafka, topic):
    """Every committed record of a topic of one partition: key, and whether it has a value."""
    return [
        (message.key().decode(), message.value() is not None)
        for message in read_committed(kafka, topic, 0)
    ]


def stashed(grounds, made):
    """Five events of keys that fail, each in the stash."""
    ground = grounds(handler="failing", stash="topic", guard_off=True)
    ground.stash = f"{ground.topic}.ground.stash"
    made(ground.stash)
    ground.query(
        "update sideline.pipelines set stashes = jsonb_build_object(%s::text, %s::text)",
        ground.topic,
        ground.stash,
    )
    ground.publish([(f"k{number}", "bad") for number in range(5)])
    ground.run()
    ground.check()
    return ground


def ids(ground, *offsets):
    return [f"{ground.topic}/0/{offset}" for offset in offsets]


def day(ground):
    """On which its events were parked: today, unless midnight has passed since."""
    ((found,),) = ground.query(
        "select to_char(min(parked_at) at time zone 'utc', 'YYYY-MM-DD') from sideline.events"
    )
    return found


def test_what_is_over_is_purged_and_what_waits_is_not(grounds, made, kafka, purge):
    """Tombstones for exactly the closed ones, behind their copies; again adds none (R7, K25)."""
    ground = stashed(grounds, made)
    ground.query(CLOSE, "resolved", [0, 1])
    ground.query(CLOSE, "discarded", [3])
    code, told = purge("--day", day(ground))
    assert (code, told["topics"], told["open"], told["tombstones"]) == (0, {ground.stash: 3}, 2, 0)
    assert ground.query("select count(*) from sideline.outbox") == [(0,)]
    code, told = purge("ground", "--before", "0s", "--execute")
    assert (code, told["tombstones"]) == (0, 3)
    # Until an owner sends them, they wait in the outbox of the partition.
    assert ground.query("select value, key from sideline.outbox order by number") == [
        (None, one.encode()) for one in ids(ground, 0, 1, 3)
    ]
    assert purge("ground", "--before", "0s", "--execute")[1]["tombstones"] == 0
    ground.run()
    assert log_of(kafka, ground.stash) == [
        *((one, True) for one in ids(ground, 0, 1, 2, 3, 4)),
        *((one, False) for one in ids(ground, 0, 1, 3)),
    ]
    # What was only there is gone for good, so it cannot be put back.
    gone = ground.query('select "offset" from sideline.events where erased_at is not null')
    assert sorted(gone) == [(0,), (1,), (3,)]
    assert purge("--day", "2020-02-02")[1]["topics"] == {}


def test_compaction_takes_away_what_was_purged_and_nothing_else(grounds, made, kafka, purge):
    """A real compaction by the broker: open records stay, purged ones are gone (R7, K25)."""
    ground = stashed(grounds, made)
    ground.query(CLOSE, "resolved", [0, 1, 3])
    assert purge("--day", day(ground), "--execute")[1]["tombstones"] == 3
    ground.run()

    def compacted():
        # Only closed segments are cleaned, and only what is written closes one.
        ground.publish([("another", "bad")])
        ground.run()
        left = log_of(kafka, ground.stash)
        return {one for one, _ in left}.isdisjoint(ids(ground, 0, 1, 3)) and left

    left = wait_for(compacted, what="compaction", within_seconds=120) or log_of(kafka, ground.stash)
    assert [(one, True) in left for one in ids(ground, 2, 4)] == [True, True]


def test_dead_letters_are_purged_once_they_are_given_up(grounds, made, kafka, purge):
    """A dead event is open until somebody releases or discards it (R7)."""
    ground = grounds(handler="failing", dead_letter=1, independent=True, guard_off=True)
    letters = f"{ground.topic}.ground.dlq"
    made(letters)
    ground.publish([(f"k{number}", "bad") for number in range(3)])
    ground.run()
    ground.query(
        "update sideline.pipelines set dead_letters = jsonb_build_object(%s::text, %s::text)",
        ground.topic,
        letters,
    )
    assert log_of(kafka, letters) == [(one, True) for one in ids(ground, 0, 1, 2)]
    assert purge("--day", day(ground))[1]["open"] == 3
    ground.query(CLOSE, "discarded", [1])
    assert purge("--day", day(ground), "--execute")[1]["tombstones"] == 1
    ground.run()
    assert log_of(kafka, letters)[3:] == [(ids(ground, 1)[0], False)]
    # The ledger has its bytes still: only the copy is gone.
    kept = ground.query('select value, erased_at from sideline.events where "offset" = 1')
    assert kept == [(b"bad", None)]


def test_nothing_is_purged_before_its_copy_is_sent(chains, kafka, made, purge):
    """A chain's last letter leaves from its retry topic, and no tombstone comes before it (K25)."""
    chain = chains(delays=["50ms"])
    ground = chain.ground
    chain.delete(chain.dlq)
    made(chain.dlq)
    ground.query(
        "update sideline.pipelines set dead_letters = jsonb_build_object(%s::text, %s::text)",
        ground.topic,
        chain.dlq,
    )
    ground.query(
        "insert into sideline.retry_topics (pipeline, topic, source, number, delay_ms)"
        " values ('ground', %s, %s, 1, 50)",
        chain.retries[0],
        ground.topic,
    )
    ground.publish([("zoe", "heals:9")])
    chain.run()
    chain.until_all_due()
    # It dies between the letter and its sending; somebody gives the event up meanwhile.
    ground.killed(ground.start(chain.lease(), crash_at="after-commit"))
    assert (chain.states(), chain.unsent()) == ([(0, "dead", 2)], 1)
    ground.query(CLOSE, "discarded", [0])
    code, told = purge("ground", "--before", "0s", "--execute")
    assert (code, told["error"]) == (5, "refused")
    assert "1 record is still to be sent from retry topics" in told["message"]
    assert purge("ground", "--before", "0s")[1]["topics"] == {chain.dlq: 1}
    chain.run()
    assert purge("ground", "--before", "0s", "--execute")[1]["tombstones"] == 1
    chain.run()
    assert log_of(kafka, chain.dlq) == [(*ids(ground, 0), True), (*ids(ground, 0), False)]


def test_a_topic_that_is_not_compacted_is_left_alone(grounds, made, purge):
    """There tombstones would take nothing away."""
    ground = stashed(grounds, lambda name: made(name, **{"cleanup.policy": "delete"}))
    ground.query(CLOSE, "resolved", [0])
    code, told = purge("--day", day(ground), "--execute")
    assert (code, told["tombstones"]) == (0, 0)
    assert "not compacted" in told["kept"][ground.stash]


def test_a_damaged_event_is_tombstoned_at_its_source_only_as_its_keys_last(grounds, kafka, purge):
    """A later event of the key must not be deleted by it; the handler sees it (R7, C7)."""
    ground = grounds(handler="failing", topic={"cleanup_policy": "compact"}, guard_off=True)
    ground.publish([("a", "bad"), ("b", "bad"), ("a", "later"), (None, "bad")][:3])
    ground.run()
    ground.query("delete from sideline.keys")
    ground.query(CLOSE, "discarded", [0, 1, 2])
    ground.query("update sideline.events set state = 'resolved' where \"offset\" = 2")
    ground.query("delete from sideline.queues")
    ground.query("update sideline.progress set aside = 0, aside_version = aside_version + 1")
    _, told = purge("--day", day(ground), "--source")
    reasons = {one["id"]: one["reason"] for one in told["source"]}
    first, second = ids(ground, 0, 1)
    assert reasons == {first: "offset 2 of its key came after it", second: None}
    assert purge("--day", day(ground), "--source", "--execute")[1]["tombstones"] == 1
    ground.run()
    assert log_of(kafka, ground.topic)[3:] == [("b", False)]
    ground.run()
    assert ground.query("select value from users where id = 'b'") == []
    assert purge("--day", day(ground), "--source", "--execute")[1]["tombstones"] == 0


def test_erasing_a_key_takes_its_copies_along(grounds, made, kafka):
    """A person's bytes leave the stash too: the tombstone is in the erasing transaction (K25)."""
    from sideline.ledger import erasing

    ground = stashed(grounds, made)
    ground.query(CLOSE, "discarded", [0, 1])
    with psycopg.connect(ground.database) as connection:
        erasing.erase(connection, "ground", b"k1", actor="me", reason="asked for it")
    ground.run()
    assert log_of(kafka, ground.stash)[5:] == [(ids(ground, 1)[0], False)]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--day", "x"], ["--day", "2026-11-15", "--before", "1d"], ["--before", "soon"]],
)
def test_what_is_to_be_purged_has_to_be_said(purge, arguments):
    """One choice, that can be understood (exit 2)."""
    code, told = purge(*arguments)
    assert (code, told["error"]) == (2, "usage")


def test_a_release_that_nobody_made(grounds, purge):
    """It is not found (exit 4)."""
    grounds(handler="failing")
    code, told = purge("--release", "99")
    assert (code, told["error"]) == (4, "not-found")


def test_what_a_release_resolved_is_purged_by_it(grounds, made, kafka, purge):
    """Only what that operation brought back, not what another one did (R7)."""
    ground = stashed(grounds, made)
    first = operate(ground.database, "ground", keys=["k1", "k2"])
    ground.run(pipeline={"handler": "record"})
    operate(ground.database, "ground", keys=["k3"])
    ground.run(pipeline={"handler": "record"})
    told = purge("--release", str(first), "--execute")[1]
    assert told["tombstones"] == 2
    ground.run(pipeline={"handler": "record"})
    assert log_of(kafka, ground.stash)[5:] == [(one, False) for one in ids(ground, 1, 2)]


def test_dead_letters_that_a_release_brought_back_are_purged_by_it(grounds, made, kafka, purge):
    """Those that it applied, and not those that another one did or that are still dead (R7)."""
    ground = grounds(handler="failing", dead_letter=1, independent=True, guard_off=True)
    letters = f"{ground.topic}.ground.dlq"
    made(letters)
    ground.publish([(f"k{number}", "bad") for number in range(4)])
    ground.run()
    ground.query(
        "update sideline.pipelines set dead_letters = jsonb_build_object(%s::text, %s::text)",
        ground.topic,
        letters,
    )
    first = operate(ground.database, "ground", events=[(0, 1), (0, 2)])
    ground.run(pipeline={"handler": "record"})
    operate(ground.database, "ground", events=[(0, 3)])
    ground.run(pipeline={"handler": "record"})
    assert purge("--release", str(first), "--execute")[1]["tombstones"] == 2
    ground.run(pipeline={"handler": "record"})
    assert log_of(kafka, letters)[4:] == [(one, False) for one in ids(ground, 1, 2)]
    assert purge("--release", str(first), "--execute")[1]["tombstones"] == 0
