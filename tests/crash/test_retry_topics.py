"""A chain of retry topics: the main topic goes on, events come back in time, each at most once."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from datetime import datetime

import pytest
from confluent_kafka import Producer

from sideline.cli import main

DELAYS = ["200ms", "300ms", "400ms"]
POINTS = (
    pytest.param("after-copy-written", marks=pytest.mark.long),
    "after-commit:2",
    "between-send-and-mark",
    "after-settle",
    pytest.param("between-write-and-commit:2", marks=pytest.mark.long),
    pytest.param("between-produce-and-commit:2", marks=pytest.mark.long),
    pytest.param("before-release:2", marks=pytest.mark.long),
)


def story():
    """Fine ones, some that heal after one, two and three retries, and some that never do."""
    return [
        ("a", "fine"),
        ("b", "heals:1"),
        ("c", "never"),
        ("b", "heals:3"),
        ("d", "heals:9"),
        ("a", "heals:2"),
        ("e", "fine"),
    ]


@pytest.mark.parametrize("handler", ["flaky", "flaky_async", "flaky_tx"])
def test_a_chain_of_three_delays(chains, handler):
    """Each event by its own history: tried so often, never early, applied or dead once (F8)."""
    chain = chains(delays=DELAYS, handler=handler)
    chain.ground.publish(story())
    chain.run()
    # The main topic has not waited; what cannot heal went straight to the dead letters.
    assert chain.ground.query(
        "select next_offset, consumed, applied, retrying, dead from sideline.progress"
        " where topic = %s",
        chain.ground.topic,
    ) == [(7, 7, 2, 4, 1)]
    chain.settle()
    chain.check(dead={2, 4})
    assert [len(chain.tries(offset)) for offset in range(7)] == [1, 2, 1, 4, 4, 3, 1]
    for number, topic in enumerate(chain.retries):
        for record in chain.committed(topic):
            told = dict(record.headers())
            assert int(told["sideline-attempt"]) == number + 1
            offset = int(told["sideline-origin-offset"])
            due = record.timestamp()[1] / 1000 + (0.2, 0.3, 0.4)[number]
            assert chain.tries(offset)[number + 1] >= due, "too early"
    letters = {
        int(dict(r.headers())["sideline-origin-offset"]): r for r in chain.committed(chain.dlq)
    }
    told = dict(letters[4].headers())
    assert told["sideline-attempt"] == b"4"
    ((first_ms,),) = chain.ground.query(
        "select (extract(epoch from parked_at) * 1000)::bigint from sideline.events"
        ' where "offset" = 4'
    )
    # Its first failure travels along.
    assert abs(int(told["sideline-first-failure"]) - first_ms) < 5_000
    assert chain.ground.query("select sum(copies) from sideline.progress") == [(9,)]


def test_every_event_of_a_loaded_chain_by_its_history(chains):
    """Tried as often as its word says, never early, in the first lease that began when it was due.

    Of each copy the broker's own time counts (F8).
    """
    rng = random.Random(3)
    words = ["fine"] * 5 + ["never", "heals:1", "heals:2", "heals:3", "heals:4"]
    told = [rng.choice(words) for _ in range(70)]
    chain = chains(delays=DELAYS, slice_size=15, guard_off=True)
    ground = chain.ground
    leases: list[tuple[float, float]] = []

    def lease():
        chain.until_seen()
        began = time.time()
        chain.run()
        leases.append((began, time.time()))

    for start in range(0, 70, 35):
        ground.publish([(f"k{rng.randrange(9)}", word) for word in told[start : start + 35]])
        lease()
    while chain.unsent() or any(state == "retrying" for _, state, _ in chain.states()):
        assert len(leases) < 60, chain.states()
        chain._until_due()
        lease()

    def tries(word):
        return 1 + min(int(word.partition(":")[2] or 0), 3)

    assert [len(chain.tries(place)) for place in range(70)] == [tries(word) for word in told]
    gone = {place for place, word in enumerate(told) if word in {"never", "heals:4"}}
    chain.check(dead=gone)
    # One that died was tried once more than it was retried; one that was applied was not.
    assert chain.states() == [
        (place, "dead" if place in gone else "resolved", tries(word) - (place not in gone))
        for place, word in enumerate(told)
        if word != "fine"
    ]
    for number, (topic, delay) in enumerate(zip(chain.retries, (0.2, 0.3, 0.4), strict=True)):
        copies = chain.committed(topic)
        assert len(copies) == sum(tries(word) > number + 1 for word in told)
        for copy in copies:
            headers = dict(copy.headers())
            assert int(headers["sideline-attempt"]) == number + 1
            due = copy.timestamp()[1] / 1000 + delay
            tried = chain.tries(int(headers["sideline-origin-offset"]))[number + 1]
            assert tried >= due, "too early"
            ended = min((end for began, end in leases if began >= due), default=tried)
            assert tried <= ended, "later than the first lease that began when it was due"


def test_status_says_how_many_wait_where_and_until_when(chains, kafka, capsys):
    """By retry topic, with the first and the last due time; late ones with a hint (F8, S4)."""
    chain = chains(delays=["1h", "2h"], slice_size=1)
    ground = chain.ground
    where = ["status", "ground", "--database", ground.database, "--kafka", kafka]
    ground.publish([("a", "heals:1"), ("b", "heals:1"), ("c", "fine")])
    chain.run()
    ground.query("update sideline.events set due_at = due_at + \"offset\" * interval '1 min'")
    ((first, last),) = ground.query("select min(due_at), max(due_at) from sideline.events")
    topic = chain.retries[0]

    def shown():
        capsys.readouterr()
        assert main.run(where) == 0
        told = capsys.readouterr()
        return " ".join((told.out + told.err).split())

    due = f"{first.astimezone():%F %T}"
    span = f"{due} to {last.astimezone():%F %T}"
    assert f"ground: 2 events wait in {topic}, due {span}" in shown()
    assert main.run([*where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (waiting,) = found["retry_topics"]
    assert (waiting["topic"], waiting["events"]) == (topic, 2)
    assert [datetime.fromisoformat(waiting[name]) for name in ("first_due_at", "last_due_at")] == [
        first,
        last,
    ]
    ground.query('delete from sideline.events where "offset" = 1')
    told = shown()
    assert f"ground: 1 event waits in {topic}, due {due}" in told
    assert "topics resend" not in told
    ground.query("update sideline.events set due_at = now() - interval '1 h'")
    assert "whether copies are lost says `sideline topics resend`" in shown()


@pytest.mark.parametrize("point", POINTS)
def test_a_death_anywhere_in_the_chain(chains, point):
    """Killed between any two steps, again and again (F8, K7, K23, K24)."""
    chain = chains(delays=["100ms", "100ms"], slice_size=3)
    chain.ground.publish(story())
    for _ in range(3):
        worker = chain.ground.start(chain.lease(), crash_at=point)
        worker.end()
    chain.settle()
    # What was tried again after a death may have healed a retry earlier.
    chain.check()


def test_a_second_copy_changes_nothing(chains):
    """Copies of copies, in the same slice and later: the ledger says whose turn it is (K7, K22)."""
    chain = chains(delays=["100ms", "100ms"])
    ground = chain.ground
    ground.publish([("a", "heals:1"), ("b", "heals:2")])
    chain.run()
    producer = Producer({"bootstrap.servers": ground.kafka})

    def repeat(topic, records):
        for record in records:
            producer.produce(topic, key=record.key(), value=b"forged", headers=record.headers())
        producer.flush()

    repeat(chain.retries[0], chain.committed(chain.retries[0]))
    # Not its turn in that topic, and nobody has heard of it.
    repeat(chain.retries[1], chain.committed(chain.retries[0]))
    producer.produce(chain.retries[0], value=b"no headers")
    producer.produce(
        chain.retries[0],
        headers=[
            ("sideline-origin-topic", ground.topic.encode()),
            ("sideline-origin-partition", b"0"),
            ("sideline-origin-offset", b"77"),
            ("sideline-attempt", b"1"),
        ],
    )
    producer.flush()
    chain.settle()
    repeat(chain.retries[0], chain.committed(chain.retries[0]))
    repeat(chain.retries[1], chain.committed(chain.retries[1]))
    chain._until_due()
    for _ in range(3):
        chain.run()
    chain.check(dead=set())
    values = ground.query("select value from history order by number")
    assert values == [("heals:1",), ("heals:2",)], "the bytes are the ledger's"
    assert ground.query("select sum(copies) from sideline.progress") == [(3,)]


def test_a_copy_is_claimed_before_anything_is_staged(chains):
    """Somebody else settled the event while its handler ran: its effects are taken out (K7)."""
    chain = chains(delays=["50ms"])
    ground = chain.ground
    ground.publish([("a", "heals:1"), ("b", "heals:1")])
    chain.run()
    chain.until_all_due()
    worker = ground.start(chain.lease(), crash_at="after-handler:1:STOP")
    worker.frozen()
    with_progress = (
        "with gone as (update sideline.events set state = 'dead' where \"offset\" = 0 returning 1)"
        " update sideline.progress set retrying = retrying - 1, dead = dead + 1 where topic = %s"
    )
    ground.query(with_progress, ground.topic)
    worker.signal(18)
    worker.end()
    chain.settle()
    assert [place.offset for place in ground.effects()] == [1]
    chain.check_books()


def test_what_came_back_is_kept_without_its_bytes(chains):
    """Applied in one slice with one that is given up: each stands where it belongs (K7)."""
    chain = chains(delays=["50ms"])
    ground = chain.ground
    ground.publish([("a", "heals:1"), ("b", "heals:4"), ("c", "heals:1")])
    chain.settle()
    assert chain.states() == [(0, "resolved", 1), (1, "dead", 2), (2, "resolved", 1)]
    assert ground.query('select "offset", state from sideline.events') == [(1, "dead")]
    came_back = ground.query(
        'select "offset", queue, operation, why, generation from sideline.resolved order by 1'
    )
    assert came_back == [(0, None, None, "failed", 0), (2, None, None, "failed", 0)]
    chain.check_books()


def test_a_call_is_its_copys_before_it_is_made(chains):
    """Somebody else settled the event before its handler ran: nobody is called (K7, K12)."""
    chain = chains(delays=["50ms"], calls=True, handler="flaky_call")
    ground = chain.ground
    ground.publish([("a", "heals:1"), ("b", "heals:1")])
    chain.run()
    chain.until_all_due()
    worker = ground.start(chain.lease(), crash_at="copies-found:1:STOP")
    worker.frozen()
    ground.query(
        "with gone as (update sideline.events set state = 'dead' where \"offset\" = 0 returning 1)"
        " update sideline.progress set retrying = retrying - 1, dead = dead + 1 where topic = %s",
        ground.topic,
    )
    worker.signal(18)
    worker.end()
    chain.settle()
    assert [len(chain.tries(offset)) for offset in (0, 1)] == [1, 2]
    assert chain.states() == [(0, "dead", 1), (1, "resolved", 1)]
    chain.check_books()


def test_a_claimed_call_is_made_after_a_death(chains):
    """Killed between claim and call: the same copy claims again, another one does not (K7)."""
    chain = chains(delays=["50ms"], calls=True, handler="flaky_call")
    ground = chain.ground
    ground.publish([("a", "heals:1")])
    chain.run()
    chain.until_all_due()
    ground.killed(ground.start(chain.lease(), crash_at="copies-claimed"))
    assert len(chain.tries(0)) == 1
    # As if a second copy, elsewhere, had claimed it: this one comes too late.
    ((place,),) = ground.query("select copy_offset from sideline.events")
    ground.query("update sideline.events set copy_offset = 77")
    chain.run()
    assert len(chain.tries(0)) == 1
    ground.query("update sideline.events set copy_offset = %s", place)
    ground.query(
        "update sideline.progress set next_offset = %s where topic = %s", place, chain.retries[0]
    )
    chain.settle()
    assert len(chain.tries(0)) == 2
    assert chain.states() == [(0, "resolved", 1)]
    chain.check_books()


def test_copies_are_handled_side_by_side(chains):
    """With concurrency, two events that come back need not wait for each other (F8, K11)."""
    chain = chains(delays=["50ms"], concurrency=2, handler="together")
    chain.ground.publish([("a", "heals:1"), ("b", "heals:1")])
    chain.run()
    # In one slice, though the broker may have stamped them one after the other.
    chain.until_all_due()
    chain.settle()
    chain.check(dead=set())


def test_owners_of_copies_and_of_their_origins_do_not_hurt_each_other(chains):
    """Both change the books of one partition at once: no deadlock, nothing doubled (K7, K16)."""
    chain = chains(delays=["20ms"], slice_size=20)
    ground = chain.ground
    for _ in range(4):
        ground.publish([(f"k{n % 7}", "heals:1" if n % 3 else "fine") for n in range(60)])
        whole = chain.lease()
        ground.round += 1
        origins, copies = (
            dataclasses.replace(
                whole, round=ground.round, shares=tuple(s for s in whole.shares if s.topic in some)
            )
            for some in ({ground.topic}, set(chain.retries))
        )
        for worker in [ground.start(origins), ground.start(copies)]:
            worker.reports()
    chain.settle()
    chain.check(dead=set())
    assert [len(chain.tries(n)) for n in range(240)] == [2 if n % 60 % 3 else 1 for n in range(240)]
    assert ground.query(
        "select deadlocks from pg_stat_database where datname = current_database()"
    ) == [(0,)]


def test_a_shorter_list_of_delays_strands_nothing(chains):
    """Topics of an older policy are read to their end; what fails goes on, or is dead (F8)."""
    chain = chains(delays=DELAYS)
    ground = chain.ground
    ground.publish([("a", "heals:3"), ("b", "heals:2"), ("c", "heals:9")])
    for _ in range(2):
        chain.run()
        chain._until_due()
    ground.options["delays"] = DELAYS[:1]
    chain.settle()
    chain.check()
    ground.options["delays"] = None
    ground.options["handler"] = "flaky"
    chain.settle()
    chain.check_books()


def test_another_policy_leaves_nothing_behind(chains):
    """From retry topics to parking: copies under way are applied, or dead in the ledger (F8)."""
    chain = chains(delays=["100ms"])
    ground = chain.ground
    ground.publish([("a", "heals:1"), ("b", "heals:1")])
    chain.run()
    ground.options["delays"] = None
    chain.settle()
    assert [place.offset for place in ground.effects()] == [0, 1]
    chain.check_books()


def test_retried_in_place_while_postgresql_refuses_the_row(chains):
    """A row that the database refuses is the event's own: straight to the dead letters (F8)."""
    chain = chains(delays=["100ms"], handler="refused", argument=None)
    ground = chain.ground
    ground.publish([("a", "fine"), ("b", "bad"), ("c", "fine")])
    chain.run()
    assert chain.states() == [(1, "dead", 1)]
    assert chain.dead_letters() == [1]
    assert [place.offset for place in ground.effects()] == [0, 2]
    chain.check_books()


@pytest.mark.long
def test_a_chain_under_load_and_random_deaths(chains):
    """Hundreds of events with histories of their own, workers that die anywhere (F8, K7, K24)."""
    rng = random.Random(7)
    chain = chains(delays=DELAYS, slice_size=40, partitions=2, guard_off=True)
    ground = chain.ground
    points = ("after-copy-written", "after-commit", "between-send-and-mark", "after-settle")
    words = ["fine"] * 7 + ["never", "heals:1", "heals:2", "heals:3", "heals:4"]
    for _ in range(12):
        ground.publish([(f"k{rng.randrange(50)}", rng.choice(words)) for _ in range(60)])
        point = f"{rng.choice(points)}:{rng.randrange(1, 5)}"
        ground.start(chain.lease(), crash_at=point).end()
    chain.settle(300)
    rows = ground.query("select partition, \"offset\" from sideline.events where state = 'dead'")
    letters = [
        (
            int(dict(r.headers())["sideline-origin-partition"]),
            int(dict(r.headers())["sideline-origin-offset"]),
        )
        for r in chain.committed(chain.dlq)
    ]
    assert sorted(letters) == sorted(rows)
    effects = sorted((place.partition, place.offset) for place in ground.effects())
    produced = sorted((place.partition, place.offset) for place in ground.produced)
    assert sorted(effects + rows) == produced
    chain.check_books()


def test_the_dead_of_a_chain_come_back(chains, capsys):
    """By the handler, once; who fails again stays dead as the next generation (F8, R1, R3)."""
    chain = chains(delays=["100ms"], handler="failing_all")
    ground = chain.ground
    ground.publish([("k", "one"), ("j", "bad"), (None, "three")])
    chain.settle()
    assert [row[1] for row in chain.states()] == ["dead"] * 3
    letters, ends = chain.dead_letters(), ground.ends()
    command = ["release", "ground", "--all", "--dead", "--execute", "--no-watch"]
    for handler, applied, left in (
        ("failing", [0, 2], [(1, "dead", 1)]),
        ("record", [0, 2, 1], []),
    ):
        assert main.run([*command, "--database", ground.database]) == 0
        capsys.readouterr()
        ground.run(pipeline={"handler": handler})
        assert [place.offset for place in ground.effects()] == applied
        kept = ground.query(
            "select \"offset\", state, generation from sideline.events where state <> 'resolved'"
        )
        assert kept == left
        chain.check_books()
    # Neither another copy nor a record in the topic that others read.
    assert (chain.dead_letters(), ground.ends()) == (letters, ends)
    assert chain.unsent() == 0


def test_words_of_who_came_back_are_erased_with_the_key(chains, capsys):
    """What a cause quotes goes with the key, though the event itself is long applied (R6, S6)."""
    chain = chains(delays=["100ms"])
    ground = chain.ground
    ground.publish([("zoey", "heals:1")])
    chain.settle()
    assert [row[1] for row in chain.states()] == ["resolved"]
    ((message, traceback),) = ground.query("select message, traceback from sideline.causes")
    assert message
    assert traceback
    erase = ["erase", "--pipeline", "ground", "--key", "zoey", "--reason", "request 815", "--json"]
    erase += ["--database", ground.database]
    assert main.run(erase) == 0
    assert json.loads(capsys.readouterr().out)["causes"] == 1
    assert main.run([*erase, "--execute"]) == 0
    quoted = ground.query("select message, traceback, last_key from sideline.causes")
    assert quoted == [("", "", None)]
    chain.check_books()
