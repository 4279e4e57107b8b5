"""Which copy of a failed event leaves, and for which topic (pure)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

from sideline.causes import Cause
from sideline.durations import Duration, seconds
from sideline.policies import DeadLetter, Dialect, RetryTopics
from sideline.topics import headers
from sideline.topics.names import TopicNames

if TYPE_CHECKING:
    from sideline.events import Event, Headers
    from sideline.pipeline import Pipeline
    from sideline.slices import Copy, Failure

State = Literal["retrying", "dead"]
MESSAGE_ID = "message-id"


class Kept(Struct, frozen=True, gc=False):
    """Says that the ledger's row of a copied event has all that the copy tells."""

    state: State
    incarnation: int = 0


class Record(Struct, frozen=True, gc=False):
    """What is to be sent. Made for every copy, so that it costs little, as an event does."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    """None: as the key says."""
    timestamp_ms: int | None = None
    """None: the time at which it is sent."""
    of: tuple[str, int, int] | None = None
    """Topic, partition and offset of the event that it is a copy of."""
    kept: Kept | None = None
    """None: its bytes are nowhere else, so they have to be written down."""

    @property
    def bytes(self) -> int:
        """What it takes in a log, and a little more: batch, record and header have their frames."""
        headers = sum(len(name.encode()) + len(value or b"") + 12 for name, value in self.headers)
        return 120 + len(self.key or b"") + len(self.value or b"") + headers


class Plain(Struct, frozen=True, gc=False):
    """Most records that handlers publish: nothing but key, value and id.

    Made by the million; without tuples inside, the garbage collector does not look at them.
    """

    topic: str
    value: bytes
    key: bytes
    id: bytes

    @property
    def record(self) -> Record:
        """The same as any other record."""
        return Record(self.topic, self.key, self.value, ((MESSAGE_ID, self.id),))


class Leaving(Struct, frozen=True, gc=False):
    """What becomes of an event whose copy leaves."""

    state: State
    attempts: int
    """How often it has failed now."""
    cause: Cause
    record: Record | None = None
    """None: nothing leaves; the ledger alone has it."""
    delay_ms: int | None = None

    def to(self, partition: int) -> Leaving:
        """The same into a partition; made for most copies, so without a look at every field."""
        record = self.record
        if record is None:
            return self
        there = Record(
            record.topic,
            record.key,
            record.value,
            record.headers,
            partition,
            record.timestamp_ms,
            record.of,
            record.kept,
        )
        return Leaving(self.state, self.attempts, self.cause, there, self.delay_ms)


def decide(  # noqa: PLR0913 - what a copy tells, by keyword
    pipeline: Pipeline,
    failure: Failure,
    state: State,
    *,
    attempts: int,
    now_ms: int,
    incarnation: int = 0,
    copy: Copy | None = None,
) -> Leaving:
    """The copy of an event that failed so often; ``copy`` where it came from a retry topic."""
    cause = failure.cause
    policy = pipeline.on_failure
    if not isinstance(policy, DeadLetter | RetryTopics):
        # A retry topic of an older policy: this one has no topics to send to.
        return Leaving("dead", attempts, cause)
    delay_ms = None
    if state == "retrying" and isinstance(policy, RetryTopics):
        # The one that counts here: all of them were looked at when they were declared.
        delay_ms = _milliseconds(policy.delays[attempts - 1])
    letter = headers.letter_of(
        failure.event,
        group=pipeline.name,
        attempt=attempts,
        first_failure_ms=now_ms if copy is None else copy.first_ms,
        error=cause.error,
        message=cause.message,
        stage=cause.stage,
        traceback=cause.traceback,
        due_ms=None if delay_ms is None else now_ms + delay_ms,
        incarnation=incarnation if copy is None else copy.incarnation,
    )
    dialect = policy.dialect if state == "dead" else None
    record = _record(pipeline.names, pipeline.name, failure.event, state, letter, dialect)
    return Leaving(state, attempts, cause, record, delay_ms)


def stash(
    pipeline: Pipeline, event: Event, failure: Failure | None, *, now_ms: int, incarnation: int
) -> Record:
    """What keeps the bytes of a parked event; without a failure, it follows another one."""
    cause = None if failure is None else failure.cause
    letter = headers.letter_of(
        event,
        group=pipeline.name,
        attempt=0 if cause is None else 1,
        first_failure_ms=now_ms,
        error="" if cause is None else cause.error,
        message="" if cause is None else cause.message,
        stage="" if cause is None else cause.stage,
        incarnation=incarnation,
    )
    of = (event.topic, event.partition, event.offset)
    return Record(
        pipeline.names.stash_of(event.topic, pipeline.name),
        headers.origin_id(*of, incarnation).encode(),
        b"" if event.value is None else event.value,
        headers.write(event.headers, letter),
        of=of,
    )


def shorter(pipeline: Pipeline, failure: Failure, leaving: Leaving) -> Leaving:
    """The same with the least that a copy has to tell, for a topic that takes no more."""
    if leaving.record is None:
        return leaving
    letter = headers.read(leaving.record.headers)
    letter = structs.replace(letter, error="", message="", stage="")
    record = _record(pipeline.names, pipeline.name, failure.event, leaving.state, letter, None)
    # The ledger's row would tell more than that.
    return structs.replace(leaving, record=structs.replace(record, kept=None))


def _record(  # noqa: PLR0913, PLR0917 - what a record is made of
    names: TopicNames,
    group: str,
    event: Event,
    state: State,
    letter: headers.Letter,
    dialect: Dialect | None,
) -> Record:
    if state == "retrying":
        topic = names.retry_of(event.topic, group, letter.attempt or 1)
    else:
        topic = names.dead_letter_of(event.topic, group)
    return copy_of(topic, event, state, letter, dialect)


def copy_of(
    topic: str, event: Event, state: State, letter: headers.Letter, dialect: Dialect | None
) -> Record:
    """The copy of an event as it stands in a topic of the pipeline's own."""
    told = headers.write(event.headers, letter, dialect)
    of = (event.topic, event.partition, event.offset)
    kept = _kept(state, letter.incarnation or 0)
    if state == "retrying":
        return Record(topic, event.key, event.value, told, of=of, kept=kept)
    # Keyed by where it came from: compaction never removes one that is open. And a tombstone is
    # not to be one there.
    key = headers.origin_id(*of, letter.incarnation or 0).encode()
    value = b"" if event.value is None else event.value
    return Record(topic, key, value, told, of=of, kept=kept)


@lru_cache(maxsize=64)
def _milliseconds(delay: Duration) -> int:
    return round(seconds(delay) * 1000)


# One for all copies of a slice.
_kept = lru_cache(maxsize=64)(Kept)
