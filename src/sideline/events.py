"""What a handler gets: one record of a topic."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
from msgspec import Struct

# As Kafka keeps them: in order, with duplicates, values may be null.
Headers = tuple[tuple[str, bytes | None], ...]


class Delivery(NamedTuple):
    """What is the same for all events of a lease; shared, so that an event stays cheap."""

    context: Any = None
    """What ``@pipeline.setup`` returned in this worker."""
    lease: tuple[int, ...] = ()
    """Grows with every change of owner: a fencing token for outside systems."""
    replayed: bool = False
    """Whether it waited in the ledger, and somebody released it."""


ALONE = Delivery()


class Event(Struct, frozen=True, gc=False):
    """One record: immutable, and cheap enough to be made a million times a second."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    """Milliseconds since 1970, -1 if the record has none."""
    key: bytes | None
    value: bytes | None
    """None: a tombstone."""
    headers: Headers = ()
    delivery: Delivery = ALONE
    row: Mapping[str, Any] | None = None
    """What else a DataFrame step made of it, by column; None where there was none."""

    @property
    def id(self) -> str:
        """``topic/partition/offset`` of the origin: the same in every retry and replay."""
        return f"{self.topic}/{self.partition}/{self.offset}"

    @property
    def timestamp(self) -> datetime | None:
        """When the record was made, in UTC."""
        if self.timestamp_ms < 0:
            return None
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)

    @property
    def context(self) -> Any:  # noqa: ANN401 - whatever the user's setup returned
        """What ``@pipeline.setup`` returned in this worker process."""
        return self.delivery.context

    def json(self) -> Any:  # noqa: ANN401 - whatever the JSON says
        """The value, parsed as JSON; None for a tombstone."""
        return None if self.value is None else orjson.loads(self.value)

    def text(self) -> str | None:
        """The value as UTF-8 text; None for a tombstone."""
        return None if self.value is None else self.value.decode()

    def header(self, name: str) -> bytes | None:
        """The last header of that name: Kafka's rule where a name stands twice."""
        for key, value in reversed(self.headers):
            if key == name:
                return value
        return None
