"""Which partitions go where in the next round, and for how long. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from sideline.engine.lease import Lease, Partition, Share

LEASE_SECONDS = 2.0
BUSY_LEASE_SECONDS = 10.0
# Offsets to go: seconds of work for a pipeline that does nothing slow.
FAR_BEHIND = 300_000
# Offsets to go of a partition, up to which the next owner reads on before its take.
WORTH_READING_AHEAD = 5_000
# Nobody is behind: there is nothing to spread anew, and every hand-over is felt.
CALM_LEASE_SECONDS = 10.0
# A new owner makes a transactional producer: half a second, in which nothing is published.
PUBLISHING_LEASE_SECONDS = 60.0


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
    paused: bool = False
    """A person wants it left alone."""
    delay_ms: int | None = None
    """Of a retry topic: how long its copies wait."""
    unsent: int = 0
    """Records in its outbox."""
    replay: bool = False
    """Operations that run have something to do here."""
    care_until: int = -1
    """A worker died with events before this offset: until it is reached, leases go with care."""

    @property
    def lag(self) -> int:
        """Offsets to go, as far as is known."""
        return max(0, self.end - self.next_offset)

    @property
    def careful(self) -> bool:
        """Whether the event that ended a worker may still be before it."""
        return self.next_offset < self.care_until

    @property
    def finished(self) -> bool:
        """Whether the bound is reached."""
        return self.bound is not None and self.next_offset >= self.bound


def go_with_care(states: Iterable[State], *, events: int) -> None:
    """A worker died that held these: the culprit is among the next events of one of them."""
    for state in states:
        state.care_until = max(state.care_until, state.next_offset + events)


def may_start(state: State, states: Mapping[Partition, State]) -> bool:
    """A partition that a topic gained waits until the older ones have passed their ends then."""
    for number, offset in (state.waits_for or {}).items():
        older = states.get(Partition(state.partition.topic, int(number)))
        if older is not None and older.next_offset < offset:
            return False
    return True


def extend_bounds(states: Mapping[Partition, State]) -> None:
    """Let older partitions go as far as those with something to read wait for them.

    That may be beyond their bounds: into transactions that were open when a topic grew. Whoever
    ended before them would leave the new partitions waiting for ever.
    """
    grew = True
    while grew:
        grew = False
        for state in states.values():
            if state.finished:
                continue
            for number, offset in (state.waits_for or {}).items():
                older = states.get(Partition(state.partition.topic, int(number)))
                if older is not None and older.bound is not None and older.bound < offset:
                    older.bound = offset
                    grew = True


def eligible(states: Mapping[Partition, State], now: float) -> list[State]:
    """The partitions that the next round leases.

    One that backs off is leased all the same while its outbox holds something.
    """
    return [
        state
        for state in states.values()
        if not state.paused
        and may_start(state, states)
        # What comes back waits for nothing that the next live event waits for.
        and (state.replay or (not state.finished and (state.due_at <= now or state.unsent)))
    ]


def relaying(states: Mapping[Partition, State]) -> list[State]:
    """The partitions that are leased only for their outbox: somebody always sends it (K23)."""
    return [
        state
        for state in states.values()
        if state.unsent
        and (state.paused or (state.finished and not state.replay) or not may_start(state, states))
    ]


def is_done(state: State, now: float) -> bool:
    """Whether nothing is left of what there was when the run began (``--once``).

    Copies whose turn has not come yet are not waited for.
    """
    waits = state.delay_ms is not None and state.due_at > now
    return (state.finished or waits) and not state.unsent


def held_up(states: Mapping[Partition, State]) -> list[State]:
    """The partitions that will not reach their bounds: paused, or waiting for one that is."""
    found: dict[Partition, State] = {}
    before = -1
    while len(found) > before:
        before = len(found)
        for partition, state in states.items():
            if not state.finished and (state.paused or _waits_for_one_of(found, state, states)):
                found[partition] = state
    return sorted(found.values(), key=lambda state: state.partition)


def _waits_for_one_of(
    found: Mapping[Partition, State], state: State, states: Mapping[Partition, State]
) -> bool:
    for number, offset in (state.waits_for or {}).items():
        older = Partition(state.partition.topic, int(number))
        if older in found and states[older].next_offset < offset:
            return True
    return False


def next_due(states: Iterable[State]) -> float:
    """When the first of the waiting partitions may be leased again; infinity if none waits."""
    dues = [
        state.due_at for state in states if state.due_at and not (state.finished or state.paused)
    ]
    return min(dues, default=float("inf"))


def pack(states: Iterable[State], slots: int, before: Mapping[Partition, int]) -> list[list[State]]:
    """Spread partitions over slots by lag; equal ones stay where they were.

    Retry topics go along with the partitions that their copies came from: both change the same
    books, and in one slot nobody waits for the other. A slot is a task of the round, so empty ones
    are left out.
    """
    loads = [0] * slots
    counts = [0] * slots
    packed: list[list[State]] = [[] for _ in range(slots)]
    origins: dict[int, int] = {}
    for state in sorted(
        states, key=lambda state: (state.delay_ms is not None, -state.lag, state.partition)
    ):
        home = before.get(state.partition, -1)
        slot = min(range(slots), key=lambda slot: (loads[slot], counts[slot], slot != home, slot))
        if state.delay_ms is None:
            origins.setdefault(state.partition.number, slot)
        else:
            slot = origins.get(state.partition.number, slot)
        loads[slot] += state.lag
        counts[slot] += 1
        packed[slot].append(state)
    return [group for group in packed if group]


def behind(states: Iterable[State]) -> bool:
    """Whether some have more to do than to follow."""
    return any(state.lag >= WORTH_READING_AHEAD for state in states)


def lease_seconds(
    states: Collection[State],
    *,
    concurrency: int = 1,
    publishes: bool = False,
    due_in_seconds: float = float("inf"),
) -> float:
    """Short while some are behind, long while all follow.

    ``due_in_seconds``: when the first partition that waits may be leased again.
    """
    if publishes and not any(state.careful for state in states):
        return min(PUBLISHING_LEASE_SECONDS, max(CALM_LEASE_SECONDS, due_in_seconds))
    if not behind(states):
        return CALM_LEASE_SECONDS
    # At the end of a lease what was read ahead is dropped, and so are the results behind an
    # unfinished one.
    # With care it takes seconds until a worker works, and some of them will die.
    if (
        sum(state.lag for state in states) > FAR_BEHIND
        or concurrency > 1
        or any(state.careful for state in states)
    ):
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
    guard: bool = True,
    relay: Collection[Partition] = (),
) -> list[Lease]:
    """One lease a slot; of ``relay`` only the outbox is sent."""
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
                    ahead=state.lag < WORTH_READING_AHEAD and not state.finished,
                    care=state.careful,
                    delay_ms=state.delay_ms,
                    relay=state.partition in relay,
                    replay=state.replay,
                )
                for state in group
            ),
            ends_at=ends_at,
            rate=share_of_rate,
            secrets=secrets,
            database=database,
            guard=guard,
        )
        for group in packed
    ]
