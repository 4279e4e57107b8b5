"""What every home promises about progress, whatever its effects are."""

from __future__ import annotations

import contextlib
import random
import uuid

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from sideline import Calls, Event, Insert, Kafka, Pipeline, Skip
from sideline.clock import SystemClock
from sideline.engine import attempts, replaying
from sideline.engine.lease import Partition
from sideline.engine.replaying import Replayer
from sideline.errors import FencedError
from sideline.events import ALONE
from sideline.homes.calls import CallsHome
from sideline.homes.kafka import KafkaHome
from sideline.homes.postgres import PostgresHome
from sideline.homes.records import Outlet, RecordsHome
from sideline.homes.setbacks import Setter
from sideline.homes.transactions import Groups, Transactor
from sideline.homes.writer import Writer
from sideline.leaving import Record
from sideline.ledger import schema
from sideline.ledger.ahead import ReadAhead
from sideline.ledger.connection import connect
from sideline.ledger.parking import Parking
from sideline.ledger.pending import Pendings
from sideline.ledger.place import Place
from sideline.ledger.replay import Replays
from sideline.ledger.sql import queries
from sideline.ledger.store import Claim, Ledger, Parting, Stale
from sideline.slices import Aside, Failure, Handled
from tests.support.checkers import Accounts
from tests.support.operations import operate
from tests.support.outputs import read_committed
from tests.support.waiting import patiently

HOMES = {
    "postgres": {},
    "postgres, at least once": {"delivery": "at-least-once"},
    "calls": {"sink": Calls()},
    "kafka": {"sink": Kafka()},
    "kafka, at least once": {"sink": Kafka(), "delivery": "at-least-once"},
}
UNSURE = {
    "postgres": {"delivery": "at-most-once", "on_failure": Skip()},
    "calls": {"sink": Calls(), "delivery": "at-most-once", "on_failure": Skip()},
    "kafka": {"sink": Kafka(), "delivery": "at-most-once", "on_failure": Skip()},
}


class Bench:
    """A home on a real database, for one owner of one partition."""

    def __init__(self, database, options, kafka=None, topics=None):
        self.database = database
        self.kafka = kafka
        self.publishes = isinstance(options.get("sink"), Kafka)
        # Where records are published, offsets are committed: their topic has to be there.
        self.source = topics(partitions=1) if self.publishes else "users"
        self.out = topics(partitions=1) if self.publishes else None
        self.spot = Partition(self.source, 0)
        self.pipeline = Pipeline("login", topics=self.source, **options)
        with psycopg.connect(database) as connection:
            schema.migrate(connection)
            connection.execute("create table users (number bigint)")
        place = Place(database, self.pipeline)
        place.hold()
        place.add(self.source, 0, "an id", 100)
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
        (held,) = ledger.take([self.spot])
        pends = self.pipeline.publishes_exactly_once
        parking = Parking(connection, "login", version="v1", pends=pends)
        setter = Setter(self.pipeline, parking)
        self.parking = parking
        self.replays = Replays(connection, claim, parking, ahead=ReadAhead(self._connects_ahead))
        if self.publishes:
            home = self._publishing(connection, claim, ledger, setter, parking)
        elif self.has_rows:
            home = PostgresHome(self.pipeline, connection, Writer(connection), ledger, setter)
        else:
            home = CallsHome(connection, ledger, setter)
        return home, ledger, held

    def _connects_ahead(self):
        connection = connect(self.database, role="ahead login", autocommit=True)
        self.connections.append(connection)
        return connection

    def _publishing(self, connection, claim, ledger, setter, parking):
        """As if each owner were a process of its own."""
        replays = self.replays
        pendings = Pendings(connection, claim, parking, setter.copying, replays)
        access = {"bootstrap.servers": self.kafka}
        groups = Groups(access, "login")
        # A home says that Kafka has no answer; whether it is asked again is not its business.
        patiently(lambda: groups.shown(self.spot))
        self.connections.append(groups)
        transactor = Transactor(access, "login", self.spot, groups)
        kind = KafkaHome if parking.pends else RecordsHome
        home = kind(connection, ledger, setter, pendings, replays, lambda _: transactor, {})
        home.outlet = Outlet(access)
        return home

    def replayer(self):
        """What brings released events back to the home, for the last owner."""
        self.pipeline.handle = self.act
        connection = self.home._connection
        return Replayer(
            self.pipeline,
            connection,
            replays=self.replays,
            ledger=self.ledger,
            parking=self.parking,
            writer=Writer(connection),
            clock=SystemClock(),
            pool=None,
            publishing=self.home if self.publishes else None,
        )

    def act(self, event):
        """The effects of an event; every third one has none."""
        if not self.has_rows or not event.offset % 3:
            return ()
        if self.publishes:
            return (Record(self.out, b"k", b"%d" % event.offset),)
        return (Insert("users", {"number": event.offset}),)

    def handled(self, start, offsets, end=None, keys=b"k"):
        """Events at these offsets, all of one key or each of the next one of some."""
        events = [
            Event(self.source, 0, offset, 1_000 + offset, keys[place % len(keys) :][:1], b"v")
            for place, offset in enumerate(offsets)
        ]
        effects = [self.act(event) for event in events]
        return Handled(start, end or offsets[-1] + 1, events, effects)

    def failing(self, handled, place):
        """The same slice with an event that failed: what follows it by its key waits behind it."""
        failure = Failure(handled.events[place], "handler", ValueError("bad"))
        key = handled.events[place].key
        behind = [at for at, event in enumerate(handled.events) if at > place and event.key == key]
        effects = [() if at in {place, *behind} else one for at, one in enumerate(handled.effects)]
        parked = {place: failure, **dict.fromkeys(behind)}
        return handled._replace(effects=effects, parked=parked)

    def query(self, statement, values=None):
        with psycopg.connect(self.database) as connection:
            return connection.execute(statement, values).fetchall()

    def accounts(self):
        columns = ", ".join(Accounts._fields)
        (row,) = self.query(f"select {columns} from sideline.progress")
        return Accounts(*row)

    def rows(self):
        if self.publishes:
            return sorted(
                int(message.value()) for message in read_committed(self.kafka, self.out, 0)
            )
        return [number for (number,) in self.query("select number from users order by number")]


@pytest.fixture(params=HOMES)
def bench(database, kafka, topics, request):
    made = Bench(database, HOMES[request.param], kafka, topics)
    yield made
    for connection in made.connections:
        connection.close()


@pytest.fixture(params=UNSURE)
def unsure(database, kafka, topics, request):
    made = Bench(database, UNSURE[request.param], kafka, topics)
    yield made
    for connection in made.connections:
        connection.close()


def test_a_slice_moves_progress_and_counts(bench):
    """Progress stands behind the slice, and every event has one outcome (C3)."""
    outcome = bench.home.commit(bench.held, bench.handled(100, [101, 102, 103], end=110), Aside())
    assert outcome.end == bench.held.next_offset == 110
    row = bench.accounts()
    assert (row.next_offset, row.consumed) == (110, 3)
    assert row.applied + row.filtered == 3
    if bench.has_rows:
        assert (row.applied, row.filtered) == (2, 1)
        assert bench.rows() == [101, 103]


def test_slices_follow_each_other(bench):
    """What a commit returned is where the next one begins (K6)."""
    bench.home.commit(bench.held, bench.handled(100, [100]), Aside())
    bench.home.commit(bench.held, bench.handled(101, [104], end=120), Aside())
    assert bench.accounts().next_offset == 120
    assert bench.accounts().consumed == 2


def test_a_slice_of_holes_moves_progress_alone(bench):
    """Nothing was there to be handled, and nothing is counted."""
    bench.home.commit(bench.held, Handled(100, 150, [], []), Aside())
    assert bench.accounts() == Accounts(150, 0)


def test_a_failing_key_steps_aside(bench):
    """What failed and what follows it waits, in order; the others take effect (F3, F4)."""
    handled = bench.failing(bench.handled(100, [100, 101, 103, 104, 106], keys=b"ab"), 1)
    outcome = bench.home.commit(bench.held, handled, Aside())
    assert (outcome.end, outcome.parked) == (107, 2)
    row = bench.accounts()
    assert (row.next_offset, row.consumed, row.parked) == (107, 5, 2)
    assert row.applied + row.filtered == 3
    waiting = bench.query('select "offset", why, state from sideline.events order by place')
    assert waiting == [(101, "failed", "parked"), (104, "follows", "parked")]
    if bench.has_rows:
        assert bench.rows() == [100, 103, 106]


def test_what_is_skipped_is_counted(bench):
    """It has no effect, nothing waits behind it, and why it failed stays known (F5)."""
    handled = bench.handled(100, [101, 102, 103])
    failure = Failure(handled.events[0], "handler", ValueError("bad"))
    handled = handled._replace(effects=[(), *handled.effects[1:]], skipped={0: failure})
    outcome = bench.home.commit(bench.held, handled, Aside())
    assert (outcome.end, outcome.skipped, outcome.parked) == (104, 1, 0)
    row = bench.accounts()
    assert (row.next_offset, row.consumed, row.skipped) == (104, 3, 1)
    assert row.applied + row.filtered == 2
    assert bench.query("select message, skipped from sideline.causes") == [("bad", 1)]
    if bench.has_rows:
        assert bench.rows() == [103]


def test_what_was_parked_comes_back(bench):
    """In order and once, with progress where it was; then its key is back as well (R2, R3)."""
    handled = bench.failing(bench.handled(100, [100, 101, 103, 104, 106], keys=b"ab"), 1)
    bench.home.commit(bench.held, handled, Aside())
    operate(bench.database, "login")
    replayer = bench.replayer()
    step = replayer.step(bench.held, None, ALONE, limit=10)
    assert (step.done.applied, step.done.failed, step.failure) == (2, 0, None)
    assert replayer.step(bench.held, None, ALONE, limit=10).operation is None
    row = bench.accounts()
    assert (row.next_offset, row.consumed, row.parked) == (107, 5, 0)
    assert row.applied + row.filtered == 5
    assert bench.query("select count(*) from sideline.queues, sideline.keys") == [(0,)]
    if bench.has_rows:
        assert bench.rows() == [100, 101, 103, 104, 106]
    bench.home.commit(bench.held, bench.handled(107, [107], keys=b"b"), Aside())
    assert bench.accounts().next_offset == 108


def park_each(bench, keys):
    """One event of each key fails."""
    for place in range(len(keys)):
        at = bench.held.next_offset
        handled = bench.failing(bench.handled(at, [at], keys=keys[place : place + 1]), 0)
        bench.home.commit(bench.held, handled, Aside())


def came_back(replayer, bench):
    """How many events the next slice of one brings back; None: nothing is wanted here."""
    step = replayer.step(bench.held, None, ALONE, limit=1)
    return None if step.operation is None else step.done.applied


@pytest.fixture
def patient(monkeypatch):
    """However quick PostgreSQL is, the next slice is read and handled before it is asked for."""
    beside = replaying.beside
    monkeypatch.setattr(
        replaying, "beside", lambda asks, own: beside(asks, lambda _: own(lambda: True))
    )
    monkeypatch.setattr(attempts, "QUICK_SECONDS", 60.0)


@pytest.fixture(params=["read", "handled"])
def ahead(request):
    """What happens to the next slice while one is applied."""
    if request.param == "handled":
        request.getfixturevalue("patient")
    return request.param


@pytest.mark.parametrize("bench", ["postgres", "postgres, at least once"], indirect=True)
@pytest.mark.usefixtures("ahead")
def test_a_slice_that_was_read_ahead_is_not_read_again(bench, monkeypatch):
    """While one slice is applied the next one is read; it comes back all the same, once (R2)."""
    park_each(bench, b"abc")
    operate(bench.database, "login")
    replayer = bench.replayer()
    assert came_back(replayer, bench) == 1
    monkeypatch.setattr(bench.replays, "items", lambda *_: pytest.fail("read again"))
    assert [came_back(replayer, bench) for _ in range(2)] == [1, 1]
    monkeypatch.undo()
    assert came_back(replayer, bench) is None
    assert (bench.accounts().parked, bench.rows()) == (0, [100, 101])
    assert bench.query("select count(*) from sideline.queues, sideline.keys") == [(0,)]


@pytest.mark.parametrize("state", ["paused", "cancelled"])
@pytest.mark.usefixtures("ahead")
def test_what_was_read_ahead_waits_once_nobody_wants_it(bench, state):
    """Whoever pauses or cancels a release waits for no more than the slice in hand (R4)."""
    park_each(bench, b"abc")
    operation = operate(bench.database, "login")
    replayer = bench.replayer()
    assert came_back(replayer, bench) == 1
    turn = "update sideline.operations set state = %s where id = %s returning id"
    bench.query(turn, (state, operation))
    assert came_back(replayer, bench) is None
    assert bench.accounts().parked == 2
    bench.query(turn, ("running", operation))
    assert [came_back(replayer, bench) for _ in range(3)] == [1, 1, None]
    assert bench.accounts().parked == 0


@pytest.mark.usefixtures("ahead")
def test_an_older_operation_goes_before_what_was_read_ahead(bench):
    """It was paused, and goes on: the younger one waits for it, whatever was read (R4)."""
    park_each(bench, b"abcd")
    older = operate(bench.database, "login", keys=[b"d"])
    turn = "update sideline.operations set state = %s where id = %s returning id"
    bench.query(turn, ("paused", older))
    operate(bench.database, "login", keys=[b"a", b"b", b"c"])
    replayer = bench.replayer()
    assert came_back(replayer, bench) == 1
    bench.query(turn, ("running", older))
    step = replayer.step(bench.held, None, ALONE, limit=1)
    assert (step.operation, step.done.applied) == (older, 1)
    assert [came_back(replayer, bench) for _ in range(3)] == [1, 1, None]


@pytest.mark.usefixtures("ahead")
def test_who_came_behind_what_was_read_ahead_is_not_left_there(bench):
    """Its queue was read before the follower came; it goes on, and only then ends (K17)."""
    park_each(bench, b"abc")
    operate(bench.database, "login")
    replayer = bench.replayer()
    assert came_back(replayer, bench) == 1
    at = bench.held.next_offset
    follower = bench.handled(at, [at], keys=b"b")
    bench.home.commit(
        bench.held, follower._replace(effects=[()], parked={0: None}), Aside(kafka={b"b"})
    )
    assert [came_back(replayer, bench) for _ in range(4)] == [1, 1, 1, None]
    assert bench.accounts().parked == 0
    assert bench.query("select count(*) from sideline.queues, sideline.keys") == [(0,)]


@pytest.mark.usefixtures("ahead")
def test_the_loser_brings_back_nothing_that_it_read_ahead(bench):
    """Another owner took the partition in between: it finds everything where it was (K1)."""
    park_each(bench, b"abc")
    operate(bench.database, "login")
    replayer = bench.replayer()
    assert came_back(replayer, bench) == 1
    bench.own(2)
    before = bench.accounts()
    with pytest.raises(FencedError):
        came_back(replayer, bench)
    assert bench.accounts() == before


def handled_by(bench, act=None):
    """The offsets of which the handler is told from now on, in order."""
    told, usual = [], bench.act

    def handle(event):
        told.append(event.offset)
        return (act or usual)(event)

    bench.act = handle
    return told


@pytest.mark.parametrize("bench", ["postgres"], indirect=True)
@pytest.mark.usefixtures("patient")
def test_the_next_slice_is_handled_while_one_is_written_down(bench):
    """Of quick handlers; each event is handled once, and comes back once (R2)."""
    park_each(bench, b"abc")
    operate(bench.database, "login")
    told = handled_by(bench)
    replayer = bench.replayer()
    seen = []
    for _ in range(3):
        assert came_back(replayer, bench) == 1
        seen.append(len(told))
    assert (seen, told) == ([2, 3, 3], [100, 101, 102])
    assert came_back(replayer, bench) is None
    assert (bench.accounts().parked, bench.rows()) == (0, [100, 101])


@pytest.mark.parametrize("bench", ["postgres"], indirect=True)
@pytest.mark.usefixtures("patient")
def test_what_fails_ahead_is_handled_again(bench):
    """It has failed only if it does once it is its turn."""
    park_each(bench, b"ab")
    operation = operate(bench.database, "login")
    usual = bench.act

    def act(event):
        if told == [100, 101]:
            raise ValueError("too early")
        return usual(event)

    told = handled_by(bench, act)
    replayer = bench.replayer()
    assert [came_back(replayer, bench) for _ in range(3)] == [1, 1, None]
    assert told == [100, 101, 101]
    failed = "select sum(failed) from sideline.operation_counts where operation = %s"
    assert bench.query(failed, (operation,)) == [(0,)]


@pytest.mark.parametrize("bench", ["postgres"], indirect=True)
@pytest.mark.usefixtures("patient")
def test_behind_a_slice_that_is_refused_everything_is_handled_again(bench, monkeypatch):
    """What was handled ahead goes with it; nothing is lost and nothing comes twice (R2, C3)."""
    park_each(bench, b"abc")
    operate(bench.database, "login")
    told = handled_by(bench)
    replayer = bench.replayer()

    def refuse(*_):
        raise psycopg.errors.DeadlockDetected("not this time")

    monkeypatch.setattr(bench.replays, "commit", refuse)
    with pytest.raises(psycopg.errors.DeadlockDetected):
        came_back(replayer, bench)
    monkeypatch.undo()
    replayer.undo()
    assert (bench.accounts().parked, bench.rows()) == (3, [])
    assert [came_back(replayer, bench) for _ in range(4)] == [1, 1, 1, None]
    assert told[:2] == [100, 101]
    assert told[2:] == [100, 101, 102]
    assert (bench.accounts().parked, bench.rows()) == (0, [100, 101])


def accident(bench, replayer, chance, keys):
    """Something that may happen between two slices, or to one of them."""
    kind = chance.choice(["follower", "refused", "fails", "undo", "pause", "none", "none"])
    if kind == "follower":
        at, key = bench.held.next_offset, chance.choice(keys)
        (((waits,),),) = (bench.query("select count(*) from sideline.keys where key = %s", (key,)),)
        handled = bench.handled(at, [at], keys=key)
        if waits:
            handled = handled._replace(effects=[()], parked={0: None})
        bench.home.commit(bench.held, handled, Aside(kafka={key} if waits else set()))
    elif kind == "refused":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.replays, "commit", lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                replayer.step(bench.held, None, ALONE, limit=chance.randint(1, 4))
        replayer.undo()
    elif kind == "fails":
        bench.broken = not bench.broken
        replayer.forget()
    elif kind == "undo":
        replayer.undo()
    elif kind == "pause":
        turn = "update sideline.operations set state = %s where state = %s returning id"
        bench.query(turn, ("paused", "running"))
        replayer.step(bench.held, None, ALONE, limit=2)
        bench.query(turn, ("running", "paused"))


@pytest.mark.parametrize("bench", ["postgres"], indirect=True)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_in_between_everything_comes_back_once(bench, seed):
    """In the order of its key, with books that balance (C1, C3, R2, R3)."""
    chance = random.Random(seed)
    keys = [bytes([number]) for number in range(97, 121)]
    park_each(bench, b"".join(keys))
    bench.broken = False
    used = []

    def act(event):
        if bench.broken and event.offset in range(100, 124, 5):
            raise ValueError("bad")
        return (Insert("users", {"number": event.offset}),)

    bench.act = act
    replayer = bench.replayer()
    usual = replayer._release

    def release(*args, **options):
        used.append(options.get("prepared") is not None)
        return usual(*args, **options)

    replayer._release = release
    operate(bench.database, "login", stop_at=1)
    for _ in range(30):
        step = replayer.step(bench.held, None, ALONE, limit=chance.randint(1, 4))
        if step.operation is None:
            replayer.finish()
            operate(bench.database, "login", stop_at=1)
        accident(bench, replayer, chance, keys)
    bench.broken = False
    replayer.forget()
    for _ in range(2):
        while replayer.step(bench.held, None, ALONE, limit=4).operation is not None:
            pass
        replayer.finish()
        operate(bench.database, "login", stop_at=1)
    assert any(used), "nothing was handled ahead"
    row = bench.accounts()
    assert (row.parked, row.applied) == (0, row.consumed)
    numbers = [number for (number,) in bench.query("select number from users order by ctid")]
    assert sorted(numbers) == list(range(100, row.next_offset))
    of = dict(bench.query('select "offset", queue from sideline.resolved'))
    for queue in set(of.values()):
        mine = [number for number in numbers if of.get(number) == queue]
        assert mine == sorted(mine)


@pytest.mark.parametrize("bench", ["postgres"], indirect=True)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("why", ["slow", "rate", "key", "no next one"])
def test_a_handler_is_not_called_for_nothing(bench, monkeypatch, why):
    """Slow ones may ask others; with a rate, or at a lease's end, the next slice is not now.

    And with key= every event is asked for its key first, in its turn.
    """
    park_each(bench, b"abc")
    operate(bench.database, "login")
    told = handled_by(bench)
    if why == "slow":
        monkeypatch.setattr(attempts, "QUICK_SECONDS", 0.0)
    elif why == "rate":
        bench.pipeline.rate = 1_000.0
    elif why == "key":
        bench.pipeline.key = lambda event: event.key
    replayer = bench.replayer()
    onward = why != "no next one"
    assert replayer.step(bench.held, None, ALONE, limit=1, onward=onward).done.applied == 1
    assert told == [100]
    assert [came_back(replayer, bench) for _ in range(3)] == [1, 1, None]
    assert told == [100, 101, 102]


def park_at_once(bench, count):
    """Events of as many keys fail, with others in between: it is not a flood."""
    offsets = range(100, 100 + count)
    handled = bench.handled(100, offsets, keys=bytes(range(count)))
    parked = {
        place: Failure(event, "handler", ValueError("bad"))
        for place, event in enumerate(handled.events)
        if place % 50
    }
    handled = handled._replace(effects=[()] * count, parked=parked)
    bench.home.commit(bench.held, handled, Aside())


@pytest.mark.parametrize("bench", ["postgres"], indirect=True)
def test_a_release_grows_also_with_what_was_read_ahead(bench, monkeypatch):
    """What fails again is noticed before much of it has failed (R2)."""
    monkeypatch.setattr(replaying, "AHEAD_EVENTS", 1)
    park_at_once(bench, 200)
    operate(bench.database, "login")
    replayer = bench.replayer()
    step = replayer.step(bench.held, None, ALONE, limit=1_000)
    assert step.tried == 64
    # As if the others had stayed behind one that failed.
    bench.query("update sideline.operation_counts set applied = 20 returning 1")
    step = replayer.step(bench.held, None, ALONE, limit=1_000)
    assert step.tried == 80
    step = replayer.step(bench.held, None, ALONE, limit=1_000)
    assert step.tried == 52
    assert bench.accounts().parked == 0


def test_no_more_items_are_looked_at_than_a_slice_may_have(bench, monkeypatch):
    """There may be a million of them; whoever takes over goes on at the same pace."""
    park_each(bench, b"abc")
    operate(bench.database, "login")
    items, limits = bench.replays.items, []

    def looked(held, limit, excluded):
        limits.append(limit)
        return items(held, limit, excluded)

    monkeypatch.setattr(bench.replays, "items", looked)
    assert bench.replayer().step(bench.held, None, ALONE, limit=1_000).tried == 3
    assert limits == [64]
    park_each(bench, b"de")
    operate(bench.database, "login")
    bench.query(
        "insert into sideline.operation_counts (operation, topic, partition, applied, failed,"
        " discarded, restored) select max(id), %s, 0, 100, 0, 0, 0 from sideline.operations"
        " returning 1",
        (bench.source,),
    )
    assert bench.replayer().step(bench.held, None, ALONE, limit=1_000).operation is not None
    assert limits == [64, 64, 400]


def test_the_loser_brings_nothing_back(bench):
    """Another owner took the partition: what was released stays where it is (K1, R3)."""
    bench.home.commit(bench.held, bench.failing(bench.handled(100, [101]), 0), Aside())
    operate(bench.database, "login")
    replayer = bench.replayer()
    bench.own(2)
    before = bench.accounts()
    with pytest.raises(FencedError):
        replayer.step(bench.held, None, ALONE, limit=10)
    assert bench.accounts() == before
    assert bench.rows() == []
    assert bench.query("select state from sideline.events") == [("parked",)]


def test_the_loser_writes_nothing(bench):
    """Another owner took the partition: neither effects nor progress (K1, K3)."""
    _, _, held = bench.own(2)
    before = bench.accounts()
    with pytest.raises(FencedError):
        bench.home.commit(bench.held, bench.handled(100, [100, 101]), Aside())
    assert bench.accounts() == before
    assert bench.rows() == []
    assert bench.held.next_offset == held.next_offset == 100


def test_a_released_partition_takes_no_slice(bench):
    """Release is the last act of a lease (K1)."""
    bench.ledger.release([Parting(bench.spot)])
    with pytest.raises(FencedError):
        bench.home.commit(bench.held, bench.handled(100, [100, 101]), Aside())
    assert bench.rows() == []


def test_a_slice_that_does_not_begin_at_progress_is_refused(bench):
    """A slice in between was dropped: this one must not pass (K1)."""
    bench.held.next_offset = 105
    with pytest.raises(FencedError):
        bench.home.commit(bench.held, bench.handled(105, [106, 107]), Aside())
    assert bench.accounts() == Accounts(100, 0)
    assert bench.rows() == []


def test_a_lost_connection_leaves_nothing_half_done(bench):
    """The session ends before the COMMIT: everything of the slice is gone (C3)."""
    bench.connections[0].close()
    with pytest.raises(psycopg.OperationalError):
        bench.home.commit(bench.held, bench.handled(100, [100, 101]), Aside())
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
    outcome = unsure.home.finish_unsure(unsure.held, handled, Aside())
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
        unsure.home.finish_unsure(unsure.held, handled, Aside())
    assert unsure.accounts() == Accounts(103, 3, unknown=3)
    assert unsure.rows() == []


# A small slice is one statement


@pytest.fixture
def rows(database):
    made = Bench(database, {})
    yield made
    for connection in made.connections:
        connection.close()


def _only_at_once(monkeypatch):
    """The long way is closed: what passes went in one statement."""
    for name in ("fence", "fence_at"):
        monkeypatch.setitem(queries(), name, "select 1 / 0")


def test_a_small_slice_is_one_statement(rows, monkeypatch):
    """Fence, effects, progress and COMMIT in one round trip, slice after slice (C3, C7, K6)."""
    _only_at_once(monkeypatch)
    for start in (100, 103, 106):
        rows.home.commit(rows.held, rows.handled(start, [start, start + 1, start + 2]), Aside())
        # Nothing is left open that a COMMIT would have to follow.
        assert rows.connections[0].info.transaction_status == TransactionStatus.IDLE
    assert rows.rows() == [100, 101, 103, 104, 106, 107]
    assert rows.accounts() == Accounts(109, 9, applied=6, filtered=3)


def test_a_small_slice_finds_its_row_by_its_place(rows):
    """Whatever a held snapshot keeps of the row is not walked over (K6)."""
    claim = rows.ledger._claim
    plan = rows.query(
        "explain " + queries()["fence_at_once"],
        {
            "ctid": rows.held.ctid, "pipeline": "login", "topic": "users", "partition": 0,
            "lease": "{1,1,0}", "owner": claim.owner, "start": 0, "end": 0, "consumed": 0,
            "applied": 0, "filtered": 0, "event_at": None,
        },
    )  # fmt: skip
    assert any("Tid Scan" in line for (line,) in plan), plan


@pytest.mark.parametrize("rule", ["lease and owner", "next_offset = start"])
def test_without_its_fence_a_small_slice_would_be_written(rows, monkeypatch, rule):
    """What the two tests of the loser and of the dropped slice would see (K1, K2)."""
    if rule == "lease and owner":
        rows.own(2)
        loose = ("\n  and lease = %(lease)s::bigint[]\n  and owner = %(owner)s", "")
        handled = rows.handled(100, [100, 101])
        rows.held.ctid = rows.query("select ctid::text from sideline.progress")[0][0]
    else:
        loose = ("next_offset = %(start)s", "true")
        handled = rows.handled(99, [100, 101])
        rows.held.next_offset = 99
    with pytest.raises(FencedError):
        rows.home.commit(rows.held, handled, Aside())
    assert rows.rows() == []
    text = queries()["fence_at_once"]
    assert loose[0] in text
    monkeypatch.setitem(queries(), "fence_at_once", text.replace(*loose))
    rows.home.commit(rows.held, handled, Aside())
    assert rows.rows() == [100, 101]


def test_a_small_slice_with_poison_goes_the_long_way(rows):
    """The row that PostgreSQL refuses is found, and nothing of the first attempt stays (K8)."""
    with psycopg.connect(rows.database) as connection:
        connection.execute("create unique index on users (number)")
        connection.execute("insert into users values (101)")
    outcome = rows.home.commit(rows.held, rows.handled(100, [100, 101, 103]), Aside())
    # The third has the second one's key, so it waits behind it.
    assert (outcome.applied, outcome.parked) == (1, 2)
    assert rows.rows() == [100, 101]
    assert rows.connections[0].autocommit is False


def test_where_the_topic_grew_a_small_slice_looks_again(rows):
    """Its keys may stand aside in another partition: one statement does not see that (K13)."""
    with psycopg.connect(rows.database) as connection:
        connection.execute("update sideline.progress set shared = true")
    rows.held.ctid = rows.query("select ctid::text from sideline.progress")[0][0]
    with pytest.raises(Stale):
        rows.home.commit(rows.held, rows.handled(100, [100, 101]), Aside())
    assert rows.rows() == []
    assert rows.accounts() == Accounts(100, 0)
