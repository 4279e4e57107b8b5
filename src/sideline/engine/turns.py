"""When events that come back have their turn among those that arrive, and what keeps them waiting.

While live events wait, replays get a small part of the time; otherwise all of it. What a replay
waits for (a recoverable error, a rate) stops no live event.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import KafkaException

from sideline.causes import message_of
from sideline.classify import kind_of
from sideline.engine.attempts import SLICE_EVENTS
from sideline.engine.lease import Partition, PartitionReport
from sideline.engine.replaying import Replayer, Step
from sideline.errors import FencedError, GuardrailError, SidelineError, UnreachableError
from sideline.homes.savepoints import DEADLOCK
from sideline.homes.transactions import Unsent
from sideline.ledger.store import Stale

if TYPE_CHECKING:
    from sideline.engine.worker import Worker
    from sideline.events import Delivery
    from sideline.ledger.store import Held
    from sideline.slices import Failure

# The part of a lease's time that replays get while live events wait.
SHARE = 0.15
MOST_CREDIT_SECONDS = 0.5
# A stream that was there so short a time ago has only drawn breath.
BREATH_SECONDS = 0.05
# While no live event waits, slices may be so much larger: fewer round trips for each event.
IDLE_SLICES = 3
# A handler is called for the next slice already while a lease lasts so much longer: most likely
# it is not called for it again by the next one.
ONWARD_SECONDS = 0.5
# Nothing waits here, but operations run: look again after this.
LOOK_SECONDS = 1.0
# What was read is outdated again and again: somebody else is busy there.
STALE_SECONDS = 0.05
SLICE_TOO_LONG = frozenset({"25P03", "25P04", "57014"})

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Wait:
    """How long an operation is left alone in a partition."""

    due: float = 0.0
    """Monotonic time of its next slice."""
    attempts: int = 0
    """How often it met a broken world, one time after the other."""


@dataclasses.dataclass(slots=True)
class Turn:
    """What a lease knows of the replays at home in one partition."""

    due: float = 0.0
    """Monotonic time before which it is left alone."""
    open: bool = True
    """Whether something waits, as far as is known."""
    limit: int = SLICE_EVENTS
    waits: dict[int | None, Wait] | None = None
    """Operations that wait here for their rate or for the world; None: not yet read."""

    def waiting(self, now: float) -> dict[int, float]:
        """When the next slices may begin of those that wait still."""
        waits = self.waits or {}
        return {one: wait.due for one, wait in waits.items() if one is not None and wait.due > now}


class Turns:
    """The replays of one lease."""

    def __init__(
        self,
        worker: Worker,
        wants_more: Callable[[int], int],
        lasts: Callable[[float], bool],
    ) -> None:
        self._worker = worker
        self._pipeline = worker.pipeline
        self._clock = worker.clock
        self._allowance = wants_more
        self._lasts = lasts
        self._turns: dict[Partition, Turn] = {}
        self._credit = 0.0
        self._credit_at = self._clock.monotonic()
        self._live_at = float("-inf")
        self.replayer: Replayer | None = None

    @property
    def wanted(self) -> bool:
        """Whether operations run."""
        return self._worker.pulse.operations

    def pending(self, partition: Partition) -> bool:
        """Whether something waits in the partition, as far as is known."""
        return self.wanted and self._turn(partition).open

    def due(self, partitions: Collection[Partition], *, live: bool) -> list[Partition]:
        """Whose turn it is now."""
        if not self.wanted:
            return []
        now = self._clock.monotonic()
        ready = [one for one in partitions if self._turn(one).due <= now]
        if live:
            self._live_at = now
        if not self._flows(now) or not ready:
            self._credit_at = now
            return ready
        self._credit += (now - self._credit_at) * SHARE
        self._credit = min(self._credit, MOST_CREDIT_SECONDS)
        self._credit_at = now
        # One at a time, the one that has waited longest first.
        return sorted(ready, key=lambda one: self._turn(one).due)[:1] if self._credit > 0 else []

    def _flows(self, now: float) -> bool:
        """Whether live events come, one after the other."""
        return now - self._live_at < BREATH_SECONDS

    def wait_seconds(self, partitions: Collection[Partition]) -> float:
        """How long there is nothing to do for replays."""
        if not self.wanted:
            return float("inf")
        now = self._clock.monotonic()
        due = min((self._turn(one).due for one in partitions), default=now + 1.0)
        if self._flows(now) and self._credit <= 0:
            due = max(due, self._live_at + BREATH_SECONDS)
        return max(0.0, due - now)

    def take(self, held: Held, delivery: Delivery, report: PartitionReport, *, live: bool) -> int:
        """One slice of a replay; how many events were tried. Raises what ends the lease's hold."""
        turn = self._turn(held.partition)
        started = self._clock.monotonic()
        try:
            step = self._step(held, delivery, turn, started, live=live)
        except Stale:
            turn.due = started + STALE_SECONDS
            return 0
        finally:
            if live or self._flows(started):
                self._credit -= self._clock.monotonic() - started
        if step is None:
            return 0
        report.replayed += step.done.applied
        report.failed_again += step.done.failed
        self._after(held, turn, step)
        return step.tried

    def _step(
        self, held: Held, delivery: Delivery, turn: Turn, now: float, *, live: bool
    ) -> Step | None:
        replayer = self.replayer
        assert replayer is not None  # noqa: S101 - for the type checker
        spot = held.partition.topic if held.shared else held.partition
        idle = not live and not self._flows(now)
        most = turn.limit * IDLE_SLICES if idle else turn.limit
        limit = self._allowance(min(most, self._pipeline.slice_size))
        if not limit:
            return None
        try:
            if turn.waits is None:
                # Leases go from process to process; what an operation waits for goes with them.
                turn.waits = {
                    one: Wait(now + seconds, attempts)
                    for one, seconds, attempts in replayer.waits(held)
                }
            return replayer.step(
                held,
                self._worker.asides.get(spot),
                delivery._replace(replayed=True),
                limit=limit,
                excluded=list(turn.waiting(now)),
                onward=idle and self._is_alone(turn) and self._lasts(ONWARD_SECONDS),
            )
        except (FencedError, Stale):
            raise
        except Unsent as error:
            self._back_off(held, turn, replayer.operation, str(error))
        except psycopg.Error as error:
            self._refused(held, turn, replayer, error)
        except (UnreachableError, KafkaException) as error:
            # Bytes that are in a topic cannot be had now: that will heal (R3).
            if replayer.gone:
                raise
            replayer.undo()
            self._back_off(held, turn, replayer.operation, f"Kafka: {error}")
        except SidelineError as error:
            if replayer.gone:
                raise
            self._stop(replayer, error.message)
        return None

    def _is_alone(self, turn: Turn) -> bool:
        """Whether nothing waits elsewhere, as far as is known."""
        return not any(other.open for other in self._turns.values() if other is not turn)

    def _after(self, held: Held, turn: Turn, step: Step) -> None:
        now = self._clock.monotonic()
        if step.operation is None:
            waits = turn.waiting(now)
            turn.waits = {one: wait for one, wait in (turn.waits or {}).items() if one in waits}
            turn.open = bool(waits)
            turn.due = min([now + LOOK_SECONDS, *waits.values()])
            if not waits and self.replayer is not None:
                self.replayer.finish()
            return
        turn.open = True
        turn.due = now
        wait = self._wait(turn, step.operation)
        if step.failure is not None:
            wait.due = now + step.wait_seconds
            self._failed(held, turn, step.operation, step.failure)
            return
        recovered = wait.attempts > 0
        wait.attempts = 0
        if (recovered or step.wait_seconds) and self.replayer is not None:
            wait.due = now + step.wait_seconds
            self.replayer.defer(held, step.operation, step.wait_seconds, 0)
        if recovered and self.replayer is not None:
            self.replayer.note(step.operation, None)
        if step.done.stopped:
            log.warning("operation %d stopped: too much of it failed again", step.operation)

    def _failed(self, held: Held, turn: Turn, operation: int, failure: Failure) -> None:
        told = f"{type(failure.error).__name__}: {message_of(failure.error)}"
        about = f"event {failure.event.id}: {told}"
        if issubclass(type(failure.error), GuardrailError):
            about = f"event {failure.event.id} stays dead: {_with_hint(failure.error)}"
        if self.replayer is not None and self.replayer.stops(failure):
            self.replayer.stop(operation, about)
            log.warning("operation %d stopped: %s", operation, about)
            return
        self._back_off(held, turn, operation, about)

    def _back_off(self, held: Held, turn: Turn, operation: int | None, about: str) -> None:
        """The outside world is broken: wait in place, like live events, and say so."""
        now = self._clock.monotonic()
        wait = self._wait(turn, operation)
        wait.attempts += 1
        seconds = self._pipeline.retry.wait_seconds(wait.attempts, random.random())  # noqa: S311
        wait.due = max(wait.due, now + seconds)
        log.warning("replay in partition %s waits: %s", held.partition, about)
        if operation is None:
            turn.due = wait.due
        elif self.replayer is not None:
            self.replayer.defer(held, operation, wait.due - now, wait.attempts)
            self.replayer.note(operation, about)

    def _wait(self, turn: Turn, operation: int | None) -> Wait:
        if turn.waits is None:
            turn.waits = {}
        return turn.waits.setdefault(operation, Wait())

    def _refused(self, held: Held, turn: Turn, replayer: Replayer, error: psycopg.Error) -> None:
        """PostgreSQL said no to the slice as a whole."""
        if replayer.gone:
            raise error
        replayer.undo()
        if error.sqlstate == DEADLOCK or replayer.judges_early(error):
            return
        if kind_of(error) != "recoverable":
            self._stop(replayer, str(error).strip())
            return
        if error.sqlstate in SLICE_TOO_LONG:
            turn.limit = max(1, turn.limit // 2)
        self._back_off(held, turn, replayer.operation, str(error).strip())

    def _stop(self, replayer: Replayer, note: str) -> None:
        replayer.undo()
        if replayer.operation is not None:
            replayer.stop(replayer.operation, note)
            log.warning("operation %d stopped: %s", replayer.operation, note)

    def _turn(self, partition: Partition) -> Turn:
        turn = self._turns.get(partition)
        if turn is None:
            turn = self._turns[partition] = Turn()
        return turn


def _with_hint(error: BaseException) -> str:
    hint = getattr(error, "hint", None)
    return f"{error} {hint}" if hint else str(error)
