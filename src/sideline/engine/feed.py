"""Rows that Spark hands to a task, behind the face of a `Reader`.

A lease that is *fed* reads nothing itself. The driver said which offsets are meant (the bounds of
the lease's shares); Spark's rows, in Arrow batches, say what is there. Whoever makes such a lease:

- gives every row `COLUMNS`, `headers` if wanted, and any other columns for ``event.row``; without
  `PLACE` where a task reads one partition and no other: two columns of six, and what they cost in
  the JVM;
- keeps the rows of a partition in one task, in the order of their offsets, one row an event;
- calls `Worker.work(lease, attempt, feed)` with ``Lease(fed=True)`` and ``ahead=False`` shares;
- takes `PartitionReport.spent` as "every row before the share's bound is done", and only once the
  Spark job has come to its end moves progress up to the bound: where the JVM fails in the middle,
  Python sees the same end of rows as after the last one.

Offsets that are missing between two rows were left out by the query or are holes in the log; the
feed cannot tell them apart, and progress passes over both.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import repeat
from typing import Any, Final

import pyarrow as pa

from sideline.arrays import NO_NUL
from sideline.engine.lease import Partition, Share
from sideline.engine.reader import EVENT_OVERHEAD, Reader, Span
from sideline.errors import RefusedError
from sideline.events import ALONE, Event, Headers

# What every row has; the timestamp in milliseconds since 1970.
COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "key", "value")
# Those of them that rows may go without where a lease has a single partition.
PLACE: Final = ("topic", "partition")
HEADERS: Final = "headers"
# Events of partitions that have to wait are kept, up to this size; then everybody waits.
MOST_HIDDEN_BYTES = 64 * 1024 * 1024


class Stream:
    """What a feed knows of one partition."""

    __slots__ = ("began", "bound", "last", "latest", "reading", "span")

    def __init__(self, share: Share) -> None:
        self.bound = share.bound if share.bound is not None else 2**63 - 1
        self.span = Span(-1)
        self.reading = False
        self.began: int | None = None
        """Where progress stood before any of its rows was given out."""
        self.latest = -1
        """The offset of the last row that came."""
        self.last: Event | None = None
        """Its event: kept back until it is known that no second row of it comes."""


class Feed(Reader):
    """The rows of one task; a partition that is dropped keeps them until it is read again."""

    def __init__(self, batches: Iterable[pa.RecordBatch], shares: Iterable[Share]) -> None:
        self._batches: Iterator[pa.RecordBatch] = iter(batches)
        self._streams = {share.of: Stream(share) for share in shares}
        self._sole = only(self._streams)
        self._dry = False
        self.delivery = ALONE
        self.fault = None

    # What the lease does with partitions

    def meet(self, topics: Iterable[str]) -> None:
        """Nobody has to be met."""

    def aim(self, partition: Partition, offset: int) -> None:
        """Go on with a partition at ``offset``: what comes before is done."""
        stream = self._streams[partition]
        if offset < stream.span.start:
            message = f"the rows of {partition} before {stream.span.start} have been given already"
            raise RuntimeError(message)
        if stream.began is None:
            stream.began = offset
        stream.span.cut(offset)
        stream.reading = True

    def own(self, partition: Partition, next_offset: int) -> None:
        """The take said where to go on."""
        self.aim(partition, next_offset)

    def drop(self, partition: Partition) -> None:
        """Leave a partition alone; its rows come only once, so they are kept."""
        self._streams[partition].reading = False

    def keep(self, partitions: Container[Partition]) -> None:
        """There is nothing that was read on a guess."""

    def reads(self, partition: Partition) -> bool:
        """Whether a partition is not left alone."""
        return self._streams[partition].reading

    def drop_all(self) -> None:
        """Leave all of them alone."""
        for stream in self._streams.values():
            stream.reading = False

    def span(self, partition: Partition) -> Span:
        """What has come of a partition and is not done yet."""
        stream = self._streams[partition]
        return stream.span if stream.reading else Span(0)

    def spent(self, partition: Partition) -> bool:
        """Whether every row of a partition is done, and none is to come."""
        stream = self._streams[partition]
        return self._dry and not stream.span.events

    @property
    def buffered_bytes(self) -> int:
        """What the partitions that are read have in their buffers."""
        return sum(stream.span.bytes for stream in self._streams.values() if stream.reading)

    def done(self, partition: Partition, end: int) -> None:
        """Everything before ``end`` is committed."""
        self._streams[partition].span.cut(end)

    def high(self, partition: Partition) -> int:
        """Where the rows of a partition end."""
        return self._streams[partition].bound

    def close(self) -> None:
        """Nothing of it stays."""

    # Rows

    def fill(self, timeout_seconds: float) -> int:
        """Take the next rows, however long they take; how many came."""
        hidden = sum(each.span.bytes for each in self._streams.values() if not each.reading)
        if self._dry or hidden >= MOST_HIDDEN_BYTES:
            time.sleep(timeout_seconds)
            return 0
        return self._pull()

    def linger(self, _timeout_seconds: float) -> int:
        """Take the next rows, if there are some."""
        return 0 if self._dry else self._pull()

    def drain(self) -> None:
        """Before a take nothing is wanted."""

    def _pull(self) -> int:
        for batch in self._batches:
            if batch.num_rows:
                for partition, start, end in runs(batch, self._sole):
                    self._keep(partition, batch.slice(start, end - start))
                return int(batch.num_rows)
        self._dry = True
        for stream in self._streams.values():
            _give(stream, stream.last)
            stream.last = None
            stream.span.at_end = True
        return 0

    def _keep(self, partition: Partition, rows: pa.RecordBatch) -> None:
        stream = self._streams.get(partition)
        offsets = rows.column("offset").to_numpy()
        if stream is None:
            raise _strange(f"{partition}/{offsets[0]}")
        check_order(partition, stream.latest, offsets, stream.began)
        stream.latest = int(offsets[-1])
        # What is done already is not made into events once more.
        first, last = offsets.searchsorted([stream.span.start, stream.bound])
        if first < last:
            events = self._events(partition, rows.slice(first, last - first))
            _give(stream, stream.last)
            stream.last = events.pop()
            stream.span.events.extend(events)
            size = rows.column("key").nbytes + rows.column("value").nbytes
            end = events[-1].offset + 1 if events else stream.span.end
            stream.span.grow(end, EVENT_OVERHEAD * len(rows) + size)

    def _events(self, partition: Partition, rows: pa.RecordBatch) -> list[Event]:
        names = rows.schema.names
        more = [name for name in names if name not in COLUMNS and name != HEADERS]
        return list(
            map(
                Event,
                repeat(partition.topic),
                repeat(partition.number),
                rows.column("offset").to_numpy().tolist(),
                rows.column("timestamp").to_numpy(zero_copy_only=False).tolist(),
                _objects(rows.column("key")),
                _objects(rows.column("value")),
                _headers(rows.column(HEADERS)) if HEADERS in names else repeat(()),
                repeat(self.delivery),
                rows.select(more).to_pylist() if more else repeat(None),
            )
        )


def _give(stream: Stream, event: Event | None) -> None:
    """Let an event be seen that was kept back."""
    if event is not None and event.offset >= stream.span.start:
        stream.span.events.append(event)
        stream.span.end = event.offset + 1


def only(partitions: Collection[Partition]) -> Partition | None:
    """The partition of rows that do not name theirs."""
    return next(iter(partitions)) if len(partitions) == 1 else None


def runs(
    batch: pa.RecordBatch, sole: Partition | None = None
) -> Iterator[tuple[Partition, int, int]]:
    """A batch cut where the partition changes: mostly it does not.

    Rows that do not name their partition are all of the ``sole`` one that is read.
    """
    if sole is not None and not {*PLACE} & {*batch.schema.names}:
        yield sole, 0, batch.num_rows
        return
    topics, numbers = batch.column("topic"), batch.column("partition").to_numpy()
    names = topics.unique()
    if len(names) == 1 and numbers.min() == numbers.max():
        yield Partition(names[0].as_py(), int(numbers[0])), 0, batch.num_rows
        return
    spots = list(zip(topics.to_pylist(), numbers.tolist(), strict=True))
    start = 0
    for place in range(1, len(spots) + 1):
        if place == len(spots) or spots[place] != spots[start]:
            yield Partition(*spots[start]), start, place
            start = place


def check_order(
    partition: Partition,
    latest: int,
    offsets: Any,  # noqa: ANN401 - numpy's
    began: int | None = None,
) -> None:
    """One row an event, in the order of the log; anything else would be written in disorder.

    ``began``: where progress stood before rows were given out, if they are.
    """
    rising = offsets[1:] > offsets[:-1]
    if offsets[0] > latest and rising.all():
        return
    place = 0 if offsets[0] <= latest else int(rising.argmin()) + 1
    before, here = (int(offsets[place - 1]) if place else latest), int(offsets[place])
    if before == here:
        message = f"the query has several rows for event {partition}/{here}."
        hint = (
            "An event is one row: explode, or join with several matches, in the handler, or in a\n"
            "query of its own behind sideline."
        )
        raise RefusedError(message, hint=hint)
    message = f"the query has event {partition}/{here} behind {before}."
    hint = "Keep the rows as Kafka has them: no sorting before the sink."
    if began is not None and latest >= began:
        number = partition.number
        hint = (
            f"{hint}\n"
            f"What came before may be applied: progress may have passed offsets {began} to {latest}"
            f"\nof {partition} without having seen all of them. With the query mended, apply them\n"
            f"again: sideline reprocess APP:NAME --from {number}:{began} --to {number}:{latest + 1}"
        )
    raise RefusedError(message, hint=hint)


def _strange(event: str) -> RefusedError:
    message = f"event {event} came to a task that does not read its partition."
    hint = "Keep the columns topic, partition and offset as Kafka's source makes them."
    return RefusedError(message, hint=hint)


def _objects(column: pa.Array) -> list[Any]:
    # Quicker than to_pylist with some versions, as quick with others.
    objects: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return objects


def _headers(column: pa.Array) -> list[Headers]:
    # A name is the same now and when its event comes back: the ledger cannot hold a NUL.
    return [
        tuple((header["key"].replace("\0", NO_NUL), header["value"]) for header in headers)
        if headers
        else ()
        for headers in column.to_pylist()
    ]
