"""The next slice of a release, read while the one before it is applied.

Only read: every row is looked at again in the transaction that takes it out of its queue, as if it
had been read a moment ago (`Stale`). While PostgreSQL finds these rows, the worker handles others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from sideline import arrays
from sideline.ledger.sql import queries
from sideline.replays import Choice, Item, choose

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Held

# How often somebody who waits for what is read looks whether it is still of use.
LOOK_SECONDS = 0.002

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """What is read ahead."""

    held: Held
    operation: int
    after: int
    """The number of the last item of the slice that is applied meanwhile."""
    limit: int
    names: Mapping[str, Any]


class Foreseen(NamedTuple):
    """What was found, as it was then."""

    wanted: Wanted
    choice: Choice
    rows: list[tuple[Any, ...]]
    tried: int = 0
    """How many events of the operation were tried in this partition before; known once it is
    taken."""


class ReadAhead:
    """Reads one slice at a time, through a connection of its own that it opens when needed."""

    def __init__(self, connects: Callable[[], Connection]) -> None:
        self._connects = connects
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._wanted: Wanted | None = None
        self._found: Foreseen | None = None

    def start(self, wanted: Wanted) -> None:
        """Begin to read; what was read before and not taken is forgotten."""
        self.take()
        self._wanted = wanted
        # A daemon: a database that does not answer keeps no process alive.
        self._thread = threading.Thread(
            target=self._read, args=(wanted,), name="sideline-ahead", daemon=True
        )
        self._thread.start()

    def is_for(self, held: Held) -> bool:
        """Whether it is this partition's slice that was read, or is being read."""
        return self._wanted is not None and self._wanted.held is held

    def take(self) -> Foreseen | None:
        """What was read, once and for all; None: there is nothing, or it could not be read."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        found, self._found, self._wanted = self._found, None, None
        return found

    def look(self, patient: Callable[[], bool]) -> Foreseen | None:
        """What was read, without taking it; None also if that took longer than one is patient."""
        while self._thread is not None and self._thread.is_alive():
            if not patient():
                return None
            self._thread.join(LOOK_SECONDS)
        return self._found

    def rest(self) -> None:
        """No connection is kept for what nobody wants."""
        self.take()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, wanted: Wanted) -> None:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = self._connects()
            self._found = _foresee(self._connection, wanted)
        except psycopg.Error as error:
            # The worker reads by itself then, and deals with whatever this was.
            log.debug("nothing could be read ahead: %s", error)
            if self._connection is not None:
                self._connection.close()


def _foresee(connection: Connection, wanted: Wanted) -> Foreseen | None:
    query = queries()["items_waiting"]
    found = connection.execute(query, wanted.names, binary=True).fetchall()
    items = [item for row in found if (item := Item(*row)).operation == wanted.operation]
    choice = choose(items, wanted.limit)
    if not choice.queues:
        return None
    return Foreseen(wanted, choice, waiting_rows(connection, wanted.names, choice))


def waiting_rows(
    connection: Connection, names: Mapping[str, Any], choice: Choice
) -> list[tuple[Any, ...]]:
    """The events of the queues of a slice."""
    given = {
        "queues": arrays.numbers([item.queue for item in choice.queues]),
        "limits": arrays.numbers(choice.limits),
    }
    query = queries()["waiting_events"]
    return connection.execute(query, {**names, **given}, binary=True).fetchall()
