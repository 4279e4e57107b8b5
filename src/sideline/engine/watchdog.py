"""Ends a worker whose handler does not come back within `handler_timeout`.

Python cannot interrupt a function that hangs, so its process has to go: the database session and
its locks go with it, and its partitions go on with care (see `sideline.engine.care`). Handlers
pay nothing for being watched: what they have in hand is looked at from another thread.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sideline.clock import Clock, SystemClock
from sideline.engine.current import Hands
from sideline.engine.deaths import TIMEOUT_CODE
from sideline.errors import HandlerTimeout
from sideline.events import Event

# Longer than this between two looks, and the process was stopped or starved: nobody's fault.
LATE_SECONDS = 1.0
# A handler that keeps Python's lock lets no other thread look; then the process ends this much
# later, by a thread that does not need the lock.
LOCKED_SECONDS = 5.0
# Coroutines are cancelled in time, unless one of them blocks their loop.
LOOP_SECONDS = 1.0
STDERR = 2

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that looks at everybody's hands while a lease runs."""

    def __init__(
        self,
        patience_seconds: float,
        at_work: Callable[[], Iterable[Hands]],
        *,
        last_words: int = STDERR,
        clock: Clock | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._patience = patience_seconds
        self._at_work = at_work
        self._last_words = last_words
        self._clock = clock or SystemClock()
        self._end = end
        self._tick = min(1.0, max(0.02, patience_seconds / 8))
        self._seen: dict[int, tuple[Hands, Event, float]] = {}
        self._looked_at = 0.0
        self._running = threading.Event()
        self._resting = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from now on."""
        self._resting.clear()
        self._running.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sideline-watchdog", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """No lease, nothing to watch."""
        self._running.clear()
        self._resting.set()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._resting.set()
        self._running.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def look(self) -> Event | None:
        """The event that has been in hand for too long, if there is one."""
        now = self._clock.monotonic()
        late = now - self._looked_at > self._tick + LATE_SECONDS
        before = {} if late else self._seen
        self._looked_at = now
        self._seen = {}
        for hands in self._at_work():
            event = hands.event
            if event is None:
                continue
            _, known, since = before.get(id(hands), (hands, None, now))
            if known is not event:
                since = now
            # Kept with their hands, whose id must not become another's.
            self._seen[id(hands)] = (hands, event, since)
            if now - since >= self._patience:
                return event
        return None

    def _run(self) -> None:
        while not self._ended:
            self._running.wait()
            if self._resting.is_set():
                continue
            faulthandler.dump_traceback_later(
                self._patience + LOCKED_SECONDS, exit=True, file=self._last_words
            )
            event = self.look()
            if event is not None:
                self._give_up(event)
            if self._resting.wait(self._tick):
                faulthandler.cancel_dump_traceback_later()
                self._seen = {}

    def _give_up(self, event: Event) -> None:
        log.error("event %s is longer in its handler than it may be: this worker ends", event.id)
        faulthandler.dump_traceback(file=self._last_words)
        self._end(TIMEOUT_CODE)


def in_time(
    handler: Callable[[Event], Awaitable[Any]], seconds: float
) -> Callable[[Event], Awaitable[Any]]:
    """The coroutine function, which fails with HandlerTimeout when an event takes too long."""

    @functools.wraps(handler)
    async def timed(event: Event) -> Any:  # noqa: ANN401 - whatever the handler returns
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await handler(event)
        except TimeoutError as error:
            if not limit.expired():
                # One of the handler's own.
                raise
            message = f"the handler took longer than its handler_timeout of {seconds:g} s."
            raise HandlerTimeout(message) from error

    return timed
