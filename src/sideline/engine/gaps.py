"""Whether Kafka has an event between two offsets: a gap that nobody has asked about is a loss."""

from __future__ import annotations

import time
from typing import Any

from sideline.engine.lease import Partition
from sideline.engine.reader import Lost, Reader
from sideline.errors import DataLostError, KafkaUnreachableError

ASK_SECONDS = 30.0


def first_event(
    kafka: dict[str, Any], group: str, partition: Partition, start: int, until: int
) -> int | None:
    """The offset of the first event from ``start`` on and before ``until``; None: there is none.

    Aborted events are none. What an open transaction has written is not known yet, so that the
    answer is then ``start``'s own neighbourhood: the end of what is known.
    """
    reader = Reader({**kafka, "group.id": group})
    limit = time.monotonic() + ASK_SECONDS
    try:
        reader.aim(partition, start)
        while time.monotonic() < limit:
            reader.fill(0.5)
            span = reader.span(partition)
            if span.events:
                offset = span.events[0].offset
                return offset if offset < until else None
            if span.end >= until:
                return None
            if span.at_end:
                return span.end
    except Lost:
        message = (
            f"events were lost: {partition} offsets {start} to {until - 1} are gone from Kafka."
        )
        hint = "Go on without them with: sideline run --once --accept-loss. Then start the query."
        raise DataLostError(message, hint=hint) from None
    finally:
        reader.close()
    message = f"Kafka did not say what {partition} has from offset {start} on."
    raise KafkaUnreachableError(message)
