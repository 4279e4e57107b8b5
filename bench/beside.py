"""A worker without Spark on a real topic: live events, what comes back, and both at once."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import Producer

from bench import events as topics
from bench.alone import NO_GUARD
from bench.comeback import EVENT_BYTES, SLICE_EVENTS, check_done, release
from bench.services import USERS, Services
from sideline import Event, Pipeline, Upsert
from sideline.engine.lease import Lease, Share
from sideline.engine.worker import Access, Worker
from sideline.ledger import schema
from sideline.ledger.place import Place
from sideline.topics.admin import Cluster

# Long enough for all of it on a slow machine; a lease ends when there is nothing left to do.
LEASE_SECONDS = 600.0
_LOOK_SECONDS = 0.005
_STANDS = "select next_offset, parked from sideline.progress"


class Beside(NamedTuple):
    """Seconds for so many events, each time."""

    live_seconds: float
    replay_seconds: float
    live_beside_seconds: float
    """Live events while as many others come back."""


def measure(services: Services, events: int, keys: int) -> Beside:
    """Park; handle others live; release the parked; park again; both at once."""
    with _running(services) as bed:
        bed.publish("aside", events, keys)
        bed.work(_fail)
        bed.publish("live", events, keys)
        live = bed.work(_row).live
        bed.release()
        back = bed.work(_row).replayed
        bed.publish("again", events, keys)
        bed.work(_fail)
        bed.release()
        bed.publish("more", events, keys)
        beside = bed.work(_row).live
        bed.check()
    return Beside(live, back, beside)


class _Clocks(NamedTuple):
    live: float
    replayed: float


class _Stopwatch:
    """From the first event of a kind to the commit of the last one.

    Not to the last event: of live events a quarter is still to be committed then, of those that
    come back in smaller slices less, and the one would look quicker beside the other.
    """

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def hit(self) -> None:
        if not self.first:
            self.first = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.last - self.first if self.first else 0.0


class _Watch:
    """Sees from outside when progress moved last, and when something came back last."""

    def __init__(self, database: str, live: _Stopwatch, back: _Stopwatch) -> None:
        self._database = database
        self._live, self._back = live, back
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with psycopg.connect(self._database, autocommit=True) as connection:
            before = None
            ended = False
            while not ended:
                # Asked before the look: what was committed last is still seen.
                ended = self._over.wait(_LOOK_SECONDS)
                (stands,) = connection.execute(_STANDS).fetchall()
                now = time.perf_counter()
                if before is not None and stands[0] != before[0]:
                    self._live.last = now
                if before is not None and stands[1] != before[1]:
                    self._back.last = now
                before = stands


class _Bed:
    """One partition of a topic, and the worker that owns it."""

    def __init__(self, services: Services, database: str, topic: str) -> None:
        self._services = services
        self._database = database
        self._topic = topic
        self._pipeline = Pipeline("bench", topics=topic, guard=NO_GUARD, slice_size=SLICE_EVENTS)
        self._pipeline.handler(_row)
        self._round = 0
        self._end = 0
        self._operations: list[int] = []
        with contextlib.closing(Place(database, self._pipeline)) as place:
            place.hold()
            self._epoch = place.epoch
            known = Cluster({"bootstrap.servers": services.bootstrap}).topic(topic)
            place.add(topic, 0, known.id, 0)

    def publish(self, name: str, events: int, keys: int) -> None:
        producer = Producer({"bootstrap.servers": self._services.bootstrap, "linger.ms": 20})
        for index in range(events):
            key = f"{name}-{index % keys:08d}"
            body = topics.user(key, index, EVENT_BYTES)
            producer.produce(self._topic, body, key, partition=0)
            if not index % SLICE_EVENTS:
                producer.flush()
        producer.flush()
        self._end += events

    def release(self) -> None:
        with psycopg.connect(self._database, autocommit=True) as connection:
            self._operations.append(release(connection))

    def work(self, handler: Any) -> _Clocks:
        """One lease that ends when everything is done."""
        live, back = _Stopwatch(), _Stopwatch()

        def handle(event: Event) -> Any:
            (back if event.delivery.replayed else live).hit()
            return handler(event)

        self._pipeline.handler(handle)
        self._round += 1
        access = Access(self._database, {"bootstrap.servers": self._services.bootstrap})
        with contextlib.closing(Worker(self._pipeline, access)) as worker:
            share = Share(self._topic, 0, self._end)
            until = time.time() + LEASE_SECONDS
            with _Watch(self._database, live, back):
                report = worker.work(Lease("bench", self._epoch, self._round, (share,), until))
        if report.failure is not None or report.trouble:
            message = f"the worker said: {report.failure or report.trouble}"
            raise RuntimeError(message)
        return _Clocks(live.seconds, back.seconds)

    def check(self) -> None:
        with psycopg.connect(self._database, autocommit=True) as connection:
            for operation in self._operations:
                check_done(connection, self._database, operation)


@contextlib.contextmanager
def _running(services: Services) -> Iterator[_Bed]:
    topic = f"beside-{uuid.uuid4().hex[:8]}"
    topics.create_topic(services.bootstrap, topic, 1)
    try:
        with services.fresh_database(USERS) as database:
            with psycopg.connect(database) as connection:
                schema.migrate(connection)
            yield _Bed(services, database, topic)
    finally:
        topics.delete_topic(services.bootstrap, topic)


def _row(event: Event) -> Upsert:
    body = event.json()
    return Upsert("users", {name: body[name] for name in ("id", "name", "email", "seq")}, key="id")


def _fail(_event: Event) -> None:
    message = "not yet"
    raise ValueError(message)
