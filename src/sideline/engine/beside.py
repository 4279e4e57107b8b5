"""Something of this process's own, done while PostgreSQL works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
    thread.start()
    try:
        own(thread.is_alive)
    finally:
        thread.join()
    if errors:
        # Not kept by the frame that it names: all that the slice was made of would stay with it.
        raise errors.pop()
    return results[0]
