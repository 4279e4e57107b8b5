"""What the ledger must say, one event after the other, in memory: no slices, no crashes (pure)."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import NamedTuple

# What becomes of an event whose key is not aside.
APPLIED, FILTERED, PARKED = "applied", "filtered", "parked"
KINDS = {
    "fine": APPLIED,
    "nothing": FILTERED,
    "fail": PARKED,
    "refused": PARKED,
    "unwritable": PARKED,
    "undecodable": PARKED,
    # Fails, to heal by itself, while the outside world is broken.
    "outside": APPLIED,
}

Name = tuple[bool, bytes]
"""A key: whether ``key=`` said it, and its bytes."""


class Arrived(NamedTuple):
    """An event, as the producer knows it."""

    partition: int
    offset: int
    key: bytes | None
    said: str | None
    """What ``key=`` would say."""
    kind: str

    @property
    def at(self) -> tuple[int, int]:
        """Where it stands."""
        return self.partition, self.offset


@dataclasses.dataclass(eq=False)
class Queue:
    """A tail of waiting events."""

    home: int
    keys: set[Name]


@dataclasses.dataclass(eq=False)
class Waiting:
    """An event that is aside."""

    event: Arrived
    failed: bool
    queue: Queue | None


class KeyElsewhereError(Exception):
    """A key steps aside here that is aside in another partition."""


class Model:
    """The whole state, as simple as it can be."""

    def __init__(self, partitions: int, *, derives: bool) -> None:
        self.derives = derives
        self.shared = derives
        self.logs: list[list[Arrived]] = [[] for _ in range(partitions)]
        self.next = [0] * partitions
        self.queues: list[Queue] = []
        self.parked: list[Waiting] = []
        self.effects: list[Arrived] = []
        self.counts: list[Counter[str]] = [Counter() for _ in range(partitions)]

    def open(self, partition: int) -> list[Arrived]:
        """What is still to be done."""
        return [event for event in self.logs[partition] if event.offset >= self.next[partition]]

    def own(self, event: Arrived) -> Name | None:
        """What an event's order belongs to."""
        if not self.derives or event.kind == "undecodable":
            return None if event.key is None else (False, event.key)
        return None if event.said is None else (True, event.said.encode())

    def commit(self, partition: int, end: int) -> None:
        """A slice as far as ``end`` is committed."""
        before = copy.deepcopy(self.__dict__)
        try:
            self._pass(partition, end)
        except KeyElsewhereError:
            self.__dict__.update(before)
            self.shared = True
            self._pass(partition, end)

    def meets_a_key_elsewhere(self, partition: int, end: int) -> bool:
        """Whether a slice that ends there finds a key aside in another partition."""
        tried = copy.deepcopy(self)
        try:
            tried._pass(partition, end)
        except KeyElsewhereError:
            return True
        return False

    def resolve(self, chosen: list[Waiting]) -> bool:
        """A replay has applied these; whether their key rejoins."""
        for waiting in chosen:
            self.parked.remove(waiting)
            self.effects.append(waiting.event)
            self.counts[waiting.event.partition][APPLIED] += 1
            self.counts[waiting.event.partition][PARKED] -= 1
        queue = chosen[0].queue
        if queue is None or any(waiting.queue is queue for waiting in self.parked):
            return False
        self.queues.remove(queue)
        return True

    def tail(self, queue: Queue) -> list[Waiting]:
        """Who waits in a queue, in order."""
        return [waiting for waiting in self.parked if waiting.queue is queue]

    def _pass(self, partition: int, end: int) -> None:
        for event in self.open(partition):
            if event.offset < end:
                self._meet(event)
        self.next[partition] = end

    def _meet(self, event: Arrived) -> None:
        self.counts[event.partition]["consumed"] += 1
        own = self.own(event)
        record = self._queue_of(event, None if event.key is None else (False, event.key))
        mine = self._queue_of(event, own)
        if event.kind == "undecodable" and self.derives:
            # Nobody can tell that it follows: it fails in its record's queue.
            self._park(event, failed=True, queue=record or self._found(event, own))
        elif record is not None or mine is not None:
            self._park(event, failed=False, queue=self._join(mine, record, own))
        elif KINDS[event.kind] == PARKED:
            self._park(event, failed=True, queue=self._found(event, own))
        else:
            self.counts[event.partition][KINDS[event.kind]] += 1
            if KINDS[event.kind] == APPLIED:
                self.effects.append(event)

    def _queue_of(self, event: Arrived, name: Name | None) -> Queue | None:
        for queue in self.queues:
            if name in queue.keys and (self.shared or queue.home == event.partition):
                return queue
        return None

    def _found(self, event: Arrived, name: Name | None) -> Queue | None:
        if name is None:
            return None
        if any(name in queue.keys for queue in self.queues):
            raise KeyElsewhereError
        self.queues.append(Queue(event.partition, {name}))
        return self.queues[-1]

    def _join(self, mine: Queue | None, record: Queue | None, own: Name | None) -> Queue:
        """The queue that an event with two keys waits in: the older one of theirs."""
        first, *rest = sorted(filter(None, (mine, record)), key=self.queues.index)
        for other in rest:
            if other is not first:
                first.keys |= other.keys
                self.queues.remove(other)
                for waiting in self.tail(other):
                    waiting.queue = first
        if own is not None:
            first.keys.add(own)
        return first

    def _park(self, event: Arrived, *, failed: bool, queue: Queue | None) -> None:
        self.counts[event.partition][PARKED] += 1
        self.parked.append(Waiting(event, failed, queue))
