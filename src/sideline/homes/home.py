"""What the engine asks of every home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sideline.errors import UnclearError

if TYPE_CHECKING:
    from sideline.events import Event
    from sideline.ledger.store import Held
    from sideline.slices import Aside, Handled, Outcome


class Home(Protocol):
    """Where slices are committed."""

    def taken(self, held: Held) -> None:
        """A partition is in the hands of a new lease."""

    def resolve(self, held: Held) -> None:
        """Before anything is admitted: know what became of the partition's last slice."""

    def refresh(self, held: Held) -> None:
        """Nothing happens in the partition: keep alive what others know of it."""

    def commit(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """Effects, failures and progress of a slice."""

    def begin_unsure(self, held: Held, events: Sequence[Event], end: int) -> None:
        """At most once: progress first."""

    def finish_unsure(self, held: Held, handled: Handled, aside: Aside) -> Outcome:
        """At most once: then the effects."""


class AlwaysKnown:
    """Of homes whose slices are one transaction of PostgreSQL: what became of them stands there."""

    def taken(self, held: Held) -> None:
        """Nothing is kept of partitions between leases."""

    def resolve(self, held: Held) -> None:
        """Refuse what another home has left open."""
        if held.pending is not None:
            message = (
                f"partition {held.partition} has a slice of sink Kafka() of which it is not known "
                "whether it was published."
            )
            hint = "Run the pipeline once with sink=Kafka(), then change its sink."
            raise UnclearError(message, hint=hint)

    def refresh(self, held: Held) -> None:
        """The ledger forgets nothing."""
