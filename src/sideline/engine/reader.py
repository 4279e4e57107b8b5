"""Reads the partitions of a lease with librdkafka, and never trusts a position of its own."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from itertools import groupby, repeat
from operator import attrgetter, ge, itemgetter
from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from sideline.engine.lease import Partition
from sideline.events import ALONE, Delivery, Event, Headers

# One call into librdkafka brings at most this many events: enough to make the call cheap.
BATCH = 5_000
# Before a lease begins its work nobody waits long for Kafka.
MEET_SECONDS = 0.5
# What stands for the name of a header that is not text.
UNREADABLE_NAME = "\N{REPLACEMENT CHARACTER}"
# An event costs memory beyond its bytes.
EVENT_OVERHEAD = 400

_offset = attrgetter("offset")
# Of (kind, milliseconds); -1 where a record has no time.
_stamp = itemgetter(1)

CONSUMER: dict[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Retention that overtook us is an error with its range, never a silent jump.
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "queued.min.messages": 100_000,
    # With a full queue librdkafka would look away for a second, while we empty it in a tenth.
    "fetch.queue.backoff.ms": 5,
    "queued.max.messages.kbytes": 32 * 1024,
    "fetch.wait.max.ms": 500,
    "fetch.min.bytes": 1,
    "fetch.message.max.bytes": 2 * 1024 * 1024,
    # The default of 500 ms after an error is an age for a live stream.
    "fetch.error.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1_000,
    "log_level": 0,
}


class Span:
    """What one unbroken assignment of a partition delivered: offsets from ``start`` to ``end``."""

    __slots__ = ("at_end", "bytes", "end", "events", "start", "unreadable")

    def __init__(self, offset: int) -> None:
        self.start = offset
        self.end = offset
        self.events: list[Event] = []
        self.bytes = 0
        self.at_end = False
        self.unreadable: dict[int, Exception] = {}
        """Offsets of events that librdkafka could bring but not Python's client."""

    def covers(self, offset: int) -> bool:
        """Whether the events from ``offset`` on are all here, as far as ``end``."""
        return self.start <= offset <= self.end

    def grow(self, end: int, size: int) -> None:
        """Events as far as ``end`` have come, of ``size`` bytes together."""
        if size:
            self.end = end
            self.bytes += size
            self.at_end = False

    def cut(self, offset: int) -> None:
        """Forget what comes before ``offset``."""
        count = bisect_left(self.events, offset, key=_offset)
        if count:
            # By the average: exact enough for a bound, and free.
            self.bytes -= self.bytes * count // len(self.events)
            del self.events[:count]
        if self.unreadable:
            self.unreadable = {at: why for at, why in self.unreadable.items() if at >= offset}
        self.start = offset
        self.end = max(self.end, offset)


class Lost(Exception):  # noqa: N818 - a fact about the topic, not an error of the reader
    """Kafka has nothing at the position where a partition has to go on."""

    def __init__(self, partition: Partition, offset: int) -> None:
        super().__init__(f"{partition} has nothing at offset {offset}")
        self.partition = partition
        self.offset = offset


class Reader:
    """One consumer for all partitions of a lease, with a buffer for each."""

    def __init__(self, properties: dict[str, Any]) -> None:
        self._consumer = Consumer({**properties, **CONSUMER})
        self._spans: dict[Partition, Span] = {}
        self._topics: set[str] = set()
        self.delivery: Delivery = ALONE
        self.fault: KafkaError | None = None
        """The last error that Kafka answered with and that may pass by itself."""

    def meet(self, topics: Iterable[str]) -> None:
        """Learn who leads the partitions of topics that will be read soon.

        A consumer that has been idle asks only once a second about topics that are new to it.
        """
        # Whether Kafka answers is found out when something is read: nobody waits here twice.
        with suppress(KafkaException):
            for topic in topics:
                self._consumer.list_topics(topic, timeout=MEET_SECONDS)

    def aim(self, partition: Partition, offset: int) -> None:
        """Read a partition from ``offset`` on; before a take this is a guess and nothing more."""
        self.drop(partition)
        self._spans[partition] = Span(offset)
        self._topics.add(partition.topic)
        self._consumer.incremental_assign(
            [TopicPartition(partition.topic, partition.number, offset)]
        )

    def own(self, partition: Partition, next_offset: int) -> None:
        """The take said where to go on: keep what was read only if it covers that offset."""
        span = self._spans.get(partition)
        if span is not None and span.covers(next_offset):
            span.cut(next_offset)
        else:
            self.aim(partition, next_offset)

    def drop(self, partition: Partition) -> None:
        """Read a partition no longer, and forget what was read of it."""
        if self._spans.pop(partition, None) is not None:
            self._consumer.incremental_unassign([TopicPartition(partition.topic, partition.number)])

    def keep(self, partitions: Container[Partition]) -> None:
        """Drop all other partitions: what was read of them on a guess takes room."""
        for partition in [partition for partition in self._spans if partition not in partitions]:
            self.drop(partition)

    def reads(self, partition: Partition) -> bool:
        """Whether a partition is being read."""
        return partition in self._spans

    def drop_all(self) -> None:
        """Read nothing any more: after a release nothing is prefetched."""
        if self._spans:
            self._spans.clear()
            self._consumer.unassign()

    def span(self, partition: Partition) -> Span:
        """What has been read of a partition and not been done yet."""
        return self._spans.get(partition) or Span(0)

    @property
    def buffered_bytes(self) -> int:
        """What all buffers hold."""
        return sum(span.bytes for span in self._spans.values())

    def done(self, partition: Partition, end: int) -> None:
        """Everything before ``end`` is committed."""
        span = self._spans.get(partition)
        if span is not None:
            span.cut(end)

    def fill(self, timeout_seconds: float) -> int:
        """Wait for a first event, then take along what is there; how many came."""
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            return 0
        return self._route([first]) + self._route(self._consumer.consume(BATCH, 0))

    def linger(self, timeout_seconds: float) -> int:
        """Take what arrives within a short time; worth it when the rate is high."""
        return self._route(self._consumer.consume(BATCH, timeout_seconds))

    def drain(self) -> None:
        """Take what has been fetched already; it may be more than one look brings."""
        while self._spans and self.linger(0) >= BATCH:
            pass

    def spent(self, _partition: Partition) -> bool:
        """Whether nothing more can come: a log has no such end."""
        return False

    def high(self, partition: Partition) -> int:
        """The end of the log as the last fetch saw it; -1 if unknown."""
        try:
            _, high = self._consumer.get_watermark_offsets(
                TopicPartition(partition.topic, partition.number), cached=True
            )
        except KafkaException:
            return -1
        return high if high != OFFSET_INVALID else -1

    def close(self) -> None:
        """Leave Kafka."""
        self._consumer.close()

    def _route(self, messages: list[Message]) -> int:
        """Give every message its place; then raise what an error among them asks for."""
        if not messages:
            return 0
        # Methods of the class, mapped over lists: nothing here runs once an event in Python.
        kind = type(messages[0])
        errors = [
            (place, error)
            for place, error in enumerate(map(kind.error, messages))
            if error is not None
        ]
        count, start = 0, 0
        trouble: Exception | None = None
        for place, error in errors:
            count += self._route_events(messages[start:place])
            trouble = self._note(messages[place], error) or trouble
            start = place + 1
        count += self._route_events(messages[start:] if start else messages)
        if trouble is not None:
            # Not before everything has its place: the consumer stands behind these events already,
            # and a gap among them would pass as a hole.
            raise trouble
        return count

    def _route_events(self, messages: list[Message]) -> int:
        """Split messages into runs of one partition: they come in long ones."""
        if not messages:
            return 0
        # All topics that were ever read, not only those that still are: a message of the one must
        # never be taken for one of the other.
        apart: Callable[[Message], Any] = _spot
        if len(self._topics) == 1:
            apart = type(messages[0]).partition
        return sum(self._keep_run(list(run)) for _, run in groupby(messages, apart))

    def _keep_run(self, run: list[Message]) -> int:
        kind = type(run[0])
        spot = _spot(run[0])
        # A plain tuple equals the named one.
        span = self._spans.get(spot)  # type: ignore[call-overload]
        if span is None:
            return 0
        offsets: list[int] = list(map(kind.offset, run))  # type: ignore[arg-type]
        if offsets[0] < span.end or any(map(ge, offsets, offsets[1:])):
            run = _rising(run, span.end)
            offsets = list(map(kind.offset, run))  # type: ignore[arg-type]
        if not run:
            return 0
        keys, values = list(map(kind.key, run)), list(map(kind.value, run))
        span.events.extend(
            map(
                Event,
                repeat(spot[0]),
                repeat(spot[1]),
                offsets,
                map(_stamp, map(kind.timestamp, run)),
                keys,
                values,
                self._headers(span, run, offsets),
                repeat(self.delivery),
            )
        )
        size = sum(map(len, filter(None, keys))) + sum(map(len, filter(None, values)))
        span.grow(offsets[-1] + 1, EVENT_OVERHEAD * len(run) + size)
        return len(run)

    def _headers(self, span: Span, run: list[Message], offsets: list[int]) -> Iterable[Headers]:
        try:
            found: list[Any] = list(map(type(run[0]).headers, run))
        # A SystemError; more than that nobody promises.
        except Exception:  # noqa: BLE001
            return self._legible_headers(span, run, offsets)
        if not any(found):
            return repeat(())
        return [tuple(headers) if headers else () for headers in found]

    def _legible_headers(
        self, span: Span, run: list[Message], offsets: list[int]
    ) -> Iterable[Headers]:
        """A name that is no text is the failure of its event, not of the reader (F14)."""
        legible = []
        for offset, message in zip(offsets, run, strict=True):
            headers, whole = readable_headers(message)
            legible.append(headers)
            if not whole:
                span.unreadable[offset] = UnicodeError(
                    f"the name of a header is not UTF-8: it is kept as {UNREADABLE_NAME!r}"
                )
        return legible

    def _note(self, message: Message, error: KafkaError) -> Exception | None:
        """Keep what an error says about a partition; what has to be dealt with is returned."""
        partition = Partition(message.topic() or "", message.partition() or 0)
        span = self._spans.get(partition)
        code = error.code()
        if code == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's own name for it
            if span is not None:
                # Behind the last event there may be holes: markers of transactions, compaction.
                span.end = max(span.end, message.offset() or 0)
                span.at_end = True
        elif code in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:  # noqa: SLF001
            if span is not None:
                return Lost(partition, span.end)
        elif error.fatal() or not (error.retriable() or code < 0):
            return KafkaException(error)
        else:
            self.fault = error
        return None


def _spot(message: Message) -> tuple[str | None, int | None]:
    return message.topic(), message.partition()


def _rising(run: list[Message], end: int) -> list[Message]:
    """Those of the messages that go on from ``end``, each beyond the one before."""
    kept = []
    for message in run:
        offset = message.offset()
        if offset is not None and offset >= end:
            kept.append(message)
            end = offset + 1
    return kept


def readable_headers(message: Message) -> tuple[Headers, bool]:
    """What can be read of a message's headers, and whether that is all."""
    found: Any = None
    for _ in range(2):
        # It raises when it meets a name that is no text, and has an answer when asked again.
        with suppress(Exception):
            found = message.headers() or []
            break
    if found is None:
        return (), False
    # In that answer the name is a hole in the pair, at which nobody may look.
    whole = [len(gc.get_referents(pair)) == len(pair) for pair in found]
    headers = tuple(
        (pair[0] if name else UNREADABLE_NAME, pair[1])
        for pair, name in zip(found, whole, strict=True)
    )
    return headers, all(whole)
