"""A worker's sign of life, independent of what it commits; and what it hears meanwhile."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from sideline.engine.lease import Partition
from sideline.ledger.connection import connect
from sideline.ledger.sql import queries
from sideline.ledger.store import channel

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

BEAT_SECONDS = 1.0

log = logging.getLogger(__name__)


class Pulse:
    """A thread with a connection of its own; it beats only while a lease runs."""

    def __init__(self, url: str, pipeline: str) -> None:
        self.worker = uuid.uuid4()
        self.released = threading.Event()
        """Somebody released partitions of this pipeline."""
        self.stop_wanted = threading.Event()
        """The lease should end at the next slice boundary."""
        self.paused: frozenset[Partition] = frozenset()
        """Partitions that should be let go at the next slice boundary, and not be taken."""
        self.all_paused = False
        """The same for all of them: only what is in outboxes is still sent."""
        self.operations = False
        """Whether somebody wants events back: worth a look at what waits in one's partitions."""
        self._url = url
        self._pipeline = pipeline
        self._epoch = 0
        self._running = threading.Event()
        self._ended = False
        self._connection: Connection | None = None
        self._beat_at = 0.0
        self._thread: threading.Thread | None = None

    def start(self, epoch: int, connection: Connection) -> None:
        """Beat once, so that nobody takes this worker for dead, then every second.

        The first beat goes through the caller's connection: this one may be listening.
        """
        self._epoch = epoch
        self.released.clear()
        self.stop_wanted.clear()
        self._beat(connection)
        connection.commit()
        self._running.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sideline-pulse", daemon=True)
            self._thread.start()

    def renew(self) -> None:
        """Be another worker from now on: what the old one still holds is free after the grace."""
        self.worker = uuid.uuid4()

    def rest(self) -> None:
        """No lease, no sign of life."""
        self._running.clear()

    def close(self) -> None:
        """End the thread and its connection."""
        self._ended = True
        self._running.set()
        if self._thread is not None:
            self._thread.join(timeout=BEAT_SECONDS * 3)

    def _run(self) -> None:
        while True:
            self._running.wait()
            if self._ended:
                break
            try:
                self._listen()
                if time.monotonic() >= self._beat_at:
                    self._beat(self._connected())
            except psycopg.Error as error:
                # The worker's own connection will meet the same fate and deal with it.
                log.debug("no sign of life possible: %s", error)
                self._drop()
                threading.Event().wait(BEAT_SECONDS / 4)
        self._farewell()
        self._drop()

    def _farewell(self) -> None:
        """Nobody has to wait for a worker that has ended."""
        try:
            self._connected().execute(queries()["farewell"], {"worker": self.worker})
        except psycopg.Error as error:
            log.debug("no farewell possible: %s", error)

    def _listen(self) -> None:
        """Until the next beat, or until somebody released something."""
        connection = self._connected()
        wait = max(0.0, self._beat_at - time.monotonic())
        for _ in connection.notifies(timeout=wait, stop_after=1):
            self.released.set()

    def _beat(self, connection: Connection) -> None:
        self._beat_at = time.monotonic() + BEAT_SECONDS
        connection.execute(
            queries()["beat"],
            {
                "worker": self.worker,
                "pipeline": self._pipeline,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
        )
        row = connection.execute(
            queries()["stop_wanted"], {"pipeline": self._pipeline, "epoch": self._epoch}
        ).fetchone()
        if row is None or row[0]:
            self.stop_wanted.set()
        self.operations = bool(row is not None and row[2])
        # Replaced as a whole: the worker reads it without a lock.
        paused = row[1] if row is not None and row[1] else ()
        self.paused = frozenset(Partition(topic, number) for topic, number in paused)
        self.all_paused = bool(row is not None and row[3])

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._url, role=f"pulse {self._pipeline}", autocommit=True)
            listen = sql.SQL("listen {}").format(sql.Identifier(channel(self._pipeline)))
            self._connection.execute(listen)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
