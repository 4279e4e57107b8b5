"""Pipelines at work in tests: events in, rows out, and the command as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

from sideline import Event, Insert, Pipeline
from sideline.settings import Settings
from tests.support.waiting import patiently, wait_for

# One row an event, in the order in which they took effect.
APPLIED = """
    create table applied (
        seq bigserial,
        topic text,
        partition int,
        number bigint,
        key text,
        value text
    )
"""
# A file of a user's, for the command. {options} and {before} are the test's own.
APP = """
import os
import time

from sideline import Event, Insert, Pipeline, Postgres

flow = Pipeline({name!r}, topics={topic!r}{options})


@flow.handler
def record(event: Event):
    {before}
    row = {{"topic": event.topic, "partition": event.partition, "number": event.offset}}
    return Insert("applied", row | {{"key": event.key.decode(), "value": event.text()}})
"""


class Applied(NamedTuple):
    """An effect as the table has it."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: str | None


def recorder(name: str, topics: str | Sequence[str], **options: Any) -> Pipeline:
    """A pipeline that writes a row for every event."""
    pipeline = Pipeline(name, topics=topics, **options)

    @pipeline.handler
    def record(event: Event) -> Insert:
        row = {"topic": event.topic, "partition": event.partition, "number": event.offset}
        key = event.key and event.key.decode()
        return Insert("applied", row | {"key": key, "value": event.text()})

    return pipeline


def write_app(
    folder: Path, name: str, topic: str, *, before: str = "pass", options: str = ""
) -> str:
    """Write a pipeline as a user would; returns what to call it on the command line."""
    given = f", {options}" if options else ""
    file = folder / "app.py"
    file.write_text(APP.format(name=name, topic=topic, options=given, before=before))
    return f"{file}:flow"


def settings(kafka: str, database: str, **properties: str) -> Settings:
    """Settings that name these services and no others."""
    named = {name.replace("_", "."): value for name, value in properties.items()}
    return Settings(kafka, database, named)


def execute(database: str, *statements: str) -> None:
    """Run statements."""
    with psycopg.connect(database, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def query(database: str, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Ask the database."""
    with psycopg.connect(database, autocommit=True) as connection:
        return connection.execute(statement, values).fetchall()


def applied(database: str) -> list[Applied]:
    """What took effect, in that order."""
    rows = query(database, "select topic, partition, number, key, value from applied order by seq")
    return [Applied(*row) for row in rows]


def progress(database: str, pipeline: str) -> dict[tuple[str, int], int]:
    """How far each partition has come; empty before the pipeline ever ran."""
    if not query(database, "select to_regclass('sideline.progress') is not null")[0][0]:
        return {}
    rows = query(
        database,
        "select topic, partition, next_offset from sideline.progress where pipeline = %s",
        pipeline,
    )
    return {(topic, partition): offset for topic, partition, offset in rows}


def counted(database: str, pipeline: str) -> int:
    """How many events the ledger says were consumed."""
    rows = query(
        database,
        "select coalesce(sum(consumed), 0) from sideline.progress where pipeline = %s",
        pipeline,
    )
    return int(rows[0][0])


def faults(effects: Iterable[Applied], produced: Iterable[tuple[str, int, int]]) -> list[str]:
    """What is wrong between what was produced and what took effect: nothing, one hopes."""
    effects = list(effects)
    counts = Counter((effect.topic, effect.partition, effect.offset) for effect in effects)
    wanted = set(produced)
    found = [f"lost: {place}" for place in sorted(wanted - set(counts))]
    found += [f"unknown: {place}" for place in sorted(set(counts) - wanted)]
    found += [f"{count} times: {place}" for place, count in sorted(counts.items()) if count > 1]
    last: dict[tuple[str, int], int] = {}
    for effect in effects:
        partition = (effect.topic, effect.partition)
        if effect.offset < last.get(partition, -1):
            found.append(f"out of order: {effect} after {last[partition]}")
        last[partition] = effect.offset
    return found


def publish(
    kafka: str,
    topic: str,
    events: Iterable[tuple[str | None, str | None]],
    *,
    partition: int | None = None,
    timestamp_ms: int | None = None,
) -> list[tuple[str, int, int]]:
    """Send events (key, value); returns where each one stands."""
    places: list[tuple[str, int, int]] = []

    def sent(error: object, message: Any) -> None:
        assert error is None, error
        places.append((message.topic(), message.partition(), message.offset()))

    producer = Producer({"bootstrap.servers": kafka, "acks": "all", "enable.idempotence": True})
    where: dict[str, Any] = {} if partition is None else {"partition": partition}
    if timestamp_ms is not None:
        where["timestamp"] = timestamp_ms
    for key, value in events:
        producer.produce(topic, key=key, value=value, on_delivery=sent, **where)
        producer.poll(0)
    assert producer.flush(30) == 0
    return places


def numbered(count: int, *, start: int = 0, keys: int = 50) -> list[tuple[str, str]]:
    """Events of some keys, each with its own value."""
    return [(f"k{number % keys}", f"v{number}") for number in range(start, start + count)]


def group_offsets(kafka: str, group: str, topic: str, partitions: int) -> dict[int, int]:
    """The group's committed offsets, as any lag tool reads them."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": group})
    try:
        wanted = [TopicPartition(topic, number) for number in range(partitions)]
        return {
            found.partition: found.offset
            for found in patiently(lambda: consumer.committed(wanted, timeout=20))
            if found.offset >= 0
        }
    finally:
        consumer.close()


class Command:
    """`sideline ...` as a process of its own, in a group of its own as a shell would start it."""

    def __init__(
        self,
        arguments: Sequence[str],
        directory: Path,
        *,
        program: Sequence[str] = ("-m", "sideline"),
        **environment: str,
    ) -> None:
        self.directory = directory
        self._out = directory / "stdout.txt"
        self._err = directory / "stderr.txt"
        temporary = directory / "tmp"
        temporary.mkdir(exist_ok=True)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=directory,
                start_new_session=True,
                env=os.environ | {"TMPDIR": str(temporary)} | environment,
            )

    @property
    def out(self) -> str:
        """What it printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it said so far."""
        return self._err.read_text()

    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)

    def end(self, within_seconds: float = 60) -> int:
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            message = f"still running after {within_seconds} s:\n{self.err}"
            raise AssertionError(message) from None

    def signal(self, number: int, *, group: bool = False) -> None:
        """Signal the command, or the whole group as a terminal does."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def says(self, text: str, within_seconds: float = 60) -> None:
        """Wait until it said something."""

        def said() -> bool:
            assert self.process.poll() is None or text in self.err, f"it ended:\n{self.err}"
            return text in self.err

        wait_for(said, what=f"{text!r} in:\n{self.err}", within_seconds=within_seconds)

    def kill(self) -> None:
        """End it and whatever it started, whatever state they are in."""
        for member in _family(self.process.pid):
            try:
                os.kill(member, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(60)


def workers_of(command: Command) -> list[int]:
    """The Python workers of a command's Spark: children of the daemon that its JVM started."""
    jvms = [child for child in _children(command.process.pid) if _name(child) == "java"]
    return [worker for jvm in jvms for daemon in _children(jvm) for worker in _children(daemon)]


def _family(session: int) -> list[int]:
    """All processes of a session, however their groups are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def _children(pid: int) -> list[int]:
    # A JVM starts small programs at times, which are gone before anybody looks at them.
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _name(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name()
    return ""
