"""What waits, as a person asks for it: keys, causes, events, one event, everything (S1).

Reads and returns values; nothing is changed and nothing is printed. Lists come in pages that
begin behind the end of the page before, so that a million events cost what fifty do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from psycopg.rows import class_row, dict_row

from sideline.errors import NotFoundError, RefusedError, SidelineError, UsageError
from sideline.keys import digest
from sideline.ledger.connection import Connection
from sideline.ledger.reading import waiting
from sideline.ledger.sql import queries
from sideline.operations import history
from sideline.views import (
    AsideKey,
    CauseSeen,
    Content,
    EventId,
    Exported,
    Held,
    Neighbour,
    Page,
    Position,
    Recorded,
    Shown,
    Standing,
    Waiting,
    Wanted,
)

T = TypeVar("T")
# Gets bytes that are not in the ledger, of events of a pipeline; None: they are gone.
Fetch = Callable[[str, Sequence[Held]], Mapping[Held, Content | None]]

# Neighbours of an event that are named, and how far those beyond them are counted.
NEIGHBOURS = 5
MOST_COUNTED = 10_000
# What an export holds in memory at a time.
EXPORT_EVENTS = 500
EXPORT_BYTES = 8 * 1024 * 1024


# Lists


def keys(
    connection: Connection, wanted: Wanted, *, limit: int, after: str | None = None
) -> Page[AsideKey]:
    """Keys that are aside, oldest first."""
    scope = _Scope(connection, wanted)

    def page(position: Position, count: int) -> list[tuple[Position, AsideKey]]:
        found = scope.filters(position.pipeline)
        if found.fingerprints == []:
            return []
        if wanted.key is not None:
            return _keys_by_name(connection, wanted, found, position)
        name = "keys_in_order" if found.fingerprints is None else "keys_of_causes"
        named = found.named(position, count) | {"after_digest": _digest_at(position)}
        rows = connection.execute(queries()[name], named).fetchall()
        shown = _shown_keys(connection, position.pipeline, [row[:2] for row in rows])
        return [
            (Position(position.pipeline, at, number, str(of_key)), key)
            for (_, of_key, at, number), key in zip(rows, shown, strict=True)
        ]

    return _pages(scope, "keys", page, limit=limit, after=after)


def causes(
    connection: Connection, wanted: Wanted, *, limit: int, after: str | None = None
) -> Page[CauseSeen]:
    """Why events wait or were left out, the cause that was seen first at the head."""
    scope = _Scope(connection, wanted)

    def page(position: Position, count: int) -> list[tuple[Position, CauseSeen]]:
        found = scope.filters(position.pipeline, heads=True)
        named = found.named(position, count) | {"after_text": position.text}
        cursor = connection.cursor(row_factory=class_row(CauseSeen))
        rows = cursor.execute(queries()["causes_in_order"], named).fetchall()
        return [
            (Position(position.pipeline, row.first_at, 0, row.fingerprint), row) for row in rows
        ]

    return _pages(scope, "causes", page, limit=limit, after=after)


def events(
    connection: Connection, wanted: Wanted, *, limit: int, after: str | None = None
) -> Page[Waiting]:
    """Parked events, oldest first; of a key, everything in its queue in the order of replay.

    Dead ones wait in no queue: they come in the order in which they failed.
    """
    scope = _Scope(connection, wanted)

    def page(position: Position, count: int) -> list[tuple[Position, Waiting]]:
        found = scope.filters(position.pipeline)
        name = "events_in_order"
        if wanted.dead:
            name = "dead_in_order"
        elif found.queues is not None:
            name = "events_of_queues"
        elif found.fingerprints is not None:
            name = "events_of_causes"
        rows = connection.execute(queries()[name], found.named(position, count)).fetchall()
        cursor = connection.cursor(row_factory=class_row(Waiting))
        named = _places(position.pipeline, rows)
        shown = cursor.execute(queries()["events_shown"], named).fetchall()
        return [
            (Position(position.pipeline, row[4], row[5]), event)
            for row, event in zip(rows, shown, strict=True)
        ]

    return _pages(scope, "dead" if wanted.dead else "list", page, limit=limit, after=after)


def _pages(
    scope: _Scope,
    kind: str,
    page: Callable[[Position, int], list[tuple[Position, T]]],
    *,
    limit: int,
    after: str | None,
) -> Page[T]:
    """Pipeline after pipeline, by name, until the page is full."""
    begin = None if after is None else Position.parse(after, kind)
    found: list[tuple[Position, T]] = []
    for name in scope.names:
        if begin is not None and name < begin.pipeline:
            continue
        position = begin if begin is not None and name == begin.pipeline else Position(name)
        # One more than is shown: it tells whether there is another page.
        found += page(position, limit + 1 - len(found))
        if len(found) > limit:
            break
    token = found[limit - 1][0].token(kind) if len(found) > limit else None
    return Page([row for _, row in found[:limit]], token)


def _digest_at(position: Position) -> UUID:
    try:
        return UUID(position.text) if position.text else UUID(int=0)
    except ValueError:
        raise UsageError("--after is not where a page of keys ended.") from None


def _keys_by_name(
    connection: Connection, wanted: Wanted, found: _Filters, position: Position
) -> list[tuple[Position, AsideKey]]:
    """A key that is named is in each topic at most twice: no pages."""
    if position.at is not None:
        return []
    pairs = [(topic, name) for topic in found.topics for name in found.digests]
    return [
        (Position(key.pipeline, key.since, key.queue, str(key.digest)), key)
        for key in _shown_keys(connection, position.pipeline, pairs)
        if (found.fingerprints is None or key.fingerprint in found.fingerprints)
        and (wanted.since is None or key.since >= wanted.since)
        and (wanted.until is None or key.since < wanted.until)
    ]


def _shown_keys(
    connection: Connection, pipeline: str, pairs: Sequence[tuple[str, UUID]]
) -> list[AsideKey]:
    cursor = connection.cursor(row_factory=class_row(AsideKey))
    named = {
        "pipeline": pipeline,
        "topics": [topic for topic, _ in pairs],
        "digests": [name for _, name in pairs],
    }
    return cursor.execute(queries()["keys_shown"], named).fetchall()


def _places(pipeline: str, rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "topics": [row[0] for row in rows],
        "partitions": [row[1] for row in rows],
        "offsets": [row[2] for row in rows],
        "incarnations": [row[3] for row in rows],
    }


class _Filters(NamedTuple):
    """What is asked for, in the ledger's words, for one pipeline."""

    wanted: Wanted
    topics: list[str]
    digests: list[UUID]
    queues: list[int] | None
    """Those that the wanted key waits in; None: any."""
    fingerprints: list[str] | None
    """Those of the wanted cause; None: any."""

    def named(self, position: Position, limit: int | None = None) -> dict[str, Any]:
        return {
            "pipeline": position.pipeline,
            "topic": self.wanted.topic,
            "key": self.wanted.key,
            "since": self.wanted.since,
            "until": self.wanted.until,
            "queues": self.queues,
            "fingerprints": self.fingerprints,
            "after_at": position.at,
            "after_number": position.number,
            "limit": limit,
        }


class _Scope:
    """The pipelines that are looked at, and what the filters mean in each."""

    def __init__(self, connection: Connection, wanted: Wanted) -> None:
        self._connection = connection
        self._wanted = wanted
        self.names = list(waiting(connection, wanted.name))
        self._fingerprints = {name: self._causes(name) for name in self.names}
        if wanted.cause is not None and not any(self._fingerprints.values()):
            message = f"nothing has failed by {wanted.cause!r}."
            raise NotFoundError(message, hint="`sideline parked causes` lists what has.")

    def filters(self, pipeline: str, *, heads: bool = False) -> _Filters:
        """What the filters mean in a pipeline; ``heads``: a key stands for why it waits."""
        fingerprints = self._fingerprints[pipeline]
        if self._wanted.key is None:
            return _Filters(self._wanted, [], [], None, fingerprints)
        topics = self._topics(pipeline)
        digests = [digest(self._wanted.key, derived=derived) for derived in (False, True)]
        queues = self._column(
            "queues_of_keys", {"pipeline": pipeline, "topics": topics, "digests": digests}
        )
        if heads:
            causes = self._column("heads", {"queues": queues})
            fingerprints = [
                cause for cause in causes if fingerprints is None or cause in fingerprints
            ]
        return _Filters(self._wanted, topics, digests, queues, fingerprints)

    def _causes(self, pipeline: str) -> list[str] | None:
        if self._wanted.cause is None:
            return None
        return self._column("causes_named", {"pipeline": pipeline, "cause": self._wanted.cause})

    def _topics(self, pipeline: str) -> list[str]:
        if self._wanted.topic is not None:
            return [self._wanted.topic]
        return self._column("waiting_topics", {"pipeline": pipeline})

    def _column(self, query: str, named: dict[str, Any]) -> list[Any]:
        return sorted(row[0] for row in self._connection.execute(queries()[query], named))


# One event


def show(  # noqa: PLR0913 - what is asked for, by keyword
    connection: Connection,
    wanted: EventId,
    *,
    name: str | None = None,
    incarnation: int | None = None,
    value_bytes: int | None = None,
    fetch: Fetch | None = None,
) -> Shown:
    """All about an event; of its value at most so many bytes.

    ``fetch`` gets bytes that are not in the ledger.
    """
    known = waiting(connection, name)
    rows: list[Recorded] = []
    if known:
        cursor = connection.cursor(row_factory=class_row(Recorded))
        named = {"pipeline": name, "bytes": value_bytes, **wanted._asdict()}
        rows = cursor.execute(queries()["events_by_id"], named).fetchall()
    pipelines = sorted({row.pipeline for row in rows})
    if len(pipelines) > 1:
        message = f"event {wanted} is known in {len(pipelines)} pipelines: {', '.join(pipelines)}."
        raise UsageError(message, hint=f"Name one: sideline parked show {wanted} {pipelines[0]}")
    chosen = [row for row in rows if incarnation is None or row.incarnation == incarnation]
    if not chosen:
        message = f"event {wanted} is not in the ledger: it never failed, nor waited for another."
        raise NotFoundError(message, hint="`sideline parked list` shows what waits.")
    event = chosen[0]
    others = [row.incarnation for row in rows if row.incarnation != event.incarnation]
    event, missing = _complete(event, fetch, value_bytes)
    dealings = history(connection, event)
    return Shown(event, _standing(connection, event), others, missing, dealings)


def _complete(
    event: Recorded, fetch: Fetch | None, value_bytes: int | None
) -> tuple[Recorded, str | None]:
    """The event with the bytes that are elsewhere; if they cannot be had, why."""
    if event.held_in == "ledger":
        return event, None
    if event.held_in == "gone":
        return event, "not kept: the event was applied"
    place = f"in the {event.held_in} topic"
    if fetch is None:
        return event, place
    try:
        content = next(iter(fetch(event.pipeline, [_held(event)]).values()))
    except SidelineError as error:
        return event, f"{place}; {error.message}"
    if content is None:
        return event, f"gone: it was {place}, and is not there any more"
    value = content.value
    return dataclasses.replace(
        event,
        value=value if value is None or value_bytes is None else value[:value_bytes],
        value_bytes=None if value is None else len(value),
        header_names=[name for name, _ in content.headers],
        header_values=[data for _, data in content.headers],
    ), None


def _held(event: Recorded | Exported) -> Held:
    return Held(event.topic, event.partition, event.offset, event.incarnation, event.held_in)


def _standing(connection: Connection, event: Recorded) -> Standing | None:
    if event.queue is None:
        return None
    named = {"queue": event.queue, "place": event.place, "limit": NEIGHBOURS}
    cursor = connection.cursor(row_factory=dict_row)
    counts = cursor.execute(
        queries()["queue_counts"], named | {"most": MOST_COUNTED + 1}
    ).fetchone()
    assert counts is not None  # noqa: S101 - the event refers to it
    around = connection.execute(queries()["queue_around"], named).fetchall()
    near = [(Neighbour(EventId(*row[:3]), row[3]), row[4]) for row in around]
    return Standing(
        queue=event.queue,
        home=counts["home"],
        since=counts["since"],
        events=counts["events"],
        place=_place(counts["events"], counts["before"], counts["behind"]),
        before=[neighbour for neighbour, distance in near if distance < 0],
        behind=[neighbour for neighbour, distance in near if distance > 0],
        keys=connection.execute(queries()["keys_of_queue"], named).fetchall(),
    )


def _place(events: int, before: int, behind: int) -> int | None:
    if before <= MOST_COUNTED:
        return before + 1
    return events - behind if behind <= MOST_COUNTED else None


# Everything


def count_hint(connection: Connection, wanted: Wanted) -> int | None:
    """How many events an export will hold, where counters know it."""
    if wanted != Wanted(name=wanted.name):
        return None
    return sum(parked for parked, _ in waiting(connection, wanted.name).values())


def export(
    connection: Connection, wanted: Wanted, fetch: Fetch | None = None
) -> Iterator[list[Exported]]:
    """Every event that is asked for, in batches of bounded size, in the order of replay.

    All from one snapshot. First where they are, then they themselves: sorting their values
    would fill the database's disk.
    """
    scope = _Scope(connection, wanted)
    query = "dead_to_export" if wanted.dead else "events_to_export"
    for name in scope.names:
        named = scope.filters(name).named(Position(name))
        with connection.cursor(name="sideline_export") as cursor:
            cursor.itersize = EXPORT_EVENTS
            cursor.execute(queries()[query], named)
            for rows in _batches(cursor):
                yield _exported(connection, name, rows, fetch)


def _batches(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    batch: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        if batch and (len(batch) >= EXPORT_EVENTS or size + row[4] > EXPORT_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += row[4]
    if batch:
        yield batch


def _exported(
    connection: Connection,
    pipeline: str,
    rows: Sequence[tuple[Any, ...]],
    fetch: Fetch | None,
) -> list[Exported]:
    cursor = connection.cursor(row_factory=class_row(Exported))
    found = cursor.execute(queries()["events_exported"], _places(pipeline, rows)).fetchall()
    away = [_held(event) for event in found if event.held_in != "ledger"]
    if not away:
        return found
    contents = fetch(pipeline, away) if fetch is not None else {}
    return [
        event if event.held_in == "ledger" else _with(event, contents.get(_held(event)))
        for event in found
    ]


def _with(event: Exported, content: Content | None) -> Exported:
    if content is None:
        # Without its value it would look like a tombstone.
        message = f"the bytes of event {event.id} are not in the {event.held_in} topic any more."
        raise RefusedError(message, hint="Leave it out: discard it, or narrow what is exported.")
    return dataclasses.replace(
        event,
        value=content.value,
        header_names=[name for name, _ in content.headers],
        header_values=[data for _, data in content.headers],
    )
