"""Publishes records so that none is lost without a word: `Publisher`.

::

    with Publisher() as publisher:
        publisher.publish("users", {"id": 7, "name": "Zoey"}, key="7")

What it costs per record is measured beside a bare producer (bench suite ``publisher``).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from sideline import clients, records, transactions
from sideline.deliveries import Book, Handle
from sideline.durations import Duration
from sideline.errors import (
    ConfigurationError,
    NotFoundError,
    PartialError,
    RefusedError,
    SidelineError,
    UsageError,
)
from sideline.message_ids import Ids
from sideline.producing import Delivery, Options, client_properties
from sideline.records import GivenHeaders, Value
from sideline.settings import Settings
from sideline.topics.admin import Cluster
from sideline.topics.carrying import CORRELATION_ID, MESSAGE_ID
from sideline.topics.names import is_legal
from sideline.transactions import Transaction

_ROOM_SECONDS = 0.1
_FLUSH_SECONDS = 0.5
_ANYWHERE = -1
# Kafka's default, where the broker does not tell.
_USUAL_BYTES = 1_048_588

log = logging.getLogger(__name__)
_open: set[Publisher] = set()


class Publisher:
    """Publishes records, and knows what became of each.

    A context manager: at its end it waits for every record, and raises what failed. May be used
    by several threads. ``kafka``, ``settings`` and ``properties`` say where Kafka is; without
    them the settings of the environment count, as for a pipeline.
    """

    def __init__(  # noqa: PLR0913 - by keyword, each with a default that is safe
        self,
        *,
        kafka: str | None = None,
        settings: Settings | None = None,
        properties: Mapping[str, str] | None = None,
        delivery: Delivery = "exactly-once",
        keyless: bool = False,
        ids: bool = True,
        transactional_id: str | None = None,
        delivery_timeout: Duration = "2m",
        transaction_timeout: Duration = "1m",
        linger: Duration = "10ms",
        batch_bytes: int = 512 << 10,
        compression: str = "lz4",
        partitioner: str = "murmur2_random",
        buffer_records: int = 100_000,
        buffer_bytes: int = 64 << 20,
    ) -> None:
        self._options = Options(
            delivery=delivery,
            transactional_id=transactional_id,
            delivery_timeout=delivery_timeout,
            transaction_timeout=transaction_timeout,
            linger=linger,
            batch_bytes=batch_bytes,
            compression=compression,
            partitioner=partitioner,
            buffer_records=buffer_records,
            buffer_bytes=buffer_bytes,
        )
        self._client = client_properties(kafka, settings, properties)
        self._began = False
        self._connect()
        self.timeout_seconds = self._options.properties()["message.timeout.ms"] / 1000
        self._id = transactional_id
        self._keyless = keyless
        self._identifies = ids
        self._ids = Ids()
        self._rooms: dict[str, int] = {}
        # The last one met, as it was given: mostly the next record goes there too.
        self._topic: object = object()
        self._book = Book(self._producer)
        self._closed = False
        self._transaction: Transaction | None = None
        # Why nothing can be published now.
        self._refusal: SidelineError | None = None if self._id is None else _outside()
        _open.add(self)

    # Publishing

    def publish(  # noqa: C901, PLR0913 - a record has as many parts; a call costs more than a line
        self,
        topic: str,
        value: Value,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
        message_id: str | None = None,
        correlation_id: str | None = None,
    ) -> Handle:
        """Hand a record over; returns at once, unless so much is under way that it has to wait.

        ``value`` is bytes, text, None for a tombstone, or whatever can be JSON. The handle tells
        what became of it; nobody has to look: what failed is raised by `flush` and at the end.
        """
        # Every line from here is paid for a million times: what is usual comes first.
        if self._refusal is not None:
            raise self._refused()
        if type(value) is not bytes and value is not None:
            value = records.value_bytes(value)
        if type(key) is not bytes:
            key = self._key(key)
        if topic is not self._topic or partition is not None:
            self._meet(topic, partition)
        ids = self._ids
        if monotonic() >= ids.until:
            self._listen()
        if headers is None and message_id is None and correlation_id is None and self._identifies:
            # `Ids.new`, without a call; the handle keeps the two halves, which it shares.
            series = ids.series
            number = next(series[1], None)
            if number is None:
                handle = Handle(self._book, identity := ids.new())
            else:
                handle = Handle(self._book, series[0], number)
                identity = series[0] + number
            # As bytes: librdkafka's client takes a tenth longer for a record with text.
            headers = [(MESSAGE_ID, identity), (CORRELATION_ID, identity)]
        else:
            given, headers = self._headers(headers, message_id, correlation_id)
            handle = Handle(self._book, given)
        where = _ANYWHERE if partition is None else partition
        when = 0 if timestamp is None else records.milliseconds(timestamp)
        try:
            self._produce(topic, value, key, where, handle, None, when, headers)
        except BufferError:
            self._wait_for_room(topic, value, key, where, handle, when, headers)
        except KafkaException as error:
            raise self._not_taken(topic, error.args[0]) from error
        if self._closed:
            # Another thread closed it between the first line and this one.
            self._empty(None)
        return handle

    def look(self, topic: str) -> None:
        """Find out about a topic before the first record for it; NotFoundError if it is missing."""
        if self._closed:
            raise self._refused()
        self._meet(topic, None)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every record has reached Kafka or failed; raises NotDeliveredError.

        With a ``timeout`` in seconds: TimeoutError if some are still under way then.
        """
        if self._closed:
            raise self._refused()
        self._empty(timeout)
        failure = self._book.settle() if self._transaction is None else None
        if failure is not None:
            raise failure

    def transaction(self) -> Transaction:
        """A transaction: ``with publisher.transaction(): ...`` commits, or aborts on an error."""
        if self._id is None:
            message = "this publisher has no transactions."
            raise UsageError(message, hint='Make it with Publisher(transactional_id="shop-1").')
        if self._transaction is not None:
            message = "a transaction of this publisher is open already."
            raise UsageError(message, hint="End it first: one publisher, one transaction.")
        if self._refusal is not None and type(self._refusal) is not _OutsideError:
            raise self._refused()
        if not self._began:
            transactions.begin(self._producer, self._id, self.timeout_seconds)
            self._began = True
        return Transaction(self, self._producer, self._id)

    # The end

    def close(self) -> None:
        """Wait for every record, and raise what failed; closing twice does no harm."""
        if self._closed and self not in _open:
            return
        gave_up = self._refusal is not None and not isinstance(self._refusal, _OutsideError)
        if not self._closed:
            self._closed = True
            if self._id is not None and (gave_up or self._transaction is not None):
                # Nothing of it could be seen: what is under way belongs to no transaction.
                clients.throw_away(self._producer)
            self._refusal = UsageError("this publisher is closed.", hint="Make a new one.")
        self._empty(None)
        # Not before: whoever is interrupted here can close again, or leave it to the end.
        _open.discard(self)
        failure = self._book.settle()
        self._book.producer = None
        # What became of a transaction was raised when it ended.
        if failure is not None and self._id is None:
            raise failure

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Close it; what failed is raised, or noted on the error that is on its way."""
        try:
            self.close()
        except SidelineError as failure:
            if error is None:
                raise
            error.add_note(f"Besides, {failure.message}")

    def __reduce__(self) -> NoReturn:
        """It is of this process."""
        message = "a publisher cannot be sent to another process."
        raise UsageError(message, hint="Make one there.")

    # Inside

    def _connect(self) -> None:
        """A client of its own; also a new one in the place of the last."""
        own = self._options.properties()
        self._producer: Producer = clients.make(Producer, self._client, **own)
        self._produce = self._producer.produce
        self._began = False

    def _refused(self) -> SidelineError:
        refusal = self._refusal
        if refusal is None:
            return UsageError("this publisher is closed.", hint="Make a new one.")
        # A new one each time: an error that is raised twice shows two ways in one.
        return type(refusal)(refusal.message, hint=refusal.hint)

    def _key(self, key: bytes | str | None) -> bytes | None:
        if key is None and not self._keyless:
            message = "a record needs a key: without one the order of events is lost."
            hint = "Give key=, or say that order does not matter: Publisher(keyless=True)."
            raise UsageError(message, hint=hint)
        return records.key_bytes(key)

    def _listen(self) -> None:
        """Once a millisecond: what became of records, and a new series of ids."""
        self._ids.turn()
        self._producer.poll(0)

    def _headers(
        self, headers: GivenHeaders | None, message_id: str | None, correlation_id: str | None
    ) -> tuple[bytes | None, list[tuple[str, Any]]]:
        if self._identifies:
            return _identified(self._ids, headers, message_id, correlation_id)
        return _unidentified(headers, message_id, correlation_id)

    def _meet(self, topic: str, partition: int | None) -> None:
        """Know a topic before the first record for it: one that is missing must not be made."""
        if not isinstance(topic, str) or (topic not in self._rooms and not is_legal(topic)):
            message = f"{topic!r} is not a name that Kafka takes for a topic."
            raise UsageError(message, hint="Letters, digits, '.', '_' and '-', up to 249 of them.")
        if topic not in self._rooms:
            self._rooms[topic] = self._look_up(topic)
        self._topic = topic
        if partition is None:
            return
        count = self._rooms[topic]
        if type(partition) is not int or not 0 <= partition < count:
            message = f"topic {topic!r} has no partition {partition!r}: it has 0 to {count - 1}."
            raise UsageError(message)

    def _look_up(self, topic: str) -> int:
        """How many partitions it has."""
        cluster = Cluster(self._client)
        try:
            count = len(cluster.topic(topic).partitions)
        except NotFoundError as error:
            raise NotFoundError(error.message, hint="Create it, or correct the name.") from None
        try:
            found = cluster.describe(topic)
        except RefusedError:
            # It may be written to, and not be asked about.
            found = None
        most = int((found and found.settings.get("max.message.bytes")) or _USUAL_BYTES)
        if most < self._options.batch_bytes:
            message = (
                f"topic {topic!r} takes {most:,} bytes at once, and this publisher sends up to "
                f"{self._options.batch_bytes:,}: the broker would refuse whole batches."
            )
            raise ConfigurationError(message, hint=f"Make it with Publisher(batch_bytes={most}).")
        return count

    def _wait_for_room(  # noqa: PLR0913, PLR0917 - what produce takes
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        where: int,
        handle: Handle,
        when: int,
        headers: Any,  # noqa: ANN401
    ) -> None:
        """Too much is under way: wait until some of it has arrived, or failed."""
        while True:
            # Other threads may have emptied it, or filled it, since it had no room.
            empty = not self._producer.poll(_ROOM_SECONDS) and not len(self._producer)
            try:
                self._produce(topic, value, key, where, handle, None, when, headers)
            except BufferError:
                if not empty or len(self._producer):
                    continue
                message = f"a record for {topic!r} is larger than the buffer of this publisher."
                hint = "Give Publisher(buffer_bytes=...) more."
                raise RefusedError(message, hint=hint) from None
            except KafkaException as error:
                raise self._not_taken(topic, error.args[0]) from error
            return

    def _not_taken(self, topic: str, reason: KafkaError) -> SidelineError:
        """Why librdkafka does not even take a record."""
        if reason.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            message = f"a record for {topic!r} is larger than the buffer of this publisher."
            return RefusedError(message, hint="Give Publisher(buffer_bytes=...) more.")
        if self._transaction is not None:
            failure = self._book.settle()
            why = failure.message if failure else f"{reason.str()} ({reason.name()})."
            message = f"the transaction cannot go on: {why}"
            return PartialError(message, hint="Leave it: it is aborted, nothing of it is seen.")
        message = f"the publisher cannot go on: {reason.str().rstrip('.')} ({reason.name()})."
        error = PartialError(message, hint="Make a new one; `flush` tells what was not delivered.")
        if reason.fatal() or reason.code() == KafkaError._FATAL:  # noqa: SLF001
            self._refusal = error
        return error

    def _empty(self, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while left := self._flushed(_flush_seconds(until)):
            if until is not None and time.monotonic() > until:
                records_are = "a record is" if left == 1 else f"{left:,} records are"
                message = f"{records_are} still under way after {timeout:g} s."
                raise TimeoutError(message)

    def _flushed(self, within_seconds: float) -> int:
        """How many records are still under way."""
        try:
            return self._producer.flush(within_seconds)
        except KafkaException as error:
            if not error.args[0].fatal():
                raise
            # It sends nothing more; what is left is told one by one.
            self._producer.purge()
            self._producer.poll(within_seconds)
            return len(self._producer)

    def _enter(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._book, self._refusal = transaction.book, None

    def _leave(self) -> None:
        self._transaction = None
        self._refusal = _outside()

    def _give_up(self, error: SidelineError) -> None:
        self._refusal = error

    def _disown(self) -> None:
        """In a child process: its parent's client has no threads here."""
        # Freed in a child, librdkafka would wait for them for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._producer))
        self._book.producer = None
        self._closed = True
        message = "this publisher belongs to the process that this one was forked from."
        self._refusal = UsageError(message, hint="Make one after the fork.")


class _OutsideError(UsageError):
    """Nothing is published outside of a transaction."""


def _outside() -> _OutsideError:
    message = "this publisher publishes in transactions only."
    return _OutsideError(message, hint="with publisher.transaction(): ...")


def _identified(
    ids: Ids, headers: GivenHeaders | None, message_id: str | None, correlation_id: str | None
) -> tuple[bytes | None, list[tuple[str, Any]]]:
    """Headers with both ids; those that they bring along stay."""
    made, named = _given(headers, message_id, correlation_id)
    if MESSAGE_ID not in named:
        made.append((MESSAGE_ID, ids.new()))
    identity = _last(made, MESSAGE_ID)
    if CORRELATION_ID not in named:
        made.append((CORRELATION_ID, identity or ids.new()))
    return identity, made


def _unidentified(
    headers: GivenHeaders | None, message_id: str | None, correlation_id: str | None
) -> tuple[bytes | None, list[tuple[str, Any]]]:
    """Headers as they are; ids only where they were given."""
    made, _ = _given(headers, message_id, correlation_id)
    return _last(made, MESSAGE_ID), made


def _given(
    headers: GivenHeaders | None, message_id: str | None, correlation_id: str | None
) -> tuple[list[tuple[str, bytes | None]], set[str]]:
    """What was given, and its names; an id stands either by name or among the headers."""
    made = [] if headers is None else records.headers_list(headers)
    named = {name for name, _ in made}
    for name, given in ((MESSAGE_ID, message_id), (CORRELATION_ID, correlation_id)):
        if given is None:
            continue
        if name in named:
            raise UsageError(f"{name} is given twice: by name, and among the headers.")
        made.append((name, records.identity(given, name).encode()))
        named.add(name)
    return made, named


def _last(headers: list[tuple[str, bytes | None]], name: str) -> bytes | None:
    return next((value for one, value in reversed(headers) if one == name), None)


def _flush_seconds(until: float | None) -> float:
    if until is None:
        return _FLUSH_SECONDS
    return max(0.0, min(_FLUSH_SECONDS, until - time.monotonic()))


def _close_all() -> None:
    """At the interpreter's end: what nobody closed is sent, and what fails is said."""
    for publisher in list(_open):
        try:
            publisher.close()
        except SidelineError as failure:
            print(f"sideline: {failure.message}", file=sys.stderr)  # noqa: T201 - nobody is left


def _disown_all() -> None:
    for publisher in list(_open):
        publisher._disown()  # noqa: SLF001 - of this module
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
