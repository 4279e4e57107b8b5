"""One partition of a pipeline, committed in this process: slices without Kafka and Spark."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

import psycopg

from sideline import Event, FloodGuard, Pipeline
from sideline.engine.attempts import SLICE_EVENTS
from sideline.engine.handling import handle
from sideline.engine.lease import Partition
from sideline.engine.replaying import Replayer
from sideline.events import Delivery
from sideline.homes.postgres import PostgresHome
from sideline.homes.setbacks import Setter
from sideline.homes.writer import Writer
from sideline.ledger import schema
from sideline.ledger.connection import Connection, connect
from sideline.ledger.parking import Parking
from sideline.ledger.place import Place
from sideline.ledger.replay import Replays
from sideline.ledger.store import Claim, Held, Ledger
from sideline.slices import Aside, Outcome
from sideline.testing import FakeClock

TOPIC = "alone"
_GRACE_SECONDS = 10.0
# Whoever measures what failures cost wants them all.
NO_GUARD = FloodGuard(share=1, of=1_000_000, in_a_row=1_000_000)


class Took(NamedTuple):
    """How long a slice took, and what became of it."""

    handle_seconds: float
    commit_seconds: float
    outcome: Outcome

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.handle_seconds + self.commit_seconds


class Alone:
    """Owns the partition and commits one slice after the other, as a worker would."""

    def __init__(self, pipeline: Pipeline, connection: Connection, epoch: int) -> None:
        self._pipeline = pipeline
        self._aside = Aside()
        # Time stands still in handlers, so that no slice is cut because the machine is slow.
        self._clock = FakeClock()
        claim = Claim(pipeline.name, (epoch, 1, 0), uuid.uuid4(), uuid.uuid4())
        ledger = Ledger(connection, claim, grace_seconds=_GRACE_SECONDS)
        parking = Parking(connection, pipeline.name, version=pipeline.version)
        self._held: Held = ledger.take([Partition(TOPIC, 0)])[0]
        writer = Writer(connection)
        self._home = PostgresHome(pipeline, connection, writer, ledger, Setter(pipeline, parking))
        self._replays = Replays(connection, claim, parking)
        self._replayer = partial(
            Replayer,
            pipeline,
            connection,
            replays=self._replays,
            ledger=ledger,
            parking=parking,
            writer=writer,
            clock=self._clock,
            pool=None,
        )

    @classmethod
    @contextlib.contextmanager
    def on(cls, database: str, pipeline: Pipeline) -> Iterator[Self]:
        """The first owner of a new pipeline's only partition."""
        with psycopg.connect(database) as connection:
            schema.migrate(connection)
        with (
            contextlib.closing(Place(database, pipeline)) as place,
            contextlib.closing(connect(database, role="bench")) as connection,
        ):
            place.hold()
            place.add(TOPIC, 0, "no topic", 0)
            yield cls(pipeline, connection, place.epoch)

    def replay_all(self) -> None:
        """Carry out what was released, as a lease without live events would."""
        replayer = self._replayer()
        delivery = Delivery(replayed=True)
        while replayer.step(self._held, self._aside, delivery, limit=SLICE_EVENTS).operation:
            pass
        replayer.finish()

    def events(self, bodies: Sequence[tuple[str, bytes]]) -> list[Event]:
        """The next events, of keys and values."""
        first = self._held.next_offset
        now_ms = time.time_ns() // 1_000_000
        return [
            Event(TOPIC, 0, first + place, now_ms, key.encode(), value)
            for place, (key, value) in enumerate(bodies)
        ]

    def slice(self, events: Sequence[Event]) -> Took:
        """Handle and commit."""
        begun = time.perf_counter()
        handled, failure = handle(
            self._pipeline,
            events,
            start=self._held.next_offset,
            end=events[-1].offset + 1,
            clock=self._clock,
            aside=self._aside,
        )
        if failure is not None:
            raise failure.error
        between = time.perf_counter()
        outcome = self._home.commit(self._held, handled, self._aside)
        return Took(between - begun, time.perf_counter() - between, outcome)
