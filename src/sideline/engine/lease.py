"""What the driver gives a task, and what it gets back. Values only: they travel as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from sideline.causes import Cause, cause_of
from sideline.classify import kind_of
from sideline.errors import SidelineError


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        """As people name it."""
        return f"{self.topic}/{self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One partition in a lease."""

    topic: str
    partition: int
    bound: int | None = None
    """Read no further than this offset (``--once``)."""
    ahead: bool = True
    """Worth reading before it is taken: far behind, what is read then is done by the take."""
    care: bool = False
    """A worker died that held it; see `sideline.engine.care`."""
    delay_ms: int | None = None
    """Of a retry topic: how long its copies wait before it is their turn."""
    relay: bool = False
    """Nothing is read: only what its outbox holds is sent (K23)."""
    replay: bool = False
    """Operations have something to do here: worth a lease even with nothing to read."""
    start: int = 0
    """Of a lease that is fed: what lies before is known to be done."""

    @property
    def of(self) -> Partition:
        """The partition."""
        return Partition(self.topic, self.partition)


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Some partitions, for a short time."""

    pipeline: str
    epoch: int
    round: int
    shares: tuple[Share, ...]
    ends_at: float
    """Seconds since 1970: an attempt that comes late returns at once."""
    rate: float | None = None
    """Events per second at most."""
    secrets: str | None = None
    """A file that only this user can read, with the addresses and passwords of the run."""
    guard: bool = True
    """Whether the flood guard stands."""
    database: str | None = None
    """Host, port and name of the database: a worker that knows another one must not write."""
    prepared: str | None = None
    """A folder with what ``prepare=`` made of its events; see `sideline.engine.prepared`."""
    life: int = 0
    """With care: which of the keeper's workers holds it."""
    fed: bool = False
    """Spark's rows are its events; see `sideline.engine.feed`. Its time begins with its work, and
    again with everything that is done."""
    rows: str | None = None
    """With care: a file of Arrow batches that it is fed from."""

    @property
    def care(self) -> bool:
        """Whether a worker died that held some of it."""
        return any(share.care for share in self.shares)

    def number(self, attempt: int) -> tuple[int, ...]:
        """What the fence compares: whoever comes later has a higher one."""
        number = (self.epoch, self.round, attempt)
        return (*number, self.life) if self.life else number

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Lease:
        """From JSON."""
        return cls(**{**data, "shares": tuple(Share(**share) for share in data["shares"])})


@dataclasses.dataclass(slots=True)
class PartitionReport:
    """What a lease did to one partition."""

    topic: str
    partition: int
    taken: bool = False
    next_offset: int = -1
    high: int = -1
    """The end of the log as last seen."""
    spent: bool = False
    """Of a lease that is fed: every row before the bound is done."""
    consumed: int = 0
    applied: int = 0
    parked: int = 0
    skipped: int = 0
    slices: int = 0
    unsent: int = 0
    """Records in its outbox."""
    replayed: int = 0
    """Events that waited and are applied now."""
    failed_again: int = 0
    trouble: str | None = None
    attempts: int = 0
    retry_in_seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class Report:
    """What a lease did: counters and troubles, never payload."""

    round: int
    host: str = ""
    pid: int = 0
    partitions: list[PartitionReport] = dataclasses.field(default_factory=list)
    fenced: list[str] = dataclasses.field(default_factory=list)
    """Partitions that another owner took away."""
    lost: list[str] = dataclasses.field(default_factory=list)
    """Partitions whose next events Kafka no longer has."""
    failure: dict[str, Any] | None = None
    """What cannot pass by itself (an event, the setup): it stops the pipeline; see `failure_of`."""
    trouble: str | None = None
    """Why the lease could not do its work; it will pass."""
    crash: str | None = None
    """With care: how its last worker died, if none came to the lease's end."""
    handle_seconds: float = 0.0
    slice_seconds: float = 0.0
    """Handling and committing together."""
    idle_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """From JSON."""
        partitions = [PartitionReport(**part) for part in data["partitions"]]
        return cls(**{**data, "partitions": partitions})


def failure_of(
    error: BaseException, *, event: str | None, stage: str, cause: Cause | None = None
) -> dict[str, Any]:
    """What stops a pipeline, as a report says it; ``cause``: if that was told before."""
    cause = cause or cause_of(error, stage)
    return {
        "event": event,
        "stage": stage,
        "kind": kind_of(error),
        "error": type(error).__name__,
        "message": cause.message.strip(),
        "traceback": cause.traceback,
        # Never isinstance(): its __class__ may be a lie.
        "hint": error.hint if issubclass(type(error), SidelineError) else None,  # type: ignore[attr-defined]
    }
