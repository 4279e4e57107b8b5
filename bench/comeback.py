"""How fast parked events come back, against the same events live: slices in one process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg

from bench.alone import NO_GUARD, TOPIC, Alone
from bench.events import user
from bench.services import USERS, Services
from sideline import Event, Pipeline, Upsert
from sideline.accounting import check

SLICE_EVENTS = 25_000
EVENT_BYTES = 200
_OPERATION = """
insert into sideline.operations (pipeline, kind, selection, actor, items, events, plan)
select 'bench', 'release', '{}', 'bench', count(*), sum(events), ''
from sideline.queues
returning id
"""
_ITEMS = """
insert into sideline.operation_items (operation, number, topic, home, queue)
select %(operation)s, id, topic, home, id
from sideline.queues
"""
_STATE = "select state from sideline.operations where id = %(operation)s"
Body = tuple[str, bytes]


class Comeback(NamedTuple):
    """Seconds for the same events, first live, then out of the ledger."""

    live_seconds: float
    replay_seconds: float


class Tail(NamedTuple):
    """What one key with a long tail costs a process that does nothing else."""

    seconds: float
    grown_bytes: int
    """The peak of its memory, beyond what it had before."""


def bodies(events: int, keys: int) -> list[Body]:
    """Users that change again and again, in turns."""
    names = [f"user-{number:08d}" for number in range(keys)]
    return [
        (names[index % keys], user(names[index % keys], index, EVENT_BYTES))
        for index in range(events)
    ]


def measure(services: Services, events: int, keys: int) -> Comeback:
    """Apply them live; park them elsewhere and release them."""
    some = bodies(events, keys)
    with services.fresh_database(USERS) as database, Alone.on(database, _pipeline()) as alone:
        live = _through(alone, some)
    with services.fresh_database(USERS) as database:
        pipeline = _pipeline(fails=True)
        with Alone.on(database, pipeline) as alone:
            _through(alone, some)
            with psycopg.connect(database, autocommit=True) as connection:
                operation = release(connection)
                pipeline.handler(_row)
                begun = time.perf_counter()
                alone.replay_all()
                took = time.perf_counter() - begun
                check_done(connection, database, operation)
    return Comeback(live, took)


def measure_tail(services: Services, events: int) -> Tail:
    """Park one key with so many events, and release it in another process."""
    with services.fresh_database(USERS) as database:
        with Alone.on(database, _pipeline(fails=True)) as alone:
            _through(alone, bodies(events, 1))
        with psycopg.connect(database, autocommit=True) as connection:
            operation = release(connection)
            command = [sys.executable, "-m", "bench.comeback", database]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            check_done(connection, database, operation)
            ((seq,),) = connection.execute("select seq from users").fetchall()
        if seq != events - 1:
            message = f"the last event of the tail is number {seq}"
            raise RuntimeError(message)
    return Tail(**json.loads(said))


def _replay_here(database: str) -> Tail:
    with Alone.on(database, _pipeline()) as alone:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.perf_counter()
        alone.replay_all()
        took = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Tail(took, (after - before) * 1024)


def _through(alone: Alone, some: Sequence[Body]) -> float:
    begun = time.perf_counter()
    for start in range(0, len(some), SLICE_EVENTS):
        alone.slice(alone.events(some[start : start + SLICE_EVENTS]))
    return time.perf_counter() - begun


def release(connection: psycopg.Connection[Any]) -> int:
    """Everything that waits; the operation's number."""
    ((operation,),) = connection.execute(_OPERATION).fetchall()
    connection.execute(_ITEMS, {"operation": operation})
    connection.execute("vacuum (analyze)")
    return int(operation)


def check_done(connection: psycopg.Connection[Any], database: str, operation: int) -> None:
    """Whether all of it came back, and the books balance."""
    ((state,),) = connection.execute(_STATE, {"operation": operation}).fetchall()
    (books,) = check(database, "bench")
    if state != "done" or books.differences:
        message = f"the release is {state}; {books.differences}"
        raise RuntimeError(message)


def _pipeline(*, fails: bool = False) -> Pipeline:
    pipeline = Pipeline("bench", topics=TOPIC, guard=NO_GUARD, slice_size=SLICE_EVENTS)
    pipeline.handler(_fail if fails else _row)
    return pipeline


def _row(event: Event) -> Upsert:
    body = event.json()
    return Upsert("users", {name: body[name] for name in ("id", "name", "email", "seq")}, key="id")


def _fail(_event: Event) -> None:
    message = "not yet"
    raise ValueError(message)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_replay_here(sys.argv[1])._asdict()))
