"""Offsets that go with a transaction of Kafka, added within a time that holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from sideline.clients import throw_away

# What a call that keeps its word may be late.
GRACE_SECONDS = 2.0

log = logging.getLogger(__name__)


class Offsets:
    """Adds offsets to transactions in a thread of its own, and waits for it as long as it said.

    librdkafka (2.16, and all before) does not look at the timeout of this one call while it has no
    connection to a group's coordinator, and waits for the one it remembers, also if that broker has
    left for good (its issues 5456 and 5511). A producer that hangs there stays with the thread.
    """

    def __init__(self) -> None:
        self._errands: SimpleQueue[_Errand | None] | None = None

    def add(
        self, producer: Producer, spot: TopicPartition, members: Sequence[Any], seconds: float
    ) -> None:
        """Under each group; raises KafkaException, also where the time is over.

        Then the producer is good for nothing: its successor's init ends the transaction.
        """
        if self._errands is None:
            self._errands = SimpleQueue()
            # A daemon: a call that never ends keeps no process alive.
            threading.Thread(
                target=_run, args=(self._errands,), name="sideline-offsets", daemon=True
            ).start()
        errand = _Errand(producer, spot, members, seconds)
        self._errands.put(errand)
        try:
            errand.done.result(seconds * len(members) + GRACE_SECONDS)
        except TimeoutError:
            errand.late = True
            self.rest()
            message = "the offsets were not added to the transaction in time"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, message)) from None  # noqa: SLF001

    def rest(self) -> None:
        """Let the thread end, once it can."""
        if self._errands is not None:
            self._errands.put(None)
            self._errands = None


class _Errand:
    """One call for each group, and what became of it."""

    __slots__ = ("done", "late", "members", "producer", "seconds", "spot")

    def __init__(
        self, producer: Producer, spot: TopicPartition, members: Sequence[Any], seconds: float
    ) -> None:
        self.producer, self.spot, self.members, self.seconds = producer, spot, members, seconds
        self.done: Future[None] = Future()
        self.late = False
        """Whether nobody waits for it any more."""

    def run(self) -> None:
        try:
            for member in self.members:
                self.producer.send_offsets_to_transaction([self.spot], member, self.seconds)
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            self.done.set_exception(error)
        else:
            self.done.set_result(None)
        if self.late:
            log.debug("the offsets of a transaction that was given up are over now")
            throw_away(self.producer)


def _run(errands: SimpleQueue[_Errand | None]) -> None:
    while (errand := errands.get()) is not None:
        errand.run()
        # A producer that is thrown away goes at once, not when the next one comes.
        del errand
