"""Apply Kafka events with PySpark, in order per key and exactly once in effect."""

from typing import TYPE_CHECKING, Any

from sideline._version import __version__
from sideline.backoff import Backoff
from sideline.dedupe import MessageId
from sideline.effects import Delete, Execute, Insert, Publish, Upsert
from sideline.errors import NonRecoverable, Recoverable, SidelineError
from sideline.events import Event
from sideline.pipeline import Pipeline
from sideline.policies import Block, DeadLetter, FloodGuard, RetryTopics, Sideline, Skip
from sideline.sinks import Calls, Kafka, Postgres
from sideline.topics.names import TopicNames

if TYPE_CHECKING:
    from sideline.publisher import Publisher

__all__ = [
    "Backoff",
    "Block",
    "Calls",
    "DeadLetter",
    "Delete",
    "Event",
    "Execute",
    "FloodGuard",
    "Insert",
    "Kafka",
    "MessageId",
    "NonRecoverable",
    "Pipeline",
    "Postgres",
    "Publish",
    "Publisher",
    "Recoverable",
    "RetryTopics",
    "Sideline",
    "SidelineError",
    "Skip",
    "TopicNames",
    "Upsert",
    "__version__",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has that name
    # Publisher imports librdkafka; declaring a pipeline does not need it.
    if name == "Publisher":
        from sideline.publisher import Publisher  # noqa: PLC0415

        return Publisher
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
