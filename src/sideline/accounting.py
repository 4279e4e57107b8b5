"""Whether the books balance: each partition's counters against the ledger's rows.

Every slice changes both in one transaction, so one snapshot has to agree at every moment, also
while the pipeline runs. Events that were consumed and are neither applied nor accounted for
would show here.

An event is counted in the partition that it was consumed from, for ever: also when it comes back
from a retry topic, whose own partitions count copies, and no events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from psycopg.rows import class_row, dict_row

from sideline.ledger.reading import opened, waiting
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Two numbers that should be one, or something that should not be."""

    pipeline: str
    partition: str
    """``topic/partition``."""
    message: str
    counted: int
    found: int


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """A partition's counters, and what the ledger holds of it."""

    topic: str
    partition: int
    known: bool
    """Whether it has a progress row."""
    consumed: int
    applied: int
    filtered: int
    skipped: int
    unknown: int
    parked: int
    retrying: int
    dead: int
    discarded: int
    duplicate: int
    aside: int
    parked_events: int
    retrying_events: int
    dead_events: int
    discarded_events: int
    queues: int
    skipped_by_cause: int
    unsent: int
    unsent_records: int

    @property
    def name(self) -> str:
        """``topic/partition``."""
        return f"{self.topic}/{self.partition}"

    def differences(self, pipeline: str) -> Iterator[Difference]:
        """What does not add up in it."""
        if not self.known:
            # A person accepted that the partition is gone; what it had skipped went with it.
            rows = self.parked_events + self.retrying_events + self.queues
            if rows:
                message = "events and queues of a partition that has no progress"
                yield Difference(pipeline, self.name, message, 0, rows)
            return
        done = self.applied + self.filtered + self.skipped + self.unknown + self.discarded
        accounted = done + self.parked + self.retrying + self.dead + self.duplicate
        pairs = (
            ("events consumed, and accounted for", self.consumed, accounted),
            ("events parked, by the counter and by their rows", self.parked, self.parked_events),
            (
                "events retrying, by the counter and by their rows",
                self.retrying,
                self.retrying_events,
            ),
            ("events dead, by the counter and by their rows", self.dead, self.dead_events),
            (
                "events discarded, by the counter and by their rows",
                self.discarded,
                self.discarded_events,
            ),
            ("keys aside, by the counter and by their queues", self.aside, self.queues),
            (
                "events skipped, by the counter and by their causes",
                self.skipped,
                self.skipped_by_cause,
            ),
            (
                "records unsent, by the counter and by the outbox",
                self.unsent,
                self.unsent_records,
            ),
        )
        for message, counted, found in pairs:
            if counted != found:
                yield Difference(pipeline, self.name, message, counted, found)


@dataclasses.dataclass(frozen=True, slots=True)
class Books:
    """A pipeline's accounts."""

    pipeline: str
    partitions: list[Account]
    differences: list[Difference]


def check(url: str, name: str | None = None) -> list[Books]:
    """The accounts of every pipeline, or of one, all of one moment."""
    with opened(url, role="check") as connection:
        return [_books(connection, pipeline) for pipeline in waiting(connection, name)]


def _books(connection: Connection, pipeline: str) -> Books:
    cursor = connection.cursor(row_factory=class_row(Account))
    named = {"pipeline": pipeline}
    accounts = cursor.execute(queries()["check_partitions"], named).fetchall()
    differences = [found for account in accounts for found in account.differences(pipeline)]
    differences += _causes(connection, pipeline)
    differences += _queues(connection, pipeline)
    differences += _loose(connection, pipeline)
    return Books(pipeline, accounts, differences)


def _causes(connection: Connection, pipeline: str) -> Iterator[Difference]:
    cursor = connection.cursor(row_factory=dict_row)
    for row in cursor.execute(queries()["check_causes"], {"pipeline": pipeline}):
        message = f"events parked for cause {row['fingerprint']}, by the counter and by their rows"
        partition = f"{row['topic']}/{row['partition']}"
        yield Difference(pipeline, partition, message, row["counted"], row["found"])


def _queues(connection: Connection, pipeline: str) -> Iterator[Difference]:
    cursor = connection.cursor(row_factory=dict_row)
    for row in cursor.execute(queries()["check_queues"], {"pipeline": pipeline}):
        partition, queue = f"{row['topic']}/{row['home']}", f"queue {row['id']}"
        counted, found = row["counted"], row["found"]
        if counted != found:
            message = f"events in {queue}, by the counter and by their rows"
            yield Difference(pipeline, partition, message, counted, found)
        if not found:
            message = f"a key is aside, and nothing waits in its {queue}"
            yield Difference(pipeline, partition, message, 1, 0)
        if not row["has_key"]:
            message = f"events wait in {queue}, and no key is aside for it"
            yield Difference(pipeline, partition, message, found, 0)


def _loose(connection: Connection, pipeline: str) -> Iterator[Difference]:
    for topic, partition, offset in connection.execute(
        queries()["check_loose"], {"pipeline": pipeline}
    ):
        message = f"event {topic}/{partition}/{offset} has a key, and waits in no queue"
        yield Difference(pipeline, f"{topic}/{partition}", message, 1, 0)
