"""The pipelines that sideline runs in the bench, as a user would write them."""

from __future__ import annotations

import asyncio
import mmap
import time
from pathlib import Path
from typing import Any

from bench.alone import NO_GUARD
from bench.events import REPEATED_KEYS
from bench.peers import WAIT_SECONDS, task
from sideline import (
    DeadLetter,
    Event,
    Kafka,
    MessageId,
    Pipeline,
    Publish,
    Recoverable,
    RetryTopics,
    Upsert,
)

given = task()


def _place(event: Event) -> int:
    return event.partition * (given.events // 100 + 1) + event.offset // 100


def row(event: Event) -> Upsert:
    """The user that the event carries, as a row."""
    user = event.json()
    fields = {"id": user["id"], "name": user["name"], "email": user["email"], "seq": user["seq"]}
    return Upsert("users", fields, key="id")


users = Pipeline("bench", topics=given.topic, slice_size=given.options.get("slice_size", 25_000))
users.handler(row)

deduped = Pipeline("bench", topics=given.topic, dedupe=MessageId(header="message-id", keep="7d"))
deduped.handler(row)

latency = Pipeline("bench", topics=given.topic)


@latency.handler
def effect(event: Event) -> Upsert:
    """One row for each event: its key never comes again."""
    body = event.json()
    fields = {"part": body["part"], "seq": body["seq"], "name": body["name"]}
    return Upsert("effects", fields, key=("part", "seq"))


waiting = Pipeline("bench", topics=given.topic, concurrency=given.options.get("concurrency", 1))


@waiting.handler
async def wait(event: Event) -> Upsert:
    """Wait for something outside, as a coroutine."""
    await asyncio.sleep(WAIT_SECONDS)
    return row(event)


blocking = Pipeline("bench", topics=given.topic, concurrency=given.options.get("concurrency", 1))


@blocking.handler
def block(event: Event) -> Upsert:
    """Wait for something outside, as an ordinary function."""
    time.sleep(WAIT_SECONDS)
    return row(event)


def parse(df: Any) -> Any:
    """The value's JSON, parsed by the JVM."""
    from pyspark.sql import functions  # noqa: PLC0415 - only the driver of one suite needs it

    shape = "id string, name string, email string, seq bigint"
    return df.select("*", functions.from_json(df.value.cast("string"), shape).alias("user"))


prepared = Pipeline("bench", topics=given.topic, prepare=parse)


@prepared.handler
def prepared_row(event: Event) -> Upsert:
    """The same row, from what the JVM made of the event."""
    return Upsert("users", event.row["user"], key="id")


failing = Pipeline("bench", topics=given.topic, guard=NO_GUARD)
fails_per_mille = given.options.get("fails_per_mille", 0)
# Keys begin to fail one after the other, while all of them come round this often.
LATEST_FAILURE = 4


@failing.handler
def fail(event: Event) -> Upsert:
    """So many keys of a thousand fail, from some event on."""
    upsert = row(event)
    number = int(upsert.row["id"][-8:])
    if number % 1000 < fails_per_mille:
        begins = number // 1000 % LATEST_FAILURE * REPEATED_KEYS
        if upsert.row["seq"] >= begins:
            message = f"user {number} does not fit"
            raise ValueError(message)
    return upsert


retried = Pipeline(
    "bench",
    topics=given.topic,
    guard=NO_GUARD,
    independent=True,
    on_failure=RetryTopics(delays=("1s", "1s", "1s")),
)
fails_once = given.options.get("case") == "retry"


@retried.setup
def marks() -> Any:
    """A byte for each event that is to fail once; another process may get it again."""
    with Path(given.options["marks"]).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@retried.handler
def retry(event: Event) -> Upsert:
    """One event of a hundred fails at first."""
    # In this order, so that the stream in which nothing fails pays for the question, too.
    if event.offset % 100 == 0 and fails_once and not event.context[place := _place(event)]:
        event.context[place] = 1
        message = "the outside world is broken"
        raise Recoverable(message)
    return row(event)


letters = Pipeline(
    "bench",
    topics=given.topic,
    guard=NO_GUARD,
    independent=True,
    on_failure=DeadLetter(attempts=1),
)


@letters.handler
def give_up(event: Event) -> Upsert:
    """Nothing fits."""
    message = f"user {event.json()['id']} does not fit"
    raise ValueError(message)


copied = Pipeline(
    "bench",
    topics=given.topic,
    sink=Kafka(),
    delivery=given.options.get("delivery", "exactly-once"),
    slice_size=given.options.get("slice_size", 25_000),
)
to = given.options.get("to", "")


@copied.handler
def copy(event: Event) -> Publish:
    """The same record in another topic."""
    return Publish(to, event.value, event.key)
