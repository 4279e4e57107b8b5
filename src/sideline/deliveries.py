"""What becomes of records that were published: handles, and the books in which failures stand."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer
from msgspec import Struct

from sideline import showing
from sideline.errors import NotDeliveredError, UsageError

# More of them would tell nobody more, and a topic that is gone fails a million records.
MOST_KEPT = 10_000
_SHOWN = 3
_WAIT_SECONDS = 0.1

_ABORTED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}  # noqa: SLF001 - librdkafka's
# Nobody answered: it may have been written nevertheless.
_UNSURE = {
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
}

log = logging.getLogger(__name__)


class Delivered(NamedTuple):
    """Where a record stands now."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    message_id: str | None


class Handle(Struct, gc=False, eq=False):
    """One record that was published, and what became of it.

    One is made for every record, and a hundred thousand may be under way: it is as small as can
    be, and what can be read from the report is not copied out of it.
    """

    book: Book
    head: bytes | None
    """The message id, as its header has it, or what it begins with; None if there is none."""
    number: bytes = b""
    """The rest of it."""
    report: Message | None = None
    """What librdkafka tells of the record, without its value."""

    @property
    def done(self) -> bool:
        """Whether its fate is known."""
        if self.report is None:
            self.book.listen(0)
        return self.report is not None

    @property
    def message_id(self) -> str | None:
        """What its header says; None if it has none."""
        return None if self.head is None else (self.head + self.number).decode(errors="replace")

    @property
    def partition(self) -> int | None:
        """Where it is; None if Kafka does not have it, or has not said so yet."""
        return None if self.report is None or self.failure else self.report.partition()

    @property
    def offset(self) -> int | None:
        """Its place in the partition; None as above."""
        return None if self.report is None or self.failure else self.report.offset()

    @property
    def timestamp_ms(self) -> int | None:
        """The record's time, as the topic has it; None as above."""
        return None if self.report is None or self.failure else self.report.timestamp()[1]

    @property
    def failure(self) -> KafkaError | None:
        """Why librdkafka could not deliver it; None: it could, or it is under way."""
        return None if self.report is None else self.report.error()

    @property
    def error(self) -> str | None:
        """Why Kafka does not have it; None: it has, or it is under way."""
        failure = self.failure
        if failure is not None:
            return reason(failure)
        over = self.report is not None and self.book.aborted
        return "its transaction was aborted" if over else None

    @property
    def purged(self) -> bool:
        """Whether it was not sent because its transaction, or the publisher, ended."""
        failure = self.failure
        return failure is not None and failure.code() in _ABORTED

    @property
    def topic(self) -> str | None:
        """Where it went; None while it is under way."""
        return None if self.report is None else self.report.topic()

    @property
    def key(self) -> bytes | None:
        """Its key; None while it is under way."""
        key: bytes | None = None if self.report is None else self.report.key()
        return key

    def result(self, timeout: float | None = None) -> Delivered:
        """Wait until Kafka has it; NotDeliveredError if it does not get it, TimeoutError if late.

        What was raised here is not raised by `flush` again.
        """
        report = self.book.wait_for(self, timeout)
        if self.error is not None:
            self.book.told(self)
            raise not_delivered([self], 1)
        return Delivered(
            report.topic() or "",
            report.partition() or 0,
            report.offset() or 0,
            report.timestamp()[1],
            self.message_id,
        )

    def __call__(self, error: KafkaError | None, report: Message) -> None:
        """Hear what became of it: librdkafka calls, for every record."""
        # Whoever keeps the handle does not keep the value.
        report.set_value(None)
        if error is None:
            self.report = report
        else:
            self.book.failed(self, report, error)

    def __repr__(self) -> str:
        if self.report is None:
            return f"<Handle {self.message_id}: under way>"
        if self.error is not None:
            return f"<Handle {self.topic}: {self.error}>"
        return f"<Handle {self.topic}/{self.partition}/{self.offset}>"


class Book:
    """The failures of one publisher, or of one of its transactions, that nobody knows of yet."""

    def __init__(self, producer: Producer) -> None:
        self.producer: Producer | None = producer
        """None when it is closed: whoever keeps handles does not keep a client."""
        self.aborted = False
        self._lock = threading.Lock()
        self._failures: dict[int, Handle] = {}
        self._beyond = 0

    def failed(self, handle: Handle, report: Message, error: KafkaError) -> None:
        """Keep a failure until somebody is told."""
        # Its report with it, behind the lock: whoever waits for the handle in another thread and
        # is told there has to find it here, or it would be told again.
        with self._lock:
            handle.report = report
            first = not self._failures
            if len(self._failures) < MOST_KEPT:
                self._failures[id(handle)] = handle
            else:
                self._beyond += 1
        if first and error.code() not in _ABORTED:
            log.warning("a record for %s was not delivered: %s", report.topic(), reason(error))

    def __bool__(self) -> bool:
        """Whether there is a failure in it."""
        return bool(self._failures)

    def told(self, handle: Handle) -> None:
        """Somebody knows of this one."""
        with self._lock:
            self._failures.pop(id(handle), None)

    def wait_for(self, handle: Handle, timeout: float | None) -> Message:
        """Wait until a record's fate is known."""
        until = None if timeout is None else time.monotonic() + timeout
        while handle.report is None:
            left = _WAIT_SECONDS if until is None else min(_WAIT_SECONDS, until - time.monotonic())
            if left < 0:
                message = f"the record is still under way after {timeout:g} s."
                raise TimeoutError(message)
            self.listen(left)
        return handle.report

    def listen(self, seconds: float) -> None:
        """Hear what became of records."""
        producer = self.producer
        if producer is None:
            message = "the publisher is closed, or belongs to another process."
            raise UsageError(message, hint="Ask a handle in the process that published.")
        producer.poll(seconds)

    def settle(self) -> NotDeliveredError | None:
        """What failed since the last time, as one error; the book is empty afterwards."""
        with self._lock:
            failures, beyond = (
                sorted(self._failures.values(), key=lambda one: one.purged),
                self._beyond,
            )
            self._failures.clear()
            self._beyond = 0
        return not_delivered(failures, len(failures) + beyond) if failures else None


def reason(error: KafkaError) -> str:
    """Why a record was not delivered, in words."""
    if error.code() in _ABORTED:
        return "it was given up before it was sent"
    text = f"{error.str().rstrip('.')} ({error.name()})"
    return f"{text}; it may be in the topic nevertheless" if error.code() in _UNSURE else text


def not_delivered(failures: list[Handle], count: int) -> NotDeliveredError:
    """One error for all of them, with the first few by name."""
    reasons = list(dict.fromkeys(f"{one.topic}: {one.error}" for one in failures))
    more = "" if len(reasons) <= _SHOWN else f" and {len(reasons) - _SHOWN} other reasons"
    records = "a record was" if count == 1 else f"{count:,} records were"
    message = f"{records} not delivered: {'; '.join(reasons[:_SHOWN])}{more}."
    keys = ", ".join(dict.fromkeys(_key(one.key) for one in failures[:_SHOWN]))
    hint = f"First of all those with key {keys}. `failures` has their handles."
    error = NotDeliveredError(message, hint=hint)
    error.failures, error.count = tuple(failures), count
    return error


def _key(key: Any) -> str:  # noqa: ANN401 - of a record: bytes, text or none
    if key is None:
        return "none"
    text = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
    return showing.short(text, 80)
