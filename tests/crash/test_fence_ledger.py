"""The statements of the fence, one by one, on a real PostgreSQL."""

from __future__ import annotations

import uuid
from datetime import timedelta

import psycopg
import pytest

from sideline import Pipeline
from sideline.engine.lease import Partition
from sideline.errors import FencedError
from sideline.ledger import schema
from sideline.ledger.connection import connect
from sideline.ledger.place import Place
from sideline.ledger.sql import queries
from sideline.ledger.store import Claim, Ledger, Move, Parting
from tests.support.waiting import wait_for

PIPELINE = Pipeline("login", topics="users")
P0, P1 = Partition("users", 0), Partition("users", 1)


class Owner:
    """A worker with a connection of its own."""

    def __init__(self, url, *lease, grace_seconds=60.0, worker=None):
        self.connection = connect(url, role="worker login")
        self.claim = Claim("login", lease, uuid.uuid4(), worker or uuid.uuid4())
        self.ledger = Ledger(self.connection, self.claim, grace_seconds=grace_seconds)
        self.pid = self.connection.info.backend_pid
        # As a worker does before its first take.
        self.beat()

    def take(self, *partitions, **how):
        return self.ledger.take(partitions or (P0,), **how)

    def beat(self):
        values = {"worker": self.claim.worker, "pipeline": "login", "host": "here", "pid": 1}
        self.connection.execute(queries()["beat"], values)
        self.connection.commit()

    def advance(self, held, start, end):
        return self.ledger.advance(held, Move(start, end, end - start, end - start))

    def commit(self, held, end):
        held.ctid = self.advance(held, held.next_offset, end)
        self.connection.commit()
        held.next_offset = end


@pytest.fixture
def admin(database):
    """A session of nobody's, for looking and for meddling."""
    with psycopg.connect(database, autocommit=True) as connection:
        schema.migrate(connection)
        place = Place(database, PIPELINE)
        place.hold()
        for partition in (P0, P1):
            place.add(partition.topic, partition.number, "an id", 0)
        place.close()
        yield connection


@pytest.fixture
def owner(database, admin):
    made = []

    def make(*lease, **how):
        made.append(Owner(database, *lease, **how))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


def row(admin, *columns):
    names = ", ".join(columns)
    return admin.execute(f"select {names} from sideline.progress where partition = 0").fetchone()


def lives(admin, pid):
    found = admin.execute("select from pg_stat_activity where pid = %s", [pid]).fetchone()
    return found is not None


def silence(admin):
    """No worker has given a sign of life for a year."""
    admin.execute("update sideline.workers set beat_at = now() - interval '1 year'")


# Taking


@pytest.mark.parametrize("later", [(1, 1, 0), (1, 0, 9), (1, 1), (0, 9, 9)])
def test_a_take_requires_strictly_more(admin, owner, later):
    """A lease that is not higher than the row's never gets a released partition (K1)."""
    first = owner(1, 1, 0)
    assert first.take()
    first.ledger.release([Parting(P0)])
    late = owner(*later)
    assert late.take() == []
    assert late.ledger.not_mine([P0]) == [P0]
    assert row(admin, "lease", "released") == ([1, 1, 0], True)


@pytest.mark.parametrize("higher", [(1, 1, 1), (1, 2, 0), (2, 0, 0)])
def test_a_higher_lease_takes_what_was_released(admin, owner, higher):
    """Attempt, round, epoch: each counts, in that order of weight (K1)."""
    first = owner(1, 1, 0)
    (held,) = first.take()
    first.commit(held, 10)
    first.ledger.release([Parting(P0)])
    second = owner(*higher)
    assert second.ledger.not_mine([P0]) == []
    (held,) = second.take()
    assert held.next_offset == 10
    # The take clears what the release said, or a third one could come at once.
    assert row(admin, "released", "owner") == (False, second.claim.owner)
    assert owner(9, 9, 9).take() == []


def test_a_take_is_each_partitions_own(owner):
    """What is released is taken, what is not is left (K4)."""
    owner(1, 1, 0).take(P1)
    assert [held.partition for held in owner(1, 2, 0).take(P0, P1)] == [P0]


def test_a_take_whose_answer_was_lost_is_repeated(owner):
    """The partition would otherwise be nobody's: taken by a lease that does not know it (K5)."""
    one = owner(1, 1, 0)
    assert one.take()
    (again,) = one.take()
    one.commit(again, 5)
    assert one.ledger.not_mine([P0]) == []


def test_the_backoff_is_handed_over(owner):
    """A successor waits as long as its predecessor would have (K4)."""
    first = owner(1, 1, 0)
    first.take()
    first.ledger.release([Parting(P0, retry_in_seconds=500, attempts=3, trouble="broken")])
    (held,) = owner(1, 2, 0).take()
    assert held.attempts == 3
    assert 400 < held.wait_seconds <= 500


# Owners that are gone, and owners that are not


def test_an_owner_without_a_backend_is_replaced_at_once(admin, owner):
    """Its transaction is over, whatever it was; only a call to the outside may go on (K3)."""
    first = owner(1, 1, 0)
    first.take()
    first.connection.close()
    wait_for(lambda: not lives(admin, first.pid), what="the backend's end")
    second = owner(1, 2, 0)
    assert second.take(replace_dead=False) == []
    assert second.take()


def test_a_backend_of_another_time_is_no_sign_of_the_owner(admin, owner):
    """Process ids come again: the start of the backend tells them apart (K3)."""
    first = owner(1, 1, 0)
    first.take()
    admin.execute("update sideline.progress set backend_start = backend_start - interval '1 s'")
    assert owner(1, 2, 0).take()


def test_an_owner_that_gives_a_sign_of_life_is_left_alone(admin, owner):
    """However long it takes: the sign does not depend on commits (K3)."""
    first = owner(1, 1, 0)
    first.take()
    assert owner(1, 2, 0, grace_seconds=30).take() == []


def test_a_silent_owner_is_replaced_after_the_grace(admin, owner):
    """Frozen outside a transaction: it holds nothing but its name in the row (K3)."""
    first = owner(1, 1, 0)
    (held,) = first.take()
    silence(admin)
    assert owner(1, 2, 0, grace_seconds=0).take()
    with pytest.raises(FencedError):
        first.advance(held, 0, 5)


def test_after_a_restart_of_the_database_the_grace_begins_anew(admin, owner):
    """Nobody could give a sign while it was away (K3)."""
    first = owner(1, 1, 0)
    first.take()
    silence(admin)
    (age,) = admin.execute("select now() - pg_postmaster_start_time()").fetchone()
    longer = (age + timedelta(hours=1)).total_seconds()
    assert owner(1, 2, 0, grace_seconds=longer).take() == []


# A frozen holder of the row


def test_a_frozen_holder_of_the_row_is_terminated(admin, owner):
    """A taker finds the backend by the row's lock, ends it, and takes (K3)."""
    first = owner(1, 1, 0)
    (held,) = first.take()
    first.advance(held, 0, 5)
    assert owner(1, 2, 0).take() == []
    silence(admin)
    second = owner(1, 2, 0, grace_seconds=0)
    assert second.ledger.end_frozen([P0]) == [first.pid]
    (held,) = second.take()
    assert held.next_offset == 0
    with pytest.raises(psycopg.OperationalError):
        first.connection.commit()


def test_a_holder_that_lives_is_not_terminated(admin, owner):
    """A slice may take its time while its worker gives signs of life (K3)."""
    first = owner(1, 1, 0)
    (held,) = first.take()
    first.advance(held, 0, 5)
    old = "select now() - xact_start > interval '1 s' from pg_stat_activity where pid = %s"
    wait_for(lambda: admin.execute(old, [first.pid]).fetchone()[0], what="a long transaction")
    taker = owner(1, 2, 0, grace_seconds=1)
    admin.execute("update sideline.workers set beat_at = now() + interval '1 minute'")
    assert taker.ledger.end_frozen([P0]) == []
    silence(admin)
    assert taker.ledger.end_frozen([P0]) == [first.pid]


def test_no_foreign_backend_is_terminated(database, admin, owner):
    """Somebody else who locked the row is none of our business (K3)."""
    owner(1, 1, 0).take()
    silence(admin)
    with psycopg.connect(database, application_name="psql") as foreign:
        foreign.execute("select from sideline.progress for update")
        taker = owner(1, 2, 0, grace_seconds=0)
        assert taker.take() == []
        assert taker.ledger.end_frozen([P0]) == []
        assert lives(admin, foreign.info.backend_pid)


def test_another_taker_is_not_terminated(admin, owner):
    """It holds the row of a silent worker, but only since a moment ago (K3)."""
    owner(1, 1, 0).take()
    silence(admin)
    busy = owner(1, 2, 0, grace_seconds=0)
    busy.connection.execute("select from sideline.progress for update")
    assert owner(1, 3, 0, grace_seconds=30).ledger.end_frozen([P0]) == []
    assert lives(admin, busy.pid)


# Slices


def test_a_slice_needs_its_lease_and_its_owner(admin, owner):
    """Neither the number nor the name alone opens the fence (K1)."""
    first = owner(1, 1, 0)
    (held,) = first.take()
    for column, value in (("lease", [1, 1, 1]), ("owner", uuid.uuid4())):
        (before,) = row(admin, column)
        admin.execute(f"update sideline.progress set {column} = %s where partition = 0", [value])
        with pytest.raises(FencedError):
            first.advance(held, 0, 5)
        admin.execute(f"update sideline.progress set {column} = %s where partition = 0", [before])
    first.commit(held, 5)


@pytest.mark.parametrize("start", [0, 4, 6, 10])
def test_a_dropped_slice_never_passes_as_a_hole(owner, start):
    """A slice begins exactly where progress stands, however the offsets look (K1)."""
    one = owner(1, 1, 0)
    (held,) = one.take()
    one.commit(held, 5)
    with pytest.raises(FencedError):
        one.advance(held, start, 20)


def test_a_release_by_the_loser_changes_nothing(admin, owner):
    """A release is fenced like everything else (K1)."""
    first = owner(1, 1, 0)
    first.take()
    silence(admin)
    second = owner(1, 2, 0, grace_seconds=0)
    assert second.take()
    first.ledger.release([Parting(P0)])
    assert row(admin, "lease", "released") == ([1, 2, 0], False)


def test_a_new_epoch_fences_partitions_in_backoff(database, admin, owner):
    """An old worker that waits for its due time finds the fence closed (K3)."""
    old = owner(1, 1, 0)
    (held,) = old.take()
    admin.execute("update sideline.progress set due_at = now() + interval '1 hour'")
    place = Place(database, PIPELINE)
    place.hold()
    place.close()
    with pytest.raises(FencedError):
        old.advance(held, 0, 5)
    assert old.ledger.not_mine([P0]) == [P0]
    assert owner(1, 99, 99).take() == []
    assert owner(place.epoch, 1, 0).take()


def test_a_new_epoch_ends_a_frozen_holder(database, admin, owner, monkeypatch):
    """A driver does not wait for ever behind a worker that froze in a transaction (K3)."""
    monkeypatch.setattr("sideline.ledger.place.FENCE_SECONDS", 0.0)
    old = owner(1, 1, 0)
    (held,) = old.take()
    old.advance(held, 0, 5)
    place = Place(database, PIPELINE)
    place.hold()
    place.close()
    assert row(admin, "lease", "next_offset") == ([2], 0)
    assert not lives(admin, old.pid)


# What a COMMIT without an answer came to


def test_the_row_tells_while_it_is_still_ours(owner):
    """Committed or not: the progress row says so (K5)."""
    one = owner(1, 1, 0)
    (held,) = one.take()
    one.advance(held, 0, 5)
    one.connection.commit()
    assert one.ledger.settle(held) == 5
    one.advance(held, 5, 9)
    one.connection.rollback()
    assert one.ledger.settle(held) == 5


def test_the_row_tells_nothing_to_the_loser(admin, owner):
    """Another owner may have moved it: fenced, and nothing more is done (K5)."""
    first = owner(1, 1, 0)
    (held,) = first.take()
    silence(admin)
    second = owner(1, 2, 0, grace_seconds=0)
    (taken,) = second.take()
    second.commit(taken, 5)
    with pytest.raises(FencedError):
        first.ledger.settle(held)


# The price


def test_the_row_is_found_by_its_place(owner, monkeypatch):
    """Slice after slice goes by ctid; the statement by key is not even sent (K6)."""
    one = owner(1, 1, 0)
    (held,) = one.take()
    monkeypatch.setitem(queries(), "fence", "select 1 / 0")
    for end in range(1, 50):
        one.commit(held, end)
    plan = one.connection.execute(
        "explain " + queries()["fence_at"],
        {
            "ctid": held.ctid, "pipeline": "login", "topic": "users", "partition": 0,
            "lease": [1, 1, 0], "owner": one.claim.owner, "start": 0, "end": 0, "consumed": 0,
            "applied": 0, "filtered": 0, "skipped": 0, "unknown": 0, "event_at": None, "parked": 0,
            "aside": 0, "guard": None, "retrying": 0, "dead": 0, "discarded": 0, "copies": 0,
            "duplicate": 0,
        },
    ).fetchall()  # fmt: skip
    one.connection.rollback()
    assert any("Tid Scan" in line for (line,) in plan), plan


def test_a_row_that_moved_is_found_by_its_key(admin, owner):
    """Somebody else's update moves the row, a vacuum its old place; the slice still passes (K6)."""
    one = owner(1, 1, 0)
    (held,) = one.take()
    for end in range(1, 5):
        admin.execute("update sideline.progress set trouble = 'touched'")
        one.commit(held, end)
    assert row(admin, "next_offset", "consumed") == (4, 4)
