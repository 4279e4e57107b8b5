"""How many tasks a pipeline may have at once in a Spark session that it may share with others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from sideline.errors import RefusedError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


class Room(NamedTuple):
    """What a pipeline may use of its session."""

    slots: int
    """Tasks of a round."""
    hand_over: bool
    """Whether the next round can warm up beside the last one."""


def share(total: int, pipelines: int, wanted: int) -> Room:
    """Divide a session's slots fairly.

    A lease holds its slots for seconds: whoever took more than a fair share would leave the
    others waiting behind it until their own leases are over.
    """
    fair = max(1, total // pipelines)
    return Room(min(wanted, fair), fair >= 2 * wanted)


_guests: WeakKeyDictionary[SparkContext, set[Guest]] = WeakKeyDictionary()
_lock = threading.Lock()


class Guest:
    """A pipeline in a session; what it may use changes when others come and go."""

    def __init__(self, spark: SparkSession, wanted: int) -> None:
        self._context = spark.sparkContext
        self._wanted = wanted
        self._total = total = self._context.defaultParallelism
        with _lock:
            others = _guests.setdefault(self._context, set())
            if len(others) >= total:
                message = (
                    f"the Spark session has {total} slots, and a pipeline in each of them already."
                )
                hint = "Stop one, or give the session more: SparkSession.builder.master('local[8]')"
                raise RefusedError(message, hint=hint)
            others.add(self)

    def room(self) -> Room:
        """What may be used now."""
        with _lock:
            pipelines = len(_guests[self._context])
        return share(self._total, pipelines, self._wanted)

    def leave(self) -> None:
        """Leave the room to the others."""
        with _lock:
            _guests[self._context].discard(self)
