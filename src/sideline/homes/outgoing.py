"""Records that handlers publish beside their rows: through the outbox, with the slice (P2).

Whether a record can be sent is found out before COMMIT, event by event: what nobody could send is
its event's failure, and keeps nothing else back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sideline.effects import Effect, Publish
from sideline.engine.handling import publishes
from sideline.errors import (
    NonRecoverable,
    NotFoundError,
    Recoverable,
    RefusedError,
    UnreachableError,
)
from sideline.topics.carrying import record_of

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.leaving import Record
    from sideline.pipeline import Pipeline
    from sideline.slices import Handled
    from sideline.topics.room import Rooms

Room = tuple[int, int]


class Outgoing:
    """What the events of slices publish."""

    def __init__(self, pipeline: Pipeline, rooms: Rooms) -> None:
        # A run that applies a range again repeats the ids of its pipeline.
        self._name = pipeline.name if pipeline.again is None else pipeline.again.of
        self._rooms = rooms
        self._made: dict[int, list[Record]] = {}
        self._of: Sequence[Event] | None = None

    def errors(self, handled: Handled) -> dict[int, BaseException]:
        """Make the records of a slice: by place, why some of them cannot be sent."""
        self._made, self._of = {}, handled.events
        if not handled.publishes:
            return {}
        errors: dict[int, BaseException] = {}
        asked: dict[str, Room | BaseException] = {}
        for place, effects in enumerate(handled.effects):
            if not publishes(effects):
                continue
            try:
                self._made[place] = self._records(handled.events[place], effects, asked)
            # Whatever the handler gave that is no record: its own failure.
            except Exception as error:  # noqa: BLE001
                errors[place] = error
        return errors

    def check(self, event: Event, effects: tuple[Effect, ...]) -> None:
        """Raise if what one event publishes cannot be sent."""
        if publishes(effects):
            self._records(event, effects, {})

    def records(self, handled: Handled, places: Collection[int] | None = None) -> list[Record]:
        """What leaves, in log order; of all events that are applied, or of those at some places."""
        if not handled.publishes:
            return []
        made = self._made if self._of is handled.events else {}
        asked: dict[str, Room | BaseException] = {}
        found: list[Record] = []
        for place, effects in enumerate(handled.effects):
            if not publishes(effects) or (places is not None and place not in places):
                continue
            records = made.get(place)
            found += records or self._records(handled.events[place], effects, asked)
        return found

    def _records(
        self, event: Event, effects: Sequence[Effect], asked: dict[str, Room | BaseException]
    ) -> list[Record]:
        records = []
        for position, effect in enumerate(effects):
            if type(effect) is Publish:
                record = record_of(self._name, event, position, effect)
                self._fit(record, asked)
                records.append(record)
        return records

    def _fit(self, record: Record, asked: dict[str, Room | BaseException]) -> None:
        topic = record.topic
        if topic not in asked:
            asked[topic] = self._ask(topic)
        room = asked[topic]
        if isinstance(room, BaseException):
            raise room
        most, partitions = room
        if record.partition is not None and record.partition >= partitions:
            message = f"topic {topic!r} has {partitions} partitions, and no {record.partition}"
            raise NonRecoverable(message)
        if record.bytes > most:
            message = f"{record.bytes:,} bytes are more than topic {topic!r} takes ({most:,})"
            raise NonRecoverable(message)

    def _ask(self, topic: str) -> Room | BaseException:
        try:
            return self._rooms.of(topic)
        except UnreachableError as error:
            return Recoverable(error.message)
        except NotFoundError:
            return NonRecoverable(f"topic {topic!r} does not exist")
        except RefusedError:
            return NonRecoverable(f"topic {topic!r} may not be written to")


def rows_of(effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
    """The effects that are written to tables."""
    return tuple(effect for effect in effects if type(effect) is not Publish)
