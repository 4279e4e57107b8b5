"""Apply Kafka events with PySpark, in order per key and exactly once in effect."""

from sideline._version import __version__
from sideline.backoff import Backoff
from sideline.effects import Delete, Execute, Insert, Publish, Upsert
from sideline.errors import NonRecoverable, Recoverable, SidelineError
from sideline.events import Event
from sideline.pipeline import Pipeline
from sideline.policies import Block, DeadLetter, FloodGuard, RetryTopics, Sideline, Skip
from sideline.sinks import Calls, Postgres

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
    "NonRecoverable",
    "Pipeline",
    "Postgres",
    "Publish",
    "Recoverable",
    "RetryTopics",
    "Sideline",
    "SidelineError",
    "Skip",
    "Upsert",
    "__version__",
]
