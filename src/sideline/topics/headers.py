"""What the headers of a copy say (pure): where an event came from, and why it is here.

Copies that we write bear ``sideline-*`` headers, and on request those of Spring or Kafka Connect
besides. Of others' copies the headers of Spring, Connect, Kafka Streams and share groups are
understood. Whatever stands in a header may be forged: reading never raises, what makes no sense
is as if it were missing, and nothing here is obeyed beyond the limits of the policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import Struct

from sideline.events import Event, Headers
from sideline.policies import Dialect
from sideline.topics.names import is_legal

Voice = Literal["sideline", "spring", "connect", "streams", "share"]

# Copies are a little bigger than what they copy: at most by this, their key apart.
ROOM_BYTES = 16 * 1024
_SHORT_BYTES = 256
_MESSAGE_BYTES = 1_000
_TRACEBACK_BYTES = 4_000
_LONGEST_INTEGER = 8
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_YEAR_9999_MS = 253_402_300_799_999
_DECIMAL = re.compile(rb"[0-9]{1,19}")

# Our block begins with this one. Everything before its last occurrence is the event's own.
FIRST = "sideline-origin-topic"
PARTITION = "sideline-origin-partition"
OFFSET = "sideline-origin-offset"
INCARNATION = "sideline-origin-incarnation"
TIMESTAMP = "sideline-origin-timestamp"
KEY = "sideline-origin-key"
NULL_VALUE = "sideline-origin-null-value"
GROUP = "sideline-group"
ATTEMPT = "sideline-attempt"
GENERATION = "sideline-generation"
FIRST_FAILURE = "sideline-first-failure"
DUE = "sideline-due"
ERROR = "sideline-error"
MESSAGE = "sideline-message"
STAGE = "sideline-stage"


class Letter(Struct, frozen=True, gc=False):
    """What the headers of a copy say; what they leave out, or say wrongly, is None."""

    voice: Voice | None = None
    """Whose headers they are."""
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    timestamp_ms: int | None = None
    key: bytes | None = None
    """Of the event, where the copy has another: ours only."""
    null_value: bool = False
    """The event is a tombstone, the copy must not be one."""
    group: str | None = None
    attempt: int | None = None
    """How often it was tried."""
    first_failure_ms: int | None = None
    due_ms: int | None = None
    error: str | None = None
    message: str | None = None
    stage: str | None = None
    traceback: str | None = None
    generation: int | None = None
    incarnation: int | None = None

    @property
    def origin(self) -> str | None:
        """``topic/partition/offset``, if all three are told."""
        if self.topic is None or self.partition is None or self.offset is None:
            return None
        return origin_id(self.topic, self.partition, self.offset, self.incarnation or 0)


def origin_id(topic: str, partition: int, offset: int, incarnation: int = 0) -> str:
    """An event's id for ever: a topic that was made again counts its offsets anew."""
    again = f"#{incarnation}" if incarnation else ""
    return f"{topic}/{partition}/{offset}{again}"


def letter_of(  # noqa: PLR0913 - all that a copy tells, by keyword
    event: Event,
    *,
    group: str,
    attempt: int,
    first_failure_ms: int,
    error: str = "",
    message: str = "",
    stage: str = "",
    traceback: str = "",
    due_ms: int | None = None,
    generation: int = 0,
    incarnation: int = 0,
) -> Letter:
    """What a copy of this event is to tell."""
    return Letter(
        voice="sideline",
        topic=event.topic,
        partition=event.partition,
        offset=event.offset,
        timestamp_ms=event.timestamp_ms,
        key=event.key,
        null_value=event.value is None,
        group=group,
        attempt=attempt,
        first_failure_ms=first_failure_ms,
        due_ms=due_ms,
        error=error,
        message=message,
        stage=stage,
        traceback=traceback,
        generation=generation,
        incarnation=incarnation,
    )


def write(headers: Headers, letter: Letter, dialect: Dialect | None = None) -> Headers:
    """The headers of a copy: the event's own, unchanged, then ours, then those of the dialect."""
    theirs = tuple(_DIALECTS[dialect](letter)) if dialect is not None else ()
    return (*headers, *_ours(letter), *theirs)


def kept(headers: Headers) -> Headers:
    """The headers that the event itself had; of copies that others wrote, all of them."""
    for place in range(len(headers) - 1, -1, -1):
        if headers[place][0] == FIRST:
            return tuple(headers[:place])
    return tuple(headers)


def unwrap(
    key: bytes | None, value: bytes | None, headers: Headers
) -> tuple[bytes | None, bytes | None, Headers]:
    """Key, value and headers of the event in a copy of ours; of others' copies, as they are."""
    letter = read(headers)
    if letter.voice != "sideline":
        return key, value, headers
    return letter.key, None if letter.null_value else value, kept(headers)


def read(headers: Iterable[tuple[str, bytes | None]] | None) -> Letter:
    """What the headers of a copy say, in whichever of the dialects; never raises."""
    block: dict[str, bytes | None] = {}
    last: dict[str, int] = {}
    for place, (name, value) in enumerate(headers or ()):
        if name == FIRST:
            # What stands before it is the event's own, also if it looks like ours.
            block.clear()
            last.clear()
        block[name] = value
        last[name] = place
    ours = _read_ours(block) if FIRST in block else None
    spoken = [(last[name], voice) for name, voice in _MARKS.items() if name in block]
    if not spoken:
        return ours or Letter()
    # A copy of a copy has the marks of both: the last one wrote the record at hand.
    theirs = _READERS[max(spoken)[1]](block)
    # Behind ours stands our own dialect, which names the same event, or somebody who came later.
    return ours if ours is not None and _spot(ours) == _spot(theirs) else theirs


def _spot(letter: Letter) -> tuple[str | None, int | None, int | None]:
    return letter.topic, letter.partition, letter.offset


class Turn(NamedTuple):
    """Which event a copy in a retry topic stands for, and after how many tries."""

    topic: str
    partition: int
    offset: int
    incarnation: int
    attempt: int


def turn_of(headers: Headers) -> Turn | None:
    """Whose turn a copy of ours says that it is; None: nobody's. The least of what `read` does."""
    block: dict[str, bytes | None] = {}
    for name, value in reversed(headers):
        block.setdefault(name, value)
        if name == FIRST:
            break
    else:
        return None
    topic = _topic(block.get(FIRST))
    partition = _number(block.get(PARTITION), _INT32)
    offset = _number(block.get(OFFSET), _INT64)
    attempt = _number(block.get(ATTEMPT), _INT32)
    if topic is None or partition is None or offset is None or not attempt:
        return None
    incarnation = _number(block.get(INCARNATION), _INT32) or 0
    return Turn(topic, partition, offset, incarnation, attempt)


def _ours(letter: Letter) -> Headers:
    """Built for every copy: what the copies of a slice have in common is worked out once."""
    origin, incarnation, course, stage = _shared(
        letter.topic or "",
        letter.partition,
        letter.incarnation,
        letter.null_value,
        letter.group or "",
        letter.attempt,
        letter.generation or 0,
        letter.first_failure_ms,
        letter.due_ms,
        letter.error or "",
        letter.stage or "",
    )
    return (
        *origin,
        (OFFSET, _decimal(letter.offset)),
        *incarnation,
        (TIMESTAMP, _decimal(letter.timestamp_ms)),
        # Any bytes, or null, and never cut: it has to be what it was.
        (KEY, letter.key),
        *course,
        (MESSAGE, _bounded(letter.message or "", _MESSAGE_BYTES)),
        *stage,
    )


@lru_cache(maxsize=1024)
def _shared(  # noqa: PLR0913, PLR0917 - all that a copy tells but what is its own
    topic: str,
    partition: int | None,
    incarnation: int | None,
    null_value: bool,  # noqa: FBT001 - a cache takes keywords for other arguments
    group: str,
    attempt: int | None,
    generation: int,
    first_failure_ms: int | None,
    due_ms: int | None,
    error: str,
    stage: str,
) -> tuple[Headers, Headers, Headers, Headers]:
    """Where they stand is written down in docs/topics.md."""
    origin = (FIRST, _bounded(topic, _SHORT_BYTES)), (PARTITION, _decimal(partition))
    course: Headers = (
        (GROUP, _bounded(group, _SHORT_BYTES)),
        (ATTEMPT, _decimal(attempt)),
        (GENERATION, _decimal(generation)),
        (FIRST_FAILURE, _decimal(first_failure_ms)),
    )
    if null_value:
        course = ((NULL_VALUE, b"true"), *course)
    if due_ms is not None:
        course = (*course, (DUE, _decimal(due_ms)))
    return (
        origin,
        ((INCARNATION, _decimal(incarnation)),) if incarnation else (),
        (*course, (ERROR, _bounded(error, _SHORT_BYTES))),
        ((STAGE, _bounded(stage, _SHORT_BYTES)),),
    )


def _as_spring(letter: Letter) -> Iterator[tuple[str, bytes | None]]:
    """DeadLetterPublishingRecoverer's headers; integers are big-endian, of 4 or 8 bytes."""
    error = _bounded(letter.error or "", _SHORT_BYTES)
    yield "kafka_dlt-exception-fqcn", error
    yield "kafka_dlt-exception-cause-fqcn", error
    yield "kafka_dlt-exception-message", _bounded(letter.message or "", _MESSAGE_BYTES)
    yield "kafka_dlt-exception-stacktrace", _bounded(letter.traceback or "", _TRACEBACK_BYTES)
    yield "kafka_dlt-original-topic", _bounded(letter.topic or "", _SHORT_BYTES)
    yield "kafka_dlt-original-partition", _fixed(letter.partition, 4)
    yield "kafka_dlt-original-offset", _fixed(letter.offset, 8)
    yield "kafka_dlt-original-timestamp", _fixed(letter.timestamp_ms, 8)
    kind = b"CreateTime" if (letter.timestamp_ms or -1) >= 0 else b"NoTimestampType"
    yield "kafka_dlt-original-timestamp-type", kind
    yield "kafka_dlt-original-consumer-group", _bounded(letter.group or "", _SHORT_BYTES)
    yield "retry_topic-original-timestamp", _shortest(letter.timestamp_ms)
    yield "retry_topic-attempts", _fixed(letter.attempt, 4)
    if letter.due_ms is not None:
        yield "retry_topic-backoff-timestamp", _shortest(letter.due_ms)


# Where it failed, in the words of Connect's enum Stage.
_CONNECT_STAGES = {"key": b"KEY_CONVERTER", "handler": b"TRANSFORMATION"}


def _as_connect(letter: Letter) -> Iterator[tuple[str, bytes | None]]:
    """DeadLetterQueueReporter's headers; everything is text."""
    yield "__connect.errors.topic", _bounded(letter.topic or "", _SHORT_BYTES)
    yield "__connect.errors.partition", _decimal(letter.partition)
    yield "__connect.errors.offset", _decimal(letter.offset)
    yield "__connect.errors.connector.name", _bounded(letter.group or "", _SHORT_BYTES)
    yield "__connect.errors.task.id", _decimal(letter.partition)
    yield "__connect.errors.stage", _CONNECT_STAGES.get(letter.stage or "", b"TASK_PUT")
    yield "__connect.errors.class.name", b"sideline"
    yield "__connect.errors.exception.class.name", _bounded(letter.error or "", _SHORT_BYTES)
    yield "__connect.errors.exception.message", _bounded(letter.message or "", _MESSAGE_BYTES)
    traceback = _bounded(letter.traceback or "", _TRACEBACK_BYTES)
    yield "__connect.errors.exception.stacktrace", traceback


_DIALECTS: Mapping[Dialect, Callable[[Letter], Iterator[tuple[str, bytes | None]]]] = {
    "spring": _as_spring,
    "connect": _as_connect,
}

Block = Mapping[str, bytes | None]


def _read_ours(block: Block) -> Letter:
    return Letter(
        voice="sideline",
        topic=_topic(block.get(FIRST)),
        partition=_number(block.get(PARTITION), _INT32),
        offset=_number(block.get(OFFSET), _INT64),
        timestamp_ms=_number(block.get(TIMESTAMP), _YEAR_9999_MS),
        key=block.get(KEY),
        null_value=NULL_VALUE in block,
        group=_text(block.get(GROUP)),
        attempt=_number(block.get(ATTEMPT), _INT32),
        first_failure_ms=_number(block.get(FIRST_FAILURE), _YEAR_9999_MS),
        due_ms=_number(block.get(DUE), _YEAR_9999_MS),
        error=_text(block.get(ERROR)),
        message=_text(block.get(MESSAGE), _MESSAGE_BYTES),
        stage=_text(block.get(STAGE)),
        generation=_number(block.get(GENERATION), _INT32),
        incarnation=_number(block.get(INCARNATION), _INT32),
    )


def _read_spring(block: Block) -> Letter:
    def of(what: str) -> bytes | None:
        # Retry topics leave out "dlt-".
        return _first(block.get(f"kafka_dlt-{what}"), block.get(f"kafka_{what}"))

    key_failed = "kafka_dlt-key-exception-fqcn" in block or "kafka_key-exception-fqcn" in block
    part = "key-" if key_failed else ""
    # The outer exception is the listener container's; the cause is the listener's own.
    error = of("key-exception-fqcn") if key_failed else of("exception-cause-fqcn")
    attempts = block.get("retry_topic-attempts")
    first = _integer(block.get("retry_topic-original-timestamp"), _YEAR_9999_MS)
    stamp = _integer(of("original-timestamp"), _YEAR_9999_MS, sizes=(8,))
    return Letter(
        voice="spring",
        topic=_topic(of("original-topic")),
        partition=_integer(of("original-partition"), _INT32, sizes=(4,)),
        offset=_integer(of("original-offset"), _INT64, sizes=(8,)),
        timestamp_ms=stamp if stamp is not None else first,
        group=_text(block.get("kafka_dlt-original-consumer-group")),
        attempt=_attempts(attempts),
        due_ms=_integer(block.get("retry_topic-backoff-timestamp"), _YEAR_9999_MS),
        error=_text(_first(error, of("exception-fqcn"))),
        message=_text(of(f"{part}exception-message"), _MESSAGE_BYTES),
        stage="key" if key_failed else None,
        traceback=_text(of(f"{part}exception-stacktrace"), _TRACEBACK_BYTES),
    )


def _read_connect(block: Block) -> Letter:
    def of(what: str) -> bytes | None:
        return block.get(f"__connect.errors.{what}")

    return Letter(
        voice="connect",
        topic=_topic(of("topic")),
        partition=_number(of("partition"), _INT32),
        offset=_number(of("offset"), _INT64),
        group=_text(of("connector.name")),
        error=_text(of("exception.class.name")),
        message=_text(of("exception.message"), _MESSAGE_BYTES),
        stage=_text(of("stage")),
        traceback=_text(of("exception.stacktrace"), _TRACEBACK_BYTES),
    )


def _read_streams(block: Block) -> Letter:
    def of(what: str) -> bytes | None:
        return block.get(f"__streams.errors.{what}")

    # Throwable.toString(): the class, then a colon and the message.
    error = _text(of("exception"))
    return Letter(
        voice="streams",
        topic=_topic(of("topic")),
        partition=_number(of("partition"), _INT32),
        offset=_number(of("offset"), _INT64),
        error=error.split(":", 1)[0] if error else None,
        message=_text(of("message"), _MESSAGE_BYTES),
        traceback=_text(of("stacktrace"), _TRACEBACK_BYTES),
    )


def _read_share(block: Block) -> Letter:
    def of(what: str) -> bytes | None:
        return block.get(f"__dlq.errors.{what}")

    return Letter(
        voice="share",
        topic=_topic(of("topic")),
        partition=_number(of("partition"), _INT32),
        offset=_number(of("offset"), _INT64),
        group=_text(of("group")),
        attempt=_number(of("delivery.count"), _INT32),
        message=_text(of("message"), _MESSAGE_BYTES),
    )


_READERS: Mapping[Voice, Callable[[Block], Letter]] = {
    "spring": _read_spring,
    "connect": _read_connect,
    "streams": _read_streams,
    "share": _read_share,
}
# Headers by which each is known; Spring's can be configured away one by one.
_MARKS: Mapping[str, Voice] = {
    "kafka_dlt-original-topic": "spring",
    "kafka_dlt-original-offset": "spring",
    "kafka_dlt-exception-fqcn": "spring",
    "kafka_dlt-key-exception-fqcn": "spring",
    "kafka_original-topic": "spring",
    "kafka_exception-fqcn": "spring",
    "retry_topic-attempts": "spring",
    "__connect.errors.topic": "connect",
    "__connect.errors.connector.name": "connect",
    "__streams.errors.topic": "streams",
    "__streams.errors.exception": "streams",
    "__dlq.errors.topic": "share",
}


def _first(*values: bytes | None) -> bytes | None:
    return next((value for value in values if value is not None), None)


def _bounded(text: str, most: int) -> bytes:
    """The text in UTF-8, cut between two characters."""
    data = text.encode("utf-8", "replace")
    return data if len(data) <= most else data[:most].decode("utf-8", "ignore").encode()


def _decimal(number: int | None) -> bytes:
    return b"-1" if number is None else b"%d" % number


def _fixed(number: int | None, size: int) -> bytes:
    most = (1 << (8 * size - 1)) - 1
    return max(-1, min(-1 if number is None else number, most)).to_bytes(size, "big", signed=True)


def _shortest(number: int | None) -> bytes:
    """Java's BigInteger.toByteArray(): as few bytes as hold the number and its sign."""
    value = -1 if number is None else number
    bits = (value if value >= 0 else ~value).bit_length()
    return value.to_bytes(bits // 8 + 1, "big", signed=True)


def _number(value: bytes | None, most: int) -> int | None:
    if value is None or not _DECIMAL.fullmatch(value):
        return None
    number = int(value)
    return number if number <= most else None


def _integer(value: bytes | None, most: int, sizes: Iterable[int] | None = None) -> int | None:
    """A big-endian integer with its sign; None if it is negative, or of another size."""
    if value is None or not 1 <= len(value) <= _LONGEST_INTEGER:
        return None
    if sizes is not None and len(value) not in sizes:
        return None
    number = int.from_bytes(value, "big", signed=True)
    return number if 0 <= number <= most else None


def _attempts(value: bytes | None) -> int | None:
    """Four bytes; in old versions one, without a sign."""
    if value is not None and len(value) == 1:
        return value[0]
    return _integer(value, _INT32, sizes=(4,))


def _topic(value: bytes | None) -> str | None:
    # Cut before it is remembered: whatever stands there may be long.
    return None if value is None else _legal(value[:_SHORT_BYTES])


@lru_cache(maxsize=1024)
def _legal(value: bytes) -> str | None:
    name = _text(value)
    return name if name is not None and is_legal(name) else None


def _text(value: bytes | None, most: int = _SHORT_BYTES) -> str | None:
    if value is None:
        return None
    text = value[:most].decode("utf-8", "replace")
    # PostgreSQL's text holds no NUL.
    return text.replace("\x00", "�")
