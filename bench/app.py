"""The pipelines that sideline runs in the bench, as a user would write them."""

from __future__ import annotations

import asyncio
import time

from bench.peers import WAIT_SECONDS, task
from sideline import Event, Pipeline, Upsert

given = task()


def row(event: Event) -> Upsert:
    """The user that the event carries, as a row."""
    user = event.json()
    fields = {"id": user["id"], "name": user["name"], "email": user["email"], "seq": user["seq"]}
    return Upsert("users", fields, key="id")


users = Pipeline("bench", topics=given.topic, slice_size=given.options.get("slice_size", 25_000))
users.handler(row)

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
