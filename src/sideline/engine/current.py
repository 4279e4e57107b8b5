"""Which event a handler has in its hands: for its log lines, and for whoever watches it.

Nothing is written down per event: the run that handles them knows how far it is.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from sideline.events import Event


class Hands(Protocol):
    """Whoever handles events."""

    @property
    def event(self) -> Event | None:
        """The event that is being handled now."""
        ...


class Asking:
    """Hands of somebody who asks the user's functions about one event after the other."""

    __slots__ = ("event",)

    def __init__(self, event: Event | None = None) -> None:
        self.event = event

    def over(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, each in hand until the next one is."""
        for event in events:
            self.event = event
            yield event


# Changed by whoever handles, copied by whoever watches.
_at_work: dict[int, Hands] = {}
_hands: ContextVar[Hands | None] = ContextVar("sideline_hands", default=None)


@contextlib.contextmanager
def of(hands: Hands) -> Iterator[None]:
    """Whatever this thread or task logs belongs to the event in these hands."""
    token = _hands.set(hands)
    _at_work[id(hands)] = hands
    try:
        yield
    finally:
        del _at_work[id(hands)]
        _hands.reset(token)


def at_work() -> list[Hands]:
    """The hands that this process has full now."""
    return list(_at_work.values())


def begin(hands: Hands) -> None:
    """The same for a thread or task of its own, until it begins the next."""
    _hands.set(hands)


def event() -> Event | None:
    """The event that this thread or task handles now."""
    hands = _hands.get()
    return None if hands is None else hands.event


def mark_log_records() -> None:
    """Give every log record ``event_id``: of the event that was being handled, or empty."""
    make = logging.getLogRecordFactory()
    if getattr(make, "marks_events", False):
        return

    def marked(*args: Any, **kwargs: Any) -> logging.LogRecord:  # noqa: ANN401 - logging's own
        record = make(*args, **kwargs)
        found = event()
        record.event_id = "" if found is None else found.id
        return record

    marked.marks_events = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(marked)


def is_from_outside(error: BaseException) -> bool:
    """Whether somebody pressed Ctrl-C, and not the handler raised it by itself.

    Spark's workers do not listen to it: what is raised there is the handler's own.
    """
    # type(), not isinstance(): __class__ may lie, or raise.
    if not issubclass(type(error), KeyboardInterrupt):
        return False
    return signal.getsignal(signal.SIGINT) not in {signal.SIG_IGN, None}
