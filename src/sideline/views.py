"""What a person sees of what waits: values, and how people name an event, a time, a page (pure)."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Generic, NamedTuple, TypeVar
from uuid import UUID

import orjson

from sideline import durations
from sideline.errors import UsageError
from sideline.events import Headers

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_ID = re.compile(r"([A-Za-z0-9._-]{1,249})/(\d{1,10})/(\d{1,19})", re.ASCII)
_MOST_PARTITION = 2**31 - 1
_MOST_OFFSET = 2**63 - 1


class EventId(NamedTuple):
    """``topic/partition/offset``."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    @classmethod
    def parse(cls, text: str) -> EventId:
        """The id as people write it."""
        found = _ID.fullmatch(text)
        if not found or int(found[2]) > _MOST_PARTITION or int(found[3]) > _MOST_OFFSET:
            message = f"{text!r} is not an event's id."
            raise UsageError(message, hint="Write it as topic/partition/offset: users/2/1.")
        return cls(found[1], int(found[2]), int(found[3]))


def parse_moment(text: str, *, now: datetime, what: str) -> datetime:
    """A time with its zone, or an age: ``2026-01-31T12:00:00Z``, ``2h``."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - timedelta(seconds=durations.seconds(text))
        except (UsageError, OverflowError):
            at = None
    if at is None or at.tzinfo is None:
        message = f"{what} is {text!r}, which is neither a time with its zone nor an age."
        raise UsageError(message, hint="Write it like 2026-01-31T12:00:00Z, or 2h for an age.")
    return at


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What of all that waits is asked for."""

    name: str | None = None
    topic: str | None = None
    key: bytes | None = None
    cause: str | None = None
    """A fingerprint, or an error class."""
    since: datetime | None = None
    until: datetime | None = None
    dead: bool = False
    """Dead events in place of parked ones."""


class Position(NamedTuple):
    """Where a page ended; the next one begins behind it."""

    pipeline: str
    at: datetime | None = None
    number: int = 0
    text: str = ""

    def token(self, kind: str) -> str:
        """As the command prints it."""
        micros = None if self.at is None else (self.at - _EPOCH) // _MICROSECOND
        data = orjson.dumps([kind, self.pipeline, micros, self.number, self.text])
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    @classmethod
    def parse(cls, token: str, kind: str) -> Position:
        """What `token` made."""
        try:
            data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
            of, pipeline, micros, number, text = orjson.loads(data)
            at = _EPOCH + timedelta(microseconds=micros)
            whole = (type(pipeline), type(number), type(text)) == (str, int, str)
            if of == kind and whole and 0 <= number <= _MOST_OFFSET and "\0" not in text:
                return cls(pipeline, at, number, text)
        except (ValueError, TypeError, OverflowError, binascii.Error):
            pass
        message = f"{token!r} is not where a page of this list ended."
        raise UsageError(message, hint="Give --after what the page before printed.")


@dataclasses.dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a list."""

    rows: Sequence[T]
    after: str | None
    """Where the next page begins; None: this is the last one."""


@dataclasses.dataclass(frozen=True, slots=True)
class AsideKey:
    """A key that is aside, and the first event of its queue."""

    pipeline: str
    topic: str
    digest: UUID
    key: bytes
    derived: bool
    queue: int
    home: int
    events: int
    since: datetime
    head_topic: str | None
    head_partition: int | None
    head_offset: int | None
    why: str | None
    error: str | None
    message: str | None
    fingerprint: str | None
    generation: int | None

    @property
    def head(self) -> EventId | None:
        """The event that everything else of the key waits for."""
        if self.head_topic is None or self.head_partition is None or self.head_offset is None:
            return None
        return EventId(self.head_topic, self.head_partition, self.head_offset)


@dataclasses.dataclass(frozen=True, slots=True)
class CauseSeen:
    """Why events failed, and how many."""

    pipeline: str
    fingerprint: str
    error: str
    stage: str
    place: str
    message: str
    """Of the last one."""
    parked: int
    """Waiting now because they failed like this."""
    skipped: int
    parked_in_all: int
    """Waiting now for any cause."""
    first_at: datetime
    last_at: datetime
    topic: str
    partition: int
    offset: int

    @property
    def share(self) -> float:
        """Of all that failed and waits."""
        return self.parked / self.parked_in_all if self.parked_in_all else 0.0

    @property
    def example(self) -> EventId:
        """The last event that failed like this."""
        return EventId(self.topic, self.partition, self.offset)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What every view of an event shows."""

    pipeline: str
    topic: str
    partition: int
    offset: int
    incarnation: int
    key: bytes | None
    timestamp_ms: int
    why: str
    error: str | None
    message: str | None
    fingerprint: str | None
    generation: int
    parked_at: datetime

    @property
    def id(self) -> EventId:
        """Where it stands in Kafka."""
        return EventId(self.topic, self.partition, self.offset)


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting(Record):
    """An event of a list."""

    place: int
    queue: int | None
    state: str
    value_bytes: int | None
    """None: a tombstone."""
    stage: str | None
    handler_version: str
    attempts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded(Waiting):
    """Everything that the ledger has about an event."""

    value: bytes | None
    """Up to the bound that was asked for."""
    header_names: list[str]
    header_values: list[bytes | None]
    held_in: str
    traceback: str | None
    updated_at: datetime

    @property
    def headers(self) -> Headers:
        """In order, with duplicates."""
        return _headers(self.header_names, self.header_values)


class Held(NamedTuple):
    """An event of the ledger, and where its bytes are."""

    topic: str
    partition: int
    offset: int
    incarnation: int
    held_in: str


class Content(NamedTuple):
    """What the ledger leaves out of an event whose bytes are elsewhere."""

    value: bytes | None
    headers: Headers


@dataclasses.dataclass(frozen=True, slots=True)
class Exported(Record):
    """An event with all that is needed to publish it again."""

    value: bytes | None
    header_names: list[str]
    header_values: list[bytes | None]
    held_in: str

    @property
    def headers(self) -> Headers:
        """In order, with duplicates."""
        return _headers(self.header_names, self.header_values)


def _headers(names: Sequence[str], values: Sequence[bytes | None]) -> Headers:
    return tuple(zip(names, values, strict=True))


class Neighbour(NamedTuple):
    """An event in the same queue."""

    id: EventId
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Where an event stands in its queue."""

    queue: int
    home: int
    since: datetime
    events: int
    place: int | None
    """1 for the head; None: too far from either end to be counted."""
    before: Sequence[Neighbour]
    """The nearest ones, in order."""
    behind: Sequence[Neighbour]
    keys: Sequence[tuple[bytes, bool]]
    """The keys that wait in it, a few, each with whether ``key=`` said it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dealing:
    """An operation that an event was in, by itself or with its queue."""

    id: int
    kind: str
    state: str
    actor: str
    reason: str | None
    created_at: datetime
    item: str
    """What became of it there: ``waiting``, ``done``, ``failed`` or ``gone``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """One event: its record, and where it stands if it waits behind or before others."""

    event: Recorded
    standing: Standing | None
    others: Sequence[int]
    """Incarnations of the topic that have an event of the same id."""
    missing: str | None = None
    """Why its value and headers are not shown, if they are not in the ledger."""
    operations: Sequence[Dealing] = ()
    """What people wanted done with it, as far as that is known; the newest first."""
