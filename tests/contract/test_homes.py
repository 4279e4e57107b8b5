"""What every home promises about progress, whatever its effects are."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from sideline import Calls, Event, Insert, Pipeline, Skip
from sideline.engine.lease import Partition
from sideline.errors import FencedError
from sideline.homes.calls import CallsHome
from sideline.homes.postgres import PostgresHome
from sideline.homes.writer import Writer
from sideline.ledger import schema
from sideline.ledger.connection import connect
from sideline.ledger.place import Place
from sideline.ledger.store import Claim, Ledger, Parting
from sideline.slices import Handled
from tests.support.checkers import Accounts

P0 = Partition("users", 0)
HOMES = {
    "postgres": {},
    "postgres, at least once": {"delivery": "at-least-once"},
    "calls": {"sink": Calls()},
}
UNSURE = {
    "postgres": {"delivery": "at-most-once", "on_failure": Skip()},
    "calls": {"sink": Calls(), "delivery": "at-most-once", "on_failure": Skip()},
}


class Bench:
    """A home on a real database, for one owner of one partition."""

    def __init__(self, database, options):
        self.database = database
        self.pipeline = Pipeline("login", topics="users", **options)
        with psycopg.connect(database) as connection:
            schema.migrate(connection)
            connection.execute("create table users (number bigint)")
        place = Place(database, self.pipeline)
        place.hold()
        place.add("users", 0, "an id", 100)
        place.close()
        self.connections = []
        self.home, self.ledger, self.held = self.own(1)

    @property
    def has_rows(self):
        return not isinstance(self.pipeline.sink, Calls)

    def own(self, number):
        connection = connect(self.database, role="worker login")
        self.connections.append(connection)
        claim = Claim("login", (1, number, 0), uuid.uuid4(), uuid.uuid4())
        ledger = Ledger(connection, claim, grace_seconds=0)
        (held,) = ledger.take([P0])
        if self.has_rows:
            home = PostgresHome(self.pipeline, connection, Writer(connection), ledger)
        else:
            home = CallsHome(connection, ledger)
        return home, ledger, held

    def handled(self, start, offsets, end=None):
        """Events at these offsets; every third one has no effect."""
        events = [Event("users", 0, offset, 1_000 + offset, b"k", b"v") for offset in offsets]
        effects = [
            (Insert("users", {"number": event.offset}),) if event.offset % 3 else ()
            for event in events
        ]
        if not self.has_rows:
            effects = [() for _ in events]
        return Handled(start, end or offsets[-1] + 1, events, effects)

    def query(self, statement):
        with psycopg.connect(self.database) as connection:
            return connection.execute(statement).fetchall()

    def accounts(self):
        columns = ", ".join(Accounts._fields)
        (row,) = self.query(f"select {columns} from sideline.progress")
        return Accounts(*row)

    def rows(self):
        return [number for (number,) in self.query("select number from users order by number")]


@pytest.fixture(params=HOMES)
def bench(database, request):
    made = Bench(database, HOMES[request.param])
    yield made
    for connection in made.connections:
        connection.close()


@pytest.fixture(params=UNSURE)
def unsure(database, request):
    made = Bench(database, UNSURE[request.param])
    yield made
    for connection in made.connections:
        connection.close()


def test_a_slice_moves_progress_and_counts(bench):
    """Progress stands behind the slice, and every event has one outcome (C3)."""
    outcome = bench.home.commit(bench.held, bench.handled(100, [101, 102, 103], end=110))
    assert outcome.end == bench.held.next_offset == 110
    row = bench.accounts()
    assert (row.next_offset, row.consumed) == (110, 3)
    assert row.applied + row.filtered == 3
    if bench.has_rows:
        assert (row.applied, row.filtered) == (2, 1)
        assert bench.rows() == [101, 103]


def test_slices_follow_each_other(bench):
    """What a commit returned is where the next one begins (K6)."""
    bench.home.commit(bench.held, bench.handled(100, [100]))
    bench.home.commit(bench.held, bench.handled(101, [104], end=120))
    assert bench.accounts().next_offset == 120
    assert bench.accounts().consumed == 2


def test_a_slice_of_holes_moves_progress_alone(bench):
    """Nothing was there to be handled, and nothing is counted."""
    bench.home.commit(bench.held, Handled(100, 150, [], []))
    assert bench.accounts() == Accounts(150, 0)


def test_the_loser_writes_nothing(bench):
    """Another owner took the partition: neither effects nor progress (K1, K3)."""
    _, _, held = bench.own(2)
    before = bench.accounts()
    with pytest.raises(FencedError):
        bench.home.commit(bench.held, bench.handled(100, [100, 101]))
    assert bench.accounts() == before
    assert bench.rows() == []
    assert bench.held.next_offset == held.next_offset == 100


def test_a_released_partition_takes_no_slice(bench):
    """Release is the last act of a lease (K1)."""
    bench.ledger.release([Parting(P0)])
    with pytest.raises(FencedError):
        bench.home.commit(bench.held, bench.handled(100, [100, 101]))
    assert bench.rows() == []


def test_a_slice_that_does_not_begin_at_progress_is_refused(bench):
    """A slice in between was dropped: this one must not pass (K1)."""
    bench.held.next_offset = 105
    with pytest.raises(FencedError):
        bench.home.commit(bench.held, bench.handled(105, [106, 107]))
    assert bench.accounts() == Accounts(100, 0)
    assert bench.rows() == []


def test_a_lost_connection_leaves_nothing_half_done(bench):
    """The session ends before the COMMIT: everything of the slice is gone (C3)."""
    bench.connections[0].close()
    with pytest.raises(psycopg.OperationalError):
        bench.home.commit(bench.held, bench.handled(100, [100, 101]))
    assert bench.accounts() == Accounts(100, 0)
    assert bench.rows() == []
    assert bench.held.next_offset == 100


def test_progress_first(unsure):
    """Until the effects follow, nobody knows about the events, and the accounts say so (C2)."""
    handled = unsure.handled(100, [100, 101, 102])
    unsure.home.begin_unsure(unsure.held, handled.events, handled.end)
    assert unsure.accounts() == Accounts(103, 3, unknown=3)
    assert unsure.rows() == []


def test_progress_first_then_effects(unsure):
    """The effects make the unknown known; progress does not move again (C2)."""
    handled = unsure.handled(100, [100, 101, 102])
    unsure.home.begin_unsure(unsure.held, handled.events, handled.end)
    outcome = unsure.home.finish_unsure(unsure.held, handled)
    assert outcome.end == 103
    row = unsure.accounts()
    assert (row.next_offset, row.consumed, row.unknown) == (103, 3, 0)
    if unsure.has_rows:
        assert unsure.rows() == [100, 101]


def test_the_loser_does_not_finish(unsure):
    """Whoever lost the partition between progress and effects leaves them unknown (C2, K1)."""
    handled = unsure.handled(100, [100, 101, 102])
    unsure.home.begin_unsure(unsure.held, handled.events, handled.end)
    unsure.own(2)
    with pytest.raises(FencedError):
        unsure.home.finish_unsure(unsure.held, handled)
    assert unsure.accounts() == Accounts(103, 3, unknown=3)
    assert unsure.rows() == []
