"""How a publisher's client is set up: safe by default, weaker only by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from sideline import kafka_properties
from sideline import settings as settings_module
from sideline.durations import Duration, seconds
from sideline.errors import ConfigurationError, UsageError
from sideline.settings import Settings

Delivery = Literal["exactly-once", "at-least-once", "at-most-once"]

# What each mode is to librdkafka; docs/publishing.md says what it costs.
MODES: dict[str, dict[str, Any]] = {
    "exactly-once": {
        "acks": "all",
        "enable.idempotence": True,
        "max.in.flight.requests.per.connection": 5,
    },
    # Without sequence numbers a second request under way could overtake one that is repeated.
    "at-least-once": {
        "acks": "all",
        "enable.idempotence": False,
        "max.in.flight.requests.per.connection": 1,
    },
    # The leader's word is waited for, so that what is lost is at least told.
    "at-most-once": {"acks": "1", "enable.idempotence": False, "retries": 0},
}
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
# The first is what Java's clients do, the second what librdkafka's do.
PARTITIONERS = ("murmur2_random", "consistent_random")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What can be said about a publisher, as it was said."""

    delivery: str
    transactional_id: str | None
    delivery_timeout: Duration
    transaction_timeout: Duration
    linger: Duration
    batch_bytes: int
    compression: str
    partitioner: str
    buffer_records: int
    buffer_bytes: int

    def properties(self) -> dict[str, Any]:
        """The properties of its client; ConfigurationError for what cannot be."""
        _one_of("delivery", self.delivery, tuple(MODES))
        timeout = _milliseconds("delivery_timeout", self.delivery_timeout, 1, 86_400)
        buffer = _whole("buffer_bytes", self.buffer_bytes, 1 << 20, 1 << 30)
        own = {
            **MODES[self.delivery],
            "message.timeout.ms": timeout,
            "linger.ms": _milliseconds("linger", self.linger, 0, 60),
            "batch.size": _whole("batch_bytes", self.batch_bytes, 1 << 10, 1 << 30),
            "batch.num.messages": 100_000,
            "compression.type": _one_of("compression", self.compression, COMPRESSIONS),
            "partitioner": _one_of("partitioner", self.partitioner, PARTITIONERS),
            "queue.buffering.max.messages": _whole(
                "buffer_records", self.buffer_records, 1, 10_000_000
            ),
            "queue.buffering.max.kbytes": buffer >> 10,
            # The topic's own limit decides, not the client's.
            "message.max.bytes": buffer,
            "log_level": 0,
        }
        if self.transactional_id is not None:
            _check_transactional(self.transactional_id, self.delivery)
            wait = _milliseconds("transaction_timeout", self.transaction_timeout, 1, 900)
            own |= {
                "transactional.id": self.transactional_id,
                "transaction.timeout.ms": wait,
                # A record that is late must not outlive its transaction.
                "message.timeout.ms": min(timeout, wait),
            }
        return own


def client_properties(
    kafka: str | None, settings: Settings | None, properties: Mapping[str, str] | None
) -> dict[str, Any]:
    """Where Kafka is, and how it is reached: the settings, and what was given beside them."""
    if settings is not None and kafka is not None:
        raise UsageError("give settings= or kafka=, not both.")
    found = settings or settings_module.load(kafka=kafka)
    for name, value in (properties or {}).items():
        problem = kafka_properties.name_problem(name)
        problem = problem or kafka_properties.value_problem(name, str(value))
        if problem:
            hint = "What can be set is in docs/configuration.md."
            raise ConfigurationError(f"the property {name!r} {problem}.", hint=hint)
    return found.kafka_client(**(properties or {}))


def _check_transactional(transactional_id: str, delivery: str) -> None:
    if not isinstance(transactional_id, str) or not transactional_id.strip():
        raise ConfigurationError("transactional_id must be text that is not empty.")
    if delivery != "exactly-once":
        message = f'transactions are exactly-once; they do not go with delivery="{delivery}".'
        raise ConfigurationError(message, hint="Leave one of the two out.")


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        message = f"{what} is {value!r}; it must be one of {', '.join(choices)}."
        raise ConfigurationError(message)
    return value


def _whole(what: str, value: int, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        message = f"{what} is {value!r}; it must be between {least:,} and {most:,}."
        raise ConfigurationError(message)
    return value


def _milliseconds(what: str, span: Duration, least: int, most: int) -> int:
    wanted = seconds(span, what=what)
    if not least <= wanted <= most:
        message = f"{what} is {span!r}; it must be between {least} s and {most:,} s."
        raise ConfigurationError(message)
    return round(wanted * 1000)
