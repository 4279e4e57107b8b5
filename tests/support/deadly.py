"""Handlers that end or hang their process, at events that say how."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from sideline import Event
from tests.support import handlers


def die(event: Event) -> None:  # noqa: C901 - a list of ways
    """As the event wants it."""
    match event.value:
        case b"segfault":
            ctypes.string_at(0)
        case b"abort":
            os.abort()
        case b"exit":
            os._exit(3)
        case b"exit 0":
            os._exit(0)
        case b"group":
            os.killpg(0, signal.SIGABRT)
        case b"memory":
            hoard = []
            while True:
                hoard.append(b"x" * (1 << 20))
        case b"too much":
            bytearray(1 << 46)
        case b"hang" | b"block":
            time.sleep(3600)
        case b"lock":
            # Keeps Python's lock: no other thread of the process gets on.
            re.match(r"(a+)+$", "a" * 64 + "b")


def deadly(seconds: float | None) -> Callable[[Event], Any]:
    """An ordinary handler, perhaps a slow one."""

    def handle(event: Event) -> Any:
        if seconds:
            time.sleep(seconds)
        die(event)
        return handlers._effects(event)

    return handle


def deadly_async(_argument: Any) -> Callable[[Event], Any]:
    """A coroutine; "hang" waits as coroutines should, "block" does not."""

    async def handle(event: Event) -> Any:
        if event.value == b"hang":
            await asyncio.sleep(3600)
        die(event)
        return handlers._effects(event)

    return handle


def deadly_generator(_argument: Any) -> Callable[[Event], Any]:
    """A generator: it runs only when its effects are asked for."""

    def handle(event: Event) -> Iterator[Any]:
        die(event)
        yield from handlers._effects(event)

    return handle


def deadly_insert(_argument: Any) -> Callable[[Event, psycopg.Connection[Any]], None]:
    """SQL of its own; "hang" hangs in the server, with the progress row locked."""
    act = handlers.insert(None)

    def handle(event: Event, tx: psycopg.Connection[Any]) -> None:
        if event.value == b"hang":
            tx.execute("select pg_sleep(3600)")
        die(event)
        act(event, tx)

    return handle


def deadly_call(path: str) -> Callable[[Event], None]:
    """Ends after it has called the outside world."""
    act = handlers.call(path)

    def handle(event: Event) -> None:
        act(event)
        die(event)

    return handle


def until_mended(flag: str) -> Callable[[Event], Any]:
    """Ends at events that say so, for as long as a file is there."""

    def handle(event: Event) -> Any:
        if os.path.exists(flag):  # noqa: PTH110 - it may be asked for every event
            die(event)
        return handlers._effects(event)

    return handle


def held(flag: str) -> Callable[[Event], Any]:
    """Says that it has an event in hand, and keeps it for as long as a file is there."""

    def handle(event: Event) -> Any:
        with open(f"{flag}-{os.getpid()}", "w"):  # noqa: PTH123
            pass
        while os.path.exists(flag):  # noqa: PTH110
            time.sleep(0.01)
        return handlers._effects(event)

    return handle


def family(path: str) -> Callable[[Event], Any]:
    """Says who it is and whose child, and hangs."""

    def handle(_event: Event) -> None:
        with open(f"{path}.new", "w") as file:  # noqa: PTH123
            file.write(f"{os.getpid()} {os.getppid()}")
        os.rename(f"{path}.new", path)  # noqa: PTH104
        time.sleep(3600)

    return handle


def deadly_key(event: Event) -> Any:
    """A key= that ends its process."""
    die(event)
    return event.key


handlers.HANDLERS.update(
    deadly=deadly,
    deadly_async=deadly_async,
    deadly_generator=deadly_generator,
    deadly_insert=deadly_insert,
    deadly_call=deadly_call,
    until_mended=until_mended,
    family=family,
    held=held,
)


def deadly_id(event: Event) -> str:
    """A dedupe= that ends its process."""
    die(event)
    return event.id


handlers.KEYS["deadly"] = deadly_key
handlers.IDS["deadly"] = deadly_id
