"""What becomes of each event of a slice. Pure: no clock, no socket."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from sideline.effects import Effect, Execute
from sideline.events import Event

# A slice is at most this big, whatever its events weigh.
SLICE_BYTES = 32 * 1024 * 1024
NOTHING: tuple[Effect, ...] = ()
# A handler that acts by itself has nothing to return, but its event is not filtered out.
ACTED: tuple[Effect, ...] = (Execute(""),)


class Failure(NamedTuple):
    """Why an event could not be handled or written."""

    event: Event
    stage: str
    """``handler`` or ``write``."""
    error: BaseException


class Handled(NamedTuple):
    """A run of handled events of one partition, ready to be committed together."""

    start: int
    """Where the partition's progress stands."""
    end: int
    """Where it stands afterwards; offsets have holes, so this is not start + len(events)."""
    events: Sequence[Event]
    effects: Sequence[tuple[Effect, ...]]
    """One entry an event, in log order."""
    skipped: int = 0
    """Events among them that failed and are left out."""
    executes: bool = False
    """Whether SQL of the handler's own is among the effects."""
    keys: Sequence[Hashable] | None = None
    """What ``key=`` said, one entry an event; None: the Kafka keys."""

    def prefix(self, count: int) -> Handled:
        """The first ``count`` events alone."""
        if count >= len(self.events):
            return self
        end = self.events[count].offset
        return self._replace(
            end=end,
            events=self.events[:count],
            effects=self.effects[:count],
            keys=self.keys and self.keys[:count],
        )


class Outcome(NamedTuple):
    """What a slice has come to, once it is committed."""

    end: int
    consumed: int = 0
    applied: int = 0
    filtered: int = 0
    skipped: int = 0
    event_ms: int = -1
    """When the last of them was made."""
    failure: Failure | None = None
    """The event right behind the committed ones, if it is what ended the slice."""


def account(handled: Handled) -> Outcome:
    """Count what committing this slice would do."""
    count = len(handled.events)
    filtered = handled.effects.count(NOTHING) - handled.skipped
    applied = count - filtered - handled.skipped
    last_ms = handled.events[-1].timestamp_ms if count else -1
    return Outcome(handled.end, count, applied, filtered, handled.skipped, last_ms)


def effects_of(result: Any, allowed: tuple[type, ...]) -> tuple[Effect, ...]:  # noqa: ANN401
    """What a handler returned, as a tuple of effects; TypeError for anything else."""
    if result is None:
        return NOTHING
    if isinstance(result, allowed):
        return (result,)  # type: ignore[return-value]  # a cast would be a call an event
    # Text and mappings are iterable too, and certainly a mistake; so is an effect of another sink.
    if isinstance(result, str | bytes | dict | tuple) and not _plain_tuple(result):
        raise TypeError(_misfit(result, allowed))
    if not isinstance(result, Iterable):
        raise TypeError(_misfit(result, allowed))
    effects = tuple(result)
    for effect in effects:
        if not isinstance(effect, allowed):
            raise TypeError(_misfit(effect, allowed))
    return effects


def admit(events: list[Event], next_offset: int, bound: int | None = None) -> list[Event]:
    """Drop what is done already, and what lies beyond the bound.

    Progress, not the reader, says where a slice begins.
    """
    if events and events[0].offset < next_offset:
        events = [event for event in events if event.offset >= next_offset]
    if bound is not None and events and events[-1].offset >= bound:
        events = [event for event in events if event.offset < bound]
    return events


def _plain_tuple(result: object) -> bool:
    # Effects are named tuples: one of another sink must not be taken for a tuple of effects.
    return type(result) is tuple


def _misfit(value: object, allowed: tuple[type, ...]) -> str:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004 - one line
    if not allowed:
        return f"the handler returned {shown}, but this sink takes no effects"
    names = ", ".join(kind.__name__ for kind in allowed)
    return f"the handler returned {shown}, which is not one of {names}"
