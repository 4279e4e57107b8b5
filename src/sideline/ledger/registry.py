"""The events that a run which applies a range again leaves out: damaged, or still waiting (R5).

Asked for every slice, by the offsets that it has. A run never goes beyond what the pipeline has
passed, so every event behind a parked one of its key is in the ledger itself by now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sideline import arrays
from sideline.errors import KnownDamaged, PassedOver, StillWaiting
from sideline.ledger.parking import Key
from sideline.ledger.sql import queries

if TYPE_CHECKING:
    from sideline.again import Again
    from sideline.events import Event
    from sideline.ledger.connection import Connection
    from sideline.ledger.store import Held

WAITING = frozenset({"pending", "parked", "retrying"})


class Registry:
    """What a pipeline's ledger knows of the events of a run."""

    def __init__(
        self, connection: Connection, again: Again, key_of: Callable[[Event], bytes | None]
    ) -> None:
        self._connection = connection
        self._again = again
        self._key_of = key_of

    def passed_over(self, held: Held, events: Sequence[Event]) -> dict[int, PassedOver]:
        """The events of a slice that are left out, by offset, and why."""
        if not events:
            return {}
        rows = self._connection.execute(
            queries()["registry"],
            {
                **self._names(held),
                "incarnation": held.incarnation,
                "first": events[0].offset,
                "last": events[-1].offset,
            },
        ).fetchall()
        self._connection.commit()
        found: dict[int, PassedOver] = {}
        damaged: set[int] = set()
        for offset, state in rows:
            if state in WAITING:
                found[offset] = StillWaiting(f"it is {state} in pipeline {self._again.of!r}")
            elif self._again.include_damaged:
                damaged.add(offset)
            else:
                found[offset] = KnownDamaged(f"it is {state} in pipeline {self._again.of!r}")
        if damaged:
            found |= self._behind(held, [event for event in events if event.offset in damaged])
        return found

    def _behind(self, held: Held, events: Sequence[Event]) -> dict[int, PassedOver]:
        """Damaged events that stand behind one of their key that still waits."""
        keys = {event.offset: self._keys(event) for event in events}
        digests = sorted({key.digest for own in keys.values() for key in own})
        names = self._names(held) | {
            "incarnation": held.incarnation,
            "digests": arrays.texts(digests),
        }
        rows = self._connection.execute(queries()["parked_heads"], names).fetchall()
        self._connection.commit()
        heads = {str(digest).replace("-", ""): offset for digest, offset in rows}
        never = float("inf")
        return {
            offset: StillWaiting(f"its key is aside in pipeline {self._again.of!r}")
            for offset, own in keys.items()
            if min((heads.get(key.digest, never) for key in own), default=never) < offset
        }

    def _keys(self, event: Event) -> list[Key]:
        keys = [] if event.key is None else [Key(event.key, derived=False)]
        try:
            own = self._key_of(event)
        # Its bytes may be what is wrong with it: then its record's key stands for it.
        except Exception:  # noqa: BLE001
            own = None
        return keys if own is None else [*keys, Key(own, derived=True)]

    def _names(self, held: Held) -> dict[str, object]:
        return {
            "pipeline": self._again.of,
            "topic": held.partition.topic,
            "partition": held.partition.number,
        }
