"""Something of this process's own, done while PostgreSQL works."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# What asks needs Python for moments only, between two statements: with the usual 5 ms, PostgreSQL
# would stand still for as long after each of them, while the other thread handles events.
SWITCH_SECONDS = 0.0003


def beside(asks: Callable[[], T], own: Callable[[Callable[[], bool]], object]) -> T:
    """What ``asks`` comes to, which mostly waits for PostgreSQL; ``own`` is done meanwhile.

    The user's code belongs to this thread, so what asks has the other one; whoever owns this one
    leaves the connection alone meanwhile. ``own`` is told whether there is still something to
    wait for. Both are over afterwards, also when one of them failed.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            results.append(asks())
        # Raised again where it was asked for.
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    # A daemon: a database that does not answer keeps no process alive.
    thread = threading.Thread(target=ask, name="sideline-beside", daemon=True)
    with _switching(SWITCH_SECONDS):
        thread.start()
        try:
            own(thread.is_alive)
        finally:
            thread.join()
    if errors:
        # Not kept by the frame that it names: all that the slice was made of would stay with it.
        raise errors.pop()
    return results[0]


@contextmanager
def _switching(seconds: float) -> Iterator[None]:
    """Let threads of this process take turns that often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(seconds, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
