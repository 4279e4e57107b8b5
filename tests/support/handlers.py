"""Handlers for workers in processes of their own, by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from sideline import Block, Calls, Delete, Event, Insert, Pipeline, Recoverable, Skip, Upsert
from sideline.backoff import Backoff

TABLES = (
    "create table users (id text primary key, value text)",
    # One row an effect, written in the slice's own transaction, in the order of their commits.
    """
    create table history (
        seq bigint generated always as identity,
        topic text not null,
        partition int not null,
        number bigint not null,
        key text,
        value text,
        lease bigint[] not null,
        pid int not null
    )
    """,
)


def build(
    name: str,
    topics: str | list[str],
    *,
    handler: str = "record",
    argument: Any = None,
    calls: bool = False,
    skip: bool = False,
    block: bool = False,
    retry_first: str = "50ms",
    **options: Any,
) -> Pipeline:
    """A pipeline from JSON: ``handler`` names one of those below, ``argument`` is for it."""
    if calls:
        options["sink"] = Calls()
    if skip:
        options["on_failure"] = Skip()
    if block:
        options["on_failure"] = Block()
    pipeline = Pipeline(name, topics, retry=Backoff(first=retry_first), **options)
    pipeline.handler(HANDLERS[handler](argument))
    return pipeline


def entry(event: Event) -> dict[str, Any]:
    """The history's row of an event."""
    return {
        "topic": event.topic,
        "partition": event.partition,
        "number": event.offset,
        "key": None if event.key is None else event.key.decode(),
        "value": event.text(),
        "lease": list(event.delivery.lease),
        "pid": os.getpid(),
    }


def _effects(event: Event) -> list[Any]:
    row = entry(event)
    history = Insert("history", row)
    if event.key is None:
        return [history]
    if event.value is None:
        return [Delete("users", {"id": row["key"]}), history]
    return [Upsert("users", {"id": row["key"], "value": row["value"]}, key="id"), history]


def record(_argument: Any) -> Callable[[Event], Any]:
    """A user's row and the history's."""
    return _effects


def slow(seconds: float) -> Callable[[Event], Any]:
    """The same, after some time."""

    def handle(event: Event) -> Any:
        time.sleep(seconds)
        return _effects(event)

    return handle


def waiting(flag: str) -> Callable[[Event], Any]:
    """Fails, to heal by itself, at events that say "wait", for as long as a file is there."""

    def handle(event: Event) -> Any:
        if event.value == b"wait" and Path(flag).exists():
            message = "the outside world is broken"
            raise Recoverable(message)
        return _effects(event)

    return handle


def failing(_argument: Any) -> Callable[[Event], Any]:
    """Fails at events that say "bad"."""

    def handle(event: Event) -> Any:
        if event.value == b"bad":
            message = "bad"
            raise ValueError(message)
        return _effects(event)

    return handle


def insert(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """Writes the history by SQL of its own, in the open transaction."""

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        row = entry(event)
        names = ", ".join(row)
        tx.execute(
            f"insert into history ({names}) values ({', '.join(f'%({n})s' for n in row)})", row
        )

    return handle


def call(path: str) -> Callable[[Event], None]:
    """Acts on the outside world: a line in a file, which nothing takes back."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(event: Event) -> None:
        key = "" if event.key is None else event.key.decode()
        lease = ".".join(map(str, event.delivery.lease))
        line = f"{event.topic} {event.partition} {event.offset} {key} {lease}\n"
        os.write(file, line.encode())

    return handle


def slow_call(argument: list[Any]) -> Callable[[Event], None]:
    """A call that takes its time."""
    path, seconds = argument
    act = call(path)

    def handle(event: Event) -> None:
        time.sleep(seconds)
        act(event)

    return handle


HANDLERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "record": record,
    "slow": slow,
    "waiting": waiting,
    "failing": failing,
    "insert": insert,
    "call": call,
    "slow_call": slow_call,
}
