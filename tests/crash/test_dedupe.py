"""A message that a producer sent twice is applied once: on real rows, and through crashes (C4)."""

from __future__ import annotations

import random
import signal

import psycopg
import pytest

from sideline.dedupe import digest
from sideline.ledger import cleaning
from sideline.retention import Retention
from tests.support.again import AgainRun
from tests.support.dedupe_walk import Walk, duplicates, offsets, stored
from tests.support.operations import balanced, operate
from tests.support.waiting import wait_for

# In every kind of pipeline that writes rows.
KINDS = {
    "effects": {"handler": "picky", "argument": "handler"},
    "side by side": {"handler": "picky", "argument": "handler", "concurrency": 3},
    "transaction": {"handler": "picky", "argument": "transaction"},
    "refused rows": {"handler": "picky", "argument": "database"},
    "unfolded": {"handler": "picky", "argument": "handler", "fold": False},
    "at least once": {
        "handler": "picky",
        "argument": "handler",
        "delivery": "at-least-once",
    },
}
# Slices that end before, between and behind the events of a test.
CASES = [
    *[("effects", size) for size in (1, 2, 10)],
    *[("side by side", 3), ("transaction", 1), ("transaction", 10), ("refused rows", 2)],
    *[("refused rows", 10), ("unfolded", 10), ("at least once", 3)],
]
GRACE_SECONDS = 2.5
FIXED = {"handler": "record"}
POINTS = (
    "after-handler",
    "before-claim",
    "after-claim",
    "before-first-write",
    "between-write-and-commit",
    "after-commit",
)
REPLAY_POINTS = ("replay-written", "replay-before-commit")


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_message_sent_twice_is_applied_once(grounds, kind, size):
    """In one slice, in the next one, and in another lease; what has no id always is (C4)."""
    ground = grounds(dedupe="word", slice_size=size, **KINDS[kind])
    ground.publish([("a", "m1 x"), ("b", "m2 x"), ("a", "m1 x"), ("c", "none"), ("b", "m1 y")])
    ground.run()
    assert offsets(ground) == [(0, 0), (0, 1), (0, 3)]
    ground.publish([("a", "m3 x"), ("c", "none"), ("b", "m2 x"), ("a", "m3 x"), ("d", "m1 z")])
    ground.run()
    assert offsets(ground) == [(0, 0), (0, 1), (0, 3), (0, 5), (0, 6)]
    assert duplicates(ground) == 5
    assert stored(ground) == {(0, 0), (0, 1), (0, 5)}
    balanced(ground.database)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_parked_event_stores_no_id(grounds, kind, size):
    """Its duplicate waits behind it, or is applied under another key; once in the end (C4, K7)."""
    ground = grounds(dedupe="word", slice_size=size, **KINDS[kind])
    ground.publish([("a", "m1 bad"), ("a", "m1 x"), ("b", "m1 y"), ("a", "m2 x"), ("b", "m2 y")])
    ground.run()
    # Nothing of key a may pass what is parked; key b brings both messages first.
    assert offsets(ground) == [(0, 2), (0, 4)]
    assert [place.offset for place in ground.parked()] == [0, 1, 3]
    assert (duplicates(ground), stored(ground)) == (0, {(0, 2), (0, 4)})
    operate(ground.database, "ground")
    ground.run(pipeline=FIXED if kind != "transaction" else {"handler": "insert"})
    assert ground.parked() == []
    # What is released is judged like everything else: these messages were applied by key b.
    assert offsets(ground) == [(0, 2), (0, 4)]
    assert duplicates(ground) == 3
    balanced(ground.database)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_a_released_event_is_no_duplicate_of_itself(grounds, kind, size):
    """And what waited behind it with the same message is one (C4, R2)."""
    ground = grounds(dedupe="word", slice_size=size, **KINDS[kind])
    ground.publish([("a", "m1 bad"), ("a", "m1 x"), ("a", "m2 x"), ("a", "m2 x")])
    ground.run()
    assert stored(ground) == set()
    operate(ground.database, "ground")
    ground.run(pipeline=FIXED if kind != "transaction" else {"handler": "insert"})
    assert offsets(ground) == [(0, 0), (0, 2)]
    assert stored(ground) == {(0, 0), (0, 2)}
    assert duplicates(ground) == 2
    balanced(ground.database)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_again_gives_its_id_back(grounds, kind):
    """A release that fails leaves nothing that would make its message a duplicate (C4, R3)."""
    ground = grounds(dedupe="word", **KINDS[kind])
    ground.publish([("a", "m1 bad"), ("a", "m2 x")])
    ground.run()
    operate(ground.database, "ground")
    ground.run()
    assert stored(ground) == set()
    assert len(ground.parked()) == 2
    operate(ground.database, "ground")
    ground.run(pipeline=FIXED if kind != "transaction" else {"handler": "insert"})
    assert offsets(ground) == [(0, 0), (0, 1)]
    assert duplicates(ground) == 0
    balanced(ground.database)


@pytest.mark.parametrize("kind", ["effects", "refused rows", "transaction", "side by side"])
def test_a_duplicate_that_would_fail_is_a_duplicate(grounds, kind):
    """It is neither parked, nor does its key step aside (C4, F4)."""
    ground = grounds(dedupe="word", slice_size=10, **KINDS[kind])
    ground.publish([("a", "m1 x"), ("b", "m2 x"), ("a", "m1 bad"), ("a", "m3 x")])
    ground.run()
    ground.publish([("b", "m2 bad"), ("b", "m4 x"), ("a", "m1 bad")])
    ground.run()
    assert ground.parked() == []
    assert offsets(ground) == [(0, 0), (0, 1), (0, 3), (0, 5)]
    assert duplicates(ground) == 3
    balanced(ground.database)


def test_a_duplicate_blocks_nobody(grounds):
    """Under Block() a duplicate whose handler fails passes, an event of its own waits (C4, F6)."""
    ground = grounds(dedupe="word", block=True, handler="picky", argument="handler")
    ground.publish([("a", "m1 x"), ("a", "m1 bad"), ("a", "m2 x")])
    ground.run()
    assert offsets(ground) == [(0, 0), (0, 2)]
    assert duplicates(ground) == 1


@pytest.mark.parametrize("policy", [{"skip": True}, {"block": True}])
def test_other_policies_keep_no_id_of_what_failed(grounds, policy):
    """A skipped or blocked message gets another chance with its duplicate (C4, F5, F6)."""
    ground = grounds(dedupe="word", handler="picky", argument="database", **policy)
    ground.publish([("a", "m1 x"), ("b", "m2 bad")])
    worker = ground.start(ground.lease())
    if "block" in policy:
        stuck = "select stuck_at from sideline.progress"
        wait_for(lambda: ground.query(stuck) == [(1,)], what="the event that blocks")
        assert stored(ground) == {(0, 0)}
        worker.kill()
        return
    worker.reports()
    assert stored(ground) == {(0, 0)}
    ground.publish([("b", "m2 x")])
    ground.run()
    assert offsets(ground) == [(0, 0), (0, 2)]


@pytest.mark.parametrize(
    ("kind", "point", "count"),
    [
        *[("effects", point, 2) for point in POINTS],
        *[(kind, "after-claim", 1) for kind in ("refused rows", "transaction", "side by side")],
        *[(kind, "between-write-and-commit", 2) for kind in ("refused rows", "transaction")],
    ],
)
def test_killed_around_the_claim(grounds, kind, point, count):
    """Whoever dies there leaves no id without its effect, and no effect without its id (K7)."""
    _killed(grounds, kind, point, count)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["effects", "refused rows", "transaction", "side by side"])
def test_killed_around_every_claim(grounds, kind, point, count):
    """The same, everywhere."""
    _killed(grounds, kind, point, count)


def _killed(grounds, kind, point, count):
    ground = grounds(partitions=2, dedupe="word", slice_size=4, **KINDS[kind])
    for partition in (0, 1):
        ground.publish([(f"k{n % 3}", f"m{n // 2} x") for n in range(24)], partition=partition)
    ground.publish([("k0", "m90 bad"), ("k0", "m91 x"), ("k1", "m90 x")], partition=0)
    worker = ground.start(ground.lease(), crash_at=f"{point}:{count}")
    assert worker.end() in {0, -signal.SIGKILL}
    _ids_and_effects_agree(ground)
    ground.run()
    _ids_and_effects_agree(ground)
    words = [row[0].split()[0] for row in ground.query("select value from history")]
    assert sorted(words) == sorted({f"m{n}" for n in range(12)} | {"m90"})
    assert ground.next_offsets() == ground.ends()
    balanced(ground.database)


def _ids_and_effects_agree(ground):
    assert stored(ground) == set(offsets(ground))


def test_two_partitions_bring_the_same_messages_at_once(grounds):
    """In opposite orders, by two workers: each is applied once, and neither waits for ever (K7)."""
    ground = grounds(partitions=2, dedupe="word", slice_size=50)
    count = 400
    ground.publish([(f"k{n}", f"m{n} x") for n in range(count)], partition=0)
    ground.publish([(f"k{n}", f"m{n} x") for n in reversed(range(count))], partition=1)
    first, second = ground.lease(0), ground.lease(1)
    workers = [ground.start(first), ground.start(second)]
    for worker in workers:
        worker.reports()
    words = [row[0] for row in ground.query("select value from history")]
    assert sorted(words) == sorted(f"m{n} x" for n in range(count))
    assert duplicates(ground) == count
    _ids_and_effects_agree(ground)
    balanced(ground.database)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_calls_are_made_once_a_message(grounds, tmp_path, delivery, concurrency):
    """The message is claimed before the call; what fails gives its id back (C4, K7)."""
    if delivery == "at-most-once" and concurrency > 1:
        pytest.skip("at-most-once handles events one by one")
    path = tmp_path / "calls"
    ground = grounds(
        dedupe="word",
        calls=True,
        delivery=delivery,
        concurrency=concurrency,
        handler="picky_call",
        argument=str(path),
        skip=delivery == "at-most-once",
    )
    ground.publish([("a", "m1 x"), ("b", "m2 x"), ("a", "m1 x"), ("c", "m3 bad"), ("b", "m2 x")])
    ground.run()
    ground.publish([("d", "m3 x"), ("a", "m1 x"), ("a", "m4 x"), ("e", "none")])
    ground.run()
    calls = [place.offset for place in ground.calls(path)]
    # Side by side, only the events of one key have an order.
    assert (calls if concurrency == 1 else sorted(calls)) == [0, 1, 5, 7, 8]
    assert duplicates(ground) == 3
    assert stored(ground) == {(0, 0), (0, 1), (0, 5), (0, 7)}
    balanced(ground.database)


@pytest.mark.parametrize("point", ["after-claim-committed", "after-handler", "after-commit"])
def test_a_call_that_was_claimed_is_made_by_the_next_owner(grounds, tmp_path, point):
    """An id without its call is the event's own: whoever comes next calls (C2, C4)."""
    path = tmp_path / "calls"
    ground = grounds(
        dedupe="word",
        calls=True,
        delivery="at-least-once",
        handler="call",
        argument=str(path),
        handler_timeout="1s",
    )
    ground.publish([("a", "m1 x"), ("a", "m1 x"), ("b", "m2 x")])
    ground.killed(ground.start(ground.lease(), crash_at=f"{point}:1"))
    ground.run(grace_seconds=GRACE_SECONDS)
    assert {place.offset for place in ground.calls(path)} == {0, 2}
    assert duplicates(ground) == 1
    balanced(ground.database)


def test_released_calls_ask_first(grounds, tmp_path):
    """What waited and was called meanwhile, under another key, is not called again (C4, R1)."""
    path = tmp_path / "calls"
    ground = grounds(
        dedupe="word",
        calls=True,
        delivery="at-least-once",
        handler="picky_call",
        argument=str(path),
    )
    ground.publish([("a", "m1 bad"), ("a", "m2 x"), ("a", "m3 x"), ("b", "m2 x")])
    ground.run()
    operate(ground.database, "ground")
    ground.run(pipeline={"handler": "call"})
    assert [place.offset for place in ground.calls(path)] == [3, 0, 2]
    assert duplicates(ground) == 1
    assert ground.parked() == []
    balanced(ground.database)


def test_at_most_once_applies_a_message_once(grounds):
    """Ids are stored with the effects, behind the progress (C2, C4)."""
    ground = grounds(dedupe="word", delivery="at-most-once", skip=True, slice_size=3)
    ground.publish([("a", "m1 x"), ("a", "m1 x"), ("b", "m2 x"), ("c", "m1 x"), ("c", "m3 x")])
    ground.run()
    assert offsets(ground) == [(0, 0), (0, 2), (0, 4)]
    assert duplicates(ground) == 2
    balanced(ground.database)


@pytest.mark.parametrize("kind", ["effects", "side by side", "transaction"])
def test_a_function_that_fails_is_its_events_failure(grounds, kind):
    """It is parked with its stage, nonsense too; None and numbers are fine (C4, F3)."""
    options = KINDS[kind] | {"slice_size": 4}
    ground = grounds(dedupe="raising", **options)
    ground.publish(
        [
            *[("a", "raise x"), ("a", "m1 x"), ("b", "m1 x"), ("c", "nothing x")],
            *[("c", "nothing x"), ("d", "number x"), ("d", "number y"), ("e", "nonsense x")],
        ]
    )
    ground.run()
    assert offsets(ground) == [(0, 2), (0, 3), (0, 4), (0, 5)]
    assert [place.offset for place in ground.parked()] == [0, 1, 7]
    errors = ground.query("select error from sideline.events where why = 'failed' order by place")
    assert errors == [("KeyError",), ("TypeError",)]
    assert duplicates(ground) == 1
    operate(ground.database, "ground")
    ground.run(pipeline={"dedupe": "word"})
    assert ground.parked() == []
    balanced(ground.database)


def test_headers_of_any_shape(grounds):
    """Long, not text, missing, null, named twice: the last one counts, as everywhere (C4)."""
    ground = grounds(dedupe="header")
    long = b"x" * 100_000
    uuid = b"01890a5d-ac96-774b-bcce-b302099a8057"
    for headers in (
        [("message-id", long)],
        [("message-id", long)],
        [("message-id", b"\xff\x00")],
        [("message-id", b"\xff\x00")],
        [],
        [],
        [("message-id", None)],
        [("message-id", None)],
        [("message-id", uuid), ("message-id", b"2")],
        [("message-id", b"1"), ("message-id", b"2")],
        [("message-id", uuid)],
        [("other", b""), ("message-id", uuid)],
        [("message-id", uuid.upper())],
        [("message-id", b"")],
        [("message-id", b"")],
    ):
        ground._producer.produce(ground.topic, key=b"k", value=b"v", headers=headers)
    ground._producer.flush()
    ground.run()
    assert [offset for _, offset in offsets(ground)] == [0, 2, 4, 5, 6, 7, 8, 10, 12, 13]
    assert duplicates(ground) == 5
    ((size,),) = ground.query("select max(pg_column_size(id)) from sideline.message_ids")
    assert size == 16
    balanced(ground.database)


def test_ids_go_when_they_are_old(grounds, monkeypatch):
    """As long as the pipeline asked for, in bites; younger ones and other pipelines' stay (C4)."""
    ground = grounds(dedupe="header")
    ground.begin()
    monkeypatch.setattr(cleaning, "IDS_BITE", 40)
    with psycopg.connect(ground.database) as connection:
        connection.execute(
            'insert into sideline.message_ids (id, "offset", stored_at, pipeline, partition,'
            " incarnation, topic) select gen_random_uuid(), n,"
            " now() - case when n <= 100 then '8 days'::interval else '6 days' end,"
            " case when n <= 200 then (select number from sideline.pipelines) else -7 end,"
            " 0, 0, 't' from generate_series(1, 300) as n"
        )
        connection.commit()
        assert cleaning.count(connection, "ground", Retention())[cleaning.IDS] == 100
        assert cleaning.step(connection, "ground", Retention())[cleaning.IDS] == 100
        assert cleaning.step(connection, "ground", Retention())[cleaning.IDS] == 0
    assert ground.query("select count(*) from sideline.message_ids") == [(200,)]


@pytest.mark.parametrize("kind", ["effects", "transaction"])
def test_a_retried_event_is_no_duplicate_of_itself(chains, kind):
    """And if its message came by another event meanwhile, it is one: once in all (C4, F8, K7)."""
    handler = {"effects": "flaky", "transaction": "flaky_tx"}[kind]
    chain = chains(handler=handler, delays=["50ms", "50ms"], dedupe="word", slice_size=5)
    ground = chain.ground
    ground.publish([("a", "heals:1 x"), ("b", "m1 x"), ("a", "never:z x"), ("c", "m1 x")])
    chain.settle()
    assert sorted(place.offset for place in ground.effects()) == [0, 1]
    assert duplicates(ground) == 1
    # What is dead brings no id with it; what healed does.
    ground.publish([("d", "heals:1 x"), ("d", "never:z y")])
    chain.settle()
    assert duplicates(ground) == 2
    assert sorted(place.offset for place in ground.effects()) == [0, 1]
    assert stored(ground) == {(0, 0), (0, 1)}
    chain.check_books()


def test_a_retried_event_whose_message_came_meanwhile(chains):
    """It is settled as a duplicate, and counted where it came from (C4, F8)."""
    chain = chains(delays=["300ms"], dedupe="word")
    ground = chain.ground
    ground.publish([("a", "heals:1 x")])
    chain.run()
    assert chain.states() == [(0, "retrying", 1)]
    with psycopg.connect(ground.database) as connection:
        # As another event would have stored it.
        ((number,),) = connection.execute("select number from sideline.pipelines").fetchall()
        named = digest(b"heals:1").hex()
        connection.execute(
            'insert into sideline.message_ids (id, "offset", pipeline, partition, incarnation,'
            " topic) values (%s, 77, %s, 5, 0, 'elsewhere')",
            (named, number),
        )
    chain.settle()
    assert chain.states() == [(0, "resolved", 1)]
    assert (ground.effects(), duplicates(ground)) == ([], 1)
    chain.check_books()


def test_a_range_applied_again_leaves_duplicates_out(grounds):
    """Originals go through again, duplicates are left out again, and no id is lost (C4, C6, R5)."""
    ground = grounds(dedupe="word", slice_size=3)
    ground.publish([("a", "m1 x"), ("b", "m1 x"), ("a", "m2 x"), ("c", "none"), ("b", "m2 x")])
    ground.run()
    before = stored(ground)
    again = AgainRun(ground)
    again.run()
    assert [place.offset for place in again.effects()] == [0, 2, 3]
    assert stored(ground) == before
    counted = "select sum(duplicate)::int from sideline.progress where pipeline = %s"
    assert ground.query(counted, again.name) == [(2,)]


def _walk(grounds, kind, seed, steps):
    ground = grounds(
        dedupe="word",
        slice_size=random.Random(seed).choice([1, 3, 20]),
        guard_off=True,
        **KINDS[kind],
    )
    in_transaction = ground.options["argument"] == "transaction"
    walk = Walk(
        ground,
        f"{kind} {seed}",
        points=[*POINTS, *REPLAY_POINTS],
        mended={"handler": "insert"} if in_transaction else FIXED,
        claims_first=in_transaction,
    )
    walk.walk(steps)


@pytest.mark.parametrize("kind", ["effects", "refused rows", "transaction", "side by side"])
def test_like_the_model(grounds, kind):
    """Arrive, come twice, park, release, crash: what is applied, stored and waits (C4, K7)."""
    _walk(grounds, kind, seed=1, steps=8)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["effects", "refused rows", "transaction", "side by side"])
def test_like_the_model_for_long(grounds, kind, seed):
    """The same, ten times as long and by ten ways."""
    _walk(grounds, kind, seed=seed, steps=30)
