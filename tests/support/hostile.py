"""Handlers that do whatever a handler should not, at events that say what."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import psycopg

from sideline import Event, Execute, Insert, Recoverable, Upsert
from sideline.effects import Publish
from tests.support import handlers

HUGE = 100_000_000


class UnspeakableError(Exception):
    """Cannot be shown."""

    def __str__(self) -> NoReturn:  # noqa: PLE0307
        sys.exit("no words")

    __repr__ = __str__


class FacelessError(Exception):
    """Does not tell its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> NoReturn:
        raise BaseException("no face")  # noqa: TRY002


class UnspeakableTrouble(Recoverable):
    """Heals by itself, but cannot be shown."""

    def __str__(self) -> NoReturn:
        raise ValueError("no words")


class Hostile:
    """A value that nobody may look at."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise ValueError(f"hands off {name}")

    def __str__(self) -> NoReturn:
        raise ValueError("hands off")

    __repr__ = __str__
    __iter__ = __str__
    __hash__ = __str__  # type: ignore[assignment]
    __eq__ = __str__  # type: ignore[assignment]
    __len__ = __str__  # type: ignore[assignment]
    __bool__ = __str__  # type: ignore[assignment]


class HostileRow(dict[str, Any]):
    """A row that nobody may look at."""

    def __iter__(self) -> NoReturn:
        raise ValueError("hands off")

    __getitem__ = __iter__  # type: ignore[assignment]
    keys = __iter__  # type: ignore[assignment]
    items = __iter__  # type: ignore[assignment]
    values = __iter__  # type: ignore[assignment]
    __contains__ = __iter__  # type: ignore[assignment]


def deeper(depth: int) -> int:
    """Never ends by itself."""
    return deeper(depth + 1) + 1


def in_a_circle() -> NoReturn:
    """An exception that is its own cause."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


def fails_in_the_middle(event: Event) -> Iterator[Any]:
    """Gives a part of its effects only."""
    yield handlers._effects(event)[0]
    raise ValueError("in the middle")


def _raises(make: Callable[[], BaseException]) -> Callable[[Event], Any]:
    def act(_event: Event) -> NoReturn:
        raise make()

    return act


def _adds(effect: Callable[[Event], Any]) -> Callable[[Event], Any]:
    """Healthy effects, and one that is not."""
    return lambda event: [*handlers._effects(event), effect(event)]


def _history(**columns: Any) -> Callable[[Event], Any]:
    return _adds(lambda event: Insert("history", {**handlers.entry(event), **columns}))


WAYS: dict[str, Callable[[Event], Any]] = {
    "BaseException": _raises(lambda: BaseException("base")),
    "sys.exit": lambda _: sys.exit(3),
    "sys.exit with a text": lambda _: sys.exit("bye"),
    "KeyboardInterrupt": _raises(KeyboardInterrupt),
    "GeneratorExit": _raises(GeneratorExit),
    "StopIteration": _raises(StopIteration),
    "StopAsyncIteration": _raises(StopAsyncIteration),
    "CancelledError": _raises(asyncio.CancelledError),
    "deep recursion": lambda _: deeper(0),
    "no memory": lambda _: bytearray(1 << 60),
    "a message of 100 MB": _raises(lambda: ValueError("x" * HUGE)),
    "NUL in the message": _raises(lambda: ValueError("a\0b\ud800")),
    "an exception without words": _raises(UnspeakableError),
    "an exception without a face": _raises(FacelessError),
    "a circle of causes": lambda _: in_a_circle(),
    "a group": _raises(lambda: BaseExceptionGroup("g", [SystemExit(), ValueError("v")])),
    "Rollback": _raises(psycopg.Rollback),
    "a number": lambda _: 42,
    "a text": lambda _: "users",
    "a mapping": lambda _: {"users": 1},
    "a class": lambda _: Insert,
    "a list of 100 MB": lambda _: [b"x" * HUGE],
    "a value with claws": lambda _: Hostile(),
    "an effect of another sink": lambda _: Publish("elsewhere", b"value"),
    "one among others": _adds(lambda _: Publish("elsewhere", b"value")),
    "None among others": _adds(lambda _: None),
    "a generator that fails": fails_in_the_middle,
    "a row that is none": _adds(lambda _: Insert("history", 42)),  # type: ignore[arg-type]
    "a row with claws": _adds(lambda event: Insert("history", HostileRow(handlers.entry(event)))),
    "a column with claws": _history(value=Hostile()),
    "a table that is none": _adds(lambda _: Insert(42, {})),  # type: ignore[arg-type]
    "no such table": _adds(lambda _: Insert("nowhere", {"id": 1})),
    "no such column": _history(nowhere=1),
    "a column that is none": _adds(lambda _: Insert("history", {7: 1})),  # type: ignore[dict-item]
    "a key that the row lacks": _adds(lambda _: Upsert("users", {"value": "v"}, key="id")),
}


def hostile(_argument: Any) -> Callable[[Event], Any]:
    """An ordinary handler."""
    # As in Spark's workers: whatever looks like Ctrl-C is the handler's own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def handle(event: Event) -> Any:
        act = WAYS.get((event.value or b"").decode())
        return handlers._effects(event) if act is None else act(event)

    return handle


def hostile_key(event: Event) -> Any:
    """A key= that does the same."""
    act = WAYS.get((event.value or b"").decode())
    return event.key if act is None else act(event)


def hostile_async(argument: Any) -> Callable[[Event], Any]:
    """A coroutine."""
    act = hostile(argument)

    async def handle(event: Event) -> Any:
        await asyncio.sleep(0)
        return act(event)

    return handle


def hostile_tx(argument: Any) -> Callable[[Event, psycopg.Connection[Any]], Any]:
    """With the transaction in its hands; it has written something before it fails."""
    act = hostile(argument)
    write = handlers.insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> Any:
        write(event, tx)
        result = act(event)
        if (event.value or b"").decode() in WAYS:
            return result
        # What it would return is written already.
        return None

    return handle


def closing(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """Closes the connection that it was lent, at events that say so."""
    write = handlers.insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        write(event, tx)
        if event.value == b"close":
            tx.close()

    return handle


def ending(how: str) -> Callable[..., Any]:
    """Ends the slice's transaction by SQL of its own, at events that say by which."""
    write = handlers.insert(None)

    def statement(event: Event) -> str | None:
        word, _, sql = (event.text() or "").partition(": ")
        return sql if word == "end" else None

    def handle_tx(event: Event, tx: psycopg.Connection[Any]) -> None:
        write(event, tx)
        sql = statement(event)
        if sql is not None:
            tx.execute(sql)
            if how == "raises":
                raise ValueError("after the end")

    def handle(event: Event) -> Any:
        effects, sql = handlers._effects(event), statement(event)
        return effects if sql is None else [*effects, Execute(sql)]

    return handle if how == "effect" else handle_tx


def unspeakable_trouble(flag: str) -> Callable[[Event], Any]:
    """Waits, as long as a file is there, with words that nobody can write down."""
    troubles = {
        b"wait": UnspeakableTrouble("x"),
        b"wait: NUL": Recoverable("a\0b\ud800"),
        b"wait: 100 MB": Recoverable("x" * HUGE),
    }

    def handle(event: Event) -> Any:
        error = troubles.get(event.value or b"")
        if error is not None and handlers.Path(flag).exists():
            raise error
        return handlers._effects(event)

    return handle


handlers.HANDLERS |= {
    "hostile": hostile,
    "hostile_async": hostile_async,
    "hostile_tx": hostile_tx,
    "closing": closing,
    "ending": ending,
    "unspeakable_trouble": unspeakable_trouble,
}
handlers.KEYS |= {"record": lambda event: event.key, "hostile": hostile_key}
