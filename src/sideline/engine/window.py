"""Events of different keys side by side, events of one key in order (K11).

The finished prefix of a partition is committed while later handlers still run; what is
finished beyond it stays here, and is dropped when the lease ends.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from sideline.slices import NOTHING, Failure, effects_of

if TYPE_CHECKING:
    from sideline.effects import Effect
    from sideline.engine.lease import Partition
    from sideline.events import Event


class Entry:
    """An event on its way through the pool."""

    __slots__ = ("effects", "error", "event", "follower", "key", "skipped", "state", "ticket")

    def __init__(self, event: Event, ticket: Ticket) -> None:
        self.event = event
        self.ticket = ticket
        self.key: Hashable = None
        self.state = WAITING
        self.effects: tuple[Effect, ...] = ()
        self.error: BaseException | None = None
        self.skipped = False
        self.follower: Entry | None = None


class Ticket:
    """Valid as long as the window wants the results of a partition."""

    __slots__ = ("running", "valid")

    def __init__(self) -> None:
        self.valid = True
        self.running = 0


WAITING, RUNNING, DONE, FAILED, DROPPED = range(5)


class Pool:
    """Runs entries, each followed by the next one of its key.

    Threads for ordinary handlers, one event loop for coroutines; kept as long as the process.
    """

    def __init__(
        self,
        handler: Callable[[Event], Any],
        size: int,
        allowed: tuple[type, ...],
        skips: Callable[[BaseException], bool],
    ) -> None:
        self._handler = handler
        self._allowed = allowed
        self._skips = skips
        self._lock = threading.Lock()
        self.finished = threading.Event()
        """Something finished since it was last cleared."""
        self._begin(size)

    def chain(self, entry: Entry, tail: Entry) -> bool:
        """Whether the entry may start; if not, it follows the one before it of its key.

        Behind one that failed it never starts.
        """
        with self._lock:
            if tail.state in {WAITING, RUNNING}:
                tail.follower = entry
                return False
            return not (tail.state == FAILED and tail.ticket.valid)

    def start(self, entries: list[Entry]) -> None:
        """Run entries as soon as there is a place for them."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads."""
        raise NotImplementedError

    def _begin(self, size: int) -> None:
        raise NotImplementedError

    def _put(self, entry: Entry) -> None:
        raise NotImplementedError

    def _begin_entry(self, entry: Entry) -> bool:
        with self._lock:
            if not entry.ticket.valid:
                entry.state = DROPPED
                return False
            entry.state = RUNNING
            entry.ticket.running += 1
            return True

    def _finish(self, entry: Entry, error: BaseException | None) -> None:
        """Note the result, and go on with the key's next entry if there is one."""
        if error is not None and self._skips(error):
            entry.skipped = True
            entry.effects = NOTHING
            error = None
        with self._lock:
            entry.error = error
            entry.state = DONE if error is None else FAILED
            entry.ticket.running -= 1
        self.finished.set()
        self._follow(entry)

    def _follow(self, entry: Entry) -> None:
        with self._lock:
            follower, entry.follower = entry.follower, None
            if entry.state == FAILED and entry.ticket.valid:
                return
        if follower is not None:
            # To the end of the queue: a hot key must not keep a place for itself.
            self._put(follower)


class ThreadPool(Pool):
    """For handlers that block."""

    def _begin(self, size: int) -> None:
        self._todo: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"sideline-handler-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._todo.put(None)

    def start(self, entries: list[Entry]) -> None:
        """Run entries as soon as there is a place for them."""
        for entry in entries:
            self._todo.put(entry)

    def _put(self, entry: Entry) -> None:
        self._todo.put(entry)

    def _work(self) -> None:
        while (entry := self._todo.get()) is not None:
            if not self._begin_entry(entry):
                self._follow(entry)
                continue
            error: BaseException | None = None
            try:
                entry.effects = effects_of(self._handler(entry.event), self._allowed)
            # Whatever a handler raises, SystemExit included, is a failure of its event alone.
            except BaseException as raised:  # noqa: BLE001
                error = raised
            self._finish(entry, error)


class LoopPool(Pool):
    """For coroutines: one event loop in one thread."""

    def _begin(self, size: int) -> None:
        self._todo: deque[Entry] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._loop = asyncio.new_event_loop()
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

    def _put(self, entry: Entry) -> None:
        # Called by what just finished, inside the loop.
        self._queue([entry])

    def _queue(self, entries: list[Entry]) -> None:
        self._todo.extend(entries)
        for _ in range(min(len(entries), len(self._idle))):
            self._idle.pop().set_result(None)

    async def _work(self) -> None:
        while True:
            while not self._todo:
                idle = self._loop.create_future()
                self._idle.append(idle)
                await idle
            entry = self._todo.popleft()
            if self._begin_entry(entry):
                await self._run(entry)
            else:
                self._follow(entry)

    async def _run(self, entry: Entry) -> None:
        error: BaseException | None = None
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

    def __init__(self, pool: Pool, key_of: Callable[[Event], Hashable]) -> None:
        self._pool = pool
        self._key_of = key_of
        self._entries: dict[Partition, deque[Entry]] = {}
        self._tickets: dict[Partition, Ticket] = {}
        self._tails: dict[tuple[str, Hashable], Entry] = {}

    def open_until(self, partition: Partition) -> int:
        """How many events of the partition are in the window."""
        return len(self._entries.get(partition, ()))

    def add(self, partition: Partition, events: Sequence[Event]) -> None:
        """Begin to handle events, which follow those that are in the window already."""
        entries = self._entries.setdefault(partition, deque())
        ticket = self._tickets.setdefault(partition, Ticket())
        ready: list[Entry] = []
        for event in events:
            entry = Entry(event, ticket)
            entries.append(entry)
            try:
                key = self._key_of(event)
                hash(key)
                entry.key = key
            # The user's key= failed: the event's own fault, found when its turn comes.
            except Exception as error:  # noqa: BLE001
                entry.error = error
                entry.state = FAILED
                self._pool.finished.set()
                continue
            if key is None:
                ready.append(entry)
                continue
            # Per topic, not per partition: a topic that grew has keys in two of them.
            name = (partition.topic, key)
            tail = self._tails.get(name)
            self._tails[name] = entry
            if tail is None or self._pool.chain(entry, tail):
                ready.append(entry)
        self._pool.start(ready)

    def finished(self, partition: Partition) -> int:
        """How long the finished prefix of a partition is; a failed event ends it."""
        count = 0
        for entry in self._entries.get(partition, ()):
            if entry.state != DONE:
                break
            count += 1
        return count

    def blocked(self, partition: Partition) -> bool:
        """Whether the first event of the partition has failed."""
        entries = self._entries.get(partition)
        return bool(entries) and entries[0].state == FAILED  # type: ignore[index]

    def take(self, partition: Partition, limit: int) -> tuple[list[Entry], Failure | None]:
        """Remove the finished prefix; with it the failure right behind it, if there is one."""
        entries = self._entries.get(partition, deque())
        taken: list[Entry] = []
        while entries and entries[0].state == DONE and len(taken) < limit:
            taken.append(entries.popleft())
        failure = None
        if entries and entries[0].state == FAILED:
            error = entries[0].error or RuntimeError("the handler failed without an error")
            failure = Failure(entries[0].event, "handler", error)
        return taken, failure

    def drop(self, partition: Partition) -> None:
        """Forget a partition, once nothing of it runs any more."""
        ticket = self._tickets.pop(partition, None)
        self._entries.pop(partition, None)
        if ticket is not None:
            ticket.valid = False
            self._await(ticket)
            self._tails = {name: entry for name, entry in self._tails.items() if entry.ticket.valid}

    def tidy(self) -> None:
        """Forget keys whose last event has finished."""
        if len(self._tails) > 2 * sum(map(len, self._entries.values())) + 1_000:
            self._tails = {
                name: entry
                for name, entry in self._tails.items()
                if entry.state in {WAITING, RUNNING}
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
