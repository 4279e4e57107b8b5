"""Handlers for workers in processes of their own, by name."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from sideline import (
    Block,
    Calls,
    DeadLetter,
    Delete,
    Event,
    Insert,
    Kafka,
    MessageId,
    Pipeline,
    Publish,
    Recoverable,
    RetryTopics,
    Skip,
    Upsert,
)
from sideline.again import derive
from sideline.backoff import Backoff
from sideline.policies import FloodGuard

TABLES = (
    "create table if not exists users (id text primary key, value text)",
    # One row an effect, written in the slice's own transaction, in the order of their commits.
    """
    create table if not exists history (
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
    publishes: bool = False,
    skip: bool = False,
    block: bool = False,
    dead_letter: int | None = None,
    delays: list[str] | None = None,
    retry_first: str = "50ms",
    retry_limit: str = "30s",
    in_a_row: int = 100,
    guard_off: bool = False,
    key: str | None = None,
    dedupe: str | None = None,
    again: dict[str, Any] | None = None,
    **options: Any,
) -> Pipeline:
    """A pipeline from JSON: ``handler`` names one of those below, ``argument`` is for it."""
    if calls:
        options["sink"] = Calls()
    if publishes:
        options["sink"] = Kafka()
    if skip:
        options["on_failure"] = Skip()
    if block:
        options["on_failure"] = Block()
    if dead_letter is not None:
        options["on_failure"] = DeadLetter(attempts=dead_letter)
    if delays is not None:
        options["on_failure"] = RetryTopics(delays=tuple(delays))
    guard = FloodGuard(in_a_row=10**9 if guard_off else in_a_row, of=10**9)
    if key is not None:
        options["key"] = KEYS[key]
    if dedupe is not None:
        options["dedupe"] = IDS[dedupe]
    retry = Backoff(first=retry_first, limit=retry_limit)
    pipeline = Pipeline(name, topics, retry=retry, guard=guard, **options)
    pipeline.handler(HANDLERS[handler](argument))
    return pipeline if again is None else derive(pipeline, **again)


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


def exact(_argument: Any) -> Callable[[Event], Any]:
    """Every byte of an event as the handler sees it, in table ``seen``."""

    def handle(event: Event) -> Any:
        headers = [[name, None if data is None else data.hex()] for name, data in event.headers]
        row = {"number": event.offset, "key": event.key, "value": event.value}
        return Insert("seen", row | {"at": event.timestamp_ms, "headers": {"all": headers}})

    return handle


def versioned(seconds: float | None) -> Callable[[Event], Any]:
    """A row whose version is the event's number; nothing else."""

    def handle(event: Event) -> Any:
        time.sleep(seconds or 0.0)
        row = {"id": (event.key or b"").decode(), "value": event.text(), "version": event.offset}
        return Upsert("versions", row, key="id", version="version")

    return handle


def unversioned(_argument: Any) -> Callable[[Event], Any]:
    """Users' rows and nothing else, which anything may replace."""

    def handle(event: Event) -> Any:
        row = {"id": (event.key or b"").decode(), "value": event.text()}
        return Upsert("users", row, key="id")

    return handle


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
        if event.value == b"bad" or b'"fail"' in (event.value or b""):
            message = "bad"
            raise ValueError(message)
        return _effects(event)

    return handle


def flaky(folder: str) -> Callable[[Event], Any]:
    """Counts how often it sees an event; "heals:2" fails twice, to heal, "never" fails for good.

    Each try is a line, with its time, in a file of the event's own.
    """

    def handle(event: Event) -> Any:
        path = Path(folder) / event.id.replace("/", "~")
        with path.open("a") as file:
            file.write(f"{time.time()}\n")
        tries = len(path.read_text().splitlines())
        word, _, count = (event.text() or "").partition(":")
        if word == "never":
            raise ValueError(word)
        if word == "heals" and tries <= int(count.split()[0]):
            message = f"try {tries}"
            raise Recoverable(message)
        return Insert("history", entry(event))

    return handle


def flaky_upsert(folder: str) -> Callable[[Event], Any]:
    """The same; what has a key is a row of a user as well, which anything may replace."""
    act = flaky(folder)

    def handle(event: Event) -> Any:
        history = act(event)
        return history if event.key is None else [history, *_effects(event)[:1]]

    return handle


def flaky_call(folder: str) -> Callable[[Event], None]:
    """The same for a handler that acts by itself."""
    act = flaky(folder)

    def handle(event: Event) -> None:
        act(event)

    return handle


def together(folder: str) -> Callable[[Event], Any]:
    """Fails at first; then it needs another event that is being handled at the same time."""
    tried = flaky(folder)

    def handle(event: Event) -> Any:
        effect = tried(event)
        (Path(folder) / f"within-{event.offset}").touch()
        until = time.monotonic() + 15
        while len(list(Path(folder).glob("within-*"))) < 2:
            if time.monotonic() > until:
                raise ValueError("alone")
            time.sleep(0.01)
        return effect

    return handle


async def _flaky_later(act: Callable[[Event], Any], event: Event) -> Any:
    await asyncio.sleep(0)
    return act(event)


def flaky_async(folder: str) -> Callable[[Event], Any]:
    """The same as a coroutine."""
    act = flaky(folder)

    async def handle(event: Event) -> Any:
        return await _flaky_later(act, event)

    return handle


def flaky_tx(folder: str) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """The same with the transaction in its hands."""
    act, write = flaky(folder), insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        write(event, tx)
        act(event)

    return handle


def failing_all(_argument: Any) -> Callable[[Event], Any]:
    """Fails always."""

    def handle(event: Event) -> Any:
        message = "always"
        raise ValueError(message)

    return handle


def without_rights(_argument: Any) -> Callable[[Event], Any]:
    """Finds that somebody forgot a grant."""

    def handle(event: Event) -> Any:
        message = "permission denied"
        raise psycopg.errors.InsufficientPrivilege(message)

    return handle


def failing_old(_argument: Any) -> Callable[[Event], Any]:
    """Fails at what waited."""

    def handle(event: Event) -> Any:
        if event.delivery.replayed:
            message = "old"
            raise ValueError(message)
        return _effects(event)

    return handle


def refused(_argument: Any) -> Callable[[Event], Any]:
    """Events that say "bad" have a row that the database refuses."""

    def handle(event: Event) -> Any:
        effects = _effects(event)
        if event.value == b"bad":
            # Text cannot hold it, and no two rows of a number may be the same.
            effects.append(Insert("history", {**entry(event), "partition": "not a number"}))
        return effects

    return handle


def fitting(_argument: Any) -> Callable[[Event], Any]:
    """Takes JSON with a name, and nothing else."""

    def handle(event: Event) -> Any:
        name = event.json()["name"]
        return Insert("fitting", {"partition": event.partition, "at": event.offset, "name": name})

    return handle


def failing_tx(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """Fails at events that say "bad", after it has written something."""
    write = insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        write(event, tx)
        if event.value == b"bad":
            message = "bad"
            raise ValueError(message)

    return handle


def slow_failing(argument: list[Any]) -> Callable[[Event], Any]:
    """Takes its time, and fails at events that say "bad": here, or in the database."""
    seconds, where = argument
    act = (failing if where == "handler" else refused)(None)

    def handle(event: Event) -> Any:
        time.sleep(seconds)
        return act(event)

    return handle


def slow_failing_tx(seconds: float) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """The same with the transaction in its hands, and words of its own for whatever goes wrong."""
    act = failing_tx(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        time.sleep(seconds)
        try:
            act(event, tx)
        except psycopg.Error as error:
            message = "could not write"
            raise ValueError(message) from error

    return handle


def failing_call(path: str) -> Callable[[Event], None]:
    """Calls the outside world, except for events that say "bad"."""
    act = call(path)

    def handle(event: Event) -> None:
        if event.value == b"bad":
            message = "bad"
            raise ValueError(message)
        act(event)

    return handle


def json_id(event: Event) -> Any:
    """The aggregate's id, which only the value knows."""
    return event.json()["id"]


def mended_id(event: Event) -> Any:
    """The same by code that can read what was damaged: it is of the aggregate d."""
    return "d" if event.value == b"no json" else event.json()["id"]


def publishing(argument: list[str]) -> Callable[..., Any]:
    """Rows, and two records for a topic: what the event says, and that it was said.

    Some words ask for what cannot be sent.
    """
    topic, kind = argument

    def outputs(event: Event) -> list[Any]:
        word = (event.text() or "").partition(" ")[0]
        if word == "bad":
            message = "bad"
            raise ValueError(message)
        if word == "heals" and not event.delivery.replayed:
            message = "not yet"
            raise Recoverable(message)
        odd = {
            "missing": Publish("no-such-topic-anywhere", "x"),
            "large": Publish(topic, b"x" * 2_000_000),
            "partition": Publish(topic, "x", partition=99),
            "nonsense": Publish(topic, {"not": "bytes"}),  # type: ignore[arg-type]
            "null": Publish(topic, None, key="k", headers={"own": "yes"}, timestamp=1_000),
        }.get(word)
        first = Publish(topic, event.value, key=event.key)
        return [first, Publish(topic, f"{word} again") if odd is None else odd]

    def handle(event: Event) -> Any:
        first, second = outputs(event)
        return [first, *_effects(event), second]

    async def handle_later(event: Event) -> Any:
        await asyncio.sleep(0)
        return handle(event)

    def handle_tx(event: Event, tx: psycopg.Connection[Any]) -> Any:
        insert(None)(event, tx)
        return outputs(event)

    return {"tx": handle_tx, "async": handle_later}.get(kind, handle)


def first_word(event: Event) -> str | None:
    """A message's id stands before the first blank of its value; without a blank it has none."""
    word, blank, _ = (event.text() or "").partition(" ")
    return word if blank else None


def raising_id(event: Event) -> Any:
    """The same, by a function that does not know every event."""
    word = first_word(event)
    if word == "raise":
        raise KeyError(word)
    return {"nothing": None, "nonsense": object(), "number": 7}.get(word or "", word)


def picky(what: str) -> Callable[..., Any]:
    """Fails at values that end with "bad": here, in the database, or with the transaction."""

    def is_bad(event: Event) -> bool:
        return (event.value or b"").endswith(b" bad")

    def handle(event: Event) -> Any:
        if what == "handler" and is_bad(event):
            message = "bad"
            raise ValueError(message)
        effects = _effects(event)
        if what == "database" and is_bad(event):
            effects.append(Insert("history", {**entry(event), "partition": "not a number"}))
        return effects

    def handle_tx(event: Event, tx: psycopg.Connection[Any]) -> None:
        insert(None)(event, tx)
        if is_bad(event):
            message = "bad"
            raise ValueError(message)

    return handle_tx if what == "transaction" else handle


def insert(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """Writes the history by SQL of its own, in the open transaction."""

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        row = entry(event)
        names = ", ".join(row)
        tx.execute(
            f"insert into history ({names}) values ({', '.join(f'%({n})s' for n in row)})", row
        )

    return handle


def words_tx(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """A row of users for each word, in their order, and the history, in the open transaction."""
    write = insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        for word in (event.text() or "").split():
            tx.execute("update users set value = %s where id = %s", (event.id, word))
        write(event, tx)

    return handle


def words(_argument: Any) -> Callable[[Event], Any]:
    """The same as effects."""

    def handle(event: Event) -> Any:
        rows = [{"id": word, "value": event.id} for word in (event.text() or "").split()]
        return [*(Upsert("users", row, key="id") for row in rows), Insert("history", entry(event))]

    return handle


def limited(seconds: float) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """Takes its time in a transaction that may not last long."""
    write = insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        if tx.execute("show transaction_timeout").fetchone() != ("400ms",):
            # The one that runs already would run on.
            tx.execute("set local transaction_timeout = 0")
            tx.execute("set local transaction_timeout = '400ms'")
        time.sleep(seconds)
        write(event, tx)

    return handle


def gated_call(argument: list[str]) -> Callable[[Event], None]:
    """Calls the outside world; events that say "wait" are not over before a file is there."""
    path, gate = argument
    act = call(path)

    def handle(event: Event) -> None:
        act(event)
        while event.value == b"wait" and not Path(gate).exists():
            time.sleep(0.01)

    return handle


def held_call(argument: list[str]) -> Callable[[Event], None]:
    """Says that it has begun, and calls the outside world once a file is there."""
    path, begun, gate = argument
    act = call(path)

    def handle(event: Event) -> None:
        Path(begun).touch()
        while not Path(gate).exists():
            time.sleep(0.01)
        act(event)

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


def picky_log(_argument: Any) -> Callable[[Event], Any]:
    """The history's row and nothing else, except for events whose value ends with "bad"."""

    def handle(event: Event) -> Any:
        if (event.value or b"").endswith(b" bad"):
            message = "bad"
            raise ValueError(message)
        return Insert("history", entry(event))

    return handle


def picky_call(path: str) -> Callable[[Event], None]:
    """Calls the outside world, except for events whose value ends with "bad"."""
    act = call(path)

    def handle(event: Event) -> None:
        if (event.value or b"").endswith(b" bad"):
            message = "bad"
            raise ValueError(message)
        act(event)

    return handle


def slow_call(argument: list[Any]) -> Callable[[Event], None]:
    """A call that takes its time."""
    path, seconds = argument
    act = call(path)

    def handle(event: Event) -> None:
        time.sleep(seconds)
        act(event)

    return handle


def publish(argument: dict[str, Any]) -> Callable[[Event], Any]:
    """A record for every event, with its place as the value.

    Events with one of the values ``bad`` fail until the file ``mended`` is there, and if it is
    ``picky`` all that end with "bad"; ``drop`` ones publish nothing; those that begin with ``big``
    publish more than a topic takes; ``keyless`` ones publish without a key, ``old`` ones at a time
    of long ago. Each takes ``seconds``.
    """
    bad, drop = set(argument.get("bad", ())), set(argument.get("drop", ()))
    mended, picky = argument.get("mended"), argument.get("picky", False)
    keyless, old = set(argument.get("keyless", ())), set(argument.get("old", ()))

    def handle(event: Event) -> Any:
        time.sleep(argument.get("seconds", 0.0))
        value = event.text() or ""
        if (value in bad or (picky and value.endswith(" bad"))) and not (
            mended and Path(mended).exists()
        ):
            message = f"bad: {value}"
            raise ValueError(message)
        if value in drop:
            return None
        place = f"{event.topic} {event.partition} {event.offset}"
        if value.startswith("big"):
            place = f"{place} {'x' * 2_000_000}"
        key = None if value in keyless else event.key
        return Publish(argument["to"], place, key, timestamp=1_000 if value in old else None)

    return handle


def publish_async(argument: dict[str, Any]) -> Callable[[Event], Any]:
    """The same as a coroutine."""
    seconds = argument.pop("seconds", 0.0)
    act = publish(argument)

    async def handle(event: Event) -> Any:
        await asyncio.sleep(seconds)
        return act(event)

    return handle


def flaky_publish(argument: dict[str, Any]) -> Callable[[Event], Any]:
    """Like ``flaky``, with a record for what heals."""
    act, publishes = flaky(argument["folder"]), publish(argument)

    def handle(event: Event) -> Any:
        act(event)
        return publishes(event)

    return handle


HANDLERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "record": record,
    "slow": slow,
    "exact": exact,
    "versioned": versioned,
    "unversioned": unversioned,
    "waiting": waiting,
    "failing": failing,
    "failing_all": failing_all,
    "flaky": flaky,
    "flaky_async": flaky_async,
    "flaky_upsert": flaky_upsert,
    "flaky_call": flaky_call,
    "together": together,
    "flaky_tx": flaky_tx,
    "failing_old": failing_old,
    "without_rights": without_rights,
    "fitting": fitting,
    "failing_tx": failing_tx,
    "slow_failing": slow_failing,
    "slow_failing_tx": slow_failing_tx,
    "failing_call": failing_call,
    "refused": refused,
    "picky": picky,
    "publishing": publishing,
    "picky_call": picky_call,
    "picky_log": picky_log,
    "insert": insert,
    "words": words,
    "words_tx": words_tx,
    "limited": limited,
    "gated_call": gated_call,
    "held_call": held_call,
    "call": call,
    "slow_call": slow_call,
    "publish": publish,
    "publish_async": publish_async,
    "flaky_publish": flaky_publish,
}
KEYS: dict[str, Callable[[Event], Any]] = {"json_id": json_id, "mended_id": mended_id}
IDS: dict[str, Any] = {"header": MessageId(), "word": first_word, "raising": raising_id}
