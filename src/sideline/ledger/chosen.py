"""What a selection means in the ledger's words: one set, shown, counted, hashed and frozen."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, LiteralString

from psycopg.rows import namedtuple_row

from sideline.errors import NotFoundError, RefusedError, UsageError
from sideline.keys import digest as digest_of
from sideline.ledger.connection import Connection
from sideline.ledger.reading import waiting
from sideline.ledger.sql import queries
from sideline.selections import CauseCount, Sample, Selection, Step, digest
from sideline.views import EventId

SAMPLE = 5
# A set of a million is gone through in memory, not on the database's disk.
WORK_MEMORY = "256MB"
NO_BOUNDARY = "infinity"

# Parts of a query that are left out where nobody asked for them.
_IF_CAUSE = re.compile(r"\{if fingerprints ([^{}]+)\}")
_FIRST = re.compile(r"\{first ([^{}]+)\}")


def unknown_pipeline(name: str) -> NotFoundError:
    """The error for a pipeline that the ledger does not know."""
    message = f"no pipeline {name!r} has run with this database."
    return NotFoundError(message, hint="`sideline status` lists those there are.")


@dataclasses.dataclass(slots=True)
class Figures:
    """A chosen set in numbers."""

    items: int = 0
    keys: int = 0
    alone: int = 0
    events: int = 0
    failed: int = 0
    oldest: datetime | None = None
    causes: dict[str, int] = dataclasses.field(default_factory=dict)
    versions: dict[str, int] = dataclasses.field(default_factory=dict)
    sums: tuple[int, int] = (0, 0)

    def digest(self, selection: Selection) -> str:
        """The hash of the set."""
        return digest(selection, [self.items, self.failed, *self.sums])


def _add_to(counts: dict[str, int], name: str, count: int) -> None:
    counts[name] = counts.get(name, 0) + count


class Chosen:
    """What a selection means in the ledger's words."""

    def __init__(self, connection: Connection, selection: Selection) -> None:
        self._connection = connection
        self._selection = selection
        if selection.pipeline not in waiting(connection, selection.pipeline):
            raise unknown_pipeline(selection.pipeline)
        connection.execute("select set_config('work_mem', %s, true)", (WORK_MEMORY,))
        row = connection.execute("select now()").fetchone()
        assert row is not None  # noqa: S101 - it always has one
        self.now: datetime = row[0]
        self._named: dict[str, Any] = {
            "pipeline": selection.pipeline,
            "topic": selection.topic,
            "since": selection.since,
            "until": selection.until,
            "first": selection.first,
            "followers": selection.followers,
            "fingerprints": self._fingerprints(),
            "queues": None,
            "places": [],
            "keys": list(selection.keys) or None,
            "state": "dead" if selection.dead else "discarded",
            "kind": selection.kind,
            "late": False,
            "apart": False,
            "topics": [event.topic for event in selection.events] or None,
            "partitions": [event.partition for event in selection.events],
            "offsets": [event.offset for event in selection.events],
        }
        self._query = self._fragment()

    def figures(self, boundary: datetime | str, **changed: Any) -> Figures:  # noqa: ANN401
        """Count the set, and what failed of it."""
        named = self._at(boundary) | changed
        cursor = self._connection.cursor(row_factory=namedtuple_row)
        rows: list[Any] = cursor.execute(self._with("plan_figures", named), named).fetchall()
        (row,) = [one for one in rows if one.whole]
        found = Figures(row.items, row.queues, row.alone, row.events, oldest=row.oldest)
        if row.items > row.queues + row.alone:
            single: Any = cursor.execute(self._with("plan_keys", named), named).fetchone()
            found.keys += single.keys
        of_items, of_failed = int(row.hash), 0
        for cause in rows:
            if cause.whole:
                continue
            of_failed += int(cause.hash)
            if cause.fingerprint is not None:
                found.failed += cause.items
                _add_to(found.causes, cause.fingerprint, cause.items)
                _add_to(found.versions, cause.handler_version, cause.items)
        found.sums = of_items, of_failed
        return found

    def sample(self, boundary: datetime) -> list[Sample]:
        """The first ones, with key and reason."""
        named = self._at(boundary) | {"sample": SAMPLE}
        if not self._selection.followers:
            # Nobody has to go through a million to see five.
            named["first"] = min(SAMPLE, self._selection.first or SAMPLE)
        rows = self._connection.execute(self._with("plan_sample", named), named).fetchall()
        return [Sample(*row) for row in rows]

    def since(self, boundary: datetime) -> int:
        """How many keys have been added to what the selection means since a plan was made."""
        if self._selection.events:
            return 0
        after = max(filter(None, (boundary, self._selection.since)))
        # Whatever the plan takes of those before: these are none of them.
        found = self.figures(NO_BOUNDARY, since=after, first=None)
        return found.keys + found.alone

    def late(self) -> int:
        """Discarded events that can no longer be put back."""
        if self._selection.kind != "restore":
            return 0
        return self.figures(NO_BOUNDARY, late=True).items

    def apart(self) -> int:
        """Imported dead events that cannot be released: nobody reads there, or order matters."""
        if self._selection.kind != "release" or not self._selection.dead:
            return 0
        return self.figures(NO_BOUNDARY, apart=True).items

    def between(self, boundary: datetime, step: Step) -> tuple[int, int]:
        """Failed events, and all events, of some of the chosen items."""
        upto = self.figures(boundary, first=step.last)
        if step.first == 1:
            return upto.failed, upto.events
        before = self.figures(boundary, first=step.first - 1)
        return upto.failed - before.failed, upto.events - before.events

    def freeze(self, boundary: datetime, operations: Sequence[int], made: Sequence[Step]) -> int:
        """Write the set down as items of operations; how many there are."""
        named = self._at(boundary) | {
            "operations": list(operations),
            "firsts": [step.first for step in made],
            "lasts": [step.last for step in made],
        }
        return self._connection.execute(self._with("freeze", named), named).rowcount

    def events(self, boundary: datetime, most: int) -> list[tuple[Any, ...]]:
        """Rows with everything that a handler needs."""
        named = self._at(boundary) | {"most": most}
        # Nobody has to go through a million keys to see so many events.
        named["first"] = min(most, self._selection.first or most)
        found = self._connection.execute(self._with("trial_events", named), named).fetchall()
        if len(found) < most:
            more = self._connection.execute(self._with("trial_alone", named), named).fetchall()
            found += more[: most - len(found)]
        return found

    def causes(self, counts: dict[str, int]) -> list[CauseCount]:
        """The causes with their words, the most frequent first."""
        named = {"pipeline": self._selection.pipeline, "fingerprints": list(counts)}
        rows = self._connection.execute(queries()["plan_causes"], named).fetchall()
        words = {row[0]: row[1:] for row in rows}
        found = [CauseCount(name, count, *words.get(name, ())) for name, count in counts.items()]
        return sorted(found, key=lambda cause: (-cause.events, cause.fingerprint))

    def _at(self, boundary: datetime | str) -> dict[str, Any]:
        return self._named | {"boundary": boundary}

    def _with(self, name: str, named: dict[str, Any]) -> LiteralString:
        """A query about what is chosen; in order only where that decides what is chosen."""
        whole = queries()[name].replace("{chosen}", self._query)
        # When an event died says nothing about its key's order: one that was retried died late.
        whole = whole.replace("{turn}", "tie" if self._selection.dead else "at, tie")
        cause = "" if named["fingerprints"] is None else r"\1"
        first = "" if named["first"] is None else r"order by \1 limit %(first)s"
        return _FIRST.sub(first, _IF_CAUSE.sub(cause, whole))

    def _fragment(self) -> LiteralString:
        selection = self._selection
        if selection.kind == "restore" or selection.dead:
            return queries()["chosen_in_state"]
        if selection.events and selection.kind == "discard":
            self._events_that_wait()
            return queries()["chosen_events"]
        if selection.events:
            self._named |= self._queues_of_events()
        elif selection.keys:
            self._named |= {"queues": self._queues_of_keys()}
        if selection.kind == "release":
            return queries()["chosen_keys"]
        return queries()["chosen_waiting"].replace("{keys}", queries()["chosen_keys"])

    def _fingerprints(self) -> list[str] | None:
        cause = self._selection.cause
        if cause is None:
            return None
        named = {"pipeline": self._selection.pipeline, "cause": cause}
        rows = self._connection.execute(queries()["causes_meant"], named).fetchall()
        if not rows:
            message = f"nothing has failed by {cause!r} in pipeline {self._selection.pipeline!r}."
            raise NotFoundError(message, hint="`sideline parked causes` lists what has.")
        in_full = [name for name, whole in rows if whole]
        if in_full:
            return in_full
        if len(rows) > 1:
            shown = ", ".join(name for name, _ in rows[:3])
            message = f"{cause!r} begins {len(rows)} causes: {shown} ..."
            raise UsageError(message, hint="Give one digit more.")
        return [rows[0][0]]

    def _queues_of_keys(self) -> list[int]:
        selection = self._selection
        topics = [selection.topic] if selection.topic else self._topics()
        found: list[int] = []
        for key in selection.keys:
            digests = [digest_of(key, derived=derived) for derived in (False, True)]
            named = {"pipeline": selection.pipeline, "topics": topics, "digests": digests}
            rows = self._connection.execute(queries()["queues_of_keys"], named).fetchall()
            found += [row[0] for row in rows]
        return found

    def _topics(self) -> list[str]:
        named = {"pipeline": self._selection.pipeline}
        return [row[0] for row in self._connection.execute(queries()["waiting_topics"], named)]

    def _queues_of_events(self) -> dict[str, Any]:
        rows = self._events_that_wait()
        return {
            "queues": [queue for queue, _ in rows if queue is not None],
            "places": [place for queue, place in rows if queue is None],
        }

    def _events_that_wait(self) -> list[tuple[int | None, int]]:
        """Queue and place of each event that was named; one that does not wait is refused."""
        rows = self._connection.execute(queries()["queues_of_events"], self._named).fetchall()
        states = {EventId(*row[:3]): row[3] for row in reversed(rows)}
        places = [(row[4], row[5]) for row in rows if row[3] == "parked"]
        waits = {EventId(*row[:3]) for row in rows if row[3] == "parked"}
        for event in self._selection.events:
            if event not in states:
                message = f"event {event} is not in the ledger of pipeline"
                message += f" {self._selection.pipeline!r}."
                raise NotFoundError(message, hint="`sideline parked list` shows what waits.")
            if event not in waits:
                message = f"event {event} does not wait: it is {states[event]}."
                raise RefusedError(message, hint=f"See it: sideline parked show {event}")
        return places
