"""Whatever arrives, fails, is fixed, released, fails again, is given up, restored, and crashes."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from sideline import Event, Insert, accounting, operations
from sideline.engine import replaying
from sideline.engine.replaying import Replayer
from sideline.errors import FencedError, RefusedError
from sideline.events import Delivery
from sideline.homes.writer import Writer
from sideline.ledger.ahead import ReadAhead
from sideline.ledger.connection import connect
from sideline.ledger.place import Place
from sideline.ledger.replay import Replays
from sideline.ledger.sql import queries
from sideline.ledger.store import Parting, Stale
from sideline.testing import FakeClock
from tests.support import machine
from tests.support.ledger_model import Arrived
from tests.support.operations import operate

KINDS = ["fine"] * 4 + ["nothing", "fail", "fail", "refused", "undecodable"]
# A slice that is believed to be outdated again and again would never end.
MOST_ATTEMPTS = 5
LATE = 10

specs = st.tuples(
    st.sampled_from(machine.KEYS), st.sampled_from(machine.IDS), st.sampled_from(KINDS), st.just(0)
)
arrivals = st.lists(specs, min_size=4, max_size=10)
parts = st.integers(0, 1)
picks = st.lists(st.integers(0, 100), min_size=1, max_size=4)
cuts = st.one_of(st.none(), st.sampled_from(["before", "after"]), st.integers(0, 16))


class Log:
    """What was produced, and how far each partition has come: nothing else is predicted."""

    def __init__(self, *, derives):
        self.derives = derives
        self.shared = derives
        self.logs = [[], []]
        self.next = [0, 0]

    def commit(self, partition, end):
        self.next[partition] = end

    def consumed(self):
        return [
            event
            for number, log in enumerate(self.logs)
            for event in log
            if event.offset < self.next[number]
        ]

    def own(self, event):
        if not self.derives or event.kind == "undecodable":
            return None if event.key is None else (False, event.key)
        return None if event.said is None else (True, event.said.encode())


class Worker(machine.Worker):
    """The same process, with a hand for what comes back."""

    def _connect(self):
        super()._connect()
        pipeline = self.machine.pipeline
        self.replayer = Replayer(
            pipeline,
            self.connection,
            replays=Replays(self.connection, self.claim, self.parking, ahead=self._ahead()),
            ledger=self.ledger,
            parking=self.parking,
            writer=Writer(self.connection),
            clock=FakeClock(),
            pool=None,
        )

    def _ahead(self):
        def connects():
            connection = connect(self.machine.database, role="ahead machine", autocommit=True)
            self.machine.connections.append(connection)
            return connection

        # Outlives its leases, like the process.
        self.ahead = getattr(self, "ahead", None) or ReadAhead(connects)
        return self.ahead

    def replay(self, number, limit):
        """One slice of what waits at home in a partition; whether there was something."""
        held = self.hands[number].held
        spot = machine.TOPIC if held.shared else held.partition
        for _ in range(MOST_ATTEMPTS):
            with contextlib.suppress(Stale):
                step = self.replayer.step(
                    held, self.asides.get(spot), Delivery(replayed=True), limit=limit
                )
                assert step.failure is None
                return step.operation is not None
        raise AssertionError("what was read is outdated again and again")


class ReplayMachine(machine.Stage):
    """Two partitions, one or two workers, and people who release, give up and take back."""

    worker = Worker

    def __init__(self, database):
        super().__init__(database)
        self.fixed = False

    @initialize(derives=st.booleans(), together=st.booleans(), first=st.tuples(arrivals, arrivals))
    def start(self, derives, together, first):
        self.model = Log(derives=derives)
        self.open(derives=derives, together=together)
        for number, arriving in enumerate(first):
            self.arrive(number, arriving)
            self.slice(number, len(arriving))

    def _handle(self, event):
        said = {"kind": "fine", "id": None} if self._unreadable(event) else event.json()
        kind = "fine" if self.fixed and said["kind"] in {"fail", "refused"} else said["kind"]
        if kind == "fail":
            raise ValueError("fail")
        if kind == "nothing":
            return None
        effects = self.written(event, said["id"])
        if kind == "refused":
            effects.append(Insert("limited", {"number": -1}))
        return effects

    def _unreadable(self, event):
        """Without key=, fixed code can make something of it."""
        return self.fixed and not self.model.derives and event.value.startswith(b"\xff")

    def events(self, partition, offset):
        """What a reader would bring."""
        return [
            Event(machine.TOPIC, partition, one.offset, 1_000, one.key, machine.value_of(one))
            for one in self.model.logs[partition]
            if one.offset >= offset
        ]

    # What happens

    @rule(partition=parts, arriving=arrivals)
    def arrive(self, partition, arriving):
        """Events are produced."""
        log = self.model.logs[partition]
        for key, said, kind, _ in arriving:
            log.append(Arrived(partition, len(log), key, said, kind))

    @rule(partition=parts, size=st.integers(1, 8))
    def slice(self, partition, size):
        """Live events, from their admission to the commit."""
        worker = self.workers[partition]
        if partition not in worker.pending and not worker.begin(partition, size):
            return
        self.model.commit(partition, worker.finish(partition))

    @rule(partition=parts, size=st.integers(1, 8))
    def begin(self, partition, size):
        """A slice is handled; before its commit, something else may happen."""
        worker = self.workers[partition]
        if partition not in worker.pending:
            worker.begin(partition, size)

    @precondition(lambda self: self.steps % 3 == 0)
    @rule()
    def fix_or_break(self):
        """The code is mended, or spoilt again."""
        self._mend(not self.fixed)

    def _mend(self, fixed):
        self.fixed = fixed
        # Other code runs in other processes: they remember nothing that this one has said.
        for worker in [*self.workers.values(), *self.zombies]:
            worker.replayer.forget()

    @rule(chosen=picks)
    def release(self, chosen):
        """A person wants some queues back."""
        keys = [key for (key,) in self.ask(_KEYS)]
        if keys:
            operate(
                self.database,
                self.pipeline.name,
                keys=[keys[pick % len(keys)] for pick in chosen],
                stop_at=1,
            )

    @rule()
    def release_all(self):
        """A person wants everything back."""
        operate(self.database, self.pipeline.name, stop_at=1)

    @rule(chosen=picks, state=st.sampled_from(["parked", "parked", "discarded"]))
    def give_up_or_restore(self, chosen, state):
        """A person gives up on events, or wants them back."""
        found = self.ask(_IN_STATE, state=state)
        if found:
            kind = "discard" if state == "parked" else "restore"
            events = [found[pick % len(found)] for pick in chosen]
            operate(self.database, self.pipeline.name, kind, events=events)

    @rule(pick=st.integers(0, 100), how=st.sampled_from(["pause", "stop", "resume", "resume"]))
    def steer(self, pick, how):
        """An operation is paused, or stopped by itself, or goes on (R4)."""
        found = self.ask(_OPEN)
        if found:
            self._steer(found[pick % len(found)][0], how)

    def _steer(self, number, how):
        with psycopg.connect(self.database) as connection:
            if how == "stop":
                named = {"operation": number, "note": "too much failed"}
                connection.execute(queries()["stop_operation"], named)
                return
            act = operations.pause if how == "pause" else operations.resume
            # Who is stopped cannot be paused.
            with contextlib.suppress(RefusedError):
                act(connection, number, actor="somebody", reason=None)

    @rule(partition=parts, limit=st.integers(1, 10), cut=cuts, restart=st.booleans())
    def replay(self, partition, limit, cut, restart):
        """An owner carries out a slice of what is wanted, and may lose its wire on the way."""
        worker = self.workers[partition]
        crash = None if cut is None else machine.Crash(worker.connection, cut)
        survived = False
        with contextlib.suppress(psycopg.OperationalError):
            worker.replay(partition, limit)
            survived = True
        if crash is not None:
            crash.disarm()
        if not survived:
            worker.pending.clear()
            if restart:
                self.replace(worker)
            else:
                worker.reconnect()

    @rule(partition=parts, limit=st.integers(1, 10))
    def replay_again(self, partition, limit):
        """The same, without an accident."""
        self.workers[partition].replay(partition, limit)

    @precondition(lambda self: self.steps > LATE)
    @rule()
    def release_and_settle(self):
        """Once the code is right, everything comes back that can be read (R1, R2)."""
        self._mend(True)
        for (number,) in self.ask(_OPEN):
            self._steer(number, "resume")
        # What is under way may bring events back that were given up: they are released then.
        self._settle()
        self.release_all()
        self._settle()
        assert not self.ask(_LEFT)
        heads = set(self.ask(_HEADS))
        kinds = {event.at: event.kind for event in self.model.consumed()}
        assert {kinds[at] for at in heads} <= ({"undecodable"} if self.model.derives else set())

    def _settle(self):
        for number, worker in self.workers.items():
            while worker.replay(number, 10):
                pass

    @rule(partition=parts, kill=st.booleans())
    def restart(self, partition, kill):
        """A worker of another process takes the lease; the old one may not know."""
        worker = self.workers[partition]
        if kill:
            worker.connection.close()
        else:
            self.zombies.append(worker)
        self.replace(worker)

    @rule(partition=parts)
    def lease(self, partition):
        """The same process gets the next lease, and trusts what it remembers as far as it may."""
        worker = self.workers[partition]
        worker.pending.clear()
        worker.ledger.release([Parting(hand.held.partition) for hand in worker.hands.values()])
        worker.take()

    @precondition(lambda self: self.zombies)
    @rule()
    def wake(self):
        """Whoever lost its lease replays nothing (K1)."""
        worker = self.zombies.pop()
        for number in worker.partitions:
            with contextlib.suppress(FencedError):
                assert not worker.replay(number, 10)
        worker.connection.close()

    @precondition(lambda self: not self.model.shared and self.steps > LATE)
    @rule()
    def share(self):
        """The topic grew: its keys may live in several partitions."""
        place = Place(self.database, self.pipeline)
        place.run("share_topic", topic=machine.TOPIC)
        place.run("share_partitions", topic=machine.TOPIC)
        place.close()
        self.model.shared = True

    # What must hold

    @invariant()
    def everything_is_right(self):
        """Everything below, after each step."""
        self.steps += 1
        self._books_balance()
        self._every_event_has_one_fate()
        self._applied_are_a_prefix()
        self._operations_are_counted()

    def _books_balance(self):
        books = accounting._books(self.watch, self.pipeline.name)
        assert not books.differences, books.differences

    def _every_event_has_one_fate(self):
        """Applied once, left out by the handler, waiting, or given up: one of them."""
        applied = Counter(self.ask(machine.EFFECTS))
        assert set(applied.values()) <= {1}
        states = {(number, offset): state for number, offset, _, state in self.ask(_ROWS)}
        for event in self.model.consumed():
            state = states.get(event.at)
            filtered = event.kind == "nothing" and state in {None, "resolved"}
            waits = state in {"parked", "discarded"}
            assert (event.at in applied) + filtered + waits == 1, (event, state)

    def _applied_are_a_prefix(self):
        """Per key, in log order, without what was given up: none before its turn (C1, R2, R6)."""
        fate = {(number, offset): state for number, offset, _, state in self.ask(_ROWS)}
        wanted = defaultdict(list)
        for event in self.model.consumed():
            own = self.model.own(event)
            if own is not None and event.kind != "nothing" and fate.get(event.at) != "discarded":
                wanted[event.partition, own].append(event.at)
        by_place = {event.at: event for event in self.model.consumed()}
        applied = defaultdict(list)
        last = {}
        for at in self.ask(machine.EFFECTS):
            own = self.model.own(by_place[at])
            if own is not None:
                applied[at[0], own].append(at)
            if (name := self._state_of(by_place[at])) is not None:
                last[name] = at
        for key, places in applied.items():
            assert places == wanted[key][: len(places)], key
        states = {key: (number, offset) for key, number, offset in self.ask(machine.STATES)}
        assert states == last

    def _state_of(self, event):
        if self.model.derives:
            return None if event.kind == "undecodable" else event.said
        return None if event.key is None else event.key.hex()

    def _operations_are_counted(self):
        ((applied, failed, given_up),) = self.ask(_COUNTS)
        rows = self.ask(_ROWS)
        assert applied == sum(state == "resolved" for *_, state in rows)
        assert failed == sum(generation for _, _, generation, _ in rows)
        assert given_up == sum(state == "discarded" for *_, state in rows)


_OPEN = """
select id from sideline.operations
where pipeline = %(pipeline)s and state in ('running', 'paused', 'stopped') order by id
"""
_KEYS = "select key from sideline.keys where pipeline = %(pipeline)s order by version, digest"
_IN_STATE = """
select partition, "offset" from sideline.events
where pipeline = %(pipeline)s and state = %(state)s order by place
"""
# Whoever is first in a queue, or stands alone. Behind such an event others wait, whatever they are.
_HEADS = """
select distinct on (coalesce(queue, -place)) partition, "offset" from sideline.events
where pipeline = %(pipeline)s and state = 'parked'
order by coalesce(queue, -place), place
"""
_ROWS = """
select partition, "offset", generation, state from sideline.events
where pipeline = %(pipeline)s
union all
select partition, "offset", generation, 'resolved' from sideline.resolved
where pipeline = %(pipeline)s
"""
_LEFT = """
select 1 from sideline.operation_items as items
join sideline.operations on operations.id = items.operation
left join sideline.operation_counts as counts
  on counts.operation = items.operation and counts.topic = items.topic
 and counts.partition = items.home
where pipeline = %(pipeline)s and items.state = 'waiting' and number > coalesce(seen, -1)
"""
_COUNTS = """
select coalesce(sum(applied), 0)::int, coalesce(sum(failed), 0)::int,
       coalesce(sum(discarded) - sum(restored), 0)::int
from sideline.operation_counts join sideline.operations on id = operation
where pipeline = %(pipeline)s
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However quick PostgreSQL is, the next slice is read and handled before it is asked for."""
    beside = replaying.beside
    monkeypatch.setattr(
        replaying, "beside", lambda asks, own: beside(asks, lambda _: own(lambda: True))
    )


@pytest.mark.timeout(900)  # when it fails, the shortest history is worth the wait
def test_per_key_the_applied_are_a_prefix_of_the_log(database):
    """Without what was given up, whatever happens (C1, C3, R1, R2, R3, R6, K13 to K17)."""
    machine.check(ReplayMachine, database, examples=30, steps=30)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_per_key_the_applied_are_a_prefix_of_the_log_at_length(database):
    """The same, with many more and longer histories (C1, C3, R1, R2, R3, R6, K13 to K17)."""
    machine.check(ReplayMachine, database, examples=1_000, steps=60)
