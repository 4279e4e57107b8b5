"""Which partitions go where in the next round, and for how long. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from sideline.engine.lease import Lease, Partition, Share

LEASE_SECONDS = 2.0
BUSY_LEASE_SECONDS = 10.0
# Offsets to go: seconds of work for a pipeline that does nothing slow.
FAR_BEHIND = 300_000
# Offsets to go of a partition, up to which the next owner reads on before its take.
WORTH_READING_AHEAD = 5_000
# With nothing to do, a round is only a way to notice that there is something to do.
IDLE_LEASE_SECONDS = 10.0


@dataclasses.dataclass(slots=True)
class State:
    """What the driver knows of a partition."""

    partition: Partition
    next_offset: int
    end: int = -1
    """The end of the log as last seen."""
    bound: int | None = None
    due_at: float = 0.0
    """Seconds since 1970: not leased before."""
    waits_for: Mapping[int, int] | None = None
    """Other partitions of its topic, and the offsets that they have to pass first."""
    trouble: str | None = None

    @property
    def lag(self) -> int:
        """Offsets to go, as far as is known."""
        return max(0, self.end - self.next_offset)

    @property
    def finished(self) -> bool:
        """Whether the bound is reached."""
        return self.bound is not None and self.next_offset >= self.bound


def may_start(state: State, states: Mapping[Partition, State]) -> bool:
    """A partition that a topic gained waits until the older ones have passed their ends then."""
    for number, offset in (state.waits_for or {}).items():
        older = states.get(Partition(state.partition.topic, int(number)))
        if older is not None and older.next_offset < offset:
            return False
    return True


def eligible(states: Mapping[Partition, State], now: float) -> list[State]:
    """The partitions that the next round leases."""
    return [
        state
        for state in states.values()
        if not state.finished and state.due_at <= now and may_start(state, states)
    ]


def next_due(states: Iterable[State]) -> float:
    """When the first of the waiting partitions may be leased again; infinity if none waits."""
    dues = [state.due_at for state in states if not state.finished and state.due_at]
    return min(dues, default=float("inf"))


def pack(states: Iterable[State], slots: int, before: Mapping[Partition, int]) -> list[list[State]]:
    """Spread partitions over slots by lag; equal ones stay where they were.

    A slot is a task of the round, so empty ones are left out.
    """
    loads = [0] * slots
    counts = [0] * slots
    packed: list[list[State]] = [[] for _ in range(slots)]
    for state in sorted(states, key=lambda state: (-state.lag, state.partition)):
        home = before.get(state.partition, -1)
        slot = min(range(slots), key=lambda slot: (loads[slot], counts[slot], slot != home, slot))
        loads[slot] += state.lag
        counts[slot] += 1
        packed[slot].append(state)
    return [group for group in packed if group]


def lease_seconds(states: Iterable[State], *, concurrency: int = 1) -> float:
    """Short while there is work, long while there is none."""
    lag = sum(state.lag for state in states)
    if not lag:
        return IDLE_LEASE_SECONDS
    # At the end of a lease what was read ahead is dropped, and so are the results behind an
    # unfinished one.
    if lag > FAR_BEHIND or concurrency > 1:
        return BUSY_LEASE_SECONDS
    return LEASE_SECONDS


def leases(  # noqa: PLR0913 - what a lease says, by keyword
    groups: Iterable[list[State]],
    *,
    pipeline: str,
    epoch: int,
    number: int,
    ends_at: float,
    rate: float | None,
    secrets: str | None,
    database: str | None = None,
) -> list[Lease]:
    """One lease a slot."""
    packed = list(groups)
    share_of_rate = rate / len(packed) if rate and packed else None
    return [
        Lease(
            pipeline=pipeline,
            epoch=epoch,
            round=number,
            shares=tuple(
                Share(
                    state.partition.topic,
                    state.partition.number,
                    state.bound,
                    ahead=state.lag < WORTH_READING_AHEAD,
                )
                for state in group
            ),
            ends_at=ends_at,
            rate=share_of_rate,
            secrets=secrets,
            database=database,
        )
        for group in packed
    ]
