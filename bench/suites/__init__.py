"""What is measured: each module runs one question and returns its findings."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench import events
from bench.narration import Narrator
from bench.services import Services
from bench.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One figure that has an aim."""

    what: str
    value: float
    aim: float
    # Whether larger is better; latency and memory are better small.
    at_least: bool = True
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the aim is reached."""
        return self.value >= self.aim if self.at_least else self.value <= self.aim


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a suite brings: rows for its table, and the figures that have aims."""

    suite: str
    title: str
    rows: list[dict[str, Any]]
    findings: list[Finding]


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """Everything that a suite needs."""

    services: Services
    settings: Settings
    narrator: Narrator

    @contextmanager
    def published(self, topic: events.Topic) -> Iterator[events.Topic]:
        """The topic, full of events, under a name of its own; deleted afterwards."""
        topic = dataclasses.replace(topic, name=f"{topic.name}-{uuid.uuid4().hex[:8]}")
        text = f"publish {topic.events:,} events of {topic.size:,} bytes"
        with self.narrator.bar(text, topic.events) as done:
            events.publish(self.services.bootstrap, topic, done)
        try:
            yield topic
        finally:
            events.delete_topic(self.services.bootstrap, topic.name)

    @contextmanager
    def empty_topic(self, name: str, partitions: int, **config: str) -> Iterator[str]:
        """A new topic without events; deleted afterwards."""
        name = f"{name}-{uuid.uuid4().hex[:8]}"
        events.create_topic(self.services.bootstrap, name, partitions, **config)
        try:
            yield name
        finally:
            events.delete_topic(self.services.bootstrap, name)
