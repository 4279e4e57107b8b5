"""Events of different keys side by side, events of one key in order (K11).

The finished prefix of a partition is committed while later handlers still run; what is
finished beyond it stays here, and is dropped when the lease ends.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sideline.engine import current
from sideline.engine.current import Asking, is_from_outside
from sideline.engine.handling import reason_of, stage_of
from sideline.engine.punctual import new_event_loop
from sideline.errors import PassedOver
from sideline.slices import NOTHING, UNKNOWN_KEY, Aside, Failure, effects_of

if TYPE_CHECKING:
    from sideline.effects import Effect
    from sideline.engine.lease import Partition
    from sideline.events import Event


class Entry:
    """An event on its way through the pool."""

    __slots__ = (
        "duplicate", "effects", "error", "event", "follower", "key", "leaves", "number", "parked",
        "skipped", "stage", "state", "ticket",
    )  # fmt: skip

    def __init__(self, event: Event, ticket: Ticket, number: int) -> None:
        self.event = event
        self.ticket = ticket
        self.number = number
        """Who came earlier has a smaller one."""
        self.key: Any = None
        self.state = WAITING
        self.stage = "handler"
        self.effects: tuple[Effect, ...] = ()
        self.error: BaseException | None = None
        self.skipped = False
        self.leaves: str | None = None
        """A copy of it leaves: it is retrying, or dead."""
        self.parked = False
        """Set aside: it failed, or without an error of its own, it follows one that did."""
        self.duplicate = False
        """Its message was applied before: nobody handles it."""
        self.follower: Entry | None = None

    @property
    def failure(self) -> Failure | None:
        """Why it failed; None: it did not."""
        if self.error is None:
            return None
        return Failure(self.event, stage_of(self.error, self.stage), self.error)

    def pass_over(self, why: PassedOver) -> None:
        """Be left out, without a look at its bytes."""
        self.error, self.stage, self.key = why, "admit", UNKNOWN_KEY
        self.skipped = True
        self.effects = NOTHING
        self.state = DONE

    def wait_behind(self) -> None:
        """Be set aside behind another one of its key, untouched."""
        self.parked = True
        self.effects = NOTHING
        self.state = DONE


class Ticket:
    """Valid as long as the window wants the results of a partition."""

    __slots__ = ("fate", "halted", "running", "valid")

    def __init__(self) -> None:
        self.valid = True
        self.running = 0
        self.halted: set[Any] = set()
        """Keys of which one of its events failed and has to wait."""
        self.fate: Callable[[Event, BaseException], str] | None = None
        """What becomes of its events that fail, where the error alone does not say it."""


# Stuck: behind one of its key and partition that failed and has to wait.
WAITING, RUNNING, DONE, FAILED, DROPPED, STUCK = range(6)
# So many events are admitted before the pool hears of them. All that a read brought would take as
# long as several handlers, and at the beginning of a lease nobody would work meanwhile.
PORTION = 128
# Whoever has waited long enough needs the interpreter now. The thread that reads and commits would
# keep it for Python's 5 ms, as long as many a handler takes.
SWITCH_SECONDS = 0.0005
# What a thread of a pool is called for: an entry that waits, or the end.
WORK, END = "work", "end"


class Pool:
    """Runs entries, the oldest that may run first, each followed by the next one of its key.

    At the end of the queue the next one of a hot key would wait for everything that was read,
    and the finished prefix with it.

    Threads for ordinary handlers, one event loop for coroutines; kept as long as the process.
    """

    def __init__(
        self,
        handler: Callable[[Event], Any],
        size: int,
        allowed: tuple[type, ...],
        fate: Callable[[BaseException], str],
    ) -> None:
        self._handler = handler
        self._allowed = allowed
        self._fate = fate
        self._lock = threading.Lock()
        self._todo: list[tuple[int, Entry]] = []
        """A heap, by number."""
        self.numbers = count()
        self.finished = threading.Event()
        """Something finished since it was last cleared."""
        self.running: set[Entry] = set()
        """What is in hand now; a watchdog copies it."""
        sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        self._begin(size)

    def chain(self, entry: Entry, tail: Entry | None) -> bool:
        """Whether the entry may start; if not, it follows the one before it of its key.

        Behind one of its own partition that failed it never starts.
        """
        with self._lock:
            if tail is not None and tail.state in {WAITING, RUNNING}:
                tail.follower = entry
                return False
            if tail is not None and tail.parked and tail.ticket.valid:
                entry.wait_behind()
                return False
            if entry.key in entry.ticket.halted:
                entry.state = STUCK
            return entry.state == WAITING

    def start(self, entries: list[Entry]) -> None:
        """Run entries as soon as there is a place for them."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads."""
        raise NotImplementedError

    def _begin(self, size: int) -> None:
        raise NotImplementedError

    def _take(self) -> Entry | None:
        """The oldest that may run; None: nobody wants it any more, nor perhaps what follows."""
        with self._lock:
            _, entry = heappop(self._todo)
            if not entry.ticket.valid:
                entry.state = DROPPED
                self._follow(entry)
                return None
            entry.state = RUNNING
            entry.ticket.running += 1
            self.running.add(entry)
            return entry

    def fail(self, entry: Entry, error: BaseException) -> None:
        """Let an entry fail that was not tried."""
        with self._lock:
            self._settle(entry, error)
        self.finished.set()

    def _finish(self, entry: Entry, error: BaseException | None) -> None:
        """Note the result, and let the key's next entry wait for its turn if there is one."""
        with self._lock:
            self._settle(entry, error)
            entry.ticket.running -= 1
            self.running.discard(entry)
            self._follow(entry)
        if not self.finished.is_set():
            self.finished.set()

    def _settle(self, entry: Entry, error: BaseException | None) -> None:
        state = DONE
        if error is not None:
            judge = entry.ticket.fate
            fate = self._fate(error) if judge is None else judge(entry.event, error)
            entry.error = error
            entry.effects = NOTHING
            entry.skipped = fate == "skipped"
            entry.parked = fate == "parked"
            entry.leaves = fate if fate in {"retrying", "dead"} else None
            state = DONE if entry.skipped or entry.parked or entry.leaves else FAILED
            if state == FAILED:
                entry.ticket.halted.add(entry.key)
        entry.state = state

    def _follow(self, entry: Entry) -> None:
        """What came behind it may run now, or waits behind it for good. With the lock held.

        One that failed keeps back only its own partition: across partitions a key's order is
        that of the commits.
        """
        follower, entry.follower = entry.follower, None
        parked = entry.parked and entry.ticket.valid
        while follower is not None and follower.ticket.valid:
            if parked:
                follower.wait_behind()
            elif follower.key in follower.ticket.halted:
                follower.state = STUCK
            else:
                break
            behind, follower.follower = follower.follower, None
            follower = behind
        if follower is not None:
            heappush(self._todo, (follower.number, follower))
            self._called()

    def _called(self) -> None:
        """One more entry may run, and whoever said so is free for the oldest."""
        raise NotImplementedError


class ThreadPool(Pool):
    """For handlers that block."""

    def _begin(self, size: int) -> None:
        self._calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"sideline-handler-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._calls.put(END)

    def start(self, entries: list[Entry]) -> None:
        """Run entries as soon as there is a place for them."""
        with self._lock:
            for entry in entries:
                heappush(self._todo, (entry.number, entry))
        for _ in entries:
            self._calls.put(WORK)

    def _called(self) -> None:
        self._calls.put(WORK)

    def _work(self) -> None:
        while self._calls.get() == WORK:
            entry = self._take()
            if entry is None:
                continue
            error: BaseException | None = None
            current.begin(entry)
            try:
                entry.effects = effects_of(self._handler(entry.event), self._allowed)
            # Whatever a handler raises, SystemExit included, is a failure of its event alone.
            except BaseException as raised:  # noqa: BLE001
                error = raised
            self._finish(entry, error)


class LoopPool(Pool):
    """For coroutines: one event loop in one thread."""

    def _begin(self, size: int) -> None:
        self._idle: list[asyncio.Future[None]] = []
        self._loop = new_event_loop()
        self._thread = threading.Thread(
            target=self._serve, args=(size,), name="sideline-handlers", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def start(self, entries: list[Entry]) -> None:
        """Run entries as soon as there is a place for them."""
        # Once for all of them: each call wakes the loop through a pipe.
        self._loop.call_soon_threadsafe(self._queue, entries)

    def _serve(self, size: int) -> None:
        asyncio.set_event_loop(self._loop)
        workers = [self._loop.create_task(self._work()) for _ in range(size)]
        self._loop.run_forever()
        for worker in workers:
            worker.cancel()
        self._loop.run_until_complete(asyncio.gather(*workers, return_exceptions=True))
        self._loop.close()

    def _called(self) -> None:
        """Nobody: what just finished, inside the loop, looks again before it rests."""

    def _queue(self, entries: list[Entry]) -> None:
        with self._lock:
            for entry in entries:
                heappush(self._todo, (entry.number, entry))
        for _ in range(min(len(entries), len(self._idle))):
            self._idle.pop().set_result(None)

    async def _work(self) -> None:
        while True:
            while not self._todo:
                idle = self._loop.create_future()
                self._idle.append(idle)
                await idle
            entry = self._take()
            if entry is not None:
                await self._run(entry)

    async def _run(self, entry: Entry) -> None:
        error: BaseException | None = None
        current.begin(entry)
        try:
            entry.effects = effects_of(await self._handler(entry.event), self._allowed)
        except asyncio.CancelledError as raised:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            error = raised
        except BaseException as raised:  # noqa: BLE001 - as in ThreadPool
            error = raised
        self._finish(entry, error)


class Window:
    """The events of a lease that are being handled, by partition, in log order."""

    def __init__(
        self, pool: Pool, key_of: Callable[[Event], bytes | None], *, derives: bool
    ) -> None:
        self._pool = pool
        self._key_of = key_of
        self._derives = derives
        self._entries: dict[Partition, deque[Entry]] = {}
        self._tickets: dict[Partition, Ticket] = {}
        self._tails: dict[tuple[str, Hashable], Entry] = {}
        self._unknown: dict[tuple[str, bytes | None], Entry] = {}

    def open_until(self, partition: Partition) -> int:
        """How many events of the partition are in the window."""
        return len(self._entries.get(partition, ()))

    def add(
        self,
        partition: Partition,
        events: Sequence[Event],
        aside: Aside,
        forced: Mapping[int, BaseException] = MappingProxyType({}),
        fate: Callable[[Event, BaseException], str] | None = None,
    ) -> None:
        """Begin to handle events, which follow those that are in the window already.

        What is aside is set aside; ``forced`` names events, by offset, that fail untried.
        """
        entries = self._entries.setdefault(partition, deque())
        ticket = self._tickets.setdefault(partition, Ticket())
        numbers = self._pool.numbers
        ticket.fate = fate
        ready: list[Entry] = []
        hands = Asking()
        # Like a handler, key= is the user's: what it logs is marked, and it is watched.
        with current.of(hands):
            for event in hands.over(events):
                entry = Entry(event, ticket, next(numbers))
                entries.append(entry)
                if self._admit(entry, aside, forced.get(event.offset)):
                    ready.append(entry)
                    if len(ready) == PORTION:
                        self._pool.start(ready)
                        ready = []
        self._pool.start(ready)

    def _admit(self, entry: Entry, aside: Aside, error: BaseException | None) -> bool:
        """Whether an entry may start; if not, it waits for another one, or is over."""
        event = entry.event
        if isinstance(error, PassedOver):
            entry.pass_over(error)
            self._pool.finished.set()
            return False
        try:
            key = self._key_of(event)
            entry.key = key
        # The user's key= failed, SystemExit included: the event's own fault.
        except BaseException as raised:
            if is_from_outside(raised):
                raise
            error, key = reason_of(raised, error), None
            entry.stage, entry.key = "key", UNKNOWN_KEY
        if aside.holds(event, key if self._derives else None) or self._is_unknown(event):
            entry.wait_behind()
            self._pool.finished.set()
        elif error is not None:
            self._pool.fail(entry, error)
        return self._may_start(entry, key)

    def pass_duplicates(self, partition: Partition, events: Sequence[Event]) -> None:
        """Let events pass that are not handled, in their place behind those in the window."""
        entries = self._entries.setdefault(partition, deque())
        ticket = self._tickets.setdefault(partition, Ticket())
        for event in events:
            entry = Entry(event, ticket, next(self._pool.numbers))
            entry.duplicate, entry.key, entry.effects = True, UNKNOWN_KEY, NOTHING
            entry.state = DONE
            entries.append(entry)
        self._pool.finished.set()

    def _is_unknown(self, event: Event) -> bool:
        """Whether it may belong to an event before it whose key nobody could tell (K15)."""
        before = self._unknown.get((event.topic, event.key))
        return before is not None and before.ticket.valid

    def _may_start(self, entry: Entry, key: bytes | None) -> bool:
        """Put an entry behind the one before it of its key."""
        event = entry.event
        if entry.stage == "key":
            if entry.parked and event.key is not None:
                self._unknown[event.topic, event.key] = entry
            return False
        if key is None or entry.skipped or entry.state == FAILED:
            return entry.state == WAITING
        # Per topic, not per partition: a topic that grew has keys in two of them.
        name = (event.topic, key)
        tail = self._tails.get(name)
        self._tails[name] = entry
        if entry.state != WAITING:
            return False
        if tail is None and not entry.ticket.halted:
            return True
        return self._pool.chain(entry, tail)

    def finished(self, partition: Partition) -> int:
        """How long the finished prefix of a partition is; a failed event ends it."""
        length = 0
        for entry in self._entries.get(partition, ()):
            if entry.state != DONE:
                break
            length += 1
        return length

    def failed(self, partition: Partition) -> list[Event]:
        """The events that failed and have to wait."""
        entries = self._entries.get(partition, ())
        return [entry.event for entry in entries if entry.state == FAILED]

    def is_over(self, partition: Partition) -> bool:
        """Whether the finished prefix ends with the last event, or at one that has to wait."""
        for entry in self._entries.get(partition, ()):
            if entry.state != DONE:
                return entry.state == FAILED
        return True

    def blocked(self, partition: Partition) -> bool:
        """Whether the first event of the partition has failed."""
        entries = self._entries.get(partition)
        return bool(entries) and entries[0].state == FAILED  # type: ignore[index]

    def blocked_at(self, partition: Partition) -> bool:
        """Whether the first unfinished event of the partition has failed."""
        for entry in self._entries.get(partition, ()):
            if entry.state != DONE:
                return entry.state == FAILED
        return False

    def take(self, partition: Partition, limit: int) -> tuple[list[Entry], Failure | None]:
        """Remove the finished prefix; with it the failure right behind it, if there is one."""
        entries = self._entries.get(partition, deque())
        taken: list[Entry] = []
        while entries and entries[0].state == DONE and len(taken) < limit:
            taken.append(entries.popleft())
        failure = None
        if entries and entries[0].state == FAILED:
            failure = entries[0].failure
        return taken, failure

    def drop(self, partition: Partition) -> None:
        """Forget a partition, once nothing of it runs any more."""
        ticket = self._tickets.pop(partition, None)
        self._entries.pop(partition, None)
        if ticket is not None:
            ticket.valid = False
            self._await(ticket)
            # One that waits may still have others before it, of partitions that stay.
            self._tails = {
                name: entry
                for name, entry in self._tails.items()
                if entry.ticket.valid or entry.state == WAITING
            }
            self._unknown = {
                name: entry for name, entry in self._unknown.items() if entry.ticket.valid
            }

    def tidy(self) -> None:
        """Forget keys whose last event has finished."""
        if len(self._tails) > 2 * sum(map(len, self._entries.values())) + 1_000:
            self._tails = {
                name: entry
                for name, entry in self._tails.items()
                if entry.state in {WAITING, RUNNING} or entry.parked
            }

    def wait(self, seconds: float) -> None:
        """Until something finishes."""
        self._pool.finished.wait(seconds)
        self._pool.finished.clear()

    @property
    def pending(self) -> int:
        """Events in the window, finished or not."""
        return sum(map(len, self._entries.values()))

    def close(self) -> None:
        """Start nothing more, and wait for what runs: no call may outlive its lease."""
        for ticket in self._tickets.values():
            ticket.valid = False
        for ticket in self._tickets.values():
            self._await(ticket)

    def _await(self, ticket: Ticket) -> None:
        while ticket.running:
            self._pool.finished.wait(0.05)
            self._pool.finished.clear()
