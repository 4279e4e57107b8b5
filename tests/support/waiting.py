"""Wait for an event, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

T = TypeVar("T")


def wait_for(event: Callable[[], T], *, what: str, within_seconds: float = 60) -> T:
    """Ask until the answer is true; fail with ``what`` when the time is over.

    Long enough for a loaded machine; nothing waits for it when all is well.
    """
    deadline = time.monotonic() + within_seconds
    while not (answer := event()):
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.02)
    return answer


# Of a broker that lost sight of itself for a moment, on a busy machine.
_PASSING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._DESTROY_BROKER,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)


def patiently(ask: Callable[[], T], *, within_seconds: float = 60) -> T:
    """Ask Kafka again while it has no answer for a reason that passes."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in _PASSING or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
