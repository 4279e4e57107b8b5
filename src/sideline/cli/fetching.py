"""Bytes that are not in the ledger, for commands that show or try events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sideline import settings

if TYPE_CHECKING:
    from sideline.ledger.connection import Connection
    from sideline.parked import Fetch
    from sideline.views import Content, Held


def fetcher(connection: Connection, kafka: str | None) -> Fetch:
    """Gets bytes from Kafka, which nobody asks about before they are wanted."""

    def fetch(pipeline: str, events: Sequence[Held]) -> Mapping[Held, Content | None]:
        from sideline.ledger import contents  # noqa: PLC0415 - imports confluent-kafka

        properties = settings.load(kafka=kafka).kafka_client()
        return contents.fetch(connection, properties, pipeline, events)

    return fetch
