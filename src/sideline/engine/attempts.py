"""What the pipeline's handler makes of released events, in the order of their queues."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sideline.engine import current
from sideline.engine.current import Asking, is_from_outside
from sideline.engine.handling import NOBODY, handle, publishes, runs_sql
from sideline.engine.window import Entry, Pool, Window
from sideline.errors import NonRecoverable
from sideline.policies import Sideline
from sideline.replays import Going, Waiting, one_key_each
from sideline.slices import Failure, Handled

if TYPE_CHECKING:
    from sideline.clock import Clock
    from sideline.events import Event
    from sideline.ledger.store import Held
    from sideline.pipeline import Pipeline

# Events of a slice at most: live ones wait no longer than for one of these.
SLICE_EVENTS = 5_000
# Side by side, a slice is over when its last event is: how many fit into this is learned.
WINDOW_SECONDS = 0.25
WAIT_SECONDS = 0.05
_LOST = "its bytes are gone: neither the ledger nor Kafka has them any more"
# A handler that is quicker than this with an event asks nobody else: no call is made twice where
# it is called for the next slice already.
QUICK_SECONDS = 50e-6


class Prepared(NamedTuple):
    """Events of the next slice, handled while the one before it was written down."""

    held: Held
    rows: list[tuple[Any, ...]]
    """As they were read ahead."""
    waiting: list[Waiting]
    handled: Handled
    going: Going
    """What it takes to write it down, if all of them go."""


@dataclasses.dataclass(slots=True)
class Read:
    """Events of a slice as far as they can be tried."""

    waiting: list[Waiting]
    keys: list[tuple[bytes, int | None]] = dataclasses.field(default_factory=list)
    """What ``key=`` says of them, and the queues that they are in."""
    failed: dict[int, Failure] = dataclasses.field(default_factory=dict)
    """By place among all that was read: heads of queues of which ``key=`` makes nothing."""
    failure: Failure | None = None
    """The event behind them that has to wait."""
    handled: Handled | None = None
    """What their handler said already."""
    going: Going | None = None
    """What it takes to write that down, if all of them go."""
    rows: list[tuple[Any, ...]] | None = None
    """What its events were made of; kept to be freed when nobody waits."""


class Attempts:
    """Has released events tried, one after the other or queues side by side."""

    def __init__(self, pipeline: Pipeline, clock: Clock, pool: Pool | None) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._pool = pool
        # Whatever the policy: what a person released and what fails again goes back aside.
        self.again = copy.copy(pipeline)
        """The pipeline under the policy of a replay."""
        self.again.on_failure = Sideline()
        self.quick = False
        """Whether the handler was, with the last slice."""
        self._orders: dict[int, str | None] = {}
        self._window_events = pipeline.concurrency

    def readable(self, waiting: Sequence[Waiting], prepared: Prepared | None) -> Read:
        """What can be tried now; where ``key=`` fails or bytes are gone, the event does (F14).

        Those at the heads of their queues fail at once, without the handler; what comes behind
        such an event waits for its turn.
        """
        if self._pipeline.key is None and not any(one.lost for one in waiting):
            return _prepared_or_new(waiting, prepared)
        read = Read([])
        stopped: set[int | bytes] = set()
        tried: set[int | bytes] = set()
        for place, one in enumerate(waiting):
            order = one.order
            if order in stopped:
                continue
            key, error = self._key_of(one)
            if error is not None:
                failure = Failure(one.event, "read" if one.lost else "key", error)
                if self.again.fate(error) != "parked":
                    read.failure = failure
                    break
                if order is None or order not in tried:
                    read.failed[place] = failure
                if order is not None:
                    stopped.add(order)
                continue
            if order is not None:
                tried.add(order)
            if key is not None:
                read.keys.append((key, one.queue))
            read.waiting.append(one)
        return read

    def _key_of(self, one: Waiting) -> tuple[bytes | None, BaseException | None]:
        """What ``key=`` says of an event, or why nobody can tell."""
        if one.lost:
            return None, NonRecoverable(_LOST)
        if self._pipeline.key is None:
            return None, None
        try:
            with current.of(Asking(one.event)):
                return self._pipeline.key_of(one.event), None
        # The user's own function, like a handler.
        except BaseException as error:
            if is_from_outside(error):
                raise
            return None, error

    def handle(self, held: Held, waiting: Sequence[Waiting]) -> tuple[Handled, Failure | None]:
        """Try a slice, or what of it fits side by side; and the event that has to wait, if any."""
        if self._pool is not None:
            return self._side_by_side(self._pool, held, waiting[: self._window_events])
        self.plan(waiting)
        at = held.next_offset
        events = [one.event for one in waiting]
        started = self._clock.monotonic()
        result = handle(self.again, events, start=at, end=at, clock=self._clock)
        self.quick = self._clock.monotonic() - started < QUICK_SECONDS * len(events)
        return result

    def plan(self, waiting: Sequence[Waiting]) -> None:
        """By which key events wait for each other; the records' own are quicker where they do."""
        if one_key_each(waiting):
            self.again.key = None
        else:
            self._orders = {id(one.event): _name(one.order) for one in waiting}
            self.again.key = self._order

    def _order(self, event: Event) -> str | None:
        return self._orders[id(event)]

    def _side_by_side(
        self, pool: Pool, held: Held, waiting: Sequence[Waiting]
    ) -> tuple[Handled, Failure | None]:
        """Queues side by side, the events of each in order."""
        started = self._clock.monotonic()
        orders = {id(one.event): _name(one.order) for one in waiting}
        partition = held.partition

        def order(event: Event) -> bytes | None:
            name = orders[id(event)]
            return None if name is None else name.encode()

        window = Window(pool, order, derives=True)
        events = [one.event for one in waiting]
        window.add(partition, events, NOBODY, fate=lambda _, error: self.again.fate(error))
        try:
            # Nothing is given up half way: an outside call would be made again.
            while window.finished(partition) < len(events) and not window.blocked_at(partition):
                window.wait(WAIT_SECONDS)
            taken, failure = window.take(partition, len(events))
        finally:
            window.close()
        quick = self._clock.monotonic() - started < WINDOW_SECONDS
        grown = self._window_events * 2 if quick else self._window_events // 2
        self._window_events = max(self._pipeline.concurrency, min(grown, SLICE_EVENTS))
        return _handled(taken, held.next_offset), failure


def _prepared_or_new(waiting: Sequence[Waiting], prepared: Prepared | None) -> Read:
    # Without those that turned out to be behind others, it is another slice.
    if prepared is not None and waiting is prepared.waiting:
        return Read(prepared.waiting, handled=prepared.handled, going=prepared.going)
    return Read(list(waiting))


def _name(order: int | bytes | None) -> str | None:
    """As a key: no record's key is taken for a queue."""
    if order is None:
        return None
    return f"q{order}" if isinstance(order, int) else f"k{order.hex()}"


def _handled(taken: Sequence[Entry], at: int) -> Handled:
    effects = [entry.effects for entry in taken]
    return Handled(
        at,
        at,
        [entry.event for entry in taken],
        effects,
        any(map(runs_sql, effects)),
        [entry.key for entry in taken],
        parked={place: entry.failure for place, entry in enumerate(taken) if entry.parked},
        publishes=any(map(publishes, effects)),
    )
