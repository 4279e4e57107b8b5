"""What a lease works with as long as its connection to PostgreSQL lasts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sideline.engine.forwarding import Forwarder
from sideline.engine.replaying import Replayer
from sideline.homes.calls import CallsHome
from sideline.homes.duplicates import Claims
from sideline.homes.home import Home
from sideline.homes.kafka import KafkaHome
from sideline.homes.outgoing import Outgoing
from sideline.homes.postgres import PostgresHome
from sideline.homes.records import RecordsHome
from sideline.homes.setbacks import Setter
from sideline.ledger import contents
from sideline.ledger.outbox import Outbox
from sideline.ledger.parking import Parking
from sideline.ledger.pending import Pendings
from sideline.ledger.registry import Registry
from sideline.ledger.replay import Replays
from sideline.ledger.store import Claim, Ledger
from sideline.sinks import Calls, Kafka

if TYPE_CHECKING:
    from sideline.engine.lease import Lease
    from sideline.engine.window import Pool
    from sideline.engine.worker import Worker
    from sideline.ledger.connection import Connection


class Tools:
    """The ledger, the home and what else stands on one connection."""

    def __init__(self, worker: Worker, lease: Lease, claim: Claim, connection: Connection) -> None:
        pipeline = worker.pipeline
        self._worker = worker
        self._claim = claim
        self.connection = connection
        self.ledger = Ledger(connection, claim, grace_seconds=_grace_seconds(worker))
        publishes = isinstance(pipeline.sink, Kafka)
        self.parking = Parking(
            connection,
            pipeline.name,
            version=worker.handler_version,
            pends=publishes and pipeline.delivery == "exactly-once",
        )
        self.registry = (
            None
            if pipeline.again is None
            else Registry(connection, pipeline.again, pipeline.key_of)
        )
        self.outgoing = Outgoing(pipeline, worker.rooms)
        self.setter = Setter(
            pipeline,
            self.parking,
            guarded=lease.guard,
            room=worker.rooms if pipeline.own_topics else None,
            outgoing=self.outgoing,
        )
        dialect = getattr(pipeline.on_failure, "dialect", None)
        self.forwarder = Forwarder(worker, Outbox(connection, claim, dialect=dialect))
        self.claims = Claims(pipeline, connection)
        self.rows = PostgresHome(
            pipeline, connection, worker.writer(), self.ledger, self.setter, self.claims
        )
        fetch = partial(contents.fetch, connection, worker.kafka, pipeline.name)
        self._replays = Replays(connection, claim, self.parking, fetch, worker.ahead)
        self._publishing = self._publishes() if publishes else None
        self.home: Home = self._publishing or (
            CallsHome(connection, self.ledger, self.setter, self.claims)
            if isinstance(pipeline.sink, Calls)
            else self.rows
        )

    def _publishes(self) -> KafkaHome:
        """The home of a pipeline that publishes."""
        worker, replays = self._worker, self._replays
        kind = KafkaHome if self.parking.pends else RecordsHome
        pendings = Pendings(
            self.connection, self._claim, self.parking, self.setter.copying, replays
        )
        home = kind(
            self.connection,
            self.ledger,
            self.setter,
            pendings,
            replays,
            worker.transactor,
            worker.blamed,
            self.claims,
        )
        if isinstance(home, RecordsHome):
            home.outlet = worker.outlet
        return home

    def replayer(self, pool: Pool | None) -> Replayer:
        """What brings released events back."""
        worker, connection = self._worker, self.connection
        return Replayer(
            worker.pipeline,
            connection,
            replays=self._replays,
            publishing=self._publishing,
            ledger=self.ledger,
            parking=self.parking,
            claims=self.claims,
            outgoing=self.outgoing,
            writer=worker.writer(),
            clock=worker.clock,
            pool=pool,
            knows=None if worker.preparation is None else worker.preparation.knows,
        )

    @property
    def gone(self) -> bool:
        """Whether the connection is of no use any more."""
        return self.connection.broken or self.connection.closed


def _grace_seconds(worker: Worker) -> float:
    # A call that is still under way must not be overtaken by its successor.
    if isinstance(worker.pipeline.sink, Calls) and worker.pipeline.handler_timeout:
        return worker.grace_seconds + worker.pipeline.handler_timeout
    return worker.grace_seconds
