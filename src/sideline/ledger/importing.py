"""Takes dead letters that others wrote into the ledger, as dead events.

They were consumed by somebody else, so no counter of the pipeline's changes. Each keeps where it
was imported from: importing a topic again adds nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline import arrays
from sideline.engine.lease import Partition
from sideline.events import Event
from sideline.ledger import audit
from sideline.ledger.sql import queries
from sideline.topics import headers
from sideline.topics.headers import Letter

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection

# Why a dead letter is kept under its own position instead of its origin's.
REASONS = {
    "no-origin": "no header tells where it came from",
    "foreign": "it came from a topic that the pipeline does not read",
    "impossible": "it names an offset that its topic never had",
    "known": "the ledger has the event that it names already",
}


@dataclasses.dataclass(slots=True)
class Tally:
    """What an import did."""

    read: int = 0
    imported: int = 0
    before: int = 0
    """Imported by an earlier run."""
    tombstones: int = 0
    voices: dict[str, int] = dataclasses.field(default_factory=dict)
    """By whose headers they had."""
    elsewhere: dict[str, int] = dataclasses.field(default_factory=dict)
    """Kept under their dead-letter position, by the reason."""
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    """One dead letter for each of these reasons."""


class Source(NamedTuple):
    """What is known of the topics that the pipeline reads."""

    topics: Collection[str]
    ends: Mapping[Partition, int]


class Dead(NamedTuple):
    """A dead letter on its way into the ledger."""

    record: Event
    letter: Letter
    place: tuple[str, int, int]
    reason: str | None
    """Why its place is not its origin."""

    @property
    def held_in(self) -> str:
        """Share groups copy records only on request: without, they are still at their origin."""
        bare = self.record.key is None and self.record.value is None
        return "source" if self.letter.voice == "share" and bare and not self.reason else "ledger"


def place_of(record: Event, letter: Letter, source: Source) -> Dead:
    """Where a dead letter belongs: to its origin, unless that makes no sense (pure)."""
    reason = None
    if letter.topic is None or letter.partition is None or letter.offset is None:
        reason = "no-origin"
    elif letter.topic not in source.topics:
        reason = "foreign"
    elif letter.offset >= source.ends.get(Partition(letter.topic, letter.partition), 0):
        reason = "impossible"
    else:
        return Dead(record, letter, (letter.topic, letter.partition, letter.offset), None)
    return Dead(record, letter, _own_place(record), reason)


def take_in(  # noqa: PLR0913 - what an import depends on
    connection: Connection,
    pipeline: str,
    batches: Iterable[Sequence[Event]],
    source: Source,
    *,
    actor: str,
    execute: bool = True,
    there: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> Tally:
    """Import batch after batch, each in a transaction of its own.

    ``there``: whether the database has a ledger; only what changes nothing does without.
    """
    tally = Tally()
    for batch in batches:
        tally.read += len(batch)
        dead = _fresh(connection, pipeline, batch, source, tally, there=there)
        count = _insert(connection, pipeline, dead) if execute and dead else len(dead)
        tally.imported += count
        # Somebody else imports the same topic at the same time.
        tally.before += len(dead) - count
        for one in dead:
            _count(tally, one)
        if execute and count:
            audit.record(
                connection,
                "import",
                actor=actor,
                pipeline=pipeline,
                subject={"topic": batch[0].topic},
                count=count,
            )
        connection.commit()
        progress(tally.read)
    return tally


def _fresh(  # noqa: PLR0913 - what an import depends on
    connection: Connection,
    pipeline: str,
    batch: Sequence[Event],
    source: Source,
    tally: Tally,
    *,
    there: bool,
) -> list[Dead]:
    """Those of the batch that are not here yet, each with its place."""
    named: dict[str, Any] = {"pipeline": pipeline, "sources": [one.id for one in batch]}
    before: set[str] = set()
    if there:
        before = {row[0] for row in connection.execute(queries()["imported_before"], named)}
    tally.before += len(before)
    found: list[Dead] = []
    for record in batch:
        if record.id in before:
            continue
        letter = headers.read(record.headers)
        if record.value is None and letter.voice is None:
            # What empties a compacted topic is no dead letter.
            tally.tombstones += 1
            continue
        found.append(place_of(record, letter, source))
    origins = [one.place for one in found if one.reason is None]
    taken = _known(connection, pipeline, origins) if there else set()
    placed = []
    for one in found:
        if one.reason is None:
            if one.place in taken:
                placed.append(one._replace(place=_own_place(one.record), reason="known"))
                continue
            taken.add(one.place)
        placed.append(one)
    return placed


def _known(
    connection: Connection, pipeline: str, places: Sequence[tuple[str, int, int]]
) -> set[tuple[str, int, int]]:
    named = {
        "pipeline": pipeline,
        "topics": [topic for topic, _, _ in places],
        "partitions": [partition for _, partition, _ in places],
        "offsets": [offset for _, _, offset in places],
    }
    return set(connection.execute(queries()["known_origins"], named).fetchall())


def _insert(connection: Connection, pipeline: str, dead: Sequence[Dead]) -> int:
    records = [headers.unwrap(one.record.key, one.record.value, one.record.headers) for one in dead]
    letters = [one.letter for one in dead]
    named = {
        "pipeline": pipeline,
        "topics": [one.place[0] for one in dead],
        "partitions": [one.place[1] for one in dead],
        "offsets": [one.place[2] for one in dead],
        "sources": [one.record.id for one in dead],
        "keys": arrays.blobs([key for key, _, _ in records]),
        "values": arrays.blobs([value for _, value, _ in records]),
        "header_names": arrays.texts([arrays.header_names(kept) for _, _, kept in records]),
        "header_values": arrays.texts([arrays.header_values(kept) for _, _, kept in records]),
        "timestamps": [_stamp(one) for one in dead],
        "held": [one.held_in for one in dead],
        "stages": [letter.stage or "elsewhere" for letter in letters],
        "errors": [letter.error or "unknown" for letter in letters],
        "messages": [letter.message or "" for letter in letters],
        "tracebacks": [letter.traceback or "" for letter in letters],
        "fingerprints": [_fingerprint(letter) for letter in letters],
        "attempts": [max(1, letter.attempt or 1) for letter in letters],
    }
    (count,) = connection.execute(queries()["import_dead"], named).fetchone() or (0,)
    return int(count)


def _count(tally: Tally, one: Dead) -> None:
    voice = one.letter.voice or "none"
    tally.voices[voice] = tally.voices.get(voice, 0) + 1
    if one.reason is not None:
        tally.elsewhere[one.reason] = tally.elsewhere.get(one.reason, 0) + 1
        tally.examples.setdefault(one.reason, one.record.id)


def _own_place(record: Event) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _stamp(one: Dead) -> int:
    told = one.letter.timestamp_ms
    return one.record.timestamp_ms if told is None else told


def _fingerprint(letter: Letter) -> str:
    """Dead letters that failed alike elsewhere are one cause here."""
    alike = "\0".join((letter.error or "unknown", letter.stage or "elsewhere", "imported"))
    return hashlib.sha256(alike.encode()).hexdigest()[:12]
