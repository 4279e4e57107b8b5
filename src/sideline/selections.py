"""What a person wants done with what waits: the selection, the plan of it, its hash (pure).

A plan is shown before anything is done, and what was shown is what goes (R4). Its name carries
the moment at which it was made, and a hash of the set: keys that step aside later are not in it,
and a set that has changed since does not fit the hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from sideline import showing
from sideline.errors import UsageError
from sideline.views import EventId

Kind = Literal["release", "discard", "restore"]

# A ramp: so many keys, and each next step only if nothing of the one before failed again.
RAMP = (1, 10, 100)
# Beyond these there is no number in PostgreSQL.
MOST_FIRST = 2**63 - 1
MOST_RATE = 1e9
LEAST_RATE = 0.01
_HASH_DIGITS = 16
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NAME = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{16})", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which of all that waits, in one pipeline."""

    kind: Kind
    pipeline: str
    keys: tuple[bytes, ...] = ()
    events: tuple[EventId, ...] = ()
    topic: str | None = None
    cause: str | None = None
    """A fingerprint or its beginning, or an error class."""
    since: datetime | None = None
    until: datetime | None = None
    first: int | None = None
    """So many keys, the oldest; of a restore and of dead ones, events."""
    followers: bool = False
    """Of a discard: also what waits behind what failed."""
    dead: bool = False
    """Of a release or a discard: dead events in place of parked ones."""

    def as_json(self) -> dict[str, Any]:
        """What was asked for, as it is kept with the operation."""
        asked = {
            "keys": [showing.as_json(key) for key in self.keys],
            "events": [str(event) for event in self.events],
            "topic": self.topic,
            "cause": self.cause,
            "since": self.since and self.since.isoformat(),
            "until": self.until and self.until.isoformat(),
            "first": self.first,
            "followers": self.followers,
            "dead": self.dead,
        }
        return {name: value for name, value in asked.items() if value} or {"all": True}

    def words(self) -> list[str]:
        """The same as arguments of the command, with ages turned into times."""
        found = ["sideline", self.kind, self.pipeline]
        found += [word for key in self.keys for word in _key_words(key)]
        found += [word for event in self.events for word in ("--event", str(event))]
        for name, value in (("--topic", self.topic), ("--cause", self.cause)):
            found += [] if value is None else [name, value]
        for name, at in (("--since", self.since), ("--until", self.until)):
            found += [] if at is None else [name, at.astimezone(UTC).isoformat()]
        if not self.is_limited:
            found.append("--all")
        found += [] if self.first is None else ["--first", str(self.first)]
        found += ["--followers"] if self.followers else []
        return found + (["--dead"] if self.dead else [])

    @property
    def is_limited(self) -> bool:
        """Whether it names anything but the pipeline."""
        return bool(self.keys or self.events or self.topic or self.cause) or (
            self.since is not None or self.until is not None
        )

    def command(self, *more: str) -> str:
        """A line to be typed."""
        return showing.words(shlex.join([*self.words(), *more]))


def _key_words(key: bytes) -> tuple[str, str]:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "--key-hex", key.hex()
    return ("--key", text) if text.isprintable() and text else ("--key-hex", key.hex())


class PlanName(NamedTuple):
    """When a plan was made, and the hash of what it holds."""

    boundary: datetime
    digest: str

    def __str__(self) -> str:
        return f"{(self.boundary - _EPOCH) // _MICROSECOND:x}-{self.digest}"

    @classmethod
    def parse(cls, text: str) -> PlanName:
        """The name as the plan printed it."""
        found = _NAME.fullmatch(text.strip())
        if found:
            try:
                return cls(_EPOCH + timedelta(microseconds=int(found[1], 16)), found[2])
            except OverflowError:
                pass
        message = f"{text!r} is not the name of a plan."
        raise UsageError(message, hint="Give --plan what the plan printed.")


class CauseCount(NamedTuple):
    """Why some of the chosen events failed."""

    fingerprint: str
    events: int
    error: str = ""
    place: str = ""
    message: str = ""


class Sample(NamedTuple):
    """A key that is chosen, or an event that stands alone, and its first event."""

    topic: str
    partition: int | None
    offset: int | None
    events: int
    at: datetime
    key: bytes | None
    why: str | None
    error: str | None
    message: str | None

    @property
    def id(self) -> str:
        """The event that everything else of the key waits for."""
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What an operation would do, as of one moment."""

    selection: Selection
    name: PlanName
    items: int
    """Rows that are frozen: keys, and events by themselves."""
    keys: int
    alone: int
    """Events that go by themselves: without a key, or dead."""
    events: int
    """All that would be touched: failed ones, and what follows them."""
    failed: int
    oldest: datetime | None
    causes: Sequence[CauseCount]
    """The most frequent first."""
    versions: dict[str, int]
    """Failed events by the version of the handler that failed."""
    version: str | None
    """Of the handler that runs now, or ran last."""
    running: bool
    """Whether a driver stands, to carry it out."""
    paused: bool
    sample: Sequence[Sample]
    new: int = 0
    """Keys that stepped aside since the plan was made; they are not in it."""
    late: int = 0
    """Of a restore: events whose keys have rejoined; they are not in it."""
    apart: int = 0
    """Of a release: imported dead events that cannot be released; they are not in it."""

    @property
    def followers(self) -> int:
        """What failed nowhere and waits for what did."""
        return self.events - self.failed

    @property
    def failed_here(self) -> int:
        """Events that failed in the very version that would get them again."""
        return self.versions.get(self.version, 0) if self.version else 0


class Step(NamedTuple):
    """One of the operations that a plan becomes: these items of it, by number."""

    first: int
    last: int


def steps(items: int, *, ramp: bool) -> list[Step]:
    """How a set is divided: into one step, or into 1, 10, 100 and the rest."""
    if not ramp:
        return [Step(1, items)]
    found: list[Step] = []
    for size in (*RAMP, items):
        done = found[-1].last if found else 0
        if done < items:
            found.append(Step(done + 1, min(done + size, items)))
    return found


def digest(selection: Selection, parts: Iterable[object]) -> str:
    """The hash of a set, made of sums over it."""
    text = "\0".join((selection.kind, selection.pipeline, *map(str, parts)))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_HASH_DIGITS]


def check(selection: Selection, *, everything: bool) -> Selection:
    """The selection, if it says what it means; refused otherwise."""
    if everything and selection.is_limited:
        message = "--all goes with no other choice but --first."
        raise UsageError(message, hint="Leave --all out, or the rest.")
    if not everything and not selection.is_limited:
        raise UsageError(
            f"nothing says what to {selection.kind}.",
            hint="Choose with --key, --cause, --topic, --since, --until or --event, or say --all.",
        )
    if selection.events and (
        selection.keys or selection.topic or selection.cause or selection.since or selection.until
    ):
        message = "--event goes with no other choice."
        raise UsageError(message, hint="An event's id says it all.")
    for name, value in (("--topic", selection.topic), ("--cause", selection.cause)):
        if value is not None and (not value or not _storable(value)):
            raise UsageError(f"{name} is {value!r}, which names nothing.")
    return selection


def _storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
