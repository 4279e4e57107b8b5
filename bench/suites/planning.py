"""How long the plan of a release takes with a million events parked, and how long its freezing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from bench.suites import Bench, Finding, Outcome
from sideline import operations
from sideline.ledger import schema
from sideline.selections import Plan, Selection

PIPELINE = "bench"
AIM_SECONDS = 2.0
EVENTS_PER_KEY = (10, 1)
# The first event of a key failed, for one of two causes; the others wait behind it.
_LEDGER = (
    "insert into sideline.pipelines (name, topics) values ('bench', '{users}')",
    """
    insert into sideline.progress (
        pipeline, topic, partition, next_offset, consumed, parked, aside
    )
    values ('bench', 'users', 0, 0, %(events)s, %(events)s, %(keys)s)
    """,
    """
    insert into sideline.queues (pipeline, topic, home, digest, mark, events, since)
    select 'bench', 'users', 0, md5('key ' || number)::uuid, hashtext('key ' || number),
           %(events)s / %(keys)s, now() - interval '1 day' + number * interval '1 ms'
    from generate_series(1, %(keys)s) as numbers (number)
    """,
    """
    insert into sideline.keys (pipeline, topic, digest, key, queue, version)
    select pipeline, topic, digest, convert_to('key-' || id, 'UTF8'), id, id
    from sideline.queues
    """,
    """
    insert into sideline.events (
        pipeline, topic, partition, "offset", queue, state, why, key, value, timestamp_ms,
        stage, error, message, traceback, fingerprint, handler_version, parked_at
    )
    select 'bench', 'users', 0, number, 1 + (number - 1) %% %(keys)s, 'parked',
           case when failed then 'failed' else 'follows' end,
           convert_to('key-' || 1 + (number - 1) %% %(keys)s, 'UTF8'),
           convert_to(repeat('x', 200), 'UTF8'), 0,
           case when failed then 'handler' end, case when failed then 'ValueError' end,
           case when failed then 'no' end, case when failed then repeat('line ', 100) end,
           case when failed then 'cause' || number %% 2 end, 'version 1',
           now() - interval '1 day' + number * interval '1 ms'
    from generate_series(1, %(events)s) as numbers (number)
    cross join lateral (select number <= %(keys)s) as first (failed)
    """,
    """
    insert into sideline.causes (
        pipeline, topic, partition, fingerprint, error, stage, place, message, traceback,
        last_offset, parked
    )
    select pipeline, topic, partition, fingerprint, 'ValueError', 'handler', 'app.py:1 in login',
           'no', 'Traceback', max("offset"), count(*)
    from sideline.events
    where fingerprint is not null
    group by pipeline, topic, partition, fingerprint
    """,
)


def run(bench: Bench) -> Outcome:
    """Plan releases by several choices, then freeze the largest."""
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for per_key in EVENTS_PER_KEY:
        events = bench.settings.parked_keys
        keys = events // per_key
        with bench.services.fresh_database() as database:
            bench.narrator.say(f"park {events:,} events of {keys:,} keys")
            _fill(database, events, keys)
            for what, chosen in (
                ("all", {}),
                ("one of two causes", {"cause": "cause0"}),
                ("the first 10", {"first": 10}),
            ):
                seconds = _seconds(bench, database, **chosen)
                name = f"plan of {what}: {events:,} events, {keys:,} keys"
                rows.append({"what": name, "measured": f"{seconds:.2f} s"})
                findings.append(Finding(name, seconds, AIM_SECONDS, at_least=False, unit=" s"))
            with _planned(database) as (connection, plan):
                begun = time.perf_counter()
                operations.execute(connection, plan, actor="bench")
                took = time.perf_counter() - begun
            rows.append({"what": f"freeze {keys:,} keys", "measured": f"{took:.1f} s"})
    return Outcome("planning", "Planning a release", rows, findings)


def _fill(database: str, events: int, keys: int) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        schema.migrate(connection)
        for statement in _LEDGER:
            connection.execute(statement, {"events": events, "keys": keys})
        # Now, and not by itself in the middle of a measurement.
        connection.execute("vacuum (analyze, freeze)")


def _seconds(bench: Bench, database: str, **chosen: Any) -> float:
    found = []
    for _ in range(bench.settings.slice_rounds):
        begun = time.perf_counter()
        with _planned(database, **chosen):
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


@contextmanager
def _planned(database: str, **chosen: Any) -> Iterator[tuple[psycopg.Connection[Any], Plan]]:
    with psycopg.connect(database) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield connection, operations.plan(connection, Selection("release", PIPELINE, **chosen))
