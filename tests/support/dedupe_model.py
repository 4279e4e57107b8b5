"""What dedupe= means, event by event, in a few lines: real runs are compared with it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict


@dataclasses.dataclass(frozen=True)
class Sent:
    """An event of one partition: its offset, its key, the message that it brings, and its luck."""

    offset: int
    key: str
    message: str | None
    bad: bool


@dataclasses.dataclass
class Model:
    """One partition, one event after the other."""

    claims_first: bool = False
    """A message is claimed before anybody asks for its event's key, where the handler acts."""
    applied: list[int] = dataclasses.field(default_factory=list)
    stored: dict[str, int] = dataclasses.field(default_factory=dict)
    duplicates: int = 0
    queues: dict[str, list[Sent]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def arrive(self, event: Sent) -> None:
        """A live event: behind its key, or applied, or known, or the first of a queue."""
        known = self.claims_first and event.message in self.stored
        if (self.queues[event.key] and not known) or not self._try(event, mended=False):
            self.queues[event.key].append(event)

    def release(self, *, mended: bool) -> None:
        """Every queue from its head, up to what fails again."""
        for queue in self.queues.values():
            while queue and self._try(queue[0], mended=mended):
                queue.pop(0)

    def parked(self) -> list[int]:
        """Offsets of what waits."""
        return sorted(event.offset for queue in self.queues.values() for event in queue)

    def _try(self, event: Sent, *, mended: bool) -> bool:
        if event.message is not None and event.message in self.stored:
            self.duplicates += 1
            return True
        if event.bad and not mended:
            return False
        self.applied.append(event.offset)
        if event.message is not None:
            self.stored[event.message] = event.offset
        return True
