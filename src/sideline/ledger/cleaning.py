"""Rows that are over and old: taken away in small bites, so that nobody waits for it.

What still waits (parked, retrying, dead) is never touched. Of a discarded event only the bytes
go: its offset stays known, so that applying the topic again leaves it out (R5).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from sideline.ledger import erasing
from sideline.ledger.sql import queries
from sideline.retention import Retention

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# A bite takes milliseconds; locked rows are left for the next one.
BITE = 1_000
# Of message ids there are as many as events: bites of more rows, as many as fit into this time.
IDS = "message ids"
IDS_BITE = 10_000
IDS_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one kind: what they are called, how old they may be, and the statement."""

    name: str
    query: str
    age: Callable[[Retention], timedelta | None]


KINDS = (
    Kind("events", "clean_events", lambda keep: keep.events),
    Kind("events that came back", "clean_resolved", lambda keep: keep.events),
    Kind("bytes of discarded events", "clean_discarded", lambda keep: keep.events),
    Kind("items of operations", "clean_operation_items", lambda keep: keep.operations),
    Kind("operations", "clean_operations", lambda keep: keep.operations),
    Kind("alerts", "clean_alerts", lambda keep: keep.alerts),
    # They have an age of their own: what their pipeline asked for.
    Kind(IDS, "clean_message_ids", lambda _: timedelta()),
    Kind("audit", "clean_audit", lambda keep: keep.audit),
)
RUNS = "runs"


def step(
    connection: Connection, pipeline: str | None, keep: Retention, *, bite: int | None = None
) -> dict[str, int]:
    """Take one bite of every kind, each in a transaction of its own; how much of each was taken."""
    bite = bite or BITE
    taken: dict[str, int] = {}
    if keep.operations is not None and pipeline is not None:
        taken[RUNS] = _forget_a_run(connection, pipeline, keep.operations)
    # The audit comes last: a worker's role may not touch it.
    for kind in KINDS:
        age = kind.age(keep)
        if age is None:
            continue
        named = {"pipeline": pipeline, "age": age, "limit": bite}
        if kind.name == IDS:
            taken[IDS] = _clean_ids(connection, named)
            continue
        taken[kind.name] = connection.execute(queries()[kind.query], named).rowcount
        connection.commit()
    return taken


def _clean_ids(connection: Connection, named: Mapping[str, object]) -> int:
    until = time.monotonic() + IDS_SECONDS
    total = 0
    while True:
        count = connection.execute(
            queries()["clean_message_ids"], {**named, "limit": IDS_BITE}
        ).rowcount
        connection.commit()
        total += count
        if count < IDS_BITE or time.monotonic() > until:
            return total


def is_done(taken: dict[str, int], *, bite: int | None = None) -> bool:
    """Whether nothing old is left that the last bite could have taken."""
    most = bite or BITE
    return not taken.get(RUNS, 0) and all(count < most for count in taken.values())


def count(connection: Connection, pipeline: str | None, keep: Retention) -> dict[str, int]:
    """How much there is to clean, by kind."""
    ages = {name: getattr(keep, name) for name in ("events", "operations", "alerts", "audit")}
    row = connection.execute(queries()["count_old"], {"pipeline": pipeline, **ages}).fetchone()
    connection.rollback()
    names = (*(kind.name for kind in KINDS), RUNS)
    return dict(zip(names, row or (), strict=False))


def merged(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums by kind."""
    total: dict[str, int] = {}
    for part in parts:
        for name, number in part.items():
            total[name] = total.get(name, 0) + number
    return total


def _forget_a_run(connection: Connection, pipeline: str, age: timedelta) -> int:
    """One run that has been over for long goes, with everything of it."""
    named = {"pipeline": pipeline, "age": age}
    row = connection.execute(queries()["old_run"], named).fetchone()
    if row is None:
        connection.rollback()
        return 0
    erasing.remove(connection, [row[0]])
    connection.commit()
    return 1
