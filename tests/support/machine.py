"""Two partitions, workers whose wires are cut, and what they all write: what machines stand on.

A machine is a history that Hypothesis makes up, run against a real ledger.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from psycopg import sql

from sideline import FloodGuard, Insert, Pipeline, Upsert
from sideline.engine.hand import Hand
from sideline.engine.handling import handle
from sideline.engine.lease import Partition, PartitionReport
from sideline.engine.processing import Processor
from sideline.homes.postgres import PostgresHome
from sideline.homes.setbacks import Setter
from sideline.homes.writer import Writer
from sideline.ledger import schema
from sideline.ledger.connection import connect
from sideline.ledger.parking import Parking
from sideline.ledger.place import Place
from sideline.ledger.store import Claim, Ledger, Stale
from sideline.testing import FakeClock
from tests.support.waiting import wait_for

TOPIC = "users"
TABLES = """
create table effects (
    seq bigint generated always as identity, pipeline text, partition int, number bigint
);
create table states (
    pipeline text, id text, partition int, number bigint, primary key (pipeline, id)
);
create table limited (number int not null check (number >= 0));
"""
KEYS = [None, b"", b"k", b"\xff\x00"]
IDS = [None, "", "k", "\u00eb"]
# A slice that is believed to be outdated again and again would never end.
MOST_ATTEMPTS = 4
EFFECTS = "select partition, number from effects where pipeline = %(pipeline)s order by seq"
STATES = "select id, partition, number from states where pipeline = %(pipeline)s"


def value_of(event):
    """What the record says; some of it cannot be read."""
    if event.kind == "undecodable":
        return b"\xff no json"
    return json.dumps({"id": event.said, "kind": event.kind}).encode()


class Crash:
    """Cuts a connection's wire: before its n-th statement, before or after the COMMIT."""

    def __init__(self, connection, when):
        self._connection = connection
        self._when = when
        self._left = when if isinstance(when, int) else None
        self._execute, self._commit = connection.execute, connection.commit
        connection.execute, connection.commit = self._statement, self._end

    def disarm(self):
        self._connection.execute, self._connection.commit = self._execute, self._commit

    def _statement(self, *args, **kwargs):
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._cut()
        return self._execute(*args, **kwargs)

    def _end(self):
        if self._when == "before":
            self._cut()
        self._commit()
        if self._when == "after":
            self._cut()

    def _cut(self):
        self._connection.close()
        raise psycopg.OperationalError("cut")


class Worker:
    """A worker process as far as the ledger sees it: a connection, a lease, what it remembers."""

    def __init__(self, machine, partitions):
        self.machine = machine
        self.partitions = partitions
        self.asides = {}
        self.pending = {}
        self.connection = None
        self.take()

    def take(self):
        """Begin a lease; what is known of keys aside is as old as the process."""
        number = next(self.machine.rounds)
        self.claim = Claim(self.machine.pipeline.name, (1, number, 0), uuid.uuid4(), uuid.uuid4())
        self._connect()
        self.hands = {}
        # The server may need a moment to see that a wire was cut: until then its rows are locked.
        for held in wait_for(self._all, what="partitions whose last owner is gone"):
            held.shared = held.shared or self.machine.pipeline.key is not None
            number = held.partition.number
            self.hands[number] = Hand(held, None, PartitionReport(TOPIC, number))

    def _all(self):
        """All partitions, or nothing; what was taken already may be taken again."""
        taken = self.ledger.take([Partition(TOPIC, number) for number in self.partitions])
        return taken if len(taken) == len(self.partitions) else None

    def reconnect(self):
        """After a cut wire, within the same lease, as a lease does."""
        self._connect()
        self.ledger.reannounce()
        self.asides.clear()
        for hand in self.hands.values():
            hand.held.next_offset = self.ledger.settle(hand.held)

    def _connect(self):
        machine = self.machine
        if self.connection is None or self.connection.closed:
            self.connection = connect(machine.database, role="worker machine")
            machine.connections.append(self.connection)
        self.ledger = Ledger(self.connection, self.claim, grace_seconds=0)
        self.parking = Parking(self.connection, machine.pipeline.name, version="v1")
        self.setter = Setter(machine.pipeline, self.parking)
        writer = Writer(self.connection)
        self.home = PostgresHome(
            machine.pipeline, self.connection, writer, self.ledger, self.setter
        )

    def begin(self, number, count):
        """Admit and handle a slice; it is not committed yet."""
        hand = self.hands[number]
        events = self.machine.events(number, hand.held.next_offset)[:count]
        if not events:
            return False
        aside = self._aside(hand, events)
        handled, failure = handle(
            self.machine.pipeline,
            events,
            start=hand.held.next_offset,
            end=events[-1].offset + 1,
            clock=FakeClock(),
            aside=aside,
            tally=self.setter.tally(hand.held),
        )
        assert failure is None or (failure.stage, self.machine.broken) == ("handler", True)
        self.pending[number] = (count, handled, aside)
        return True

    def finish(self, number):
        """Commit what was handled; where progress stands then."""
        for _ in range(MOST_ATTEMPTS):
            count, handled, aside = self.pending.pop(number)
            if not handled.events:
                return handled.start
            try:
                outcome = self.home.commit(self.hands[number].held, handled, aside)
            except Stale:
                assert self.begin(number, count)
                continue
            assert outcome.failure is None
            return outcome.end
        raise AssertionError("the slice is admitted anew again and again")

    def _aside(self, hand, events):
        stand_in = SimpleNamespace(_worker=self, _tools=SimpleNamespace(parking=self.parking))
        return Processor.aside(stand_in, hand, events)


class Stage(RuleBasedStateMachine):
    """One pipeline on two partitions, and the workers that own them."""

    numbers = itertools.count(1)
    worker: Callable[..., Worker] = Worker

    def __init__(self, database: str) -> None:
        super().__init__()
        self.database = database
        self.connections: list[Any] = []
        self.rounds = itertools.count(1)
        self.broken = False
        self.zombies: list[Worker] = []
        self.steps = 0

    def open(self, *, derives: bool, together: bool) -> None:
        """Declare the pipeline, and let one worker or two take its partitions."""
        self.pipeline = Pipeline(
            f"machine-{next(self.numbers)}",
            topics=TOPIC,
            key=(lambda event: event.json()["id"]) if derives else None,
            guard=FloodGuard(share=1, of=10**6, in_a_row=10**6),
        )
        self.pipeline.handler(self._handle)
        place = Place(self.database, self.pipeline)
        place.hold()
        for number in range(2):
            place.add(TOPIC, number, "an id", 0)
        place.close()
        self.watch = psycopg.connect(self.database, autocommit=True)
        self.connections.append(self.watch)
        split = [[0, 1]] if together else [[0], [1]]
        self.workers = {
            number: worker
            for worker in (self.worker(self, partitions) for partitions in split)
            for number in worker.partitions
        }

    def written(self, event: Any, own: str | None) -> list[Any]:
        """A row for every event that took effect, and the last one of each key."""
        row = {
            "pipeline": self.pipeline.name,
            "partition": event.partition,
            "number": event.offset,
        }
        effects: list[Any] = [Insert("effects", row)]
        if self.pipeline.key is None:
            own = None if event.key is None else event.key.hex()
        if own is not None:
            effects.append(Upsert("states", {**row, "id": own}, key=("pipeline", "id")))
        return effects

    def replace(self, worker: Worker) -> None:
        """Another process takes what a worker held."""
        fresh = self.worker(self, worker.partitions)
        for number in fresh.partitions:
            self.workers[number] = fresh

    def ask(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Look at the database from outside."""
        named = {"pipeline": self.pipeline.name} | values
        return self.watch.execute(statement, named).fetchall()

    def teardown(self) -> None:
        """Close everything."""
        for connection in self.connections:
            connection.close()


def check(machine: Callable[[str], Stage], database: str, examples: int, steps: int) -> None:
    """Run so many histories of so many steps."""
    with psycopg.connect(database) as connection:
        schema.migrate(connection)
        connection.execute(TABLES)
        # Nothing here is about a server that crashes: no need to wait for its disk.
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("alter database {} set synchronous_commit = off").format(name))
    run_state_machine_as_test(
        lambda: machine(database),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
